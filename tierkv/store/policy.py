"""What to give up first. A policy only orders; what may go at all (leaves that nothing holds) is the catalog's rule."""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Policy(Protocol):
    """Sees every row's life. All calls come under the store's lock; each is O(1) or O(log n)."""

    name: str

    def admitted(self, row: int, key: bytes) -> None:
        """A record came into sight under this key."""
        ...

    def admitted_many(self, rows: NDArray[np.int64], keys: Sequence[bytes]) -> None:
        """As ``admitted`` of one after another, ``rows`` [n] under ``keys`` [n]."""
        ...

    def used(self, row: int) -> None: ...

    def offered(self, row: int) -> None:
        """The row may be given up from now on: it has become a leaf, or nothing holds it any more."""
        ...

    def gone(self, row: int) -> None:
        """The record is out of sight; the row may come back as another record."""
        ...

    def returned(self, row: int) -> None:
        """The record that was ``gone`` is in sight again, as it was: an undone purge."""
        ...

    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        """The next row to give up, taken off the order. Rows that may not go are dropped: they are offered again."""
        ...

    def copy(self) -> Policy:
        """One of its own that would go on as this one."""
        ...


class LruPolicy:
    """Least recently used first, by the order of uses and not by a clock.

    A heap of offered rows whose entries may be out of date: a use only notes the row's new place, and the entry is put
    right when it surfaces. So a use is O(1) and each surfacing O(log n), paid for by the use that caused it.
    """

    name = "lru"
    _ROW_BITS = 32

    def __init__(self) -> None:
        self._uses = 0
        self._last_use = array("Q")
        self._queued = bytearray()
        self._heap: list[int] = []

    def admitted(self, row: int, key: bytes) -> None:  # noqa: ARG002
        while row >= len(self._last_use):
            self._last_use.append(0)
            self._queued.append(0)
        self.used(row)

    def admitted_many(self, rows: NDArray[np.int64], keys: Sequence[bytes]) -> None:  # noqa: ARG002
        if not len(rows):
            return
        missing = int(rows.max()) + 1 - len(self._last_use)
        if missing > 0:
            self._last_use.frombytes(bytes(8 * missing))
            self._queued += bytes(missing)
        np.frombuffer(self._last_use, "u8")[rows] = np.arange(len(rows)) + (self._uses + 1)
        self._uses += len(rows)

    def used(self, row: int) -> None:
        self._uses += 1
        self._last_use[row] = self._uses

    def offered(self, row: int) -> None:
        if not self._queued[row]:
            self._queued[row] = 1
            heapq.heappush(self._heap, self._last_use[row] << self._ROW_BITS | row)

    def gone(self, row: int) -> None:
        """Its entry, if any, is dropped when it surfaces."""

    def returned(self, row: int) -> None:
        """Its last use is still noted."""

    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        heap = self._heap
        while heap:
            row = heap[0] & 0xFFFFFFFF
            if not may_go(row):
                heapq.heappop(heap)
                self._queued[row] = 0
            elif heap[0] >> self._ROW_BITS != self._last_use[row]:
                heapq.heapreplace(heap, self._last_use[row] << self._ROW_BITS | row)
            else:
                heapq.heappop(heap)
                self._queued[row] = 0
                return row
        return None

    def copy(self) -> LruPolicy:
        other = LruPolicy()
        other._uses, other._last_use = self._uses, self._last_use[:]
        other._queued, other._heap = self._queued[:], self._heap[:]
        return other


class S3FifoPolicy:
    """S3-FIFO (Yang et al., SOSP 2023): a short queue that one-time records leave fast, a long one for what is used.

    A record enters the short queue, or the long one if it was given up lately (the ghosts). At the short queue's end
    what was used more than once moves on and the rest goes; at the long queue's end what was used gets another round.
    Only offered rows stand in the queues, so a record that was held comes back at the queue's beginning.
    """

    name = "s3fifo"
    _SHORT_SHARE = 10
    _MOST_USES = 3
    _SHORT, _LONG = 1, 2

    def __init__(self) -> None:
        self._home = bytearray()
        self._uses = bytearray()
        self._queued = bytearray()
        self._life = array("I")
        self._keys: list[bytes] = []
        self._counts = [0, 0, 0]
        self._queues: dict[int, deque[tuple[int, int]]] = {self._SHORT: deque(), self._LONG: deque()}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def admitted(self, row: int, key: bytes) -> None:
        while row >= len(self._home):
            for column in (self._home, self._uses, self._queued, self._life):
                column.append(0)
            self._keys.append(b"")
        self._keys[row] = key[:8]
        self._life[row] += 1
        self._uses[row] = self._queued[row] = 0
        again = self._ghosts.pop(self._keys[row], self) is None
        self._settle(row, self._LONG if again else self._SHORT)

    def admitted_many(self, rows: NDArray[np.int64], keys: Sequence[bytes]) -> None:
        for row, key in zip(rows.tolist(), keys, strict=True):
            self.admitted(row, key)

    def used(self, row: int) -> None:
        if self._uses[row] < self._MOST_USES:
            self._uses[row] += 1

    def offered(self, row: int) -> None:
        if not self._queued[row]:
            self._queued[row] = 1
            self._queues[self._home[row]].append((row, self._life[row]))

    def gone(self, row: int) -> None:
        self._counts[self._home[row]] -= 1

    def returned(self, row: int) -> None:
        self._counts[self._home[row]] += 1

    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        short, long = self._queues[self._SHORT], self._queues[self._LONG]
        while short or long:
            total = self._counts[self._SHORT] + self._counts[self._LONG]
            from_short = bool(short) and (not long or self._counts[self._SHORT] * self._SHORT_SHARE > total)
            row, life = (short if from_short else long).popleft()
            if self._life[row] != life or not self._queued[row]:
                continue
            self._queued[row] = 0
            if not may_go(row):
                continue
            if from_short and self._uses[row] > 1:
                self._counts[self._SHORT] -= 1
                self._uses[row] = 0
                self._settle(row, self._LONG)
                self.offered(row)
            elif not from_short and self._uses[row]:
                self._uses[row] -= 1
                self.offered(row)
            else:
                if from_short:
                    self._remember(self._keys[row])
                return row
        return None

    def copy(self) -> S3FifoPolicy:
        other = S3FifoPolicy()
        other._home, other._uses, other._queued = self._home[:], self._uses[:], self._queued[:]
        other._life, other._keys, other._counts = self._life[:], self._keys[:], self._counts[:]
        other._queues = {home: queue.copy() for home, queue in self._queues.items()}
        other._ghosts = self._ghosts.copy()
        return other

    def _settle(self, row: int, home: int) -> None:
        self._home[row] = home
        self._counts[home] += 1

    def _remember(self, key: bytes) -> None:
        self._ghosts[key] = None
        while len(self._ghosts) > max(64, self._counts[self._LONG]):
            self._ghosts.popitem(last=False)


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LruPolicy, "s3fifo": S3FifoPolicy}


def policy_named(name: str) -> Policy:
    """A fresh policy. Raises ValueError with the names there are."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; there are: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
