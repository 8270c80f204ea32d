import threading

import numpy as np
import pytest
from segment_trips import ITEM, Trip, to_bits

from tierkv.codec.frame import FIDELITY_OF, CodecId, FrameHeader, verify_payload
from tierkv.codec.registry import CODEC_NAMES, codec_named, decode_segment, encode_segment, warm_up
from tierkv.errors import BadFrame

DTYPES = ("bfloat16", "float16", "float32")
OTHERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool")


def test_codecs_are_found_by_name():
    assert CODEC_NAMES == ("raw", "lossless", "int8-g256", "int8", "int8z")
    for name in CODEC_NAMES:
        codec = codec_named(name)
        assert codec.name == name
        assert codec.fidelity == FIDELITY_OF[codec.id]


@pytest.mark.parametrize(("wrong", "hint"), [("int-8", "'int8'"), ("losless", "'lossless'"), ("", "raw, lossless")])
def test_a_wrong_name_is_answered_with_a_right_one(wrong, hint):
    with pytest.raises(ValueError, match=hint):
        codec_named(wrong)


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_header_says_what_the_payload_is(codec, dtype, activations):
    bits = to_bits(activations, dtype)
    trip = Trip(codec, bits, dtype, position=512, token_axis=2)
    header = FrameHeader.unpack(bytes(trip.head))
    assert header == trip.header
    verify_payload(header, trip.payload)
    assert (header.layer, header.array, header.position, header.token_axis) == (2, 1, 512, 2)
    assert (header.dtype, header.shape, header.raw_length) == (dtype, bits.shape, bits.nbytes)
    assert header.codec == codec_named(codec).id
    assert header.fidelity == codec_named(codec).fidelity


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2, 0, 64), (0,), (3, 0), (0, 5)])
def test_empty_arrays_go_raw_and_take_no_bytes(codec, dtype, shape):
    trip = Trip(codec, np.zeros(shape, ITEM[dtype]), dtype, position=0, token_axis=len(shape) - 1)
    assert (trip.header.codec, len(trip.payload)) == (CodecId.RAW, 0)
    assert trip.out.shape == shape


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1, 1, 1), (2, 1, 3, 1, 2, 70)])
def test_scalars_and_six_axes_make_the_trip(codec, dtype, shape):
    bits = to_bits(np.random.default_rng(0).standard_normal(shape), dtype)
    trip = Trip(codec, bits, dtype)
    assert trip.header.shape == trip.out.shape == shape
    if trip.header.fidelity == 0:
        assert (trip.out == bits).all()


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("dtype", OTHERS)
def test_arrays_that_are_not_of_floats_go_raw(codec, dtype):
    array = np.random.default_rng(0).integers(0, 2, (3, 5)).astype(dtype)
    trip = Trip(codec, array, dtype, position=0, token_axis=0)
    assert trip.header.codec == CodecId.RAW
    assert bytes(trip.payload) == array.tobytes()
    assert (trip.out == array).all()


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_read_only_and_shifted_arrays_give_the_same_payload(codec, dtype, activations):
    bits = to_bits(activations, dtype)
    expected = bytes(Trip(codec, bits, dtype).payload)
    wide = np.repeat(bits, 2, axis=2)[:, :, ::2]
    fixed = bits.copy()
    fixed.flags.writeable = False
    shifted = np.frombuffer(b"\0" + bits.tobytes(), np.uint8)[1:].view(bits.dtype).reshape(bits.shape)
    swapped = bits.astype(bits.dtype.newbyteorder())
    assert not shifted.flags.aligned
    for other in (wide, fixed, shifted, swapped):
        header, (_, payload) = encode_segment(
            codec_named(codec), other, dtype, layer=0, index=0, position=256, token_axis=None
        )
        assert bytes(payload) == expected
        assert header.raw_length == bits.nbytes


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_payloads_and_outputs_may_stand_at_any_address(codec, dtype, activations):
    bits = to_bits(activations[..., :40], dtype)
    trip = Trip(codec, bits, dtype, position=2, token_axis=2)
    for shift in range(1, 5):
        payload = memoryview(bytearray(shift) + bytearray(trip.payload))[shift:]
        out = np.zeros(bits.nbytes + shift, np.uint8)[shift:].view(bits.dtype).reshape(bits.shape)
        decode_segment(trip.header, payload, out)
        assert (out == trip.out).all()


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_float_arrays_of_their_own_type_are_taken_and_given(codec, activations):
    for dtype, kind in (("float16", np.float16), ("float32", np.float32)):
        array = activations.astype(kind)
        header, (_, payload) = encode_segment(
            codec_named(codec), array, dtype, layer=0, index=0, position=256, token_axis=2
        )
        out = np.empty_like(array)
        decode_segment(header, payload, out)
        assert np.abs(out - array).max() <= np.abs(array).max() / 250


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_decoding_writes_nothing_beside_its_array(codec, activations):
    bits = to_bits(activations[..., :63], "bfloat16")
    trip = Trip(codec, bits, "bfloat16", position=0, token_axis=2)
    arena = np.full(bits.size + 2000, 0xABCD, np.uint16)
    decode_segment(trip.header, trip.payload, arena[1000:-1000].reshape(bits.shape))
    assert (arena[:1000] == 0xABCD).all()
    assert (arena[-1000:] == 0xABCD).all()
    assert (arena[1000:-1000].reshape(bits.shape) == trip.out).all()


