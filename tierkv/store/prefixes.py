"""Prefixes as people see them: chains from a root to a record that nothing follows."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.identity.blocks import BlockKey
from tierkv.store.base import Prefix
from tierkv.store.index import NONE, Index

_Chain = tuple[tuple[BlockKey, ...], int, frozenset[str]]


def describe(index: Index, ends: Sequence[int], to_unix_s: float) -> list[Prefix]:
    """The prefixes that end at these rows without children, most recently used first."""
    chains = _Chains(index)
    found = [_prefix(index, chains, end, to_unix_s) for end in ends]
    found.sort(key=lambda prefix: prefix.last_hit_unix_s, reverse=True)
    return found


def _prefix(index: Index, chains: _Chains, end: int, to_unix_s: float) -> Prefix:
    own = [end]
    row = index.parent[end]
    while row != NONE and index.is_only_child(index.first_child[row]):
        own.append(row)
        row = index.parent[row]
    own.reverse()
    keys, total_bytes, codecs = chains.up_to(end)
    return Prefix(
        leaf=index.entry(end, to_unix_s),
        chain=keys,
        own_keys=tuple(index.keys[each] for each in own),
        own_bytes=sum(index.size[each] for each in own),
        total_bytes=total_bytes,
        last_hit_unix_s=max(index.used_s[each] for each in own) + to_unix_s,
        hits=max(index.hits[each] for each in own),
        codecs=tuple(sorted(codecs)),
    )


class _Chains:
    """Chains from the head, each fork worked out once: linear in the records however many prefixes share a trunk."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._forks: dict[int, _Chain] = {NONE: ((), 0, frozenset())}

    def up_to(self, row: int) -> _Chain:
        """Keys from the head to ``row``, their bytes, their codecs."""
        index, forks, path = self._index, self._forks, list[int]()
        while row not in forks:
            path.append(row)
            row = index.parent[row]
        keys, size, codecs = forks[row]
        run = list[BlockKey]()
        for each in reversed(path):
            run.append(index.keys[each])
            size += index.size[each]
            codec = index.facts(each).codec
            codecs = codecs if codec in codecs else codecs | {codec}
            child = index.first_child[each]
            if child != NONE and not index.is_only_child(child):
                keys = (*keys, *run)
                run.clear()
                forks[each] = (keys, size, codecs)
        return (*keys, *run), size, codecs
