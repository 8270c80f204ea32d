"""Fifty talkative nodes and a thousand events a second: repaints and memory stay bounded, nothing is lost on the way.

Nothing here asserts a time; repaints are counted against the console's own clock ticks.
"""

import asyncio
from collections.abc import AsyncIterator

from tui_cluster import event, inference, screen_text, vault

from tierkv.tui.app import Console
from tierkv.tui.feed import LiveFeed, Target
from tierkv.tui.record import BUCKETS

NODES = 50
EVENTS_EACH = 100
KEPT = 2000


class Chatty:
    """One of fifty agents: ten snapshots in a row, then one every tenth of a second; events without a pause."""

    def __init__(self, address: str) -> None:
        self.number = int(address.rpartition(":")[2])

    async def snapshots(self, interval_s: float) -> AsyncIterator:
        for i in range(1_000_000):
            make = inference if self.number % 5 == 0 else vault
            yield make(i / 2, name=f"n{self.number}", node_id=str(self.number), address=f"n:{self.number}"), True
            await asyncio.sleep(0 if i < 10 else 0.1)

    async def events(self, after_id: int) -> AsyncIterator:
        for batch in range(EVENTS_EACH // 10):
            ids = range(batch * 10, batch * 10 + 10)
            yield [event(i, f"event {i}", node=f"n{self.number}") for i in ids], 0
            await asyncio.sleep(0.02)
        await asyncio.Event().wait()

    async def close(self) -> None:
        return


async def test_fifty_nodes_and_a_storm_of_events_stay_bounded() -> None:
    feed = LiveFeed([Target(f"n:{i}") for i in range(NODES)], Chatty, events_kept=KEPT)
    app = Console(feed)
    updates = 0

    async with app.run_test(size=(120, 40)) as pilot:
        draw = app._display

        def counted(screen, renderable) -> None:
            nonlocal updates
            updates += renderable is not None
            draw(screen, renderable)

        await pilot.pause()
        app._display = counted
        before = app.repaints
        view = feed.view()
        async with asyncio.timeout(60):
            while len(view.events.lines) + view.events.forgotten + view.events.dropped < NODES * EVENTS_EACH:
                await asyncio.sleep(0.1)
                view = feed.view()
        await asyncio.sleep(1.0)
        painted = app.repaints - before
        lines = screen_text(app)

    assert view.up == NODES
    assert len(view.events.lines) == KEPT
    assert view.events.forgotten + view.events.dropped == NODES * EVENTS_EACH - KEPT
    assert 0 < updates <= 2 * painted + 1, "each tick may cost one update, and one more when a panel changes its height"
    for record in feed._records.values():
        assert len(record.tail) <= 100
        assert len(record.minute) <= 14
        assert all(len(history.values) <= BUCKETS for history in record.history.values())
    assert "50/50 up" in lines[0]
    assert any("more nodes" in line for line in lines)


async def test_the_consoles_clock_ticks_at_most_four_times_a_second() -> None:
    feed = LiveFeed([], Chatty)
    for asked, period in ((60.0, 0.25), (4.0, 0.25), (1.0, 1.0)):
        assert Console(feed, refresh_hz=asked)._period_s == period
