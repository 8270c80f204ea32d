"""Agents in processes of their own, for benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

TOKEN = "benchmark-token-benchmark"
RUNNER = """
import asyncio, json, pathlib, sys
kind, options = sys.argv[1], json.loads(sys.argv[2])
options["ready_file"] = pathlib.Path(options["ready_file"])
if kind == "vault":
    from tierkv.agents.vault import VaultOptions, run_vault
    asyncio.run(run_vault(VaultOptions(**options)))
else:
    from tierkv.agents.inference import InferenceOptions, run_inference
    options["socket"] = pathlib.Path(options["socket"])
    asyncio.run(run_inference(InferenceOptions(**options)))
"""


def start(kind: str, home: Path, **options: object) -> tuple[subprocess.Popen[bytes], int]:
    """A ready "vault" or "inference" agent, named ``options["name"]``, and its port; its log is in ``home``."""
    ready = home / f"{options['name']}.port"
    words = {"port": 0, "token": TOKEN, "ready_file": str(ready), **options}
    with (home / f"{options['name']}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, kind, json.dumps(words)], stdout=log, stderr=log,
            env={**os.environ, "TIERKV_HOME": str(home), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    until = time.monotonic() + 120
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"the {kind} did not start")
        time.sleep(0.02)
    return process, int(ready.read_text())
