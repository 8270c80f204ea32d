"""When the engine's cache must shrink: memory in use against a threshold, and what eviction can do about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import psutil

from tierkv.units import format_size

# Freed memory is seen by the system within this time, or as soon as nothing on its way to the vaults keeps it.
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes. ``device_total_bytes`` is 0 where the device shares the system's memory (Apple silicon, a CPU)."""

    used_bytes: int
    total_bytes: int
    device_bytes: int = 0
    device_total_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """What is left, on whichever memory has less."""
        system = self.total_bytes - self.used_bytes
        return min(system, self.device_total_bytes - self.device_bytes) if self.device_total_bytes else system

    def excess_bytes(self, threshold: float) -> int:
        """How far use is above ``threshold`` (a fraction), on whichever memory is worse; 0 if it is not."""
        system = self.used_bytes - threshold * self.total_bytes
        device = self.device_bytes - threshold * self.device_total_bytes if self.device_total_bytes else 0.0
        return max(0, round(system), round(device))


def read_memory() -> MemoryReading:
    """System memory as ``free`` counts it (total less available), and what MLX holds on the device."""
    system = psutil.virtual_memory()
    device_total = 0
    if mx.cuda.is_available():
        device_total = int(mx.device_info().get("total_memory", 0))
    held = mx.get_active_memory() + mx.get_cache_memory()
    return MemoryReading(system.total - system.available, system.total, held, device_total)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``evict_bytes``: how much of the cache has to go, 0 for nothing. ``note``: why nothing helps, or ""."""

    evict_bytes: int
    note: str = ""


class MemoryRule:
    """Evict while that can bring use below the mark; where it cannot, say so and keep the cache.

    Evicted bytes are subtracted from readings until the system shows them as free: for at most ``SETTLE_S``, and for as
    long as ``kept`` says that so many bytes are still on their way to the vaults.
    """

    def __init__(
        self, read: Callable[[], MemoryReading] = read_memory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.kept: Callable[[], int] = lambda: 0
        self._read = read
        self._clock = clock
        self._used_before = 0
        self._freed_bytes = 0
        self._freed_at = float("-inf")
        self.reading = MemoryReading(0, 0)

    def check(self, threshold: float, *, cache_bytes: int, evictable_bytes: int) -> Verdict:
        """What to do about a cache of ``cache_bytes``, of which ``evictable_bytes`` (all but the newest) may go."""
        self.reading = self._read()
        excess = self.reading.excess_bytes(threshold) - self._unseen_bytes()
        if excess <= 0:
            return Verdict(0)
        if excess <= evictable_bytes:
            return Verdict(excess)
        other = max(0, self.reading.used_bytes - cache_bytes)
        return Verdict(0, f"threshold unreachable: {format_size(other)} are not cache")

    def evicted(self, freed_bytes: int) -> None:
        """``freed_bytes`` were let go after the last reading."""
        self._freed_bytes = freed_bytes + self._unseen_bytes()
        self._used_before = self.reading.used_bytes
        self._freed_at = self._clock()

    def _unseen_bytes(self) -> int:
        seen = max(0, self._used_before - self.reading.used_bytes)
        unseen = max(0, self._freed_bytes - seen)
        return unseen if self._clock() - self._freed_at <= SETTLE_S else min(unseen, self.kept())
