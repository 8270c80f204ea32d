import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.codec.frame import (
    DTYPES,
    HEADER_BYTES,
    CodecId,
    Fidelity,
    FrameHeader,
    FrameType,
    check_header,
    frames,
    payload_hash,
    verify_payload,
)
from tierkv.errors import BadFrame

PAYLOAD = bytes(range(120))
HEADER = FrameHeader(
    FrameType.SEGMENT,
    CodecId.INT8,
    "bfloat16",
    (1, 2, 3, 10),
    position=7,
    raw_length=120,
    payload_length=len(PAYLOAD),
    payload_hash=xxhash.xxh3_128_digest(PAYLOAD),
    layer=300,
    array=1,
    group=64,
    flags=1,
    token_axis=2,
    fidelity=20,
)


def by_hand(**changed):
    """The same header laid out from the table in the module's documentation, with a right checksum."""
    data = bytearray(88)
    values = {
        "magic": (0, "4s", b"TKF1"),
        "version": (4, "B", 1),
        "type": (5, "B", 2),
        "codec": (6, "B", 3),
        "dtype": (7, "B", 1),
        "flags": (8, "H", 1),
        "layer": (10, "H", 300),
        "array": (12, "B", 1),
        "ndim": (13, "B", 4),
        "group": (14, "H", 64),
        "shape": (16, "6I", (1, 2, 3, 10, 0, 0)),
        "position": (40, "Q", 7),
        "raw_length": (48, "Q", 120),
        "payload_length": (56, "Q", 120),
        "token_axis": (64, "B", 2),
        "fidelity": (65, "B", 20),
        "hash": (72, "16s", xxhash.xxh3_128_digest(PAYLOAD)),
    }
    for name, (offset, form, value) in values.items():
        value = changed.pop(name, value)
        struct.pack_into("<" + form, data, offset, *(value if isinstance(value, tuple) else (value,)))
    assert not changed
    return bytes(data) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data)))


def test_a_header_is_the_documented_96_bytes_and_comes_back():
    assert HEADER.pack() == by_hand()
    assert len(by_hand()) == HEADER_BYTES == 96
    assert FrameHeader.unpack(by_hand()) == HEADER
    assert HEADER.frame_bytes == 96 + 120


def test_the_quick_check_agrees_with_the_whole_header():
    assert check_header(by_hand()) == (True, 120, 120, xxhash.xxh3_128_digest(PAYLOAD))
    assert check_header(by_hand(type=1))[0] is False


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("type", FrameType.RECORD),
        ("codec", CodecId.LOSSLESS),
        ("dtype", "float16"),
        ("shape", (6, 10)),
        ("shape", (1, 1, 1, 2, 3, 10)),
        ("position", (1 << 64) - 1),
        ("payload_length", 1 << 30),
        ("payload_hash", b"\xff" * 16),
        ("layer", 65535),
        ("array", 255),
        ("group", 65535),
        ("flags", 65535),
        ("token_axis", None),
        ("token_axis", 0),
        ("fidelity", Fidelity.TRAINED),
    ],
)
def test_every_field_comes_back(field, value):
    changed = replace(HEADER, **{field: value})
    if field == "shape":
        changed = replace(changed, token_axis=1)
    assert changed.pack() != HEADER.pack()
    assert FrameHeader.unpack(changed.pack()) == changed


def test_a_scalar_and_an_empty_array_have_headers():
    scalar = replace(HEADER, shape=(), raw_length=2, token_axis=None)
    empty = replace(HEADER, shape=(1, 2, 0, 10), raw_length=0)
    assert FrameHeader.unpack(scalar.pack()) == scalar
    assert FrameHeader.unpack(empty.pack()) == empty


