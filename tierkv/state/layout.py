"""What an engine's cache looks like: for each layer its class and its arrays. No mlx, no numpy.

The layout that was observed is stored in every record. It must be equal among the records of one restore and equal
to what the engine expects; it cannot be part of the key, since a fresh cache is empty and says nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal, cast

LayerKind = Literal["rows", "window", "state"]
MAX_LAYERS = 4096
MAX_ARRAYS = 64
MAX_DIMS = 6

DTYPE_BYTES = {
    "none": 0,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a layer. ``shape`` has -1 where the length follows the tokens; dtype "none" is an empty slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def token_axis(self) -> int | None:
        return self.shape.index(-1) if -1 in self.shape else None


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer (or one inner cache of a CacheList).

    kind "rows": rows [t0, t1) of the arrays depend on the tokens before them only, so they travel in blocks.
    kind "window": attention state at one position (a ring or a chunk): travels whole, to the KV tier.
    kind "state": recurrent state at one position: travels whole, to the SSM tier.
    ``params`` are the constants of the class, such as a window's size: they must be equal at a restore.
    ``slot`` is the place of an inner cache, such as "7" or "7.1" for the second cache of layer 7's CacheList.
    """

    kind: LayerKind
    class_name: str
    arrays: tuple[ArraySpec, ...]
    params: tuple[tuple[str, int], ...] = ()
    slot: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """All layers of a cache in order, inner caches of a CacheList in its place."""

    layers: tuple[LayerLayout, ...]

    def to_json(self) -> bytes:
        """Canonical: equal layouts give equal bytes."""
        rows = [
            [layer.kind, layer.class_name, layer.slot, [list(pair) for pair in layer.params],
             [[spec.name, spec.dtype, list(spec.shape)] for spec in layer.arrays]]
            for layer in self.layers
        ]  # fmt: skip
        return json.dumps(rows, separators=(",", ":"), ensure_ascii=True).encode()

    @classmethod
    def from_json(cls, text: bytes | str) -> Layout:
        """Raises ValueError for anything that ``to_json`` did not write."""
        try:
            rows = cast("list[list[Any]]", json.loads(text))
            layers = tuple(_layer(row) for row in rows)
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a layout: {error}") from error
        if len(layers) > MAX_LAYERS:
            raise ValueError("too many layers")
        return cls(layers)

    def digest(self) -> bytes:
        """16 bytes of BLAKE2b over the canonical JSON (the standard library's, so that a hook can make it)."""
        return hashlib.blake2b(self.to_json(), digest_size=16, person=b"tierkv layout 1").digest()

    def having(self, *kinds: LayerKind) -> tuple[int, ...]:
        """Indices of the layers of these kinds."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.kind in kinds)

    def signature(self) -> tuple[tuple[str, str, str, tuple[tuple[str, int], ...]], ...]:
        """What an empty cache already shows: kind, class, slot and constants of each layer."""
        return tuple((layer.kind, layer.class_name, layer.slot, layer.params) for layer in self.layers)


def _layer(row: list[Any]) -> LayerLayout:
    kind, class_name, slot, params, arrays = row
    if kind not in ("rows", "window", "state") or not isinstance(class_name, str) or not isinstance(slot, str):
        raise ValueError("not a layer")
    if len(arrays) > MAX_ARRAYS:
        raise ValueError("too many arrays in a layer")
    return LayerLayout(
        kind,
        class_name,
        tuple(_spec(item) for item in arrays),
        tuple((str(name), int(value)) for name, value in params),
        slot,
    )


def _spec(item: list[Any]) -> ArraySpec:
    name, dtype, shape = item
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}")
    dims = tuple(int(n) for n in shape)
    if len(dims) > MAX_DIMS or any(n < -1 for n in dims) or dims.count(-1) > 1:
        raise ValueError("bad shape")
    return ArraySpec(str(name), str(dtype), dims)
