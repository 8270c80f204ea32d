"""A question to EXO's prefix cache, and what the hook knows of one such cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tierkv.handoff.client import Media
from tierkv.hooks.exo_entries import entry_bytes, ids_of, media_of
from tierkv.hooks.exo_ranks import Ranks
from tierkv.hooks.prompt_tokens import Ids


@dataclass(slots=True)
class Query:
    """What EXO is asked for. ``prompt``: mx.array [n] of token ids, ``regions``: its media."""

    model: Any
    prompt: Any
    regions: Sequence[Any]
    _ids: Ids | None = None

    @property
    def length(self) -> int:
        return len(self.prompt)

    @property
    def ids(self) -> Ids:
        if self._ids is None:
            self._ids = ids_of(self.prompt)
        return self._ids

    def media(self, before: int) -> tuple[Media, ...]:
        return media_of(self.regions, before)


@dataclass(slots=True, eq=False)
class Tiered:
    """What is known of one prefix cache.

    ``settled``: the entries, by their list of caches, that are in good hands. ``wrong``: those that EXO computed from
    state that was not what it took it for. ``follows_wrong``: the state being computed now does so, too.
    """

    cache: Any
    ranks: Ranks
    settled: set[int] = field(default_factory=set[int])
    wrong: set[int] = field(default_factory=set[int])
    follows_wrong: bool = False
    asked: int = 0
    adding: bool = False

    def forget_gone(self) -> None:
        here = {id(each) for each in self.cache.caches}
        self.settled &= here
        self.wrong &= here

    def held_bytes(self) -> int:
        return sum(self.sizes())

    def sizes(self) -> list[int]:
        return [entry_bytes(self.cache, index) for index in range(len(self.cache.caches))]
