"""Dialogs while agents are lost, stuck or many: what is not known is said, and what has begun is not let go of."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

import pytest
from test_tui_work import MINI, TOML, Work, edit, here, opened, read, row  # noqa: F401 - here is a fixture
from textual.widgets import Button
from tui_cluster import MIB, StagedFeed, event, events_view, healthy, inference, screen_text, vault, view_of
from tui_operator import NAS, FakeOperator, prefix

from tierkv.errors import EXIT_INTERRUPTED, DeadlineExceeded
from tierkv.rpc.admin import PurgePlan
from tierkv.rpc.config_port import Acknowledged
from tierkv.tui.app import Console
from tierkv.tui.model import LABELS, NodeState, cluster_view
from tierkv.tui.operate import Holder, PrefixList, PrefixRow, Preview, Selection, away_of
from tierkv.tui.record import TargetRecord
from tierkv.tui.screens.apply import Apply
from tierkv.tui.screens.purge import Purge
from tierkv.tui.theme import ASCII, UNICODE
from tierkv.tui.widgets.lines import plain
from tierkv.tui.widgets.nodes import GRAVEST_FIRST, ROLES, STATES, WORDS
from tierkv.tui.widgets.table import Table
from tierkv.tui.widgets.tiers import ROWS


class Stuck(FakeOperator):
    """What is asked of it waits until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.waits: set[str] = set()

    async def _held(self, name: str) -> None:
        if name in self.waits:
            await self.go.wait()

    async def preview(self, holders, what):
        await self._held("preview")
        return await super().preview(holders, what)

    async def purge(self, previews):
        await self._held("purge")
        return await super().purge(previews)

    async def apply(self, checked, changes):
        await self._held("apply")
        return await super().apply(checked, changes)


def nas_lost():
    return view_of(inference(12), vault(0), at=12, lost=(NAS.address,))


async def nothing() -> PrefixList:
    return PrefixList()


async def until(one: Work, seen) -> list[str]:
    async with asyncio.timeout(20):
        while not seen(lines := screen_text(one.app)):
            await one.pilot.pause(0.01)
            one.app.tick()
    return lines


# --- who cannot be asked -------------------------------------------------------------------------


def test_who_may_hold_records_and_cannot_be_asked_is_known() -> None:
    assert [(one.holder.name, one.error) for one in away_of(nas_lost())] == [
        ("nas", "cannot be asked (lost, stale 12 s)")
    ]
    assert away_of(healthy()) == []
    never_seen = cluster_view([TargetRecord("nas:50051")], now_s=0, now_unix_s=0)
    assert [one.error for one in away_of(never_seen)] == ["connecting"]


async def test_a_purge_of_everything_names_the_node_that_is_lost() -> None:
    async with opened(nas_lost()) as one:
        await one.do("x", "end", "enter")
        text = "\n".join(await one.settled())
        assert "nothing that would go is at the nodes that answer" in text
        assert "1 node cannot be asked: what is there stays" in text
        assert any("nas" in line and "cannot be asked (lost, stale 12 s)" in line for line in text.splitlines())


async def test_a_list_of_prefixes_says_whose_are_missing() -> None:
    async with opened(nas_lost()) as one:
        lines = await one.do("3")
        assert "without nas; 3 of 3" in lines[1]
    async with opened(nas_lost()) as one:
        one.operator.prefixes = lambda holders: nothing()
        lines = await one.do("3")
        assert "no vault answers; nas: cannot be asked (lost, stale 12 s)" in "\n".join(lines)


async def test_a_list_that_is_opened_before_anything_was_heard_asks_as_soon_as_there_is_somebody() -> None:
    never_seen = cluster_view([TargetRecord(NAS.address)], now_s=0, now_unix_s=0)
    async with opened(never_seen) as one:

        async def prefixes(holders):
            rows = tuple(PrefixRow(NAS, held) for held in one.operator.held) if holders else ()
            return PrefixList(rows, len(rows))

        one.operator.prefixes = prefixes
        lines = await one.do("3")
        assert "no vault holds anything" not in "\n".join(lines)
        await one.show(healthy())
        assert row(await one.settled(), "01010101")


async def test_a_list_that_is_opened_for_the_first_time_asks_the_vaults_that_are_up() -> None:
    async with opened() as one:
        asked: list[list[str]] = []

        async def prefixes(holders):
            asked.append([holder.name for holder in holders])
            return PrefixList()

        one.operator.prefixes = prefixes
        assert "no vault holds anything" in "\n".join(await one.do("3"))
        assert asked
        assert all(names == ["nas", "pi"] for names in asked)


