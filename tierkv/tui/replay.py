"""A recording behind the same screens: it plays at any speed, and jumps to any moment.

Steps are folded into the same records as live ones. The records are frozen, so that a moment every few seconds is
kept for nothing and a jump folds only what lies behind the last of them.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import cast

from tierkv.telemetry.recording import Header, Step
from tierkv.tui import record as steps
from tierkv.tui.feed import EVENTS_KEPT
from tierkv.tui.model import ClusterView, EventLine, EventsView, cluster_view
from tierkv.tui.record import Phase, TargetRecord

SPEEDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MOMENT_S = 10.0

Records = dict[str, TargetRecord]


class ReplayFeed:
    """Implements ``Feed``. ``position_s`` counts from the first step to the last. ``missing``: what of the recording
    could not be read."""

    def __init__(
        self,
        header: Header,
        told: Sequence[Step],
        *,
        missing: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.header, self.missing = header, missing
        self._steps = tuple(told)
        self._start_unix_s = told[0].at_unix_s
        self.length_s = max(0.0, told[-1].at_unix_s - self._start_unix_s)
        self._clock = clock
        self._at_s, self._since_s = 0.0, clock()
        self.speed = 1.0
        self._times = [step.at_unix_s - self._start_unix_s for step in told]
        heard = {step.target for step in told}
        listed = [target for target in header.targets if target in heard]
        order = dict.fromkeys([*listed, *(step.target for step in told)])
        self._moments: list[tuple[float, int, Records]] = [(0.0, 0, {name: TargetRecord(name) for name in order})]
        self._fold_all()
        self._events = [
            (step.at_unix_s - self._start_unix_s, EventLine(number, event), step.dropped)
            for number, (step, event) in enumerate(((s, e) for s in told for e in s.events), 1)
        ]
        self._event_times = [at for at, _, _ in self._events]

    def _fold_all(self) -> None:
        records = dict(self._moments[0][2])
        for number, step in enumerate(self._steps):
            at = self._times[number]
            if at - self._moments[-1][0] >= MOMENT_S:
                self._moments.append((at, number, dict(records)))
            records[step.target] = _folded(records[step.target], step, at)

    # --- playing ---------------------------------------------------------------------------------

    @property
    def position_s(self) -> float:
        played = (self._clock() - self._since_s) * self.speed
        return min(self.length_s, max(0.0, self._at_s + played))

    def seek(self, by_s: float) -> None:
        """The position is ``by_s`` later (earlier when negative), within the recording."""
        self._at_s, self._since_s = min(self.length_s, max(0.0, self.position_s + by_s)), self._clock()

    def faster(self, steps_up: int) -> None:
        """The next speed up or down; the slowest stands still."""
        at = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - self.speed))
        self.seek(0.0)
        self.speed = SPEEDS[min(len(SPEEDS) - 1, max(0, at + steps_up))]

    async def run(self) -> None:
        await asyncio.Event().wait()

    # --- showing ---------------------------------------------------------------------------------

    def view(self) -> ClusterView:
        return self.view_at(self.position_s)

    def view_at(self, at_s: float) -> ClusterView:
        return cluster_view(
            tuple(self._records_at(at_s).values()),
            now_s=at_s,
            now_unix_s=self._start_unix_s + at_s,
            name=self.header.cluster,
            read_only=True,
            events=self._events_at(at_s),
            replay=f"REPLAY {_clock(at_s)}/{_clock(self.length_s)} {self.speed:g}x{' damaged' if self.missing else ''}",
        )

    def _records_at(self, at_s: float) -> Records:
        index = bisect_right(self._moments, at_s, key=lambda moment: moment[0]) - 1
        _, number, records = self._moments[max(0, index)]
        records = dict(records)
        while number < len(self._steps) and self._times[number] <= at_s:
            step = self._steps[number]
            records[step.target] = _folded(records[step.target], step, self._times[number])
            number += 1
        return records

    def _events_at(self, at_s: float) -> EventsView:
        count = bisect_right(self._event_times, at_s)
        shown = self._events[max(0, count - EVENTS_KEPT) : count]
        return EventsView(tuple(line for _, line, _ in shown), 0, max(0, count - EVENTS_KEPT))


def _folded(record: TargetRecord, step: Step, at_s: float) -> TargetRecord:
    if step.snapshot is not None:
        return steps.observed(record, step.snapshot, step.authenticated, at_s, step.at_unix_s)
    if step.ended is not None:
        phase = cast("Phase | None", step.phase if step.phase in ("refused", "foreign") else None)
        return steps.failed(record, step.ended, at_s, phase)
    return record


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
