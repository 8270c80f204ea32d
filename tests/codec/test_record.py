import json
import struct
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.codec.frame import HEADER_BYTES, FrameHeader, FrameType, payload_hash
from tierkv.codec.record import RecordHeader, RecordKind, check_belongs, verify_record
from tierkv.errors import BadFrame, ForeignRecord
from tierkv.identity.blocks import BlockKey, Media

ROOT = BlockKey(b"r" * 32)
PARENT = BlockKey(b"p" * 32)
LAYOUT = b'[["rows","KVCache","",[],[["keys","bfloat16",[1,2,-1,8]]]]]'


def key_by_hand(tokens, media=(), start=512, purpose="tierkv 2026 v1 block key"):
    """The chained key, spelled out: parent, count, ids as int64 LE, media that start inside."""
    data = PARENT + struct.pack("<I", len(tokens)) + struct.pack(f"<{len(tokens)}q", *tokens)
    data += struct.pack("<I", len(media))
    for item in media:
        data += struct.pack("<III", item.start - start, item.length, len(item.content_hash)) + item.content_hash
    return BlockKey(blake3(data, derive_key_context=purpose).digest())


def segment(layer, payload):
    header = FrameHeader(
        FrameType.SEGMENT, 0, "uint8", (len(payload),), 512, len(payload), len(payload), payload_hash(payload), layer
    )
    return header.pack() + payload


SEGMENTS = segment(0, b"keys of layer 0") + segment(1, b"")
TOKENS = (5, -(1 << 59), 7)


def header(**changed):
    tokens = changed.pop("tokens", TOKENS)
    media = changed.pop("media", ())
    values = {
        "kind": RecordKind.BLOCK,
        "key": key_by_hand(tokens, media),
        "parent": PARENT,
        "root": ROOT,
        "tokens": np.array(tokens, np.int64),
        "start": 512,
        "layout_digest": b"d" * 16,
        "layout": LAYOUT,
        "fidelity": 20,
        "epoch": 3,
        "created_unix_s": 1.5,
        "segments": 2,
        "segment_bytes": len(SEGMENTS),
        "raw_bytes": 15,
        "model": "SmolLM2 ✓",
        "codec": "int8",
        "scalars": '{"0":{"offset":12}}',
        "media": media,
    }
    return RecordHeader(**{**values, **changed})


def same(left, right):
    return np.array_equal(left.tokens, right.tokens) and replace(left, tokens=TOKENS) == replace(right, tokens=TOKENS)


def refused(data):
    """The reason slug with which a record is refused."""
    with pytest.raises((BadFrame, ForeignRecord)) as caught:
        verify_record(data)
    return caught.value.reason


def reframed(payload):
    """Any header payload in a frame whose checksums are right."""
    frame = FrameHeader(FrameType.RECORD, 0, "none", (), 512, 0, len(payload), payload_hash(payload))
    return frame.pack() + payload


def payload_of(record):
    return bytearray(record.pack_frame()[HEADER_BYTES:])


def test_a_record_comes_back_whole():
    media = (Media(513, 2, b"\x01" * 32),)
    for each in (header(), header(tokens=()), header(tokens=range(256)), header(media=media)):
        frame = each.pack_frame()
        back, size = RecordHeader.unpack_frame(frame + SEGMENTS)
        assert same(back, each)
        assert size == len(frame)
        assert same(verify_record(frame + SEGMENTS), each)


def test_what_a_header_says_of_itself():
    assert header().end == 515
    assert header().n_tokens == 3
    assert not header().is_full_block
    assert header(tokens=range(256)).is_full_block
    assert [kind.tier for kind in RecordKind] == ["kv", "kv", "ssm"]


@pytest.mark.parametrize(
    ("kind", "purpose"),
    [
        (RecordKind.WINDOW, "tierkv 2026 v1 window checkpoint key"),
        (RecordKind.STATE, "tierkv 2026 v1 state checkpoint key"),
    ],
)
def test_checkpoints_have_keys_of_their_own(kind, purpose):
    checkpoint = header(kind=kind, key=key_by_hand(TOKENS, purpose=purpose))
    assert same(verify_record(checkpoint.pack_frame() + SEGMENTS), checkpoint)
    assert refused(header(kind=kind).pack_frame() + SEGMENTS) == "foreign_key"


@pytest.mark.parametrize(
    "changed",
    [
        {"key": BlockKey(b"k" * 32)},
        {"parent": BlockKey(b"q" * 32)},
        {"tokens": np.array((5, 6, 7))},
        {"tokens": np.array((-(1 << 59), 5, 7))},
    ],
)
def test_a_key_that_its_own_tokens_do_not_give_is_foreign(changed):
    assert refused(replace(header(), **changed).pack_frame() + SEGMENTS) == "foreign_key"


