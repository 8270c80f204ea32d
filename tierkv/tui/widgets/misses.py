"""Misses by reason on the left; on the right what restores saved, and damaged records."""

from __future__ import annotations

from tierkv.tui.model import ClusterView, MissView
from tierkv.tui.text import counted, short_count, short_duration
from tierkv.tui.theme import Glyphs
from tierkv.tui.widgets.lines import Line, left, right
from tierkv.tui.widgets.marks import Marks, sign
from tierkv.tui.widgets.words import Words

SAVED = 27
HEADINGS = {
    "total": "lookups that found nothing that could be used, since the agents started",
    "in 1 min": "how many of them in the last minute",
}
PREFILL = "PREFILL SAVED"
SAVINGS = {
    "prefill": "time and tokens of computing that restores made unnecessary, since the agents started",
    "damaged": "records that failed their check; they are put aside and never restored",
}
WORDS = (Words.named("MISSES", HEADINGS), Words.named(PREFILL, SAVINGS))
CELL_MIN = 34
CELL_MAX = 44


def miss_lines(view: ClusterView, width: int, rows: int, glyphs: Glyphs, marks: Marks | None = None) -> list[Line]:
    """The heading and exactly ``rows`` lines; reasons flow into columns, those that do not fit are summed up."""
    region, marks = width - SAVED, marks or Marks()
    across = max(1, region // CELL_MIN)
    cell = min(CELL_MAX, region // across)
    parts = [_reason(miss, cell, glyphs, marks) for miss in _chosen(view.misses, rows * across)]
    if not parts:
        parts = [(left("  none counted", cell, "dim", glyphs),)]
    lines: list[Line] = [
        (
            left(" MISSES by reason", cell - 16, "head", glyphs),
            *(right(title, size, "dim", glyphs) for title, size in zip(HEADINGS, (6, 9), strict=True)),
            (" ", "text"),
            left("", region - cell, "text", glyphs),
            left(PREFILL, SAVED, "head", glyphs),
        )
    ]
    saved = _saved(view, glyphs)
    for y in range(rows):
        row = [span for part in parts[y::rows] for span in part]
        used = cell * len(parts[y::rows])
        lines.append((*row, left("", region - used, "text", glyphs), *(saved[y] if y < len(saved) else ())))
    return lines


def _chosen(misses: tuple[MissView, ...], most: int) -> list[MissView]:
    if len(misses) <= most:
        return list(misses)
    rest = misses[most - 1 :]
    summed = MissView(
        f"{len(rest)} other reasons", sum(one.count for one in rest), sum(one.last_minute for one in rest)
    )
    return [*misses[: most - 1], summed]


def _reason(miss: MissView, width: int, glyphs: Glyphs, marks: Marks) -> Line:
    recent = f"+{short_count(miss.last_minute)}" if miss.last_minute else glyphs.unknown
    count = short_count(miss.count)
    change = marks.seen(miss.reason, "total", count, miss.count)
    return (
        left(f"  {miss.reason.replace('_', ' ')}", width - 16, "text", glyphs),
        right(count, 6, "strong" if change else "text", glyphs),
        (sign(change, glyphs), "mark"),
        right(recent, 8, "strong" if miss.last_minute else "faint", glyphs),
        (" ", "text"),
    )


def _saved(view: ClusterView, glyphs: Glyphs) -> list[Line]:
    saved, damaged = view.saved, view.damaged_records
    time = short_duration(saved.seconds) if saved.tokens else glyphs.unknown
    health = f"{glyphs.over} {counted(damaged, 'damaged record')}" if damaged else "no damaged records"
    return [
        (left(f"{time} of prefill", SAVED, "strong", glyphs),),
        (left(f"{short_count(saved.tokens)} tokens not prefilled", SAVED, "text", glyphs),),
        (left(health, SAVED, "bad" if damaged else "dim", glyphs),),
    ]
