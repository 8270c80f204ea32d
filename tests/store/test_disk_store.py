"""What a store on disk keeps over restarts, what it refuses, and that its limits hold."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from disk_stores import KIB, MIB, abandon, on_disk, open_store
from store_records import FakeClock, get, make_chain, make_record, put

from tierkv.errors import RecordTooLarge, Refused, StaleEpoch, StartupError, StoreFull, StoreUnwritable
from tierkv.identity.blocks import BlockKey
from tierkv.store.base import Selector
from tierkv.store.disk import DiskStore
from tierkv.store.log.files import Disk

OTHER = BlockKey(b"\x02" * 32)


def test_records_pins_and_the_epoch_outlive_a_restart(tmp_path):
    chain = make_chain(3, tail=9, payload_bytes=30 * KIB, segments=3)
    store = open_store(tmp_path)
    assert [put(store, record, step=7000) for record in chain] == ["stored"] * 4
    put(store, make_record([1], root=OTHER, parent=OTHER, model="o"))
    store.pin(Selector(model="m"))
    store.purge(store.preview_purge(Selector(model="o")).token)
    for closing in (DiskStore.close, abandon):
        closing(store)
        store = open_store(tmp_path)
        assert [get(store, record.key) for record in chain] == [record.data for record in chain]
        stats = store.stats()
        assert (stats.records, stats.pinned_records, stats.epoch) == (4, 4, 1)
        assert stats.quarantined_records == 0
    store.close()


def test_headers_hits_media_and_scalars_are_the_same_from_a_hint_and_from_the_data(tmp_path):
    from tierkv.codec.record import RecordKind
    from tierkv.identity.blocks import Media

    head = make_chain(1)[0]
    media = (Media(260, 3, b"\x07" * 16),)
    picture = make_record(range(20), head.key, start=256, media=media)
    window = make_record([], head.key, start=256, kind=RecordKind.WINDOW, scalars='{"0": {"_idx": 3}}')
    store = open_store(tmp_path)
    for record in (head, picture, window):
        put(store, record)
    get(store, head.key)
    before = [entry.header for entry in store.lookup([head.key, picture.key, window.key])]
    store.close()
    for hinted in (True, False):
        if not hinted:
            for path in tmp_path.glob("*.hint"):
                path.unlink()
        store = open_store(tmp_path)
        entries = store.lookup([head.key, picture.key, window.key])
        for old, entry in zip(before, entries, strict=True):
            assert entry.header.pack_frame() == old.pack_frame()
        assert [entry.hits for entry in entries] == ([1, 0, 0] if hinted else [0, 0, 0])
        assert [e.header.key for e in store.children(head.key, list(RecordKind))] != []
        store.close()
        assert len(list(tmp_path.glob("*.hint"))) == 1


def test_reads_see_what_was_written_a_moment_ago_and_what_is_cold(tmp_path):
    store = open_store(tmp_path, ram_bytes=256 * KIB)
    records = [make_record([n], payload_bytes=60 * KIB, seed=n) for n in range(20)]
    for record in records:
        put(store, record)
        assert get(store, record.key) == record.data
    assert [get(store, record.key) for record in records] == [record.data for record in records]
    assert store.stats().disk.ram_bytes <= 256 * KIB
    store.close()


def test_a_record_that_finds_no_room_in_ram_is_read_piece_by_piece(tmp_path):
    store = open_store(tmp_path, ram_bytes=256 * KIB)
    records = [make_record([n], payload_bytes=100 * KIB, seed=n) for n in range(3)]
    for record in records:
        put(store, record)
    readers = [store.open(record.key) for record in records]
    assert {type(reader).__name__ for reader in readers} == {"RamReader", "ColdReader"}
    for reader, record in zip(readers, records, strict=True):
        assert reader.read(0, 10**9) == record.data
        assert b"".join(reader.views(50_000, 20)) == record.data[50_000:50_020]
        reader.close()
    with pytest.raises(ValueError, match="closed"):
        readers[0].read(0, 1)
    store.close()


def test_a_reader_reads_on_while_its_record_is_evicted_and_its_segment_compacted(tmp_path):
    store = open_store(tmp_path, ram_bytes=128 * KIB, disk_bytes=4 * MIB)
    records = [make_record([n], payload_bytes=100 * KIB, seed=n) for n in range(4)]
    for record in records:
        put(store, record)
    readers = [store.open(record.key) for record in records]
    for record in records[:3]:
        store.discard(record.key)
    with store._log_lock:
        store._log.close_open()
    list(store.compact())
    for reader, record in zip(readers, records, strict=True):
        assert reader.read(0, 10**9) == record.data
        reader.close()
    assert [get(store, record.key) is not None for record in records] == [False, False, False, True]
    abandon(store)
    store = open_store(tmp_path)
    assert [get(store, record.key) for record in records] == [None, None, None, records[3].data]
    store.close()


def test_ten_times_the_limits_leave_disk_ram_and_index_inside_them(tmp_path):
    store = open_store(tmp_path, disk_bytes=8 * MIB, ram_bytes=MIB)
    before = psutil.Process().memory_info().rss
    for n in range(800):
        record = make_record([n], payload_bytes=100 * KIB, seed=n)
        assert put(store, record) == "stored"
        if n % 20 == 0:
            assert on_disk(tmp_path) <= 8 * MIB
            store.sweep()
    stats = store.stats()
    assert on_disk(tmp_path) <= stats.disk.disk_bytes <= 8 * MIB
    assert stats.records > 60
    assert stats.evictions == 800 - stats.records
    assert psutil.Process().memory_info().rss - before < 24 * MIB
    store.close()
    assert on_disk(tmp_path) <= 8 * MIB


def test_without_hole_punching_the_limits_hold_by_compaction(tmp_path):
    class NoPunching(Disk):
        def punch(self, fd, offset, length):
            return False

    store = open_store(tmp_path, disk=NoPunching(), disk_bytes=8 * MIB)
    records = [make_record([n], payload_bytes=100 * KIB, seed=n) for n in range(300)]
    for n, record in enumerate(records):
        assert put(store, record) == "stored"
        assert n % 20 or on_disk(tmp_path) <= 8 * MIB
    here = [record for record in records if get(store, record.key) == record.data]
    assert len(here) > 30
    assert here[-1] is records[-1]
    abandon(store)
    store = open_store(tmp_path, disk=NoPunching(), disk_bytes=8 * MIB)
    assert sorted(r.key for r in records if get(store, r.key)) == sorted(r.key for r in here)
    store.close()


def test_an_oversized_record_is_refused_before_anything_is_allocated(tmp_path):
    store = open_store(tmp_path, max_record_bytes=64 * KIB)
    with pytest.raises(RecordTooLarge, match="limit of 65536"):
        store.begin(64 * KIB + 1, 0)
    assert store.stats().disk.ram_bytes == 0
    store.close()


def test_concurrent_writers_and_pins_get_room_or_a_refusal(tmp_path):
    store = open_store(tmp_path, disk_bytes=MIB, ram_bytes=8 * MIB, segment_bytes=64 * KIB)
    writers = [store.begin(100 * KIB, 0) for _ in range(6)]
    with pytest.raises(StoreFull):
        [store.begin(100 * KIB, 0) for _ in range(9)]
    for writer in writers:
        writer.abort()
    for n in range(30):
        put(store, make_record([n], payload_bytes=100 * KIB, model="keep" if n == 29 else "m"))
    store.pin(Selector())

    def fill_with_pins():
        for n in range(30, 40):
            put(store, make_record([n], payload_bytes=100 * KIB))
            store.pin(Selector())

    with pytest.raises(StoreFull):
        fill_with_pins()
    store.close()


def test_a_late_writer_brings_nothing_back_after_a_restart(tmp_path):
    record = make_record([1])
    store = open_store(tmp_path)
    epoch = store.epoch
    put(store, record)
    store.purge(store.preview_purge(Selector()).token)
    abandon(store)
    store = open_store(tmp_path)
    with pytest.raises(StaleEpoch):
        put(store, record, epoch=epoch)
    assert get(store, record.key) is None
    assert put(store, record) == "stored"
    store.close()


def test_an_undone_purge_outlives_a_restart_and_a_restart_ends_the_window(tmp_path):
    records = [make_record([n], seed=n) for n in range(2)]
    store = open_store(tmp_path)
    for record in records:
        put(store, record)
    undo = store.purge(store.preview_purge(Selector()).token).undo_token
    assert store.undo_purge(undo)[0] == 2
    abandon(store)
    store = open_store(tmp_path)
    assert [get(store, record.key) for record in records] == [record.data for record in records]
    undo = store.purge(store.preview_purge(Selector()).token).undo_token
    store.close()
    store = open_store(tmp_path)
    assert [get(store, record.key) for record in records] == [None, None]
    store.close()
    store = open_store(tmp_path)
    assert store.stats().disk.segments == 0
    store.close()


def test_purged_bytes_are_erased_from_the_files_after_the_window(tmp_path):
    clock = FakeClock()
    store = open_store(tmp_path, clock=clock)
    record = make_record(range(100, 200), payload_bytes=50 * KIB)
    put(store, record)
    put(store, make_record([1]))
    store.purge(store.preview_purge(Selector(prefixes=(record.key,))).token)
    ids = record.header.tokens.tobytes()
    assert any(ids in path.read_bytes() for path in tmp_path.glob("*.seg"))
    clock.advance(61)
    store.sweep()
    assert not any(ids in path.read_bytes() for path in tmp_path.iterdir())
    store.close()


# --- disks that do not do what they are told ------------------------------------------------------


class FailingDisk(Disk):
    """Fails writes with ``number`` while that is set; ``room`` bytes of a write get through first."""

    number = 0
    room = 0

    def write(self, fd, buffers, offset):
        if not self.number:
            return super().write(fd, buffers, offset)
        data = b"".join(bytes(buffer) for buffer in buffers)
        super().write(fd, [data[: self.room]], offset)
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "disk_full"),
        (errno.EROFS, "read_only"),
        (errno.EACCES, "permission_denied"),
        (errno.EIO, "io_error"),
    ],
)
@pytest.mark.parametrize("room", [0, 5000])
def test_a_disk_that_takes_nothing_refuses_with_its_reason_and_reads_go_on(tmp_path, number, reason, room):
    disk = FailingDisk()
    store = open_store(tmp_path, disk=disk, ram_bytes=128 * KIB)
    records = [make_record([n], payload_bytes=50 * KIB, seed=n) for n in range(4)]
    for record in records[:3]:
        put(store, record)
    disk.number, disk.room = number, room
    for _ in range(3):
        with pytest.raises(StoreUnwritable) as refused:
            put(store, records[3])
        assert refused.value.reason == reason
    assert store.stats().disk.problem == reason
    assert [get(store, record.key) for record in records[:3]] == [record.data for record in records[:3]]
    assert [kind for kind, _, _ in store.events()].count("disk") == 1
    with pytest.raises(StoreUnwritable):
        store.pin(Selector())
    disk.number = 0
    assert put(store, records[3]) == "stored"
    assert store.stats().disk.problem == ""
    abandon(store)
    store = open_store(tmp_path)
    assert [get(store, record.key) for record in records] == [record.data for record in records]
    assert store.stats().disk.damaged == 0
    store.close()


def test_the_file_system_is_never_filled(tmp_path):
    class Small(Disk):
        """A file system of 3 MiB on which nobody else writes."""

        def free_bytes(self, folder):
            return max(0, 3 * MIB - on_disk(folder))

    store = open_store(tmp_path, disk=Small(), disk_bytes=64 * MIB, min_free_bytes=MIB)
    for n in range(60):
        assert put(store, make_record([n], payload_bytes=100 * KIB, seed=n)) == "stored"
        assert on_disk(tmp_path) <= 2 * MIB
    assert store.stats().records > 10
    store.close()


def test_a_file_size_limit_is_a_full_disk(tmp_path):
    """A real ENOSPC-like failure of the system, in a process of its own."""
    script = f"""
