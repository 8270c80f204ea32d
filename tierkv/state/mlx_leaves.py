"""A cache as the engine holds it, with CacheLists in it, and the flat list of its layers that a layout names.

A layer's slot is its place: "7" for a cache, "7.1" for the second part of the CacheList in place 7.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tierkv.errors import UnsupportedState
from tierkv.state.layout import LayerKind
from tierkv.state.mlx_adapter import CacheAdapter
from tierkv.state.mlx_layers import CACHE_MODULE, adapter_of

CACHE_LIST = "CacheList"
# mlx-lm's models nest once.
MAX_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Leaf:
    """One cache that is no CacheList; None for a layer without a cache."""

    slot: str
    cache: Any
    adapter: CacheAdapter
    kind: LayerKind


def leaves(cache: Sequence[Any]) -> list[Leaf]:
    """Every layer in the order of Layout.layers. A layer without a cache travels with the first that has one.

    Raises UnsupportedState for a class that is not carried, and for a cache that holds nothing at all.
    """
    found = [(slot, inner, adapter_of(inner)) for slot, inner in _flat(cache, "", 1)]
    kinds: list[LayerKind] = [adapter.kind for _, inner, adapter in found if inner is not None]
    if not kinds:
        raise UnsupportedState("no_state", "no layer has a cache")
    return [Leaf(slot, inner, adapter, kinds[0] if inner is None else adapter.kind) for slot, inner, adapter in found]


def is_list(cache: Any) -> bool:
    """Whether this is mlx-lm's own CacheList."""
    return type(cache).__name__ == CACHE_LIST and type(cache).__module__ == CACHE_MODULE


def _flat(caches: Sequence[Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for index, inner in enumerate(caches):
        slot = f"{prefix}{index}"
        if not is_list(inner):
            yield slot, inner
        elif not inner.caches or depth == MAX_DEPTH:
            raise UnsupportedState("bad_cache_list", f"the CacheList in {slot} is empty or nested too deep")
        else:
            yield from _flat(inner.caches, f"{slot}.", depth + 1)


class _Branch(list[Any]):
    """A CacheList that is being put together."""


def assembled(parts: Sequence[tuple[str, Any]]) -> list[Any]:
    """The caches with these slots in their places, in CacheLists where slots say so: the inverse of ``leaves``.

    Raises UnsupportedState for slots that no cache has.
    """
    root = _Branch()
    for slot, part in parts:
        try:
            *path, last = (int(number) for number in slot.split("."))
        except ValueError as error:
            raise UnsupportedState("foreign_layout", f"{slot!r} is no place in a cache") from error
        branch = root
        for number in path[:MAX_DEPTH]:
            branch = _branch(branch, number, slot)
        if last != len(branch) or len(path) >= MAX_DEPTH:
            raise UnsupportedState("foreign_layout", f"{slot!r} is not the next place of a cache")
        branch.append(part)
    cache_list = getattr(importlib.import_module(CACHE_MODULE), CACHE_LIST, None)
    return [_grown(part, cache_list) for part in root]


def _branch(above: _Branch, number: int, slot: str) -> _Branch:
    if number == len(above):
        above.append(_Branch())
    if number != len(above) - 1 or not isinstance(above[number], _Branch):
        raise UnsupportedState("foreign_layout", f"{slot!r} is not the next place of a cache")
    return above[number]


def _grown(part: Any, cache_list: Any) -> Any:
    if not isinstance(part, _Branch):
        return part
    if cache_list is None:
        raise UnsupportedState("unsupported_class", f"this mlx-lm has no {CACHE_LIST}")
    return cache_list(*(_grown(inner, cache_list) for inner in part))


def cut(layer: Any, stands_at: int) -> Any:
    """A view of one layer's cache that ends at ``stands_at``; arrays are shared and the layer is as it was.

    Raises UnsupportedState for a layer that is not rows only, or that has fewer of them.
    """
    if layer is None:
        return None
    if is_list(layer):
        return type(layer)(*(cut(inner, stands_at) for inner in layer.caches))
    if adapter_of(layer).kind != "rows" or layer.offset < stands_at:
        raise UnsupportedState("bad_range", f"a {type(layer).__name__} cannot be cut at {stands_at}")
    view = copy.copy(layer)
    view.offset = stands_at if layer.keys is not None else layer.offset
    return view
