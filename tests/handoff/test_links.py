"""A hook and an agent that is frozen, busy, gone or back: one connection waits, and is there as soon as the agent."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.handoff.arena import Arena
from tierkv.handoff.client import HandoffClient
from tierkv.handoff.protocol import VERSION, pack
from tierkv.handoff.server import Connection, HandoffServer

ARENA_BYTES = 1 << 20


class Agent:
    """A server in a thread of its own, which can be kept from doing anything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: list[str] = []
        self.connections = 0
        self.loop = asyncio.new_event_loop()
        self.server = HandoffServer(path, self, arena_bytes=ARENA_BYTES, settings=dict, count=self.counts.append)
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self.server.start())

    def _call(self, work) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    async def serve(self, connection: Connection) -> None:
        self.connections += 1
        while await connection.receive() is not None:
            pass

    def freeze(self) -> threading.Event:
        """Nothing runs on the loop until the event is set."""
        frozen, thaw = threading.Event(), threading.Event()
        self.loop.call_soon_threadsafe(lambda: (frozen.set(), thaw.wait(60)))
        assert frozen.wait(10)
        return thaw

    def stop(self) -> None:
        self._call(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tierkv-") as name:
        yield Path(name) / "s.sock"


@pytest.fixture
def agent(path: Path) -> Iterator[Agent]:
    running = Agent(path)
    yield running
    running.stop()


def wait_for(check, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_frozen_agent_is_waited_for_with_one_connection(agent: Agent):
    client = HandoffClient(agent.path, "test", "test 1")
    assert client.wait_available(20)
    thaw = agent.freeze()
    for link in (client.links.control, client.links.demote):
        assert link.channel is not None
        client.links.drop(link, link.channel)
    wait_for(lambda: client.health.trouble == "silent")
    time.sleep(6.5)  # more than an impatient hook would wait for its hello
    assert (client.health.up, client.health.times_up) == (False, 1)
    thaw.set()
    began = time.monotonic()
    assert client.wait_available(20)
    assert time.monotonic() - began < 10
    assert client.health.times_up == 2
    assert client.health.outage_s > 6
    wait_for(lambda: agent.connections >= 4)  # available with the first of the two
    assert agent.connections == 4, "two before, two after, and none that was given up"
    assert agent.counts == []
    client.close()


def test_hooks_that_gave_up_meanwhile_cost_no_memory(agent: Agent, monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []
    create = Arena.create
    monkeypatch.setattr(
        Arena, "create", lambda size, *, writable: (made.append(size), create(size, writable=writable))[1]
    )
    thaw = agent.freeze()
    for number in range(8):
        with socket.socket(socket.AF_UNIX) as impatient:
            impatient.connect(str(agent.path))
            names = {"engine": "e", "build": "b", "engine_id": str(number), "pid": 1, "channel": "control"}
            impatient.sendall(pack("hello", {"version": VERSION, **names}))
    client = HandoffClient(agent.path, "test", "test 1")
    client.links.start()
    thaw.set()
    assert client.wait_available(20)
    assert agent.counts == ["handoff_left_early"] * 8
    assert len(made) == 2
    client.close()


def test_looking_whether_an_agent_is_there_is_no_fault(agent: Agent):
    with socket.socket(socket.AF_UNIX) as look:
        look.connect(str(agent.path))
    client = HandoffClient(agent.path, "test", "test 1")
    assert client.wait_available(20)
    assert agent.counts == []
    client.close()


def test_a_client_is_closed_while_its_hello_is_not_answered(agent: Agent):
    thaw = agent.freeze()
    client = HandoffClient(agent.path, "test", "test 1")
    client.links.start()
    wait_for(lambda: client.health.trouble == "silent")
    thread = client.links._thread
    assert thread is not None
    client.close()
    wait_for(lambda: not thread.is_alive())
    thaw.set()


def test_a_restarted_agent_is_found_however_long_it_was_away(path: Path):
    first = Agent(path)
    client = HandoffClient(path, "test", "test 1")
    assert client.wait_available(20)
    first.stop()
    wait_for(lambda: not client.health.up and client.health.trouble == "absent")
    time.sleep(4.0)  # a back-off that doubles would be at seconds by now
    second = Agent(path)
    began = time.monotonic()
    assert client.wait_available(20)
    assert time.monotonic() - began < 10
    assert client.health.times_up == 2
    client.close()
    second.stop()


def test_an_agent_that_refuses_is_told_from_one_that_is_absent(path: Path, monkeypatch: pytest.MonkeyPatch):
    agent = Agent(path)
    monkeypatch.setattr("tierkv.handoff.server.MAX_CONNECTIONS", 0)
    client = HandoffClient(path, "test", "test 1")
    client.links.start()
    wait_for(lambda: client.health.trouble == "refused")
    assert "too_many_engines" in client.last_error
    client.close()
    agent.stop()
