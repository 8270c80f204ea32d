"""Files that are not as they were written: every kind of place in every kind of file, flipped, cut and lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from disk_stores import KIB, abandon, flip, open_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_records import get, make_chain, make_record, put

from tierkv.codec.record import verify_record
from tierkv.errors import CorruptionError, StartupError
from tierkv.rpc.outgo import open_verified
from tierkv.store.base import Selector
from tierkv.store.log.check import FolderCheck
from tierkv.store.log.format import ALIGN, HEAD_BYTES, RECORD_AT, entry_blocks

RECORDS = make_chain(3, tail=30, payload_bytes=20 * KIB, segments=2)
PURGED = make_record([7], payload_bytes=20 * KIB, model="gone")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of four records, one purged between them, closed well; and the blocks where the records lie."""
    folder = tmp_path_factory.mktemp("whole")
    store = open_store(folder)
    places = {}
    for record in (RECORDS[0], RECORDS[1], PURGED, RECORDS[2], RECORDS[3]):
        put(store, record)
        places[record.key] = store._catalog.index.place[store._catalog.index.find(record.key)] & 0xFFFFFFFF
    store.purge(store.preview_purge(Selector(model="gone")).token)
    store.close()
    store = open_store(folder)
    store.close()
    return folder, places


def copy_of(whole: Path, target: Path) -> Path:
    shutil.copytree(whole, target / "copy", dirs_exist_ok=True)
    return target / "copy"


def served(store, record) -> bytes | None:
    """As a vault serves: verified before the first byte leaves."""
    reader = open_verified(store, record.key, lambda: None)
    if isinstance(reader, str):
        return None
    with reader:
        return reader.read(0, reader.size_bytes)


def check_served(folder: Path) -> tuple[list[int], object]:
    """Which records are served, every one byte for byte, and the statistics."""
    store = open_store(folder)
    try:
        found = [served(store, record) for record in RECORDS]
        assert all(data in (None, record.data) for data, record in zip(found, RECORDS, strict=True))
        assert get(store, PURGED.key) is None
        return [n for n, data in enumerate(found) if data is not None], store.stats()
    finally:
        store.close()


PARTS = {
    "head": 20,
    "head check": 60,
    "mark": HEAD_BYTES,
    "pin": HEAD_BYTES + 1,
    "mark check": HEAD_BYTES + 28,
    "record frame": RECORD_AT + 10,
    "token ids": RECORD_AT + 96 + 220,
    "layout": RECORD_AT + 96 + 2240,
    "segment frame": RECORD_AT + 2450,
    "payload": RECORD_AT + 9000,
    "last payload byte": -17,
    "end": -10,
    "end check": -2,
}


@pytest.mark.parametrize("hints", [True, False])
@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_bit_costs_its_record_and_no_other(whole, tmp_path, part, hints):
    folder = copy_of(whole[0], tmp_path)
    victim = RECORDS[1]
    at = whole[1][victim.key] * ALIGN + PARTS[part]
    if PARTS[part] < 0:
        at += RECORD_AT + len(victim.data) + 16
    flip(folder / "00000001.seg", at)
    if not hints:
        (folder / "00000001.hint").unlink()
    left, stats = check_served(folder)
    # With a hint the data is not read at the start; of an entry's end nothing depends on it then.
    if hints and part.startswith("end"):
        assert left == [0, 1, 2, 3]
    else:
        assert left == [0, 2, 3]
        assert stats.quarantined_records == 1
    findings = [p.finding for p in FolderCheck(folder, repair=False).run() if p.finding]
    again, _ = check_served(folder)
    assert again == left
    assert not [f for f in findings if f.reason == "unknown_file"]


