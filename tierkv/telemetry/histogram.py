"""Latency histograms that can be added: the percentiles of a cluster come from summed buckets."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

FIRST_BOUND_S = 1e-6
STEPS_PER_OCTAVE = 4
LAST_BUCKET = 127


def bucket_of(seconds: float) -> int:
    """Bucket i covers [1 us * 2^(i/4), 1 us * 2^((i+1)/4)); shorter goes to 0, longer to 127 (about an hour)."""
    if seconds <= FIRST_BOUND_S:
        return 0
    return min(LAST_BUCKET, int(math.log2(seconds / FIRST_BOUND_S) * STEPS_PER_OCTAVE))


def upper_bound_s(bucket: int) -> float:
    return FIRST_BOUND_S * 2.0 ** ((bucket + 1) / STEPS_PER_OCTAVE)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Counts by bucket index and the sum of all values in seconds."""

    counts: Mapping[int, int] = field(default_factory=dict[int, int])
    sum_s: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def quantile(self, q: float) -> float | None:
        """The upper bound of the bucket that holds the q-quantile (at most 19 % above it); None when empty."""
        total = self.total
        if not total:
            return None
        rank = max(1, math.ceil(q * total))
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                return upper_bound_s(bucket)
        return None

    @staticmethod
    def merged(parts: Iterable[HistogramSnapshot]) -> HistogramSnapshot:
        counts: dict[int, int] = {}
        total_s = 0.0
        for part in parts:
            total_s += part.sum_s
            for bucket, count in part.counts.items():
                counts[bucket] = counts.get(bucket, 0) + count
        return HistogramSnapshot(counts, total_s)


EMPTY = HistogramSnapshot()


class Histogram:
    """The growing form; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        bucket = bucket_of(seconds)
        with self._lock:
            self._counts[bucket] = self._counts.get(bucket, 0) + 1
            self._sum_s += seconds

    def snapshot(self) -> HistogramSnapshot:
        with self._lock:
            return HistogramSnapshot(dict(self._counts), self._sum_s)
