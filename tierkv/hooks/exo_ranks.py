"""What the ranks of one EXO instance agree on before they touch their caches.

Every rank takes part in the same gathers in the same order, whatever it has or lacks, and draws the same conclusion
from the same numbers. The gathers run on the CPU stream, as EXO's own barrier does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx

Cache = TypeVar("Cache")

MAGIC = 0x7_1E4_B01
# The modules of EXO whose calls every rank makes at the same time. Its prefill server is not one of them: only
# rank 0 calls from there, and a gather would wait for ever.
CALLERS = frozenset({"exo.worker.engines.mlx.generator.batch_generate", "exo.worker.engines.mlx.generator.generate"})
OWN_MODULES = "tierkv.hooks."
# A rank that has less makes the others look again; each round that does not agree is shorter than the one before.
ROUNDS = 4
THRESHOLD_SCALE = 10_000


@dataclass(frozen=True, slots=True)
class Local:
    """What one rank can do by itself. Neither call raises; 0 and None mean nothing."""

    n_tokens: int
    have: int
    limit: int
    threshold: float
    possible: Callable[[int], int]
    fetch: Callable[[int], tuple[Any, int] | None]


class Ranks:
    """``hooked``: whoever started the ranks says that all of them have this hook."""

    def __init__(self, group: Any, *, hooked: bool, callers: frozenset[str] = CALLERS) -> None:
        self._group = group
        self._hooked = hooked
        self._callers = callers
        self.size = int(group.size()) if group is not None else 1
        self.threshold = 0.0
        self.broken = ""

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def together(self) -> bool:
        """Whether the ranks decide together; a group that cannot only stores."""
        return not self.alone and self._hooked and not self.broken

    def called_together(self) -> bool:
        """Whether the call that is being answered is one that every rank makes now."""
        frame: Any = sys._getframe(1)
        while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(OWN_MODULES):
            frame = frame.f_back
        return frame is not None and frame.f_globals.get("__name__") in self._callers

    def gather(self, *values: int) -> list[list[int]]:
        """What every rank gave, by rank. Raises whatever mlx does when a rank is gone."""
        stream = mx.default_stream(mx.Device(mx.cpu))
        mine = mx.array([MAGIC, *values], dtype=mx.int32)
        every = mx.distributed.all_gather(mine, group=self._group, stream=stream)
        mx.eval(every)
        rows: Any = every.reshape(self.size, -1).tolist()
        if any(row[0] != MAGIC for row in rows):
            self.broken = "a rank without this hook takes part"
            raise RuntimeError(self.broken)
        return [row[1:] for row in rows]

    def restore(self, local: Local) -> tuple[Any, int] | None:
        """A cache at a position that every rank has reached, or None on every rank. Raises when a rank is gone."""
        ours = local.possible(local.limit)
        rows = self.gather(local.n_tokens, local.have, round(local.threshold * THRESHOLD_SCALE), ours)
        wishes = [row[2] for row in rows]
        self.threshold = min(wish for wish in wishes if wish) / THRESHOLD_SCALE if any(wishes) else 0.0
        if len({(row[0], row[1]) for row in rows}) > 1:
            return None
        goal = self._common([row[3] for row in rows], local)
        return self._fetch(goal, local) if goal > local.have else None

    def _common(self, possible: Sequence[int], local: Local) -> int:
        for _ in range(ROUNDS):
            goal = min(possible)
            if goal <= local.have or max(possible) == goal:
                return goal
            possible = [row[0] for row in self.gather(local.possible(goal))]
        return 0

    def _fetch(self, goal: int, local: Local) -> tuple[Any, int] | None:
        got: tuple[Any, int] | None = None
        for _ in range(ROUNDS):
            if got is None or got[1] != goal:
                got = local.fetch(goal)
            reached = [row[0] for row in self.gather(got[1] if got is not None else 0)]
            goal = min(reached)
            if goal <= local.have:
                return None
            if max(reached) == goal:
                return got
        return None

    def all_say(self, agreed: bool) -> bool:
        """Whether every rank says so."""
        return all(row[0] for row in self.gather(int(agreed)))
