"""The feed follows agents that come, go, lie and hang, and never stops trying."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from tui_cluster import START_UNIX_S, event, vault

from tierkv.errors import NotAuthenticated, Unreachable, WrongService
from tierkv.tui import feed as feed_module
from tierkv.tui.feed import EventLog, LiveFeed, Target

TARGET = "nas:50051"


class Agent:
    """An agent that the test directs; every connection to it is a Script."""

    def __init__(self) -> None:
        self.connections: list[Script] = []
        self.refusal: Exception | None = None

    def connect(self, address: str) -> "Script":
        script = Script(self.refusal)
        self.connections.append(script)
        return script


class Script:
    def __init__(self, refusal: Exception | None) -> None:
        self.refusal = refusal
        self.told: asyncio.Queue = asyncio.Queue()
        self.happened: asyncio.Queue = asyncio.Queue()
        self.after_id: int | None = None
        self.closed = False

    async def snapshots(self, interval_s: float) -> AsyncIterator:
        if self.refusal:
            raise self.refusal
        while (one := await self.told.get()) is not None:
            if isinstance(one, Exception):
                raise one
            yield one, True

    async def events(self, after_id: int) -> AsyncIterator:
        self.after_id = after_id
        while True:
            yield await self.happened.get()

    async def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(feed_module, "BACKOFF_LAST_S", 0.02)


@pytest.fixture
async def followed():
    """An agent, the feed that follows it, and a wait for a condition."""
    agent = Agent()
    feed = LiveFeed([Target(TARGET)], agent.connect, wall_clock=lambda: START_UNIX_S)
    task = asyncio.create_task(feed.run())

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    yield agent, feed, until
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def state(feed: LiveFeed) -> str:
    return feed.view().nodes[0].state


def messages(feed: LiveFeed) -> list[str]:
    return [line.event.message for line in feed.view().events.lines]


async def test_a_snapshot_makes_the_node_live(followed) -> None:
    agent, feed, until = followed
    assert state(feed) == "connecting"
    await until(lambda: bool(agent.connections))
    agent.connections[0].told.put_nowait(vault(0))
    await until(lambda: state(feed) == "live")
    assert feed.view().authenticated


async def test_a_lost_node_keeps_its_data_and_is_live_again_when_it_answers(followed) -> None:
    agent, feed, until = followed
    await until(lambda: bool(agent.connections))
    agent.connections[0].told.put_nowait(vault(0))
    await until(lambda: state(feed) == "live")
    agent.connections[0].told.put_nowait(Unreachable(TARGET, "connection reset"))
    await until(lambda: state(feed) == "lost")
    lost = feed.view().nodes[0]
    assert (lost.name, lost.error, lost.memory) == ("nas", "connection reset", vault(0).memory)
    await until(lambda: len(agent.connections) == 2)
    assert agent.connections[0].closed
    agent.connections[-1].told.put_nowait(vault(5))
    await until(lambda: state(feed) == "live")
    assert messages(feed) == ["lost: connection reset", "back after 0 s"]


async def test_it_tries_for_ever(followed) -> None:
    agent, feed, until = followed
    agent.refusal = Unreachable(TARGET, "connection refused")
    await until(lambda: bool(agent.connections))
    agent.connections[0].told.put_nowait(agent.refusal)
    await until(lambda: len(agent.connections) > 12)
    assert state(feed) == "down"
    agent.refusal = None
    await until(lambda: agent.connections[-1].refusal is None)
    agent.connections[-1].told.put_nowait(vault(0))
    await until(lambda: state(feed) == "live")


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (NotAuthenticated(TARGET, "wrong token"), "refused"),
        (WrongService(TARGET, "HTTP/1.1"), "foreign"),
        (RuntimeError("anything else at all"), "down"),
    ],
)
async def test_what_stands_in_the_way_is_named(followed, refusal: Exception, expected: str) -> None:
    agent, feed, until = followed
    await until(lambda: bool(agent.connections))
    agent.connections[0].told.put_nowait(refusal)
    await until(lambda: state(feed) == expected)
    assert feed.view().nodes[0].error == str(refusal).removeprefix(f"{TARGET}: ")


async def test_an_agent_that_closes_its_stream_is_lost(followed) -> None:
    agent, feed, until = followed
    await until(lambda: bool(agent.connections))
    agent.connections[0].told.put_nowait(vault(0))
    agent.connections[0].told.put_nowait(None)
    await until(lambda: state(feed) == "lost")
    assert feed.view().nodes[0].error == "the agent closed the connection"


async def test_a_silent_stream_is_given_up(followed, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, feed, until = followed
    await until(lambda: bool(agent.connections))
    monkeypatch.setattr(feed_module, "SILENCE_S", 0.05)
    agent.connections[0].told.put_nowait(vault(0))
    await until(lambda: state(feed) == "lost")
    assert "silent" in feed.view().nodes[0].error


async def test_events_go_on_where_they_stopped_and_from_the_start_after_a_restart(followed) -> None:
    agent, feed, until = followed
    await until(lambda: bool(agent.connections))
    first = agent.connections[0]
    first.told.put_nowait(vault(0))
    first.happened.put_nowait(([event(7, "one"), event(9, "two")], 3))
    await until(lambda: messages(feed) == ["one", "two"])
    assert (first.after_id, feed.view().events.dropped) == (0, 3)

    first.told.put_nowait(Unreachable(TARGET, "reset"))
    await until(lambda: state(feed) == "lost")
    await until(lambda: not agent.connections[-1].closed)
    second = agent.connections[-1]
    second.told.put_nowait(vault(1))
    await until(lambda: second.after_id is not None)
    assert second.after_id == 9

    second.told.put_nowait(Unreachable(TARGET, "reset"))
    await until(lambda: state(feed) == "lost" and agent.connections[-1] is not second)
    third = agent.connections[-1]
    third.told.put_nowait(vault(2, node_id="another run"))
    await until(lambda: third.after_id is not None)
    assert third.after_id == 0
    assert "restarted, now process 200" in messages(feed)


def test_the_log_is_bounded_and_counts_what_it_forgets() -> None:
    log = EventLog(kept=10)
    log.add([event(i, str(i)) for i in range(6)])
    assert len(log.view().lines) == 6
    log.add([event(i, str(i)) for i in range(6, 13)])
    view = log.view()
    assert [line.event.message for line in view.lines] == [str(i) for i in range(3, 13)]
    assert (view.forgotten, view.dropped) == (3, 0)
    log.add([event(i) for i in range(25)])
    assert (len(log.view().lines), log.view().dropped) == (10, 15)


@pytest.mark.parametrize("steps_between", range(8))
async def test_a_feed_ends_when_it_is_told_to_also_while_a_connection_fails(steps_between: int) -> None:
    """In the very step in which the failure is on its way through the tasks; else the console never ends."""
    agent = Agent()
    task = asyncio.create_task(LiveFeed([Target(TARGET)], agent.connect).run())
    async with asyncio.timeout(20):
        while not agent.connections:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    agent.connections[0].told.put_nowait(Unreachable("nas", "gone"))
    for _ in range(steps_between):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=10)
    assert done, "it goes on"
    assert task.cancelled(), repr(task)


def test_the_log_puts_what_came_together_in_order_of_time() -> None:
    log = EventLog()
    log.add([event(5, "later")])
    log.add([event(2, "earlier")])
    assert [line.event.message for line in log.view().lines] == ["earlier", "later"]
    assert [line.number for line in log.view().lines] == [1, 2]


def test_an_unchanged_log_gives_the_same_view() -> None:
    log = EventLog()
    log.add([event(1)])
    assert log.view() is log.view()


def test_events_of_monstrous_size_are_cut() -> None:
    log = EventLog()
    log.add([event(1, "x" * 100_000, attributes={str(i): "y" for i in range(1000)})])
    kept = log.view().lines[0].event
    assert len(kept.message) == 1000
    assert len(kept.attributes) == 32
