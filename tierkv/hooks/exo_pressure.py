"""EXO's eviction loop, told what eviction can do: it asks for the memory in use after every entry that it drops.

The loop compares one number with one threshold. A number just above the threshold makes it drop one more entry, one
just below makes it stop; EXO on several ranks takes the largest of all ranks' numbers, so that all drop the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import mlx.core as mx

from tierkv.hooks.memory import MemoryRule, Verdict

# More than what float32 loses on its way through EXO's gather, less than anybody sets a threshold by.
STEP = 0.001


class Pressure:
    """One run of EXO's loop over entries of ``sizes`` bytes; ``held`` gives the bytes that are left.

    ``keep_bytes``: the entry that stays whatever happens.
    """

    def __init__(
        self, rule: MemoryRule, threshold: float, sizes: Sequence[int], held: Callable[[], int], *, keep_bytes: int = 0
    ) -> None:
        self._rule = rule
        self._threshold = threshold
        self._total = sum(sizes)
        self._held = held
        self._keep_bytes = keep_bytes
        self.verdict: Verdict | None = None
        self.freed_bytes = 0

    def __call__(self) -> float:
        """In [0, 1], for the loop's next comparison."""
        if self.verdict is None:
            self.verdict = self._rule.check(
                self._threshold, cache_bytes=self._total, evictable_bytes=self._total - self._keep_bytes
            )
        else:
            self.freed_bytes = self._total - self._held()
            # Freed buffers stay in mlx's own cache, and look used, until they are let go.
            gc.collect()
            mx.clear_cache()
        more = self.freed_bytes < self.verdict.evict_bytes and self._held() > self._keep_bytes
        used = self._rule.reading.used_bytes / max(1, self._rule.reading.total_bytes)
        below, above = self._threshold - STEP, self._threshold + STEP
        return max(used, above) if more else min(used, below)

    def over(self) -> None:
        """The loop has ended; what it freed is not yet seen by the system."""
        if self.verdict is not None:
            self.freed_bytes = self._total - self._held()
            if self.freed_bytes:
                self._rule.evicted(self.freed_bytes)
