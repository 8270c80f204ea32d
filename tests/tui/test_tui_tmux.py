"""The console in tmux, as an operator has it, on real agents and a real engine: nothing is injected but keys."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tierkv.demo.processes import free_port

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

CONFIG = """\
# the night watch edits here
[cluster]
name = "home"
[cluster.kv_cold]
port = {kv}

[inference]
port = {inference}
memory_threshold = 0.90   # the mark
min_store_tokens = 32
kv_codec = "raw"
ssm_codec = "raw"
"""
WIDTH, HEIGHT = 120, 40
SMALL = Path(__file__).with_name("small_engine.py")


class Home:
    """A short folder (a Unix socket's name has at most 107 bytes), its agents, its engine, and a terminal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kv, self.inference, self.engine_port = free_port(), free_port(), free_port()
        self.config = folder / "tierkv.toml"
        self.config.write_text(CONFIG.format(kv=self.kv, inference=self.inference))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TIERKV_")}
        self.environment = {
            **kept, "TIERKV_HOME": str(folder), "TIERKV_CONFIG": str(self.config), "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", "TZ": "UTC", "SMALL_MACHINE": str(folder / "memory"),
            "COLUMNS": "80", "LINES": "24",  # exported by some shells; the terminal knows better
        }  # fmt: skip
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.server = str(folder / "tmux")

    def start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command], env=self.environment, cwd=self.folder, stdout=log, stderr=log
            )

    def agent(self, role: str, name: str) -> None:
        program = (str(SMALL),) if role == "inference" else ("-m", "tierkv")
        self.start(name, *program, "agent", "--role", role, "--name", name)

    def engine(self) -> None:
        place = self.folder / "run" / "inference.sock"
        self.start("engine", str(SMALL), str(self.folder / "models" / "tiny"), str(self.engine_port), str(place))

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def ask(self, text: str) -> int:
        """The engine answers ``text``; how many tokens of it were in its cache or came back."""
        body = json.dumps({"prompt": text, "max_tokens": 2, "temperature": 0.0}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.engine_port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            usage = json.load(response)["usage"]
        return usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.engine_port}/health", timeout=2) as response:
                return response.status == 200
        except OSError:
            return False

    # --- the terminal ----------------------------------------------------------------------------

    def tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self.server, "-f", "/dev/null", *words],
            env=self.environment, capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
        return done.stdout

    def open_console(self, *words: str) -> None:
        command = shlex.join([sys.executable, "-m", "tierkv", "tui", *words])
        self.tmux("new-session", "-d", "-x", str(WIDTH), "-y", str(HEIGHT), "-c", str(self.folder), command)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.tmux("send-keys", key)
            time.sleep(0.15)

    def type(self, text: str) -> None:
        self.tmux("send-keys", "-l", text)

    def screen(self) -> list[str]:
        return self.tmux("capture-pane", "-p").split("\n")

    def seen(self, condition: Callable[[list[str]], object], seconds: float = 120) -> list[str]:
        """The screen once ``condition`` holds for it."""
        until = time.monotonic() + seconds
        while not condition(lines := self.screen()):
            dead = [name for name, process in self.processes.items() if process.poll() is not None]
            assert not dead, (dead, (self.folder / f"{dead[0]}.log").read_text()[-2000:])
            assert time.monotonic() < until, "\n".join(lines)
            time.sleep(0.2)
        return lines

    def close(self) -> None:
        subprocess.run(["tmux", "-S", self.server, "kill-server"], capture_output=True, check=False)
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture
def home() -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="tkv") as folder:
        one = Home(Path(folder))
        yield one
        one.close()


def row(lines: list[str], *words: str) -> str:
    return next((line for line in lines if all(word in line for word in words)), "")


def has(*words: str) -> Callable[[list[str]], bool]:
    return lambda lines: bool(row(lines, *words))


def prompt(number: int) -> str:
    return f"{number} is the number of this text, which goes on and on so that it is worth its room. " * 7


def mark_of(line: str) -> int:
    return line.index("┃")


