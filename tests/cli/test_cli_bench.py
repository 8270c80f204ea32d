"""``tierkv bench``: what interrupts it interrupts the benchmark, which leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
_BENCHMARK = """
import time
from _scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "data").touch()
    print("up", flush=True)
    time.sleep(60)
"""
_PROGRAM = """
import pathlib, sys
from tierkv.cli import bench, main
bench._ROOT = pathlib.Path(sys.argv.pop(1))
main.entry()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_benchmark_cleans_up(tmp_path, number, code):
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    (tmp_path / "slow.py").write_text(_BENCHMARK)
    (tmp_path / "_scratch.py").symlink_to(BENCH / "_scratch.py")
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(tmp_path), "bench", "slow"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert len(list(scratch.iterdir())) == 1
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # ctrl-c reaches both
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in err
    assert list(scratch.iterdir()) == []


def test_benchmarks_make_their_folders_in_one_way():
    makers = ("mkdtemp", "TemporaryDirectory")
    own = {path.name for path in BENCH.glob("*.py") if any(maker in path.read_text() for maker in makers)}
    # The fuzzer's targets make theirs inside the one that it has.
    assert own == {"_scratch.py", "fuzz.py", "_fuzz_decoders.py", "_fuzz_servers.py"}
    assert "scratch_folder()" in (BENCH / "fuzz.py").read_text()
