"""A live mlx-lm cache (a list with one cache a layer) as a layout with named arrays, and back.

Everything here runs on the engine's generation thread. Works for mlx-lm 0.31 and 0.32 by looking at the objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tierkv.errors import UnsupportedState
from tierkv.state.layout import ArraySpec, LayerKind, LayerLayout, Layout
from tierkv.state.mlx_adapter import TOKEN_AXIS, CacheAdapter, Scalars
from tierkv.state.mlx_arrays import dtype_name, held, to_mx
from tierkv.state.mlx_layers import adapter_named, chunk_is_whole, class_named
from tierkv.state.mlx_leaves import Leaf, assembled, leaves

Signature = tuple[tuple[str, str, str, tuple[tuple[str, int], ...]], ...]
ArrayKey = tuple[int, int]
Views = dict[ArrayKey, NDArray[Any]]


def describe(cache: Sequence[Any]) -> Layout:
    """What the cache looks like now: for each layer its kind, class, constants and arrays.

    Raises UnsupportedState for a class that is not carried, a batch of more than one, a state in mid-batch.
    """
    return Layout(tuple(_layer(leaf) for leaf in leaves(cache)))


def expected_signature(fresh: Sequence[Any]) -> Signature:
    """What an empty cache of ``make_prompt_cache`` already shows: kind, class, slot and constants of each layer.

    Equal to ``Layout.signature()`` of the same cache when it is full. Raises UnsupportedState as ``describe``.
    """
    return tuple(
        (leaf.kind, type(leaf.cache).__name__, leaf.slot, leaf.adapter.params(leaf.cache)) for leaf in leaves(fresh)
    )


def only(cache: Sequence[Any], kind: LayerKind) -> bool:
    """Whether every layer is of this kind. Raises UnsupportedState as ``describe``."""
    return all(leaf.kind == kind for leaf in leaves(cache))


def positions(cache: Sequence[Any]) -> set[int]:
    """Every number of tokens that a layer says it has seen."""
    offsets = (leaf.adapter.offset(leaf.cache) for leaf in leaves(cache))
    return {offset for offset in offsets if offset is not None}


def position(cache: Sequence[Any]) -> int | None:
    """How many tokens the cache has seen; None where no layer says so (recurrent state only, or nothing yet).

    Raises UnsupportedState if two layers disagree.
    """
    said = positions(cache)
    if len(said) > 1:
        raise UnsupportedState("positions_differ", f"layers stand at different positions: {sorted(said)}")
    return said.pop() if said else None


def settle(cache: Sequence[Any], have: int, *, lag: int = 0) -> None:
    """The cache is one that has computed ``have`` tokens, after mlx-lm itself cut a longer one down to them.

    A ConcatenateKVCache loses the rows behind its offset, which mlx-lm leaves there and goes on behind. Raises
    UnsupportedState "position_mismatch" for a layer that stands elsewhere ("lag" tokens before it are allowed, for a
    draft model), "rows_dropped" for a chunk that has lost rows which the next token looks at.
    """
    for leaf in leaves(cache):
        offset = leaf.adapter.offset(leaf.cache)
        if offset is not None and not have - lag <= offset <= have:
            raise UnsupportedState("position_mismatch", f"a layer at {offset} where {have} tokens are promised")
        name = type(leaf.cache).__name__
        if name == "ChunkedKVCache" and not chunk_is_whole(leaf.cache):
            raise UnsupportedState("rows_dropped", f"a chunk at {offset} without its first rows")
        if name == "ConcatenateKVCache" and offset is not None:
            leaf.cache.keys, leaf.cache.values = (array for _, array in leaf.adapter.arrays(leaf.cache))


def live_arrays(cache: Sequence[Any]) -> list[mx.array]:
    """The engine's own arrays, to be evaluated before anything is copied from them."""
    return [array for leaf in leaves(cache) for _, array in leaf.adapter.buffers(leaf.cache) if array is not None]


def rows(cache: Sequence[Any], layout: Layout, start: int, stop: int) -> Views:
    """Rows [start, stop) of every array of the "rows" layers, evaluated and safe from later writes of the engine.

    Keys are (index in layout.layers, index in its arrays). Arrays: [1, heads, stop - start, width], any strides;
    bfloat16 as uint16. They keep the engine's buffers alive: mlx's strided copies take 3 to 6 times a memcpy (measured
    on 2 cores), and numpy's copy can be made by a thread that the engine does not wait for.
    Raises UnsupportedState if a layer does not hold these rows.
    """
    if not 0 <= start <= stop:
        raise UnsupportedState("bad_range", f"rows {start} to {stop}")
    buffers: dict[ArrayKey, mx.array] = {}
    for index, leaf in _leaves_of(cache, layout, ("rows",)):
        count = leaf.adapter.offset(leaf.cache)
        for number, (_, buffer) in enumerate(leaf.adapter.buffers(leaf.cache)):
            if buffer is None:
                continue
            if count is None or min(count, buffer.shape[TOKEN_AXIS]) < stop:
                raise UnsupportedState("bad_range", f"layer {index} holds {count} rows, not {stop}")
            buffers[index, number] = buffer
    return {key: view[..., start:stop, :] for key, view in held(buffers).items()}


