"""Real file systems that are full or read-only, mounted in a namespace of the test's own where that is permitted."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_PERMITTED = (
    shutil.which("unshare") is not None
    and subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "t", "/mnt"], capture_output=True).returncode == 0
)
pytestmark = pytest.mark.skipif(not _PERMITTED, reason="no mount namespace of one's own here")

_BEGIN = f"""
import os, subprocess, sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from pathlib import Path
from disk_stores import MIB, on_disk, open_store
from store_records import get, make_record, put
from tierkv.agents.vault import self_test
from tierkv.errors import StoreUnwritable
from tierkv.store.base import Selector
from tierkv.store.log.check import FolderCheck
from tierkv.store.log.files import Disk
folder = Path(sys.argv[1])
def mount(*options):
    subprocess.run(["mount", *options, str(folder)], check=True)
def findings(repair=False):
    return [step.finding.reason for step in FolderCheck(folder / "v", repair=repair).run() if step.finding]
mount("-t", "tmpfs", "-o", "size=6m", "tmpfs")
records = [make_record([n], payload_bytes=200_000, seed=n) for n in range(60)]
class Blind(Disk):
    def free_bytes(self, folder):
        return 1 << 40
"""


def run(script: str, folder: Path) -> None:
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", _BEGIN + script, str(folder)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_small_file_system_is_shared_with_others_and_never_filled(tmp_path):
    run(
        """
store = open_store(folder / "v", disk_bytes=1 << 40, min_free_bytes=MIB)
for record in records:
    assert put(store, record) == "stored"
    assert os.statvfs(folder).f_bavail * 4096 >= MIB - 300_000  # its count of free pages wanders
assert 10 < store.stats().records < 30
assert store.stats().refusals == {}
(folder / "somebody else's").write_bytes(bytes(MIB - 100_000))
more = [make_record([100 + n], payload_bytes=200_000, seed=n) for n in range(10)]
assert [put(store, record) for record in more] == ["stored"] * 10
assert os.statvfs(folder).f_bavail * 4096 >= MIB - 300_000  # its count of free pages wanders
assert 10 < store.stats().records < 22
assert all(get(store, record.key) == record.data for record in more[-3:])
store.close()
assert findings() == []
""",
        tmp_path,
    )


def test_a_file_system_that_somebody_else_filled_refuses_and_serves(tmp_path):
    run(
        """
store = open_store(folder / "v", disk_bytes=1 << 40, min_free_bytes=0, disk=Blind(), ram_bytes=MIB)
taken = []
for record in records:
    try:
        put(store, record)
    except StoreUnwritable as error:
        assert error.reason == "disk_full", error
        break
    taken.append(record)
assert 15 < len(taken) < 40, len(taken)
assert store.stats().disk.problem == "disk_full"
self_test(store)
try:
    put(store, records[-1])
    raise SystemExit("a full disk took a record")
except StoreUnwritable:
    pass
assert all(get(store, record.key) == record.data for record in taken)
try:
    store.purge(store.preview_purge(Selector(prefixes=(taken[0].key,))).token)
except StoreUnwritable:
    pass
assert get(store, taken[0].key) is None
for record in taken[1:6]:
    store.discard(record.key)
assert put(store, records[-1]) == "stored"
assert store.stats().disk.problem == ""
store.close()
assert findings() == []
store = open_store(folder / "v", disk_bytes=1 << 40, min_free_bytes=0)
kept = [*taken[6:], records[-1]]
assert all(get(store, record.key) == record.data for record in kept)
assert store.stats().disk.damaged == 0
store.close()
""",
        tmp_path,
    )


def test_a_full_file_system_is_opened_and_served(tmp_path):
    run(
        """
store = open_store(folder / "v", disk_bytes=1 << 40, min_free_bytes=0)
for record in records[:5]:
    put(store, record)
store.close()
with (folder / "filler").open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
store = open_store(folder / "v", disk_bytes=1 << 40, min_free_bytes=0)
store.pin(Selector())
assert all(get(store, record.key) == record.data for record in records[:5])
try:
    put(store, records[6])
    raise SystemExit("a full disk took a record")
except StoreUnwritable as error:
    assert error.reason == "disk_full", error
assert store.stats().refusals == {"disk_full": 1}
self_test(store)
store.close()
assert findings() == []
""",
        tmp_path,
    )


def test_a_read_only_mount_is_served_takes_nothing_and_can_be_checked(tmp_path):
    run(
        """
store = open_store(folder / "v")
for record in records[:5]:
    put(store, record)
store.purge(store.preview_purge(Selector(prefixes=(records[4].key,))).token)
store.close()
before = {path.name: path.read_bytes() for path in (folder / "v").iterdir()}
mount("-o", "remount,ro")
store = open_store(folder / "v")
assert [get(store, record.key) for record in records[:5]] == [*(r.data for r in records[:4]), None]
try:
    put(store, records[6])
    raise SystemExit("a read-only disk took a record")
except StoreUnwritable as error:
    assert error.reason == "read_only", error
for change in (lambda: store.pin(Selector()), lambda: store.purge(store.preview_purge(Selector()).token)):
    try:
        change()
        raise SystemExit("a read-only disk was changed")
    except StoreUnwritable as error:
        assert error.reason == "read_only", error
self_test(store)
store.sweep()
list(store.compact())
assert store.stats().disk.problem == "read_only"
assert [step.finding for step in store.check(repair=False) if step.finding] == []
store.close()
assert findings() == []
assert before == {path.name: path.read_bytes() for path in (folder / "v").iterdir()}
""",
        tmp_path,
    )
