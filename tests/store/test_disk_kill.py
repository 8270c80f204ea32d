"""A store's process is killed a hundred times in a mixed load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "vault_kill.py"


def kill(*arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(BENCH), *arguments, "--json"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "tierkv.bench.vault-kill/1"
    assert (found["damaged_served"], found["resurrected"], found["index_differs"]) == (0, 0, 0)
    assert found["acknowledged"] > 20
    assert found["purges"] > 0
    return found


def test_a_hundred_kills_lose_nothing_serve_nothing_damaged_and_bring_nothing_back():
    found = kill("--kills", "100")
    assert found["kills"] == 100
    assert found["acknowledged_lost"] == 0


def test_what_is_acknowledged_from_memory_may_be_lost_but_is_never_damaged_and_nothing_purged_is_back():
    found = kill("--kills", "40", "--durability", "none")
    assert found["acknowledged_lost"] < found["acknowledged"] / 4
