"""Messages on their way out look into records of the store until they are encoded."""

import pytest
from wire_records import ROOT, record

from tierkv.codec.record import RecordKind
from tierkv.identity.blocks import BlockKey
from tierkv.rpc import outgo
from tierkv.rpc.bulk import ChunkKind, read_chunks
from tierkv.rpc.outgo import Outgo
from tierkv.store.ram import RamStore

MIB = 1 << 20


def filled(sizes):
    store = RamStore(64 * MIB)
    made = [record(RecordKind.STATE, ROOT, [number], 0, size=size, segments=1) for number, size in enumerate(sizes)]
    for each in made:
        writer = store.begin(len(each.data), store.epoch)
        writer.write(each.data)
        assert writer.commit() == "stored"
    return store, made


def going_out(store, keys, message_bytes=MIB):
    return Outgo(store, keys, message_bytes, lambda: None, lambda _: None)


def being_read(store):
    return len(store._catalog._readers)


def test_the_first_message_comes_alone_and_then_as_many_as_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outgo, "AHEAD_BYTES", 3 * MIB)
    store, made = filled([10 * MIB])
    out = going_out(store, [made[0].key])
    counts, data = [], b""
    while messages := out.next_messages():
        counts.append(len(messages))
        for message in messages:
            chunks = [chunk for chunk in read_chunks(message.encoded()) if chunk.kind is ChunkKind.DATA]
            assert message.data_bytes == sum(len(chunk.data) for chunk in chunks)
            data += b"".join(chunk.data for chunk in chunks)
    # 10 MiB and a header in messages of 1 MiB: one, three, three, three, and what is left.
    assert counts == [1, 3, 3, 3, 1]
    assert data == made[0].data
    out.close()


def test_a_record_is_kept_until_the_last_message_of_it_is_encoded():
    store, made = filled([100_000] * 5)
    out = going_out(store, [each.key for each in made])
    (message,) = out.next_messages()
    assert being_read(store) == 5
    assert out.next_messages() == []
    assert being_read(store) == 5
    assert message.encoded().count(b"TKC1") == 6
    assert out.next_messages() == []
    assert being_read(store) == 0
    out.close()


def test_what_is_never_encoded_is_let_go_at_the_end():
    store, made = filled([100_000, 5 * MIB, 100_000])
    out = going_out(store, [each.key for each in made])
    out.next_messages()
    out.next_messages()
    assert being_read(store) > 0
    out.close()
    assert being_read(store) == 0
    assert out.next_messages() == []


def test_missing_ones_between_open_ones_are_told_in_order():
    store, made = filled([1000, 1000])
    absent = BlockKey(b"\x09" * 32)
    out = going_out(store, [absent, made[0].key, absent, made[1].key])
    (message,) = out.next_messages()
    assert [(chunk.kind, chunk.index) for chunk in read_chunks(message.encoded())] == [
        (ChunkKind.MISSING, 0),
        (ChunkKind.DATA, 1),
        (ChunkKind.MISSING, 2),
        (ChunkKind.DATA, 3),
        (ChunkKind.END, 4),
    ]
    out.close()
