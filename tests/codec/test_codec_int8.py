from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from int8_reference import dequantised, groups_of, quantised
from segment_trips import ITEM, Trip, to_bits, to_floats

from tierkv.codec.frame import CodecId, Fidelity, payload_hash
from tierkv.codec.registry import decode_segment

DTYPES = ("bfloat16", "float16", "float32")
LAYOUTS = {"int8": (64, "bfloat16"), "int8-g256": (256, "float32")}
NOT_FINITE = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
SIGN = {"bfloat16": 0x8000, "float16": 0x8000, "float32": 0x80000000}


def row_of(codec, shape):
    return int(np.prod(shape)) if codec == "int8-g256" else shape[-1]


def taken_apart(trip, codec, size, row):
    """Scales and codes of a payload without exact tokens."""
    group, scale_type = LAYOUTS[codec]
    groups = len(list(groups_of(size, row, group)))
    kind = np.dtype("<u2" if scale_type == "bfloat16" else "<u4")
    scales = np.frombuffer(trip.payload, kind, groups)
    codes = np.frombuffer(trip.payload, np.int8, offset=groups * kind.itemsize)
    return scales.tolist(), codes.tolist()


def assert_is_the_reference(codec, bits, dtype):
    trip, row = Trip(codec, bits, dtype), row_of(codec, bits.shape)
    assert trip.header.codec == (CodecId.INT8 if codec == "int8" else CodecId.INT8_G256)
    layout = (dtype, row, *LAYOUTS[codec])
    scales, codes = quantised(bits.reshape(-1).tolist(), *layout)
    assert taken_apart(trip, codec, bits.size, row) == (scales, codes)
    assert trip.out.reshape(-1).tolist() == dequantised(scales, codes, *layout)
    return trip


def any_finite_bits(rng, shape, dtype):
    """Every finite pattern is as likely as any other: denormals, zeros of both signs, the largest numbers."""
    magnitudes = rng.integers(0, NOT_FINITE[dtype], shape)
    return (magnitudes | SIGN[dtype] * rng.integers(0, 2, shape)).astype(ITEM[dtype])


@pytest.mark.parametrize("codec", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(2, 5, 64), (3, 80), (17, 65), (1, 1, 2, 128), (300,), (1, 7), (33, 130), (37, 64), (19, 256)]
)
def test_kernels_agree_with_arithmetic_done_one_value_at_a_time(codec, dtype, shape):
    bits = to_bits(np.random.default_rng(len(shape)).standard_normal(shape), dtype)
    assert_is_the_reference(codec, bits, dtype)


