"""The positions of an EXO entry at which its state is whole, as caches that the state walkers can carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierkv.errors import UnsupportedState
from tierkv.hooks.exo_entries import Entry, inside_region
from tierkv.state import mlx_cache
from tierkv.state.mlx_leaves import cut

Standing = tuple[int, Sequence[Any]]


def standings(entry: Entry) -> list[Standing]:
    """Every (position, cache) at which the entry's state may leave, nearest first, each position once.

    A cache of rows only stands at its own end. Where a layer cannot be cut, EXO's snapshots say where the state is
    known: each gives that layer's state, and the rows up to it come from the entry's own cache. No array is copied.
    Raises UnsupportedState for a layer that is not carried.
    """
    # A CacheList is cut as a whole, or its snapshot holds all of it.
    in_rows = [mlx_cache.only([layer], "rows") for layer in entry.cache]
    if all(in_rows):
        found = {mlx_cache.position(entry.cache) or 0: entry.cache}
    else:
        found = {
            int(snapshot.token_count): at
            for snapshot in entry.snapshots
            if (at := _at(entry.cache, in_rows, snapshot)) is not None
        }
        found = found or {mlx_cache.position(entry.cache) or 0: entry.cache}
    length = len(entry.prompt)
    return [
        (position, found[position])
        for position in sorted(found)
        if 0 < position <= length and not inside_region(entry.regions, position)
    ]


def _at(cache: Sequence[Any], in_rows: Sequence[bool], snapshot: Any) -> Sequence[Any] | None:
    """The cache as it was at the snapshot; None if the snapshot is empty or does not fit the entry."""
    position, states = int(snapshot.token_count), snapshot.states
    if position <= 0 or len(states) != len(cache):
        return None
    layers: list[Any] = []
    try:
        for layer, is_rows, state in zip(cache, in_rows, states, strict=True):
            if not is_rows and state is None:
                return None
            layers.append(cut(layer, position) if is_rows else state)
        return layers if mlx_cache.position(layers) in (None, position) else None
    except UnsupportedState:
        return None


def stands_elsewhere(answer: Sequence[Any], have: int) -> bool:
    """Whether the cache that EXO goes on from has not seen the ``have`` tokens that EXO takes it to have seen.

    EXO until 22 April 2026 skips tokens behind the end of an entry; layers of class DeepseekV4Cache stay where they
    were when EXO cuts an entry. EXO computes from such a cache; nobody else should.
    """
    try:
        return bool(mlx_cache.positions(answer) - {have})
    except UnsupportedState:
        return False
