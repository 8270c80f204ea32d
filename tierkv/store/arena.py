"""Memory set aside once, in pages: a record is a few runs of pages, so nothing fragments or is allocated later."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable

import numpy as np

# Half a page a record is wasted on average: 3 % of a record of 1 MiB.
PAGE_BYTES = 64 << 10

# So much memory is made real before anybody needs it, a restore of 100 MB at least: reading a file into memory that the
# system has yet to find and clear takes 2.7 times as long as into memory that is there (0.7 against 1.9 GB/s).
READY_BYTES = 128 << 20
_READY_STEP_BYTES = 8 << 20
_MADV_POPULATE_WRITE = 23

# (first page, number of pages) in the order of the record's bytes.
Runs = list[tuple[int, int]]


class Extents:
    """Where one record's bytes lie in the arena."""

    __slots__ = ("_arena", "_places", "_starts", "size_bytes")

    def __init__(self, arena: memoryview, runs: Runs, page_bytes: int, size_bytes: int) -> None:
        self._arena = arena
        self.size_bytes = size_bytes
        self._starts: list[int] = []
        self._places = [first * page_bytes for first, _ in runs]
        offset = 0
        for _, count in runs:
            self._starts.append(offset)
            offset += count * page_bytes

    def pieces(self, offset: int, length: int) -> list[memoryview]:
        """Views of bytes [offset, offset + length) of the record, cut at its end; a handful even for a large record."""
        end = min(offset + length, self.size_bytes)
        found: list[memoryview] = []
        index = bisect_right(self._starts, offset) - 1
        while offset < end:
            run_end = self._starts[index + 1] if index + 1 < len(self._starts) else self.size_bytes
            place = self._places[index] + offset - self._starts[index]
            take = min(end, run_end) - offset
            found.append(self._arena[place : place + take])
            offset += take
            index += 1
        return found

    def copy_in(self, offset: int, data: memoryview) -> None:
        """Writes ``data`` at ``offset``; numpy copies it without the interpreter lock."""
        done = 0
        for piece in self.pieces(offset, len(data)):
            np.frombuffer(piece, np.uint8)[:] = np.frombuffer(data[done : done + len(piece)], np.uint8)
            done += len(piece)


def _madvise() -> Callable[[int, int, int], int] | None:
    """The system's own, which unlike Python's runs without the interpreter lock; None where there is no such thing."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


class Arena:
    """``cap_bytes`` rounded down to whole pages, mapped once and never resized. The owner's lock guards it.

    The system gives a page real memory at its first write or when ``prepare`` asks for it, and freed pages are used
    again first, so that resident memory is about the most that was ever in use at once, and what is prepared, and never
    above the cap (plus 8 bytes a page for the tables).
    """

    def __init__(self, cap_bytes: int, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.pages = cap_bytes // page_bytes
        if self.pages < 1:
            raise ValueError(f"a cap of {cap_bytes} bytes holds no page of {page_bytes}")
        self._map = mmap.mmap(-1, self.pages * page_bytes)
        # Prompts have no place in a core dump; huge pages make the first write of a page about twice as fast.
        for advice in ("MADV_DONTDUMP", "MADV_HUGEPAGE"):
            if hasattr(mmap, advice):
                try:
                    self._map.madvise(getattr(mmap, advice))
                except OSError:
                    pass
        self._view = memoryview(self._map)
        self.free_pages = self.pages
        self._withheld: Runs = []
        self._free = {0: self.pages}
        self._free_by_end = {self.pages: 0}
        # For the first page of a record's run: its length, and the first page of the next run (or itself: the last).
        self._length = array("I", bytes(4 * self.pages))
        self._next = array("I", bytes(4 * self.pages))
        # Pages from here on were nobody's yet, and from there on were not prepared.
        self._untaken = self._unready = 0
        self._madvise = _madvise()

    @property
    def mapped_bytes(self) -> int:
        """The most that ``cap_bytes`` can be."""
        return self.pages * self.page_bytes

    @property
    def withheld_pages(self) -> int:
        return sum(count for _, count in self._withheld)

    @property
    def cap_bytes(self) -> int:
        return (self.pages - self.withheld_pages) * self.page_bytes

    @property
    def used_bytes(self) -> int:
        return (self.pages - self.withheld_pages - self.free_pages) * self.page_bytes

    def withhold(self, count: int) -> None:
        """Exactly ``count`` pages are nobody's; as many more than now must be free."""
        more = count - self.withheld_pages
        if more < 0:
            self.give(self._withheld)
            self._withheld = self.take(count) if count else []
        elif more > 0:
            self._withheld += self.take(more)

    def prepare(self, ahead_bytes: int = READY_BYTES, within_s: float = 0.2) -> bool:
        """The next ``ahead_bytes`` that were nobody's yet have real memory; False when the time was over before.

        Needs no lock, since nothing is written: any thread may call it, one at a time. Where the system cannot do that,
        pages become real at their first write.
        """
        until_s = time.monotonic() + within_s
        first = int(np.frombuffer(self._view, np.uint8).ctypes.data)
        while self._madvise is not None:
            at = max(self._unready, self._untaken) * self.page_bytes
            end = min(self._untaken * self.page_bytes + ahead_bytes, self.mapped_bytes)
            if at >= end:
                return True
            if time.monotonic() >= until_s:
                return False
            step = min(_READY_STEP_BYTES, end - at)
            if self._madvise(first + at, step, _MADV_POPULATE_WRITE):
                self._madvise = None  # a system older than the advice, or one without memory to give
            self._unready = (at + step) // self.page_bytes
        return True

    def pages_for(self, size_bytes: int) -> int:
        return -(-size_bytes // self.page_bytes)

    def take(self, count: int) -> Runs:
        """``count`` pages that are nobody else's, those freed last first. The caller knows that there are so many."""
        assert 0 < count <= self.free_pages
        self.free_pages -= count
        runs: Runs = []
        while count:
            first, length = self._free.popitem()
            end = first + length
            del self._free_by_end[end]
            if length > count:
                self._put(first + count, end)
                length = count
            runs.append((first, length))
            self._untaken = max(self._untaken, first + length)
            count -= length
        return runs

    def give(self, runs: Runs) -> None:
        """Takes pages back, joined with their free neighbours."""
        for first, count in reversed(runs):
            self.free_pages += count
            end = first + count
            before = self._free_by_end.pop(first, None)
            if before is not None:
                del self._free[before]
                first = before
            after = self._free.pop(end, None)
            if after is not None:
                end += after
                del self._free_by_end[end]
            self._put(first, end)

    def link(self, runs: Runs) -> int:
        """Chains the runs and returns the first page: all that an index has to remember of them."""
        following = runs[-1][0]
        for first, count in reversed(runs):
            self._length[first] = count
            self._next[first] = following
            following = first
        return following

    def chain(self, first: int) -> Runs:
        """The runs that ``link`` chained."""
        runs = [(first, self._length[first])]
        while self._next[first] != first:
            first = self._next[first]
            runs.append((first, self._length[first]))
        return runs

    def extents(self, runs: Runs, size_bytes: int) -> Extents:
        return Extents(self._view, runs, self.page_bytes, size_bytes)

    def _put(self, first: int, end: int) -> None:
        self._free[first] = end - first
        self._free_by_end[end] = first
