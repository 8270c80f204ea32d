"""What goes into the RAM store, what comes out, and what never becomes visible."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from store_records import PAGE, ROOT, Record, get, make_chain, make_record, put, with_header

from tierkv.codec.frame import HEADER_BYTES
from tierkv.codec.record import RecordKind
from tierkv.errors import BadFrame, CorruptionError, ForeignRecord, RecordTooLarge, StoreFull
from tierkv.identity.blocks import BlockKey, Media, block_key
from tierkv.store.base import Selector


@pytest.mark.parametrize("step", [1, 95, 96, 97, 1000, None])
def test_a_record_comes_back_byte_for_byte_however_it_was_cut(make_store, step):
    store = make_store()
    record = make_record(range(256), payload_bytes=3 * PAGE + 17, segments=3)
    assert put(store, record, step=step) == "stored"
    assert get(store, record.key) == record.data


@pytest.mark.parametrize("step", [1, 96, None])
def test_empty_segments_and_records_without_segments_are_sound(make_store, step):
    store = make_store()
    empty = make_record([1, 2], payload_bytes=0, segments=2)
    none = make_record([3], segments=0, payload_bytes=0)
    for record in (empty, none):
        assert put(store, record, step=step) == "stored"
        assert get(store, record.key) == record.data


def test_parts_of_a_record_can_be_read_in_any_order(make_store):
    store = make_store()
    record = make_record(range(9), payload_bytes=5 * PAGE)
    put(store, record)
    with store.open(record.key) as reader:
        assert reader.size_bytes == len(record.data)
        assert reader.read(PAGE - 1, 2) == record.data[PAGE - 1 : PAGE + 1]
        assert reader.read(7, 3 * PAGE) == record.data[7 : 7 + 3 * PAGE]
        assert b"".join(reader.views(2 * PAGE + 5, PAGE)) == record.data[2 * PAGE + 5 : 3 * PAGE + 5]
        assert reader.read(len(record.data) - 3, 100) == record.data[-3:]
        assert reader.read(len(record.data), 1) == b""


def test_nothing_is_visible_before_commit(make_store):
    store = make_store()
    record = make_record(range(256), payload_bytes=PAGE)
    writer = store.begin(len(record.data), store.epoch)
    writer.write(record.data)
    assert store.lookup([record.key]) == [None]
    assert store.open(record.key) is None
    assert store.children(ROOT, list(RecordKind)) == []
    assert writer.commit() == "stored"
    assert store.lookup([record.key])[0] is not None


def test_the_index_says_what_the_header_said(make_store, clock):
    store = make_store()
    record = make_record(
        range(40), start=0, kind=RecordKind.STATE, fidelity=20, epoch=0, scalars='{"0": {"offset": 40}}',
        model="a/model", codec="lossless", media=(Media(3, 5, b"img"),),
    )  # fmt: skip
    put(store, record)
    entry = store.lookup([record.key])[0]
    for name in record.header.__dataclass_fields__:
        assert np.array_equal(getattr(entry.header, name), getattr(record.header, name)), name
    assert entry.size_bytes == len(record.data)
    assert entry.stored_unix_s == clock.wall()
    assert (entry.hits, entry.pinned) == (0, False)


def test_reading_does_not_delete_and_counts(make_store, clock):
    store = make_store()
    record = make_record(range(256))
    put(store, record)
    clock.advance(5)
    for _ in range(3):
        assert get(store, record.key) == record.data
    entry = store.lookup([record.key])[0]
    assert entry.hits == 3
    assert entry.last_hit_unix_s == pytest.approx(entry.stored_unix_s + 5)
    assert get(store, record.key, count_hit=False) == record.data
    assert store.lookup([record.key])[0].hits == 3


# --- refused before anything is allocated ------------------------------------------------------


def test_a_record_over_the_limit_is_refused_before_anything_is_allocated(make_store):
    store = make_store(pages=8, max_record_bytes=2 * PAGE)
    with pytest.raises(RecordTooLarge) as caught:
        store.begin(2 * PAGE + 1, 0)
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (2 * PAGE + 1, 2 * PAGE)
    assert store.stats().size_bytes == 0
    assert store.stats().refusals == {"too_large": 1}
    store.begin(2 * PAGE, 0).abort()


def test_a_record_over_the_cap_is_too_large_and_evicts_nothing(make_store):
    store = make_store(pages=4)
    kept = make_record(range(256))
    put(store, kept)
    with pytest.raises(RecordTooLarge):
        store.begin(4 * PAGE + 1, 0)
    assert get(store, kept.key) == kept.data


@pytest.mark.parametrize("size", [0, -1])
def test_a_record_without_bytes_is_refused(make_store, size):
    with pytest.raises(BadFrame):
        make_store().begin(size, 0)


# --- damaged, forged, cut short ----------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 100, None])
def test_one_flipped_bit_anywhere_is_found(make_store, step):
    store = make_store()
    record = make_record(range(5), payload_bytes=300, segments=2)
    for at in range(0, len(record.data), 7):
        damaged = bytearray(record.data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(CorruptionError):
            put(store, Record(record.header, bytes(damaged)), step=step)
        assert store.lookup([record.key]) == [None]
        assert store.stats().size_bytes == 0
    assert store.stats().quarantined_records == len(range(0, len(record.data), 7))


@pytest.mark.parametrize("missing", [1, 64, 65, 160, 161, 1000])
def test_a_record_cut_short_is_refused_at_commit(make_store, missing):
    store = make_store()
    record = make_record(range(5), payload_bytes=1200, segments=1)
    writer = store.begin(len(record.data), 0)
    writer.write(record.data[:-missing])
    with pytest.raises(BadFrame):
        writer.commit()
    assert store.stats().size_bytes == 0
    assert store.missing_reason(record.key) == "quarantined"


def test_a_record_announced_too_short_or_too_long_is_refused_at_its_header(make_store):
    store = make_store()
    record = make_record(range(5), payload_bytes=PAGE)
    for size in (len(record.data) - 1, len(record.data) + 1):
        writer = store.begin(size, 0)
        with pytest.raises(BadFrame):
            writer.write(record.data[: len(record.header.pack_frame())])
        assert store.stats().size_bytes == 0


def test_more_bytes_than_announced_are_refused(make_store):
    store = make_store()
    record = make_record(range(5))
    writer = store.begin(len(record.data), 0)
    writer.write(record.data)
    with pytest.raises(BadFrame):
        writer.write(b"x")
    assert store.lookup([record.key]) == [None]


def test_a_refused_writer_stays_refused(make_store):
    store = make_store()
    record = make_record(range(5))
    writer = store.begin(len(record.data), 0)
    with pytest.raises(BadFrame):
        writer.write(b"\0" * HEADER_BYTES)
    for call in (lambda: writer.write(record.data), writer.commit):
        with pytest.raises(BadFrame):
            call()
    writer.abort()
    assert store.stats().size_bytes == 0
    assert store.stats().refusals == {"not_a_frame": 1}


def test_a_header_with_another_key_than_its_tokens_give_is_foreign(make_store):
    store = make_store()
    record = make_record(range(5))
    forged = with_header(record, key=BlockKey(b"\x99" * 32))
    with pytest.raises(ForeignRecord):
        put(store, forged)
    assert store.stats().refusals == {"foreign_key": 1}


def test_a_segment_more_or_less_than_the_header_says_is_refused(make_store):
    store = make_store()
    record = make_record(range(5), payload_bytes=32, segments=2)
    for changed in ({"segments": 1}, {"segments": 3}, {"raw_bytes": 31}):
        with pytest.raises(BadFrame):
            put(store, with_header(record, **changed))
    assert store.stats().records == 0


def test_a_record_that_contradicts_its_parent_is_foreign(make_store):
    store = make_store()
    chain = make_chain(1)
    put(store, chain[0])
    other_model = make_record([1], chain[0].key, start=256, root=BlockKey(b"\x02" * 32))
    other_place = make_record([2], chain[0].key, start=512)
    for record in (other_model, other_place):
        with pytest.raises(ForeignRecord):
            put(store, record)
    assert store.stats().refusals == {"foreign_model": 1, "foreign_position": 1}
    assert store.stats().records == 1
    assert store.stats().size_bytes == chain[0].pages * PAGE


# --- the same key again ------------------------------------------------------------------------


def test_equal_or_worse_is_present_and_better_replaces(make_store):
    store = make_store()
    lossy, same, exact = (make_record(range(256), fidelity=f, seed=s) for f, s in ((20, 1), (20, 2), (0, 3)))
    assert put(store, lossy) == "stored"
    assert put(store, same) == "present"
    assert get(store, lossy.key) == lossy.data
    assert put(store, exact) == "replaced"
    assert get(store, lossy.key) == exact.data
    assert put(store, lossy) == "present"
    assert store.stats().records == 1
    assert store.stats().size_bytes == exact.pages * PAGE


def test_a_reader_of_a_replaced_record_reads_the_old_bytes_to_its_end(make_store):
    store = make_store(pages=6)
    lossy, exact = (make_record(range(256), fidelity=f, seed=s, payload_bytes=PAGE) for f, s in ((20, 1), (0, 2)))
    put(store, lossy)
    reader = store.open(lossy.key)
    half = reader.read(0, 1000)
    assert put(store, exact) == "replaced"
    put(store, make_record([7], payload_bytes=PAGE // 2, seed=9))
    assert half + reader.read(1000, 10 * PAGE) == lossy.data
    before = store.stats().size_bytes
    reader.close()
    reader.close()
    assert store.stats().size_bytes == before - lossy.pages * PAGE
    assert get(store, exact.key) == exact.data


def test_a_replacement_keeps_the_pin_and_the_hits(make_store):
    store = make_store()
    lossy, exact = (make_record(range(256), fidelity=f) for f in (20, 0))
    put(store, lossy)
    get(store, lossy.key)
    store.pin(Selector())
    put(store, exact)
    entry = store.lookup([exact.key])[0]
    assert (entry.hits, entry.pinned, entry.header.fidelity) == (1, True, 0)
    assert store.stats().pinned_records == 1
    store.unpin(Selector())
    assert store.stats().pinned_records == 0


def test_two_writers_of_one_key_end_in_one_record(make_store):
    store = make_store()
    record = make_record(range(256))
    first, second = (store.begin(len(record.data), 0) for _ in range(2))
    for writer in (second, first):
        writer.write(record.data)
    assert (first.commit(), second.commit()) == ("stored", "present")
    assert store.stats().size_bytes == record.pages * PAGE


# --- looking -----------------------------------------------------------------------------------


def test_children_are_those_of_the_parent_and_kind_most_recent_first(make_store, clock):
    store = make_store()
    head = make_chain(1)[0]
    tails = [make_record([n], head.key, start=256) for n in range(3)]
    window = make_record([0], head.key, start=256, kind=RecordKind.WINDOW)
    for record in (head, *tails, window):
        put(store, record)
        clock.advance(1)
    get(store, tails[0].key)
    blocks = store.children(head.key, (RecordKind.BLOCK,))
    assert [entry.header.key for entry in blocks] == [tails[0].key, tails[2].key, tails[1].key]
    assert [entry.header.key for entry in store.children(head.key, (RecordKind.WINDOW,))] == [window.key]
    assert len(store.children(head.key, list(RecordKind))) == 4
    assert len(store.children(head.key, list(RecordKind), limit=2)) == 2
    assert store.children(BlockKey(b"?" * 32), list(RecordKind)) == []


def test_children_of_a_parent_on_another_vault_are_found(make_store):
    store = make_store()
    parent = BlockKey(b"\x55" * 32)
    states = [make_record([n], parent, start=256, kind=RecordKind.STATE) for n in range(2)]
    for record in states:
        put(store, record)
    found = {entry.header.key for entry in store.children(parent, (RecordKind.STATE,))}
    assert found == {record.key for record in states}


def test_the_child_that_agrees_longest_comes_first(make_store):
    store = make_store(pages=200)
    prompt = np.arange(100)
    agreeing = {n: make_record([*range(n), *([-7] * (60 - n))], seed=n) for n in (0, 1, 30, 59, 40)}
    for record in agreeing.values():
        put(store, record)
    found = store.children(ROOT, (RecordKind.BLOCK,), like=prompt)
    assert [entry.header.key for entry in found] == [agreeing[n].key for n in (59, 40, 30, 1)]
    found = store.children(ROOT, (RecordKind.BLOCK,), like=prompt, limit=2)
    assert [entry.header.key for entry in found] == [agreeing[n].key for n in (59, 40)]
    assert store.children(ROOT, (RecordKind.BLOCK,), like=prompt[:0]) == []


def test_a_checkpoint_serves_only_where_all_its_tokens_lead_the_prompt(make_store):
    store = make_store()
    states = {n: make_record(range(n), kind=RecordKind.STATE) for n in (0, 10, 20, 40)}
    other = make_record([0, 1, 5], kind=RecordKind.STATE)
    for record in (*states.values(), other):
        put(store, record)
    found = store.children(ROOT, (RecordKind.STATE,), like=np.arange(30))
    assert [entry.header.key for entry in found] == [states[n].key for n in (20, 10, 0)]


def test_a_longest_agreement_is_found_among_many_with_a_common_head(make_store):
    store = make_store(pages=1000)
    random = np.random.default_rng(3)
    head = list(range(20))
    for n in range(200):
        put(store, make_record([*head, *random.integers(0, 3, 30)], seed=n))
    prompt = np.array([*head, *random.integers(0, 3, 30)])
    found = store.children(ROOT, (RecordKind.BLOCK,), like=prompt, limit=5)

    def agreement(tokens):
        return next((i for i, (a, b) in enumerate(zip(tokens, prompt, strict=True)) if a != b), 50)

    every = store.children(ROOT, (RecordKind.BLOCK,))
    expected = sorted((agreement(entry.header.tokens) for entry in every), reverse=True)[:5]
    assert [agreement(entry.header.tokens) for entry in found] == expected


# --- ends --------------------------------------------------------------------------------------


def test_aborted_and_forgotten_writers_give_their_room_back(make_store):
    store = make_store(pages=4)
    writer = store.begin(4 * PAGE, 0)
    with pytest.raises(StoreFull):
        store.begin(1, 0)
    writer.abort()
    writer.abort()
    store.begin(4 * PAGE, 0)
    gc.collect()
    store.begin(4 * PAGE, 0).abort()
    assert store.stats().size_bytes == 0


def test_a_forgotten_reader_does_not_hold_its_record_for_ever(make_store):
    store = make_store(pages=1)
    first, second = make_record([1]), make_record([2])
    put(store, first)
    store.open(first.key)
    gc.collect()
    assert put(store, second) == "stored"


def test_a_quarantined_record_is_out_of_sight_until_it_is_stored_anew(make_store):
    store = make_store()
    record = make_record(range(256))
    put(store, record)
    with store.open(record.key) as reader:
        store.quarantine(record.key, "bad_checksum")
        assert store.open(record.key) is None
        assert reader.read(0, 10**6) == record.data
    assert store.missing_reason(record.key) == "quarantined"
    assert store.stats().quarantined_records == 1
    assert store.stats().size_bytes == 0
    kinds = [(kind, attributes["reason"]) for kind, _, attributes in store.events()]
    assert kinds == [("quarantine", "bad_checksum")]
    assert put(store, record) == "stored"


def test_a_damaged_copy_does_not_hide_the_sound_one(make_store):
    store = make_store()
    record = make_record(range(256))
    put(store, record)
    with pytest.raises(BadFrame):
        put(store, Record(record.header, record.data[:-1] + bytes([record.data[-1] ^ 1])))
    assert get(store, record.key) == record.data
    assert store.stats().quarantined_records == 1
    assert store.stats().refusals == {"bad_checksum": 1}


def test_a_closed_store_takes_nothing_more_but_finishes_what_is_read(make_store):
    store = make_store()
    record = make_record(range(256))
    put(store, record)
    reader = store.open(record.key)
    store.close()
    with pytest.raises(StoreFull):
        store.begin(10, 0)
    assert reader.read(0, 10**6) == record.data
    reader.close()


def test_a_cap_without_a_page_and_an_unknown_policy_are_said_at_once(make_store):
    with pytest.raises(ValueError, match="no page"):
        make_store(pages=0)
    with pytest.raises(ValueError, match="lru"):
        make_store(policy="newest")


def test_keys_never_stored_have_that_reason(make_store):
    assert make_store().missing_reason(block_key(ROOT, np.arange(3))) == "never_stored"
