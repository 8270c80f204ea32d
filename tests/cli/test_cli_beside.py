"""What keeps an agent running: bounded restarts, none of what cannot work, and no second agent beside another."""

import socket
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from tierkv.cli import beside
from tierkv.cli.beside import Keeper


def command(code: str) -> list[str]:
    """Notes when it began in the file "lives", then does ``code``."""
    note = "import os, sys, time; open('lives', 'a').write(f'{time.monotonic()}\\n')"
    return [sys.executable, "-S", "-c", f"{note}\n{code}"]


def lives() -> list[float]:
    try:
        return [float(line) for line in Path("lives").read_text().split()]
    except FileNotFoundError:
        return []


@pytest.fixture
def keep(home):
    """keep(code) runs a keeper in a thread: (keeper, what it said, the thread)."""
    made = []

    def start(code: str, place: Path = Path("nobody.sock")):
        said: list[str] = []
        keeper = Keeper(place, command(code), said.append)
        thread = threading.Thread(target=keeper.run, daemon=True)
        thread.start()
        made.append((keeper, thread))
        return keeper, said, thread

    yield start
    for keeper, thread in made:
        keeper.close()
        thread.join(30)
        assert not thread.is_alive()


def wait_for(check, seconds=30):
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_the_time_between_two_lives_doubles(keep, monkeypatch):
    monkeypatch.setattr(beside, "FIRST_BACKOFF_S", 0.2)
    _, said, _ = keep("sys.exit(1)")
    wait_for(lambda: len(lives()) >= 4)
    began = lives()
    assert [began[n + 1] - began[n] > 0.2 * 2**n for n in range(3)] == [True] * 3
    assert said[:3] == [
        f"the inference agent ended with exit code 1; it is started again in {wait:g} s" for wait in (0.2, 0.4, 0.8)
    ]


@pytest.mark.parametrize("code", [2, 5])
def test_what_cannot_work_is_not_tried_again(keep, code):
    _, said, thread = keep(f"sys.exit({code})")
    thread.join(30)
    assert said == [
        f"the inference agent ended with exit code {code}; it is not started again, the engine goes on alone"
    ]
    assert len(lives()) == 1


def test_another_agent_on_the_socket_is_left_alone_until_it_is_gone(keep, monkeypatch, tmp_path):
    monkeypatch.setattr(beside, "FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(beside, "OTHERS_EVERY_S", 0.05)
    place = tmp_path / "s.sock"
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(str(place))
        listening.listen(64)
        _, said, _ = keep("sys.exit(1)", place)
        wait_for(lambda: said)
        time.sleep(0.3)
        assert len(lives()) == 1
        assert said == ["the engine uses another inference agent; when that is gone, one is started again"]
    wait_for(lambda: len(lives()) == 2)


def test_an_agent_ends_in_order_or_is_killed(keep, monkeypatch):
    monkeypatch.setattr(beside, "_END_S", 0.5)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('deaf', 'w').close(); time.sleep(60)"
    keeper, said, thread = keep(deaf)
    wait_for(Path("deaf").exists)
    keeper.close()
    thread.join(30)
    assert not thread.is_alive()
    assert said == []


def test_how_it_ended():
    assert beside.how_it_ended(1) == "ended with exit code 1"
    assert beside.how_it_ended(-9) == "was killed by SIGKILL"
    assert beside.how_it_ended(-250) == "was killed by signal 250"