@pytest.mark.parametrize("part", PARTS)
def test_fsck_finds_what_was_broken_by_hand_and_repairs_it(whole, tmp_path, part):
    folder = copy_of(whole[0], tmp_path)
    victim = RECORDS[1]
    block = whole[1][victim.key]
    at = block * ALIGN + PARTS[part] + (RECORD_AT + len(victim.data) + 16 if PARTS[part] < 0 else 0)
    flip(folder / "00000001.seg", at)
    looked = [p.finding for p in FolderCheck(folder, repair=False).run() if p.finding]
    assert [(f.file, f.offset, f.repaired) for f in looked] == [("00000001.seg", block * ALIGN, False)]
    assert looked[0].size_bytes == entry_blocks(len(victim.data)) * ALIGN
    repaired = [p.finding for p in FolderCheck(folder, repair=True).run() if p.finding]
    assert [f.repaired for f in repaired] == [True]
    last = list(FolderCheck(folder, repair=False).run())[-1]
    assert (last.finding, last.records, last.done_bytes) == (None, 3, last.total_bytes)
    left, stats = check_served(folder)
    assert left == [0, 2, 3]
    assert stats.quarantined_records == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), name=st.sampled_from(["seg", "hint", "meta"]))
def test_any_flipped_bit_anywhere_serves_nothing_wrong(whole, tmp_path, share, bit, name):
    folder = copy_of(whole[0], tmp_path)
    path = folder / {"seg": "00000001.seg", "hint": "00000001.hint", "meta": "vault.meta"}[name]
    flip(path, int(path.stat().st_size * share), 1 << bit)
    left, _ = check_served(folder)
    assert len(left) >= (3 if name == "seg" else 4)
    shutil.rmtree(folder)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), name=st.sampled_from(["seg", "hint", "meta"]))
def test_any_truncation_serves_what_is_whole(whole, tmp_path, share, name):
    folder = copy_of(whole[0], tmp_path)
    path = folder / {"seg": "00000001.seg", "hint": "00000001.hint", "meta": "vault.meta"}[name]
    size = int(path.stat().st_size * share)
    with path.open("r+b") as file:
        file.truncate(size)
    left, _ = check_served(folder)
    ends = [whole[1][record.key] * ALIGN + RECORD_AT + len(record.data) for record in RECORDS]
    # A record whose last bytes were spared is served or not: its end is looked at only where there is no hint.
    spared = [n for n, end in enumerate(ends) if name != "seg" or end <= size]
    whole_ones = [n for n, end in enumerate(ends) if name != "seg" or end + 16 <= size]
    assert left in (spared, whole_ones)
    shutil.rmtree(folder)


def test_a_write_cut_short_is_cut_off_and_nothing_is_reported_as_damage(tmp_path):
    store = open_store(tmp_path)
    for record in RECORDS[:2]:
        put(store, record)
    path = tmp_path / "00000001.seg"
    whole_size = path.stat().st_size
    put(store, RECORDS[2])
    abandon(store)
    with path.open("r+b") as file:
        file.truncate(whole_size + 9000)
    findings = [p.finding for p in FolderCheck(tmp_path, repair=False).run() if p.finding]
    assert [f.reason for f in findings] == ["torn_tail"]
    left, stats = check_served(tmp_path)
    assert left == [0, 1]
    assert (stats.disk.torn, stats.disk.damaged, stats.quarantined_records) == (1, 0, 0)
    assert path.stat().st_size <= whole_size + ALIGN


@pytest.mark.parametrize("loss", ["hint", "meta", "lock", "all but data"])
def test_the_index_comes_from_the_data_alone(whole, tmp_path, loss):
    folder = copy_of(whole[0], tmp_path)
    names = {"hint": ["00000001.hint"], "meta": ["vault.meta"], "lock": ["vault.lock"]}
    for name in names.get(loss, ["00000001.hint", "vault.meta", "vault.lock"]):
        (folder / name).unlink()
    assert check_served(folder)[0] == [0, 1, 2, 3]


def test_a_lost_meta_refuses_every_writer_from_before(whole, tmp_path):
    folder = copy_of(whole[0], tmp_path)
    (folder / "vault.meta").write_bytes(b"{}")
    store = open_store(folder)
    assert store.epoch > 1
    assert "damaged vault.meta" in [a["reason"] for kind, _, a in store.events() if kind == "quarantine"]
    store.close()


def test_a_hint_that_was_put_back_is_not_believed(whole, tmp_path):
    folder = copy_of(whole[0], tmp_path)
    old = (folder / "00000001.hint").read_bytes()
    store = open_store(folder)
    store.purge(store.preview_purge(Selector()).token)
    abandon(store)
    (folder / "00000001.hint").write_bytes(old)
    left, stats = check_served(folder)
    assert left == []
    assert stats.quarantined_records == 0


