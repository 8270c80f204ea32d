"""Which cells changed a moment ago: a mark beside the value, so that colour is not needed to see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Literal

from tierkv.tui.theme import Glyphs
from tierkv.tui.widgets.words import Words

MARK_S = 2.0

Change = Literal["", "rose", "fell", "other"]


class Marks:
    """Remembers what each cell showed last. A cell that is seen for the first time has not changed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown: dict[tuple[str, str], tuple[str, object]] = {}
        self._changed: dict[tuple[str, str], tuple[Change, float]] = {}

    def seen(self, row: str, column: str, text: str, value: object = None) -> Change:
        """How the cell changed within the last ``MARK_S``; "" when it did not. ``value``: what ``text`` is made of."""
        cell = row, column
        before = self._shown.get(cell)
        if before is None or before[0] != text:
            self._shown[cell] = text, value
        if before is not None and before[0] != text:
            self._changed[cell] = _direction(before[1], value), self._clock() + MARK_S
        change, until_s = self._changed.get(cell, ("", 0.0))
        if change and self._clock() >= until_s:
            del self._changed[cell]
            return ""
        return change

    def keep(self, rows: Collection[str]) -> None:
        """Rows that are not among ``rows`` are forgotten."""
        for known in (self._shown, self._changed):
            for cell in [cell for cell in known if cell[0] not in rows]:
                del known[cell]


def _direction(before: object, after: object) -> Change:
    if isinstance(before, int | float) and isinstance(after, int | float) and before != after:
        return "rose" if after > before else "fell"
    return "other"


def mark_words(glyphs: Glyphs) -> Words:
    told = "the number beside it rose, fell, or is another, within the last two seconds"
    return Words.named("MARKS", {f"{glyphs.rose} {glyphs.fell} {glyphs.other}": told})


def sign(change: Change, glyphs: Glyphs) -> str:
    """One cell: the mark, or a blank."""
    return {"rose": glyphs.rose, "fell": glyphs.fell, "other": glyphs.other}.get(change, " ")
