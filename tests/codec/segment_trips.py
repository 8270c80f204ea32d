"""Segments out and back, for the codec tests."""

import numpy as np

from tierkv.codec.registry import codec_named, decode_segment, encode_segment

ITEM = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}


def to_bits(values, dtype):
    """Bit patterns of float values; bfloat16 by cutting, which is enough to make test data."""
    values = np.asarray(values, np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16).view(np.uint16) if dtype == "float16" else values.view(np.uint32)


def to_floats(bits, dtype):
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32) if dtype == "float16" else bits.view(np.float32)


class Trip:
    """One segment out and back: ``header``, ``payload`` and ``out``, the bit patterns that came back."""

    def __init__(self, codec, bits, dtype, position=256, token_axis=None):
        self.header, (self.head, self.payload) = encode_segment(
            codec_named(codec), bits, dtype, layer=2, index=1, position=position, token_axis=token_axis
        )
        self.out = np.full(bits.shape, 0x55, bits.dtype)
        decode_segment(self.header, self.payload, self.out)
