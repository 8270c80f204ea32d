"""Time, injected: durations come from a clock that never jumps, dates only ever go to a screen."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks in one."""

    def monotonic(self) -> float:
        """Seconds that only ever grow: ages, leases, undo windows."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch, for display; may jump."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
