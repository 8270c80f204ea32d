"""Whole screens against stored pictures. ``TIERKV_GOLDEN=write`` stores them anew: look at them before committing."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.color import ColorSystem
from rich.console import Console as Terminal
from test_tui_work import MINI, NAS, TOML, Work, edit
from tui_cluster import GIB, StagedFeed, event, events_view, healthy, inference, vault, view_of
from tui_operator import FakeOperator

from tierkv.rpc.config_port import ConfigEffect
from tierkv.tui.app import Console
from tierkv.tui.model import cluster_view
from tierkv.tui.record import TargetRecord
from tierkv.tui.theme import ASCII, UNICODE

STORED = Path(__file__).parent / "golden"
EVENTS = events_view(
    event(0, "kv-vault 'nas' listens on 127.0.0.1:50051", kind="start", node="nas"),
    event(1, "12 blocks of SmolLM2-135M to nas"),
    event(2, "14 records evicted", kind="evict", node="nas"),
    event(3, "lost: connection refused", kind="link", severity="warning", node="nas"),
)


def compare(app: Console, name: str) -> None:
    """The screen is the stored picture; ids that differ from run to run are left out."""
    svg = re.sub(r"terminal-\d+(?=[-\s{\"])", "terminal", app.export_screenshot(title=name, simplify=True))
    path = STORED / f"{name}.svg"
    if os.environ.get("TIERKV_GOLDEN") == "write":
        STORED.mkdir(exist_ok=True)
        path.write_text(svg)
    assert svg == path.read_text(), f"{path.name} differs; TIERKV_GOLDEN=write stores what is shown now"


def session(view, size=(80, 24), operator=None, **settings):
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def opened():
        feed = StagedFeed(view)
        fake = operator or FakeOperator()
        shapes = settings.pop("glyphs", UNICODE)
        app = Console(feed, operator=fake, config_path=Path("tierkv.toml"), glyphs=shapes, theme="dark", **settings)
        async with app.run_test(size=size) as pilot:
            one = Work(app, feed, pilot)
            one.operator = fake
            await one.show(view)
            await one.settled()
            yield one

    return opened()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tierkv.toml").write_text(TOML)


def over():
    return view_of(inference(0, memory=replace(inference(0).memory, used_bytes=70 * GIB)), vault(0), at=0)


VIEWS = {
    "connecting": lambda: cluster_view([TargetRecord("nas:50051")], now_s=0, now_unix_s=0),
    "healthy": lambda: healthy(events=EVENTS),
    "over-threshold": over,
    "one-lost": lambda: view_of(inference(12), vault(0), at=12, lost=(NAS,), events=EVENTS),
    "all-lost": lambda: view_of(inference(0), vault(0), at=90, lost=(MINI, NAS)),
    "read-only": lambda: healthy(read_only=True, events=EVENTS),
}


@pytest.mark.parametrize("name", VIEWS)
async def test_the_first_screen(name: str) -> None:
    async with session(VIEWS[name]()) as one:
        compare(one.app, name)


async def test_200_by_60() -> None:
    async with session(healthy(events=EVENTS), size=(200, 60)) as one:
        compare(one.app, "200x60")


@pytest.mark.parametrize(("key", "name"), [("2", "nodes"), ("4", "events")])
async def test_the_other_views(key: str, name: str) -> None:
    async with session(healthy(events=EVENTS)) as one:
        await one.do(key)
        compare(one.app, name)


async def test_the_purge_dialog() -> None:
    async with session(healthy(events=EVENTS)) as one:
        await one.do("4", "x", "enter")
        compare(one.app, "purge")


async def test_the_diff_of_the_configuration() -> None:
    fake = FakeOperator()
    note = "would evict 3.0 GiB, 9 prefixes now"
    fake.effects = {MINI: [ConfigEffect("inference.memory_threshold", 0.6, 0.3, "live", note, 3 << 30, 9)]}
    async with session(healthy(), operator=fake) as one:
        await edit(one, "memory_threshold", "0.3")
        await one.do("enter", "escape", "a")
        compare(one.app, "config-diff")


async def test_faults_of_the_configuration() -> None:
    async with session(healthy()) as one:
        await edit(one, "memory_threshold", "70")
        compare(one.app, "config-faults")


async def test_16_colours_keep_the_states_apart() -> None:
    for theme in ("dark", "light"):
        app = Console(StagedFeed(healthy()), theme=theme)
        async with app.run_test(size=(80, 24)):
            shown = {
                role: app.palette[role].color.downgrade(ColorSystem.STANDARD).number for role in ("ok", "warn", "bad")
            }
            assert len(set(shown.values())) == 3, (theme, shown)


def sent(app: Console, colours: str | None) -> str:
    """What a terminal with so many colours gets, a line a line."""
    terminal = Terminal(force_terminal=True, color_system=colours, width=app.size.width, legacy_windows=False)
    filters = [one for one in app._filters if type(one).__name__ == "NoColor"]
    behind = app.screen.background_colors[1]
    lines: list[str] = []
    for strip in app.screen._compositor.render_strips():
        for one in filters:
            strip = strip.apply_filter(one, behind)
        lines.append(strip.render(terminal))
    return "\n".join(lines) + "\n"


def compare_sent(text: str, name: str) -> None:
    path = STORED / f"{name}.txt"
    if os.environ.get("TIERKV_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; TIERKV_GOLDEN=write stores what is shown now"


CODES = re.compile(r"\x1b\[([0-9;]*)m")


async def test_a_terminal_of_16_colours_gets_no_others() -> None:
    async with session(VIEWS["one-lost"]()) as one:
        text = sent(one.app, "standard")
        compare_sent(text, "16-colours")
    codes = {int(code) for found in CODES.findall(text) for code in found.split(";") if code}
    allowed = {0, 1, *range(30, 38), *range(40, 48), *range(90, 98), *range(100, 108)}
    assert codes <= allowed, codes - allowed
    assert CODES.sub("", text).isprintable() or "\x1b" not in CODES.sub("", text)


async def test_a_terminal_without_colours_still_says_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with session(VIEWS["one-lost"]()) as one:
        text = sent(one.app, "truecolor")
        compare_sent(text, "no-colour")
    codes = {int(code) for found in CODES.findall(text) for code in found.split(";") if code}
    assert codes <= {0, 1, 2, 4, 7, 39, 49}, codes  # attributes, and the terminal's own colours
    assert all(word in text for word in ("trouble", "lost", "stale 12 s", "1/2 up"))


async def test_a_terminal_of_ascii_gets_ascii() -> None:
    async with session(VIEWS["one-lost"](), glyphs=ASCII) as one:
        text = CODES.sub("", sent(one.app, "standard"))
        compare_sent(text, "ascii")
    assert text.isascii()
