"""Messages on their way out look into records of the store until they are encoded."""

from collections import Counter

import numpy as np
import pytest
from wire_records import ROOT, record

from tierkv.codec.record import RecordKind
from tierkv.identity.blocks import BlockKey
from tierkv.rpc import outgo
from tierkv.rpc.bulk import ChunkKind, read_chunks
from tierkv.rpc.inflow import Inflow
from tierkv.rpc.outgo import DAMAGED, FoundDamage, Outgo
from tierkv.rpc.vault_port import Missing
from tierkv.store.base import Selector
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
    monkeypatch.setattr(outgo, "MOST_AHEAD_BYTES", 3 * MIB)
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


def damage(store, key, at):
    """One bit of a record in memory is the other one."""
    with store.open(key, count_hit=False) as reader:
        (view,) = reader.views(at, 1)
        view[0] ^= 0x10


def as_read(out, n_keys, on_found=lambda: None):
    """What a reader makes of the stream: each record's bytes, or why it has none."""
    inflow = Inflow("a vault", n_keys, 0, 1 << 30)
    got: list[bytes | str] = [b""] * n_keys
    messages = out.next_messages()
    while messages:
        for message in messages:
            try:
                encoded = message.encoded()
            except FoundDamage as found:
                on_found()
                messages = out.without(found)
                break
            for item in inflow.take(encoded):
                if isinstance(item, Missing):
                    assert got[item.index] == b""
                    got[item.index] = item.reason
                else:
                    got[item.index] += bytes(item.data)
        else:
            messages = out.next_messages()
    assert inflow.ended
    return got


@pytest.mark.parametrize("seed", range(40))
def test_damaged_records_are_told_missing_and_all_others_come_whole(seed):
    random = np.random.default_rng(seed)
    sizes = [int(10 ** random.uniform(1, 6.7)) for _ in range(random.integers(1, 24))]
    store, made = filled(sizes)
    damaged = {index for index in range(len(made)) if random.random() < 0.3}
    for index in damaged:
        damage(store, made[index].key, int(random.integers(0, len(made[index].data))))
    absent = {index for index in range(len(made)) if random.random() < 0.1}
    keys = [BlockKey(bytes([index]) * 32) if index in absent else each.key for index, each in enumerate(made)]
    damages, missing = [], []
    out = Outgo(store, keys, 1 << int(random.integers(16, 23)), lambda: damages.append(1), missing.append)
    hits = [store.lookup([key])[0].hits if index not in absent else 0 for index, key in enumerate(keys)]
    got = as_read(out, len(keys))
    unknown = store.missing_reason(BlockKey(b"\xfe" * 32))
    for index, each in enumerate(made):
        assert got[index] == (unknown if index in absent else DAMAGED if index in damaged else each.data), index
    assert len(damages) == len(damaged - absent)
    assert Counter(missing) == Counter(each for each in got if isinstance(each, str))
    out.close()
    assert being_read(store) == 0
    assert list(out.suspects) == []
    for index, key in enumerate(keys):
        if index not in absent | damaged:
            assert store.lookup([key])[0].hits == hits[index] + 1


def test_a_record_on_its_way_comes_whole_though_it_is_purged_before_the_next_is_found_damaged():
    store, made = filled([3 * MIB, 1000, 1000])
    damage(store, made[1].key, 500)
    out = going_out(store, [each.key for each in made])

    def purge():
        store.purge(store.preview_purge(Selector()).token)

    got = as_read(out, 3, on_found=purge)
    assert got == [made[0].data, DAMAGED, store.missing_reason(made[2].key)]
    out.close()
    assert being_read(store) == 0


def test_what_a_reader_left_unchecked_after_damage_is_suspect():
    store, made = filled([1000, 2 * MIB, 2 * MIB, 2 * MIB])
    damage(store, made[1].key, 500)
    keys = [each.key for each in made]
    out = going_out(store, keys)
    (message,) = out.next_messages()
    assert list(out.suspects) == []
    with pytest.raises(FoundDamage) as found:
        message.encoded()
    message, *_ = out.without(found.value)
    assert list(out.suspects) == [keys[2], keys[3]]
    message.encoded()
    out.close()
    assert list(out.suspects) == [keys[3]]


def test_a_fast_reader_of_records_in_memory_gets_more_at_once():
    store, made = filled([9 * MIB] * 5)
    out = going_out(store, [each.key for each in made])
    counts = [len(out.next_messages()) for _ in range(3)]
    assert counts[:2] == [1, 8]
    # Only what was on its way before counts as taken: 1 MiB, at once.
    assert 8 <= counts[2] <= 32
    out.close()
    assert being_read(store) == 0