async def test_what_a_lost_vault_said_last_stays_and_is_dim() -> None:
    up = view_of(inference(0), vault(0), at=0)
    async with opened(up) as one:

        async def prefixes(holders):
            rows = tuple(PrefixRow(NAS, held) for held in one.operator.held) if NAS in holders else ()
            return PrefixList(rows, len(rows))

        one.operator.prefixes = prefixes
        assert row(await one.do("3"), "02020202")
        await one.show(nas_lost())
        lines = await one.settled()
        assert row(lines, "02020202")
        assert "without nas; 3 of 3" in lines[1]
        assert {one.app.screen.table.columns[0].role(held) for held in one.app.screen.table.rows} == {"dim"}
        await one.show(up)
        lines = await one.settled()
        assert "without" not in lines[1]
        assert {one.app.screen.table.columns[0].role(held) for held in one.app.screen.table.rows} == {"text"}


async def test_what_a_lost_agent_said_of_its_requests_stays_and_is_dim() -> None:
    async with opened() as one:
        assert row(await one.do("i"), "computed")
        await one.show(view_of(inference(0), vault(12), at=12, lost=(MINI,)))
        lines = await one.settled()
        assert row(lines, "computed")
        assert "1 silent" in lines[1]
        assert {one.app.screen.table.columns[1].role(held) for held in one.app.screen.table.rows} == {"dim"}


@pytest.mark.parametrize(("view", "told"), [(nas_lost, "nas cannot be asked"), (healthy, "at no node: it is gone")])
async def test_a_prefix_is_gone_only_where_all_could_be_asked(view, told: str) -> None:
    async with opened(view()) as one:

        async def records(holders, key):
            return []

        one.operator.records = records
        await one.do("3")
        text = "\n".join(await one.do("enter"))
        assert told in text
        assert ("it is gone" in text) == (told == "at no node: it is gone")


# --- what has begun ------------------------------------------------------------------------------


async def test_nothing_interrupts_a_change_that_is_on_its_way(here: Path) -> None:  # noqa: F811
    fake = Stuck()
    fake.waits.add("apply")
    async with opened(operator=fake) as one:
        await edit(one, "vault.max_bytes", "2GiB")
        await one.do("enter", "escape", "a")
        one.app.screen.query_one("#apply", Button).press()
        await until(one, lambda lines: any("applying;" in line for line in lines))
        await one.press("escape")
        one.app.screen.query_one("#cancel", Button).press()
        one.app.screen.query_one("#apply", Button).press()
        await one.press("escape")
        assert isinstance(one.app.screen, Apply)
        fake.go.set()
        await until(one, lambda lines: "acknowledged" in lines[-1])
        assert [name for name, *_ in fake.asked].count("apply") == 1
    assert read(here) == TOML.replace("4GiB", "2GiB")


@pytest.mark.parametrize("doing", ["apply", "purge"])
async def test_quitting_while_agents_are_changed_is_asked_twice(here: Path, doing: str) -> None:  # noqa: F811
    fake = Stuck()
    fake.waits.add(doing)
    async with opened(operator=fake) as one:
        if doing == "apply":
            await edit(one, "vault.max_bytes", "2GiB")
            await one.do("enter", "escape", "a")
            one.app.screen.query_one("#apply", Button).press()
        else:
            await one.do("x", "enter")
            await one.type(one.app.screen.what.typed)
            one.app.screen.query_one("#purge", Button).press()
        await until(one, lambda lines: any(" applying;" in line or " purging;" in line for line in lines))
        await one.press("ctrl+c")
        assert one.app.is_running
        await until(one, lambda lines: any("once more leaves that half done" in line for line in lines))
        await one.press("ctrl+c")
        assert one.app.return_value == EXIT_INTERRUPTED


async def test_an_agent_that_is_stuck_takes_the_change_back_and_is_named_once(here: Path) -> None:  # noqa: F811
    class Late(FakeOperator):
        async def apply(self, checked, changes):
            done = await super().apply(checked, changes)
            late = Acknowledged(NAS.address, error=DeadlineExceeded(NAS.address, "no answer within 5 s"))
            return [late if one.peer == NAS.address else one for one in done]

    fake = Late()
    fake.refusing = NAS.address
    async with opened(operator=fake) as one:
        await edit(one, "vault.max_bytes", "2GiB")
        await one.do("enter", "escape", "a")
        one.app.screen.query_one("#apply", Button).press()
        lines = await one.settled()
        assert "taken back everywhere: nas: no answer within 5 s" in lines[-1]
        assert NAS.address not in lines[-1]
    assert read(here) == TOML


