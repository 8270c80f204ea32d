"""A recording behind the same screens: it shows what the live console showed, at any moment, and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from test_tui_screens import Session
from tui_cluster import START_UNIX_S, event, inference, screen_text, vault

from tierkv.telemetry.recording import Header, Step, read_recording
from tierkv.tui.app import Console
from tierkv.tui.feed import LiveFeed, Target
from tierkv.tui.incident import Incident
from tierkv.tui.replay import ReplayFeed
from tierkv.tui.screens.purge import Purge
from tierkv.tui.theme import UNICODE

MINI, NAS = "127.0.0.1:50050", "127.0.0.1:50051"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def night() -> list[Step]:
    """A minute of mini and nas at 2 Hz; nas is lost at 30 s and back at 45 s; an event a second."""
    steps: list[Step] = []
    for half in range(121):
        at = half / 2
        steps.append(Step(START_UNIX_S + at, MINI, inference(at), True))
        if not 30 < at < 45:
            steps.append(Step(START_UNIX_S + at, NAS, vault(at), True))
        if at == 30:
            steps.append(Step(START_UNIX_S + at, NAS, ended="connection refused"))
        if half % 2 == 0:
            steps.append(Step(START_UNIX_S + at, MINI, events=(event(int(at), f"event {int(at)}"),)))
    return steps


def states(feed: ReplayFeed, at_s: float) -> dict[str, str]:
    return {node.name: node.state for node in feed.view_at(at_s).nodes}


def test_any_moment_is_as_it_was() -> None:
    feed = ReplayFeed(Header("lab"), night())
    assert feed.length_s == 60.0
    assert states(feed, 20) == {"mini": "live", "nas": "live"}
    assert states(feed, 40) == {"mini": "live", "nas": "lost"}
    assert states(feed, 50) == {"mini": "live", "nas": "live"}
    assert states(feed, 20) == {"mini": "live", "nas": "live"}
    view = feed.view_at(40)
    assert next(node.age_s for node in view.nodes if node.name == "nas") == 10.0
    assert [line.event.message for line in view.events.lines][-1] == "event 40"
    assert view.read_only
    assert view.tier("kv").hit_1m == 0.8


def test_it_plays_at_its_speed_and_stays_inside() -> None:
    clock = Clock()
    feed = ReplayFeed(Header("lab"), night(), clock=clock)
    clock.now = 5.0
    assert feed.position_s == 5.0
    feed.faster(1)
    clock.now = 10.0
    assert feed.position_s == 15.0
    feed.seek(-60)
    assert feed.position_s == 0.0
    feed.seek(1000)
    assert feed.position_s == 60.0
    for _ in range(10):
        feed.faster(-1)
    feed.seek(-30)
    clock.now = 100.0
    assert feed.position_s == 30.0


async def test_what_is_missing_of_a_recording_is_said_and_stays_marked() -> None:
    app = Console(ReplayFeed(Header("lab"), night(), missing="2 damaged lines are left out", clock=Clock()))
    async with app.run_test(size=(80, 24)) as pilot:
        lines = await Session(app, None, pilot).lines()
        assert "REPLAY 0:00/1:00 1x damaged" in lines[0]
        assert "the recording is damaged: 2 damaged lines are left out" in lines[-1]


async def test_the_screens_replay_with_keys_and_change_nothing() -> None:
    clock = Clock()
    feed = ReplayFeed(Header("lab"), night(), clock=clock)
    app = Console(feed, glyphs=UNICODE)
    async with app.run_test(size=(80, 24)) as pilot:
        one = Session(app, None, pilot)
        app.tick()
        assert "REPLAY 0:00/1:00 1x" in (await one.lines())[0]
        for key in ("right_square_bracket",) * 4:
            await pilot.press(key)
        lines = await one.lines()
        assert "REPLAY 0:40/1:00 1x" in lines[0]
        assert any("nas" in line and "lost" in line for line in lines)
        await pilot.press("plus")
        assert "2x" in (await one.lines())[0]
        await pilot.press("x")
        assert not isinstance(app.screen, Purge)
        for key in "2345":
            await pilot.press(key)
            await one.lines()
            app.tick()
            assert "REPLAY" in screen_text(app)[0]
        await pilot.press("1", "question_mark")
        assert "Faster" in "\n".join(await one.lines())


async def test_a_live_console_has_no_seek_keys() -> None:
    from tui_cluster import StagedFeed, healthy

    app = Console(StagedFeed(healthy()), glyphs=UNICODE)
    async with app.run_test(size=(80, 24)) as pilot:
        one = Session(app, None, pilot)
        app.tick()
        await pilot.press("question_mark")
        assert "Faster" not in "\n".join(await one.lines())


def test_an_incident_bundle_replays_and_keeps_no_secret(tmp_path: Path) -> None:
    incident = Incident(kept_s=20.0)
    for step in night():
        incident.add(step)
    path = tmp_path / "bundle.gz"
    config = {"inference.tenant": "acme", "security.token_file": "/secret", "vault.max_bytes": 4}
    count = incident.write(path, "lab", config)
    header, steps = read_recording(path)
    assert len(steps) == count
    assert header.config == {"vault.max_bytes": 4}
    assert header.versions["tierkv"]
    assert steps[0].at_unix_s >= START_UNIX_S + 40
    feed = ReplayFeed(header, steps)
    assert states(feed, 15.0)["nas"] == "live"
    assert sum(step.snapshot is not None for step in steps) < 25


class Source:
    def __init__(self, _: str) -> None:
        pass

    async def snapshots(self, interval_s: float) -> AsyncIterator:
        for i in range(3):
            yield vault(float(i)), True

    async def events(self, after_id: int) -> AsyncIterator:
        yield [event(1, "stored")], 2

    async def close(self) -> None:
        return


async def test_the_tap_hears_everything_that_the_feed_does() -> None:
    heard: list[Step] = []
    ended = asyncio.Event()

    def tap(step: Step) -> None:
        heard.append(step)
        if step.ended:
            ended.set()

    feed = LiveFeed([Target(NAS)], Source, tap=tap)
    running = asyncio.create_task(feed.run())
    async with asyncio.timeout(20):
        await ended.wait()
    running.cancel()
    assert sum(step.snapshot is not None for step in heard) == 3
    messages = [one.message for step in heard for one in step.events]
    assert messages[0] in ("stored", "lost: the agent closed the connection")
