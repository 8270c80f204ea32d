"""The first screen as plain text, from one moment of listening."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from tierkv.rpc.auth import Token
from tierkv.tui.app import targets_of
from tierkv.tui.live import live_feed
from tierkv.tui.model import ClusterView
from tierkv.tui.theme import Glyphs, glyphs_for
from tierkv.tui.widgets.cluster import cluster_line, why_lines
from tierkv.tui.widgets.events import event_line
from tierkv.tui.widgets.lines import plain
from tierkv.tui.widgets.misses import miss_lines
from tierkv.tui.widgets.nodes import node_lines
from tierkv.tui.widgets.tiers import tier_lines

LISTEN_S = 1.2
"""Two snapshots at 2 Hz, so that rates are known."""

WIDEST = 200
EVENTS = 10


async def listen(addresses: Sequence[str], token: Token | None, name: str, seconds: float = LISTEN_S) -> ClusterView:
    """The view after ``seconds`` of listening to every agent."""
    feed = live_feed(targets_of(addresses), token, cluster_name=name)
    listening = asyncio.create_task(feed.run())
    await asyncio.sleep(seconds)
    view = feed.view()
    listening.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await listening
    return view


def page(view: ClusterView, width: int, glyphs: Glyphs | None = None) -> list[str]:
    """The first screen's panels as lines of at most ``width`` cells, all nodes and the newest events."""
    glyphs, width = glyphs or glyphs_for(), min(width, WIDEST)
    lines = [*cluster_line(view, width, glyphs), *why_lines(view, width, 2, glyphs)]
    lines += node_lines(view, width, max(1, len(view.nodes)), glyphs)
    lines += tier_lines(view, view, width, glyphs)
    lines += miss_lines(view, width, 3, glyphs)
    lines.append(((" EVENTS", "head"),))
    lines += [event_line(line.event, width, glyphs) for line in view.events.lines[-EVENTS:]]
    return plain(lines)
