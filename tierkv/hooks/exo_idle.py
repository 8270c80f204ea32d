"""The time in which an EXO runner waits for its next task, on its main thread. Standard library only.

The queue that EXO's ``Runner`` takes its work from becomes one that does something meanwhile: the slices of a live
sample, when there is one to compare. Without one it waits as any queue does.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any, Protocol

QUEUE = "_work_queue"
POLL_S = 0.05


class Idler(Protocol):
    """What ``hooks.sampling.Sampler`` is to the queue."""

    @property
    def wanted(self) -> bool: ...

    def busy(self) -> None: ...

    def idle(self) -> None: ...


class IdleQueue(queue.Queue[Any]):
    """``idler`` gives what there is to do while nothing is in the queue, or None."""

    def __init__(self, idler: Callable[[], Idler | None]) -> None:
        super().__init__()
        self._idler = idler

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not block or timeout is not None:
            return super().get(block, timeout)
        idler = self._idler()
        if idler is None:
            return super().get()
        try:
            while idler.wanted:
                try:
                    return super().get(timeout=POLL_S)
                except queue.Empty:
                    idler.idle()
            return super().get()
        finally:
            idler.busy()


def watch(runner: Any, idler: Callable[[], Idler | None]) -> bool:
    """The runner's idle time is used from now on; False for one that waits in another way than this one knows."""
    old = getattr(runner, QUEUE, None)
    if type(old) is not queue.Queue:
        return False
    new = IdleQueue(idler)
    while not old.empty():
        new.put(old.get_nowait())
    setattr(runner, QUEUE, new)
    return True