import resource, signal, sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from pathlib import Path
from disk_stores import open_store
from store_records import make_record, put, get
from tierkv.errors import StoreUnwritable
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = open_store(Path({str(tmp_path)!r}))
records = [make_record([n], payload_bytes=100_000, seed=n) for n in range(9)]
resource.setrlimit(resource.RLIMIT_FSIZE, (450_000, 450_000))
taken = []
for record in records:
    try:
        put(store, record); taken.append(record)
    except StoreUnwritable as error:
        assert error.reason == "disk_full", error
assert 4 <= len(taken) < 9, len(taken)
assert all(get(store, record.key) == record.data for record in taken)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    store = open_store(tmp_path)
    assert store.stats().records >= 4
    assert store.stats().disk.damaged == 0
    store.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_that_this_user_may_only_read_is_served_and_takes_nothing(tmp_path):
    record = make_record([1], payload_bytes=20 * KIB)
    store = open_store(tmp_path)
    put(store, record)
    store.close()
    for path in tmp_path.iterdir():
        path.chmod(0o444)
    tmp_path.chmod(0o555)
    for parent in tmp_path.parents:
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setuid(65534)
            other = open_store(tmp_path)
            assert get(other, record.key) == record.data
            for attempt in (lambda: put(other, make_record([2])), lambda: other.pin(Selector())):
                try:
                    attempt()
                except StoreUnwritable as error:
                    assert error.reason == "permission_denied"  # noqa: PT017
                else:
                    raise AssertionError("written")
            other.sweep()
            assert other.stats().disk.problem == "permission_denied"
            other.close()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_the_second_vault_on_a_folder_is_refused(tmp_path):
    store = open_store(tmp_path)
    with pytest.raises(StartupError, match=f"process {os.getpid()} has the vault folder"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


def test_a_file_where_the_folder_should_be_is_a_clear_error(tmp_path):
    (tmp_path / "v").write_text("")
    with pytest.raises(StartupError, match="cannot open the vault folder"):
        open_store(tmp_path / "v")


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-(10.0**9), 10.0**9])
def test_a_jump_of_the_wall_clock_over_a_restart_ages_nothing(tmp_path, jump):
    clock = FakeClock()
    record = make_record([1])
    store = open_store(tmp_path, clock=clock, ttl_s=3600.0)
    put(store, record)
    store.close()
    clock.wall_s += jump
    clock.now_s = 5.0
    store = open_store(tmp_path, clock=clock, ttl_s=3600.0)
    store.sweep()
    assert get(store, record.key) == record.data
    store.close()