@pytest.mark.parametrize("codec", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_agree_on_every_kind_of_finite_number(codec, dtype):
    rng = np.random.default_rng(3)
    assert_is_the_reference(codec, any_finite_bits(rng, (24, 64), dtype), dtype)
    # Groups of one size each, from the smallest to the largest.
    top = NOT_FINITE[dtype] - 1
    peaks = np.unique(
        np.concatenate((np.arange(1, 9), np.linspace(9, top, 50).astype(int), np.arange(top - 8, top + 1)))
    )
    rows = (rng.random((len(peaks), 64)) * peaks[:, None]).astype(ITEM[dtype])
    rows[:, 5] = peaks
    rows[::2, 6] = peaks[::2] | SIGN[dtype]
    assert_is_the_reference(codec, rows, dtype)


def by_hand(values, scale, codes):
    """One group of 64 of these values and zeros: what becomes of it, for positions whose tokens are not exact."""
    bits = to_bits(np.array(values + [0.0] * (64 - len(values)), np.float32), "bfloat16").reshape(1, 64)
    trip = Trip("int8", bits, "bfloat16")
    assert taken_apart(trip, "int8", 64, 64) == (
        [int(np.float32(scale).view(np.uint32)) >> 16],
        codes + [0] * (64 - len(codes)),
    )
    return to_floats(trip.out, "bfloat16").reshape(-1)[: len(values)].tolist()


def test_the_peak_is_code_minus_128_whatever_its_sign_and_the_rest_follows():
    # 64 / 128 = 0.5, negative because the peak is positive; 0.25 / -0.5 = -0.5 is a tie and goes to the even 0.
    assert by_hand([64.0, 63.5, -63.5, 0.75, 0.25], -0.5, [-128, -127, 127, -2, 0]) == [64.0, 63.5, -63.5, 1.0, 0.0]
    assert by_hand([-64.0, -63.5, 63.5, 1.0], 0.5, [-128, -127, 127, 2]) == [-64.0, -63.5, 63.5, 1.0]


def test_where_the_other_sign_would_not_fit_it_decides():
    # 64 / 127 = 0.503937 is more than 64 / 128; in bfloat16 it is 0.50390625, and 64 is 127.008 of that.
    assert by_hand([64.0, -64.0], -0.50390625, [-127, 127]) == [64.0, -64.0]
    # 126 / 127 = 0.992126 is less than 127 / 128 = 0.9921875; 126.5 / 127 = 0.996063 (0.99609375) is more.
    assert by_hand([-127.0, 126.0], 0.9921875, [-128, 127]) == [-127.0, 126.0]
    assert by_hand([-127.0, 126.5], 0.99609375, [-127, 127]) == [-126.5, 126.5]


def test_scales_of_either_sign_are_read_and_zero_is_never_negative():
    codes = np.zeros((2, 64), np.int8)
    codes[:, :3] = 127, -128, 1
    scales = to_bits(np.array([1.5, -1.5], np.float32), "bfloat16")
    payload = np.concatenate((scales.view(np.uint8), codes.reshape(-1).view(np.uint8)))
    out = np.empty((2, 64), np.uint16)
    segment = Trip("int8", np.ones((2, 64), np.uint16), "bfloat16").header
    decode_segment(replace(segment, payload_length=payload.size, payload_hash=payload_hash(payload)), payload, out)
    # 127 * 1.5 = 190.5 lies between the bfloat16 190 and 191 and goes to the even one, 190.
    expected = np.zeros((2, 64), np.float32)
    expected[:, :3] = [[190.0, -192.0, 1.5], [-190.0, 192.0, -1.5]]
    assert to_floats(out, "bfloat16").tolist() == expected.tolist()
    assert not np.signbit(to_floats(out, "bfloat16")[:, 3:]).any()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_bits_in_any_rows_agree(data):
    codec, dtype = data.draw(st.sampled_from(sorted(LAYOUTS))), data.draw(st.sampled_from(DTYPES))
    shape = (data.draw(st.integers(1, 35)), data.draw(st.sampled_from([5, 16, 63, 64, 65, 96, 129])))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bits = any_finite_bits(rng, shape, dtype)
    if data.draw(st.booleans()):
        bits &= ITEM[dtype](SIGN[dtype] | (0x3FF if dtype == "float16" else NOT_FINITE[dtype] >> 1))
    assert_is_the_reference(codec, bits, dtype)


@pytest.mark.parametrize("codec", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_comes_back_is_within_half_a_step(codec, dtype, activations):
    bits = to_bits(activations, dtype)
    before, after = to_floats(bits, dtype), to_floats(Trip(codec, bits, dtype).out, dtype)
    group = LAYOUTS[codec][0]
    groups, errors = before.reshape(-1, group), (after - before).reshape(-1, group)
    step = np.abs(groups).max(axis=1, keepdims=True) / 127 * (1 + 2**-8)
    rounding = np.abs(groups) * {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-23}[dtype]
    assert (np.abs(errors) <= step / 2 + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_peak_of_any_size_overflows_its_code_or_leaves_the_finite_numbers(dtype):
    top = NOT_FINITE[dtype]
    peaks = np.arange(0, top, 65521 if dtype == "float32" else 1)
    peaks = np.concatenate((peaks, np.arange(top - 4000, top), np.arange(4000)))
    bits = np.repeat(peaks.astype(ITEM[dtype]).reshape(-1, 1), 8, axis=1)
    bits[:, 1::2] |= ITEM[dtype](SIGN[dtype])
    for codec in LAYOUTS:
        trip = Trip(codec, bits, dtype)
        assert np.isfinite(to_floats(trip.out, dtype)).all()
        signs = np.sign(to_floats(trip.out, dtype).reshape(bits.shape))
        assert (signs[:, 0::2] >= 0).all()
        assert (signs[:, 1::2] <= 0).all()


@pytest.mark.parametrize("codec", ["int8", "int8z", "int8-g256"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_zeros_come_back_as_positive_zeros(codec, dtype):
    bits = np.zeros((4, 64), ITEM[dtype])
    bits[1] = SIGN[dtype]
    bits[2, 3] = to_bits([127.0], dtype)[0]
    trip = Trip(codec, bits, dtype)
    assert (trip.out[:2] == 0).all()
    assert trip.out[2, 3] == bits[2, 3]
    assert np.count_nonzero(trip.out) == 1


def test_bfloat16_denormals_come_back_exactly():
    bits = np.arange(128, dtype=np.uint16).reshape(2, 64)
    bits[1] |= 0x8000
    trip = Trip("int8", bits, "bfloat16")
    assert (trip.out == bits).all()


@pytest.mark.parametrize("codec", ["int8", "int8z"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "axis"), [((1, 2, 5, 64), 2), ((5, 3, 40), 0), ((2, 64, 5), 2), ((1, 5, 2, 80), 1), ((2, 5), 1)]
)
@pytest.mark.parametrize("position", [0, 2, 3, 4, 256])
def test_tokens_at_the_first_four_positions_are_exact_and_no_others_suffer(codec, dtype, shape, axis, position):
    rng = np.random.default_rng(1)
    values = rng.standard_normal(shape).astype(np.float32)
    exact = max(0, 4 - position)
    sinks = np.moveaxis(values, axis, 0)[:exact]
    sinks *= 1000
    bits = to_bits(values, dtype)
    trip = Trip(codec, bits, dtype, position, axis)
    before, after = np.moveaxis(bits, axis, 0), np.moveaxis(trip.out, axis, 0)
    assert (before[:exact] == after[:exact]).all()
    if trip.header.codec in (CodecId.INT8, CodecId.INT8Z):
        error = np.abs(to_floats(after, dtype) - to_floats(before, dtype))[exact:]
        assert error.max() < 0.03
        assert (before[exact:] != after[exact:]).any()
    else:
        assert (bits == trip.out).all()


def test_the_seeds_layout_keeps_no_token_exact_and_crosses_rows():
    bits = to_bits(np.random.default_rng(2).standard_normal((4, 100)), "bfloat16")
    bits[0, 0] = to_bits([1000.0], "bfloat16")[0]
    trip = Trip("int8-g256", bits, "bfloat16", position=0, token_axis=0)
    out = to_floats(trip.out, "bfloat16").reshape(-1)
    assert (out[1:256] == 0).all()
    assert (out[256:] != 0).any()
    assert len(trip.payload) == 400 + 2 * 4
    assert (trip.header.group, trip.header.fidelity) == (256, Fidelity.INT8_G256)


def test_payload_sizes_are_what_the_layout_says():
    bits = to_bits(np.ones((1, 3, 256, 80)), "bfloat16")
    assert len(Trip("int8", bits, "bfloat16", 256, 2).payload) == bits.size + 3 * 256 * 2 * 2
    assert len(Trip("int8", bits, "bfloat16", 0, 2).payload) == bits.size + 3 * 256 * 2 * 2 + 3 * 4 * 80 * 2
    assert len(Trip("int8-g256", bits, "bfloat16", 0, 2).payload) == bits.size + bits.size // 256 * 4


def test_int8z_gives_the_values_of_int8_in_fewer_bytes(activations):
    bits = to_bits(activations, "bfloat16")
    plain, packed = Trip("int8", bits, "bfloat16", 0, 2), Trip("int8z", bits, "bfloat16", 0, 2)
    assert (plain.out == packed.out).all()
    assert len(packed.payload) < len(plain.payload)
    assert packed.header.fidelity == plain.header.fidelity == Fidelity.INT8


def test_int8z_stores_codes_that_do_not_shrink():
    bits = to_bits(np.random.default_rng(5).uniform(-1, 1, (64, 64)), "float32")
    trip = Trip("int8z", bits, "float32")
    assert trip.header.codec == CodecId.INT8Z
    assert len(trip.payload) == bits.size + 64 * 2


@pytest.mark.parametrize("codec", ["int8", "int8z", "int8-g256"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [0, 1, 63, 64, 200, 319])
def test_one_nan_or_infinity_sends_the_whole_segment_lossless(codec, dtype, where):
    bits = to_bits(np.random.default_rng(4).standard_normal((4, 80)), dtype)
    for special in (NOT_FINITE[dtype], NOT_FINITE[dtype] | SIGN[dtype], NOT_FINITE[dtype] + 1, SIGN[dtype] * 2 - 1):
        bits.reshape(-1)[where] = special
        trip = Trip(codec, bits, dtype, position=0, token_axis=0)
        assert trip.header.codec in (CodecId.LOSSLESS, CodecId.RAW)
        assert trip.header.fidelity == Fidelity.EXACT
        assert (trip.out == bits).all()


def test_rows_too_short_to_gain_anything_stay_exact():
    bits = to_bits(np.random.default_rng(6).standard_normal((500, 1)), "bfloat16")
    trip = Trip("int8", bits, "bfloat16")
    assert trip.header.fidelity == Fidelity.EXACT
    assert (trip.out == bits).all()
    assert Trip("int8", to_bits(np.ones((500, 1)), "float32"), "float32").header.codec == CodecId.INT8
