"""The store on disk against a small model: whatever is done, and wherever the process dies, what was acknowledged is
there, what was purged is not, and nothing else than what was stored is ever served."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from disk_stores import abandon, open_store
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_records import ROOT, FakeClock, get, make_chain, make_record, put

from tierkv.errors import StaleToken
from tierkv.identity.blocks import BlockKey
from tierkv.store.base import Selector
from tierkv.store.log.files import Disk

OTHER = BlockKey(b"\x02" * 32)


class Crash(BaseException):
    """The process ends here."""


class CrashingDisk(Disk):
    """Every operation is a failpoint: at the one that is armed the process dies, before, after or in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1
        self.share = 0.0
        self.operations = 0

    def arm(self, operations: int, share: float) -> None:
        self.left, self.share = operations, share

    def _step(self) -> bool:
        """Whether the process dies in this operation."""
        if self.left == -2:
            raise Crash
        self.operations += 1
        if self.left < 0:
            return False
        self.left -= 1
        if self.left >= 0:
            return False
        self.left = -2
        return True

    def _die_around(self, work):
        if not self._step():
            return work()
        if self.share >= 0.5:
            work()
        raise Crash

    def write(self, fd, buffers, offset):
        if not self._step():
            return super().write(fd, buffers, offset)
        data = b"".join(bytes(buffer) for buffer in buffers)
        if len(data) <= 512:  # inside one sector: all or nothing
            self.share = round(self.share)
        super().write(fd, [data[: int(len(data) * self.share)]], offset)
        raise Crash

    def punch(self, fd, offset, length):
        return self._die_around(lambda: Disk.punch(self, fd, offset, length))

    def truncate(self, fd, size):
        return self._die_around(lambda: Disk.truncate(self, fd, size))

    def unlink(self, path):
        return self._die_around(lambda: Disk.unlink(self, path))

    def rename(self, old, new):
        return self._die_around(lambda: Disk.rename(self, old, new))

    def sync_folder(self, folder):
        return self._die_around(lambda: None)

    def sync(self, fd):
        return self._die_around(lambda: None)


class NoPunching(CrashingDisk):
    def punch(self, fd, offset, length):
        return False


def _universe():
    found = []
    for root, name in ((ROOT, "m"), (OTHER, "o")):
        for record in make_chain(2, tail=5, root=root, model=name, payload_bytes=9000):
            worse = make_record(
                record.header.tokens, record.header.parent, start=record.header.start, root=root, model=name,
                fidelity=20, seed=77, payload_bytes=7000,
            )  # fmt: skip
            found.append((record, worse))
    return found


UNIVERSE = _universe()
HEADER_OF = {record.key: record.header for record, _ in UNIVERSE}
VERSIONS = {record.key: {record.data: 0, worse.data: 20} for record, worse in UNIVERSE}
NUMBERS = st.integers(0, len(UNIVERSE) - 1)


