"""Finds the records of a segment in its bytes alone, whatever else is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tierkv.codec.frame import HEADER_BYTES, FrameHeader
from tierkv.codec.record import RecordHeader
from tierkv.errors import BadFrame, CorruptionError
from tierkv.store.log.files import next_data
from tierkv.store.log.format import (
    ALIGN,
    END_BYTES,
    HEAD_BYTES,
    RECORD_AT,
    EntryHead,
    Mark,
    entry_bytes,
    unpack_mark,
)
from tierkv.store.log.segment import Segment

_FIRST_READ = 24 << 10


@dataclass(frozen=True, slots=True)
class Found:
    """A whole entry whose record header is sound (absent for a dead one). Its segments are not looked at here."""

    head: EntryHead
    mark: Mark
    pinned: bool
    epoch: int
    header: RecordHeader | None


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are no sound entry; ``blocks`` long. ``tail``: nothing follows, so it may be a write cut short.

    ``key`` is the record's where its header is still sound.
    """

    block: int
    blocks: int
    reason: str
    key: bytes = b""
    tail: bool = False


def scan(segment: Segment) -> Iterator[Found | Damage]:
    """Everything in the file in the order of its places; dead entries too, holes not."""
    end = segment.size_bytes
    block, bad, bad_end, reason = 1, -1, -1, ""
    while block * ALIGN < end:
        at = next_data(segment.fd, block * ALIGN, end)
        if at // ALIGN > block:
            if bad >= 0:
                yield Damage(bad, bad_end - bad, reason)
                bad = -1
            block = at // ALIGN
            continue
        try:
            head, found = _entry(segment, block, end)
        except CorruptionError as error:
            if not segment.is_blank(block):
                if bad < 0:
                    bad, reason = block, getattr(error, "reason", "damaged_entry")
                bad_end = block + 1
            block += 1
            continue
        if bad >= 0:
            yield Damage(bad, bad_end - bad, reason)
            bad = -1
        if isinstance(found, Damage) and (block + head.blocks) * ALIGN >= end:
            found = replace(found, tail=True)
        yield found
        block += head.blocks
    if bad >= 0:
        yield Damage(bad, bad_end - bad, reason, tail=True)


def _entry(segment: Segment, block: int, end: int) -> tuple[EntryHead, Found | Damage]:
    """The entry at ``block``. Raises BadFrame when there is none, so that the search goes on behind it."""
    data = os.pread(segment.fd, _FIRST_READ, block * ALIGN)
    head = EntryHead.unpack(data, segment.number, block)
    if block * ALIGN + entry_bytes(head.size_bytes) > end:
        raise BadFrame("truncated", "an entry ends behind the end of its file")
    try:
        mark, pinned, epoch = unpack_mark(data[HEAD_BYTES:], head.sequence)
        if mark is not Mark.DEAD:
            _check_end(segment, head)
            header = _record_header(segment, head, data[RECORD_AT:])
            return head, Found(head, mark, pinned, epoch, header)
    except CorruptionError as error:
        return head, Damage(block, head.blocks, getattr(error, "reason", "damaged_record"))
    return head, Found(head, mark, pinned, epoch, None)


def _check_end(segment: Segment, head: EntryHead) -> None:
    at = head.block * ALIGN + RECORD_AT + head.size_bytes
    if os.pread(segment.fd, END_BYTES, at) != head.pack_end():
        raise BadFrame("no_end", "the end of an entry is missing")


def _record_header(segment: Segment, head: EntryHead, data: bytes) -> RecordHeader:
    frame = FrameHeader.unpack(data)
    whole = HEADER_BYTES + frame.payload_length
    if whole > head.size_bytes:
        raise BadFrame("truncated", "the record header is longer than the record")
    if whole > len(data):
        data = os.pread(segment.fd, whole, head.block * ALIGN + RECORD_AT)
    header, size = RecordHeader.unpack_frame(data)
    if size + header.segment_bytes != head.size_bytes:
        raise BadFrame("bad_length", "the record is not as long as its header says")
    return header