def test_a_hint_of_another_folder_with_the_same_generation_serves_no_wrong_byte(whole, tmp_path):
    """The worst case: a hint that passes every check of its own, and data that it does not belong to."""
    folder = copy_of(whole[0], tmp_path)
    other = tmp_path / "other"
    store = open_store(other)
    for seed, record in enumerate(RECORDS):
        put(store, make_record(record.header.tokens[:50], payload_bytes=20 * KIB, segments=2, seed=seed + 50))
    store.close()
    shutil.copy(other / "00000001.seg", folder / "00000001.seg")
    check_served(folder)


def test_records_that_lie_in_another_segment_are_not_believed(whole, tmp_path):
    folder = copy_of(whole[0], tmp_path)
    (folder / "00000001.seg").rename(folder / "00000002.seg")
    (folder / "00000001.hint").unlink()
    left, stats = check_served(folder)
    assert left == []
    assert stats.disk.damaged >= 1


@pytest.mark.parametrize("file", ["vault.meta", "00000001.seg"])
def test_another_format_is_refused_with_the_way_out(whole, tmp_path, file, monkeypatch):
    from tierkv.store.log import folder as folder_module
    from tierkv.store.log import format as format_module
    from tierkv.store.log.format import SegmentHead

    folder = copy_of(whole[0], tmp_path)
    monkeypatch.setattr(folder_module, "FORMAT", 2)
    monkeypatch.setattr(format_module, "FORMAT", 2)
    if file == "vault.meta":
        (folder / file).write_bytes(folder_module.Meta(3).pack())
    else:
        with (folder / file).open("r+b") as data:
            data.write(SegmentHead(1, 0, 0.0).pack())
    monkeypatch.undo()
    with pytest.raises(StartupError, match=r"format 2; this build reads 1.*tierkv vault export"):
        open_store(folder)
    with pytest.raises(StartupError, match="format 2"):
        list(FolderCheck(folder, repair=True).run())


def test_fsck_makes_a_lost_head_and_meta_anew(whole, tmp_path):
    folder = copy_of(whole[0], tmp_path)
    flip(folder / "00000001.seg", 2)
    flip(folder / "vault.meta", 3)
    (folder / "vault.meta.new").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    (folder / "00000009.hint").write_bytes(b"x")
    found = {(f.finding.file, f.finding.reason) for f in FolderCheck(folder, repair=True).run() if f.finding}
    assert found == {
        ("00000001.seg", "damaged_header"), ("vault.meta", "damaged"), ("vault.meta.new", "left_over"),
        ("notes.txt", "unknown_file"), ("00000009.hint", "left_over"),
    }  # fmt: skip
    left = [(f.finding.file, f.finding.reason) for f in FolderCheck(folder, repair=False).run() if f.finding]
    assert left == [("notes.txt", "unknown_file")]
    assert json.loads((folder / "vault.meta").read_bytes().split(b"\n")[0])["epoch"] > 1
    assert check_served(folder)[0] == [0, 1, 2, 3]


def test_fsck_leaves_a_folder_in_use_and_what_is_no_vault_alone(tmp_path):
    store = open_store(tmp_path / "v")
    with pytest.raises(StartupError, match="open: two vaults cannot share one"):
        FolderCheck(tmp_path / "v", repair=True)
    store.close()
    with pytest.raises(StartupError, match="holds no vault"):
        FolderCheck(tmp_path, repair=True)
    with pytest.raises(StartupError, match="no vault folder"):
        FolderCheck(tmp_path / "nowhere", repair=False)


def test_a_record_found_damaged_while_served_is_gone_for_good(whole, tmp_path):
    folder = copy_of(whole[0], tmp_path)
    store = open_store(folder)
    flip(folder / "00000001.seg", whole[1][RECORDS[2].key] * ALIGN + RECORD_AT + 9000)
    assert served(store, RECORDS[2]) is None
    assert store.missing_reason(RECORDS[2].key) == "quarantined"
    with pytest.raises(CorruptionError):
        verify_record(RECORDS[2].data[:-1])
    abandon(store)
    assert check_served(folder)[0] == [0, 1, 3]
    assert put(open_store(folder), RECORDS[2]) == "stored"
