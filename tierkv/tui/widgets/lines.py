"""A widget that draws lines of spans, and repaints only the lines that changed.

A span is text and a role; the palette of the app turns roles into styles at the last moment. Text is cleaned here once
more, so that no painter can forget it, and is never parsed as markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from tierkv.tui.text import ascii_only, clean, fit
from tierkv.tui.theme import Glyphs, Role

if TYPE_CHECKING:
    from tierkv.tui.app import Console

Span = tuple[str, Role]
Line = tuple[Span, ...]


def left(text: str, width: int, role: Role, glyphs: Glyphs) -> Span:
    """``text`` in exactly ``width`` cells, on the left."""
    return fit(text, width, glyphs.ellipsis), role


def right(text: str, width: int, role: Role, glyphs: Glyphs) -> Span:
    """``text`` in exactly ``width`` cells, on the right."""
    text = clean(text)
    length = cell_len(text)
    return (" " * (width - length) + text if length <= width else fit(text, width, glyphs.ellipsis)), role


def span_width(spans: Sequence[Span]) -> int:
    return sum(cell_len(text) for text, _ in spans)


def spread(start: Sequence[Span], end: Sequence[Span], width: int, fill: Span = (" ", "text")) -> Line:
    """``start`` on the left, ``end`` on the right, ``fill`` between; the start is cut where both do not fit."""
    room = width - span_width(end)
    kept: list[Span] = []
    for text, role in start:
        size = min(cell_len(text), room)
        if size > 0:
            kept.append((fit(text, size), role))
        room -= size
    if room > 0:
        kept.append((fill[0] * room, fill[1]))
    return (*kept, *end)


def plain(lines: Sequence[Line]) -> list[str]:
    """The text alone, without trailing blanks."""
    return ["".join(text for text, _ in line).rstrip() for line in lines]


class Lines(Widget):
    """Shows what ``paint`` was given last."""

    DEFAULT_CSS = "Lines { height: 1; }"

    def __init__(self, id: str, *, classes: str = "") -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id, classes=classes)
        self._lines: tuple[Line, ...] = ()
        self._strips: dict[int, Strip] = {}

    @property
    def console_app(self) -> Console:
        return self.app  # type: ignore[return-value]

    @property
    def lines(self) -> tuple[Line, ...]:
        return self._lines

    def paint(self, lines: Sequence[Line]) -> bool:
        """``lines`` are on the screen with the next update; True when any of them is new."""
        before, self._lines = self._lines, tuple(lines)
        changed = [
            y
            for y in range(max(len(before), len(self._lines)))
            if (before[y] if y < len(before) else None) != (self._lines[y] if y < len(self._lines) else None)
        ]
        for y in changed:
            self._strips.pop(y, None)
        if changed:
            self.refresh(*(Region(0, y, max(1, self.size.width), 1) for y in changed))
        return bool(changed)

    def forget_styles(self) -> None:
        """The palette changed: every line is drawn anew."""
        self._strips.clear()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        strip = self._strips.get(y)
        if strip is None:
            line = self._lines[y] if y < len(self._lines) else ()
            strip = self._strips[y] = self._strip(line)
        return strip.adjust_cell_length(self.size.width).apply_style(Style(bgcolor=self._behind.rich_color))

    @property
    def _behind(self) -> Color:
        return self.background_colors[1]

    def _strip(self, line: Line) -> Strip:
        palette, ascii_terminal = self.console_app.palette, self.console_app.glyphs.ascii
        runs: list[tuple[str, Style]] = []
        for text, role in line:
            shown, style = clean(text), palette[role]
            if ascii_terminal:
                shown = ascii_only(shown)
            # A blank has no colour: written with what stands before it, it costs the terminal nothing.
            if runs and (runs[-1][1] is style or (style.bgcolor is runs[-1][1].bgcolor is None and shown.isspace())):
                runs[-1] = runs[-1][0] + shown, runs[-1][1]
            else:
                runs.append((shown, style))
        return Strip([Segment(text, style) for text, style in runs])
