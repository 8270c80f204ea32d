"""Eight bits a value: codes and one scale for each group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.codec.compiled import BITS, dequantise_kernel, quantise_kernel
from tierkv.codec.entropy import restored, shrunk
from tierkv.codec.frame import CodecId, Fidelity
from tierkv.codec.segment import SINK_TOKENS, Bytes, Flat, SegmentFacts, row_length, sink_shape, sink_view
from tierkv.errors import BadFrame

_MAGNITUDE_AND_INFINITY = {
    "bfloat16": (0x7FFF, 0x7F80),
    "float16": (0x7FFF, 0x7C00),
    "float32": (0x7FFFFFFF, 0x7F800000),
}


@dataclass(frozen=True, slots=True)
class Int8:
    """Groups of values that share a scale; see the instances below for the layouts there are.

    Payload: scales, one for each group in C order; codes, one for each value in C order; the bits of the values of the
    exact tokens, in C order. The codes of those tokens are 0, so that they do not widen the scale of a group that they
    share with others. Groups start anew in each row (the last axis) and the last of a row may be short, or with
    ``crosses_rows`` they run on through the whole array. With ``entropy_coded``, codes that take fewer bytes than
    there are values are one zstd frame.

    A scale makes the largest magnitude code -128, so it is negative where that value is positive; where the largest of
    the other sign would be more than 127, it is 127 of that. Rounded to nearest even in bfloat16 at most 127.25 of it
    reach that one, so no code overflows, and the peak of bfloat16 values comes back exactly. Groups whose peak is under
    2**-119 take a 127th of it rounded up, and those from 2**127 (float16: 2**15) on rounded down with codes clamped, so
    that tiny values survive and large ones never become infinite. Zeros come back as +0.

    Declines a segment with NaN or an infinity, and one that would not shrink: all its tokens exact, or rows so short
    that scales take what codes save.
    """

    name: str
    id: CodecId
    fidelity: int
    group: int
    scale_type: str
    sink_tokens: int
    crosses_rows: bool = False
    entropy_coded: bool = False
    fallback: CodecId = CodecId.LOSSLESS

    def encode(self, bits: Flat, segment: SegmentFacts, /) -> Bytes | None:
        n, row, sinks = bits.size, self._row(segment), sink_shape(segment, self.sink_tokens)
        scale_bytes = self._groups(row, n) * BITS[self.scale_type].itemsize
        exact_bytes = 0 if sinks is None else sinks[0] * sinks[2] * sinks[3] * bits.itemsize
        if scale_bytes + n + exact_bytes >= bits.nbytes:
            return None
        payload = np.empty(scale_bytes + n + exact_bytes, np.uint8)
        if sinks is not None:
            exact = sink_view(bits, sinks)
            if _not_all_finite(exact, segment.dtype):
                return None
            payload[scale_bytes + n :] = exact.flatten().view(np.uint8)
            bits = bits.copy()
            sink_view(bits, sinks)[...] = 0
        scales = payload[:scale_bytes].view(BITS[self.scale_type])
        codes = payload[scale_bytes : scale_bytes + n]
        if not quantise_kernel(segment.dtype, self.scale_type)(bits, row, self.group, scales, codes.view(np.int8)):
            return None
        small = shrunk(codes) if self.entropy_coded else None
        if small is None:
            return payload
        return np.concatenate((payload[:scale_bytes], np.frombuffer(small, np.uint8), payload[scale_bytes + n :]))

    def decode(self, payload: Bytes, segment: SegmentFacts, out: Flat, /) -> None:
        n, row, sinks = out.size, self._row(segment), sink_shape(segment, self.sink_tokens)
        scale_bytes = self._groups(row, n) * BITS[self.scale_type].itemsize
        exact_bytes = 0 if sinks is None else sinks[0] * sinks[2] * sinks[3] * out.itemsize
        codes_end = payload.size - exact_bytes
        codes = payload[scale_bytes:codes_end] if codes_end > scale_bytes else payload[:0]
        if self.entropy_coded and codes.size < n:
            codes = restored(codes, n)
        if codes.size != n:
            raise BadFrame("bad_length", f"{codes.size} bytes of codes for {n} values")
        scales = payload[:scale_bytes].view(BITS[self.scale_type])
        if not scales.flags.aligned:
            scales = scales.copy()
        dequantise_kernel(segment.dtype, self.scale_type)(codes.view(np.int8), scales, row, self.group, out)
        if sinks is not None:
            exact = payload[codes_end:].view(out.dtype)
            sink_view(out, sinks)[...] = exact.reshape(sinks[0], sinks[3], sinks[2])

    def warm_up(self, dtype: str, /) -> None:
        quantise_kernel(dtype, self.scale_type)
        dequantise_kernel(dtype, self.scale_type)

    def _row(self, segment: SegmentFacts) -> int:
        """Values in a kernel's row. Rows of whole groups are one long run of groups, whatever their length."""
        row = row_length(segment.shape)
        return row if row % self.group and not self.crosses_rows else self.group

    def _groups(self, row: int, size: int) -> int:
        return size // row * -(-row // self.group) + -(-(size % row) // self.group)


def _not_all_finite(bits: Flat, dtype: str) -> bool:
    mask, infinity = _MAGNITUDE_AND_INFINITY[dtype]
    return bool(((bits & mask) >= infinity).any())


INT8 = Int8("int8", CodecId.INT8, Fidelity.INT8, group=64, scale_type="bfloat16", sink_tokens=SINK_TOKENS)
"""Groups of 64 inside a row, a bfloat16 scale, the first 4 tokens of a prompt exact."""

INT8Z = Int8(
    "int8z",
    CodecId.INT8Z,
    Fidelity.INT8,
    group=64,
    scale_type="bfloat16",
    sink_tokens=SINK_TOKENS,
    entropy_coded=True,
)
"""The same values as ``int8`` in fewer bytes."""

INT8_G256 = Int8(
    "int8-g256",
    CodecId.INT8_G256,
    Fidelity.INT8_G256,
    group=256,
    scale_type="float32",
    sink_tokens=0,
    crosses_rows=True,
)
"""Groups of 256 consecutive values of the array in C order, a float32 scale: the first layout the project had, and
the one whose groups cross rows and tokens."""
