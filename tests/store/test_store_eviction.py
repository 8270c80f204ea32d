"""What goes when room is needed, what stays, and the caps that always hold."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_records import PAGE, ROOT, FakeClock, get, make_chain, make_record, put, with_header

from tierkv.codec.record import RecordKind
from tierkv.errors import StoreFull
from tierkv.identity.blocks import block_key
from tierkv.store.base import Selector
from tierkv.store.ram import RamStore


def singles(count: int):
    """Records of one page each, every one the head of a chain of its own."""
    return [make_record([n], seed=n) for n in range(count)]


def visible(store, records) -> list[int]:
    return [n for n, entry in enumerate(store.lookup([record.key for record in records])) if entry]


def test_the_least_recently_used_goes_first(make_store):
    store = make_store(pages=3)
    records = singles(5)
    for record in records[:3]:
        put(store, record)
    get(store, records[0].key)
    put(store, records[3])
    assert visible(store, records) == [0, 2, 3]
    store.touch([records[2].key])
    put(store, records[4])
    assert visible(store, records) == [2, 3, 4]
    assert store.missing_reason(records[1].key) == "evicted"
    assert store.stats().evictions == 2


def test_looking_and_peeking_are_not_use(make_store):
    store = make_store(pages=2)
    records = singles(3)
    put(store, records[0])
    put(store, records[1])
    store.lookup([records[0].key])
    get(store, records[0].key, count_hit=False)
    put(store, records[2])
    assert visible(store, records) == [1, 2]


def test_touch_says_what_is_not_here(make_store):
    store = make_store()
    records = singles(2)
    put(store, records[1])
    assert store.touch([record.key for record in records]) == [False, True]


def test_a_chain_goes_from_its_end(make_store):
    store = make_store(pages=6)
    chain = make_chain(3)
    pages = chain[0].pages
    assert pages == 1
    for record in chain:
        put(store, record)
    others = [make_record([-n], seed=n) for n in range(1, 7)]
    for gone, record in enumerate(others):
        put(store, record)
        left = visible(store, chain)
        assert left == list(range(len(left)))
        assert len(left) == min(3, 6 - gone - 1)


def test_the_head_of_a_chain_in_use_stays_however_old(make_store, clock):
    store = make_store(pages=4)
    chain = make_chain(2, tail=10)
    for record in chain:
        put(store, record)
    put(store, make_record([-1]))
    clock.advance(1000)
    store.touch([chain[2].key])
    put(store, make_record([-2]))
    assert visible(store, chain) == [0, 1, 2]


def test_a_checkpoint_hangs_at_its_parent_like_a_leaf(make_store):
    store = make_store(pages=3)
    head = make_chain(1)[0]
    window = make_record([], head.key, start=256, kind=RecordKind.WINDOW)
    put(store, head)
    put(store, window)
    put(store, make_record([-1]))
    store.touch([window.key])
    put(store, make_record([-2]))
    assert visible(store, [head, window]) == [0, 1]


def test_a_parent_that_comes_later_takes_its_children_over(make_store):
    store = make_store(pages=3)
    head, tail = make_chain(1, tail=5)
    put(store, tail)
    put(store, head)
    put(store, make_record([-1]))
    store.touch([tail.key])
    put(store, make_record([-2]))
    assert visible(store, [head, tail]) == [0, 1]
    assert [entry.header.key for entry in store.children(head.key, (RecordKind.BLOCK,))] == [tail.key]


def test_what_is_pinned_leased_or_read_is_never_evicted(make_store, clock):
    store = make_store(pages=4)
    pinned = make_record([1], model="keep")
    leased, read, free = (make_record([n], seed=n) for n in (2, 3, 4))
    for record in (pinned, leased, read, free):
        put(store, record)
    assert store.pin(Selector(model="keep")) == 1
    store.lease([leased.key], 5.0)
    reader = store.open(read.key)
    put(store, make_record([5]))
    assert visible(store, [pinned, leased, read, free]) == [0, 1, 2]
    store.lease([make_record([5]).key], 5.0)
    with pytest.raises(StoreFull):
        store.begin(1, 0)
    assert store.stats().leases == 2
    reader.close()
    put(store, make_record([6]))
    assert visible(store, [pinned, leased, read]) == [0, 1]
    clock.advance(5.1)
    put(store, make_record([7]))
    put(store, make_record([8]))
    assert visible(store, [pinned, leased]) == [0]
    assert store.unpin(Selector(model="keep")) == 1
    for n in range(10, 13):
        put(store, make_record([n]))
    assert visible(store, [pinned]) == []


def test_a_full_store_evicts_nothing_in_vain(make_store):
    store = make_store(pages=4)
    records = [make_record([n], model="keep" if n < 2 else "m", seed=n) for n in range(4)]
    for record in records:
        put(store, record)
    store.pin(Selector(model="keep"))
    with pytest.raises(StoreFull):
        store.begin(3 * PAGE, 0)
    assert visible(store, records) == [0, 1, 2, 3]
    assert store.stats().refusals == {"full": 1}
    store.begin(2 * PAGE, 0).abort()


@pytest.mark.parametrize("hold", ["pin", "lease", "read"])
def test_what_a_held_record_stands_on_is_not_counted_as_room(make_store, hold):
    store = make_store(pages=3)
    chain = make_chain(2, tail=1)
    for record in chain:
        put(store, record)
    leaf = chain[-1].key
    keep = {
        "pin": lambda: store.pin(Selector(prefixes=(leaf,))),
        "lease": lambda: store.lease([leaf], 9.0),
        "read": lambda: store.open(leaf),
    }[hold]()
    with pytest.raises(StoreFull):
        store.begin(1, 0)
    assert visible(store, chain) == [0, 1, 2]
    del keep


def test_a_lease_never_outlives_ten_seconds(make_store, clock):
    store = make_store(pages=1)
    record = make_record([1])
    put(store, record)
    store.lease([record.key], 3600.0)
    clock.advance(9.9)
    with pytest.raises(StoreFull):
        store.begin(1, 0)
    clock.advance(0.2)
    put(store, make_record([2]))
    assert visible(store, [record]) == []


def test_a_longer_lease_extends_and_a_shorter_one_does_not_cut(make_store, clock):
    store = make_store(pages=1)
    record = make_record([1])
    put(store, record)
    store.lease([record.key], 4.0)
    store.lease([record.key], 8.0)
    store.lease([record.key], 1.0)
    clock.advance(7.0)
    store.sweep()
    assert store.stats().leases == 1
    clock.advance(1.1)
    store.sweep()
    assert store.stats().leases == 0


def test_concurrent_writers_reserve_their_room(make_store):
    store = make_store(pages=4)
    writers = [store.begin(2 * PAGE, 0) for _ in range(2)]
    with pytest.raises(StoreFull):
        store.begin(1, 0)
    writers[0].abort()
    store.begin(2 * PAGE, 0).abort()


def test_records_not_used_for_their_time_expire_but_not_the_heads_they_stand_on(make_store, clock):
    store = make_store(ttl_s=100.0)
    chain = make_chain(2, tail=5)
    old = make_record([-1])
    for record in (*chain, old):
        put(store, record)
    clock.advance(60)
    store.touch([chain[1].key])
    clock.advance(60)
    store.sweep()
    assert visible(store, chain) == [0, 1]
    assert {store.missing_reason(key) for key in (chain[2].key, old.key)} == {"expired"}
    clock.advance(60)
    store.sweep()
    assert store.stats().records == 0
    assert [(kind, a["records"]) for kind, _, a in store.events()] == [("expire", "4")]


def test_pinned_records_do_not_expire(make_store, clock):
    store = make_store(ttl_s=1.0)
    record = make_record([1])
    put(store, record)
    store.pin(Selector())
    clock.advance(10)
    store.sweep()
    assert visible(store, [record]) == [0]


@pytest.mark.parametrize("jump", [-(10**9), 10**9])
def test_a_jump_of_the_wall_clock_changes_dates_and_nothing_else(make_store, clock, jump):
    store = make_store(pages=2, ttl_s=100.0, undo_s=60.0)
    records = singles(3)
    put(store, records[0])
    store.lease([records[0].key], 5.0)
    purged = store.purge(store.preview_purge(Selector()).token)
    clock.wall_s += jump
    store.sweep()
    assert store.undo_purge(purged.undo_token)[0] == 1
    put(store, records[1])
    put(store, records[2])
    assert visible(store, records) == [1, 2]
    assert store.lookup([records[2].key])[0].stored_unix_s == clock.wall()


def test_evictions_are_told_in_one_line_and_refusals_by_reason(make_store):
    store = make_store(pages=1)
    for record in singles(4):
        put(store, record)
    with store.open(singles(4)[3].key):
        for _ in range(2):
            with pytest.raises(StoreFull):
                store.begin(1, 0)
    told = {kind: attributes for kind, _, attributes in store.events()}
    assert told["evict"]["records"] == "3"
    assert told["refuse"] == {"records": "2", "reason": "full"}
    assert list(store.events()) == []


def test_reasons_are_remembered_for_a_bounded_number_of_keys(make_store, monkeypatch):
    monkeypatch.setattr("tierkv.store.journal.REMEMBERED_KEYS", 3)
    store = make_store(pages=1)
    records = singles(6)
    for record in records:
        put(store, record)
    reasons = [store.missing_reason(record.key) for record in records[:5]]
    assert reasons == ["never_stored", "never_stored", "evicted", "evicted", "evicted"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_cap_holds_and_no_visible_record_loses_its_parent_to_eviction(data):
    cap = data.draw(st.integers(6, 20), label="pages")
    store = RamStore(cap * PAGE, page_bytes=PAGE, clock=FakeClock())
    chains = [make_chain(4, first_token=n * 10_000, tail=20, payload_bytes=1 + 3000 * n) for n in range(3)]
    records = [record for chain in chains for record in chain]
    parents = {record.key: record.header.parent for record in records}
    shown: set[bytes] = set()
    for number in data.draw(st.lists(st.integers(0, len(records) - 1), max_size=40), label="puts"):
        put(store, records[number])
        now = {record.key for record in records if store.lookup([record.key])[0]}
        assert store.stats().size_bytes <= store.stats().cap_bytes == cap * PAGE
        assert store.stats().size_bytes == sum(r.pages for r in records if r.key in now) * PAGE
        lost = shown - now
        assert not any(parents[key] in lost for key in now & shown)
        shown = now
    for record in records:
        assert get(store, record.key) in (None, record.data)


def test_resident_memory_stays_within_the_cap_under_ten_times_its_data(clock):
    cap = 24 << 20
    process = psutil.Process()
    records = [make_record([n], payload_bytes=1 << 20, seed=n) for n in range(4)]
    store = RamStore(cap, clock=clock)
    before = process.memory_info().rss
    for n in range(10 * cap >> 20):
        record = records[n % 4]
        put(store, with_header(record, tokens=np.array([n]), key=block_key(ROOT, np.array([n]))))
        store.sweep()
    assert store.stats().evictions > 200
    # The arena, one record in flight, and what the interpreter may have grown by.
    assert process.memory_info().rss - before <= cap + (8 << 20)


def test_memory_stays_flat_under_ten_times_the_cap(clock):
    store = RamStore(64 * PAGE, page_bytes=PAGE, clock=clock)
    random = np.random.default_rng(1)
    for n in range(700):
        put(store, make_record([n], payload_bytes=int(random.integers(1, 3 * PAGE)), seed=n % 7))
    stats = store.stats()
    assert stats.size_bytes <= stats.cap_bytes
    assert len(store._catalog.index.keys) <= 64 + 1
    assert stats.index_bytes < 2**20