@pytest.mark.parametrize("offset", range(96))
def test_a_damaged_byte_anywhere_is_noticed(offset):
    data = bytearray(by_hand())
    data[offset] ^= 0x40
    with pytest.raises(BadFrame) as caught:
        FrameHeader.unpack(data)
    expected = "not_a_frame" if offset < 4 else "unknown_version" if offset == 4 else "damaged_header"
    assert caught.value.reason == expected


@pytest.mark.parametrize("length", range(96))
def test_a_header_cut_at_any_byte_is_truncated(length):
    with pytest.raises(BadFrame) as caught:
        FrameHeader.unpack(memoryview(by_hand())[:length])
    assert caught.value.reason == "truncated"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": 2}, "unknown_version"),
        ({"version": 0}, "unknown_version"),
        ({"magic": b"TKR1"}, "not_a_frame"),
        ({"type": 0}, "impossible_header"),
        ({"type": 3}, "impossible_header"),
        ({"dtype": len(DTYPES)}, "impossible_header"),
        ({"dtype": 2, "raw_length": 121}, "impossible_header"),
        ({"ndim": 7}, "impossible_header"),
        ({"ndim": 255}, "impossible_header"),
        ({"ndim": 3}, "impossible_header"),
        ({"token_axis": 4}, "impossible_header"),
        ({"payload_length": (1 << 30) + 1}, "impossible_header"),
        ({"shape": (1, 2, 3, 11, 0, 0)}, "impossible_header"),
        ({"shape": (2**32 - 1,) * 6, "ndim": 6, "raw_length": 2**64 - 1}, "impossible_header"),
    ],
)
def test_impossible_fields_are_refused_although_the_checksum_is_right(changed, reason):
    for reads in (FrameHeader.unpack, check_header):
        with pytest.raises(BadFrame) as caught:
            reads(by_hand(**changed))
        assert caught.value.reason == reason


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_only_ever_a_bad_frame(data):
    with pytest.raises(BadFrame):
        FrameHeader.unpack(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=83, max_size=83))
def test_random_fields_under_a_right_checksum_are_refused_or_read(body):
    body = b"TKF1\x01" + body
    data = body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    with suppress(BadFrame):
        header = FrameHeader.unpack(data)
        assert FrameHeader.unpack(header.pack()) == header


def test_frames_are_walked_in_order_and_verified():
    second = replace(HEADER, payload_length=0, payload_hash=payload_hash(b""), layer=301)
    record = HEADER.pack() + PAYLOAD + second.pack()
    walked = [(header.layer, bytes(payload)) for header, payload in frames(memoryview(record), verify=True)]
    assert walked == [(300, PAYLOAD), (301, b"")]


@pytest.mark.parametrize("offset", [0, 60, 119])
def test_a_damaged_payload_is_noticed(offset):
    record = bytearray(HEADER.pack() + PAYLOAD)
    record[96 + offset] ^= 1
    with pytest.raises(BadFrame) as caught:
        list(frames(memoryview(record), verify=True))
    assert caught.value.reason == "bad_checksum"
    assert len(list(frames(memoryview(record), verify=False))) == 1


@pytest.mark.parametrize("length", [1, 95, 96, 97, 215])
def test_a_record_cut_in_mid_frame_is_truncated(length):
    record = HEADER.pack() + PAYLOAD
    with pytest.raises(BadFrame) as caught:
        list(frames(memoryview(record)[:length], verify=True))
    assert caught.value.reason == "truncated"


def test_a_payload_of_another_length_is_noticed():
    with pytest.raises(BadFrame) as caught:
        verify_payload(HEADER, PAYLOAD[:-1])
    assert caught.value.reason == "bad_length"


def test_a_vault_reads_frames_and_records_without_numba_or_mlx():
    code = (
        "import sys, tierkv.codec.frame, tierkv.codec.record;"
        "print([name for name in ('numba', 'llvmlite', 'mlx', 'zstandard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_naming_a_codec_does_not_load_numba():
    code = (
        "import sys; from tierkv.codec.registry import codec_named; codec_named('int8');print('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
