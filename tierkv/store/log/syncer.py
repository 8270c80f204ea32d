"""Syncs a log in the background: every so many bytes or so many seconds, many writes in one go."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Syncer:
    """A thread of its own. ``sync`` raises OSError; ``on_error`` is told, and it is tried again at the next turn."""

    def __init__(
        self, sync: Callable[[], None], on_error: Callable[[OSError], object], every_bytes: int, every_s: float
    ) -> None:
        self._sync = sync
        self._on_error = on_error
        self._every_bytes, self._every_s = every_bytes, every_s
        self._condition = threading.Condition()
        self._unsynced = 0
        self._written = self._synced = 0
        self._urgent = self._stop = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="vault-sync", daemon=True)
        self._thread.start()

    def wrote(self, size_bytes: int) -> int:
        """So much more is to be synced; returns a ticket for ``wait``."""
        with self._condition:
            self._unsynced += size_bytes
            self._written += 1
            self._condition.notify_all()
            return self._written

    def wait(self, ticket: int) -> None:
        """What the ticket stands for is synced. Raises OSError when it could not be."""
        with self._condition:
            self._urgent = True
            self._condition.notify_all()
            while self._synced < ticket and not self._stop:
                self._condition.wait()
                if self._error is not None and self._synced < ticket:
                    raise self._error

    def stop(self) -> None:
        """The thread has ended; nothing is synced any more."""
        with self._condition:
            self._stop = True
            self._condition.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._stop or self._written > self._synced)
                if not self._urgent and self._unsynced < self._every_bytes:
                    self._condition.wait_for(
                        lambda: self._stop or self._urgent or self._unsynced >= self._every_bytes, self._every_s
                    )
                if self._stop:
                    return
                upto, self._unsynced, self._urgent = self._written, 0, False
            self._turn(upto)

    def _turn(self, upto: int) -> None:
        error: OSError | None = None
        try:
            self._sync()
        except OSError as problem:
            error = problem
            self._on_error(problem)
        with self._condition:
            self._error = error
            if error is None:
                self._synced = upto
            self._condition.notify_all()
            if error is not None:
                self._condition.wait_for(lambda: self._stop, min(1.0, self._every_s * 10))
