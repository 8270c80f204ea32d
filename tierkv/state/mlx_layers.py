"""One small adapter for each cache class of mlx-lm: what it holds, and how to make it again.

docs/cache-classes.md has the table of them. Adapters look at attributes only, never at ``state``, ``meta_state`` or
``from_state``: those changed between mlx-lm 0.31 and 0.32 and the attributes did not. Objects are made with the
class's own constructor, so that every attribute which a version has is there.

To carry another class, write an adapter and add it to ``_ADAPTERS``.
"""

# ruff: noqa: ARG002 - a small class takes from the shared interface what it needs and leaves the rest

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from tierkv.errors import UnsupportedState
from tierkv.state.layout import LayerKind, LayerLayout
from tierkv.state.mlx_adapter import (
    TOKEN_AXIS,
    AttentionAdapter,
    CacheAdapter,
    Scalars,
    Slots,
    padded,
    plain_int,
    scalar,
)
from tierkv.state.mlx_deepseek import DEEPSEEK_MODULE, DeepseekV4CacheAdapter

CACHE_MODULE = "mlx_lm.models.cache"
NO_CACHE = type(None).__name__
# Buffers grow in steps of 256 rows; more room than this behind the rows is no buffer of mlx-lm's.
MAX_PADDING = 4096


class KVCacheAdapter(AttentionAdapter):
    """keys, values: [1, n_kv_heads, position, head_dim]; what lies behind the offset is padding or trimmed.

    For KVCache and ConcatenateKVCache, which keep the same three attributes.
    """

    kind = "rows"

    def build(self, cls: type, layer: LayerLayout, arrays: Sequence[mx.array | None], scalars: Scalars) -> Any:
        cache = cls()
        keys, values = arrays
        if keys is not None:
            cache.keys, cache.values, cache.offset = keys, values, keys.shape[TOKEN_AXIS]
        return cache


class QuantizedKVCacheAdapter(AttentionAdapter):
    """keys and values, each as packed words, scales and biases.

    Words: [1, n_kv_heads, position, head_dim * bits / 32] uint32; scales: [1, H, position, head_dim / group].
    """

    kind = "rows"
    _PARTS = ("w", "scales", "biases")

    def buffers(self, cache: Any) -> Slots:
        empty = (None, None, None)
        return [
            (f"{name}.{part}", array)
            for name, parts in (("keys", cache.keys), ("values", cache.values))
            for part, array in zip(self._PARTS, parts or empty, strict=True)
        ]

    def params(self, cache: Any) -> tuple[tuple[str, int], ...]:
        return (("group_size", plain_int(cache.group_size, "group_size")), ("bits", plain_int(cache.bits, "bits")))

    def build(self, cls: type, layer: LayerLayout, arrays: Sequence[mx.array | None], scalars: Scalars) -> Any:
        cache = cls(**dict(layer.params))
        if arrays[0] is not None:
            cache.keys, cache.values, cache.offset = tuple(arrays[:3]), tuple(arrays[3:]), arrays[0].shape[TOKEN_AXIS]
        return cache


class RotatingKVCacheAdapter(AttentionAdapter):
    """The ring in its own order, keys and values [1, n_kv_heads, n, head_dim], with its offset and write index.

    Just after a prefill n may exceed max_size. Padding behind the last row is cut while nothing has wrapped.
    """

    kind = "window"

    def length(self, cache: Any) -> int | None:
        unwrapped = cache.keys is not None and cache.offset == cache._idx < cache.max_size
        return cache.offset if unwrapped else None

    def params(self, cache: Any) -> tuple[tuple[str, int], ...]:
        return (("keep", plain_int(cache.keep, "keep")), ("max_size", plain_int(cache.max_size, "max_size")))

    def scalars(self, cache: Any) -> dict[str, int]:
        return {"offset": plain_int(cache.offset, "offset"), "_idx": plain_int(cache._idx, "_idx")}

    def build(self, cls: type, layer: LayerLayout, arrays: Sequence[mx.array | None], scalars: Scalars) -> Any:
        cache = cls(**dict(layer.params))
        cache.keys, cache.values = arrays
        cache.offset, cache._idx = scalar(scalars, "offset"), scalar(scalars, "_idx")
        rows = 0 if cache.keys is None else cache.keys.shape[TOKEN_AXIS]
        if not 0 <= cache._idx <= rows or cache.offset < cache._idx:
            raise UnsupportedState("bad_scalars", f"a ring of {rows} rows cannot stand at {dict(scalars)}")
        return cache


