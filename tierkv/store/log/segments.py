"""The segments of a folder as one log: entries go to the open segment, room comes back, names are kept in order."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from tierkv.codec.frame import HEADER_BYTES
from tierkv.errors import BadFrame, StartupError
from tierkv.store.log.files import Buffer, Disk
from tierkv.store.log.folder import Folder
from tierkv.store.log.format import ALIGN, EntryHead, Mark, SegmentHead, entry_blocks, pack_mark, unpack_slot
from tierkv.store.log.segment import Segment

# Meta, lock and a draft of the meta; a block each.
_FIXED_BLOCKS = 4
_PLACE_BITS = 32
assert HEADER_BYTES < ALIGN


def place_of(segment: int, block: int) -> int:
    """Where an entry is, as the index keeps it."""
    return segment << _PLACE_BITS | block


def place_parts(place: int) -> tuple[int, int]:
    """Segment and block."""
    return place >> _PLACE_BITS, place & ((1 << _PLACE_BITS) - 1)


class SegmentLog:
    """Appends, marks and drops are the caller's to serialise (``DiskStore`` has one lock for them); the table of
    segments has a lock of its own, so that readers and those who erase may come from any thread."""

    def __init__(self, folder: Folder, disk: Disk, segment_bytes: int) -> None:
        self.folder = folder
        self.segment_bytes = segment_bytes
        self.sequence = 0
        self.can_punch = disk.punch(folder.lock_fd, ALIGN, ALIGN)
        self.dirty: dict[int, Segment] = {}
        self.dirty_bytes = 0
        self._disk = disk
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._open: Segment | None = None
        self._newest = 0
        # What is on the disk in files that are not segments: blocks of hints.
        self._stray_blocks = _FIXED_BLOCKS

    # --- opening and closing ------------------------------------------------------------------

    def attach(self, number: int) -> Segment:
        """An existing segment is part of the log. Raises OSError; StartupError for another format's."""
        segment = Segment.open(number, self.folder.segment_path(number), self._disk)
        self._newest = max(self._newest, number)
        with self._lock:
            self._segments[number] = segment
        try:
            segment.hint_bytes = self.folder.hint_path(number).stat().st_size
            segment.has_hint = True
        except OSError:
            pass
        data = os.pread(segment.fd, ALIGN, 0)
        try:
            head = SegmentHead.unpack(data)
            segment.epoch, segment.vault_s = head.epoch, head.vault_s
            segment.generation, segment.closed = unpack_slot(data)
        except BadFrame as error:
            if error.reason == "unknown_version":
                raise StartupError(
                    f"{segment.path}: {error}. Start the version that wrote it and 'tierkv vault export', or give this "
                    "vault an empty persist_path"
                ) from None
            segment.damage = error.reason
        return segment

    def close(self) -> None:
        """The files are closed when their last reader has let go; nothing is written."""
        with self._lock:
            segments, self._segments = list(self._segments.values()), {}
            self._open = None
            self.dirty.clear()
        for segment in segments:
            segment.let_go()

    # --- looking ------------------------------------------------------------------------------

    def segments(self) -> list[Segment]:
        """Oldest first."""
        with self._lock:
            return [self._segments[number] for number in sorted(self._segments)]

    @property
    def open_segment(self) -> Segment | None:
        return self._open

    def has(self, segment: Segment) -> bool:
        """Whether it was not dropped."""
        with self._lock:
            return self._segments.get(segment.number) is segment

    def acquire(self, number: int) -> Segment | None:
        """The segment for a user that lets go of it; None when it has been dropped."""
        with self._lock:
            segment = self._segments.get(number)
            return None if segment is None else segment.acquire()

    @property
    def used_blocks(self) -> int:
        """What the folder takes on the disk, hints that are going to be written included."""
        with self._lock:
            return _FIXED_BLOCKS + sum(s.used_blocks + hint_blocks(s.hint_bytes) for s in self._segments.values())

    @property
    def dead_blocks(self) -> int:
        with self._lock:
            return sum(segment.dead_blocks for segment in self._segments.values())

    # --- appending ----------------------------------------------------------------------------

    def append(
        self, record: Sequence[Buffer], size_bytes: int, *, pinned: bool, epoch: int, vault_s: float, hint_bytes: int
    ) -> tuple[int, int]:
        """The place and sequence number of the record, which is whole in the log. Raises OSError.

        ``hint_bytes``: what the record will take in its segment's hint.
        """
        segment = self._open_for(entry_blocks(size_bytes), epoch, vault_s)
        self.sequence += 1
        head = EntryHead(segment.number, segment.end_block, size_bytes, self.sequence, vault_s)
        segment.append(head, pack_mark(Mark.LIVE, pinned=pinned, epoch=epoch, sequence=self.sequence), record)
        segment.hint_bytes += hint_bytes
        segment.changed_s = vault_s
        self._note_dirty(segment, head.blocks * ALIGN)
        return place_of(segment.number, head.block), self.sequence

    def close_open(self) -> None:
        """The next record begins another segment. Raises OSError."""
        segment, self._open = self._open, None
        if segment is not None:
            segment.set_slot(closed=True, generation=segment.generation)
            self._note_dirty(segment, 0)

    def _open_for(self, blocks: int, epoch: int, vault_s: float) -> Segment:
        segment = self._open
        if segment is not None and (segment.end_block + blocks) * ALIGN > self.segment_bytes and segment.end_block > 1:
            self.close_open()
            segment = None
        if segment is None:
            number = self._newest + 1
            segment = Segment.create(SegmentHead(number, epoch, vault_s), self.folder.segment_path(number), self._disk)
            self._newest = number
            with self._lock:
                self._segments[number] = segment
            self._open = segment
            self._disk.sync_folder(self.folder.path)
        return segment

    def _note_dirty(self, segment: Segment, size_bytes: int) -> None:
        with self._lock:
            self._await_sync([segment])
            self.dirty_bytes += size_bytes

    def _await_sync(self, segments: Sequence[Segment]) -> None:
        """What was dropped meanwhile is not waited for: its file is gone. Called with the table's lock held."""
        self.dirty.update({s.number: s for s in segments if self._segments.get(s.number) is s})

    # --- marks and room -----------------------------------------------------------------------

    def mark(self, place: int, mark: Mark, *, pinned: bool, epoch: int) -> None:
        """The entry's mark is on the disk (not synced), and no hint says otherwise. Raises OSError."""
        number, block = place_parts(place)
        segment = self.acquire(number)
        if segment is None:
            return
        try:
            self.forget_hint(segment)
            head = EntryHead.unpack(os.pread(segment.fd, 64, block * ALIGN), number, block)
            segment.set_mark(block, head.sequence, mark, pinned=pinned, epoch=epoch)
            self._note_dirty(segment, 0)
        finally:
            segment.let_go()

    def bury(self, place: int, blocks: int, epoch: int) -> None:
        """The entry is dead and its room free, now or when its segment is compacted. Raises OSError, BadFrame."""
        number, block = place_parts(place)
        segment = self.acquire(number)
        if segment is None:
            return
        try:
            segment.live_blocks = max(0, segment.live_blocks - blocks)
            if not segment.writable:
                return
            try:
                self.mark(place, Mark.DEAD, pinned=False, epoch=epoch)
            except BadFrame:
                self.forget_hint(segment)  # the head is damaged, so that nothing believes the entry anyway
            if self.can_punch and not segment.erase(block, blocks):
                self.can_punch = False
        finally:
            segment.let_go()

    def forget_hint(self, segment: Segment) -> None:
        """The hint of a segment that is about to change counts no more, even if its file comes back."""
        if segment.has_hint:
            segment.set_slot(closed=segment.closed, generation=segment.generation + 1)
            self._disk.unlink(self.folder.hint_path(segment.number))
            segment.has_hint = False

    def drop(self, segment: Segment) -> None:
        """The file is gone; its readers read on. Raises OSError."""
        self._disk.unlink(self.folder.hint_path(segment.number))
        self._disk.unlink(segment.path)
        with self._lock:
            self._segments.pop(segment.number, None)
            self.dirty.pop(segment.number, None)
        if self._open is segment:
            self._open = None
        segment.let_go()

    # --- syncing ------------------------------------------------------------------------------

    def sync(self) -> None:
        """Everything written before this call survives a power failure. Raises OSError."""
        with self._lock:
            dirty = [segment.acquire() for segment in self.dirty.values()]
            self.dirty.clear()
            self.dirty_bytes = 0
        try:
            while dirty:
                dirty[-1].sync()
                dirty.pop().let_go()
        except OSError:
            with self._lock:
                self._await_sync(dirty)
            for segment in dirty:
                segment.let_go()
            raise


def hint_blocks(size_bytes: int) -> int:
    """Blocks of a hint file of that size, with its draft not counted."""
    return -(-(size_bytes + 128) // ALIGN)