def test_age_goes_on_over_restarts(tmp_path):
    clock = FakeClock()
    record = make_record([1])
    store = open_store(tmp_path, clock=clock, ttl_s=3600.0)
    put(store, record)
    for _ in range(2):
        clock.advance(2000)
        store.close()
        clock.now_s = 7.0
        store = open_store(tmp_path, clock=clock, ttl_s=3600.0)
    store.sweep()
    assert store.lookup([record.key]) == [None]
    assert store.missing_reason(record.key) == "expired"
    store.close()


def test_identities_not_seen_for_long_go_first(tmp_path):
    clock = FakeClock()
    store = open_store(tmp_path, clock=clock, disk_bytes=MIB, segment_bytes=128 * KIB, dead_after_s=3600.0)
    old = [make_record([n], root=OTHER, parent=OTHER, payload_bytes=60 * KIB, seed=n) for n in range(3)]
    for record in old:
        put(store, record)
    clock.advance(4000)
    fresh = [make_record([n], payload_bytes=60 * KIB, seed=n) for n in range(20)]
    put(store, fresh[0])
    store.touch([record.key for record in old[:0]])
    store.sweep()
    for record in fresh[1:]:
        put(store, record)
        gone = [get(store, each.key, count_hit=False) is None for each in old]
        if not all(gone):
            assert store.lookup([fresh[0].key]) != [None]
    assert all(gone)
    store.close()