def checkpoint(
    cache: Sequence[Any], layout: Layout, kinds: Iterable[LayerKind]
) -> tuple[Views, dict[int, dict[str, int]]]:
    """Whole arrays and scalars of the layers of these kinds ("window", "state"), evaluated as in ``rows``."""
    wanted = tuple(kinds)
    arrays = held(dict(_arrays_of(cache, layout, wanted)))
    scalars: dict[int, dict[str, int]] = {}
    for index, leaf in enumerate(leaves(cache)):
        said = leaf.adapter.scalars(leaf.cache)
        if layout.layers[index].kind in wanted and said:
            scalars[index] = said
    return arrays, scalars


def build(
    layout: Layout,
    stands_at: int,
    arrays: Mapping[ArrayKey, np.ndarray[Any, Any]],
    scalars: Mapping[int, Scalars],
    *,
    first_row: int = 0,
    local: Sequence[Any] | None = None,
) -> list[Any]:
    """A new cache at position ``stands_at``, as the engine would have made it.

    arrays: for "rows" layers rows [first_row, at least stands_at), for the others whole; bfloat16 as uint16.
    local: a cache of the same layout that gives rows [0, first_row). Nothing is shared with ``arrays`` or ``local``.
    Raises UnsupportedState for anything that does not fit the layout.
    """
    heads = dict(_arrays_of(local, layout, ("rows",))) if local is not None and first_row else {}
    parts: list[tuple[str, Any]] = []
    for index, layer in enumerate(layout.layers):
        made: list[mx.array | None] = []
        for number, spec in enumerate(layer.arrays):
            key = (index, number)
            made.append(_array(spec, layer.kind, arrays.get(key), heads.get(key), first_row, stands_at))
        adapter = adapter_named(layer.class_name, layer.kind)
        cls = class_named(layer.class_name)
        parts.append((layer.slot, adapter.build(cls, layer, made, scalars.get(index, {}))))
    cache = assembled(parts)
    if describe(cache) != layout or position(cache) not in (None, stands_at):
        raise UnsupportedState("foreign_layout", "what was restored is not what was stored")
    return cache


def _array(
    spec: ArraySpec,
    kind: LayerKind,
    given: np.ndarray[Any, Any] | None,
    head: mx.array | None,
    first_row: int,
    stands_at: int,
) -> mx.array | None:
    if spec.dtype == "none":
        return None
    if given is None:
        raise UnsupportedState("missing_array", f"no array {spec.name}")
    if kind == "rows":
        given = given[:, :, : stands_at - first_row]
    rest = to_mx(given, spec.dtype)
    array = rest if not first_row or kind != "rows" else _join(head, rest, first_row)
    if kind == "rows" and array.shape[2:3] != (stands_at,):
        raise UnsupportedState("shape_mismatch", f"{spec.name} holds {array.shape} at position {stands_at}")
    return array


def _join(head: mx.array | None, rest: mx.array, first_row: int) -> mx.array:
    if head is None or head.shape[2] < first_row or head.dtype != rest.dtype:
        raise UnsupportedState("missing_array", f"no local rows before {first_row}")
    return mx.concatenate([head[:, :, :first_row], rest], axis=2)


def _layer(leaf: Leaf) -> LayerLayout:
    leaf.adapter.check(leaf.cache)
    specs = tuple(_spec(leaf.adapter, name, array) for name, array in leaf.adapter.buffers(leaf.cache))
    return LayerLayout(leaf.kind, type(leaf.cache).__name__, specs, leaf.adapter.params(leaf.cache), leaf.slot)


def _spec(adapter: CacheAdapter, name: str, array: mx.array | None) -> ArraySpec:
    if array is None:
        return ArraySpec(name, "none", ())
    if array.ndim == 0 or array.shape[0] != 1:
        raise UnsupportedState("batch", f"array {name} of shape {array.shape} is not a batch of one")
    axis = adapter.axis(name)
    if axis is not None and array.ndim != axis + 2:
        raise UnsupportedState("shape_mismatch", f"array {name} of shape {array.shape}")
    shape = tuple(-1 if index == axis else size for index, size in enumerate(array.shape))
    return ArraySpec(name, dtype_name(array), shape)


def _arrays_of(
    cache: Sequence[Any], layout: Layout, kinds: tuple[LayerKind, ...]
) -> Iterator[tuple[ArrayKey, mx.array]]:
    for index, leaf in _leaves_of(cache, layout, kinds):
        arrays = leaf.adapter.arrays(leaf.cache)
        yield from (((index, n), array) for n, (_, array) in enumerate(arrays) if array is not None)


def _leaves_of(cache: Sequence[Any], layout: Layout, kinds: tuple[LayerKind, ...]) -> Iterator[tuple[int, Leaf]]:
    found = leaves(cache)
    if len(found) != len(layout.layers):
        raise UnsupportedState("foreign_layout", f"{len(found)} layers where {len(layout.layers)} are expected")
    for index, (leaf, layer) in enumerate(zip(found, layout.layers, strict=True)):
        if (type(leaf.cache).__name__, leaf.kind) != (layer.class_name, layer.kind):
            raise UnsupportedState("foreign_layout", f"layer {index} is a {type(leaf.cache).__name__} ({leaf.kind})")
        if layer.kind in kinds:
            yield index, leaf
