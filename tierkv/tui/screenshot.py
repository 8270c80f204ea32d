"""Pictures of the console: the SVG that a terminal of a given size would show, in a light and a dark theme."""

from __future__ import annotations

import argparse
import asyncio
import html
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tierkv.telemetry.recording import read_recording
from tierkv.telemetry.snapshot import Event, NodeSnapshot
from tierkv.tui.app import Console, targets_of
from tierkv.tui.feed import EventLog, Feed, FixedFeed
from tierkv.tui.model import cluster_view
from tierkv.tui.record import TargetRecord, observed
from tierkv.tui.replay import ReplayFeed
from tierkv.tui.theme import UNICODE

FONTS = "ui-monospace, 'SF Mono', 'DejaVu Sans Mono', Menlo, Consolas, monospace"


def feed_of(
    snapshots: Sequence[NodeSnapshot], events: Sequence[Event] = (), *, name: str = "", authenticated: bool = True
) -> Feed:
    """A feed that stands still: the snapshots of each agent in order of time, and the view right after the last."""
    start_s = min((one.now_unix_s for one in snapshots), default=0.0)
    last_s = max((one.now_unix_s for one in snapshots), default=0.0)
    addresses = sorted({one.node_id: one.address for one in snapshots}.items(), key=lambda pair: pair[1])
    records = {node_id: TargetRecord(address) for node_id, address in addresses}
    for one in sorted(snapshots, key=lambda snapshot: snapshot.now_unix_s):
        records[one.node_id] = observed(
            records[one.node_id], one, authenticated, one.now_unix_s - start_s, one.now_unix_s
        )
    log = EventLog()
    log.add(events)
    return FixedFeed(
        cluster_view(
            tuple(records.values()),
            now_s=last_s - start_s + 0.2,
            now_unix_s=last_s + 0.2,
            name=name,
            events=log.view(),
        )
    )


async def picture(feed: Feed, *, seconds: float = 0.0, size: tuple[int, int] = (100, 30), theme: str = "dark") -> str:
    """The SVG of the first screen after ``seconds`` of listening to ``feed``."""
    app = Console(feed, theme=theme, glyphs=UNICODE)
    async with app.run_test(size=size) as pilot:
        await pilot.pause(seconds)
        # The first paint may change the height that the lists have; the second one fills it.
        for _ in range(2):
            app.tick()
            await pilot.pause(0.3)
        return self_contained(app.export_screenshot(title="tierkv tui"))


def self_contained(svg: str) -> str:
    """The SVG without web fonts: it loads nothing and shows in the reader's own fixed-width font."""
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family:\s*[^;]+;", f"font-family: {FONTS};", svg)
    return re.sub(r'x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"([^>]*)>([^<]*)<', _trimmed, svg)


def _trimmed(match: re.Match[str]) -> str:
    """One run of text without its outer blanks, moved to where it then begins; some viewers drop such blanks."""
    x, y, length, rest, text = match.groups()
    blank = "&#160;"
    count = len(html.unescape(text))
    cell = float(length) / count if count else 0.0
    shown = re.sub(f"^(?:{blank})+", "", text)
    ahead = (len(text) - len(shown)) // len(blank)
    shown = re.sub(f"(?:{blank})+$", "", shown)
    width = len(html.unescape(shown)) * cell
    return f'x="{float(x) + ahead * cell:g}" y="{y}" textLength="{width:g}"{rest}>{shown}<'


def write_pictures(
    folder: Path,
    *,
    addresses: Sequence[str] = (),
    snapshots: Sequence[NodeSnapshot] = (),
    events: Sequence[Event] = (),
    name: str = "",
    seconds: float = 5.0,
    size: tuple[int, int] = (100, 30),
    recording: Path | None = None,
) -> list[Path]:
    """``console-dark.svg`` and ``console-light.svg`` are in ``folder``.

    From ``recording`` at ``seconds`` or from ``snapshots`` where given, else live.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for theme in ("dark", "light"):
        if recording is not None:
            feed = moment(recording, seconds)
        else:
            feed = feed_of(snapshots, events, name=name) if snapshots else _live(addresses, name)
        listening_s = 0.0 if snapshots or recording else seconds
        svg = asyncio.run(picture(feed, seconds=listening_s, size=size, theme=theme))
        written.append(folder / f"console-{theme}.svg")
        written[-1].write_text(svg, encoding="utf-8")
    return written


def moment(recording: Path, at_s: float) -> Feed:
    """A feed that stands still at ``at_s`` of the recording, as the live console showed it."""
    view = ReplayFeed(*read_recording(recording)).view_at(at_s)
    return FixedFeed(replace(view, replay="", read_only=False, authenticated=True))


def _live(addresses: Sequence[str], name: str) -> Feed:
    from tierkv.rpc.auth import load_token
    from tierkv.tui.live import live_feed

    return live_feed(targets_of(addresses), load_token, cluster_name=name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Pictures of what runs now, or of a moment of a recording.

    ``python -m tierkv.tui.screenshot docs --replay night.ndjson --seconds 110`` writes two files into docs.
    """
    parser = argparse.ArgumentParser(prog="tierkv.tui.screenshot", description="Pictures of the console, as SVG.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--connect", action="append", default=[], metavar="HOST:PORT")
    parser.add_argument("--name", default="", help="the cluster's name in the picture")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to listen first, or when in the recording")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="a recording instead of agents")
    parser.add_argument("--size", default="100x30", help="columns x lines")
    given = parser.parse_args(arguments)
    columns, _, rows = given.size.partition("x")
    size = (int(columns), int(rows))
    for path in write_pictures(
        given.folder,
        addresses=given.connect,
        name=given.name,
        seconds=given.seconds,
        size=size,
        recording=given.replay,
    ):
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
