"""The header in front of every payload: enough to decode it, and to refuse it when anything is off.

A frame is a 96-byte little-endian header and its payload. A record (see ``record``) is a run of frames. Nothing here
needs a codec: a vault verifies frames without knowing how to decode them.

======  ====  =====================================================================
offset  size  field
======  ====  =====================================================================
0       4     magic ``TKF1``
4       1     version, 1
5       1     type: 1 record header, 2 segment
6       1     codec id
7       1     dtype id of the decoded array
8       2     flags (bit 0: exact although the codec is lossy)
10      2     layer index
12      1     array index in the layer
13      1     number of dimensions, 0 to 6
14      2     group: values that share a scale; 0 where the codec has none
16      24    shape of the decoded array, 6 x u32, row-major, unused ones 0
40      8     absolute position of the first token
48      8     raw length: bytes of the decoded array
56      8     payload length
64      1     token axis, 255 where the array has none
65      1     fidelity of this payload alone
66      6     zero
72      16    xxh3-128 of the payload
88      8     xxh3-64 of the 88 bytes before
======  ====  =====================================================================
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import cast

import xxhash

from tierkv.errors import BadFrame

MAGIC = b"TKF1"
VERSION = 1
_BODY = struct.Struct("<4sBBBBHHBBH6IQQQBB6x16s")
_WHOLE = struct.Struct(_BODY.format + "Q")
_CHECK = struct.Struct("<Q")
# What a header is checked by, without the rest: magic and version, type, dtype, dimensions, lengths, axis, checksums.
_CHECKED = struct.Struct("<5sBxB5xB2x24s8xQQB7x16sQ")
_DIMS = struct.Struct("<6I")
_START = MAGIC + bytes([VERSION])
HEADER_BYTES = _BODY.size + _CHECK.size
MAX_PAYLOAD_BYTES = 1 << 30
NO_TOKEN_AXIS = 255


class FrameType(IntEnum):
    RECORD = 1
    SEGMENT = 2


class CodecId(IntEnum):
    RAW = 0
    LOSSLESS = 1
    INT8_G256 = 2
    INT8 = 3
    INT8Z = 4
    UZ38 = 5
    UZ30 = 6
    TRAINED = 7


class Fidelity(IntEnum):
    """How exact, in steps that leave room; larger is lossier."""

    EXACT = 0
    INT8 = 20
    INT8_G256 = 30
    UZ38 = 40
    UZ30 = 60
    TRAINED = 80


FIDELITY_OF = {
    CodecId.RAW: Fidelity.EXACT,
    CodecId.LOSSLESS: Fidelity.EXACT,
    CodecId.INT8_G256: Fidelity.INT8_G256,
    CodecId.INT8: Fidelity.INT8,
    CodecId.INT8Z: Fidelity.INT8,
    CodecId.UZ38: Fidelity.UZ38,
    CodecId.UZ30: Fidelity.UZ30,
    CodecId.TRAINED: Fidelity.TRAINED,
}

DTYPES = (
    "none",
    "bfloat16",
    "float16",
    "float32",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
)
_ITEM_BYTES = (0, 2, 2, 4, 1, 2, 4, 8, 1, 2, 4, 8, 1)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """One frame's header. Lengths in bytes, ``position`` in tokens."""

    type: FrameType
    codec: int
    dtype: str
    shape: tuple[int, ...]
    position: int
    raw_length: int
    payload_length: int
    payload_hash: bytes
    layer: int = 0
    array: int = 0
    group: int = 0
    flags: int = 0
    token_axis: int | None = None
    fidelity: int = 0

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + self.payload_length

    def pack(self) -> bytes:
        """96 bytes."""
        body = _BODY.pack(
            MAGIC, VERSION, self.type, self.codec, DTYPES.index(self.dtype), self.flags, self.layer, self.array,
            len(self.shape), self.group, *self.shape, *(0,) * (6 - len(self.shape)), self.position,
            self.raw_length, self.payload_length,
            NO_TOKEN_AXIS if self.token_axis is None else self.token_axis, self.fidelity, self.payload_hash,
        )  # fmt: skip
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> FrameHeader:
        """The header at the start of ``data``.

        Raises BadFrame for a wrong magic, an unknown version, a wrong check or impossible fields.
        """
        check_header(data)
        fields: tuple[int, ...] = _WHOLE.unpack_from(data)
        kind, codec, dtype, flags, layer, array, ndim, group = fields[2:10]
        position, raw_length, payload_length, axis, fidelity, payload_hash, _ = fields[16:]
        return cls(
            FrameType(kind), codec, DTYPES[dtype], fields[10 : 10 + ndim], position, raw_length, payload_length,
            cast(bytes, payload_hash), layer, array, group, flags, None if axis == NO_TOKEN_AXIS else axis, fidelity,
        )  # fmt: skip