class DiskMachine(RuleBasedStateMachine):
    """``seen``: key -> (data, pinned) of what must be there. A crash leaves open what it was busy with."""

    disk_class = CrashingDisk
    durability = "batched"

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tierkv-machine-"))
        self.clock = FakeClock()
        self.seen: dict[BlockKey, tuple[bytes, bool]] = {}
        self.undo: list[tuple[str, dict, float]] = []
        self._open()

    def _open(self) -> None:
        self.disk = self.disk_class()
        self.store = open_store(
            self.folder, clock=self.clock, disk=self.disk, segment_bytes=96 << 10, disk_bytes=2 << 20,
            durability=self.durability,
        )  # fmt: skip
        if self.store._behind is not None:
            self.store._behind.stop()  # it writes when the machine says so
            self.store._behind._cap_bytes = 30_000

    def teardown(self) -> None:
        abandon(self.store)
        shutil.rmtree(self.folder)

    def _do(self, work, doubted) -> object:
        """The result, or None after a crash that left the doubted keys open; then the store has been opened again."""
        try:
            return work()
        except Crash:
            self._reopen(doubted)
            return None

    def _reopen(self, doubted=()) -> None:
        index, behind = self.store._catalog.index, self.store._behind
        unwritten = {index.keys[row] for row in behind._rows} if behind else set()
        abandon(self.store)
        self.undo.clear()
        self._open()
        for key in {*doubted, *(unwritten & self.seen.keys())}:
            data = get(self.store, key, count_hit=False)
            self.seen.pop(key, None)
            if data is not None:
                assert data in VERSIONS[key]
                self.seen[key] = (data, self.store.lookup([key])[0].pinned)

    # --- what may happen --------------------------------------------------------------------------

    @rule(operations=st.integers(0, 12), share=st.sampled_from([0.0, 0.001, 0.3, 0.999, 1.0]))
    def a_crash_is_near(self, operations, share):
        self.disk.arm(operations, share)

    @rule(number=NUMBERS, worse=st.booleans())
    def put(self, number, worse):
        record = UNIVERSE[number][worse]
        outcome = self._do(lambda: put(self.store, record), [record.key])
        if outcome is None:
            return
        old = self.seen.get(record.key)
        if old is not None and VERSIONS[record.key][old[0]] <= record.header.fidelity:
            assert outcome == "present"
            return
        assert outcome == ("stored" if old is None else "replaced")
        self.seen[record.key] = (record.data, old is not None and old[1])

    @rule(number=NUMBERS)
    def get(self, number):
        key = UNIVERSE[number][0].key
        data = get(self.store, key)
        assert data == self.seen.get(key, (None,))[0]

    @rule(root=st.sampled_from([ROOT, OTHER]), pinned=st.booleans())
    def pin(self, root, pinned):
        chosen = [key for key in self.seen if HEADER_OF[key].root == root]
        change = self.store.pin if pinned else self.store.unpin
        if self._do(lambda: change(Selector(root=root)), chosen) is not None:
            for key in chosen:
                self.seen[key] = (self.seen[key][0], pinned)

    def _kept(self) -> set:
        kept = set()
        for key in [key for key, (_, pinned) in self.seen.items() if pinned]:
            while key in self.seen:
                kept.add(key)
                key = HEADER_OF[key].parent
        return kept

    @rule(root=st.sampled_from([b"", ROOT, OTHER]))
    def purge(self, root):
        kept = self._kept()
        chosen = [key for key in self.seen if root in (b"", HEADER_OF[key].root) and key not in kept]
        token = self.store.preview_purge(Selector(root=root)).token
        result = self._do(lambda: self.store.purge(token), chosen)
        if result is not None:
            assert result.records == len(chosen)
            records = {key: self.seen.pop(key) for key in chosen}
            self.undo.append((result.undo_token, records, self.clock.now_s + 60.0))

    @rule(data=st.data())
    def take_back(self, data):
        if not self.undo:
            return
        token, records, _ = self.undo.pop(data.draw(st.integers(0, len(self.undo) - 1)))
        result = self._do(lambda: self.store.undo_purge(token), list(records))
        if result is None:
            return
        for key, (old, pinned) in records.items():
            now = self.seen.get(key)
            if now is None or VERSIONS[key][now[0]] > VERSIONS[key][old]:
                self.seen[key] = (old, pinned)

    @rule(blocks=st.integers(1, 12))
    def evict(self, blocks):
        def work():
            with self.store._lock:
                self.store._catalog.evict(blocks)
            self.store._bury()
            return True

        before = set(self.seen)
        done = self._do(work, before)
        if done is not None:
            for key in before:
                if self.store.lookup([key])[0] is None:
                    del self.seen[key]

    @rule(seconds=st.sampled_from([1.0, 40.0, 70.0]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)
        self._do(lambda: self.store.sweep() or True, [])
        over = [token for token, _, until in self.undo if until < self.clock.now_s]
        self.undo = [each for each in self.undo if each[0] not in over]
        for token in over:
            with pytest.raises(StaleToken):
                self.store.undo_purge(token)

    @rule()
    def write_behind(self):
        self._do(lambda: self.store._write_behind() or True, [])

    @rule()
    def compact(self):
        self._do(lambda: list(self.store.compact()), [])

    @rule()
    def restart(self):
        try:
            self.store.close()
        except Crash:
            self._reopen()
            return
        self.undo.clear()
        self._open()

    @rule(hints=st.booleans())
    def kill(self, hints):
        if not hints:
            for path in self.folder.glob("*.hint"):
                path.unlink()
        self._reopen()

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def memory_says_what_the_model_says(self):
        for key in HEADER_OF:
            entry = self.store.lookup([key])[0]
            seen = self.seen.get(key)
            assert (entry is None) == (seen is None)
            if seen:
                assert (entry.header.fidelity, entry.pinned) == (VERSIONS[key][seen[0]], seen[1])
        assert self.store.stats().quarantined_records == 0

    @invariant()
    def room_is_counted_as_the_system_counts_it(self):
        files = sum(-(-path.stat().st_blocks * 512 // 4096) for path in self.folder.iterdir())
        assert files <= self.store._log.used_blocks


class DiskMachineWithoutPunching(DiskMachine):
    disk_class = NoPunching


class DiskMachineWrittenBehind(DiskMachine):
    """Of what is acknowledged from RAM a crash may lose what is in sight and not written; nothing purged comes back."""

    durability = "none"


DiskMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
DiskMachineWithoutPunching.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
DiskMachineWrittenBehind.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestDiskMachine = DiskMachine.TestCase
TestDiskMachineWithoutPunching = DiskMachineWithoutPunching.TestCase
TestDiskMachineWrittenBehind = DiskMachineWrittenBehind.TestCase
