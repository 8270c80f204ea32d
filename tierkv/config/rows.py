"""Every value in force as one list, for ``tierkv config show`` and the editor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tierkv.config.keys import Key, keys
from tierkv.config.load import DEFAULT, Loaded, Origin
from tierkv.config.model import Config


@dataclass(frozen=True, slots=True)
class Row:
    """One value in force; ``path`` has an index where several tables share a name."""

    path: str
    key: Key
    value: object
    origin: Origin


def rows(loaded: Loaded) -> list[Row]:
    """Every key in the order of the key table with its value and where it came from."""
    found: list[Row] = []
    for key in keys():
        head, marker, rest = key.path.partition("[].")
        value = _at(loaded.config, head)
        if marker:
            peers = value or ()
            for number, peer in enumerate(peers):
                indexed, alone = f"{head}[{number}].{rest}", f"{head}.{rest}"
                origin = loaded.origins.get(indexed) or (loaded.origin(alone) if len(peers) == 1 else DEFAULT)
                found.append(Row(alone if len(peers) == 1 else indexed, key, getattr(peer, rest), origin))
        elif key.kind not in ("peers", "peer") and _at(loaded.config, head.rpartition(".")[0]) is not None:
            found.append(Row(head, key, list(value) if isinstance(value, tuple) else value, loaded.origin(head)))
    return found


def _at(config: Config, path: str) -> Any:
    node: Any = config
    for part in path.split("."):
        node = getattr(node, part, None)
    return node
