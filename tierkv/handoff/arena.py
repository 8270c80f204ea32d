"""Shared memory that cannot fault: allocated in full before use, never truncated, gone with its last user.

One side writes and the other one reads. Once both have mapped it nobody else can write it, nor punch a hole into it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
from bisect import bisect_left, insort

from tierkv.errors import HandoffError

ALIGNMENT = 256
_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; Python knows it since 3.13


class Arena:
    """One mapping of shared memory. ``view`` is its bytes; ``fd`` stays open on the side that made it."""

    def __init__(self, fd: int, size_bytes: int, *, writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # Page faults taken now are not taken by the first request.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.fd = fd
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes, flags=flags, prot=access)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size_bytes: int, *, writable: bool) -> Arena:
        """Raises HandoffError("no_shared_memory") if the memory is not there in full."""
        try:
            fd = _anonymous_file()
        except OSError as error:
            raise HandoffError("no_shared_memory", f"a file for shared memory: {error}") from error
        try:
            _allocate(fd, size_bytes)
            arena = cls(fd, size_bytes, writable=writable)
            if writable:
                _seal_contents(fd)
            return arena
        except (OSError, ValueError) as error:
            os.close(fd)
            raise HandoffError("no_shared_memory", f"{size_bytes} bytes of shared memory: {error}") from error

    @classmethod
    def attach(cls, fd: int, size_bytes: int, *, writable: bool) -> Arena:
        """The arena behind a descriptor that came over the socket; the descriptor is closed.

        Raises HandoffError if it is smaller than announced, or could become so: reading behind its end would kill
        the process.
        """
        try:
            if os.fstat(fd).st_size < size_bytes:
                raise HandoffError("handoff", "the arena is smaller than announced")
            if not _is_sealed(fd):
                raise HandoffError("handoff", "the arena could be cut short")
            arena = cls(fd, size_bytes, writable=writable)
            if writable:
                _seal_contents(fd)
        except (OSError, ValueError) as error:
            raise HandoffError("handoff", f"the arena cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        arena.fd = -1
        return arena

    def close(self) -> bool:
        """Gives the mapping back as soon as no array points into it any more; whether that is now."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            return False  # a copy is still under way in another thread; the mapping goes with its last view
        return True


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("tierkv-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fd, name = tempfile.mkstemp(prefix="tierkv-arena-")
    os.unlink(name)  # noqa: PTH108
    return fd


def _allocate(fd: int, size_bytes: int) -> None:
    if sys.platform == "linux":
        import fcntl

        os.posix_fallocate(fd, 0, size_bytes)
        # Nobody, not even the process that gets the descriptor, can cut it short under the other's feet.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return
    zeros = bytes(1 << 20)
    for start in range(0, size_bytes, len(zeros)):
        os.write(fd, zeros[: min(len(zeros), size_bytes - start)])


def _seal_contents(fd: int) -> None:
    """Its one writer has mapped it: nobody writes it in another way any more, and no seal is added."""
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):  # Linux before 5.1 does not have it
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def _is_sealed(fd: int) -> bool:
    """Whether the file keeps its length; where there are no seals, the agent's word must do."""
    if sys.platform != "linux":
        return True
    import fcntl

    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)


class Regions:
    """Which parts of an arena are in use: first fit over a sorted free list. Not thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free: list[tuple[int, int]] = [(0, size_bytes)]
        self._used: dict[int, int] = {}

    @property
    def used_bytes(self) -> int:
        return sum(self._used.values())

    def allocate(self, length: int) -> int | None:
        """The offset of ``length`` bytes, aligned to 256, or None when no gap is long enough now."""
        length = max(ALIGNMENT, -(-length // ALIGNMENT) * ALIGNMENT)
        for index, (start, room) in enumerate(self._free):
            if room >= length:
                if room == length:
                    del self._free[index]
                else:
                    self._free[index] = (start + length, room - length)
                self._used[start] = length
                return start
        return None

    def release(self, offset: int) -> None:
        """Raises HandoffError if no region starts there."""
        length = self._used.pop(offset, None)
        if length is None:
            raise HandoffError("handoff", f"no region starts at {offset}")
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and offset + length == self._free[index][0]:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free.pop(index - 1)
            length += before
        insort(self._free, (offset, length))
