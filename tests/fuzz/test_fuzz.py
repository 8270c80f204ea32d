"""A few hundred mutated messages at every reader and server, from the committed seeds; see ``tierkv bench fuzz``."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench"))

import _fuzzing as fuzzing  # noqa: E402

MESSAGES = 250
SEEDS = Path(__file__).with_name("seeds")


@pytest.mark.slow
def test_no_message_crashes_hangs_or_eats_memory():
    """Another seed each time; a fault is printed with its message and the seed."""
    seed = random.SystemRandom().randrange(1 << 30)
    command = [
        sys.executable,
        str(ROOT / "bench" / "fuzz.py"),
        "--messages",
        str(MESSAGES),
        "--seed",
        str(seed),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert done.stdout, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert [(each["name"], each["faults"]) for each in report["targets"] if each["faults"]] == [], f"seed {seed}"
    assert done.returncode == 0
    assert report["messages"] >= MESSAGES
    assert report["lines"] > 3000


def test_seeds_are_small_and_of_targets_that_exist():
    folders = [path for path in SEEDS.iterdir() if path.is_dir()]
    assert {"record", "recording", "handoff-agent", "handoff-hook", "vault-VaultService-Probe"} <= {
        f.name for f in folders
    }
    files = [path for folder in folders for path in folder.iterdir()]
    assert all(path.stat().st_size <= 4096 for path in files)
    assert sum(path.stat().st_size for path in files) < 512 << 10


# --- the fuzzer itself --------------------------------------------------------------------------------


class Planted:
    """Fails on one byte that only a message which passed three tests may have."""

    name = "planted"

    def examples(self):
        return [b"abcd"]

    def mutators(self):
        return ()

    def feed(self, data: bytes) -> str:
        from tierkv.units import parse_size

        if data[:1] == b"c":
            raise ZeroDivisionError("planted")
        try:
            parse_size(data.decode("latin-1"))
        except ValueError:
            return "no_size"
        return "ok"

    def close(self):
        pass


def test_it_finds_what_was_planted_and_grows_its_corpus():
    with fuzzing.Coverage() as coverage:
        found = fuzzing.fuzz([Planted()], 3000, seed=1, coverage=coverage)["planted"]
    assert any("ZeroDivisionError: planted" in fault for fault in found.faults)
    assert coverage.lines
    assert found.outcomes["no_size"] > 0
    assert found.messages == 3001


def test_the_same_seed_makes_the_same_messages():
    class Listening(Planted):
        def __init__(self):
            self.heard = []

        def feed(self, data: bytes) -> str:
            self.heard.append(data)
            return "ok"

    runs = []
    for _ in range(2):
        target = Listening()
        with fuzzing.Coverage() as coverage:
            fuzzing.fuzz([target], 200, seed=5, coverage=coverage)
        runs.append(target.heard)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 100