# --- start-up -------------------------------------------------------------------------------------


def test_a_vault_answers_while_it_is_loading(tmp_path):
    first, second = (make_record([n], payload_bytes=600 * KIB, seed=n) for n in range(2))
    store = open_store(tmp_path, ram_bytes=2 * MIB)
    put(store, first)
    put(store, second)
    store.close()
    assert len(list(tmp_path.glob("*.seg"))) == 2
    gate, reached = threading.Event(), threading.Event()
    from tierkv.store.log import keeping

    real = keeping.read_segment

    def slow(segment, data):
        if segment.number == 1:
            reached.set()
            gate.wait(20)
        return real(segment, data)

    keeping.read_segment = slow
    try:
        store = open_store(tmp_path, ram_bytes=2 * MIB, load_in_background=True)
        assert reached.wait(20)
        assert store.stats().loading
        assert get(store, second.key) == second.data
        assert get(store, first.key) is None
        assert store.missing_reason(first.key) == "loading"
        with pytest.raises(Refused, match="still loading"):
            store.preview_purge(Selector())
        third = make_record([3])
        assert put(store, third) == "stored"
        assert put(store, first) == "stored"
    finally:
        gate.set()
        keeping.read_segment = real
    store._keeper._thread.join()
    assert not store.stats().loading
    assert [get(store, r.key) for r in (first, second, third)] == [first.data, second.data, third.data]
    assert store.missing_reason(make_record([9]).key) == "never_stored"
    assert store.stats().records == 3
    store.close()


