"""A store's process is killed a hundred times in a mixed load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "vault_kill.py"


def test_a_hundred_kills_lose_nothing_serve_nothing_damaged_and_bring_nothing_back():
    done = subprocess.run(
        [sys.executable, str(BENCH), "--kills", "100", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "tierkv.bench.vault-kill/1"
    assert found["kills"] == 100
    assert (found["acknowledged_lost"], found["damaged_served"], found["resurrected"]) == (0, 0, 0)
    assert found["index_differs"] == 0
    assert found["acknowledged"] > 20
    assert found["purges"] > 0