class ChunkedRowsAdapter(KVCacheAdapter):
    """A ChunkedKVCache that has dropped nothing: the rows of all tokens, as a KVCache has them."""

    def params(self, cache: Any) -> tuple[tuple[str, int], ...]:
        return (("chunk_size", plain_int(cache.chunk_size, "chunk_size")),)

    def build(self, cls: type, layer: LayerLayout, arrays: Sequence[mx.array | None], scalars: Scalars) -> Any:
        cache: Any = cls(**dict(layer.params))
        keys, values = arrays
        if keys is not None:
            rows = keys.shape[TOKEN_AXIS]
            # mlx-lm 0.31 drops rows by the length of the buffer, which it grows in whole steps.
            room = -(-rows // cache.step) * cache.step
            cache.keys, cache.values, cache.offset = padded(keys, room), padded(values, room), rows
        return cache


class ChunkedWindowAdapter(AttentionAdapter):
    """A ChunkedKVCache that has dropped rows before ``start_position``: what is left, whole, at its position.

    keys, values: [1, n_kv_heads, offset - start_position, head_dim].
    """

    kind = "window"

    def length(self, cache: Any) -> int:
        return cache.offset - cache.start_position

    def params(self, cache: Any) -> tuple[tuple[str, int], ...]:
        return (("chunk_size", plain_int(cache.chunk_size, "chunk_size")),)

    def scalars(self, cache: Any) -> dict[str, int]:
        said = {name: plain_int(getattr(cache, name), name) for name in ("offset", "start_position")}
        return {**said, "room": self.room(cache)}

    def check(self, cache: Any) -> None:
        if not chunk_is_whole(cache):
            raise UnsupportedState("rows_dropped", "a chunk whose first rows are gone, as after a trim")

    def build(self, cls: type, layer: LayerLayout, arrays: Sequence[mx.array | None], scalars: Scalars) -> Any:
        cache: Any = cls(**dict(layer.params))
        keys, values = arrays
        cache.offset, cache.start_position = scalar(scalars, "offset"), scalar(scalars, "start_position")
        room = scalar(scalars, "room")
        rows = 0 if keys is None else keys.shape[TOKEN_AXIS]
        fits = 0 < cache.start_position <= cache.offset and rows <= room <= rows + MAX_PADDING
        if keys is None or values is None or not fits or rows != cache.offset - cache.start_position:
            raise UnsupportedState("bad_scalars", f"a chunk of {rows} rows cannot stand at {dict(scalars)}")
        cache.keys, cache.values = padded(keys, room), padded(values, room)
        return cache


class ArraysCacheAdapter(CacheAdapter):
    """Recurrent state: one array a slot, named by its index, any shape with the batch first; a slot may be empty."""

    kind = "state"

    def arrays(self, cache: Any) -> Slots:
        return [(str(index), array) for index, array in enumerate(cache.cache)]

    def check(self, cache: Any) -> None:
        if getattr(cache, "left_padding", None) is not None or getattr(cache, "lengths", None) is not None:
            raise UnsupportedState("mid_batch", "recurrent state in the middle of a padded batch")

    def build(self, cls: type, layer: LayerLayout, arrays: Sequence[mx.array | None], scalars: Scalars) -> Any:
        cache: Any = cls(len(arrays)) if cls.__name__ == "ArraysCache" else cls()
        cache.cache = list(arrays)
        return cache


class NoCacheAdapter(CacheAdapter):
    """A layer without a cache (None in the list): nothing travels but its place. Its kind is its neighbours'."""

    kind = "rows"

    def arrays(self, cache: Any) -> Slots:
        return []

    def build(self, cls: type, layer: LayerLayout, arrays: Sequence[mx.array | None], scalars: Scalars) -> Any:
        return None


_ARRAYS = ArraysCacheAdapter()
_ROWS = KVCacheAdapter()
_CHUNKED = {"rows": ChunkedRowsAdapter(), "window": ChunkedWindowAdapter()}
_ADAPTERS: dict[str, CacheAdapter] = {
    "KVCache": _ROWS,
    "ConcatenateKVCache": _ROWS,
    "QuantizedKVCache": QuantizedKVCacheAdapter(),
    "RotatingKVCache": RotatingKVCacheAdapter(),
    "ChunkedKVCache": _CHUNKED["rows"],
    "ArraysCache": _ARRAYS,
    "MambaCache": _ARRAYS,  # until mlx-lm 0.28
    "DeepseekV4Cache": DeepseekV4CacheAdapter(),
    NO_CACHE: NoCacheAdapter(),
}
_MODULES = {"DeepseekV4Cache": DEEPSEEK_MODULE, NO_CACHE: type(None).__module__}


def adapter_of(cache: Any) -> CacheAdapter:
    """The adapter of a live cache of one layer, or of one part of a CacheList.

    Raises UnsupportedState for every class that is not exactly one of mlx-lm's own that an adapter knows.
    """
    cls = type(cache)
    own = cls.__module__ == _MODULES.get(cls.__name__, CACHE_MODULE)
    found = _ADAPTERS.get(cls.__name__) if own else None
    if found is None:
        batched = cls.__name__.startswith("Batch")
        reason = "batched_cache" if batched else "unsupported_class"
        raise UnsupportedState(reason, f"caches of class {cls.__module__}.{cls.__name__} are not carried")
    return _CHUNKED["window"] if found is _CHUNKED["rows"] and dropped_rows(cache) else found


def adapter_named(class_name: str, kind: LayerKind) -> CacheAdapter:
    """The adapter of a layer in a stored layout; raises UnsupportedState if there is none."""
    found = _CHUNKED.get(kind) if class_name == "ChunkedKVCache" else _ADAPTERS.get(class_name)
    if found is None or (found.kind != kind and class_name != NO_CACHE):
        raise UnsupportedState("unsupported_class", f"caches of class {class_name} are not carried as {kind}")
    return found


def class_named(class_name: str) -> type:
    """The installed mlx-lm's class of this name; raises UnsupportedState if it has none."""
    if class_name == NO_CACHE:
        return type(None)
    try:
        return getattr(importlib.import_module(_MODULES.get(class_name, CACHE_MODULE)), class_name)
    except (ImportError, AttributeError):
        raise UnsupportedState("unsupported_class", f"this mlx-lm has no {class_name}") from None


def dropped_rows(cache: Any) -> bool:
    """Whether a ChunkedKVCache holds less than all rows."""
    return cache.start_position > 0


def chunk_is_whole(cache: Any) -> bool:
    """Whether a ChunkedKVCache has every row that tokens from its position on look at: those of its last chunk."""
    return cache.start_position <= cache.offset // cache.chunk_size * cache.chunk_size
