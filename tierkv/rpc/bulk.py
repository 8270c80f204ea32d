"""Bulk messages, written and read by hand: valid protobuf (one bytes field) without protobuf's copies.

A message of ``StoreRequest`` or ``BatchPromoteResponse`` is the tag of field 1, a length and a run of chunks. A chunk
is a 32-byte little-endian header and a piece of one record:

======  ====  =====================================================================
offset  size  field
======  ====  =====================================================================
0       4     magic ``TKC1``
4       1     kind: 1 data, 2 missing, 3 end
5       1     reason code of a missing record (index into ``REASONS``), otherwise 0
6       2     zero
8       4     index of the record in the call; for end, how many records there were
12      4     bytes of data that follow
16      8     total bytes of the record; for missing and end 0
24      8     offset of the data in the record; for missing and end 0
======  ====  =====================================================================

Records follow one another; each is a gapless run of data chunks cut anywhere, so frames need not match messages. Small
records share a message. An end chunk closes a stream, so that one that was cut short is noticed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from tierkv.errors import BadFrame

MAGIC = b"TKC1"
_CHUNK = struct.Struct("<4sBBHIIQQ")
CHUNK_BYTES = _CHUNK.size
_TAG = 0x0A

# 2 MiB messages reach raw TCP on loopback; 1 and 4 MiB about half of it, 64 KiB costs three times the CPU.
DEFAULT_MESSAGE_BYTES = 2 << 20
MIN_MESSAGE_BYTES = 64 << 10
MAX_MESSAGE_BYTES = 4 << 20

REASONS = (
    "unknown",
    "never_stored",
    "evicted",
    "purged",
    "expired",
    "quarantined",
    "loading",
    "damaged",
    "unreadable",
)
Buffer = bytes | bytearray | memoryview


class ChunkKind(IntEnum):
    DATA = 1
    MISSING = 2
    END = 3


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk; ``data`` looks into the message it came in."""

    kind: ChunkKind
    index: int
    reason: str
    total: int
    offset: int
    data: memoryview


def bounded_message_bytes(asked: int) -> int:
    """The message size to use for a request that asked for ``asked`` bytes (0: the default)."""
    return min(max(asked or DEFAULT_MESSAGE_BYTES, MIN_MESSAGE_BYTES), MAX_MESSAGE_BYTES)


def encode_message(parts: Iterable[Buffer], size_bytes: int) -> bytes:
    """A whole message around chunk bytes that have ``size_bytes`` together."""
    return b"".join((_message_prefix(size_bytes), *parts))


def _message_prefix(length: int) -> bytes:
    prefix = bytearray([_TAG])
    while length > 0x7F:
        prefix.append(0x80 | length & 0x7F)
        length >>= 7
    prefix.append(length)
    return bytes(prefix)


def message_payload(message: Buffer) -> memoryview:
    """The chunk bytes of a message, without copying. Raises BadFrame for anything but field 1 filling the message."""
    view = memoryview(message)
    if not len(view):
        return view
    if view[0] != _TAG:
        raise BadFrame("bad_message", "a bulk message has one bytes field")
    length = 0
    for place in range(5):
        if 1 + place >= len(view):
            break
        byte = view[1 + place]
        length |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if length != len(view) - 2 - place:
                break
            return view[2 + place :]
    raise BadFrame("bad_message", "a bulk message's length does not fit")


def read_chunks(message: Buffer) -> Iterator[Chunk]:
    """The chunks of one message in order. Raises BadFrame where something is not whole or not a chunk."""
    view = message_payload(message)
    place = 0
    while place < len(view):
        if len(view) - place < CHUNK_BYTES:
            raise BadFrame("truncated", "a chunk header is not whole")
        magic, kind, reason, zero, index, length, total, offset = _CHUNK.unpack_from(view, place)
        place += CHUNK_BYTES
        if magic != MAGIC or kind not in (1, 2, 3) or zero:
            raise BadFrame("not_a_chunk", "this is not a TierKV chunk of this version")
        whole = length <= len(view) - place and offset + length <= total if kind == ChunkKind.DATA else length == 0
        if not whole or (kind == ChunkKind.DATA and not length):
            raise BadFrame("bad_length", "a chunk reaches beyond its message or its record")
        slug = REASONS[reason] if reason < len(REASONS) else REASONS[0]
        yield Chunk(ChunkKind(kind), index, slug, total, offset, view[place : place + length])
        place += length


class MessageWriter:
    """Packs chunks into messages of about ``message_bytes``."""

    def __init__(self, message_bytes: int = DEFAULT_MESSAGE_BYTES) -> None:
        self._limit = message_bytes
        self._parts: list[Buffer] = []
        self._settled = 0
        self._size = 0

    @property
    def room(self) -> int:
        """Bytes of data that still fit into the open message; 0 when it is time to ``flush``."""
        return max(0, self._limit - self._size - CHUNK_BYTES)

    def add_data(self, index: int, total: int, offset: int, data: Buffer) -> None:
        """``data`` (at most ``room`` bytes) is in the open message; it must not change before ``flush``."""
        header = _CHUNK.pack(MAGIC, ChunkKind.DATA, 0, 0, index, len(data), total, offset)
        self._parts += (header, data)
        self._size += CHUNK_BYTES + len(data)

    def add_record(self, index: int, buffers: Iterable[Buffer], total: int) -> Iterator[bytes]:
        """All bytes of one record are written; yields each message that fills up on the way."""
        offset = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            place = 0
            while place < len(view):
                if not self.room and (message := self.flush()):
                    yield message
                piece = view[place : place + self.room]
                self.add_data(index, total, offset, piece)
                place += len(piece)
                offset += len(piece)

    def add_missing(self, index: int, reason: str) -> None:
        code = REASONS.index(reason) if reason in REASONS else 0
        self._parts.append(_CHUNK.pack(MAGIC, ChunkKind.MISSING, code, 0, index, 0, 0, 0))
        self._size += CHUNK_BYTES

    def add_end(self, records: int) -> None:
        self._parts.append(_CHUNK.pack(MAGIC, ChunkKind.END, 0, 0, records, 0, 0, 0))
        self._size += CHUNK_BYTES

    def flush(self) -> bytes | None:
        """The open message, closed; None if it is empty."""
        parts, size = self.take()
        return encode_message(parts, size) if parts else None

    def take(self) -> tuple[list[Buffer], int]:
        """The parts of the open message and their bytes, as ``encode_message`` wants them; the next message begins."""
        parts, size = self._parts, self._size
        self._parts, self._settled, self._size = [], 0, 0
        return parts, size

    def settle(self) -> bytes | None:
        """Nothing refers to the caller's buffers any more: a large open message is closed, a small one is copied."""
        if self._size >= MIN_MESSAGE_BYTES:
            return self.flush()
        if fresh := self._parts[self._settled :]:
            self._parts[self._settled :] = [b"".join(fresh)]
            self._settled += 1
        return None
