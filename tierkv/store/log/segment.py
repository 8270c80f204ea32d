"""One segment file: entries are appended, marked in place, punched out, and read."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from tierkv.errors import BadFrame
from tierkv.store.log.files import Buffer, Disk, read_into
from tierkv.store.log.format import (
    ALIGN,
    HEAD_BYTES,
    RECORD_AT,
    SLOT_AT,
    EntryHead,
    Mark,
    SegmentHead,
    entry_bytes,
    pack_mark,
    pack_slot,
    unpack_mark,
)


class Segment:
    """An open segment. Appends come one at a time; everything else from any thread.

    ``end_block``: where the next entry goes. ``used_blocks``: what the file takes on the disk. ``live_blocks`` is kept
    by the log. The file is closed when the last of its users has let go.
    """

    def __init__(self, number: int, path: Path, disk: Disk, fd: int, *, writable: bool) -> None:
        self.number = number
        self.path = path
        self.writable = writable
        self.generation = 0
        self.closed = False
        self.loaded = True
        self.damage = ""
        self.epoch = 0
        self.vault_s = 0.0
        self.has_hint = False
        self.hint_bytes = 0
        self.live_blocks = 0
        self.changed_s = 0.0
        self._disk = disk
        self._fd = fd
        self._users = 1
        self._lock = threading.Lock()
        self.measure()
        self.end_block = -(-self.size_bytes // ALIGN)

    @classmethod
    def create(cls, head: SegmentHead, path: Path, disk: Disk) -> Segment:
        """A new file with its header. Raises OSError; then there is none."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            disk.write(fd, [head.pack()], 0)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return cls(head.number, path, disk, fd, writable=True)

    @classmethod
    def open(cls, number: int, path: Path, disk: Disk) -> Segment:
        """Raises OSError."""
        try:
            return cls(number, path, disk, os.open(path, os.O_RDWR), writable=True)
        except OSError:
            return cls(number, path, disk, os.open(path, os.O_RDONLY), writable=False)

    # --- users --------------------------------------------------------------------------------

    def acquire(self) -> Segment:
        with self._lock:
            self._users += 1
        return self

    def let_go(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                os.close(self._fd)
                self._fd = -1

    @property
    def fd(self) -> int:
        return self._fd

    # --- room ---------------------------------------------------------------------------------

    def measure(self) -> None:
        """What the file takes on the disk, asked of the system."""
        found = os.fstat(self._fd)
        self.size_bytes = found.st_size
        self.used_blocks = -(-found.st_blocks * 512 // ALIGN)

    @property
    def dead_blocks(self) -> int:
        return max(0, self.used_blocks - 1 - self.live_blocks)

    # --- writing ------------------------------------------------------------------------------

    def append(self, head: EntryHead, mark: bytes, record: Sequence[Buffer]) -> None:
        """The entry is whole in the file. Raises OSError; then the file is as it was, or only longer."""
        at = head.block * ALIGN
        try:
            self._disk.write(self._fd, [head.pack() + mark, *record, head.pack_end()], at)
        except OSError:
            self.cut(at)
            raise
        self.size_bytes = at + entry_bytes(head.size_bytes)
        self.end_block = head.block + head.blocks
        self.used_blocks += head.blocks
        self.live_blocks += head.blocks

    def cut(self, size_bytes: int) -> None:
        """The file ends there, if the disk lets it."""
        try:
            self._disk.truncate(self._fd, size_bytes)
        except OSError:
            self.end_block = -(-os.fstat(self._fd).st_size // ALIGN)
        self.measure()

    def set_mark(self, block: int, sequence: int, mark: Mark, *, pinned: bool, epoch: int) -> None:
        """Raises OSError."""
        data = pack_mark(mark, pinned=pinned, epoch=epoch, sequence=sequence)
        self._disk.write(self._fd, [data], block * ALIGN + HEAD_BYTES)

    def erase(self, block: int, blocks: int) -> bool:
        """The entry is gone from the file as far as the system can do that; True if its room is free."""
        if not self._disk.punch(self._fd, block * ALIGN, blocks * ALIGN):
            return False
        self.used_blocks = max(1, self.used_blocks - blocks)
        return True

    def set_slot(self, *, closed: bool, generation: int) -> None:
        """Raises OSError."""
        self._disk.write(self._fd, [pack_slot(generation, closed=closed)], SLOT_AT)
        self.generation, self.closed = generation, closed

    def sync(self) -> None:
        self._disk.sync(self._fd)

    # --- reading ------------------------------------------------------------------------------

    def head(self, block: int) -> tuple[EntryHead, Mark, bool, int]:
        """Head, mark, whether pinned, and the mark's epoch of the entry at ``block``. Raises BadFrame, OSError."""
        data = os.pread(self._fd, RECORD_AT, block * ALIGN)
        head = EntryHead.unpack(data, self.number, block)
        return (head, *unpack_mark(data[HEAD_BYTES:], head.sequence))

    def check_place(self, block: int, size_bytes: int) -> None:
        """A record of that size is at ``block``. Raises BadFrame, OSError.

        What its mark says does not count: a reader holds the record, whatever is told the next start. It must be whole,
        at the second look at least: it may be being written.
        """
        try:
            head, *_ = self.head(block)
        except BadFrame:
            head, *_ = self.head(block)
        if head.size_bytes != size_bytes:
            raise BadFrame("damaged_entry", "another entry lies where the index says")

    def is_blank(self, block: int) -> bool:
        """Whether the block holds zeros only: a hole, or what was punched out."""
        return not any(os.pread(self._fd, ALIGN, block * ALIGN))

    def read_record(self, block: int, size_bytes: int, buffers: Sequence[memoryview]) -> None:
        """The buffers hold the record, if it is there. Raises BadFrame, OSError."""
        self.check_place(block, size_bytes)
        read_into(self._fd, buffers, block * ALIGN + RECORD_AT)

    def read(self, block: int, offset: int, length: int) -> bytes:
        """Bytes of the record at ``block``. Raises BadFrame when the file ends before."""
        data = bytearray(length)
        read_into(self._fd, [memoryview(data)], block * ALIGN + RECORD_AT + offset)
        return bytes(data)
