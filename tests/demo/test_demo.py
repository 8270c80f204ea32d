"""The whole demonstration, as a newcomer runs it: real processes, the real engine, short prompts."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tierkv.demo.cluster import Cluster
from tierkv.demo.engine import Engine, Logprobs, max_difference

DEMO = [sys.executable, "-m", "tierkv.cli.main", "demo", "--model", "hybrid", "--tokens", "384"]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder with a short name: a socket's path has its limit."""
    with tempfile.TemporaryDirectory(prefix="tk-") as folder:
        yield Path(folder)


def started(*words: str, scratch: Path) -> subprocess.Popen[str]:
    # A TMPDIR of its own shows what is left behind.
    # One BLAS thread: two that wait for each other are slow on a machine that does something else too.
    environment = {**os.environ, "TMPDIR": str(scratch), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*DEMO, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=scratch
    )


def family(process: subprocess.Popen[str], at_least: int) -> list[psutil.Process]:
    """The demonstration's children, once there are so many."""
    until = time.monotonic() + 120
    while len(children := psutil.Process(process.pid).children(recursive=True)) < at_least:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.1)
    return children


def assert_nothing_is_left(children: list[psutil.Process], scratch: Path) -> None:
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert [path.name for path in scratch.iterdir() if path.name.startswith("tierkv-demo")] == []


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_lossless_restore_is_faster_and_the_same_to_the_last_bit(hybrid_folder: Path, scratch: Path):
    demo = started("--codec", "lossless", "--json", scratch=scratch)
    children = family(demo, 4)
    out, err = demo.communicate(timeout=450)
    assert demo.returncode == 0, err
    document = json.loads(out)
    runs = {run["phase"]: run for run in document["runs"]}
    assert list(runs) == ["cold", "hot", "restored", "next_turn"]
    tokens = runs["cold"]["tokens"]
    assert abs(tokens - 384) <= 3
    # One token is always left to the engine.
    assert [run["cached_tokens"] for run in runs.values()] == [0, tokens - 1, tokens - 1, tokens - 1]
    (model,) = document["models"]
    assert model["same_text"] is True
    assert model["max_logit_diff"] == 0.0
    assert model["speedup"] == runs["cold"]["ttft_s"] / runs["restored"]["ttft_s"]
    # Two attention layers, two heads of 64, K and V, float32; six states of 143,360 bytes.
    assert model["state_bytes"] == 2 * 2 * 2 * 64 * 4 * (tokens - 1) + 6 * 143_360
    assert 0 < model["restored_bytes"] < model["state_bytes"] * 1.2
    assert document["failures"] == []
    assert "cold: first token after" in err
    assert_nothing_is_left(children, scratch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)], ids=["ctrl-c", "kill -9"]
)
def test_interrupted_demonstration_leaves_nothing(hybrid_folder: Path, scratch: Path, number: int, code: int):
    demo = started(scratch=scratch)
    children = family(demo, 5)  # two vaults, an agent, the engine, and who watches
    demo.send_signal(number)
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == code, err
    assert out == ""
    assert "Traceback" not in err
    assert_nothing_is_left(children, scratch)


@pytest.mark.slow
def test_vault_that_dies_ends_the_demonstration_with_one_clear_message(hybrid_folder: Path, scratch: Path):
    demo = started("--json", scratch=scratch)
    children = family(demo, 4)
    vault = next(child for child in children if "ssm-vault" in child.cmdline())
    vault.kill()
    out, err = demo.communicate(timeout=120)
    assert demo.returncode == 1, err
    assert "the ssm-vault was ended by SIGKILL" in err
    assert "Traceback" not in err
    (failure,) = json.loads(out)["failures"]
    assert failure.startswith("the ssm-vault was ended by SIGKILL")
    assert_nothing_is_left(children, scratch)


def test_cluster_sees_nothing_of_the_users_settings(monkeypatch):
    monkeypatch.setenv("TIERKV_TOKEN", "the user's own token")
    monkeypatch.setenv("TIERKV_INFERENCE__PORT", "1")
    cluster = Cluster("int8")
    try:
        theirs = {name: value for name, value in cluster.environment().items() if name.startswith("TIERKV_")}
        assert theirs.keys() == {"TIERKV_HOME", "TIERKV_CONFIG"}
        assert Path(theirs["TIERKV_HOME"]).is_relative_to(tempfile.gettempdir())
    finally:
        cluster.__exit__()
    assert not Path(theirs["TIERKV_HOME"]).exists()


def test_every_agent_is_where_the_configuration_says():
    """What the console beside the demonstration goes by."""
    with Cluster("int8") as cluster:
        command = [sys.executable, "-m", "tierkv", "status", "--json"]
        asked = subprocess.run(command, env=cluster.environment(), capture_output=True, text=True, timeout=60)
        nodes = json.loads(asked.stdout)["nodes"]
        assert {node["address"] for node in nodes} == set(cluster.addresses.values())
        assert all(node["reachable"] for node in nodes), asked.stdout
        assert asked.returncode == 0


def test_engine_that_is_not_there_is_unhealthy():
    assert Engine(1).is_healthy() is False


def logprobs(*steps: dict[int, float]) -> Logprobs:
    return Logprobs(tuple(max(step, key=step.__getitem__) for step in steps), steps, 0)


def test_difference_counts_common_tokens_up_to_where_the_texts_part():
    one = logprobs({1: -0.5, 2: -1.0}, {3: -0.25, 4: -2.0}, {5: -0.125})
    other = logprobs({1: -0.5, 2: -1.5, 9: -9.0}, {4: -0.125, 3: -0.5}, {5: -100.0})
    # 2 differs by 0.5; at the second step 4 by 1.875, and there the likeliest token is another one.
    assert max_difference(one, other) == 1.875
    assert max_difference(one, one) == 0.0
