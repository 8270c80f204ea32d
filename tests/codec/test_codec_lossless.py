import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_trips import ITEM, Trip, to_bits

from tierkv.codec.frame import CodecId, Fidelity

DTYPES = ("bfloat16", "float16", "float32")


def planes_by_hand(bits):
    """Byte planes of the values rotated left by one, most significant first."""
    width = bits.itemsize * 8
    turned = [((v << 1) | (v >> (width - 1))) & ((1 << width) - 1) for v in bits.reshape(-1).tolist()]
    return [bytes((v >> shift) & 0xFF for v in turned) for shift in range(width - 8, -8, -8)]


def planes_of(payload, n, count):
    """The planes of a payload and whether each is compressed."""
    data, offset = bytes(payload), 4 * count
    planes, packed = [], []
    for length in struct.unpack(f"<{count}I", data[:offset]):
        plane = data[offset : offset + length]
        packed.append(length < n)
        planes.append(zstandard.ZstdDecompressor().decompress(plane) if length < n else plane)
        offset += length
    assert offset == len(data)
    return planes, packed


@pytest.mark.parametrize("dtype", DTYPES)
def test_payload_is_the_planes_of_the_rotated_values(dtype, activations):
    bits = to_bits(activations, dtype)
    trip = Trip("lossless", bits, dtype)
    assert (trip.header.codec, trip.header.fidelity, trip.header.group) == (CodecId.LOSSLESS, Fidelity.EXACT, 0)
    planes, packed = planes_of(trip.payload, bits.size, bits.itemsize)
    assert planes == planes_by_hand(bits)
    assert packed == [True] + [False] * (bits.itemsize - 1)
    assert (trip.out == bits).all()


def test_a_bfloat16_exponent_is_alone_in_its_plane():
    bits = np.array([0x3F80, 0xBF80, 0x7FFF, 0x8001], np.uint16)
    assert planes_by_hand(bits) == [bytes([0x7F, 0x7F, 0xFF, 0x00]), bytes([0x00, 0x01, 0xFE, 0x03])]


def test_ratio_is_counted_against_the_type_that_came_in(activations):
    ratio = {dtype: to_bits(activations, dtype).nbytes for dtype in DTYPES}
    for dtype in DTYPES:
        ratio[dtype] /= Trip("lossless", to_bits(activations, dtype), dtype).header.payload_length
    assert ratio["bfloat16"] > 1.35
    assert 1.05 < ratio["float16"] < ratio["bfloat16"]
    assert 1.1 < ratio["float32"] < ratio["bfloat16"]


def test_float32_that_was_widened_from_bfloat16_shrinks_to_less_than_half():
    bits = to_bits(np.random.default_rng(0).standard_normal((64, 512)), "float32") & 0xFFFF0000
    trip = Trip("lossless", bits, "float32")
    assert trip.header.payload_length < bits.nbytes / 2
    assert (trip.out == bits).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bits_come_back(dtype):
    rng = np.random.default_rng(8)
    every = rng.integers(0, 1 << (8 * ITEM[dtype]().itemsize), 70_000).astype(ITEM[dtype])
    skewed = every & ITEM[dtype](0x80FF)
    for bits in (every, skewed, skewed[::-1], np.full(100, 0x7FC1, ITEM[dtype]), every[:1], every[:3]):
        assert (Trip("lossless", np.ascontiguousarray(bits), dtype).out == bits).all()


def test_every_16_bit_pattern_comes_back():
    bits = np.arange(1 << 16, dtype=np.uint16)
    for dtype in ("bfloat16", "float16"):
        assert (Trip("lossless", bits, dtype).out == bits).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_that_does_not_shrink_goes_raw(dtype):
    bits = np.random.default_rng(9).integers(0, 1 << (8 * ITEM[dtype]().itemsize), 70_000).astype(ITEM[dtype])
    trip = Trip("lossless", bits, dtype)
    assert trip.header.codec == CodecId.RAW
    assert bytes(trip.payload) == bits.tobytes()


def test_a_plane_that_is_noise_only_in_its_middle_is_still_lossless():
    noise = np.random.default_rng(1).integers(0, 256, 300_000).astype(np.uint16)
    noise[:100_000] = 7
    noise[200_000:] = 7
    assert (Trip("lossless", noise, "bfloat16").out == noise).all()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(DTYPES), st.binary(min_size=4, max_size=2000), st.integers(1, 40))
def test_any_bytes_come_back(dtype, data, times):
    data = data * times
    bits = np.frombuffer(data[: len(data) // 4 * 4], ITEM[dtype])
    assert (Trip("lossless", bits, dtype).out == bits).all()
