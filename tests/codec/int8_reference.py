"""The int8 layouts spelled out one value at a time, from their description and with nothing of the kernels.

Exact arithmetic is done with fractions; float32 and float16 steps with numpy scalars, which round as IEEE 754 says.
"""

import math
from fractions import Fraction

import numpy as np

f32 = np.float32
SCALE_SIGN = {"bfloat16": 0x8000, "float32": 0x80000000}


def value_of(bits, dtype):
    """The float32 of one bit pattern."""
    if dtype == "bfloat16":
        return np.uint32(int(bits) << 16).view(f32)
    if dtype == "float16":
        return f32(np.uint16(int(bits)).view(np.float16))
    return np.uint32(int(bits)).view(f32)


def nearest_bf16(value):
    """Bits of the bfloat16 nearest to a finite float32, ties to even, found among its neighbours."""
    down = int(f32(value).view(np.uint32)) >> 16
    below, above = (
        (Fraction(float(value_of(bits, "bfloat16"))) for bits in (down, down + 1))
        if ((down & 0x7FFF) + 1 < 0x7F80)
        else (None, None)
    )
    if below is None:
        return down + (int(f32(value).view(np.uint32)) & 0xFFFF >= 0x8000)
    exact = Fraction(float(value))
    if abs(exact - below) != abs(above - exact):
        return down if abs(exact - below) < abs(above - exact) else down + 1
    return down if down % 2 == 0 else down + 1


def bits_of(value, dtype):
    """The bit pattern nearest to a float32."""
    if dtype == "bfloat16":
        return nearest_bf16(value)
    if dtype == "float16":
        return int(np.float16(value).view(np.uint16))
    return int(f32(value).view(np.uint32))


def scale_of(positive, negative, dtype, scale_type):
    """Bits of the scale for a group with these largest magnitudes among its positive and its negative values."""
    peak, other = max(positive, negative), min(positive, negative)
    if peak == 0:
        return 0
    exact = Fraction(float(peak)) / 127
    huge = 2.0**15 if dtype == "float16" else 2.0**127
    if dtype != "float16" and peak < 2.0**-119:
        step = Fraction(1, 2**133 if scale_type == "bfloat16" else 2**149)
        return bits_of(f32(float(math.ceil(exact / step) * step)), scale_type)
    if peak >= huge:
        bits = bits_of(f32(float(exact)), scale_type)
        while Fraction(float(value_of(bits, scale_type))) > exact:
            bits -= 1
        return bits
    sign = 0 if negative > positive else SCALE_SIGN[scale_type]
    return sign | bits_of(max(f32(peak) / f32(128), f32(other) / f32(127)), scale_type)


def code_of(x, scale, peak, dtype):
    if scale == 0:
        return 0
    huge = 2.0**15 if dtype == "float16" else 2.0**127
    if (dtype != "float16" and peak < 2.0**-119) or peak >= huge:
        return max(-127, min(127, round(float(x) / float(scale))))
    return round(float(x) * float(f32(1) / scale))  # the product of two float32 is exact in float64


def groups_of(n, row, group):
    """(start, stop) of each group in C order."""
    for first in range(0, n, row):
        for start in range(first, min(first + row, n), group):
            yield start, min(start + group, first + row, n)


def quantised(bits, dtype, row, group, scale_type):
    """Scales (bit patterns) and codes of a flat list of bit patterns."""
    values = [value_of(each, dtype) for each in bits]
    scales, codes = [], []
    for start, stop in groups_of(len(values), row, group):
        positive = max(max(x, f32(0)) for x in values[start:stop])
        negative = max(max(-x, f32(0)) for x in values[start:stop])
        peak = max(positive, negative)
        scales.append(scale_of(positive, negative, dtype, scale_type))
        scale = value_of(scales[-1], scale_type)
        codes += [code_of(x, scale, peak, dtype) for x in values[start:stop]]
    return scales, codes


def dequantised(scales, codes, dtype, row, group, scale_type):
    """Bit patterns of the values that come back."""
    out = []
    for scale, (start, stop) in zip(scales, groups_of(len(codes), row, group), strict=True):
        out += [bits_of(f32(code) * value_of(scale, scale_type) + f32(0), dtype) for code in codes[start:stop]]
    return out