async def test_nothing_interrupts_a_purge_that_is_on_its_way_and_its_undo_is_kept() -> None:
    fake = Stuck()
    fake.waits.add("purge")
    async with opened(operator=fake) as one:
        await one.do("3", "x", "enter")
        await one.type("01010101")
        await one.press("enter", "enter")
        await until(one, lambda lines: any("purging;" in line for line in lines))
        await one.press("escape", "escape")
        assert isinstance(one.app.screen, Purge)
        fake.go.set()
        lines = await until(one, lambda lines: "records purged" in lines[-1])
        assert "u takes it back" in lines[-1]
        assert one.app.last_purge


async def test_asking_what_would_go_can_be_given_up() -> None:
    fake = Stuck()
    fake.waits.add("preview")
    async with opened(operator=fake) as one:
        await one.do("x")
        await one.press("enter")
        await until(one, lambda lines: any("esc asks no more" in line for line in lines))
        await one.press("escape")
        assert "PURGE: what?" in "\n".join(await one.lines())
        fake.go.set()
        assert "PURGE: what?" in "\n".join(await one.lines())
        await one.press("escape")
        assert not isinstance(one.app.screen, Purge)


# --- keys ----------------------------------------------------------------------------------------


async def test_another_name_than_the_one_to_type_is_told() -> None:
    async with opened() as one:
        await one.do("x", "end", "enter")
        await one.type("every")
        assert "That is not everything: nothing is purged." in "\n".join(await one.do("enter"))
        await one.type("thing")
        text = "\n".join(await one.settled())
        assert "That is not" not in text
        assert "type everything" in text


async def test_arrows_go_from_button_to_button(here: Path) -> None:  # noqa: F811
    async with opened() as one:
        await edit(one, "vault.max_bytes", "2GiB")
        lines = await one.do("enter", "escape", "a")
        assert "tab and enter: do it; esc leaves" in "\n".join(lines)
        assert one.app.screen.focused.id == "cancel"
        await one.do("right")
        assert one.app.screen.focused.id == "apply"
        await one.do("left")
        assert one.app.screen.focused.id == "cancel"


async def test_home_and_end_choose_the_first_and_the_last_thing_to_purge() -> None:
    async with opened() as one:
        await one.do("x", "end")
        assert one.app.screen.table.chosen.scope == "all"
        await one.do("home")
        assert one.app.screen.table.chosen.scope == "model"


# --- room ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (120, 40)])
@pytest.mark.parametrize("vaults", [1, 4, 30])
async def test_the_buttons_of_a_purge_are_in_sight_however_many_vaults_there_are(
    size: tuple[int, int], vaults: int
) -> None:
    async with opened(size=size) as one:
        plan = PurgePlan("token", 6, 12 * MIB, 3, 1536, 1, (prefix(1), prefix(2), prefix(3)))
        told = [Preview(Holder(f"10.0.0.{i}:1", f"v{i}"), plan) for i in range(vaults)]
        told.append(Preview(Holder("10.0.1.1:1", "stuck" * 9), error="no answer within 15 s"))

        async def preview(holders, what):
            return told

        one.operator.preview = preview
        await one.do("x")
        one.app.screen.choose(Selection("all"))
        lines = await until(one, lambda lines: any("Cancel" in line for line in lines))
        text = "\n".join(lines)
        assert "Cancel     Purge" in text
        assert "To do it, type everything" in text
        assert "stuckstuckstuck… no answer within 15 s" in row(lines, "  stuck")
        shown = sum(f" v{i} " in text for i in range(vaults))
        assert shown == vaults or f"and {vaults - shown} more node" in text


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (200, 60)])
async def test_every_key_can_be_read_in_the_help_of_every_view(size: tuple[int, int]) -> None:
    async with opened(size=size) as one:
        for view in "12345":
            lines = await one.do(view, "question_mark")
            wanted = {key.description for key in one.app.screen._keys}
            text = "\n".join(lines)
            for _ in range(8):
                lines = await one.do("pagedown")
                text += "\n".join(lines)
            assert {name for name in wanted if name not in text} == set(), view
            await one.do("escape")


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (200, 60)])
async def test_every_column_of_every_view_is_explained_in_its_help(size: tuple[int, int]) -> None:
    """Each title with its text, as far as it takes to scroll; the views that one drills into too."""
    async with opened(healthy(events=events_view(event(0, "one"))), size=size) as one:
        for ways in ("1", "2", "3", "4", "5", "i", "2 enter", "3 enter", "4 enter", "i enter"):
            await one.do(*ways.split())
            asked, words = one.app.screen, one.app.screen.words()
            for table in asked.query(Table):
                assert {column.told for column in table.columns} <= {told for group in words for _, told in group.told}
            await one.do("question_mark")
            pages = [plain(one.app.screen._pager.lines)]
            for _ in range(12):
                await one.do("pagedown")
                pages.append(plain(one.app.screen._pager.lines))
            read = [" ".join(" ".join(page).split()) for page in pages]
            for group in words:
                assert any(group.heading in page for page in read), (ways, group.heading)
                for word, told in group.told:
                    assert told
                    assert any(f"{word} {told}" in page for page in read), (ways, word)
            await one.do("escape", "escape")


