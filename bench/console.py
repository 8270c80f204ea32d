"""The whole console in a terminal of its own, against 50 agents: ``python bench/console.py [--seconds N] [--json]``.

Agents are gRPC servers in another process; each changes its numbers ten times a second and is listened to at 2 Hz.
``tierkv tui`` runs behind a pseudo-terminal of 120x40, as over SSH. Every view is opened and measured quiet, then with
1,000 events a second; what the terminal gets says how often it was repainted. CPU is the console's own. Limits:
15 % of one core while no events storm, 4 repaints a second, first data within 1.5 s, no event lost on its way, memory
that stops growing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import signal
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import psutil
from _scratch import scratch_folder

COLUMNS, ROWS = 120, 40
FRAME = b"\x1b[?2026h"
"""Textual writes every update between a pair of these, once the terminal has said that it knows them."""

ASKED, ANSWER = b"\x1b[?2026$p", b"\x1b[?2026;2$y"

VIEWS = {"1": "overview", "2": "nodes", "3": "prefixes", "4": "events", "5": "config"}
STARTED = re.compile(rb"[1-9]\d*/\d+ up")
LIMIT_CPU, LIMIT_REPAINTS, LIMIT_START_S = 0.15, 4.0, 1.5


@dataclass(frozen=True)
class Line:
    """One view for some seconds. ``longest_gap_s``: the longest time without a repaint."""

    view: str
    events_per_s: float
    cpu_fraction: float
    repaints_per_s: float
    longest_gap_s: float
    bytes_per_s: float
    rss_bytes: int


# --- agents -------------------------------------------------------------------------------------


async def serve(count: int) -> None:
    """So many agents; a line with their ports on stdout. A number on stdin is how many events all send a second."""
    from tierkv.agents.runtime import AgentRuntime
    from tierkv.rpc.auth import load_or_create_token
    from tierkv.telemetry.node import NodeTelemetry

    token = load_or_create_token()
    agents: list[AgentRuntime] = []
    for number in range(count):
        role = "inference" if number % 10 == 0 else "kv-vault"
        name = f"node-{number:02}"
        agents.append(
            AgentRuntime(
                role=role, name=name, host="127.0.0.1", port=0, token=token, insecure=False,
                telemetry=NodeTelemetry(role, name),
            )
        )  # fmt: skip
    ports = [await agent.start() for agent in agents]
    print(json.dumps(ports), flush=True)
    rate = 0

    def listen() -> None:
        nonlocal rate
        for line in sys.stdin:
            rate = int(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    turn = 0
    while True:
        began = time.monotonic()
        for number, agent in enumerate(agents):
            tier = agent.telemetry.tier("kv")
            tier.hit(256, 1 << 20)
            tier.bytes_in(turn % 7 << 20)
            if turn % 10 == number % 10:
                tier.miss("never_stored")
        for number in range(rate // 10):
            telemetry = agents[(turn + number) % count].telemetry
            telemetry.emit("demote", "info", f"{turn % 97} blocks of a model to node-{number % count:02}")
        turn += 1
        await asyncio.sleep(max(0.0, 0.1 - (time.monotonic() - began)))


@contextlib.contextmanager
def agents(count: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    command = [sys.executable, __file__, "--serve", str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


# --- the console --------------------------------------------------------------------------------


class Terminal:
    """``tierkv tui`` behind a pseudo-terminal. What it wrote is counted, and the last of it is kept."""

    def __init__(self, ports: list[int]) -> None:
        connect = [word for port in ports for word in ("--connect", f"127.0.0.1:{port}")]
        environment = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        self.began_s = time.monotonic()
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "tierkv", "tui", *connect], environment)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.frames: list[float] = []
        self.written = 0
        self.first_data_s: float | None = None
        self._tail = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:
                return
            now_s = time.monotonic()
            seen = self._tail[-len(FRAME) + 1 :] + data
            self.frames += [now_s] * seen.count(FRAME)
            self.written += len(data)
            if ASKED in seen:
                os.write(self._fd, ANSWER)
            self._tail = (self._tail + data)[-65536:]
            if self.first_data_s is None and STARTED.search(self._tail):
                self.first_data_s = now_s - self.began_s

    def press(self, key: str) -> None:
        os.write(self._fd, key.encode())

    def says(self, pattern: bytes) -> bool:
        return re.search(pattern, self._tail) is not None

    def close(self) -> None:
        os.kill(self.pid, signal.SIGTERM)
        os.waitpid(self.pid, 0)


def measured(terminal: Terminal, view: str, rate: int, seconds: float) -> Line:
    process = psutil.Process(terminal.pid)
    before, written, began = process.cpu_times(), terminal.written, time.monotonic()
    time.sleep(seconds)
    after, ended = process.cpu_times(), time.monotonic()
    frames = [began, *(one for one in terminal.frames if began <= one <= ended), ended]
    spent_s = after.user + after.system - before.user - before.system
    return Line(
        view,
        rate,
        spent_s / (ended - began),
        (len(frames) - 2) / (ended - began),
        max(b - a for a, b in itertools.pairwise(frames)),
        (terminal.written - written) / (ended - began),
        process.memory_info().rss,
    )


def wait_for(terminal: Terminal, pattern: bytes, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while not terminal.says(pattern):
        if time.monotonic() > until_s:
            raise SystemExit(f"the console did not show {pattern!r} within {seconds:g} s")
        time.sleep(0.05)


def run(count: int, seconds: float, rate: int) -> tuple[list[float], list[Line]]:
    with agents(3) as (_, ports):
        starts = [start_s(ports) for _ in range(5)]
    lines: list[Line] = []
    with agents(count) as (process, ports):
        terminal = Terminal(ports)
        try:
            wait_for(terminal, rb"%d/%d up" % (count, count), 60)
            time.sleep(3)
            for events in (0, rate):
                assert process.stdin is not None
                process.stdin.write(f"{events}\n")
                process.stdin.flush()
                for key, view in VIEWS.items():
                    terminal.press(key)
                    time.sleep(1.0)
                    lines.append(measured(terminal, view, events, seconds))
            terminal.press("1")
            time.sleep(1.0)
            lines.append(measured(terminal, "overview", rate, seconds))
        finally:
            terminal.close()
    return starts, lines


def start_s(ports: list[int]) -> float:
    """From the start of the program to the first data of an agent on the screen."""
    terminal = Terminal(ports)
    try:
        wait_for(terminal, STARTED.pattern, 30)
        assert terminal.first_data_s is not None
        return terminal.first_data_s
    finally:
        terminal.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=6.0, help="how long each view is measured")
    parser.add_argument("--events", type=int, default=1000, help="events a second in the second round")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.serve))
        return
    with scratch_folder() as home:
        os.environ["TIERKV_HOME"] = str(home)
        os.environ["TIERKV_CONFIG"] = str(home / "tierkv.toml")
        (home / "tierkv.toml").write_text("[cluster]\nname = 'bench'\n")
        os.chdir(home)
        starts, lines = run(arguments.nodes, arguments.seconds, arguments.events)
        os.chdir("/")
    if arguments.json:
        document = {"schema": "tierkv.bench.console/1", "start_s": starts, "lines": [asdict(each) for each in lines]}
        print(json.dumps(document, indent=2))
        return
    shown = ", ".join(f"{one:.2f}" for one in starts)
    print(f"start to first data: median {statistics.median(starts):.2f} s of {shown} (limit {LIMIT_START_S})")
    print(
        f"{'view':<9} {'events/s':>8} {'CPU':>6} {'repaints/s':>10} {'longest gap':>11} {'to terminal':>11} {'RSS':>7}"
    )
    for each in lines:
        busy = each.cpu_fraction > LIMIT_CPU and not each.events_per_s
        late = "  over" if busy or each.repaints_per_s > LIMIT_REPAINTS + 0.3 else ""
        print(
            f"{each.view:<9} {each.events_per_s:8.0f} {each.cpu_fraction:6.1%} {each.repaints_per_s:10.1f} "
            f"{each.longest_gap_s:9.2f} s {each.bytes_per_s / 1024:7.1f} K/s {each.rss_bytes >> 20:5} M{late}"
        )


if __name__ == "__main__":
    main()