def check_header(data: bytes | bytearray | memoryview, offset: int = 0) -> tuple[bool, int, int, bytes]:
    """Whether the header at ``offset`` is a segment's, its raw length, its payload length and its payload's hash.

    The same checks as ``FrameHeader.unpack`` at a third of its time, for those who only verify. Raises BadFrame.
    """
    if len(data) - offset < HEADER_BYTES:
        raise BadFrame("truncated", f"a frame header has {HEADER_BYTES} bytes, not {len(data) - offset}")
    start, kind, dtype, ndim, dims, raw_length, payload_length, axis, expected, check = _CHECKED.unpack_from(
        data, offset
    )
    if start != _START:
        if not start.startswith(MAGIC):
            raise BadFrame("not_a_frame", "this is not a TierKV frame")
        raise BadFrame("unknown_version", f"frame version {start[-1]}; this build reads {VERSION}")
    if xxhash.xxh3_64_intdigest(data[offset : offset + _BODY.size]) != check:
        raise BadFrame("damaged_header", "the header's checksum does not match")
    # Neighbouring frames of a record differ in little but their places and checksums.
    if not _is_possible(kind, dtype, ndim, dims, raw_length, payload_length, axis):
        raise BadFrame("impossible_header", "kind, shape, dtype or lengths of a frame cannot be, or do not agree")
    return kind == FrameType.SEGMENT, raw_length, payload_length, expected


@lru_cache(maxsize=512)
def _is_possible(
    kind: int, dtype: int, ndim: int, dims: bytes, raw_length: int, payload_length: int, axis: int
) -> bool:
    if kind not in (1, 2) or dtype >= len(DTYPES) or ndim > 6 or payload_length > MAX_PAYLOAD_BYTES:
        return False
    if kind == 2 and math.prod(_DIMS.unpack(dims)[:ndim]) * _ITEM_BYTES[dtype] != raw_length:
        return False
    return axis == NO_TOKEN_AXIS or axis < ndim


def payload_hash(payload: bytes | bytearray | memoryview) -> bytes:
    """16 bytes: xxh3-128."""
    return xxhash.xxh3_128_digest(payload)


def verify_payload(header: FrameHeader, payload: bytes | bytearray | memoryview) -> None:
    """Raises BadFrame if the payload is not the one that was written."""
    check_payload(payload, header.payload_length, header.payload_hash)


def check_payload(payload: bytes | bytearray | memoryview, length: int, expected: bytes) -> None:
    """Raises BadFrame if these are not the ``length`` bytes with the hash ``expected``."""
    if len(payload) != length:
        raise BadFrame("bad_length", f"payload of {len(payload)} bytes, {length} announced")
    if payload_hash(payload) != expected:
        raise BadFrame("bad_checksum", "the payload's checksum does not match")


def frames(data: memoryview, *, verify: bool = True) -> Iterator[tuple[FrameHeader, memoryview]]:
    """Headers and payloads of a run of frames that fills ``data`` exactly.

    Raises BadFrame at the first frame that is not whole or not what was written.
    """
    offset = 0
    while offset < len(data):
        header = FrameHeader.unpack(data[offset:])
        end = offset + header.frame_bytes
        if end > len(data):
            raise BadFrame("truncated", "a frame ends behind the end of its record")
        payload = data[offset + HEADER_BYTES : end]
        if verify:
            verify_payload(header, payload)
        yield header, payload
        offset = end
