"""A value that changed is marked for a moment, by a sign beside it, on the first screen and in tables."""

from __future__ import annotations

from dataclasses import replace

from test_tui_work import opened, row
from tui_cluster import GIB, healthy, inference, tier, vault, view_of

from tierkv.tui.theme import ASCII, UNICODE
from tierkv.tui.widgets.lines import plain
from tierkv.tui.widgets.marks import MARK_S, Marks, sign
from tierkv.tui.widgets.misses import miss_lines
from tierkv.tui.widgets.nodes import node_lines
from tierkv.tui.widgets.tiers import tier_lines


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_mark_says_the_direction_and_goes_after_a_moment() -> None:
    clock = Clock()
    marks = Marks(clock)
    assert marks.seen("nas", "size", "1G", 1) == ""
    assert marks.seen("nas", "size", "1G", 1) == ""
    assert marks.seen("nas", "size", "2G", 2) == "rose"
    clock.now += MARK_S - 0.1
    assert marks.seen("nas", "size", "2G", 2) == "rose"
    clock.now += 0.2
    assert marks.seen("nas", "size", "2G", 2) == ""
    assert marks.seen("nas", "size", "1G", 1) == "fell"
    assert marks.seen("nas", "state", "live") == ""
    assert marks.seen("nas", "state", "lost") == "other"


def test_what_is_drawn_alike_is_no_change() -> None:
    marks = Marks(Clock())
    marks.seen("nas", "size", "1.0G", 1 << 30)
    assert marks.seen("nas", "size", "1.0G", (1 << 30) + 1) == ""


def test_rows_that_are_gone_are_forgotten() -> None:
    marks = Marks(Clock())
    for number in range(1000):
        marks.seen(f"n{number}", "size", "1", 1)
        marks.seen(f"n{number}", "size", "2", 2)
        marks.keep({f"n{number}"})
    assert len(marks._shown) == len(marks._changed) == 1


def test_every_sign_is_one_cell_and_ascii_where_it_must_be() -> None:
    for change in ("", "rose", "fell", "other"):
        assert len(sign(change, UNICODE)) == len(sign(change, ASCII)) == 1
        assert sign(change, ASCII).isascii()


def test_the_first_screens_tables_mark_what_changed_and_keep_their_width() -> None:
    marks = {name: Marks(Clock()) for name in "abc"}
    fuller = (tier("kv", size_bytes=2 * GIB, cap_bytes=4 * GIB),)
    kv = replace(inference(0).tiers[1], miss_reasons={"never_stored": 3})
    views = (
        view_of(inference(0), vault(0), at=0),
        view_of(
            inference(1, memory=replace(inference(0).memory, used_bytes=30 * GIB), tiers=(inference(0).tiers[0], kv)),
            vault(1, tiers=fuller),
            at=30,
            lost=("127.0.0.1:50051",),
        ),
    )
    shown = [
        (
            plain(node_lines(view, 80, 3, UNICODE, marks["a"])),
            plain(tier_lines(view, view, 80, UNICODE, marks["b"])),
            plain(miss_lines(view, 80, 3, UNICODE, marks["c"])),
        )
        for view in views
    ]
    assert not any(glyph in line for part in shown[0] for line in part for glyph in "▴▾•")
    nodes, _, misses = shown[1]
    assert row(nodes, "mini").startswith(" ◐ silent• mini")
    assert "30/60%▾ " in row(nodes, "mini")
    assert "3▴" in row(misses, "never stored")


async def test_a_table_marks_its_cells_and_stops() -> None:
    """nas went from 1 to 3 GiB held, and its p99 is as it was."""
    fuller = (replace(vault(0).tiers[0], size_bytes=3 * GIB),)
    async with opened(healthy(), size=(120, 30)) as one:
        lines = await one.do("2")
        assert "1.0G" in row(lines, "nas")
        clock = Clock()
        table = one.app.screen.query_one("#table")
        table.marks._clock = clock
        lines = await one.show(view_of(inference(3), vault(3, tiers=fuller), at=3.4))
        assert "3.0G▴" in row(lines, "nas")
        assert "▴" not in row(lines, "mini")
        clock.now += MARK_S
        lines = await one.show(view_of(inference(3), vault(3, tiers=fuller), at=3.4))
        assert "3.0G " in row(lines, "nas")


async def test_marks_are_signs_without_colour(monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with opened(healthy(), size=(120, 30), glyphs=ASCII) as one:
        await one.do("2")
        lines = await one.show(view_of(inference(3), vault(3, tiers=(tier("kv", size_bytes=GIB // 2),)), at=3.4))
        assert "512Mv" in row(lines, "nas")
