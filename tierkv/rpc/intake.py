"""Records on their way into a store: taken piece by piece, refused one by one, never more held than a header.

Runs in executor threads, one at a time; an ``Intake`` belongs to one call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from tierkv.codec.frame import HEADER_BYTES, FrameHeader
from tierkv.codec.record import MAX_HEADER_BYTES, RecordHeader
from tierkv.errors import (
    BadFrame,
    ForeignRecord,
    RecordTooLarge,
    Refused,
    StaleEpoch,
    StoreFull,
    StoreUnwritable,
    TierKVError,
)
from tierkv.identity.blocks import BlockKey
from tierkv.rpc.bulk import Buffer, ChunkKind, read_chunks
from tierkv.rpc.vault_port import StoreOutcome
from tierkv.store.base import RecordWriter, Store
from tierkv.telemetry.tier import TierTelemetry

_log = logging.getLogger(__name__)

MAX_RECORDS = 65536
_NO_KEY = BlockKey(b"")
_ACCEPTED = ("stored", "replaced", "present")


def refusal_slug(error: Exception) -> str:
    """The short reason that statistics count and the sender is told."""
    if isinstance(error, BadFrame | ForeignRecord | StoreUnwritable):
        return error.reason
    for kind, slug in ((RecordTooLarge, "too_large"), (StoreFull, "full"), (StaleEpoch, "stale_epoch")):
        if isinstance(error, kind):
            return slug
    if isinstance(error, Refused):
        return "refused"
    return "out_of_memory" if isinstance(error, MemoryError) else "internal"


class IncomingRecord:
    """One record of ``total`` announced bytes. ``outcome`` is set as soon as its fate is known; the rest is skipped."""

    def __init__(self, store: Store, tier: TierTelemetry | None, total: int, max_record_bytes: int) -> None:
        self._store, self._tier, self._total = store, tier, total
        self._received = 0
        self._head = bytearray()
        self._writer: RecordWriter | None = None
        self._began_s = time.perf_counter()
        self.key = _NO_KEY
        self.outcome = ""
        if total > max_record_bytes:
            self._refuse(RecordTooLarge(total, max_record_bytes))
        elif total <= HEADER_BYTES:
            self._refuse(BadFrame("truncated", "a record is longer than a frame header"))

    @property
    def received(self) -> int:
        return self._received

    @property
    def is_whole(self) -> bool:
        return self._received == self._total

    def put(self, data: memoryview) -> None:
        """Takes the next bytes; with the last ones the record is verified and published, or refused."""
        self._received += len(data)
        if not self.outcome:
            try:
                self._write(data)
                if self.is_whole and not self.outcome:
                    self._commit()
            except Exception as error:
                self._refuse(error)

    def abort(self) -> None:
        """Nothing of an unfinished record is left."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    def _write(self, data: memoryview) -> None:
        if self._writer is not None:
            self._writer.write(data)
            return
        self._head += data
        header = self._header()
        if header is None or self._is_present(header):
            return
        self._writer = self._store.begin(self._total, header.epoch)
        self._writer.write(memoryview(self._head))
        self._head = bytearray()

    def _header(self) -> RecordHeader | None:
        """The record header once all of it is here; it names the key and the purge epoch."""
        if len(self._head) < HEADER_BYTES:
            return None
        frame = FrameHeader.unpack(memoryview(self._head)[:HEADER_BYTES])
        if frame.payload_length > MAX_HEADER_BYTES or frame.frame_bytes > self._total:
            raise BadFrame("impossible_header", "the record header is longer than it may be")
        if len(self._head) < frame.frame_bytes:
            return None
        header, _ = RecordHeader.unpack_frame(memoryview(self._head)[: frame.frame_bytes])
        self.key = header.key
        if frame.frame_bytes + header.segment_bytes != self._total:
            raise BadFrame("bad_length", "the record header speaks of another size than was announced")
        return header

    def _is_present(self, header: RecordHeader) -> bool:
        """A copy at least as good is here already: nothing has to make room for this one."""
        entry = self._store.lookup([header.key])[0]
        if entry is None or entry.header.fidelity > header.fidelity:
            return False
        self._store.touch([header.key])
        self.outcome = "present"
        self._head = bytearray()
        return True

    def _commit(self) -> None:
        if self._writer is None:
            raise BadFrame("truncated", "the record ends inside its header")
        writer, self._writer = self._writer, None
        try:
            self.outcome = writer.commit()
        except BaseException:
            writer.abort()
            raise
        if self._tier is not None and self.outcome != "present":
            self._tier.stored()
            self._tier.bytes_in(self._total)
            self._tier.store_s.add(time.perf_counter() - self._began_s)

    def _refuse(self, error: Exception) -> None:
        self.outcome = refusal_slug(error)
        self._head = bytearray()
        self.abort()
        if not isinstance(error, TierKVError):
            _log.error("a record could not be stored", exc_info=error)
        if self._tier is not None:
            self._tier.refused(self.outcome)


class Intake:
    """The records of one Store call, in order, one at a time."""

    def __init__(self, store: Store, tier: TierTelemetry | None, max_record_bytes: int) -> None:
        self._store, self._tier, self._max_record_bytes = store, tier, max_record_bytes
        self._open: IncomingRecord | None = None
        self._open_total = 0
        self._ended = False
        self._lock = threading.Lock()
        self.outcomes: list[StoreOutcome] = []

    def feed(self, message: Buffer) -> None:
        """Takes one message. Raises BadFrame when it breaks the stream's order; what was published stays."""
        with self._lock:
            for chunk in read_chunks(message):
                if self._ended or chunk.kind is ChunkKind.MISSING or chunk.index != len(self.outcomes):
                    raise BadFrame("out_of_order", "chunks of a Store call are records 0, 1, 2, ... and an end")
                if chunk.kind is ChunkKind.END:
                    self._end()
                else:
                    self._take(chunk.total, chunk.offset, chunk.data)

    def finish(self) -> list[StoreOutcome]:
        """One outcome a record. Raises BadFrame when the stream was cut short."""
        if not self._ended:
            raise BadFrame("truncated", "the Store call ended without its end chunk")
        return self.outcomes

    def abort(self) -> None:
        with self._lock:
            self._ended = True
            if self._open is not None:
                self._open.abort()
                self._open = None

    def _end(self) -> None:
        if self._open is not None:
            raise BadFrame("truncated", "the Store call ended inside a record")
        self._ended = True

    def _take(self, total: int, offset: int, data: memoryview) -> None:
        if self._open is None:
            if len(self.outcomes) >= MAX_RECORDS:
                raise BadFrame("too_many", f"a Store call carries at most {MAX_RECORDS} records")
            self._open = IncomingRecord(self._store, self._tier, total, self._max_record_bytes)
            self._open_total = total
        record = self._open
        if total != self._open_total or offset != record.received:
            raise BadFrame("out_of_order", "the chunks of a record are a gapless run")
        record.put(data)
        if record.is_whole:
            self.outcomes.append(StoreOutcome(record.key, record.outcome in _ACCEPTED, record.outcome))
            self._open = None


def store_whole(
    store: Store, tier: TierTelemetry | None, buffers: Iterable[Buffer], max_record_bytes: int
) -> StoreOutcome:
    """One record whose bytes are all here is published or refused."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    record = IncomingRecord(store, tier, sum(len(view) for view in views), max_record_bytes)
    try:
        for view in views:
            record.put(view)
    finally:
        record.abort()
    return StoreOutcome(record.key, record.outcome in _ACCEPTED, record.outcome or "truncated")
