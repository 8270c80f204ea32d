"""A breaker: a peer that failed is left alone for a while, and asked by one call at a time until it answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tierkv.errors import BreakerOpen, NotAuthenticated, PeerError, Unreachable, WrongService

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
SLOW_CALLS_TO_OPEN = 2


@dataclass(frozen=True, slots=True)
class Attempt:
    """One admitted call; results of calls that began before the breaker last changed say nothing new."""

    generation: int
    trial: bool


# No breaker is of this generation: nothing that comes of such an attempt is remembered.
UNCOUNTED = Attempt(-1, trial=False)


class Breaker:
    """closed -> open for 0.5 s, doubling to 10 s -> half-open: one trial decides. Owned by one event loop.

    A peer that is gone, refuses our token or is something else opens it at once; one that is slow, at the second
    call in a row (``slow_calls_to_open``).
    """

    def __init__(
        self,
        peer: str,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        first_backoff_s: float = FIRST_BACKOFF_S,
        slow_calls_to_open: int = SLOW_CALLS_TO_OPEN,
    ) -> None:
        self._peer = peer
        self._monotonic = monotonic
        self._first_backoff_s = first_backoff_s
        self._slow_calls_to_open = slow_calls_to_open
        self._generation = 0
        self._open_until: float | None = None
        self._backoff_s = first_backoff_s
        self._slow = 0
        self._trial_in_flight = False
        self._last_error = ""

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        if self._open_until is None:
            return "closed"
        return "open" if self._monotonic() < self._open_until else "half-open"

    def admit(self) -> Attempt:
        """The call may go on. Raises BreakerOpen, without any I/O, if the peer is to be left alone."""
        state = self.state
        if state == "closed":
            return Attempt(self._generation, trial=False)
        if state == "open" or self._trial_in_flight:
            raise BreakerOpen(self._peer, f"not asked, it failed a moment ago ({self._last_error})")
        self._trial_in_flight = True
        return Attempt(self._generation, trial=True)

    def succeeded(self, attempt: Attempt) -> None:
        if attempt.generation != self._generation:
            return
        self._slow = 0
        if attempt.trial:
            self._change()
            self._open_until = None
            self._backoff_s = self._first_backoff_s

    def failed(self, attempt: Attempt, error: PeerError) -> bool:
        """True if this failure opened the breaker (again)."""
        if attempt.generation != self._generation:
            return False
        self._last_error = str(error).removeprefix(f"{self._peer}: ")
        self._slow += 1
        gone = isinstance(error, Unreachable | NotAuthenticated | WrongService)
        if not (gone or attempt.trial or self._slow >= self._slow_calls_to_open):
            return False
        if attempt.trial:
            self._backoff_s = min(self._backoff_s * 2, LONGEST_BACKOFF_S)
        self._change()
        self._open_until = self._monotonic() + self._backoff_s
        return True

    def abandoned(self, attempt: Attempt) -> None:
        """The caller left before an outcome was known."""
        if attempt.generation == self._generation and attempt.trial:
            self._trial_in_flight = False

    def retry_now(self) -> None:
        """There is a sign of life: the next call is the trial, whatever is left of the back-off."""
        if self._open_until is not None:
            self._open_until = min(self._open_until, self._monotonic())

    def _change(self) -> None:
        self._generation += 1
        self._slow = 0
        self._trial_in_flight = False
