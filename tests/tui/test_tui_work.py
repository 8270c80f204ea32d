"""The views behind 2 to 5 and the dialogs, driven as a person drives them."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_tui_screens import HOSTILE, Session
from textual.widgets import Button
from tui_cluster import START_UNIX_S, StagedFeed, event, events_view, healthy, inference, screen_text, vault, view_of
from tui_operator import FakeOperator, prefix

from tierkv.errors import Fault
from tierkv.rpc.config_port import ConfigEffect
from tierkv.telemetry.snapshot import Event
from tierkv.tui.app import Console
from tierkv.tui.model import ClusterView, EventLine
from tierkv.tui.operate import Selection
from tierkv.tui.screens.events import causes
from tierkv.tui.screens.purge import Purge
from tierkv.tui.theme import ASCII, UNICODE

TOML = """\
# mine
[cluster.kv_cold]
port = 50051

[inference]
memory_threshold = 0.60   # the mark
[vault]
max_bytes = "4GiB"
"""
MINI, NAS = "127.0.0.1:50050", "127.0.0.1:50051"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tierkv.toml"
    path.write_text(TOML)
    return path


class Work(Session):
    """A session with an operator."""

    operator: FakeOperator

    async def settled(self) -> list[str]:
        for _ in range(3):
            await self.pilot.pause()
            self.app.tick()
        await self.pilot.app.workers.wait_for_complete(
            [w for w in self.app.workers if w.group != "default" and w.name != "feed"]
        )
        self.app.tick()
        return await self.lines()

    async def do(self, *keys: str) -> list[str]:
        for key in keys:
            await self.pilot.press(key)
            await self.settled()
        return screen_text(self.app)

    async def type(self, text: str) -> list[str]:
        await self.pilot.press(*text)
        return await self.settled()


def opened(
    view: ClusterView | None = None, size: tuple[int, int] = (80, 24), operator: FakeOperator | None = None, **settings
):
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def session():
        feed = StagedFeed(view or healthy())
        fake = operator or FakeOperator()
        path = settings.pop("path", Path("tierkv.toml"))
        app = Console(feed, operator=fake, config_path=path, glyphs=settings.pop("glyphs", UNICODE), **settings)
        async with app.run_test(size=size) as pilot:
            one = Work(app, feed, pilot)
            one.operator = fake
            await one.show(feed.staged)
            yield one

    return session()


def files(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


def read(path: Path) -> str:
    return path.read_text()


def write(path: Path, text: str) -> None:
    path.write_text(text)


def row(lines: list[str], text: str) -> str:
    return next((line for line in lines if text in line), "")


# --- navigation ----------------------------------------------------------------------------------


async def test_1_to_5_open_the_views_and_the_tabs_say_where_one_is() -> None:
    async with opened() as one:
        for key, text in (("2", "p99"), ("3", "tokens"), ("4", "severity"), ("5", "memory_threshold"), ("1", "TIERS")):
            lines = await one.do(key)
            assert any(text in line for line in lines), key
            assert "3/3 up" in lines[0]
            assert "q quit" in lines[-1]


async def test_help_and_palette_offer_the_actions_of_each_view() -> None:
    async with opened() as one:
        for key in "2345":
            await one.do(key)
            names = {command.title for command in one.app.get_system_commands(one.app.screen)}
            assert {"Purge", "Export the view", "Nodes", "Configuration", "Quit"} <= names
            shown = "\n".join(await one.do("question_mark"))
            assert "Export the view" in shown
            assert "Purge" in shown
            await one.do("escape")


async def test_read_only_dims_what_would_change_something_and_keeps_it_from_happening() -> None:
    async with opened(healthy(read_only=True)) as one:
        lines = await one.do("3", "p", "x")
        assert " read-only " in lines[0]
        assert one.operator.asked == []
        assert not isinstance(one.app.screen, Purge)
        assert "Purge (read-only)" in "\n".join(await one.do("question_mark"))
        await one.do("escape")
        assert "Purge" not in {command.title for command in one.app.get_system_commands(one.app.screen)}
        line = one.app.screen.query_one("#keys").lines[0]
        assert {text.strip(): role for text, role in line}["p"] == "faint"


# --- nodes ---------------------------------------------------------------------------------------


async def test_nodes_sort_filter_and_open() -> None:
    async with opened() as one:
        lines = await one.do("2")
        assert [line.split()[2] for line in lines[3:6]] in (
            ["live", "nas", "pi"],
            ["mini", "nas", "pi"],
            ["live", "live", "live"],
        )
        await one.do("slash")
        lines = await one.type("role:vault !pi")
        assert row(lines, "nas")
        assert not any(" mini " in line or " pi " in line for line in lines[3:])
        await one.do("enter")
        lines = await one.do("enter")
        assert "› nas" in lines[1]
        text = "\n".join(lines)
        assert "process 200" in text
        assert "4GiB" in row(lines, "vault.max_bytes")
        assert "6000 after a restart" in row(lines, "vault.port")
        lines = await one.do("escape")
        assert "› nas" not in lines[1]


async def test_a_lost_node_is_greyed_and_says_how_old_it_is() -> None:
    view = view_of(inference(12), vault(0), at=12, lost=(NAS,))
    async with opened(view, size=(200, 60)) as one:
        lines = await one.do("2")
        assert "stale 12 s" in row(lines, "nas")
        await one.do("down")
        lines = await one.do("enter")
        assert "stale 12 s" in lines[2]


# --- prefixes ------------------------------------------------------------------------------------


async def test_prefixes_are_listed_sorted_and_drilled_into() -> None:
    async with opened() as one:
        lines = await one.do("3")
        assert [line.split()[0].strip("› ") or line.split()[1] for line in lines[3:6]][1:] == ["02020202", "03030303"]
        assert "pin" in row(lines, "02020202")
        for _ in range(3):
            lines = await one.do("s")
        assert "token▼" in lines[2]
        assert "03030303" in lines[3]
        assert "01010101" in (await one.do("S"))[3]
        lines = await one.do("enter")
        assert "nas, pi" in row(lines, "0-256")
        assert "own" in row(lines, "256-300")


async def test_pin_and_unpin_mean_the_chosen_prefix() -> None:
    async with opened() as one:
        lines = await one.do("3", "p")
        assert "3 records pinned" in lines[-1]
        await one.do("down", "p")
        chosen = [what.prefix[:1] for name, what, on in one.operator.asked if name == "pin"]
        assert chosen == [b"\x01", b"\x02"]
        assert [on for name, _, on in one.operator.asked] == [True, False]


async def test_a_row_can_be_copied_and_a_view_exported(tmp_path: Path) -> None:
    async with opened() as one:
        await one.do("3", "y")
        assert one.app.clipboard == "01" * 32
        await one.do("Y")
        assert '"tokens": 256' in one.app.clipboard
        lines = await one.do("e")
        assert "written to" in lines[-1]
        (written,) = files(tmp_path, "tierkv-prefixes-*.json")
        assert '"schema": "tierkv.prefixes-view/1"' in read(written)


# --- purge ---------------------------------------------------------------------------------------


async def test_purge_shows_first_then_wants_its_name_and_can_be_taken_back() -> None:
    async with opened() as one:
        await one.do("3", "x")
        assert isinstance(one.app.screen, Purge)
        lines = await one.do("enter")
        text = "\n".join(lines)
        assert "would remove 3 prefixes, 6 records, 12.0 MiB" in text
        assert "1,536 tokens, about 5.1s of prefill" in text
        assert "1 record of it is pinned" in text
        assert one.app.screen.focused.id == "cancel"
        purge = one.app.screen.query_one("#purge", Button)
        assert purge.disabled
        one.app.screen.query_one("#typed").focus()
        await one.type("0101010")
        assert purge.disabled
        await one.type("1")
        assert not purge.disabled
        lines = await one.do("enter", "enter")
        assert ("purge", ["token"]) in one.operator.asked
        assert "6 records purged, 12.0 MiB; u takes it back for 1m 0s" in lines[-1]
        lines = await one.do("u")
        assert ("undo", ["undo"]) in one.operator.asked
        assert "6 records brought back" in lines[-1]


async def test_the_name_can_be_typed_at_once_and_no_letter_of_it_is_a_command() -> None:
    async with opened() as one:
        one.operator.held = [prefix(1, model="models/quux-1x5")]
        await one.do("3", "x", "down", "enter")
        assert one.app.screen.focused.id == "cancel"
        await one.type("quux-1x")
        assert one.app.screen.query_one("#purge", Button).disabled
        await one.type("5")
        await one.do("enter", "enter")
        assert ("purge", ["token"]) in one.operator.asked
        assert one.app.is_running


async def test_cancel_is_focused_and_purges_nothing() -> None:
    async with opened() as one:
        await one.do("x", "enter", "enter")
        assert not isinstance(one.app.screen, Purge)
        assert [name for name, *_ in one.operator.asked] == ["preview"]
        await one.do("x", "escape")
        assert not isinstance(one.app.screen, Purge)


async def test_a_holder_that_does_not_answer_is_said_in_the_dialog() -> None:
    async with opened() as one:
        await one.do("x")
        await one.do("end")
        one.app.screen.choose(Selection("all"))
        lines = await one.settled()
        assert "no answer" in row(lines, "  pi")
        assert "type everything" in "\n".join(lines)


# --- events --------------------------------------------------------------------------------------


async def test_from_an_eviction_to_its_cause_and_to_where_the_blocks_are() -> None:
    told = [
        event(0, "ann: vault.max_bytes 8 -> 4", kind="config", node="nas"),
        event(1, "14 records evicted", kind="evict", node="nas", attributes={"keys": "01010101"}),
    ]
    async with opened(healthy(events=events_view(*told))) as one:
        lines = await one.do("4")
        assert "14 records evicted" in lines[3]
        lines = await one.do("enter")
        assert "ann: vault.max_bytes 8 -> 4" in "\n".join(lines)
        assert "at nas (int8), at pi (int8)" in row(lines, "at nas")


def test_causes_are_earlier_of_a_kind_that_leads_there_or_about_the_same() -> None:
    def at(seconds: float, kind: str, **attributes: str) -> Event:
        return Event(1, START_UNIX_S + seconds, kind, "info", "n", kind, attributes)

    evict = at(100, "evict", model="m")
    told = [at(-100, "config"), at(50, "demote"), at(60, "start"), at(70, "start", model="m"), evict, at(101, "config")]
    lines = [EventLine(i, one) for i, one in enumerate(told)]
    assert [one.time_unix_s - START_UNIX_S for one in causes(lines, evict)] == [70, 50]


async def test_the_cursor_stays_on_its_event_while_new_ones_come() -> None:
    many = [event(i, f"event {i}") for i in range(60)]
    async with opened(healthy(events=events_view(*many[:30]))) as one:
        lines = await one.do("4", "down", "down")
        assert "› " in row(lines, "event 27")
        lines = await one.show(healthy(events=events_view(*many)))
        assert "› " in row(lines, "event 27")
        lines = await one.do("home")
        assert "› " in row(lines, "event 59")


# --- requests ------------------------------------------------------------------------------------


async def test_the_last_requests_and_why_one_was_computed() -> None:
    async with opened(size=(100, 30)) as one:
        lines = await one.do("i")
        assert ("requests", ["mini"]) in one.operator.asked
        assert "restored" in lines[3]
        assert row(lines, "computed").split()[-2] == "evicted"
        lines = await one.do("down", "enter")
        assert ("explain", "mini", 6) in one.operator.asked
        text = "\n".join(lines)
        assert "900 tokens were computed: the vault evicted them a minute before." in text
        assert "restoring 300ms, computing 12s" in row(lines, "expected")
        assert "897" in row(lines, "127.0.0.1:50051")
        assert "it left at 07:20; not used: lossy 2" in text
        await one.do("Y")
        assert '"reason": "evicted"' in one.app.clipboard
        assert "last requests" in (await one.do("escape"))[1]
        assert "NODES" in "\n".join(await one.do("escape"))


async def test_an_agent_that_does_not_explain_says_why() -> None:
    async with opened() as one:
        one.operator.explained = "not known any more\x1b[2J"
        assert "not known any more" in "\n".join(await one.do("i", "enter"))


# --- configuration -------------------------------------------------------------------------------


async def edit(one: Work, key: str, value: str) -> list[str]:
    await one.do("5", "slash")
    await one.type(key)
    await one.do("enter", "enter")
    await one.press(*["backspace"] * 12)
    return await one.type(value)


async def test_a_fault_is_told_at_its_field_while_one_types_and_is_not_taken(here: Path) -> None:
    async with opened() as one:
        lines = await edit(one, "memory_threshold", "70%")
        assert "must be a fraction; write 0.70 for 70 %" in " ".join("".join(lines[-4:]).split())
        await one.do("enter")
        assert one.app.screen.has_class("-editing")
        await one.do("escape")
        assert not one.app.screen.draft.changed
    assert read(here) == TOML


async def test_a_value_stands_in_the_form_as_one_would_type_it(here: Path) -> None:
    """The list, the explanation below it, and the entry: the same spelling, and the file takes it."""
    async with opened() as one:
        lines = await edit(one, "dead_after_s", "2d")
        assert "30d" in row(lines, "vault.dead_after_s  ")
        lines = await one.do("enter")
        assert "2d" in row(lines, "vault.dead_after_s  ")
        assert "default 30d; allowed 0 to 3650d" in row(lines, "default 30d")
    async with opened() as one:
        await one.do("5", "slash")
        await one.type("disk_bytes")
        lines = await one.do("enter", "enter")
        assert "disk_bytes = 64GiB" in " ".join(lines[-1].split())
        assert "allowed 1MiB to 1024TiB" in row(lines, "default 64GiB")


async def test_apply_shows_diff_and_what_if_then_writes_and_tells_who_acknowledged(here: Path) -> None:
    fake = FakeOperator()
    fake.effects = {
        MINI: [
            ConfigEffect(
                "inference.memory_threshold", 0.6, 0.3, "live", "would evict 3.0 GiB, 9 prefixes now", 3 << 30, 9
            )
        ]
    }
    async with opened(operator=fake) as one:
        await edit(one, "memory_threshold", "0.3")
        lines = await one.do("enter", "escape", "a")
        text = "\n".join(lines)
        assert "-memory_threshold = 0.60   # the mark" in text
        assert "+memory_threshold = 0.3   # the mark" in text
        assert "would evict 3.0 GiB, 9 prefixes now" in text
        assert read(here) == TOML
        one.app.screen.query_one("#apply", Button).press()
        lines = await one.settled()
        assert ("apply", {"inference.memory_threshold": 0.3}) in fake.asked
        assert "3 agents acknowledged: 1 at once; written to every file" in lines[-1]
    assert read(here) == TOML.replace("0.60", "0.3")


async def test_when_an_agent_refuses_the_file_is_as_it_was(here: Path) -> None:
    fake = FakeOperator()
    fake.refusing = NAS
    async with opened(operator=fake) as one:
        await edit(one, "vault.max_bytes", "2GiB")
        await one.do("enter", "escape", "a")
        one.app.screen.query_one("#apply", Button).press()
        lines = await one.settled()
        assert "taken back everywhere" in lines[-1]
        assert one.app.screen.draft.changed
    assert read(here) == TOML


async def test_faults_of_an_agent_keep_apply_off_and_an_absent_one_does_not(here: Path) -> None:
    fake = FakeOperator()
    fake.faults = (Fault("vault.max_bytes", 1, "is too small"),)
    async with opened(operator=fake) as one:
        await edit(one, "vault.max_bytes", "2GiB")
        lines = await one.do("enter", "escape", "a")
        assert "is too small" in "\n".join(lines)
        assert one.app.screen.query_one("#apply", Button).disabled
        fake.faults, fake.absent = (), (NAS,)
        lines = await one.do("escape", "a")
        assert "1 agent not reached" in "\n".join(lines)
        assert not one.app.screen.query_one("#apply", Button).disabled


async def test_a_file_that_changed_meanwhile_is_noticed_and_can_be_read_or_overwritten(here: Path) -> None:
    async with opened() as one:
        await edit(one, "vault.max_bytes", "2GiB")
        await one.do("enter", "escape")
        write(here, TOML + "# theirs\n")
        lines = await one.do("a")
        assert "changed on disk" in lines[-1]
        one.app.screen._look_at_disk()
        await one.do("w")
        assert "2GiB" in one.app.screen.draft.text
        await one.do("r")
        assert "# theirs" in one.app.screen.draft.text


async def test_a_faulty_file_shows_its_faults_and_can_be_mended(here: Path) -> None:
    write(here, TOML.replace('"4GiB"', '"lots"'))
    async with opened() as one:
        lines = await one.do("5")
        assert "1 fault" in lines[1]
        lines = await edit(one, "vault.max_bytes", "2GiB")
        lines = await one.do("enter", "escape")
        assert "1 fault" not in lines[1]
        assert not one.app.screen.draft.faults


async def test_the_raw_text_is_beside_the_form_where_there_is_room_and_behind_t_where_not() -> None:
    async with opened(size=(200, 60)) as one:
        lines = await one.do("5")
        assert 'max_bytes = "4GiB"' in "\n".join(lines)
    async with opened() as one:
        lines = await one.do("5")
        assert "# mine" not in "\n".join(lines)
        assert "# mine" in "\n".join(await one.do("t"))
        assert "# mine" not in "\n".join(await one.do("escape"))


async def test_without_a_file_the_defaults_are_shown_and_nothing_can_be_edited() -> None:
    async with opened(path=None) as one:
        lines = await one.do("5", "enter")
        assert "no file" in lines[1]
        assert not one.app.screen.has_class("-editing")


# --- hostile text and odd terminals --------------------------------------------------------------


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (250, 70)])
async def test_hostile_text_is_plain_everywhere(size: tuple[int, int]) -> None:
    fake = FakeOperator()
    fake.held = [prefix(1, model=HOSTILE, codecs=(HOSTILE,), tier=HOSTILE)]
    mini = inference(0, name=HOSTILE, role=HOSTILE, version=HOSTILE, activity=HOSTILE)
    events = events_view(event(1, HOSTILE, node=HOSTILE, kind=HOSTILE, severity=HOSTILE, attributes={HOSTILE: HOSTILE}))
    async with opened(view_of(mini, vault(0), at=0, events=events), size=size, operator=fake) as one:
        for keys in (
            ("2",),
            ("2", "enter"),
            ("3",),
            ("3", "enter"),
            ("4",),
            ("4", "enter"),
            ("3", "x"),
            ("escape", "1", "x"),
        ):
            text = "\n".join(await one.do(*keys))
            assert one.app.is_running
            assert "\x1b" not in text
            assert "\u202e" not in text


async def test_too_small_says_what_it_needs_and_ascii_is_ascii() -> None:
    async with opened(size=(50, 12)) as one:
        assert (await one.do("2"))[:2] == ["TierKV", "needs 60x16,"]
    async with opened(glyphs=ASCII) as one:
        for key in "2345":
            text = "\n".join(await one.do(key))
            assert text.isascii(), text
