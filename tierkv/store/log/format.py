"""How a vault's folder looks on disk. Everything is little-endian; every structure carries its own checksum.

========================  ==========================================================================================
``vault.meta``            format, purge epoch and age of the vault; replaced as a whole
``vault.lock``            locked by the process that has the folder open
``00000001.seg``          a segment: a header of 4 KiB, then entries, each at a multiple of 4 KiB
``00000001.hint``         what the index needs of a segment that is closed, to start without reading it
========================  ==========================================================================================

An entry is a 64-byte head, a 32-byte mark, a record as ``codec.record`` lays it out, and a 16-byte end. It is appended
with one write and counts only when its end is there. The mark alone is ever written again, in place: whether the
record is in sight, pinned, purged or dead. So what was purged stays so although indexes and hints are lost, and a
mark that is damaged takes its record out of sight and never back into it. (32 bytes inside one sector are written as
a whole or not at all.) Dead entries are punched out as a whole.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from tierkv.errors import BadFrame

FORMAT = 1
ALIGN = 4096
_SEGMENT = struct.Struct("<4sHHIIQd")
_SLOT = struct.Struct("<QQ")
_HEAD = struct.Struct("<4sBBHIIQQQdQ")
_MARK = struct.Struct("<BB6xQQ")
_END = struct.Struct("<4sI")
_CHECK = struct.Struct("<Q")
SEGMENT_MAGIC, ENTRY_MAGIC, END_MAGIC = b"TKSG", b"TKL1", b"TKE1"
SLOT_AT = 64
SLOT_BYTES = _SLOT.size + _CHECK.size
HEAD_BYTES = _HEAD.size + _CHECK.size
MARK_BYTES = _MARK.size + _CHECK.size
RECORD_AT = HEAD_BYTES + MARK_BYTES
END_BYTES = _END.size + _CHECK.size
ENTRY_OVERHEAD = RECORD_AT + END_BYTES


class Mark(IntEnum):
    """What may be done with an entry. Far apart in bits."""

    LIVE = 0x5A
    PURGED = 0xA6
    DEAD = 0xC3


def entry_bytes(size_bytes: int) -> int:
    """Bytes of an entry around a record of ``size_bytes``, without what follows up to the next one."""
    return ENTRY_OVERHEAD + size_bytes


def entry_blocks(size_bytes: int) -> int:
    """Blocks of 4 KiB that it takes."""
    return -(-entry_bytes(size_bytes) // ALIGN)


def _checked(body: bytes) -> bytes:
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def _sound(data: bytes | memoryview, size: int) -> bool:
    return len(data) >= size + 8 and _CHECK.unpack_from(data, size)[0] == xxhash.xxh3_64_intdigest(data[:size])


@dataclass(frozen=True, slots=True)
class SegmentHead:
    """``epoch`` is the vault's purge epoch when the segment was begun, ``vault_s`` its age."""

    number: int
    epoch: int
    vault_s: float

    def pack(self) -> bytes:
        """4 KiB, with a slot that says "open, generation 0"."""
        head = _checked(_SEGMENT.pack(SEGMENT_MAGIC, FORMAT, 0, ALIGN, self.number, self.epoch, self.vault_s))
        return (head.ljust(SLOT_AT, b"\0") + pack_slot(0, closed=False)).ljust(ALIGN, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> SegmentHead:
        """Raises BadFrame ("unknown_version" for a format of another build)."""
        if len(data) < SLOT_AT:
            raise BadFrame("truncated", "a segment's header is not whole")
        magic, version, _, align, number, epoch, vault_s = _SEGMENT.unpack_from(data)
        if magic != SEGMENT_MAGIC or not _sound(data, _SEGMENT.size):
            raise BadFrame("damaged_header", "this is not the header of a segment")
        if version != FORMAT or align != ALIGN:
            raise BadFrame("unknown_version", f"segment format {version}; this build reads {FORMAT}")
        return cls(number, epoch, vault_s)


def pack_slot(generation: int, *, closed: bool) -> bytes:
    """The part of a segment's header that changes: a hint counts only for the generation that it was written for."""
    return _checked(_SLOT.pack(generation, 1 if closed else 0))


def unpack_slot(data: bytes) -> tuple[int, bool]:
    """Generation and whether the segment was closed. Raises BadFrame."""
    slot = data[SLOT_AT : SLOT_AT + SLOT_BYTES]
    if not _sound(slot, _SLOT.size):
        raise BadFrame("damaged_header", "the slot of a segment's header is damaged")
    generation, closed = _SLOT.unpack_from(slot)
    return generation, bool(closed)


@dataclass(frozen=True, slots=True)
class EntryHead:
    """Where an entry is (so that one which lies elsewhere is not believed), how long, which, since when."""

    segment: int
    block: int
    size_bytes: int
    sequence: int
    vault_s: float

    def pack(self) -> bytes:
        """64 bytes."""
        return _checked(
            _HEAD.pack(
                ENTRY_MAGIC, FORMAT, 1, 0, self.segment, 0, self.block, self.size_bytes, self.sequence, self.vault_s, 0
            )
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview, segment: int, block: int) -> EntryHead:
        """Raises BadFrame unless this is the head of the entry at that place."""
        if len(data) < HEAD_BYTES:
            raise BadFrame("truncated", "the head of an entry is not whole")
        magic, version, kind, _, number, _, at, size, sequence, vault_s, _ = _HEAD.unpack_from(data)
        if magic != ENTRY_MAGIC or not _sound(data, _HEAD.size):
            raise BadFrame("damaged_entry", "the head of an entry is damaged")
        if version != FORMAT or kind != 1:
            raise BadFrame("unknown_version", f"entry format {version}.{kind}; this build reads {FORMAT}.1")
        if (number, at) != (segment, block):
            raise BadFrame("misplaced_entry", "an entry lies where it was not written")
        return cls(number, at, size, sequence, vault_s)

    @property
    def blocks(self) -> int:
        return entry_blocks(self.size_bytes)

    def pack_end(self) -> bytes:
        """16 bytes, different for every entry."""
        body = _END.pack(END_MAGIC, self.sequence & 0xFFFFFFFF)
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body + self.pack()))


def pack_mark(mark: Mark, *, pinned: bool, epoch: int, sequence: int) -> bytes:
    """32 bytes."""
    return _checked(_MARK.pack(mark, 1 if pinned else 0, epoch, sequence))


def unpack_mark(data: bytes | memoryview, sequence: int) -> tuple[Mark, bool, int]:
    """Mark, whether pinned, epoch. Raises BadFrame for one that is damaged or another entry's."""
    if not _sound(data[:MARK_BYTES], _MARK.size):
        raise BadFrame("damaged_mark", "the mark of an entry is damaged")
    mark, pinned, epoch, of = _MARK.unpack_from(data)
    if of != sequence or mark not in (Mark.LIVE, Mark.PURGED, Mark.DEAD):
        raise BadFrame("damaged_mark", "the mark of an entry is another's")
    return Mark(mark), bool(pinned), epoch
