"""Which identities this machine's models have had, so that ``tierkv explain`` can say in what two of them differ.

Digests and numbers only, no paths; a tenant's salt as a digest. Losing the file costs an explanation, nothing else.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from tierkv.identity.blocks import BlockKey
from tierkv.identity.kept import keep_json
from tierkv.identity.model import ModelIdentity

MAX_IDENTITIES = 512
CONFIG_CHANGED = "config, and perhaps weights"
_VERSION = 1
# Parts whose values say something to a person; of the others it is said that they differ.
_TELLING = ("engine_build", "dtype", "kv_bits", "kv_group_size", "quantized_kv_start", "max_kv_size")
_TELLING += ("shard_rank", "shard_world", "layer_start", "layer_end")


class Identities:
    """The last 512 identities by their root, on disk. Read once; written whole whenever there is a new one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _read(path)

    def learn(self, root: BlockKey, identity: ModelIdentity) -> None:
        """The identity of ``root`` is known, also to later agents of this machine."""
        name = root.hex()
        if name in self._known:
            return
        tenant = blake3(identity.tenant.encode()).hexdigest()[:16] if identity.tenant else ""
        self._known = {**_read(self._path), **self._known, name: replace(identity, tenant=tenant)}
        while len(self._known) > MAX_IDENTITIES:
            del self._known[next(iter(self._known))]
        self._write()

    def differing(self, root: BlockKey, other: BlockKey) -> tuple[str, ...]:
        """The parts in which two identities differ, with values where those say something; () if one is unknown."""
        mine, its = self._known.get(root.hex()), self._known.get(other.hex())
        if mine is None or its is None:
            return ()
        parts = mine.differing_parts(its)
        if "weights" in parts and "config" in parts:
            # The digest of a model's files covers its config.json too.
            parts = (CONFIG_CHANGED, *(part for part in parts if part not in ("weights", "config")))
        return tuple(_told(part, mine, its) for part in parts)

    def _write(self) -> None:
        rows = {name: asdict(identity) for name, identity in self._known.items()}
        with contextlib.suppress(OSError):
            keep_json(self._path, {"version": _VERSION, "identities": rows})


def _told(part: str, mine: ModelIdentity, its: ModelIdentity) -> str:
    if part not in _TELLING:
        return part
    here, there = getattr(mine, part), getattr(its, part)
    return f"{part} ({there or 'none'} there, {here or 'none'} here)"


def _read(path: Path) -> dict[str, ModelIdentity]:
    try:
        data = json.loads(path.read_text())
        rows = cast("dict[str, object]", data["identities"] if data["version"] == _VERSION else {})
        return {str(name): identity for name, row in rows.items() if (identity := _identity(row)) is not None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _identity(row: object) -> ModelIdentity | None:
    if not isinstance(row, Mapping):
        return None
    values: dict[str, Any] = {}
    for field in fields(ModelIdentity):
        value = cast("Mapping[str, object]", row).get(field.name)
        if not isinstance(value, int if field.type == "int" else str):
            return None
        values[field.name] = value
    return ModelIdentity(**values)
