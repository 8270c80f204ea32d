"""A reader of a record that found no room in the arena: every piece comes from the disk."""

from __future__ import annotations

from functools import partial

from tierkv.store.base import IndexEntry
from tierkv.store.log.segment import Segment
from tierkv.store.ram_streams import PagesOwner


class ColdReader:
    """A ``RecordReader`` over its segment, of which it is a user. Raises BadFrame when it is not there."""

    in_memory = False

    def __init__(self, store: PagesOwner, row: int, entry: IndexEntry, segment: Segment, block: int) -> None:
        self._store = store
        self._row = row
        self._entry = entry
        self._block = block
        self._segment: Segment | None = None
        try:
            segment.check_place(block, entry.size_bytes)
        except BaseException:
            segment.let_go()
            raise
        self._segment = segment

    @property
    def entry(self) -> IndexEntry:
        return self._entry

    @property
    def size_bytes(self) -> int:
        return self._entry.size_bytes

    def read(self, offset: int, length: int) -> bytes:
        """As ``RecordReader.read``. Raises ValueError when closed, OSError from the disk."""
        if self._segment is None:
            raise ValueError("this record is closed")
        return self._segment.read(self._block, offset, max(0, min(length, self.size_bytes - offset)))

    def views(self, offset: int, length: int) -> list[memoryview]:
        return [memoryview(self.read(offset, length))]

    def close(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.let_go()
            self._store.end_reading(self._row)

    def __del__(self) -> None:
        if self._segment is not None:
            self._segment.let_go()
            self._store.forgotten(partial(self._store.end_reading, self._row))

    def __enter__(self) -> ColdReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
