"""Durability "none": a record is acknowledged from RAM and written behind, and is as good as another meanwhile."""

from __future__ import annotations

import errno
import threading
import time

import pytest
from disk_stores import KIB, MIB, abandon, on_disk, open_store
from store_records import ROOT, get, make_chain, make_record, put

from tierkv.errors import StoreFull, StoreUnwritable
from tierkv.store.base import Selector
from tierkv.store.log.files import Disk


class HeldDisk(Disk):
    """Records are written when the test lets go; ``error``: instead of writing."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.entered = threading.Event()
        self.error: OSError | None = None

    def write(self, fd, buffers, offset):
        if offset:  # not the head of a segment
            self.entered.set()
            assert self.go.wait(30)
            if self.error is not None:
                raise self.error
        super().write(fd, buffers, offset)


@pytest.fixture
def disk():
    held = HeldDisk()
    yield held
    held.go.set()


@pytest.fixture
def store(tmp_path, disk):
    opened = open_store(tmp_path, disk=disk, durability="none")
    yield opened
    disk.error = None
    disk.go.set()
    opened.close()


def written(store) -> None:
    """Waits until nothing is in RAM only."""
    until = time.monotonic() + 30
    while store._behind._rows:
        assert time.monotonic() < until, "it is never written"
        time.sleep(0.005)


def killed(store, disk, tmp_path):
    """The store as the next process finds it when this one was killed before a write."""
    disk.error = OSError(errno.EIO, "killed")
    disk.go.set()
    abandon(store)
    return open_store(tmp_path)


def test_a_record_is_acknowledged_and_served_before_it_is_written(store, disk, tmp_path):
    records = make_chain(4, payload_bytes=9 * KIB)
    assert [put(store, record) for record in records] == ["stored"] * 4
    assert put(store, records[0]) == "present"
    assert [get(store, record.key) for record in records] == [record.data for record in records]
    stats = store.stats()
    assert (stats.records, stats.disk.hot_records) == (4, 4)
    assert stats.disk.unsynced_bytes == sum(len(record.data) for record in records)
    disk.go.set()
    written(store)
    assert store._room.reserved == 0
    assert [get(store, record.key) for record in records] == [record.data for record in records]
    abandon(store)  # killed afterwards: everything was written
    again = open_store(tmp_path)
    assert [get(again, record.key) for record in records] == [record.data for record in records]
    again.close()


def test_a_process_that_is_killed_loses_what_was_not_written_and_nothing_else(store, disk, tmp_path):
    disk.go.set()
    first, second = make_record([1], payload_bytes=9 * KIB), make_record([2], payload_bytes=9 * KIB)
    put(store, first)
    written(store)
    disk.go.clear()
    put(store, second)
    again = killed(store, disk, tmp_path)
    assert get(again, first.key) == first.data
    assert get(again, second.key) is None
    assert again.missing_reason(second.key) == "never_stored"
    assert again.stats().quarantined_records == 0
    again.close()


def test_a_store_that_is_closed_has_written_everything(store, disk, tmp_path):
    records = make_chain(3, payload_bytes=9 * KIB)
    for record in records:
        put(store, record)
    disk.go.set()
    store.close()
    again = open_store(tmp_path)
    assert [get(again, record.key) for record in records] == [record.data for record in records]
    again.close()


def test_what_the_disk_refuses_at_the_end_is_told(store, disk, caplog):
    put(store, make_record([1], payload_bytes=9 * KIB))
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    disk.go.set()
    store.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "are lost: disk_full" in caplog.text


def test_what_is_purged_before_it_is_written_never_is(store, disk, tmp_path):
    """All but the record that was being written when the purge came, which is marked as any other."""
    records = [make_record([n], payload_bytes=9 * KIB) for n in range(4)]
    put(store, records[0])
    assert disk.entered.wait(10)
    for record in records[1:]:
        put(store, record)
    token = store.preview_purge(Selector(root=ROOT)).token
    purging = threading.Thread(target=store.purge, args=(token,))
    purging.start()  # waits for the write that goes on
    disk.go.set()
    purging.join(30)
    assert [get(store, record.key) for record in records] == [None] * 4
    abandon(store)
    again = open_store(tmp_path)
    assert [get(again, record.key) for record in records] == [None] * 4
    assert again.stats().records == 0
    again.close()


def test_a_purge_that_is_taken_back_is_written_after_all(store, disk, tmp_path):
    records = make_chain(3, payload_bytes=9 * KIB)
    with store._log_lock:  # nothing is written meanwhile
        for record in records:
            put(store, record)
        with store._lock:
            result = store._purger.purge(store._purger.preview(Selector(root=ROOT)).token)
    disk.go.set()
    time.sleep(0.1)
    assert on_disk(tmp_path) < 5 * 9 * KIB
    assert store.undo_purge(result.undo_token)[0] == 3
    assert [get(store, record.key) for record in records] == [record.data for record in records]
    written(store)
    abandon(store)
    again = open_store(tmp_path)
    assert [get(again, record.key) for record in records] == [record.data for record in records]
    again.close()


@pytest.mark.parametrize("leaves", ["evicted", "discarded", "quarantined"])
def test_what_leaves_before_it_is_written_gives_its_room_back_and_is_not_written(store, disk, tmp_path, leaves):
    records = [make_record([n], payload_bytes=9 * KIB) for n in range(3)]
    with store._log_lock:
        for record in records:
            put(store, record)
        if leaves == "evicted":
            with store._lock:
                assert store._catalog.evict(1) > 0
        elif leaves == "discarded":
            store.discard(records[0].key)
        else:
            store.quarantine(records[0].key, "bad_checksum")
        assert store.missing_reason(records[0].key) == leaves
    disk.go.set()
    written(store)
    assert store._room.reserved == 0
    assert store._arena.used_bytes == sum(-(-len(record.data) // 4096) * 4096 for record in records[1:])
    abandon(store)
    again = open_store(tmp_path)
    assert [get(again, record.key) for record in records] == [None, records[1].data, records[2].data]
    again.close()


def test_a_record_that_leaves_while_it_is_being_written_is_erased_afterwards(store, disk, tmp_path):
    record, other = make_record([1], payload_bytes=9 * KIB), make_record([2], payload_bytes=9 * KIB)
    put(store, record)
    assert disk.entered.wait(10)
    store.discard(record.key)
    put(store, other)  # in other pages than those that are being written
    disk.go.set()
    written(store)
    store.sweep()
    assert store._room.reserved == 0
    abandon(store)
    again = open_store(tmp_path)
    assert [get(again, r.key) for r in (record, other)] == [None, other.data]
    assert again.stats().quarantined_records == 0
    again.close()


def test_a_pin_holds_after_a_restart_whether_it_came_before_the_write_or_after(store, disk, tmp_path):
    early, late = make_record([1]), make_record([2], root=ROOT)
    with store._log_lock:
        put(store, early)
        with store._lock:
            store._catalog.pin([store._catalog.index.find(early.key)])
    disk.go.set()
    written(store)
    put(store, late)
    written(store)
    store.pin(Selector(prefixes=(late.key,)))
    abandon(store)
    again = open_store(tmp_path)
    assert [entry.pinned for entry in again.lookup([early.key, late.key])] == [True, True]
    again.close()


def test_a_record_that_replaces_another_is_written_before_the_other_is_erased(store, disk, tmp_path):
    worse = make_record([1], fidelity=20, seed=1, payload_bytes=9 * KIB)
    better = make_record([1], payload_bytes=9 * KIB)
    disk.go.set()
    put(store, worse)
    written(store)
    assert put(store, better) == "replaced"
    assert not store._behind._rows
    abandon(store)
    again = open_store(tmp_path)
    assert get(again, better.key) == better.data
    again.close()


def test_beyond_a_quarter_of_the_memory_a_record_waits_for_the_disk(store, disk):
    """The arena of 1 MiB keeps 256 KiB that are not written; what comes then is written before it is acknowledged."""
    records = [make_record([n], payload_bytes=60 * KIB) for n in range(6)]
    for record in records[:4]:
        put(store, record)
    assert store._behind.size_bytes <= MIB // 4
    waiting = threading.Thread(target=put, args=(store, records[4]))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    disk.go.set()
    waiting.join(30)
    assert not waiting.is_alive()
    put(store, records[5])
    written(store)
    assert [get(store, record.key) for record in records] == [record.data for record in records]


def test_a_record_that_needs_the_whole_memory_waits_until_the_rest_is_written(store, disk):
    small = [make_record([n], payload_bytes=60 * KIB) for n in range(4)]
    for record in small:
        put(store, record)
    large = make_record([9], payload_bytes=900 * KIB)
    disk.go.set()
    assert put(store, large) == "stored"
    assert get(store, large.key) == large.data
    assert [get(store, record.key) for record in small] == [record.data for record in small]


def test_what_the_disk_refuses_is_served_from_memory_and_written_when_it_takes_it(store, disk, tmp_path):
    first, second, third = (make_record([n], payload_bytes=9 * KIB) for n in range(3))
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    put(store, first)
    disk.go.set()
    until = time.monotonic() + 10
    while not store.stats().disk.problem:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert get(store, first.key) == first.data
    with pytest.raises(StoreUnwritable):  # nothing more is promised until the disk does again
        put(store, second)
    assert get(store, second.key) is None
    disk.error = None
    assert put(store, third) == "stored"
    written(store)
    assert store.stats().disk.problem == ""
    abandon(store)
    again = open_store(tmp_path)
    assert [get(again, r.key) for r in (first, second, third)] == [first.data, None, third.data]
    again.close()


def test_ten_times_the_limits_go_through(tmp_path):
    store = open_store(tmp_path, durability="none", disk_bytes=2 * MIB, segment_bytes=256 * KIB, ram_bytes=512 * KIB)
    kept = {}
    for n in range(400):
        record = make_record([n], payload_bytes=50 * KIB)
        try:
            if put(store, record) == "stored":
                kept[record.key] = record.data
        except StoreFull:
            pytest.fail("nothing is pinned: there is always somebody who may leave")
        assert on_disk(tmp_path) <= 2 * MIB
        assert store.stats().disk.unsynced_bytes <= 2 * MIB + 128 * KIB  # a quarter of the arena may be behind
    assert all(get(store, key) in (None, data) for key, data in kept.items())
    assert store.stats().evictions > 300
    written(store)
    assert store._room.reserved == 0
    store.close()
    again = open_store(tmp_path, disk_bytes=2 * MIB)
    assert again.stats().records > 20
    assert again.stats().quarantined_records == 0
    again.close()
