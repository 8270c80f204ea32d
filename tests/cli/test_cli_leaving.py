"""How a command's process ends: interrupted at any moment, read by nobody, with threads that wait for something."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_agents import program

from tierkv.cli.main import main

# Sends itself a signal as soon as a module is asked for, and gives it time to arrive.
_AT_IMPORT = """
import builtins, os, sys, time
from tierkv.cli import main
real, wanted, number = builtins.__import__, sys.argv.pop(1), int(sys.argv.pop(1))
def importing(name, *rest):
    if name == wanted:
        os.kill(os.getpid(), number)
        time.sleep(5)
    return real(name, *rest)
builtins.__import__ = importing
main.entry()
"""
_WHILE_STARTING = """
import asyncio, os
from tierkv.agents.runtime import AgentRuntime
from tierkv.cli import main
start = AgentRuntime.start
async def interrupted(self):
    os.kill(os.getpid(), NUMBER)
    await asyncio.sleep(0.2)
    return await start(self)
AgentRuntime.start = interrupted
main.entry()
"""
_LINGERING = """
import threading
from tierkv.cli import main, version
version._version = lambda _: threading.Thread(target=threading.Event().wait).start() or 3
main.entry()
"""


def python(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGINT, 130, "tierkv: interrupted\n"), (signal.SIGTERM, 143, "tierkv: terminated\n")],
)
@pytest.mark.parametrize(
    ("module", "words"),
    [("tierkv.cli.parser", ["demo"]), ("tierkv.demo.processes", ["demo", "--model", "hybrid"]),
     ("tierkv.config.load", ["vault", "--port", "0"]), ("tierkv.agents.vault", ["vault", "--port", "0"])],
    ids=["first imports", "demo", "configuration", "agent"],
)  # fmt: skip
def test_signal_while_modules_are_imported_is_one_line(number, code, message, module, words):
    done = python(_AT_IMPORT, module, str(int(number)), *words)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", message)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_agent_that_is_stopped_while_it_starts_ends_as_it_would_later(number):
    words = ["vault", "--port", "0", "--max-bytes", "8MiB", "--name", "one"]
    done = python(_WHILE_STARTING.replace("NUMBER", str(int(number))), *words)
    assert (done.returncode, done.stdout) == (0, "")
    assert "kv-vault 'one' was asked to stop while it started" in done.stderr
    assert "Traceback" not in done.stderr


def test_threads_that_wait_for_ever_do_not_keep_a_command_that_is_done():
    done = python(_LINGERING, "version")
    assert (done.returncode, done.stderr) == (3, "")


PRINTING = (
    "--help", "demo --help", "version", "bench", "config schema", "config show --json", "config validate --json",
    "token path", "status {at}", "events {at}", "prefixes {at}", "pin --all --json {at}",
    "purge --all --dry-run {at}", "vault stats {at}", "top --once {at}",
)  # fmt: skip


def test_reader_that_has_left_is_no_error_of_any_command_that_prints(vault, monkeypatch, capsys):
    vault.store(model="m", blocks=2)
    for line in PRINTING:
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "w") as broken:
            monkeypatch.setattr(sys, "stdout", broken)
            assert main(line.format(at=f"--connect {vault.address}").split()) == 0, line
    told = capsys.readouterr().err
    assert "Broken" not in told
    assert "fault" not in told


def test_help_that_nobody_reads_leaves_no_complaint_at_the_end_of_the_process():
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "tierkv", "--help"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_table_of_the_demonstration_may_be_read_in_part():
    script = """
from tierkv.cli import main, version
from tierkv.demo.progress import PipeConsole
def table(_):
    for _ in range(100_000):
        PipeConsole().print("x" * 60)
version._version = table
main.entry()
"""
    words = f"{sys.executable} -c '{script}' version | head -3"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {words}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 3)


def test_streams_that_are_closed_from_the_start_are_no_fault():
    words = f"{sys.executable} -m tierkv config schema >&- 2>&-"
    assert subprocess.run(["bash", "-c", words], check=False).returncode == 0
    assert subprocess.run(["bash", "-c", f"{sys.executable} -m tierkv statsu 2>&-"], check=False).returncode == 2


def test_home_that_is_a_file_is_said_in_plain_words(tmp_path):
    Path(tmp_path / "file").touch()
    for words in (["status"], ["token", "new"], ["vault", "--port", "0"]):
        ran = program(*words, TIERKV_HOME=str(tmp_path / "file"))
        assert (ran.code, ran.out) == (2, "")
        assert (
            ran.err == f"tierkv: TIERKV_HOME={tmp_path}/file is a file; it must name a folder (an absent one is made)\n"
        )
