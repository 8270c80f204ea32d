"""Which layers of which models have left their tier's codec, kept across restarts of the agent.

One small file for all inference agents of a user: ``{"schema": "tierkv.raised-layers/1", "models": {root: {layer:
codec}}}``. It is rebuildable: without it the samples find the same layers again, so nothing here ever fails.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from tierkv.codec.registry import Codec, codec_named
from tierkv.identity.blocks import KEY_BYTES, BlockKey
from tierkv.identity.kept import keep_json

_log = logging.getLogger(__name__)

SCHEMA = "tierkv.raised-layers/1"
MAX_MODELS = 64
MAX_LAYERS = 8192
_MAX_FILE_BYTES = 4 << 20

Layers = dict[int, Codec]


class RaisedLayers:
    """``path``: the file; None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def load(self) -> dict[BlockKey, Layers]:
        """What the file says, as far as it can be true; models kept last come last."""
        if self._path is None:
            return {}
        try:
            with self._path.open("rb") as file:
                text = file.read(_MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            _log.warning("%s cannot be read: %s", self._path, error)
            return {}
        try:
            document: object = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict) or cast("dict[str, object]", document).get("schema") != SCHEMA:
            _log.warning("%s is not a list of layers and counts for nothing", self._path)
            return {}
        found: dict[BlockKey, Layers] = {}
        for name, layers in _items(cast("dict[str, object]", document).get("models")):
            root, kept = _root(name), dict(_layers(_items(layers)))
            if root is not None and kept:
                found[root] = kept
        return found

    def keep(self, root: BlockKey, layers: Layers) -> None:
        """The file says that ``layers`` of this model are raised; what it says of others stays, up to 64 models."""
        if self._path is None:
            return
        models = self.load()
        models.pop(root, None)
        models[root] = layers
        kept = list(models.items())[-MAX_MODELS:]
        document = {
            "schema": SCHEMA,
            "models": {key.hex(): {str(n): codec.name for n, codec in each.items()} for key, each in kept},
        }
        try:
            keep_json(self._path, document)
        except OSError as error:
            _log.warning("%s cannot be written, a restart forgets which layers were raised: %s", self._path, error)


def _items(value: object) -> Iterable[tuple[str, object]]:
    return cast("Mapping[str, object]", value).items() if isinstance(value, dict) else ()


def _root(name: str) -> BlockKey | None:
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return BlockKey(key) if len(key) == KEY_BYTES else None


def _layers(items: Iterable[tuple[str, object]]) -> Iterable[tuple[int, Codec]]:
    for number, name in items:
        if number.isascii() and number.isdigit() and int(number) < MAX_LAYERS and isinstance(name, str):
            try:
                yield int(number), codec_named(name)
            except ValueError:
                continue
