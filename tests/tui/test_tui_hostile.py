"""Whatever other machines and files say is plain text on every screen and in every dialog, and fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from test_tui_work import MINI, NAS, files, here, opened, write  # noqa: F401 - here is a fixture
from tui_cluster import event, events_view, inference, screen_text, vault, view_of
from tui_operator import NAS as NAS_HOLDER
from tui_operator import FakeOperator, prefix

from tierkv.errors import Fault, Refused
from tierkv.rpc.config_port import Acknowledged, ConfigEffect, ConfigState, ConfigValue
from tierkv.telemetry.explanation import Explanation, RequestLine, TierFinding
from tierkv.tui.operate import PrefixList, PrefixRow, Preview
from tierkv.tui.screens.apply import Apply
from tierkv.tui.theme import ASCII, UNICODE

TEXTS = {
    "markup": "[red]x[/red][@click=app.quit]y[/][bold on red]",
    "escapes": "\x1b[2J\x1b]0;t\x07\x9b31m\r\n\x00\b",
    "bidi": "\u202eevil\u2066\u200b\u200d\ufeff\u061c",
    "wide": "機械学習の\U0001f600\U0001f468\u200d\U0001f469",
    "marks": "a" + "\u0301" * 60,
    "long": "n" * 5000,
}


def cluster(text: str):
    kv = replace(inference(0).tiers[1], miss_reasons={text: 3})
    engine = replace(inference(0).engines[0], model=text, build=text, identity=text)
    link = replace(inference(0).links[0], peer=text, state="down", last_error=text)
    mini = inference(
        0, name=text, activity=text, tiers=(kv,), engines=(engine,), links=(link,), version=text, counters={text: 1}
    )
    nas = vault(0, name=text + "2", role="kv-vault")
    lost = vault(0, kind="ssm", name=text + "3", role=text)
    told = events_view(
        *(
            event(i, text, node=text, kind=text, severity=text, attributes={text: text, "keys": text})
            for i in range(3)
        )
    )  # fmt: skip
    return view_of(mini, nas, lost, at=1, lost=(lost.address,), name=text, events=told)


class Hostile(FakeOperator):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.held = [prefix(1, model=text, codecs=(text,), tier=text)]
        line = RequestLine(7, 0.0, text, 900, 3, 898, text, text, 0.7)
        self.lines = [line]
        finding = TierFinding(text, text, True, 1, 1, 1, 1, (), {text: 2}, 0.1, text, text)
        self.explained = Explanation(line, text, (finding,), text, text, text, differing_parts=(text,), engine=text)
        effect = ConfigEffect("vault.max_bytes", text, text, "live", text, unsaved=text)
        self.effects = {MINI: [effect], NAS: [effect]}

    async def prefixes(self, holders):
        return PrefixList(tuple(PrefixRow(NAS_HOLDER, one) for one in self.held), 9, ((NAS_HOLDER, self.text),))

    async def preview(self, holders, what):
        return [*await super().preview(holders, what), Preview(NAS_HOLDER, error=self.text)]

    async def config(self, address):
        value = ConfigValue(self.text, self.text, self.text, True, "other")
        return ConfigState(3, self.text, (value,), self.text)

    async def apply(self, checked, changes):
        return [Acknowledged(one.peer, error=Refused(self.text)) for one in checked]


async def walk(one) -> list[list[str]]:
    """Every view, what one drills into, and both dialogs."""
    steps = (
        ("1",), ("2",), ("enter",), ("escape", "3"), ("enter",), ("escape", "x"), ("enter",),
        ("escape", "escape", "4"), ("enter",), ("escape", "i"), ("enter",), ("escape", "escape", "5"), ("t",),
        ("escape", "question_mark"), ("escape", "1"),
    )  # fmt: skip
    return [await one.do(*keys) for keys in steps]


@pytest.mark.parametrize("name", TEXTS)
async def test_every_screen_takes_it_as_plain_text(name: str, here: Path) -> None:  # noqa: F811
    text = TEXTS[name]
    comment = "".join(char for char in text if char.isprintable())
    write(here, f"# {comment}\n[cluster]\nname = {text.encode('unicode_escape').decode().join(chr(34) * 2)!s}\n"
          if name in ("markup", "long") else f"# {comment}\n[vault]\nmax_bytes = '4GiB'\n")  # fmt: skip
    async with opened(cluster(text), operator=Hostile(text)) as one:
        for lines in await walk(one):
            _plain(lines, 80, 24)
        assert one.app.is_running


async def test_what_agents_say_to_a_change_is_plain_text(here: Path) -> None:  # noqa: F811
    for text in TEXTS.values():
        write(here, "[vault]\nmax_bytes = '4GiB'\n")
        operator = Hostile(text)
        operator.faults = (Fault(text, text, text, text),)
        async with opened(cluster(text), operator=operator) as one:
            await one.do("5")
            assert one.app.screen.draft.set("vault.max_bytes", "2GiB") == ()
            _plain(await one.do("a"), 80, 24)
            operator.faults = ()
            _plain(await one.do("escape", "a"), 80, 24)
            assert isinstance(one.app.screen, Apply)
            await one.app.screen._apply()
            _plain(await one.settled(), 80, 24)
            assert one.app.is_running


async def test_ascii_terminals_get_ascii_of_it_too() -> None:
    async with opened(cluster(TEXTS["wide"]), operator=Hostile(TEXTS["wide"]), glyphs=ASCII) as one:
        for lines in await walk(one):
            assert "\n".join(lines).isascii(), lines


def _plain(lines: list[str], width: int, height: int) -> None:
    text = "\n".join(lines)
    assert len(lines) == height
    assert text.replace("\n", "").isprintable(), [char for char in text if not char.isprintable() and char != "\n"]
    assert not any("\u202a" <= char <= "\u202e" or "\u2066" <= char <= "\u2069" for char in text)
    assert max(cell_len(line) for line in lines) <= width


async def test_a_recording_of_a_hostile_cluster_is_written_and_exports_are_json(tmp_path: Path) -> None:
    import json

    async with opened(cluster(TEXTS["escapes"]), operator=Hostile(TEXTS["escapes"]), glyphs=UNICODE) as one:
        for key in ("2", "3", "4", "5"):
            await one.do(key, "e")
        assert screen_text(one.app)
    written = files(tmp_path, "tierkv-*-*.json")
    assert len(written) == 4
    for path in written:
        json.loads(path.read_text())
