"""A record: what a vault stores and sends. One header frame, then one segment frame for each array.

A record is a block (rows of K and V of all sliceable layers for up to 256 tokens), a window checkpoint (attention
state of ring and chunk caches at one position) or a state checkpoint (recurrent state at one position). It carries
its own token ids, its parent's key and the layout it was taken from, so that a reader can prove that it is the one
it asked for.
"""

from __future__ import annotations

import json
import operator
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

import numpy as np

from tierkv.codec.frame import (
    HEADER_BYTES,
    FrameHeader,
    FrameType,
    check_header,
    check_payload,
    payload_hash,
    verify_payload,
)
from tierkv.errors import BadFrame, ForeignRecord
from tierkv.identity.blocks import (
    BLOCK_TOKENS,
    MAX_MEDIA_HASH_BYTES,
    BlockKey,
    Media,
    Tokens,
    block_key,
    state_key,
    window_key,
)

_FIXED = struct.Struct("<BBBxIQ32s32s32s16sQdIIQQIIIII")
MAX_HEADER_BYTES = 4 << 20
RECORD_VERSION = 1
_NO_MEDIA = b"[]"


class RecordKind(IntEnum):
    BLOCK = 1
    WINDOW = 2
    STATE = 3

    @property
    def tier(self) -> str:
        """ "ssm" for recurrent state, "kv" for everything else."""
        return "ssm" if self is RecordKind.STATE else "kv"


