"""Restoring against computing: what each is expected to take, from what was measured, and the cheaper of the two.

A restore costs the round trip, its bytes at the measured rate of their link, decoding, and building the engine's
cache. Computing costs what the engine reported for prompts of such lengths. What nobody has measured yet costs
nothing here: it is tried, and given up as soon as it shows that computing would be quicker (see ``restore_run``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import cast

from tierkv.agents.lookup import Candidate, Plan, Source
from tierkv.handoff.protocol import MAX_TOKENS
from tierkv.rpc.client import VaultClient

PrefillSeconds = Callable[[int, int], float]
"""Seconds that the engine needs to compute positions [start, end); 0 when nothing is known."""
PrefillSample = tuple[int, int, float]
"""The engine computed positions [start, end) in so many seconds."""

# A link that was found slow is tried again after this: it may have become faster.
RATE_AGE_S = 60.0
KEPT_SAMPLES = 64
# A shorter prefill measures the engine's overhead.
LEAST_SAMPLE_TOKENS = 32
MAX_PREFILL_S = 86400.0
_SMOOTHING = 0.3


class PrefillCost:
    """An engine's own prefills as a cost of two terms: one for each token, one for each token it attends to.

    ``seconds(start, end)`` = a * (end - start) + b * (end^2 - start^2) / 2, both terms at least 0, fitted to the last
    64 prefills with equal relative weight.
    """

    def __init__(self, remembered: Iterable[PrefillSample] = ()) -> None:
        self._samples: deque[PrefillSample] = deque(maxlen=KEPT_SAMPLES)
        self._terms: tuple[float, float] | None = None
        for sample in remembered:
            self.measured(*sample)

    def measured(self, start: int, end: int, seconds: float) -> None:
        """The engine computed positions [start, end) in ``seconds``."""
        if end - start >= LEAST_SAMPLE_TOKENS and seconds > 0:
            self._samples.append((start, end, seconds))
            self._terms = None

    @property
    def samples(self) -> list[PrefillSample]:
        """What was measured, the oldest first."""
        return list(self._samples)

    @property
    def terms(self) -> tuple[float, float]:
        """a in seconds a token and b in seconds a pair of tokens; both 0 while nothing was measured."""
        if not self._samples:
            return 0.0, 0.0
        if self._terms is None:
            self._terms = _fit(self._samples)
        return self._terms

    def seconds(self, start: int, end: int) -> float:
        """0 while nothing was measured."""
        if end <= start:
            return 0.0
        a, b = self.terms
        return a * (end - start) + b * (end * end - start * start) / 2


def prefill_sample(row: object) -> PrefillSample | None:
    """[start, end, seconds] as a sample; None for anything that is not plausible."""
    if not isinstance(row, list) or len(cast("list[object]", row)) != 3:
        return None
    start, end, seconds = cast("list[object]", row)
    if not (isinstance(start, int) and isinstance(end, int) and isinstance(seconds, int | float)):
        return None
    return (start, end, float(seconds)) if 0 <= start < end <= MAX_TOKENS and 0 < seconds < MAX_PREFILL_S else None


def _fit(samples: Iterable[PrefillSample]) -> tuple[float, float]:
    """Least squares of relative errors; where one term would be negative, or lengths are all alike, the other alone."""
    xx = xy = yy = x1 = y1 = 0.0
    for start, end, seconds in samples:
        x, y = (end - start) / seconds, (end * end - start * start) / 2 / seconds
        xx, xy, yy, x1, y1 = xx + x * x, xy + x * y, yy + y * y, x1 + x, y1 + y
    determinant = xx * yy - xy * xy
    if determinant > 1e-3 * xx * yy:
        a, b = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
        if a < 0:
            return 0.0, y1 / yy
    return x1 / xx, 0.0


@dataclass(slots=True)
class Rates:
    """Bytes a second of what a restore does on this machine, 0 while unmeasured. Decoding counts one worker."""

    decode_bytes_per_s: float = 0.0
    build_bytes_per_s: float = 0.0

    def decoded(self, n_bytes: int, seconds: float) -> None:
        self.decode_bytes_per_s = _blend(self.decode_bytes_per_s, n_bytes, seconds)

    def built(self, n_bytes: int, seconds: float) -> None:
        self.build_bytes_per_s = _blend(self.build_bytes_per_s, n_bytes, seconds)


def _blend(rate: float, n_bytes: int, seconds: float) -> float:
    if n_bytes < 64 << 10 or seconds <= 0:
        return rate
    now = n_bytes / seconds
    return now if not rate else rate + _SMOOTHING * (now - rate)


@dataclass(frozen=True, slots=True)
class Decision:
    """``plan`` is what to restore, None to compute everything. Seconds are expected, 0 where nothing is known.

    ``restore_s`` is for the plan that was looked at last and nearest to what was decided; ``prefill_s`` for the same
    tokens.
    """

    plan: Plan | None
    restore_s: float = 0.0
    prefill_s: float = 0.0


def decide(plan: Plan, have: int, prefill: PrefillSeconds, rates: Rates, workers: int, *, above: int = 0) -> Decision:
    """The cheapest of: all of ``plan``, a shorter restore with the rest computed, everything computed.

    A shorter one ends beyond ``above``.
    """
    whole_s = prefill(have, plan.position)
    if not whole_s:
        return Decision(plan)
    costs = [(restore_s(shorter, rates, workers), shorter) for shorter in (plan, *_shorter(plan, max(have, above)))]
    best_s, best = min(costs, key=lambda each: each[0] + prefill(each[1].position, plan.position))
    gain_s = prefill(have, best.position)
    if best_s < gain_s:
        return Decision(best, best_s, gain_s)
    return Decision(None, costs[0][0], whole_s)


def _shorter(plan: Plan, have: int) -> Iterable[Plan]:
    """Plans that end where a record ends, or at an earlier checkpoint."""
    if plan.marks:
        for number, mark in enumerate(plan.marks[1:], 1):
            rows = tuple(each for each in plan.rows if each.found.start < mark.position)
            yield replace(plan, position=mark.position, rows=rows, marks=plan.marks[number:])
        return
    for count in range(len(plan.rows) - 1, 0, -1):
        # Where the source stays the same a shorter restore is a smaller one of the same kind: its ends are enough.
        if plan.rows[count].source.peer != plan.rows[count - 1].source.peer and plan.rows[count - 1].found.end > have:
            rows = plan.rows[:count]
            yield replace(plan, position=rows[-1].found.start + rows[-1].found.agreeing, rows=rows)


def restore_s(plan: Plan, rates: Rates, workers: int) -> float:
    """How long a restore of ``plan`` is expected to take, without what nobody has measured."""
    marks = plan.checkpoints()
    by_stream: dict[tuple[str, str], list[Candidate]] = {}
    for each in (*plan.rows, *marks):
        by_stream.setdefault((each.source.peer, each.found.kind.tier), []).append(each)
    raw_bytes = sum(each.found.raw_bytes for each in (*plan.rows, *marks))
    transfer_s = max((_transfer_s(group) for group in by_stream.values()), default=0.0)
    decode_s = raw_bytes / rates.decode_bytes_per_s / workers if rates.decode_bytes_per_s else 0.0
    build_s = raw_bytes / rates.build_bytes_per_s if rates.build_bytes_per_s else 0.0
    return max(transfer_s, decode_s) + build_s


def _transfer_s(group: list[Candidate]) -> float:
    return expected_s(group[0].source, sum(each.found.size_bytes for each in group))


def expected_s(source: Source, n_bytes: int) -> float:
    """How long so many bytes of one stream from ``source`` take; a rate that is not known counts as infinite."""
    if not isinstance(source, VaultClient):
        return 0.0
    rate = source.link.receive_rate(RATE_AGE_S)
    return source.link.rtt_s + (n_bytes / rate if rate else 0.0)
