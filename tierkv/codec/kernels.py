"""The codecs' loops in numba: bit patterns in and out, with floats only in registers.

Arrays are flat and C-contiguous; their integer types say what the bits are (see ``lanes``). None of this needs
fastmath, so results are the same on every machine. Callers own every length: nothing here is checked against the
size of an array.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOptionalSubscript=false
# pyright: reportOptionalIterable=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from tierkv.codec.lanes import (
    BATCH_64,
    BATCH_256,
    CHUNK,
    bits_of,
    decode_chunk,
    decode_one,
    encode_batch_64,
    encode_batch_256,
    encode_chunk,
    encode_one,
    float_of,
    from_bits,
    get,
    get_float,
    get_inverse,
    larger,
    negative_chunk,
    negative_one,
    positive_chunk,
    positive_one,
    put,
    put_float,
    put_scale,
)

BATCH = 16
"""Groups of rows that are not one group whose scales are found before their codes are written, so that the divisions
overlap."""

_OPTIONS = {"nogil": True, "error_model": "numpy"}
_INLINE = {**_OPTIONS, "forceinline": True}
_U1 = np.uint32(1)


def _limits(array):
    """Magnitudes: zero, where the usual range begins, where it ends, and where finite numbers end.

    In the usual range of a group's peak, 2**-119 to 2**127 (float16: any to 2**15), its scale is a normal number whose
    inverse is finite, and 128 * scale is finite even when the scale was rounded up.
    """


@overload(_limits)
def _(array):
    values = {
        types.uint32: tuple(np.uint32(v) for v in (0, 0x04000000, 0x7F000000, 0x7F800000)),
        types.uint16: tuple(np.uint16(v) for v in (0, 0x0400, 0x7F00, 0x7F80)),
        types.int16: tuple(np.uint16(v) for v in (0, 0x0001, 0x7800, 0x7C00)),
    }[array.dtype]
    return lambda array: values  # noqa: ARG005


def _scale_grid(scales):
    """The distance between scales below the smallest normal one, and the bits of a float32 that a scale keeps."""


@overload(_scale_grid)
def _(scales):
    is_bf16 = scales.dtype == types.uint16
    step, kept = (2.0**-133, np.uint32(0xFFFF0000)) if is_bf16 else (2.0**-149, np.uint32(0xFFFFFFFF))
    return lambda scales: (step, kept)  # noqa: ARG005


# --- groups ---------------------------------------------------------------------------------------


@njit(**_INLINE)
def _batch(x, start, stride, length, scales, g, g_stride, codes, count):
    """Writes ``count`` groups of ``length`` values, ``stride`` apart; False if one of them needs ``_careful_group``."""
    zero, low, high, _ = _limits(x)
    unusual = False
    whole = length - (length & (CHUNK - 1))
    for k in range(count):
        first = start + k * stride
        positive, negative = zero, zero
        for at in range(first, first + whole, CHUNK):
            positive = larger(positive, positive_chunk(x, at))
            negative = larger(negative, negative_chunk(x, at))
        for at in range(first + whole, first + length):
            positive = larger(positive, positive_one(x, at))
            negative = larger(negative, negative_one(x, at))
        top = larger(positive, negative)
        unusual |= ((top < low) & (top > zero)) | (top >= high)
        put_scale(scales, g + k * g_stride, x, positive, negative)
    if unusual:
        return False
    for k in range(count):
        inverse = get_inverse(scales, g + k * g_stride)
        first = start + k * stride
        for at in range(first, first + whole, CHUNK):
            encode_chunk(x, at, inverse, codes)
        for at in range(first + whole, first + length):
            encode_one(x, at, inverse, codes)
    return True


@njit(**_OPTIONS)
def _careful_group(x, start, length, scales, g, codes):
    """Writes one group, whatever its values; False if they are not all finite.

    Where a scale of peak / 128 would not do, codes stay in -127..127 and the scale is peak / 127: rounded up to its
    spacing in tiny groups, and down in huge ones, so that 127 * scale stays below the peak.
    """
    one = np.intp(1)  # a literal would have _batch compiled once more
    if _batch(x, start, length, length, scales, g, one, codes, one):
        return True
    zero, low, _, not_finite = _limits(x)
    top = zero
    for i in range(start, start + length):
        top = larger(top, larger(positive_one(x, i), negative_one(x, i)))
    if top >= not_finite:
        return False
    exact = np.float64(float_of(x, top)) / 127.0
    step, kept = _scale_grid(scales)
    if top < low:
        scale = np.float32(np.ceil(exact / step) * step)
    else:
        scale = np.float32(exact)
        if np.float64(scale) > exact:
            scale = from_bits(np.uint32(bits_of(scale) - _U1))
        scale = from_bits(np.uint32(bits_of(scale) & kept))
    put_float(scales, g, scale)
    for i in range(start, start + length):
        quotient = np.rint(np.float64(get_float(x, i)) / np.float64(scale))
        clamped = 127.0 if quotient > 127.0 else -127.0 if quotient < -127.0 else quotient
        put(codes, i, np.int8(clamped))
    return True


# --- kernels --------------------------------------------------------------------------------------


def quantise(x, row, group, scales, codes):
    """``codes`` are round(x / scale), and each group's scale makes its peak -128; False if x is not all finite.

    A scale is the larger of peak / 128 and, for the largest magnitude of the other sign, other / 127; it is negative
    where the peak is positive, or both are equal. Against max(abs(x)) / 127 that is 0.06 dB.

    x: [n] bits, cut into rows of ``row`` values (the last may be short) and each row into groups of ``group`` (the last
    may be short again). scales: [groups] bits, rounded to nearest; codes: [n] int8. After False both are
    undefined. A group of zeros has the scale 0. Zeros lose their sign.
    """
    per_row = (row + group - 1) // group
    rows = x.size // row
    done = 0
    if row == group and (group == 64 or group == 256):
        _, low, high, _ = _limits(x)
        batch = BATCH_64 if group == 64 else BATCH_256
        for g in range(0, rows - batch + 1, batch):
            if group == 64:
                usual = encode_batch_64(x, g * 64, scales, g, codes, low, high)
            else:
                usual = encode_batch_256(x, g * 256, scales, g, codes, low, high)
            if usual:
                continue
            for k in range(g, g + batch):
                if not _careful_group(x, k * group, group, scales, k, codes):
                    return False
        done = rows - rows % batch
    for r in range(done, rows, BATCH):
        count = rows - r if rows - r < BATCH else BATCH
        for j in range(per_row):
            first, g = r * row + j * group, r * per_row + j
            length = group if j < per_row - 1 else row - j * group
            if not _batch(x, first, row, length, scales, g, per_row, codes, count):
                for k in range(count):
                    if not _careful_group(x, first + k * row, length, scales, g + k * per_row, codes):
                        return False
    g = rows * per_row
    for at in range(rows * row, x.size, group):
        length = group if at + group < x.size else x.size - at
        if not _careful_group(x, at, length, scales, g, codes):
            return False
        g += 1
    return True


def dequantise(codes, scales, row, group, out):
    """``out`` is codes * scale, rounded to nearest, and +0 for 0; shapes as in ``quantise``."""
    g = 0
    if row == group == CHUNK:
        while g < out.size // CHUNK:
            decode_chunk(codes, g * CHUNK, get_float(scales, g), out)
            g += 1
    start = g * group
    row_end = start + row
    while start < out.size:
        stop = min(start + group, row_end, out.size)
        scale = get_float(scales, g)
        whole = stop - ((stop - start) & (CHUNK - 1))
        for at in range(start, whole, CHUNK):
            decode_chunk(codes, at, scale, out)
        for at in range(whole, stop):
            decode_one(codes, at, scale, out)
        row_end = row_end + row if stop == row_end else row_end
        start, g = stop, g + 1


def split2(x, planes):
    """Bytes of 16-bit values after a rotation left by one, so that the sign leaves the exponent's byte.

    x: [n] uint16; planes: [2 * n] uint8, the high bytes (bfloat16: the exponent) first.
    """
    n = x.size
    for i in range(n):
        word = np.uint16(get(x, i))
        turned = np.uint16(np.uint16(word << np.uint16(1)) | np.uint16(word >> np.uint16(15)))
        put(planes, i, np.uint8(turned >> np.uint16(8)))
        put(planes, n + i, np.uint8(turned))


def merge2(high, low, out):
    """``out`` is what ``split2`` took apart; the planes are [n] uint8."""
    for i in range(out.size):
        turned = np.uint16(np.uint16(np.uint16(get(high, i)) << np.uint16(8)) | np.uint16(get(low, i)))
        put(out, i, np.uint16(np.uint16(turned >> np.uint16(1)) | np.uint16(turned << np.uint16(15))))


def split4(x, planes):
    """Bytes of 32-bit values after a rotation left by one. x: [n] uint32; planes: [4 * n] uint8, exponents first."""
    n = x.size
    for i in range(n):
        word = get(x, i)
        turned = np.uint32(np.uint32(word << _U1) | np.uint32(word >> np.uint32(31)))
        put(planes, i, np.uint8(turned >> np.uint32(24)))
        put(planes, n + i, np.uint8(turned >> np.uint32(16)))
        put(planes, n + n + i, np.uint8(turned >> np.uint32(8)))
        put(planes, n + n + n + i, np.uint8(turned))


def merge4(a, b, c, d, out):
    """``out`` is what ``split4`` took apart; the planes are [n] uint8."""
    for i in range(out.size):
        upper = np.uint32(np.uint32(np.uint32(get(a, i)) << np.uint32(8)) | np.uint32(get(b, i)))
        lower = np.uint32(np.uint32(np.uint32(get(c, i)) << np.uint32(8)) | np.uint32(get(d, i)))
        turned = np.uint32(np.uint32(upper << np.uint32(16)) | lower)
        put(out, i, np.uint32(np.uint32(turned >> _U1) | np.uint32(turned << np.uint32(31))))
