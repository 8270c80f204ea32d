"""The console on real vault agents in other processes: data at once, greyed when one dies, live when it is back."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tui_cluster import screen_text

from tierkv.rpc.auth import load_or_create_token
from tierkv.tui.app import Console, targets_of
from tierkv.tui.live import live_feed
from tierkv.tui.theme import UNICODE

VAULT = """
import asyncio, sys
from tierkv.agents.vault import VaultOptions, run_vault
asyncio.run(run_vault(VaultOptions(sys.argv[1], role=sys.argv[2], port=int(sys.argv[3]), max_bytes=64 << 20)))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Vaults:
    def __init__(self) -> None:
        self.ports = {"nas": free_port(), "pi": free_port()}
        self.roles = {"nas": "kv-vault", "pi": "ssm-vault"}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        command = [sys.executable, "-c", VAULT, name, self.roles[name], str(self.ports[name])]
        self.processes[name] = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports.values()]


@pytest.fixture
def vaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TIERKV_HOME", str(tmp_path))
    both = Vaults()
    load_or_create_token()
    for name in both.ports:
        both.start(name)
    yield both
    for name in list(both.processes):
        both.kill(name)


async def seen(app: Console, condition: Callable[[list[str]], bool]) -> list[str]:
    """The screen once ``condition`` holds for it."""
    async with asyncio.timeout(60):
        while not condition(lines := screen_text(app)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return lines


def row(lines: list[str], name: str) -> str:
    """The node's line, without the marks of what has just changed."""
    line = next((line for line in lines if f" {name} " in line and "vault" in line), "")
    return line.replace("•", " ")


async def test_agents_come_go_and_come_back(vaults: Vaults) -> None:
    token = load_or_create_token()
    feed = live_feed(targets_of(vaults.addresses), token, cluster_name="home")
    app = Console(feed, glyphs=UNICODE)
    async with app.run_test(size=(80, 24)):
        lines = await seen(app, lambda lines: "2/2 up" in lines[0])
        assert "authenticated" in lines[0]
        assert row(lines, "nas").startswith(" ● live    nas          kv-vault")
        assert row(lines, "pi").startswith(" ● live    pi           ssm-vault")
        assert "/64M" in next(line for line in lines if line.startswith(" cold KV"))

        vaults.kill("nas")
        lines = await seen(app, lambda lines: "1/2 up" in lines[0])
        assert row(lines, "nas").startswith(" ○ lost    nas          kv-vault")
        assert "stale" in row(lines, "nas")
        assert row(lines, "pi").startswith(" ● live")
        assert "nas has not answered for" in lines[1]
        assert any(" nas        link     lost:" in line for line in lines)

        vaults.start("nas")
        lines = await seen(app, lambda lines: "2/2 up" in lines[0])
        assert row(lines, "nas").startswith(" ● live")
        assert any("restarted, now process" in line for line in lines)


async def test_a_console_without_the_token_reads_but_is_read_only(vaults: Vaults) -> None:
    app = Console(live_feed(targets_of(vaults.addresses), None), glyphs=UNICODE)
    async with app.run_test(size=(80, 24)):
        lines = await seen(app, lambda lines: "2/2 up" in lines[0])
        assert " read-only " in lines[0]
