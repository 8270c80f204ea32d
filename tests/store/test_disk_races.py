"""What one thread does to a record, a segment or the store while another is in the middle of something."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest
from disk_stores import KIB, abandon, open_store
from store_records import ROOT, get, make_chain, make_record, put

from tierkv.errors import StoreUnwritable
from tierkv.store import disk_behind
from tierkv.store.base import Selector
from tierkv.store.log.files import Disk
from tierkv.store.log.segment import Segment


class ActingDisk(Disk):
    """``before_write``, ``before_sync``: called before each."""

    def __init__(self) -> None:
        super().__init__()
        self.before_write = lambda: None
        self.before_sync = lambda: None

    def write(self, fd, buffers, offset):
        self.before_write()
        super().write(fd, buffers, offset)

    def sync(self, fd):
        self.before_sync()
        super().sync(fd)


def fail_at_call(number: int):
    """A call that raises OSError from that one on."""
    calls = []

    def act() -> None:
        calls.append(1)
        if len(calls) >= number:
            raise OSError(errno.ENOSPC, "No space left on device")

    return act


def purge_all(store) -> str:
    return store.purge(store.preview_purge(Selector(root=ROOT)).token).undo_token


# --- readers --------------------------------------------------------------------------------------


@pytest.fixture(params=["room", "no room"])
def ram_bytes(request):
    """With and without room for the record in the arena: read into it, or piece by piece."""
    return {"room": 1 << 20, "no room": 64 * KIB}[request.param]


@pytest.fixture
def cold(tmp_path, ram_bytes):
    """A store whose one record is on the disk only, the disk, and the record."""
    record, disk = make_record([1], payload_bytes=100 * KIB), ActingDisk()
    before = open_store(tmp_path)
    put(before, record)
    before.close()
    store = open_store(tmp_path, disk=disk, ram_bytes=ram_bytes)
    yield store, disk, record
    disk.before_write = lambda: None
    store.close()


def test_a_record_that_was_brought_back_is_read_before_the_disk_is_told(cold):
    store, disk, record = cold
    undo_token = purge_all(store)
    entered, go = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert go.wait(30)

    disk.before_write = hold
    undoing = threading.Thread(target=store.undo_purge, args=(undo_token,))
    undoing.start()
    try:
        assert entered.wait(30)
        reader = store.open(record.key)
        assert reader.read(0, reader.size_bytes) == record.data
    finally:
        go.set()
        undoing.join(30)
    reader.close()
    assert store.stats().quarantined_records == 0


@pytest.mark.parametrize("leaves", ["purged", "discarded"])
def test_a_record_that_leaves_while_it_is_being_opened_is_read_to_its_end(cold, monkeypatch, leaves):
    store, _, record = cold
    pread, left = os.pread, []

    def leave_then_read(fd, length, offset):
        if not left:
            left.append(1)
            if leaves == "purged":
                purge_all(store)
            else:
                store.discard(record.key)
                store.sweep()
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", leave_then_read)
    assert get(store, record.key) == record.data
    monkeypatch.undo()
    assert left
    assert get(store, record.key) is None
    assert store.stats().quarantined_records == 0


# --- segments -------------------------------------------------------------------------------------


def test_a_segment_that_is_dropped_while_a_mark_is_written_keeps_no_other_from_being_synced(tmp_path, monkeypatch):
    synced = []
    disk = ActingDisk()
    store = open_store(tmp_path, disk=disk)
    first, second = make_record([1], payload_bytes=9 * KIB), make_record([2], payload_bytes=9 * KIB)
    put(store, first)
    store._log.close_open()
    put(store, second)
    set_mark = Segment.set_mark

    def drop_first(segment, *args, **kwargs):
        store._log.drop(segment)
        return set_mark(segment, *args, **kwargs)

    monkeypatch.setattr(Segment, "set_mark", drop_first)
    store.discard(first.key)
    monkeypatch.undo()
    disk.before_sync = lambda: synced.append(1)
    store._log.sync()
    assert synced == [1]
    assert store._log.dirty == {}
    store.close()


@pytest.mark.parametrize("fails", ["the second copy", "the sync"])
def test_a_compaction_that_fails_leaves_no_copy_that_outlives_a_purge(tmp_path, fails):
    disk = ActingDisk()
    store = open_store(tmp_path, disk=disk)
    records = make_chain(3, payload_bytes=9 * KIB)
    for record in records:
        put(store, record)
    store._log.close_open()
    segment = store._log.segments()[0]
    if fails == "the sync":
        disk.before_sync = fail_at_call(1)
    else:
        disk.before_write = fail_at_call(3)  # a segment's header, the first copy
    with pytest.raises(OSError, match="No space"):
        store._keeper._compact(segment)
    disk.before_write = disk.before_sync = lambda: None
    assert [get(store, record.key) for record in records] == [record.data for record in records]
    purge_all(store)
    abandon(store)
    again = open_store(tmp_path)
    assert [get(again, record.key) for record in records] == [None] * 3
    again.close()


def test_a_segment_that_another_compaction_has_dropped_is_left_alone(tmp_path):
    """Its reader still reads the file."""
    large = make_record([1], payload_bytes=100 * KIB)
    store = open_store(tmp_path)
    put(store, large)
    store.close()
    store = open_store(tmp_path, ram_bytes=64 * KIB)
    put(store, make_record([2], payload_bytes=9 * KIB))
    store._log.close_open()
    first = store._log.segments()[0]
    with store.open(large.key) as reader:
        assert store._keeper._compact(first)
        assert not store._keeper._compact(first)
        assert reader.read(0, reader.size_bytes) == large.data
    store.close()


@pytest.mark.parametrize("change", ["purge", "undo"])
def test_what_the_disk_did_not_take_of_a_change_is_written_when_it_takes_it(tmp_path, change):
    disk = ActingDisk()
    store = open_store(tmp_path, disk=disk)
    records = make_chain(3, payload_bytes=9 * KIB)
    for record in records:
        put(store, record)
    if change == "undo":
        undo_token = purge_all(store)
    else:
        token = store.preview_purge(Selector(root=ROOT)).token
    disk.before_write = fail_at_call(2)
    with pytest.raises(StoreUnwritable):
        store.undo_purge(undo_token) if change == "undo" else store.purge(token)
    disk.before_write = lambda: None
    store.sweep()
    abandon(store)
    again = open_store(tmp_path)
    right = [record.data if change == "undo" else None for record in records]
    assert [get(again, record.key) for record in records] == right
    again.close()


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["none", "batched", "always"])
def test_after_close_nothing_is_acknowledged_or_changed_any_more(tmp_path, durability):
    store = open_store(tmp_path, durability=durability)
    first, late = make_record([1], payload_bytes=9 * KIB), make_record([2], payload_bytes=9 * KIB)
    put(store, first)
    token = store.preview_purge(Selector(root=ROOT)).token
    writer = store.begin(len(late.data), store.epoch)
    writer.write(late.data)
    store.close()
    with pytest.raises(StoreUnwritable):
        writer.commit()
    with pytest.raises(StoreUnwritable):
        store.purge(token)
    again = open_store(tmp_path)
    assert [get(again, record.key) for record in (first, late)] == [first.data, None]
    again.close()


# --- written behind -------------------------------------------------------------------------------


def test_a_worse_record_on_its_way_to_the_log_does_not_take_the_place_of_an_exact_one_in_memory(tmp_path, monkeypatch):
    store = open_store(tmp_path, durability="none")
    worse = make_record([1], fidelity=20, seed=1, payload_bytes=9 * KIB)
    exact = make_record([1], payload_bytes=9 * KIB)
    append, outcomes = store._append, []

    def meanwhile(record, pinned):
        place = append(record, pinned)
        monkeypatch.undo()
        outcomes.append(put(store, exact))
        return place

    monkeypatch.setattr(store, "_append", meanwhile)
    monkeypatch.setattr(store._behind, "takes", lambda size_bytes: False)
    outcomes.append(put(store, worse))
    assert outcomes == ["stored", "present"]
    assert get(store, worse.key) == exact.data
    store.close()
    assert store._room.reserved == 0
    again = open_store(tmp_path)
    assert get(again, worse.key) == exact.data
    assert again.stats().records == 1
    again.close()


def test_what_a_purge_keeps_from_being_written_does_not_hold_up_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_behind, "_AGAIN_S", 3600.0)
    store = open_store(tmp_path, durability="none")
    purged, others = make_record([1]), [make_record([n]) for n in (2, 3)]
    with store._log_lock:
        put(store, purged)
        with store._lock:
            store._purger.purge(store._purger.preview(Selector(root=ROOT)).token)
    time.sleep(0.05)  # the thread waits for what comes
    for record in others:
        put(store, record)
        until = time.monotonic() + 30
        while len(store._behind._rows) > 1:
            assert time.monotonic() < until, "it is never written"
            time.sleep(0.005)
    store.close()
    again = open_store(tmp_path)
    assert [get(again, record.key) for record in (purged, *others)] == [None, *(record.data for record in others)]
    again.close()
