"""Everything that writes to the disk, behind one small seam: a test puts its own ``Disk`` there to fail or crash."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tierkv.errors import BadFrame

Buffer = bytes | memoryview

_MOST_BUFFERS = 512
_PUNCH_AND_KEEP_SIZE = 0x03


def _fallocate() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


class Disk:
    """The operations of a store on its folder. All raise OSError."""

    def __init__(self) -> None:
        self._fallocate = _fallocate()

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """All bytes are written at ``offset``; on an error some may be."""
        left = [memoryview(buffer).cast("B") for buffer in buffers]
        first = 0
        while first < len(left):
            done = os.pwritev(fd, left[first : first + _MOST_BUFFERS], offset)
            if not done and any(left[first : first + _MOST_BUFFERS]):
                raise OSError(errno.EIO, "the disk takes no bytes")
            offset += done
            while first < len(left) and done >= len(left[first]):
                done -= len(left[first])
                first += 1
            if done:
                left[first] = left[first][done:]

    def punch(self, fd: int, offset: int, length: int) -> bool:
        """The bytes read as zeros and take no room any more; False where the system cannot do that."""
        if self._fallocate is None:
            return False
        while self._fallocate(fd, _PUNCH_AND_KEEP_SIZE, offset, length):
            if ctypes.get_errno() != errno.EINTR:
                return False
        return True

    def sync(self, fd: int) -> None:
        """What was written survives a power failure (as far as the drive tells the truth)."""
        getattr(os, "fdatasync", os.fsync)(fd)

    def sync_folder(self, folder: Path) -> None:
        """Names that were added or removed survive a power failure."""
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def replace(self, path: Path, data: Sequence[Buffer], *, durable: bool) -> None:
        """The file holds exactly ``data``, or what it held before."""
        draft = path.with_name(path.name + ".new")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self.write(fd, data, 0)
            if durable:
                self.sync(fd)
            self.rename(draft, path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        if durable:
            self.sync_folder(path.parent)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def free_bytes(self, folder: Path) -> int:
        """What this process may still write to the file system."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize


def read_into(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """The buffers are full. Raises BadFrame when the file ends before, OSError when it cannot be read."""
    left = [buffer for buffer in buffers if len(buffer)]
    first = 0
    while first < len(left):
        done = os.preadv(fd, left[first : first + _MOST_BUFFERS], offset)
        if not done:
            raise BadFrame("truncated", "the file ends inside a record")
        offset += done
        while first < len(left) and done >= len(left[first]):
            done -= len(left[first])
            first += 1
        if done:
            left[first] = left[first][done:]


def next_data(fd: int, offset: int, end: int) -> int:
    """The first offset from ``offset`` on that is not in a hole; ``end`` if there is none."""
    if not hasattr(os, "SEEK_DATA"):
        return offset
    try:
        return min(end, os.lseek(fd, offset, os.SEEK_DATA))
    except OSError as error:
        return end if error.errno == errno.ENXIO else offset


def refusal_reason(error: OSError) -> str:
    """Why a store cannot write, as a slug: disk_full, read_only, permission_denied or io_error."""
    return {
        errno.ENOSPC: "disk_full",
        errno.EDQUOT: "disk_full",
        errno.EFBIG: "disk_full",
        errno.EROFS: "read_only",
        errno.EACCES: "permission_denied",
        errno.EPERM: "permission_denied",
    }.get(error.errno or 0, "io_error")
