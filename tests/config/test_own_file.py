"""An agent writes what it accepted into its own file, line by line, or says why its restart will not know of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.config.load import Flag
from tierkv.config.own_file import NO_FILE, OwnFile, without_change
from tierkv.config.running import Base
from tierkv.units import exact_duration, exact_size, parse_duration, parse_size

TEXT = """\
# the night watch edits here
[vault]
max_bytes = "16MiB"   # and here
# undo_s = 60
"""
MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tierkv.toml"
    path.write_text(TEXT)
    return path


def own(path: Path | None, flags: dict[str, Flag] | None = None, environ: dict[str, str] | None = None) -> OwnFile:
    return OwnFile(Base(path, flags or {}, environ or {}))


def test_a_plan_writes_nothing_and_save_changes_only_the_keys_lines(path: Path) -> None:
    wanted = {"vault.max_bytes": 8 * MIB, "vault.undo_s": 5.0}
    planned = own(path).plan(wanted)
    assert planned.changes
    assert not planned.unsaved
    assert path.read_text() == TEXT
    saved = own(path).save(wanted)
    assert saved.unsaved == {}
    written = TEXT.replace("16MiB", "8MiB").replace("# undo_s = 60\n", "# undo_s = 60\nundo_s = '5s'\n")
    assert path.read_text() == written.replace("'5s'", '"5s"')
    assert path.with_name("tierkv.toml.bak").read_text() == TEXT


def test_what_the_file_says_already_is_not_written_again(path: Path) -> None:
    before = path.stat().st_mtime_ns
    saved = own(path).save({"vault.max_bytes": 16 * MIB})
    assert not saved.changes
    assert not saved.unsaved
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("flags", "environ", "reason"),
    [
        ({"vault.max_bytes": Flag("--max-bytes", "16MiB")}, {}, "--max-bytes wins at its start"),
        ({}, {"TIERKV_VAULT__MAX_BYTES": "16MiB"}, "$TIERKV_VAULT__MAX_BYTES wins at its start"),
    ],
)
def test_what_wins_over_the_file_is_named_and_the_file_stays(path: Path, flags, environ, reason) -> None:
    saved = own(path, flags, environ).save({"vault.max_bytes": 8 * MIB, "vault.undo_s": 5.0})
    assert saved.unsaved == {"vault.max_bytes": reason}
    assert "16MiB" in path.read_text()
    assert 'undo_s = "5s"\n' in path.read_text()


def test_without_a_file_nothing_outlives_the_restart() -> None:
    assert own(None).save({"vault.undo_s": 5.0}).unsaved == {"vault.undo_s": NO_FILE}
    assert own(None).take_back(own(None).save({"vault.undo_s": 5.0}))


def test_a_faulty_file_is_left_to_people(path: Path) -> None:
    path.write_text(TEXT + "undo_s = 'never'\n")
    (reason,) = own(path).save({"vault.max_bytes": 8 * MIB}).unsaved.values()
    assert reason.startswith("its file is faulty: ")
    assert "16MiB" in path.read_text()


@pytest.mark.parametrize(
    ("key", "value"), [("security.insecure", True), ("security.token_file", "/tmp/t"), ("vault.persist_path", "/tmp/v")]
)
def test_who_may_connect_and_where_files_are_is_not_written_from_afar(path: Path, key: str, value: object) -> None:
    (reason,) = own(path).save({key: value}).unsaved.values()
    assert "by hand" in reason
    assert path.read_text() == TEXT


def test_a_folder_that_may_not_be_written_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr(os, "access", lambda place, _: Path(place) != path.parent)
    (reason,) = own(path).save({"vault.max_bytes": 8 * MIB}).unsaved.values()
    assert reason == f"the agent may not write {path}"


def test_a_disk_that_is_full_is_said_and_the_file_is_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    saved = own(path).save({"vault.max_bytes": 8 * MIB})
    assert saved.unsaved == {"vault.max_bytes": f"{path} cannot be written: No space left on device"}
    assert not saved.changes
    assert path.read_text() == TEXT


def test_taking_back_undoes_its_own_lines_and_keeps_what_others_wrote_meanwhile(path: Path) -> None:
    saved = own(path).save({"vault.max_bytes": 8 * MIB, "vault.undo_s": 5.0})
    path.write_text(path.read_text() + "[console]\nread_only = true\n")
    assert own(path).take_back(saved)
    assert path.read_text() == TEXT + "[console]\nread_only = true\n"
    saved = own(path).save({"vault.max_bytes": 8 * MIB})
    path.write_text(path.read_text().replace("8MiB", "9MiB"))
    assert not own(path).take_back(saved)
    assert "9MiB" in path.read_text()


def test_a_line_that_is_there_twice_is_not_guessed_at() -> None:
    assert without_change("a\nb\nb\n", "a\n", "a\nb\n") is None
    assert without_change("a\nc\nb\n", "a\n", "a\nb\n") == "a\nc\n"
    assert without_change("a\nb\n", "a\n", "a\nb\n") == "a\n"


def test_agents_that_share_a_file_do_not_lose_each_others_lines(path: Path) -> None:
    """Sixteen at once, each with a key of its own."""
    keys = [
        "vault.undo_s", "vault.ttl_s", "vault.dead_after_s", "vault.port", "vault.sync_s", "inference.min_store_tokens",
        "inference.min_restore_tokens", "inference.port", "inference.kv_dim", "inference.memory_threshold",
        "telemetry.events_kept", "console.refresh_hz", "vault.max_bytes", "inference.connect_timeout_s",
        "inference.probe_timeout_s", "inference.frame_timeout_s",
    ]  # fmt: skip
    values = {key: 3 + number for number, key in enumerate(keys)}
    values |= {"inference.memory_threshold": 0.3, "vault.max_bytes": 3 * MIB, "console.refresh_hz": 3}
    barrier, outcomes = threading.Barrier(len(keys)), []

    def save(key: str) -> None:
        barrier.wait()
        outcomes.append(own(path).save({key: values[key]}))

    threads = [threading.Thread(target=save, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(not saved.unsaved for saved in outcomes)
    assert own(path).plan(values).changes is False
    for saved in outcomes:
        assert own(path).take_back(saved)
    assert path.read_text().splitlines()[:4] == TEXT.splitlines()
    assert not own(path).plan({"vault.max_bytes": 16 * MIB}).changes


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, 0), (1000, "1kB"), (8 * MIB, "8MiB"), (3 << 29, "1536MiB"), (24 * 10**9, "24GB"), (64 << 40, "64TiB"),
        (1_024_000, "1000KiB"), (5 * 10**9 + 1, 5 * 10**9 + 1),
    ],
)  # fmt: skip
def test_a_size_is_written_with_the_unit_that_loses_nothing(size: int, text: object) -> None:
    assert exact_size(size) == text
    assert parse_size(exact_size(size)) == size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, 0), (30 * 86400.0, "30d"), (12 * 3600, "12h"), (60.0, "1min"), (90.0, "90s"), (86_400_123.0, "86400123s"),
        (1.5, "1.5s"), (0.25, "250ms"), (0.0005, "0.5ms"),
    ],
)  # fmt: skip
def test_a_duration_is_written_with_the_unit_that_loses_nothing(seconds: float, text: object) -> None:
    assert exact_duration(seconds) == text
    assert parse_duration(exact_duration(seconds)) == seconds


@given(st.floats(0, 1e10) | st.integers(0, 10**10), st.integers(0, 1 << 60))
def test_what_is_written_is_read_as_the_same(seconds: float, size: int) -> None:
    assert parse_duration(exact_duration(seconds)) == seconds
    assert parse_size(exact_size(size)) == size
