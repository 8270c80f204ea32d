"""Records that were acknowledged from RAM and are on their way to the log: durability "none"."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tierkv.errors import BadFrame
from tierkv.store.arena import Runs
from tierkv.store.catalog import Catalog
from tierkv.store.disk_room import Room, Trouble
from tierkv.store.index import State

# Where the index says that a row is while it is in RAM only: in no segment.
UNPLACED = (1 << 64) - 1
# What a process that is killed may lose at most.
MAX_BEHIND_BYTES = 64 << 20
# So long after the disk refused it is asked again; what was set aside by a purge and brought back is written then too.
_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Behind:
    """A row's bytes, and the blocks on the disk that are reserved for them."""

    pages: Runs
    size_bytes: int
    hint_bytes: int
    reserved: int


class WriteBehind:
    """A thread of its own writes what was added, the oldest first; every row has its pages until then.

    What a purge set aside is not written, unless it is brought back; what is evicted before its turn never is.
    ``append`` is called with ``log_lock`` and raises OSError; ``lock`` is the catalog's.
    """

    def __init__(
        self,
        append: Callable[[Behind, bool], int],
        catalog: Catalog,
        room: Room,
        trouble: Trouble,
        lock: threading.Lock,
        log_lock: threading.Lock,
        cap_bytes: int,
    ) -> None:
        self.size_bytes = 0
        self._append, self._catalog, self._room, self._trouble = append, catalog, room, trouble
        self._lock, self._log_lock = lock, log_lock
        self._cap_bytes = cap_bytes
        self._rows: dict[int, Behind] = {}
        self._stop = False
        self._wakeup = threading.Condition(lock)
        self._thread = threading.Thread(target=self._run, name="vault-write-behind", daemon=True)
        self._thread.start()

    # --- called with the catalog's lock held --------------------------------------------------

    def takes(self, size_bytes: int) -> bool:
        """Whether a record may be acknowledged before it is written: not while the disk fails or is far behind."""
        return not self._trouble.reason and self.size_bytes + size_bytes <= self._cap_bytes

    def add(self, row: int, behind: Behind) -> None:
        self._rows[row] = behind
        self.size_bytes += behind.size_bytes
        self._wakeup.notify()

    def holds(self, row: int) -> bool:
        """Whether the row's pages are all that there is of it."""
        return row in self._rows

    def forget(self, row: int) -> bool:
        """The row needs no place any more: it has one, or its record left; False if it was not waiting."""
        behind = self._rows.pop(row, None)
        if behind is None:
            return False
        self.size_bytes -= behind.size_bytes
        self._room.reserved -= behind.reserved
        return True

    def _next(self) -> int | None:
        state = self._catalog.index.state
        return next((row for row in self._rows if state[row] == State.VISIBLE), None)

    # --- writing ------------------------------------------------------------------------------

    def write_all(self) -> None:
        """Whatever was added and is in sight is in the log; called with ``log_lock`` held. Raises OSError."""
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        with self._lock:
            row = self._next()
            if row is None:
                return False
            behind, pinned = self._rows[row], bool(self._catalog.index.pinned[row])
            self._catalog.open(row)  # its pages stay its own, whoever removes it meanwhile
        try:
            place = self._append(behind, pinned)
        except BaseException:
            with self._lock:
                self._catalog.close(row)
            raise
        with self._lock:
            self.forget(row)
            self._catalog.index.place[row] = place
            self._catalog.close(row)
        return True

    def stop(self) -> None:
        """The thread has ended."""
        with self._wakeup:
            self._stop = True
            self._wakeup.notify()
        self._thread.join()

    def _run(self) -> None:
        refused = False
        while True:
            with self._wakeup:
                if refused:
                    self._wakeup.wait_for(lambda: self._stop, _AGAIN_S)
                elif self._rows:
                    self._wakeup.wait_for(lambda: self._stop or self._next() is not None, _AGAIN_S)
                else:
                    self._wakeup.wait_for(lambda: self._stop or self._rows)
                if self._stop:
                    return
            try:
                with self._log_lock:
                    self._write_next()
                refused = False
            except (OSError, BadFrame) as error:
                self._trouble.note(error)
                refused = True
