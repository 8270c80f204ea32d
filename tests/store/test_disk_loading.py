"""What a start makes of the files: the same trees as one by one, the order of use, and memory that is ready."""

from __future__ import annotations

import os
import random
import threading
from itertools import pairwise

import psutil
import pytest
from disk_stores import KIB, MIB, abandon, open_store
from hypothesis import given, settings
from hypothesis import strategies as st
from store_records import FakeClock, get, make_record, put

from tierkv.identity.blocks import BlockKey
from tierkv.store.arena import Arena
from tierkv.store.base import Selector
from tierkv.store.index import NONE, Index, State
from tierkv.store.log.files import Disk

KEYS = [BlockKey(bytes([n]) * 32) for n in range(24)]


def _trees(index: Index) -> dict[bytes, object]:
    """Everything that linking makes, by key."""
    found: dict[bytes, object] = {}
    for key, row in index.by_key.items():
        children = [index.keys[child] for child in index.children_of(row)]
        for before, after in pairwise(children):
            assert index.prev_sibling[index.by_key[after]] == index.by_key[before]
        assert index.state[row] == State.VISIBLE
        parent = index.parent[row]
        found[key] = (sorted(children), NONE if parent == NONE else index.keys[parent], index.holds[row])
    found[b"waiting"] = {key: sorted(index.keys[row] for row in index.children_of_key(key)) for key in index.orphans}
    found[b"sums"] = (index.visible_charge, index.visible_tokens, index.held_charge)
    return found


def _columns(index: Index, source: Index, rows: list[int]) -> range:
    names = ("kind", "fidelity", "charge", "size", "start", "place", "used_s")
    columns = {name: source.column(name)[rows].copy() for name in names}
    columns["facts_id"] = source.column("facts_id")[rows].astype("i8")
    facts = [source.facts(row) for row in range(len(source.keys))][:1]
    return index.add_many(
        columns, [source.keys[row] for row in rows], [source.parent_keys[row] for row in rows],
        [source.tokens[row] for row in rows], facts, {},
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_rows_loaded_together_hang_together_as_rows_added_one_by_one(chance: random.Random, batches: int):
    parents = {number: chance.choice([*range(number), -1]) for number in range(len(KEYS))}
    order = list(parents)
    chance.shuffle(order)
    alone = Index()
    for number in order:
        parent = BlockKey(b"\xff" * 32) if parents[number] < 0 else KEYS[parents[number]]
        record = make_record([number], parent)
        header = record.header
        object.__setattr__(header, "key", KEYS[number])
        alone.add(header, size_bytes=10_000 + number, charge=1 + number, place=number, now_s=1.0)
    together, cuts = Index(), sorted(chance.sample(range(1, len(order)), batches - 1))
    pinned = chance.sample(KEYS, 3)
    for first, last in zip([0, *cuts], [*cuts, len(order)], strict=True):
        for row in _columns(together, alone, list(range(first, last))):
            # A pin that is loaded holds the row at once, as it is when a segment's rows have come.
            if together.keys[row] in pinned:
                together.hold(row)
    for key in pinned:
        alone.hold(alone.by_key[key])
    assert _trees(together) == _trees(alone)


@pytest.mark.parametrize("hints", [True, False])
@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_after_a_restart_the_oldest_records_go_first_though_the_newest_segments_are_loaded_first(
    tmp_path, hints, policy
):
    clock = FakeClock()
    store = open_store(tmp_path, clock=clock, policy=policy)
    records = [make_record([n], payload_bytes=100 * KIB, seed=n) for n in range(40)]
    for record in records:
        put(store, record)
        clock.advance(1.0)
    assert store.stats().disk.segments >= 4
    store.close() if hints else abandon(store)
    store = open_store(tmp_path, clock=clock, policy=policy, disk_bytes=5 * MIB)
    for n in range(15):
        put(store, make_record([1000 + n], payload_bytes=100 * KIB, seed=1000 + n))
    here = [n for n, record in enumerate(records) if store.lookup([record.key])[0] is not None]
    assert 20 < len(here) < 40
    assert here == list(range(40 - len(here), 40))
    store.close()


def test_what_an_undo_replaces_is_not_erased_before_the_undo_is_on_the_disk(tmp_path):
    """Were it, a process that dies in between would have neither of the two."""
    exact, worse = (make_record([1], payload_bytes=20 * KIB, fidelity=f, seed=f) for f in (0, 20))

    class Watching(Disk):
        armed = False
        erased_early = False
        punched = 0

        def punch(self, fd, offset, length):
            self.punched += 1
            return super().punch(fd, offset, length)

        def write(self, fd, buffers, offset):
            if self.armed and sum(map(len, buffers)) == 32:
                self.armed = False
                before = self.punched
                other = threading.Thread(target=store.sweep)
                other.start()
                other.join(0.2)
                self.erased_early = self.punched > before
                others.append(other)
            return super().write(fd, buffers, offset)

    others: list[threading.Thread] = []
    disk = Watching()
    store = open_store(tmp_path, disk=disk)
    put(store, exact)
    undo = store.purge(store.preview_purge(Selector()).token).undo_token
    assert put(store, worse) == "stored"
    disk.armed = True
    assert store.undo_purge(undo)[0] == 1
    others[0].join(20)
    assert not disk.armed
    assert not disk.erased_early
    assert get(store, exact.key) == exact.data
    assert disk.punched >= 1
    abandon(store)
    store = open_store(tmp_path)
    assert get(store, exact.key) == exact.data
    store.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="the system cannot be asked for pages")
def test_memory_is_ready_before_it_is_needed_and_never_more_than_there_is():
    arena = Arena(48 * MIB)
    if arena._madvise is None:
        pytest.skip("the system cannot be asked for pages")
    resident = psutil.Process().memory_info().rss
    while not arena.prepare(16 * MIB):
        pass
    grown = psutil.Process().memory_info().rss - resident
    assert 15 * MIB <= grown <= 20 * MIB
    pages = arena.take(arena.pages_for(20 * MIB))
    extents = arena.extents(pages, 20 * MIB)
    extents.copy_in(0, memoryview(b"\x5a" * (20 * MIB)))
    while not arena.prepare(1 << 40):
        pass
    grown = psutil.Process().memory_info().rss - resident
    assert 47 * MIB <= grown <= 76 * MIB
    assert b"".join(extents.pieces(0, 20 * MIB)) == b"\x5a" * (20 * MIB)
    assert arena.prepare(1 << 40)
