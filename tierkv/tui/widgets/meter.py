"""Meters and sparklines, as spans."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tierkv.tui.theme import Glyphs, Role
from tierkv.tui.widgets.lines import Span


def meter(
    used: float, mark: float | None, width: int, glyphs: Glyphs, fill: Role = "ok", over: Role = "bad"
) -> list[Span]:
    """A bar of ``width`` cells filled to ``used`` (fraction), with the threshold ``mark`` as a ruler across it.

    What is filled beyond the mark has the role ``over``; the mark stays visible on either side.
    """
    if width <= 0:
        return []
    used = min(1.0, max(0.0, used)) if math.isfinite(used) else 0.0
    halves = round(used * width * 2)
    if used > 0:
        halves = max(1, halves)
    at = None
    if mark is not None and math.isfinite(mark) and mark > 0:
        at = min(width - 1, int(min(mark, 1.0) * width))
    spans: list[Span] = []
    for cell in range(width):
        char, role = _cell(cell, halves, glyphs, fill if at is None or cell < at else over)
        if cell == at:
            char, role = glyphs.mark, "mark"
        if spans and spans[-1][1] == role:
            spans[-1] = (spans[-1][0] + char, role)
        else:
            spans.append((char, role))
    return spans


def _cell(cell: int, halves: int, glyphs: Glyphs, fill: Role) -> tuple[str, Role]:
    if halves >= 2 * cell + 2:
        return glyphs.full, fill
    if halves == 2 * cell + 1:
        return glyphs.half, fill
    return glyphs.track, "faint"


def spark(values: Sequence[float | None], width: int, glyphs: Glyphs, role: Role = "accent") -> list[Span]:
    """The newest ``values`` as ``width`` columns, scaled to the largest; several values a cell are averaged.

    An unknown value is blank; zero is the lowest bar, faint.
    """
    if width <= 0:
        return []
    per_cell = max(1, math.ceil(len(values) / width))
    cells: list[float | None] = []
    for end in range(len(values), 0, -per_cell):
        known = [value for value in values[max(0, end - per_cell) : end] if value is not None]
        cells.insert(0, sum(known) / len(known) if known else None)
    cells = cells[-width:]
    top = max((value for value in cells if value is not None), default=0.0)
    spans: list[Span] = [(glyphs.nothing * (width - len(cells)), "text")] if len(cells) < width else []
    return [*spans, *(_bar(value, top, glyphs, role) for value in cells)]


def _bar(value: float | None, top: float, glyphs: Glyphs, role: Role) -> Span:
    if value is None:
        return glyphs.nothing, "text"
    if value <= 0 or top <= 0:
        return glyphs.zero, "faint"
    steps = len(glyphs.spark)
    return glyphs.spark[min(steps - 1, math.ceil(value / top * steps) - 1)], role