def test_a_raw_payload_is_the_array_itself():
    bits = np.arange(100, dtype=np.uint16)
    _, (_, payload) = encode_segment(
        codec_named("raw"), bits, "bfloat16", layer=0, index=0, position=0, token_axis=None
    )
    assert np.shares_memory(np.frombuffer(payload, np.uint8), bits)


@pytest.mark.parametrize(
    ("array", "dtype", "axis"),
    [
        (np.zeros(3, np.float32), "bfloat16", None),
        (np.zeros(3, np.uint16), "float32", None),
        (np.zeros(3, np.uint16), "none", None),
        (np.zeros(3, np.uint16), "float8", None),
        (np.zeros((1,) * 7, np.uint16), "bfloat16", None),
        (np.zeros(3, np.uint16), "bfloat16", 1),
        (np.zeros(3, np.uint16), "bfloat16", -1),
    ],
)
def test_arrays_that_no_header_can_describe_are_refused(array, dtype, axis):
    with pytest.raises(ValueError):
        encode_segment(codec_named("int8"), array, dtype, layer=0, index=0, position=0, token_axis=axis)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_an_output_that_does_not_fit_the_header_is_a_bad_frame(codec, activations):
    bits = to_bits(activations, "bfloat16")
    trip = Trip(codec, bits, "bfloat16")
    for out in (np.zeros(bits.size, np.uint16), np.zeros(bits.shape, np.uint32), np.zeros((1, 3, 64, 63), np.uint16)):
        with pytest.raises(BadFrame) as caught:
            decode_segment(trip.header, trip.payload, out)
        assert caught.value.reason == "wrong_shape"


def test_an_output_that_cannot_be_filled_in_place_is_the_callers_mistake(activations):
    bits = to_bits(activations, "bfloat16")
    trip = Trip("int8", bits, "bfloat16")
    fixed = np.zeros(bits.shape, np.uint16)
    fixed.flags.writeable = False
    for out in (fixed, np.zeros((*bits.shape[:-1], 128), np.uint16)[..., ::2]):
        with pytest.raises(ValueError, match="C-contiguous"):
            decode_segment(trip.header, trip.payload, out)


def test_many_threads_encode_and_decode_at_once(activations):
    jobs = [(codec, dtype) for codec in CODEC_NAMES for dtype in DTYPES]
    expected = {job: bytes(Trip(job[0], to_bits(activations, job[1]), job[1]).payload) for job in jobs}
    wrong = []

    def work():
        for _ in range(5):
            for codec, dtype in jobs:
                trip = Trip(codec, to_bits(activations, dtype), dtype)
                if bytes(trip.payload) != expected[codec, dtype]:
                    wrong.append((codec, dtype))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_warming_up_takes_names_of_codecs_only():
    warm_up(["int8", "raw"], ["bfloat16"])
    with pytest.raises(ValueError, match="int8"):
        warm_up(["int9"])