@pytest.mark.parametrize("durability", ["batched", "always"])
def test_what_is_acknowledged_is_synced_as_promised(tmp_path, durability):
    class Counting(Disk):
        syncs = 0

        def sync(self, fd):
            self.syncs += 1
            super().sync(fd)

    disk = Counting()
    store = open_store(tmp_path, disk=disk, durability=durability, sync_s=0.01, sync_bytes=10 * MIB)
    before = disk.syncs
    for n in range(5):
        put(store, make_record([n]))
    if durability == "always":
        assert disk.syncs - before >= 5
    store.close()
    assert disk.syncs > before


def test_every_batch_is_synced_without_being_asked(tmp_path):
    synced = threading.Event()

    class Telling(Disk):
        def sync(self, fd):
            super().sync(fd)
            synced.set()

    store = open_store(tmp_path, disk=Telling(), durability="batched", sync_s=0.01)
    synced.clear()
    put(store, make_record([1]))
    assert synced.wait(10)
    store.close()


def test_four_threads_on_one_folder(tmp_path):
    store = open_store(tmp_path, disk_bytes=3 * MIB, ram_bytes=512 * KIB, undo_s=0.01, segment_bytes=256 * KIB)
    records = [r for n in range(10) for r in make_chain(3, first_token=n * 10_000, payload_bytes=30 * KIB)]
    data_of = {record.key: record.data for record in records}
    errors: list[BaseException] = []

    def guarded(work):
        def run():
            try:
                work()
            except BaseException as error:
                errors.append(error)

        return threading.Thread(target=run)

    def write():
        for turn in range(4):
            for record in records[turn::2]:
                try:
                    put(store, record, step=9000)
                except (StoreFull, StaleEpoch):
                    pass

    def read():
        for _ in range(6):
            for key, data in data_of.items():
                assert get(store, key) in (None, data)

    def keep_house():
        for turn in range(40):
            store.sweep()
            list(store.compact())
            if turn % 10 == 5:
                store.purge(store.preview_purge(Selector(prefixes=(records[turn % 30].key,))).token)
            assert store.stats().size_bytes <= 3 * MIB

    threads = [guarded(each) for each in (write, write, read, keep_house)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    store.close()
    store = open_store(tmp_path, disk_bytes=3 * MIB)
    for key, data in data_of.items():
        assert get(store, key) in (None, data)
    assert store.stats().disk.damaged == 0
    assert store.stats().records > 10
    store.close()


def test_another_policy_decides_from_now_on(tmp_path):
    store = open_store(tmp_path)
    records = [make_record([n], payload_bytes=30 * KIB, seed=n) for n in range(10)]
    for record in records:
        put(store, record)
    store.set_policy("s3fifo")
    assert store.stats().policy == "s3fifo"
    for n in range(400):
        put(store, make_record([1000 + n], payload_bytes=30 * KIB, seed=n))
        for record in records[:3]:
            get(store, record.key)
    assert all(store.lookup([record.key])[0] for record in records[:3])
    assert not any(store.lookup([record.key])[0] for record in records[3:])
    with pytest.raises(ValueError, match="lru, s3fifo"):
        store.set_policy("best")
    store.set_policy("lru")
    store.close()
