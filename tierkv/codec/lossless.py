"""Bit-exact and smaller: the exponents of neighbouring values are alike, their mantissas are noise."""

from __future__ import annotations

import struct

import numpy as np

from tierkv.codec.compiled import merge_kernel, split_kernel
from tierkv.codec.entropy import restored, shrunk
from tierkv.codec.frame import CodecId, Fidelity
from tierkv.codec.segment import Bytes, Flat, SegmentFacts
from tierkv.errors import BadFrame


class Lossless:
    """Values rotated left by one bit and cut into byte planes, each of them through zstd where it shrinks.

    The rotation puts the sign last, so the first plane of bfloat16 is its 8 exponent bits (float16: 5 exponent and 3
    mantissa bits; float32: 8 exponent bits) and the last plane ends with the sign. Payload: the planes' lengths as
    u32, then the planes, most significant first. A plane of as many bytes as there are values is stored as it is, a
    shorter one is a zstd frame. Any bits come back, NaN payloads and the sign of zero included.

    Declines a segment of which no plane shrinks.
    """

    name: str = "lossless"
    id: CodecId = CodecId.LOSSLESS
    fidelity: int = Fidelity.EXACT
    group: int = 0
    fallback: CodecId = CodecId.RAW

    def encode(self, bits: Flat, _segment: SegmentFacts, /) -> Bytes | None:
        n, count = bits.size, bits.itemsize
        split = np.empty(count * n, np.uint8)
        split_kernel(count)(bits.view(f"u{count}"), split)
        planes = [split[i * n : (i + 1) * n] for i in range(count)]
        packed = [shrunk(plane, sample=i > 0) for i, plane in enumerate(planes)]
        if not any(packed):
            return None
        pieces = [
            np.frombuffer(small, np.uint8) if small else plane for small, plane in zip(packed, planes, strict=True)
        ]
        lengths = np.frombuffer(struct.pack(f"<{count}I", *(piece.size for piece in pieces)), np.uint8)
        return np.concatenate((lengths, *pieces))

    def decode(self, payload: Bytes, _segment: SegmentFacts, out: Flat, /) -> None:
        n, count = out.size, out.itemsize
        offset = 4 * count
        if payload.size < offset:
            raise BadFrame("bad_length", "the payload ends inside its table of planes")
        lengths = struct.unpack(f"<{count}I", payload[:offset].tobytes())
        if offset + sum(lengths) != payload.size:
            raise BadFrame("bad_length", "the planes do not fill the payload")
        planes: list[Bytes] = []
        for length in lengths:
            if length > n:
                raise BadFrame("bad_length", "a plane is longer than its segment has values")
            plane = payload[offset : offset + length]
            planes.append(plane if length == n else restored(plane, n))
            offset += length
        merge_kernel(count)(*planes, out.view(f"u{count}"))

    def warm_up(self, dtype: str, /) -> None:
        count = 4 if dtype == "float32" else 2
        split_kernel(count)
        merge_kernel(count)
