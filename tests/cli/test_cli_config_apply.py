"""``tierkv config set --apply`` and SIGHUP on agents that are processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_agents import program

from tierkv.errors import EXIT_OK, EXIT_PARTIAL, EXIT_REFUSED

TEXT = """\
# comments stay
[cluster]
name = "lab"
role = "kv-vault"
[cluster.kv_cold]
port = {port}

[vault]
max_bytes = "16MiB"   # and so do these
undo_s = 60
"""


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A configuration file and the agent that runs from it."""
    monkeypatch.setenv("TIERKV_HOME", str(tmp_path))
    path, ready = tmp_path / "tierkv.toml", tmp_path / "ready"
    path.write_text(TEXT.format(port=1))
    command = [
        sys.executable,
        "-m",
        "tierkv",
        "agent",
        "--config",
        str(path),
        "--port",
        "0",
        "--ready-file",
        str(ready),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    deadline = time.monotonic() + 60
    while not ready.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    path.write_text(TEXT.format(port=int(ready.read_text())))
    yield path, process
    process.kill()
    process.communicate()


def change(path: Path, *words: str):
    return program("config", "set", "--config", str(path), *words)


def wait_for_event(path: Path, text: str) -> str:
    for _ in range(40):
        out = program("events", "--config", str(path), "--kind", "config").out
        if text in out:
            return out
        time.sleep(0.1)
    raise AssertionError(out)


def test_a_live_key_is_taken_over_at_once_and_written(vault) -> None:
    path, _ = vault
    looked = change(path, "vault.max_bytes", "8MiB", "--apply", "--dry-run")
    assert looked.code == EXIT_OK, looked.err
    assert "at once: 16MiB -> 8MiB; " in looked.out
    assert "are in use: nothing is evicted" in looked.out
    assert "16MiB" in path.read_text()
    done = change(path, "vault.max_bytes", "8MiB", "--apply")
    assert done.code == EXIT_OK, done.err
    assert 'max_bytes = "8MiB"   # and so do these\n' in path.read_text()
    status = program("status", "--config", str(path), "--json").json
    (tier,) = status["nodes"][0]["node"]["tiers"]
    assert tier["cap_bytes"] == 8 << 20
    assert "vault.max_bytes 16MiB -> 8MiB" in program("events", "--config", str(path)).out


def test_when_an_agent_will_not_the_file_stays_as_it_was(vault) -> None:
    path, _ = vault
    before = path.read_bytes()
    refused = program("config", "set", "--config", str(path), "vault.undo_s", "5", "--apply", TIERKV_TOKEN="x" * 20)
    assert refused.code == EXIT_REFUSED
    assert "nothing was changed" in refused.err
    assert path.read_bytes() == before


def test_an_absent_agent_does_not_stop_the_others(vault) -> None:
    path, _ = vault
    path.write_text(path.read_text() + "[console]\nconnect = ['127.0.0.1:1']\n")
    done = change(path, "vault.undo_s", "5", "--apply")
    assert done.code == EXIT_PARTIAL
    assert "not reached: 127.0.0.1:1" in done.err
    assert "undo_s = 5\n" in path.read_text()


def test_an_agent_that_is_stuck_is_told_in_one_line_each_time(vault) -> None:
    path, _ = vault
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        peer = f"127.0.0.1:{deaf.getsockname()[1]}"
        path.write_text(path.read_text() + f"[console]\nconnect = ['{peer}']\n")
        for seconds in ("5", "6", "7"):
            done = change(path, "vault.undo_s", seconds, "--apply")
            assert done.code == EXIT_PARTIAL
            assert [line.partition(":")[0] for line in done.err.splitlines()] == ["127.0.0.1", "not reached"], done.err


def test_sighup_reads_the_file_again_and_keeps_the_last_good_one(vault) -> None:
    path, process = vault
    good = path.read_text()
    ours = path.with_name("tools.toml")
    ours.write_text(good)
    path.write_text(good.replace("undo_s = 60", "undo_s = 7"))
    process.send_signal(signal.SIGHUP)
    wait_for_event(ours, "was read again")
    path.write_text(good.replace("undo_s = 60", "undo_s = 'never'"))
    process.send_signal(signal.SIGHUP)
    assert "the last good configuration stays" in wait_for_event(ours, "the last good configuration stays")
    assert process.poll() is None
