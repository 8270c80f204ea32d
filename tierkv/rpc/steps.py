"""Many short waits of one stream, each with a limit of its own, on one timer.

``asyncio.timeout`` makes and cancels a timer for every wait. At a thousand messages a second that is a tenth of what
the loop's thread does between two messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import TypeVar

from tierkv.errors import DeadlineExceeded

T = TypeVar("T")


class Steps:
    """A context manager; one wait at a time, in whatever task."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[object] | None = None
        self._since = 0.0
        self.number = 0
        """Of the present wait, or the last one."""
        self._until = 0.0
        self._over = False
        self._failure: Exception | None = None

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def waiting_s(self) -> float:
        """How long the present wait has lasted, 0 between waits."""
        return self._loop.time() - self._since if self._waiting is not None else 0.0

    def fail(self, error: Exception) -> None:
        """The present wait ends with this error; nothing happens between waits."""
        if self._waiting is not None:
            self._failure, self._over = error, True
            self._waiting.cancel()

    async def wait(self, awaitable: Awaitable[T], seconds: float, problem: str) -> T:
        """What the awaitable gives. Raises DeadlineExceeded, saying ``problem``, after ``seconds``; or see ``fail``."""
        task = asyncio.current_task()
        assert task is not None
        cancelled_before = task.cancelling()
        self._begin(task, seconds)
        try:
            return await awaitable
        except BaseException as error:
            if self._over and task.uncancel() <= cancelled_before and isinstance(error, asyncio.CancelledError):
                raise self._failure or DeadlineExceeded(self._peer, f"{problem} for {seconds:.3g} s") from None
            raise
        finally:
            self._waiting = None

    def _begin(self, task: asyncio.Task[object], seconds: float) -> None:
        self._waiting, self._over, self._failure = task, False, None
        self._since = self._loop.time()
        self.number += 1
        self._until = self._since + seconds
        if self._timer is not None and self._timer.when() > self._until:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._until, self._look)

    def _look(self) -> None:
        """The timer went off: for the wait that there is now, or for one that was over in time."""
        self._timer = None
        if self._waiting is None:
            return
        if self._loop.time() >= self._until:
            self._over = True
            self._waiting.cancel()
        else:
            self._timer = self._loop.call_at(self._until, self._look)
