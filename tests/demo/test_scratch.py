"""Folders of the demonstration: gone with it, and swept up after it when it was killed."""

import os
import subprocess
import sys
from pathlib import Path

from tierkv.demo import models
from tierkv.demo.scratch import Scratch, sweep

HOLD = """
import pathlib, sys, time
from tierkv.demo.scratch import Scratch
print(Scratch("demo-", pathlib.Path(sys.argv[1])).path, flush=True)
time.sleep(600)
"""


def held_by_another(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(parent)], stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def test_removed_scratch_leaves_nothing(tmp_path: Path):
    scratch = Scratch("demo-", tmp_path)
    assert scratch.path.stat().st_mode & 0o777 == 0o700
    (scratch.path / "token").write_text("secret")
    scratch.remove()
    scratch.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_what_killed_processes_left_is_swept(tmp_path: Path):
    process, theirs = held_by_another(tmp_path)
    mine = Scratch("demo-", tmp_path)
    strange = tmp_path / "demo-without-a-lock"
    strange.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "in-use").touch()
    (tmp_path / "demo-link").symlink_to(elsewhere)
    (tmp_path / "demo-file").touch()
    assert sweep("demo-", tmp_path) == []
    process.kill()
    process.wait()
    assert sweep("demo-", tmp_path) == [theirs]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {mine.path.name, "demo-without-a-lock", "elsewhere", "demo-link", "demo-file"}
    assert (elsewhere / "in-use").exists()
    mine.remove()


def test_folder_of_another_user_is_not_touched(tmp_path: Path, monkeypatch):
    process, theirs = held_by_another(tmp_path)
    process.kill()
    process.wait()
    monkeypatch.setattr("tierkv.demo.scratch.os.geteuid", lambda: os.getuid() + 1)
    assert sweep("demo-", tmp_path) == []
    assert theirs.exists()


def test_making_a_model_sweeps_earlier_revisions_and_what_a_kill_left(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(models.paths, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(models, "_REVISION", "v3")
    monkeypatch.setattr(models, "_write_hybrid", lambda folder: (folder / "config.json").touch())
    for revision in ("v2", "v4", "other"):
        (tmp_path / "models" / revision / "hybrid-8l-f32").mkdir(parents=True)
    folder = models.model_folder("hybrid")
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    kept = {path.parent.name for path in (tmp_path / "models").glob("*/hybrid-8l-f32")}
    assert kept == {"v3", "v4", "other"}
    assert [path.name for path in folder.parent.iterdir()] == ["hybrid-8l-f32"]
