"""Prefixes: chains from a root to a record that nothing follows."""

from __future__ import annotations

import pytest
from store_records import get, make_chain, make_record, put

from tierkv.codec.record import RecordKind
from tierkv.identity.blocks import BlockKey
from tierkv.store.base import Selector
from tierkv.store.index import Index

OTHER = BlockKey(b"\x02" * 32)


@pytest.fixture
def forked(make_store, clock):
    """[shared, shared, a tail, b block (int8), b tail], stored one second after another."""
    store = make_store()
    left = make_chain(2, tail=10)
    block = make_record(range(1000, 1256), left[1].key, start=512, codec="int8")
    tail = make_record(range(9), block.key, start=768)
    records = [*left, block, tail]
    for record in records:
        put(store, record)
        clock.advance(1)
    return store, records


def test_a_prefix_knows_its_chain_and_what_is_its_own(forked):
    store, records = forked
    right, left = store.prefixes(Selector())
    keys = [record.key for record in records]
    sizes = [len(record.data) for record in records]
    assert left.chain == tuple(keys[:3])
    assert left.own_keys == (keys[2],)
    assert (left.own_bytes, left.total_bytes) == (sizes[2], sum(sizes[:3]))
    assert left.codecs == ("raw",)
    assert right.chain == (keys[0], keys[1], keys[3], keys[4])
    assert right.own_keys == (keys[3], keys[4])
    assert (right.own_bytes, right.total_bytes) == (sizes[3] + sizes[4], sum(sizes) - sizes[2])
    assert right.codecs == ("int8", "raw")
    assert right.leaf.header.end == 777


def test_the_last_use_and_the_hits_are_those_of_its_own_records(forked, clock):
    store, records = forked
    for _ in range(2):
        get(store, records[3].key)
    get(store, records[1].key)
    clock.advance(7)
    right, left = store.prefixes(Selector())
    assert right.leaf.header.key == records[4].key
    assert (right.hits, left.hits) == (2, 0)
    assert right.last_hit_unix_s == pytest.approx(clock.wall() - 7)


def test_most_recently_used_first(forked):
    store, records = forked
    get(store, records[2].key)
    assert [p.leaf.header.key for p in store.prefixes(Selector())] == [records[2].key, records[4].key]


def test_prefixes_are_chosen_by_the_leaf(forked):
    store, records = forked
    state = make_record([1], OTHER, root=OTHER, kind=RecordKind.STATE, model="other")
    put(store, state)
    for selector in (Selector(root=OTHER), Selector(model="other"), Selector(tier="ssm")):
        assert [p.leaf.header.key for p in store.prefixes(selector)] == [state.key]
    named = Selector(prefixes=(records[2].key[:5],))
    assert [p.leaf.header.key for p in store.prefixes(named)] == [records[2].key]
    assert store.prefixes(Selector(prefixes=(records[1].key,))) == []


def test_a_chain_whose_head_is_not_here_begins_where_it_can(make_store):
    store = make_store()
    chain = make_chain(3)
    for record in chain[1:]:
        put(store, record)
    (prefix,) = store.prefixes(Selector())
    assert prefix.chain == (chain[1].key, chain[2].key)


def test_a_checkpoint_is_a_prefix_of_its_own(make_store):
    store = make_store()
    head = make_chain(1)[0]
    window = make_record([], head.key, start=256, kind=RecordKind.WINDOW)
    put(store, head)
    put(store, window)
    (prefix,) = store.prefixes(Selector())
    assert (prefix.leaf.header.kind, prefix.chain) == (RecordKind.WINDOW, (head.key, window.key))


def test_no_prefixes_in_an_empty_store(make_store):
    assert make_store().prefixes(Selector()) == []


def test_a_trunk_under_many_prefixes_is_walked_once(make_store, monkeypatch):
    store = make_store(pages=1000)
    trunk = make_chain(100)
    leaves = [make_record([-n - 1], trunk[-1].key, start=100 * 256) for n in range(100)]
    for record in (*trunk, *leaves):
        put(store, record)
    calls = []
    facts = Index.facts
    monkeypatch.setattr(Index, "facts", lambda self, row: calls.append(row) or facts(self, row))
    found = store.prefixes(Selector())
    assert len(found) == 100
    assert all(len(prefix.chain) == 101 for prefix in found)
    # Each record is asked once for its chain and once for its header; all pairs would be 10,000.
    assert len(calls) <= 2 * 200
