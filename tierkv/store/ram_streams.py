"""Writers and readers in an arena's pages: they copy without the store's lock, in pages that are theirs alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from tierkv.codec.record import RecordHeader
from tierkv.errors import BadFrame, CorruptionError
from tierkv.identity.blocks import BlockKey
from tierkv.store.arena import Extents, Runs
from tierkv.store.base import IndexEntry
from tierkv.store.verify import RecordVerifier


class PagesOwner(Protocol):
    """The store whose arena the pages are of."""

    def publish(self, header: RecordHeader, size_bytes: int, pages: Runs, epoch: int) -> str: ...

    def give_back(self, pages: Runs) -> None: ...

    def count_damaged(self, reason: str, key: BlockKey | None) -> None: ...

    def forgotten(self, give_back: Callable[[], None]) -> None: ...

    def end_reading(self, row: int) -> None: ...


class RamWriter:
    """A ``RecordWriter`` in pages of its own. Used by one thread at a time."""

    def __init__(self, store: PagesOwner, extents: Extents, pages: Runs, epoch: int) -> None:
        self._store = store
        self._extents = extents
        self._pages: Runs | None = pages
        self._epoch = epoch
        self._verifier = RecordVerifier(extents.size_bytes)
        self._written = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        if self._pages is None:
            raise BadFrame("aborted", "this record was refused or aborted before")
        try:
            self._verifier.feed(view)
        except CorruptionError as error:
            self._refuse(error)
            raise
        self._extents.copy_in(self._written, view)
        self._written += len(view)

    def commit(self) -> str:
        pages = self._pages
        if pages is None:
            raise BadFrame("aborted", "this record was refused or aborted before")
        try:
            header = self._verifier.finish()
        except CorruptionError as error:
            self._refuse(error)
            raise
        self._pages = None
        try:
            return self._store.publish(header, self._extents.size_bytes, pages, self._epoch)
        except CorruptionError as error:
            self._store.count_damaged(getattr(error, "reason", "foreign"), header.key)
            raise

    def abort(self) -> None:
        pages, self._pages = self._pages, None
        if pages is not None:
            self._store.give_back(pages)

    def __del__(self) -> None:
        if self._pages is not None:
            self._store.forgotten(partial(self._store.give_back, self._pages))

    def _refuse(self, error: CorruptionError) -> None:
        header = self._verifier.header
        self.abort()
        self._store.count_damaged(getattr(error, "reason", "damaged"), header.key if header else None)


class RamReader:
    """A ``RecordReader``: the record's pages are nobody else's until ``close``."""

    in_memory = True

    def __init__(self, store: PagesOwner, row: int, entry: IndexEntry, extents: Extents) -> None:
        self._store = store
        self._row = row
        self._entry = entry
        self._extents: Extents | None = extents

    @property
    def entry(self) -> IndexEntry:
        return self._entry

    @property
    def size_bytes(self) -> int:
        return self._entry.size_bytes

    def read(self, offset: int, length: int) -> bytes:
        pieces = self.views(offset, length)
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)

    def views(self, offset: int, length: int) -> list[memoryview]:
        """As ``read`` without the copy; let go of the views before ``close``. Raises ValueError when closed."""
        if self._extents is None:
            raise ValueError("this record is closed")
        return self._extents.pieces(offset, length)

    def close(self) -> None:
        extents, self._extents = self._extents, None
        if extents is not None:
            self._store.end_reading(self._row)

    def __del__(self) -> None:
        if self._extents is not None:
            self._store.forgotten(partial(self._store.end_reading, self._row))

    def __enter__(self) -> RamReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
