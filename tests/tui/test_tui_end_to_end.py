"""The console on real vault agents in other processes: data at once, greyed when one dies, live when it is back."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tui_cluster import screen_text

from tierkv.demo.processes import free_port
from tierkv.rpc.auth import load_or_create_token
from tierkv.tui.app import Console, targets_of
from tierkv.tui.live import live_feed
from tierkv.tui.theme import UNICODE

VAULT = """
import asyncio, sys
from tierkv.agents.vault import VaultOptions, run_vault
asyncio.run(run_vault(VaultOptions(sys.argv[1], role=sys.argv[2], port=int(sys.argv[3]), max_bytes=64 << 20)))
"""


class Vaults:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {"nas": free_port(), "pi": free_port()}
        self.roles = {"nas": "kv-vault", "pi": "ssm-vault"}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        command = [sys.executable, "-c", VAULT, name, self.roles[name], str(self.ports[name])]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

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
    both = Vaults(tmp_path)
    load_or_create_token()
    for name in both.ports:
        both.start(name)
    yield both
    for name in list(both.processes):
        both.kill(name)
    for log in sorted(tmp_path.glob("*.log")):
        print(f"{log.name}:\n{log.read_text()}")  # shown where the test failed


async def seen(app: Console, condition: Callable[[list[str]], bool]) -> list[str]:
    """The screen once ``condition`` holds for it."""
    until = asyncio.get_running_loop().time() + 60
    while not condition(lines := screen_text(app)):
        assert asyncio.get_running_loop().time() < until, "\n".join(lines)
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