def test_a_night_at_the_console(home: Home) -> None:
    home.agent("kv-vault", "nas")
    home.agent("inference", "mini")
    home.engine()
    home.open_console()
    lines = home.seen(lambda lines: "2/2 up" in lines[0])
    assert "authenticated" in lines[0]
    assert len(lines[0]) > WIDTH - 10
    assert "q quit" in lines[HEIGHT - 1]
    assert row(lines, "● live", "nas", "kv-vault")
    home.seen(lambda _: home.healthy())
    home.seen(has("is known as"))
    for number in range(8):
        home.ask(prompt(number))
    home.seen(has("demote", "tokens taken over"))

    # One machine goes, and comes back.
    home.kill("nas")
    lines = home.seen(has("○ lost", "nas", "stale"))
    assert "1/2 up" in lines[0]
    assert "nas has not answered for" in " ".join(lines[1:3])
    home.agent("kv-vault", "nas")
    lines = home.seen(lambda lines: "2/2 up" in lines[0])
    assert has("● live", "nas")(lines)
    for number in range(8, 11):
        home.ask(prompt(number))

    # Purge the model with its name typed, and take it back.
    home.press("3")
    home.seen(has("tiny", "KV", "nas"))
    home.press("x", "Down", "Enter")
    lines = home.seen(has("To do it, type tiny"))
    assert row(lines, "would remove")
    home.type("tiny")
    home.press("Enter", "Enter")
    home.seen(has("purged", "u takes it back"))
    home.seen(has("no vault holds anything"))
    home.press("u")
    home.seen(has("brought back"))
    home.seen(has("tiny", "KV", "nas"))

    # Lower the mark: what it would do is shown first, then the ruler moves and evictions begin.
    home.press("1")
    before = home.seen(has("mini", "┃"))
    home.press("5")
    home.seen(has("cluster.name", "home"))
    home.press("/")
    home.seen(has("words", "!not"))
    home.type("memory_threshold")
    home.seen(has("filter", "memory_threshold"))
    home.press("Enter", "Enter")
    home.seen(has("memory_threshold =", "0.9"))
    home.press(*["BSpace"] * 6)
    home.type("0.15")
    home.seen(has("memory_threshold =", "0.15"))
    home.press("Enter", "Escape", "a")
    home.seen(has("would evict", "prefix"))
    home.seen(has("+memory_threshold = 0.15   # the mark"))
    assert "0.90   # the mark" in home.config.read_text()
    home.press("Tab", "Enter")
    home.seen(has("acknowledged: 1 at once; written to every file"))
    assert home.config.read_text() == CONFIG.format(kv=home.kv, inference=home.inference).replace("0.90", "0.15")
    home.press("1")
    after = home.seen(has("▲ over", "/15%"))
    assert mark_of(row(after, "mini", "┃")) < mark_of(row(before, "mini", "┃"))
    # The engine has nothing to do, and follows the mark; then it serves below it.
    home.seen(has("evict", "left the engine's cache", "memory was over its mark"))
    home.seen(has("● live", "mini", "/15%"))
    home.ask(prompt(11))
    home.seen(has("● live", "mini", "/15%"))
    lines = home.seen(lambda lines: re.search(r"\bhot\b", row(lines, "hot")) and "config" in "\n".join(lines))
    status = subprocess.run(
        [sys.executable, "-m", "tierkv", "status", "--json"], env=home.environment, cwd=home.folder,
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    tiers = [tier for one in json.loads(status.stdout)["nodes"] for tier in one["node"]["tiers"]]
    assert sum(tier["evictions"] for tier in tiers if tier["name"] == "hot") >= 5
    home.press("q")


@pytest.mark.parametrize(
    ("redirected", "told"),
    [
        ("2>err", "draws on standard error"),
        (">out 2>err", "needs a terminal"),
        ("</dev/null 2>err", "needs a terminal"),
    ],
)
def test_a_console_that_cannot_be_seen_says_so(home: Home, redirected: str, told: str) -> None:
    command = shlex.join([sys.executable, "-m", "tierkv", "tui"])
    home.tmux(
        "new-session", "-d", "-x", "80", "-y", "24", "-c", str(home.folder), f"{command} {redirected}; echo $? >rc"
    )
    rc = home.folder / "rc"
    until = time.monotonic() + 60
    while not (rc.exists() and rc.read_text()):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert rc.read_text() == "2\n"
    assert told in (home.folder / "err").read_text()
