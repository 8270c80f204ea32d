"""What one tier of one agent counts, with sliding windows beside the totals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tierkv.telemetry.histogram import Histogram
from tierkv.telemetry.snapshot import TierSnapshot, Window

WINDOWS_S = (60.0, 600.0)
SLOTS = 60
MAX_REASONS = 64
OTHER_REASONS = "other"

_HITS, _MISSES, _IN, _OUT, _EVICTIONS = range(5)


class SlidingCounts:
    """Five counts over the last ``seconds``, to a sixtieth of that. Not locked: the tier's lock guards it."""

    def __init__(self, seconds: float, now_s: float) -> None:
        self._seconds = seconds
        self._slot_s = seconds / SLOTS
        self._slots = [[0] * 5 for _ in range(SLOTS)]
        self._current = int(now_s / self._slot_s)

    def add(self, what: int, n: int, now_s: float) -> None:
        self._advance(now_s)
        self._slots[self._current % SLOTS][what] += n

    def window(self, now_s: float) -> Window:
        self._advance(now_s)
        return Window(self._seconds, *(sum(column) for column in zip(*self._slots, strict=True)))

    def _advance(self, now_s: float) -> None:
        target = int(now_s / self._slot_s)
        for slot in range(max(self._current, target - SLOTS) + 1, target + 1):
            self._slots[slot % SLOTS] = [0] * 5
        self._current = max(self._current, target)


@dataclass(frozen=True, slots=True)
class TierSizes:
    """What a tier holds now; filled by a probe at snapshot time."""

    size_bytes: int = 0
    cap_bytes: int = 0
    records: int = 0
    tokens: int = 0
    pinned_records: int = 0
    quarantined_records: int = 0


class TierTelemetry:
    """Counters of one tier; any thread may count. ``promote_s`` and ``store_s`` take seconds of whole calls."""

    def __init__(self, name: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.promote_s = Histogram()
        self.store_s = Histogram()
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._windows = tuple(SlidingCounts(seconds, monotonic()) for seconds in WINDOWS_S)
        self._totals = [0] * 5
        self._hit_tokens = 0
        self._stores = 0
        self._miss_reasons: dict[str, int] = {}
        self._refusals: dict[str, int] = {}
        self._sizes: Callable[[], TierSizes] | None = None

    def sizes_from(self, probe: Callable[[], TierSizes]) -> None:
        """``probe`` is asked at every snapshot for what the tier holds."""
        self._sizes = probe

    def hit(self, tokens: int = 0, n_bytes: int = 0) -> None:
        """A lookup found ``tokens`` usable tokens; ``n_bytes`` of them moved out of the tier already."""
        with self._lock:
            self._hit_tokens += tokens
            self._add(_HITS, 1)
            self._add(_OUT, n_bytes)

    def miss(self, reason: str) -> None:
        with self._lock:
            self._add(_MISSES, 1)
            _count_reason(self._miss_reasons, reason)

    def evicted(self, n: int = 1) -> None:
        with self._lock:
            self._add(_EVICTIONS, n)

    def bytes_in(self, n: int) -> None:
        with self._lock:
            self._add(_IN, n)

    def bytes_out(self, n: int) -> None:
        with self._lock:
            self._add(_OUT, n)

    def stored(self, n: int = 1) -> None:
        with self._lock:
            self._stores += n

    def refused(self, reason: str, n: int = 1) -> None:
        with self._lock:
            _count_reason(self._refusals, reason, n)

    def _add(self, what: int, n: int) -> None:
        if not n:
            return
        now_s = self._monotonic()
        self._totals[what] += n
        for window in self._windows:
            window.add(what, n, now_s)

    def snapshot(self) -> TierSnapshot:
        sizes = self._sizes() if self._sizes else TierSizes()
        with self._lock:
            now_s = self._monotonic()
            counted = TierSnapshot(
                self.name,
                hits=self._totals[_HITS],
                misses=self._totals[_MISSES],
                miss_reasons=dict(self._miss_reasons),
                evictions=self._totals[_EVICTIONS],
                bytes_in=self._totals[_IN],
                bytes_out=self._totals[_OUT],
                stores=self._stores,
                refusals=dict(self._refusals),
                windows=tuple(window.window(now_s) for window in self._windows),
                hit_tokens=self._hit_tokens,
            )
        return replace(
            counted,
            promote_s=self.promote_s.snapshot(),
            store_s=self.store_s.snapshot(),
            size_bytes=sizes.size_bytes,
            cap_bytes=sizes.cap_bytes,
            records=sizes.records,
            tokens=sizes.tokens,
            pinned_records=sizes.pinned_records,
            quarantined_records=sizes.quarantined_records,
        )


def _count_reason(reasons: dict[str, int], reason: str, n: int = 1) -> None:
    """Reasons may come from the network: their number is bounded."""
    if reason not in reasons and len(reasons) >= MAX_REASONS:
        reason = OTHER_REASONS
    reasons[reason] = reasons.get(reason, 0) + n