def test_every_single_bit_of_a_record_counts():
    record = header().pack_frame() + SEGMENTS
    for offset in range(len(record)):
        damaged = bytearray(record)
        damaged[offset] ^= 1 << (offset % 8)
        assert refused(damaged)


def test_a_record_cut_at_any_byte_is_refused():
    record = header().pack_frame() + SEGMENTS
    for length in range(len(record)):
        assert refused(record[:length]) in ("truncated", "bad_length")
    assert refused(record + b"\0") == "bad_length"


def test_counts_must_be_those_of_the_segments():
    assert refused(header(segments=1).pack_frame() + SEGMENTS) == "bad_length"
    assert refused(header(raw_bytes=16).pack_frame() + SEGMENTS) == "bad_length"
    assert refused(header(segment_bytes=len(SEGMENTS) - 1).pack_frame() + SEGMENTS) == "bad_length"


def test_a_record_header_is_not_a_segment_and_a_segment_not_a_header():
    frame = header().pack_frame()
    assert refused(SEGMENTS) == "no_record_header"
    nested = header(segments=1, segment_bytes=len(frame), raw_bytes=0)
    assert refused(nested.pack_frame() + frame) == "truncated"


def test_another_version_is_refused_by_name():
    payload = payload_of(header())
    payload[0] = 2
    assert refused(reframed(bytes(payload)) + SEGMENTS) == "unknown_version"


@pytest.mark.parametrize("kind", [0, 4, 255])
def test_an_unknown_kind_is_refused(kind):
    payload = payload_of(header())
    payload[1] = kind
    assert refused(reframed(bytes(payload)) + SEGMENTS) == "impossible_header"


@pytest.mark.parametrize(
    "media",
    [
        "nonsense",
        "5",
        "[1]",
        '[[1,2,"zz"]]',
        "[[1,2]]",
        '[["1","2","00"]]',
        '[[513,-1,""]]',
        '[[513,0,""]]',
        '[[513,4294967296,""]]',
        '[[-1,1,""]]',
        '[[513,1e999,""]]',
        '[[513,1.5,""]]',
        '[[513,Infinity,""]]',
        "[[513,1," + json.dumps("00" * 65) + "]]",
        "[" * 100_000,
    ],
)
def test_media_that_no_key_can_be_made_of_are_refused(media):
    payload = payload_of(header())
    payload[-2:] = media.encode()
    fixed_bytes = 188
    struct.pack_into("<I", payload, fixed_bytes - 4, len(media))
    assert refused(reframed(bytes(payload)) + SEGMENTS) == "impossible_header"


def test_a_header_over_4_mib_is_refused_before_it_is_read():
    large = FrameHeader(FrameType.RECORD, 0, "none", (), 0, 0, (4 << 20) + 1, b"\0" * 16)
    assert refused(large.pack() + b"\0" * 100) == "no_record_header"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data):
    with pytest.raises((BadFrame, ForeignRecord)):
        verify_record(data)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_header_fields_under_right_checksums_are_refused(data):
    payload = payload_of(header(media=(Media(513, 2, b"\x01" * 32),)))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with suppress(BadFrame, ForeignRecord):
        read, _ = RecordHeader.unpack_frame(reframed(bytes(payload)) + SEGMENTS)
        assert read.key == read.expected_key()


ASKED = {"key": key_by_hand(TOKENS), "root": ROOT, "tokens": np.array(TOKENS), "layout_digest": b"d" * 16}


@pytest.mark.parametrize(
    "asked",
    [ASKED, {**ASKED, "layout_digest": None}, {**ASKED, "tokens": np.array(TOKENS[:2])}],
    ids=["as asked", "layout not asked", "the prompt ends inside"],
)
def test_the_record_that_was_asked_for_belongs(asked):
    check_belongs(header(), **asked)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"key": BlockKey(b"k" * 32)}, "foreign_key"),
        ({"root": BlockKey(b"s" * 32)}, "foreign_model"),
        ({"layout_digest": b"e" * 16}, "foreign_layout"),
        ({"tokens": np.array((5, 6, 7))}, "foreign_tokens"),
        ({"tokens": np.array((5, -(1 << 59), 8, 9))}, "foreign_tokens"),
    ],
)
def test_any_other_record_is_foreign(changed, reason):
    with pytest.raises(ForeignRecord) as caught:
        check_belongs(header(), **{**ASKED, **changed})
    assert caught.value.reason == reason
