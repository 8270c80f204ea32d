"""The framing of bulk messages, and that it is the protobuf it claims to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import BadFrame
from tierkv.rpc.bulk import (
    CHUNK_BYTES,
    MIN_MESSAGE_BYTES,
    ChunkKind,
    MessageWriter,
    bounded_message_bytes,
    message_payload,
    read_chunks,
)
from tierkv.v1 import vault_service_pb2 as pb


def written(records: list[bytes], message_bytes: int, cut: int = 100_000) -> list[bytes]:
    writer = MessageWriter(message_bytes)
    messages: list[bytes] = []
    for index, data in enumerate(records):
        buffers = [data[i : i + cut] for i in range(0, len(data), cut)]
        messages += writer.add_record(index, buffers, len(data))
        messages += [message] if (message := writer.settle()) else []
    writer.add_end(len(records))
    last = writer.flush()
    assert last is not None
    return [*messages, last]


def test_a_chunk_header_is_laid_out_as_documented():
    writer = MessageWriter(1 << 16)
    writer.add_data(7, 1000, 500, b"abc")
    message = writer.flush()
    # Field 1, wire type 2, length 35; then the 32-byte header field by field.
    assert message == (
        b"\x0a\x23" + b"TKC1" + b"\x01\x00\x00\x00" + b"\x07\x00\x00\x00" + b"\x03\x00\x00\x00"
        + b"\xe8\x03\x00\x00\x00\x00\x00\x00" + b"\xf4\x01\x00\x00\x00\x00\x00\x00" + b"abc"
    )  # fmt: skip


@given(st.lists(st.binary(min_size=1, max_size=200_000), max_size=6), st.integers(MIN_MESSAGE_BYTES, 1 << 17))
def test_records_come_back_gapless_and_messages_keep_to_their_size(records: list[bytes], message_bytes: int):
    messages = written(records, message_bytes, cut=30_000)
    assert all(len(message) <= message_bytes + 6 + CHUNK_BYTES for message in messages)
    back: list[bytearray] = [bytearray() for _ in records]
    chunks = [chunk for message in messages for chunk in read_chunks(message)]
    for chunk in chunks[:-1]:
        assert chunk.kind is ChunkKind.DATA
        assert chunk.offset == len(back[chunk.index])
        assert chunk.total == len(records[chunk.index])
        back[chunk.index] += chunk.data
    assert [bytes(each) for each in back] == records
    assert (chunks[-1].kind, chunks[-1].index) == (ChunkKind.END, len(records))


@given(st.binary(max_size=70_000))
def test_a_message_is_what_protobuf_makes_of_the_same_bytes(chunks: bytes):
    by_protobuf = pb.StoreRequest(chunks=chunks).SerializeToString()
    assert bytes(message_payload(by_protobuf)) == chunks


def test_protobuf_reads_what_the_writer_makes():
    for message in written([b"x" * 300_000, b"y"], 1 << 16):
        assert pb.BatchPromoteResponse.FromString(message).chunks == bytes(message_payload(message))


def test_small_records_share_a_message():
    assert len(written([b"small"] * 50, 1 << 16)) == 1


def test_settled_chunks_do_not_look_into_the_callers_buffer():
    writer = MessageWriter(1 << 20)
    buffer = bytearray(b"first")
    assert list(writer.add_record(0, [buffer], 5)) == []
    assert writer.settle() is None
    buffer[:] = b"other"
    assert list(writer.add_record(1, [buffer], 5)) == []
    message = writer.flush()
    assert message is not None
    assert [bytes(chunk.data) for chunk in read_chunks(message)] == [b"first", b"other"]


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_chunks_or_a_bad_frame(data: bytes):
    reasons: set[str] = set()
    for message in (data, pb.StoreRequest(chunks=data).SerializeToString()):
        try:
            list(read_chunks(message))
        except BadFrame as error:
            reasons.add(error.reason)
    assert reasons <= {"bad_message", "truncated", "not_a_chunk", "bad_length"}


@given(st.data())
def test_one_flipped_byte_of_a_header_never_reaches_beyond_the_message(data: st.DataObject):
    message = bytearray(written([b"0123456789" * 50], 1 << 16)[0])
    place = data.draw(st.integers(0, 3 + CHUNK_BYTES))
    message[place] ^= data.draw(st.integers(1, 255))
    try:
        assert sum(len(chunk.data) for chunk in read_chunks(bytes(message))) <= len(message)
    except BadFrame:
        pass


@pytest.mark.parametrize(("asked", "given_"), [(0, 2 << 20), (1, 64 << 10), (1 << 20, 1 << 20), (1 << 31, 4 << 20)])
def test_the_size_of_messages_is_bounded(asked: int, given_: int):
    assert bounded_message_bytes(asked) == given_
