"""Payloads that nobody wrote: whatever a vault sends, decoding ends in BadFrame or in an array, and nowhere else."""

import struct
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from segment_trips import Trip, to_bits

from tierkv.codec.frame import CodecId, FrameType
from tierkv.codec.registry import decode_segment
from tierkv.errors import BadFrame

GUARD = 4096
CASES = [
    (codec, dtype, position)
    for codec in ("raw", "lossless", "int8-g256", "int8", "int8z")
    for dtype in ("bfloat16", "float32")
    for position in (0, 256)
]


def decode_guarded(header, payload, shape, kind):
    """The array, after seeing that no byte beside it was written."""
    arena = np.full(GUARD * 2 + int(np.prod(shape)), 0x5A, kind)
    try:
        decode_segment(header, payload, arena[GUARD:-GUARD].reshape(shape))
    finally:
        assert (arena[:GUARD] == 0x5A).all()
        assert (arena[-GUARD:] == 0x5A).all()


def refused(header, payload, bits):
    """The reason slug for a payload of any length; its header announces that length."""
    header = replace(header, payload_length=len(payload))
    with pytest.raises(BadFrame) as caught:
        decode_guarded(header, payload, bits.shape, bits.dtype)
    return caught.value.reason


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def trip(request, activations):
    codec, dtype, position = request.param
    bits = to_bits(activations[:, :2, :20, :50], dtype)
    return Trip(codec, bits, dtype, position, token_axis=2), bits


def test_payloads_of_a_wrong_length_are_refused(trip):
    made, bits = trip
    payload = bytes(made.payload)
    for length in (0, 1, 3, 7, 8, 15, 16, 17, len(payload) // 2, len(payload) - 1):
        assert refused(made.header, payload[:length], bits) in ("bad_length", "bad_payload")
    for more in (1, 2, 1000, len(payload)):
        assert refused(made.header, payload + b"\1" * more, bits) in ("bad_length", "bad_payload")


def test_a_payload_that_is_not_as_long_as_announced_is_refused(trip):
    made, bits = trip
    with pytest.raises(BadFrame) as caught:
        decode_guarded(made.header, bytes(made.payload)[:-1], bits.shape, bits.dtype)
    assert caught.value.reason == "bad_length"


def test_thousands_of_mutated_payloads_are_refused_or_decoded(trip):
    made, bits = trip
    rng = np.random.default_rng(11)
    original = np.frombuffer(made.payload, np.uint8)
    for _ in range(400):
        payload = original.copy()
        kind = rng.integers(4)
        if kind == 0:
            payload[rng.integers(0, payload.size, rng.integers(1, 8))] = rng.integers(0, 256)
        elif kind == 1:
            payload = payload[: rng.integers(0, payload.size)]
        elif kind == 2:
            start = min(int(rng.integers(0, 40)), payload.size - 1)
            payload[start : start + 4] = rng.integers(0, 256, min(4, payload.size - start))
        else:
            payload = rng.integers(0, 256, rng.integers(0, 2 * payload.size)).astype(np.uint8)
        header = replace(made.header, payload_length=payload.size)
        try:
            decode_guarded(header, payload.tobytes(), bits.shape, bits.dtype)
        except BadFrame as error:
            assert error.reason in ("bad_length", "bad_payload")  # noqa: PT017


def test_headers_that_do_not_go_with_their_codec_are_refused(trip):
    made, bits = trip
    payload = bytes(made.payload)
    for changed, reason in [
        ({"codec": 99}, "unknown_codec"),
        ({"codec": CodecId.TRAINED}, "unknown_codec"),
        ({"group": 32}, "impossible_header"),
        ({"group": 65535}, "impossible_header"),
        ({"flags": 2}, "impossible_header"),
        ({"type": FrameType.RECORD}, "impossible_header"),
        ({"token_axis": 4}, "impossible_header"),
        ({"shape": (2, 20, 50)}, "wrong_shape"),
    ]:
        assert refused(replace(made.header, **changed), payload, bits) == reason


def test_a_lossy_or_packed_segment_of_integers_is_refused():
    bits = np.arange(40, dtype=np.uint16)
    made = Trip("raw", bits, "uint16")
    for codec, group in ((CodecId.LOSSLESS, 0), (CodecId.INT8, 64)):
        header = replace(made.header, codec=codec, group=group)
        assert refused(header, bytes(made.payload), bits) == "impossible_header"


def test_bytes_for_an_empty_array_are_refused():
    bits = np.zeros((2, 0), np.uint16)
    header = Trip("raw", bits, "bfloat16").header
    assert refused(header, b"x", bits) == "bad_length"


def lossless_with(plane, n):
    """A float32 payload of n values whose first plane is ``plane``."""
    return struct.pack("<4I", len(plane), n, n, n) + plane + bytes(3 * n)


@pytest.mark.parametrize(
    "plane",
    [
        zstandard.ZstdCompressor().compress(bytes(1001)),
        zstandard.ZstdCompressor().compress(bytes(999)),
        zstandard.ZstdCompressor().compress(bytes(1 << 20)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)),
        zstandard.ZstdCompressor().compress(bytes(1000)) + b"x",
        zstandard.ZstdCompressor().compress(bytes(1000))[:-1],
        b"",
        b"\x28\xb5\x2f\xfd" + b"\xff" * 20,
    ],
    ids=["longer", "shorter", "a bomb", "of unknown size", "trailed", "cut", "absent", "a header only"],
)
def test_a_plane_that_does_not_unpack_to_its_size_is_refused(plane):
    bits = np.zeros(1000, np.uint32)
    header = Trip("lossless", bits, "float32").header
    assert refused(header, lossless_with(plane, 1000), bits) == "bad_payload"


def test_a_size_that_a_frame_only_claims_is_not_believed():
    honest = zstandard.ZstdCompressor().compress(bytes(1000))
    header = Trip("lossless", np.zeros(999, np.uint32), "float32").header
    at = honest.index((1000 - 256).to_bytes(2, "little"))
    lying = honest[:at] + (999 - 256).to_bytes(2, "little") + honest[at + 2 :]
    assert zstandard.frame_content_size(lying) == 999
    assert refused(header, lossless_with(lying, 999), np.zeros(999, np.uint32)) == "bad_payload"


@pytest.mark.parametrize("lengths", [(2000, 0, 0, 0), (0xFFFFFFFF,) * 4, (1001, 999, 1000, 1000), (1000,) * 4])
def test_tables_that_do_not_add_up_are_refused(lengths):
    bits = np.zeros(1000, np.uint32)
    header = Trip("lossless", bits, "float32").header
    payload = struct.pack("<4I", *lengths) + bytes(3999 if lengths == (1000,) * 4 else sum(lengths) % 10_000)
    assert refused(header, payload, bits) in ("bad_length", "bad_payload")
