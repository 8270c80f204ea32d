"""The first screen, driven as a person drives it; what is on the terminal is read back from the compositor."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from textual.command import CommandPalette
from tui_cluster import GIB, StagedFeed, event, events_view, healthy, inference, screen_text, vault, view_of

from tierkv.errors import EXIT_INTERRUPTED
from tierkv.tui.app import Console, targets_of, theme_named
from tierkv.tui.model import ClusterView, cluster_view
from tierkv.tui.record import TargetRecord, failed
from tierkv.tui.screens.overview import Overview, plan
from tierkv.tui.theme import ASCII, UNICODE


class Session:
    """A running console and its feed. The screen is told of a new view by ``show``, never by time."""

    def __init__(self, app: Console, feed: StagedFeed, pilot) -> None:
        self.app, self.feed, self.pilot = app, feed, pilot

    async def show(self, view: ClusterView) -> list[str]:
        self.feed.staged = view
        self.app.tick()
        return await self.lines()

    async def press(self, *keys: str) -> list[str]:
        await self.pilot.press(*keys)
        return await self.lines()

    async def lines(self) -> list[str]:
        await self.pilot.pause()
        await self.pilot.pause()
        return screen_text(self.app)

    async def resized(self, width: int, height: int, seen: Callable[[list[str]], bool]) -> list[str]:
        """The lines once ``seen`` holds for them: Textual passes a new size on after moments of its own."""
        await self.pilot.resize_terminal(width, height)
        async with asyncio.timeout(20):
            while not seen(lines := await self.lines()):
                await self.pilot.pause(0.01)
        return lines

    @property
    def overview(self) -> Overview:
        return next(screen for screen in self.app.screen_stack if isinstance(screen, Overview))


def opened(view: ClusterView | None = None, size: tuple[int, int] = (80, 24), **settings):
    """An async context with a Session that shows ``view``."""
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def session():
        feed = StagedFeed(view)
        app = Console(feed, glyphs=settings.pop("glyphs", UNICODE), **settings)
        async with app.run_test(size=size) as pilot:
            one = Session(app, feed, pilot)
            await one.show(feed.staged)
            yield one

    return session()


async def test_connecting() -> None:
    view = cluster_view([TargetRecord("nas:50051")], now_s=0, now_unix_s=0)
    async with opened(view) as session:
        lines = await session.lines()
    assert "0/1 up" in lines[0]
    assert "no data yet" in lines[0]
    assert lines[1] == " ◌ waiting  Connecting to nas:50051."
    assert lines[4].split() == ["◌", "wait", "nas:50051", "connecting"]


async def test_a_healthy_cluster_fills_80_by_24() -> None:
    async with opened(healthy()) as session:
        lines = await session.lines()
    assert lines[:17] == [
        " TierKV  lab  ● 3/3 up  SmolLM2-135M  0.4 s old          authenticated 07:23:23",
        " ● fine  All 3 agents are up; hit rate over the last minute: hot 75%, cold KV",
        "         80%, cold SSM 80%; 41s of prefill (12.3k tokens) saved so far.",
        " NODES                  role      memory         used/mark doing",
        " ● live    mini         inference ━━━━━╸──┃───── 40/60%    promoting 3 prefixes",
        " ● live    nas          kv-vault  ━━━╸────────── 25%       in 10M/s",
        " ● live    pi           ssm-vault ━━━╸────────── 25%       in 10M/s",
        " TIERS       size/cap hit 1m  10m   p50   p99 in/s out/s evict/s  5 min",
        " hot        3.0G/8.0G    75%  50%     –     –    0     0       0             ▁",
        " local     not in use",
        " cold KV    1.0G/4.0G    80%  80%  12ms 220ms  10M     0       0             ▇",
        " cold SSM   1.0G/4.0G    80%  80%     –     –  10M     0       0             ▇",
        " MISSES by reason            total in 1 min          PREFILL SAVED",
        "  never stored                   2        –          41s of prefill",
        "                                                     12.3k tokens not prefilled",
        "                                                     no damaged records",
        " EVENTS  3 kept",
    ]
    assert lines[17] == " 07:23:20 · mini       demote   stored 12 blocks"
    assert lines[23] == " space pause  / filter events             1-5 views  q quit  ? help  : palette"
    assert len(lines) == 24


async def test_over_the_threshold() -> None:
    memory = replace(inference(0).memory, used_bytes=70 * GIB)
    async with opened(view_of(inference(0, memory=memory), at=0)) as session:
        lines = await session.lines()
    assert lines[1].startswith(" ▲ attention  mini is over its mark since 07:23 (70% of memory used, mark 60%)")
    assert lines[4].startswith(" ▲ over    mini         inference ━━━━━━━━┃━──── 70/60%")


async def test_a_node_is_lost_and_comes_back() -> None:
    async with opened(view_of(inference(0), vault(0), at=0)) as session:
        assert "● live    nas" in (await session.lines())[5]
        lost = await session.show(view_of(inference(12), vault(0), at=12, lost=("127.0.0.1:50051",)))
        assert "▲ 1/2 up" in lost[0]
        assert lost[5].startswith(" ○ lost•   nas          kv-vault  ━━━╸────────── 25%       stale 12 s · connec…")
        assert "1.0 GiB of cold KV cannot be restored" in " ".join(" ".join(lost[1:3]).split())
        assert lost[9].startswith(" cold KV ○  1.0G/4.0G") or lost[8].startswith(" cold KV ○  1.0G/4.0G")
        back = await session.show(view_of(inference(13), vault(13), at=13))
        assert "● 2/2 up" in back[0]
        assert "● live•   nas" in back[5]


async def test_the_rows_of_a_lost_node_are_greyed() -> None:
    async with opened(view_of(vault(0), at=12, lost=("127.0.0.1:50051",))) as session:
        await session.lines()
        strip = session.app.screen.query_one("#nodes").render_line(1)
        name = next(segment for segment in strip if segment.text.startswith("nas"))
        assert name.style.color == session.app.palette["dim"].color


async def test_all_lost() -> None:
    view = view_of(inference(0), vault(0), at=90, lost=("127.0.0.1:50050", "127.0.0.1:50051"))
    async with opened(view) as session:
        lines = await session.lines()
    assert "○ 0/2 up" in lines[0]
    assert "90 s old" in lines[0]
    assert lines[1].startswith(" × trouble  All 2 agents have stopped answering; everything here is 90 s old.")
    assert lines[2].strip() == "Still trying to reconnect."


async def test_nobody_there_says_how_to_start() -> None:
    records = [failed(TargetRecord(one.address, expected=one.expected), "refused", 0) for one in targets_of([])]
    async with opened(cluster_view(records, now_s=0, now_unix_s=0)) as session:
        lines = await session.lines()
    assert "Start one: tierkv agent --role inference" in " ".join(line.strip() for line in lines[1:3])
    assert [line.split()[:2] for line in lines[4:7]] == [["·", "none"]] * 3


@pytest.mark.parametrize(
    ("settings", "badge"),
    [({"read_only": True}, " read-only "), ({"authenticated": False}, " read-only "), ({}, "authenticated")],
)
async def test_the_badge(settings: dict, badge: str) -> None:
    async with opened(view_of(vault(0), at=0, **settings)) as session:
        assert badge in (await session.lines())[0]


HOSTILE = "\x1b[2J\u202e[red]x[/red][@click=app.quit]y[/]"


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_hostile_names_are_plain_text_everywhere(size: tuple[int, int]) -> None:
    kv = replace(inference(0).tiers[1], miss_reasons={HOSTILE: 3})
    engine = replace(inference(0).engines[0], model=HOSTILE)
    mini = inference(0, name=HOSTILE, activity=HOSTILE, tiers=(kv,), engines=(engine,), version=HOSTILE)
    pi = vault(0, name=HOSTILE + "2", role=HOSTILE)
    events = events_view(event(1, HOSTILE, node=HOSTILE, kind=HOSTILE, severity=HOSTILE, attributes={HOSTILE: HOSTILE}))
    view = view_of(mini, pi, at=9, lost=(pi.address,), name=HOSTILE, events=events)
    async with opened(view, size=size) as session:
        lines = await session.lines()
        assert session.app.is_running
        text = "\n".join(lines)
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "[red]x[/red][@cli" in lines[-2] or any("[red]x[/red][@cli" in line for line in lines)
        assert len(lines) == size[1]
        await session.press("slash", *"[red]", "enter")
        assert "filter [red]  1 match" in "\n".join(await session.lines())


async def test_space_pauses_tables_while_header_meters_and_history_go_on() -> None:
    first = view_of(inference(0), vault(0), at=0, events=events_view(event(1, "before")))
    full = replace(vault(0).tiers[0], size_bytes=3 * GIB)
    memory = replace(vault(0).memory, used_bytes=48 * GIB)
    later = view_of(
        inference(30), vault(30, tiers=(full,), memory=memory), at=30, events=events_view(event(1), event(2, "after"))
    )
    async with opened(first) as session:
        await session.press("space")
        paused = await session.show(later)
        assert "PAUSED" in paused[0]
        assert "07:23:50" in paused[0]
        assert "75%" in next(line for line in paused if "kv-vault" in line)
        assert "1.0G/4.0G" in next(line for line in paused if line.startswith(" cold KV"))
        assert not any("after" in line for line in paused)
        resumed = await session.press("space")
        assert "PAUSED" not in resumed[0]
        assert "3.0G/4.0G" in next(line for line in resumed if line.startswith(" cold KV"))
        assert any("after" in line for line in resumed)


async def test_the_filter_follows_every_letter_enter_keeps_it_escape_drops_it() -> None:
    events = events_view(
        event(1, "one", node="nas"), event(2, "two", node="mini"), event(3, "three", node="nas", kind="evict")
    )
    async with opened(healthy(events=events)) as session:
        typed = await session.press("slash", *"node:nas")
        assert typed[23] == " / node:nas"
        assert [line.split()[-1] for line in typed[17:19]] == ["one", "three"]
        assert "filter node:nas  2 match" in typed[16]
        assert "two" not in "\n".join(typed)
        kept = await session.press("enter")
        assert "q quit" in kept[23]
        assert "two" not in "\n".join(kept)
        inverse = await session.press("slash", *" !kind:evict", "enter")
        assert "filter node:nas !kind:evict  1 match" in inverse[16]
        dropped = await session.press("escape")
        assert "two" in "\n".join(dropped)
        assert "filter" not in dropped[16]


@pytest.mark.parametrize("view", "12345")
@pytest.mark.parametrize("end", ["enter", "escape"])
async def test_the_line_of_keys_is_back_with_the_end_of_the_filter_and_waits_for_no_view(view: str, end: str) -> None:
    async with opened(healthy(events=events_view(event(1)))) as session:
        before = await session.press(view)
        session.app._clock.stop()
        await session.press("slash", "n")
        assert (await session.press(end))[23] == before[23]


async def test_letters_typed_into_the_filter_are_not_commands() -> None:
    async with opened(healthy()) as session:
        lines = await session.press("slash", *"qz ?:")
        assert session.app.is_running
        assert lines[23] == " / qz ?:"
        assert not session.overview.paused
        assert not session.overview.maximised
        assert (await session.press("escape"))[23].startswith(" space pause")


async def test_zoom_gives_the_events_the_whole_screen_and_escape_takes_it_back() -> None:
    events = events_view(*(event(i, f"event {i}") for i in range(100)))
    async with opened(healthy(events=events)) as session:
        zoomed = await session.press("z")
        assert sum("event " in line for line in zoomed) == 19
        assert "3/3 up" in zoomed[0]
        back = await session.press("escape")
        assert sum("event " in line for line in back) == 6


async def test_scrolling_back_holds_still_while_new_events_come() -> None:
    many = [event(i, f"event {i}") for i in range(100)]
    async with opened(healthy(events=events_view(*many[:50]))) as session:
        scrolled = await session.press("up", "up")
        assert scrolled[22].endswith("event 47")
        more = await session.show(healthy(events=events_view(*many)))
        assert more[22].endswith("event 47")
        assert "52 newer" in more[16]
        oldest = await session.press("home")
        assert oldest[17].endswith("event 0")
        assert (await session.press("pagedown"))[17].endswith("event 5")
        assert (await session.press("end"))[22].endswith("event 99")
        await session.press("up")
        assert (await session.press("escape"))[22].endswith("event 99")


async def test_the_mouse_wheel_scrolls_events() -> None:
    from textual.events import MouseScrollUp

    async with opened(healthy(events=events_view(*(event(i, f"event {i}") for i in range(50))))) as session:
        feed = session.overview.feed
        feed.post_message(MouseScrollUp(feed, 1, 1, 0, 0, 0, False, False, False))
        assert (await session.lines())[22].endswith("event 46")


async def test_help_lists_every_binding_and_closes() -> None:
    async with opened(healthy()) as session:
        shown = "\n".join(await session.press("question_mark"))
        app = session.app
        offered = [one for one in Console.BINDINGS if app.check_action(one.action.partition("(")[0], ()) is not False]
        for binding in [*Overview.BINDINGS, *offered]:
            assert binding.description in shown
        assert "Incident bundle" not in shown, "this console records nothing"
        assert "Focus Next" not in shown
        assert "KEYS" not in "\n".join(await session.press("escape"))


async def test_the_palette_offers_every_action() -> None:
    async with opened(healthy()) as session:
        names = {command.title for command in session.app.get_system_commands(session.app.screen)}
        assert {"Pause", "Filter events", "Zoom events", "Quit", "Help", "Theme"} <= names
        pause = next(one for one in session.app.get_system_commands(session.app.screen) if one.title == "Pause")
        await pause.callback()
        assert session.overview.paused
        for key in ("ctrl+p", "colon"):
            await session.press(key)
            assert isinstance(session.app.screen, CommandPalette)
            await session.press("escape")


async def test_q_quits_with_0_and_ctrl_c_with_130() -> None:
    async with opened(healthy()) as session:
        await session.pilot.press("q")
        await session.pilot.pause()
    assert session.app.return_value == 0
    async with opened(healthy()) as session:
        await session.pilot.press("ctrl+c")
        await session.pilot.pause()
    assert session.app.return_value == EXIT_INTERRUPTED


async def test_60_by_16_shows_what_matters_and_less_says_what_it_needs() -> None:
    async with opened(healthy(), size=(60, 16)) as session:
        lines = await session.lines()
        assert len(lines) == 16
        assert [line.split()[2] for line in lines[3:6]] == ["mini", "nas", "pi"]
        assert lines[6].split() == ["TIERS", "size/cap", "hit", "1m", "10m", "p50", "p99", "in/s", "out/s"]
        assert "q quit" in lines[15]
        await session.resized(50, 12, lambda lines: lines[:3] == ["TierKV", "needs 60x16,", "this is 50x12"])
        await session.resized(60, 16, lambda lines: len(lines) == 16 and lines[6].startswith(" TIERS"))


async def test_200_by_60_uses_the_room() -> None:
    async with opened(healthy(), size=(200, 60)) as session:
        lines = await session.lines()
    heading = next(line for line in lines if line.startswith(" TIERS"))
    assert "fill" in heading
    assert "traffic, 5 min" in heading


@pytest.mark.parametrize("nodes", [1, 3, 9, 50, 500])
@pytest.mark.parametrize(("width", "height"), [(60, 16), (80, 20), (80, 24), (120, 30), (160, 44), (250, 70)])
def test_every_plan_fits_and_leaves_events_at_least_two_lines(width: int, height: int, nodes: int) -> None:
    assert plan(width, height, nodes, 12).needed + 1 + 2 <= height


async def test_ascii_terminals_get_ascii_only() -> None:
    view = view_of(inference(0, name="büro"), vault(0), at=12, lost=("127.0.0.1:50051",))
    async with opened(view, glyphs=ASCII) as session:
        text = "\n".join(await session.lines() + await session.press("question_mark"))
    assert text.isascii()
    assert "b?ro" in text


async def test_no_color_means_no_colour_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with opened(healthy()) as session:
        await session.lines()
        filters = session.app._filters
        strips = [
            strip.apply_filter(one, session.app.screen.background_colors[1])
            for strip in session.app.screen._compositor.render_strips()
            for one in filters
            if type(one).__name__ == "NoColor"
        ]
    assert strips
    colours = {(s.style.color, s.style.bgcolor) for strip in strips for s in strip if s.style}
    assert all((a is None or a.is_default) and (b is None or b.is_default) for a, b in colours)


async def test_light_and_dark_differ_and_can_be_changed_while_running() -> None:
    async with opened(healthy(), theme="light") as session:
        svg = session.app.export_screenshot(simplify=True)
        assert "#fbfbf9" in svg
        session.app.theme = "tierkv-dark"
        await session.lines()
        assert "#fbfbf9" not in session.app.export_screenshot(simplify=True)
        session.app.theme = "nord"
        assert " TierKV" in (await session.lines())[0]


def test_the_theme_follows_the_terminal_where_it_tells() -> None:
    known = {"nord": None}
    assert theme_named("auto", known, {"COLORFGBG": "0;15"}) == "tierkv-light"
    assert theme_named("auto", known, {"COLORFGBG": "15;0"}) == theme_named("auto", known, {}) == "tierkv-dark"
    assert (theme_named("nord", known), theme_named("light", known)) == ("nord", "tierkv-light")


async def test_an_unchanged_view_repaints_no_line() -> None:
    async with opened(healthy()) as session:
        await session.lines()
        tiers = session.app.screen.query_one("#tiers")
        assert tiers.paint(tiers.lines) is False