_KEY_OF = {RecordKind.BLOCK: block_key, RecordKind.WINDOW: window_key, RecordKind.STATE: state_key}


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record is. ``tokens``: the ids after ``parent``, [n] int64, n <= 256 (0 at a block boundary).

    ``start`` is the absolute position of tokens[0]; ``end`` = start + n is where the record's state stands.
    ``fidelity`` is the worst in the record's own ancestry. ``segment_bytes`` counts the segment frames with their
    headers, ``raw_bytes`` the decoded arrays. ``scalars`` are small JSON values that a checkpoint needs besides its
    arrays, such as a ring's write index.
    """

    kind: RecordKind
    key: BlockKey
    parent: BlockKey
    root: BlockKey
    tokens: Tokens
    start: int
    layout_digest: bytes
    layout: bytes
    fidelity: int
    epoch: int
    created_unix_s: float
    segments: int
    segment_bytes: int
    raw_bytes: int
    model: str = ""
    codec: str = ""
    scalars: str = ""
    media: tuple[Media, ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_full_block(self) -> bool:
        return self.kind is RecordKind.BLOCK and len(self.tokens) == BLOCK_TOKENS

    def expected_key(self) -> BlockKey:
        """The key that parent, tokens and media give."""
        return _KEY_OF[self.kind](self.parent, self.tokens, self.media, self.start)

    def pack_frame(self) -> bytes:
        """The header as the first frame of its record."""
        payload = self._pack()
        header = FrameHeader(
            FrameType.RECORD,
            0,
            "none",
            (),
            self.start,
            0,
            len(payload),
            payload_hash(payload),
            fidelity=self.fidelity,
        )
        return header.pack() + payload

    def _pack(self) -> bytes:
        model, codec, scalars = self.model.encode(), self.codec.encode(), self.scalars.encode()
        media = json.dumps([[m.start, m.length, m.content_hash.hex()] for m in self.media]).encode()
        fixed = _FIXED.pack(
            RECORD_VERSION, self.kind, self.fidelity, len(self.tokens), self.start, self.key, self.parent, self.root,
            self.layout_digest, self.epoch, self.created_unix_s, self.segments, 0, self.segment_bytes,
            self.raw_bytes, len(self.layout), len(model), len(codec), len(scalars), len(media),
        )  # fmt: skip
        ids = np.ascontiguousarray(self.tokens, dtype="<i8").tobytes()
        return b"".join((fixed, ids, self.layout, model, codec, scalars, media))

    @classmethod
    def unpack_frame(cls, data: bytes | bytearray | memoryview) -> tuple[RecordHeader, int]:
        """The header in the first frame of ``data``, verified, and the bytes that frame takes.

        Raises BadFrame if it is not whole, not what was written, or names impossible sizes, and ForeignRecord if its
        key is not the one that its own parent and tokens give.
        """
        view = memoryview(data)
        is_segment, _, length, expected = check_header(view)
        if is_segment or length > MAX_HEADER_BYTES:
            raise BadFrame("no_record_header", "a record starts with its header frame")
        payload = view[HEADER_BYTES : HEADER_BYTES + length]
        check_payload(payload, length, expected)
        header = cls._parse(payload)
        if header.expected_key() != header.key:
            raise ForeignRecord("foreign_key", "the record's key is not the key of its own tokens")
        return header, HEADER_BYTES + length

    @classmethod
    def _parse(cls, payload: memoryview) -> RecordHeader:
        if len(payload) < _FIXED.size:
            raise BadFrame("truncated", "the record header is too short")
        (version, kind, fidelity, n_tokens, start, key, parent, root, layout_digest, epoch, created, segments, _,
         segment_bytes, raw_bytes, *lengths) = _FIXED.unpack_from(payload)  # fmt: skip
        if version != RECORD_VERSION:
            raise BadFrame("unknown_version", f"record version {version}; this build reads {RECORD_VERSION}")
        sizes = (n_tokens * 8, *cast("list[int]", lengths))
        if kind not in (1, 2, 3) or n_tokens > BLOCK_TOKENS or _FIXED.size + sum(sizes) != len(payload):
            raise BadFrame("impossible_header", "the record header's lengths do not add up")
        pieces: list[bytes] = []
        offset = _FIXED.size
        for size in sizes:
            pieces.append(bytes(payload[offset : offset + size]))
            offset += size
        ids, layout, model, codec, scalars, media = pieces
        try:
            regions = () if media == _NO_MEDIA else tuple(_media(*item) for item in json.loads(media))
            texts = (model.decode(), codec.decode(), scalars.decode())
        except (ValueError, TypeError, RecursionError) as error:
            raise BadFrame("impossible_header", "the record header's text cannot be read") from error
        return cls(
            RecordKind(kind), BlockKey(key), BlockKey(parent), BlockKey(root), np.frombuffer(ids, "<i8"), start,
            layout_digest, layout, fidelity, epoch, created, segments, segment_bytes, raw_bytes, *texts, regions,
        )  # fmt: skip


def _media(start: int, length: int, content_hash: str) -> Media:
    """Raises ValueError or TypeError for values that no key can be made of."""
    region = Media(operator.index(start), operator.index(length), bytes.fromhex(content_hash))
    if region.start < 0 or not 0 < region.length < 1 << 32 or len(region.content_hash) > MAX_MEDIA_HASH_BYTES:
        raise ValueError("not a media region")
    return region


def verify_record(data: bytes | bytearray | memoryview) -> RecordHeader:
    """The header of a whole record whose every frame is intact, in number and bytes as the header says.

    Raises BadFrame or ForeignRecord.
    """
    view = memoryview(data)
    header, offset = RecordHeader.unpack_frame(view)
    if len(view) - offset != header.segment_bytes:
        raise BadFrame("bad_length", f"{len(view) - offset} bytes of segments, {header.segment_bytes} announced")
    count, raw = 0, 0
    while offset < len(view):
        frame = FrameHeader.unpack(view[offset:])
        end = offset + frame.frame_bytes
        if frame.type is not FrameType.SEGMENT or end > len(view):
            raise BadFrame("truncated", "a segment frame is not whole")
        verify_payload(frame, view[offset + HEADER_BYTES : end])
        count, raw, offset = count + 1, raw + frame.raw_length, end
    if count != header.segments or raw != header.raw_bytes:
        raise BadFrame("bad_length", "the record does not hold what its header says")
    return header


def check_belongs(
    header: RecordHeader, *, key: BlockKey, root: BlockKey, tokens: Tokens, layout_digest: bytes | None
) -> None:
    """Raises ForeignRecord unless the record is the one that was asked for.

    ``tokens`` are the prompt's ids from the record's start on, at least as many as are going to be used.
    """
    if header.key != key:
        raise ForeignRecord("foreign_key", "the vault answered with another key")
    if header.root != root:
        raise ForeignRecord("foreign_model", "the record belongs to another model")
    if layout_digest is not None and header.layout_digest != layout_digest:
        raise ForeignRecord("foreign_layout", "the record was taken from another cache layout")
    n = min(len(tokens), header.n_tokens)
    if not np.array_equal(header.tokens[:n], tokens[:n]):
        raise ForeignRecord("foreign_tokens", "the record carries other token ids under the same key")