def test_every_state_of_a_node_has_a_word_and_an_explanation() -> None:
    assert WORDS.keys() == STATES.keys() == ROLES.keys() == set(GRAVEST_FIRST) == set(get_args(NodeState))


def test_every_tier_is_explained_by_the_name_that_it_has_on_the_screen() -> None:
    assert list(ROWS) == list(LABELS.values())


async def test_what_is_changed_and_wrong_is_not_pushed_out_by_a_long_path(here: Path) -> None:  # noqa: F811
    far = here.parent / ("a-folder-whose-name-is-long" * 4) / "tierkv.toml"
    far.parent.mkdir()
    far.write_text(TOML)
    async with opened(path=far) as one:
        await edit(one, "vault.max_bytes", "2GiB")
        assert "1 changed" in (await one.do("enter", "escape"))[1]


async def test_what_a_key_allows_is_not_cut_at_80_columns() -> None:
    async with opened() as one:
        await one.do("5", "slash")
        lines = await one.type("memory_threshold")
        assert "at once; default 0.6; allowed above 0, up to 1" in "\n".join(lines)


# --- mouse, ASCII, recordings --------------------------------------------------------------------


async def test_a_click_on_a_tab_opens_its_view() -> None:
    async with opened() as one:
        await one.do("2")
        for number, name in ((5, "config"), (3, "prefixes"), (4, "events"), (1, "overview")):
            tabs = one.app.screen.query_one("#tabs")
            await one.pilot.click(tabs, offset=(screen_text(one.app)[1].index(f" {number} ") + 2, 0))
            await one.settled()
            assert one.app.screen is one.app.get_screen(name)
            if name == "overview":
                break


async def test_the_palette_of_an_ascii_terminal_is_ascii() -> None:
    async with opened(glyphs=ASCII) as one:
        await one.do("5", "colon")
        lines = await until(one, lambda lines: any("Copy the row" in line for line in lines))
        assert "\n".join(lines).isascii(), lines
        await one.type("theme")
        await until(one, lambda lines: "Theme" in "\n".join(lines))
        await one.press("enter")
        lines = await until(one, lambda lines: any("dracula" in line for line in lines))
        assert "\n".join(lines).isascii(), lines


async def test_a_recording_shows_the_configuration_that_was_recorded() -> None:
    recorded = {
        "inference.memory_threshold": 0.85, "vault.max_bytes": 64 * MIB, "cluster.kv_cold.port": 7, "no.such": 1,
        "vault.undo_s": [{"\x1b": 1}], "vault.ttl_s": None, "vault.policy": {"a": "\x1b[2J"},
    }  # fmt: skip
    app = Console(StagedFeed(healthy(read_only=True)), glyphs=UNICODE, recorded=recorded)
    async with app.run_test(size=(100, 60)) as pilot:
        one = Work(app, app.feed, pilot)
        lines = await one.do("5")
        assert "as it was recorded" in lines[1]
        assert row(lines, "inference.memory_threshold").split()[-3:] == ["0.85", "live", "recorded"]
        assert "64MiB" in row(lines, "vault.max_bytes")
        assert row(lines, "cluster.kv_cold.port").split()[-3:] == ["7", "restart", "recorded"]
        assert "no.such" not in "\n".join(lines)
        assert "cluster.recompute" not in "\n".join(lines), "it was not recorded"
        assert "\x1b" not in "\n".join(lines)
        assert MINI not in lines[1]
