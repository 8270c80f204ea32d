"""A table of own lines: one row is chosen, any column sorts, columns that do not fit go, the least needed first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from textual import events
from textual.message import Message

from tierkv.tui.filter import EventFilter
from tierkv.tui.text import short_count
from tierkv.tui.theme import Glyphs, Role
from tierkv.tui.widgets.lines import Line, Lines, Span, left, right
from tierkv.tui.widgets.marks import Change, Marks, sign

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """``told``: what the help says of it. ``keep``: columns with a lower number stay when it gets narrow. ``order``:
    what the column sorts by; None: it does not sort. ``grow``: takes the room that is left. ``marked``: a value that
    changed is marked for a moment."""

    title: str
    told: str
    width: int
    text: Callable[[R], str]
    keep: int = 0
    order: Callable[[R], Any] | None = None
    right: bool = False
    grow: bool = False
    role: Callable[[R], Role] | None = None
    descending: bool = False
    marked: bool = False


def number(
    title: str,
    told: str,
    width: int,
    keep: int,
    value: Callable[[R], float | None],
    shown: Callable[[float | None], str],
    role: Callable[[R], Role] | None = None,
    *,
    marked: bool = False,
) -> Column[R]:
    """A column of numbers: on the right, the largest first when sorted."""

    def text(row: R) -> str:
        return shown(value(row))

    def order(row: R) -> float:
        return value(row) or 0.0

    return Column(title, told, width, text, keep, order, right=True, role=role, descending=True, marked=marked)


class Table(Lines, Generic[R]):
    """``show`` it rows; ``chosen`` is the row under the cursor, followed by its key when rows move."""

    class Opened(Message):
        """A row was clicked twice."""

    def __init__(self, id: str, columns: Sequence[Column[R]], key: Callable[[R], str], empty: str) -> None:  # noqa: A002
        super().__init__(id)
        self.columns, self._key, self.empty = tuple(columns), key, empty
        self.rows: tuple[R, ...] = ()
        self.shown: tuple[R, ...] = ()
        self.wanted = EventFilter()
        self.cursor = ""
        self.top = 0
        self.sorted_by: int | None = None
        self.reverse = False
        self.marks = Marks()

    # --- what is shown ---------------------------------------------------------------------------

    def show(self, rows: Sequence[R]) -> None:
        self.rows = tuple(rows)
        self.rearrange()

    def filter(self, wanted: EventFilter) -> None:
        self.wanted = wanted
        self.rearrange()

    def rearrange(self) -> None:
        """Filter and order are in force again."""
        rows = [row for row in self.rows if not self.wanted or self.wanted.matches_row(self.fields(row))]
        column = self.columns[self.sorted_by] if self.sorted_by is not None else None
        if column is not None and column.order is not None:
            order = column.order
            rows.sort(key=lambda row: (order(row), self._key(row)), reverse=self.reverse)
        before, self.shown = self.shown, tuple(rows)
        keys = [self._key(row) for row in rows]
        if any(column.marked for column in self.columns):
            self.marks.keep({self._key(row) for row in self.rows})
        if keys and self.cursor not in keys:
            gone = next((i for i, row in enumerate(before) if self._key(row) == self.cursor), 0)
            self.cursor = keys[min(gone, len(keys) - 1)]
        self.draw()

    def fields(self, row: R) -> dict[str, str]:
        return {column.title.lower(): column.text(row) for column in self.columns}

    @property
    def chosen(self) -> R | None:
        return next((row for row in self.shown if self._key(row) == self.cursor), None)

    @property
    def visible_rows(self) -> int:
        return max(0, self.size.height - 1)

    def sort_next(self) -> None:
        """The next column that sorts; after the last one the given order."""
        sortable = [i for i, column in enumerate(self.columns) if column.order is not None]
        after = [i for i in sortable if self.sorted_by is None or i > self.sorted_by]
        self.sorted_by = after[0] if after else None
        self.reverse = self.columns[self.sorted_by].descending if self.sorted_by is not None else False
        self.rearrange()

    def sort_reversed(self) -> None:
        self.reverse = not self.reverse
        self.rearrange()

    # --- moving ----------------------------------------------------------------------------------

    def move(self, down: int) -> None:
        if self.shown:
            at = min(len(self.shown) - 1, max(0, self._at() + down))
            self.cursor = self._key(self.shown[at])
            self.draw()

    def _at(self) -> int:
        return next((i for i, row in enumerate(self.shown) if self._key(row) == self.cursor), 0)

    def on_click(self, event: events.Click) -> None:
        event.stop()
        at = self.top + event.y - 1
        if event.y >= 1 and at < len(self.shown):
            self.cursor = self._key(self.shown[at])
            self.draw()
            if event.chain > 1:
                self.post_message(self.Opened())
        elif event.y == 0:
            self.sort_next()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.move(-3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.move(3)

    # --- drawing ---------------------------------------------------------------------------------

    def on_resize(self) -> None:
        self.draw()

    def draw(self) -> None:
        width, glyphs = self.size.width, self.console_app.glyphs
        if not width:
            return
        at, room = self._at(), self.visible_rows
        self.top = max(0, min(self.top, len(self.shown) - room))
        self.top = at if at < self.top else max(self.top, at - room + 1)
        plan = _fitting(self.columns, width)
        lines = [self._heading(plan, width, glyphs)]
        shown = self.shown[self.top : self.top + room]
        lines += [self._line(row, plan, width, glyphs) for row in shown]
        if not self.shown:
            text = "nothing matches the filter" if self.wanted and self.rows else self.empty
            lines.append((left(f"  {text}", width, "dim", glyphs),))
        self.paint(lines)

    def _line(self, row: R, plan: Sequence[tuple[Column[R], int]], width: int, glyphs: Glyphs) -> Line:
        key = self._key(row)
        chosen = key == self.cursor
        spans: list[Span] = [(f"{glyphs.cursor} " if chosen else "  ", "select" if chosen else "text")]
        for column, size in plan:
            text = column.text(row)
            change = self._change(column, row, key, text) if column.marked else ""
            role: Role = "select" if chosen else "strong" if change else column.role(row) if column.role else "text"
            spans.append((right if column.right else left)(text, size, role, glyphs))
            spans.append((sign(change, glyphs), "select" if chosen else "mark" if change else "text"))
        used = 2 + sum(size + 1 for _, size in plan)
        if chosen and used < width:
            spans.append((" " * (width - used), "select"))
        return tuple(spans)

    def _change(self, column: Column[R], row: R, key: str, text: str) -> Change:
        return self.marks.seen(key, column.title, text, column.order(row) if column.order else None)

    def _heading(self, plan: Sequence[tuple[Column[R], int]], width: int, glyphs: Glyphs) -> Line:
        spans: list[Span] = [("  ", "text")]
        by = self.columns[self.sorted_by] if self.sorted_by is not None else None
        for column, size in plan:
            sign = (glyphs.down if self.reverse else glyphs.up) if column is by else ""
            place = right if column.right else left
            title = column.title[: size - len(sign)] + sign
            spans.append(place(title, size, "head" if column is by else "dim", glyphs))
            spans.append((" ", "text"))
        more = len(self.shown) - self.top - self.visible_rows
        if more > 0 and self.visible_rows:
            note = f"{glyphs.down}{short_count(more)}"
            spans[-1] = (" ", "text")
            used = sum(len(text) for text, _ in spans)
            if used + len(note) <= width:
                spans.append((" " * (width - used - len(note)) + note, "dim"))
        return tuple(spans)


def _fitting(columns: Sequence[Column[R]], width: int) -> list[tuple[Column[R], int]]:
    """The columns that fit, in their order, with their widths."""
    kept = list(columns)
    while len(kept) > 1 and 2 + sum(column.width + 1 for column in kept) > width:
        kept.remove(max(kept, key=lambda column: column.keep))
    spare = max(0, width - 2 - sum(column.width + 1 for column in kept))
    growing = [column for column in kept if column.grow]
    sizes: list[tuple[Column[R], int]] = []
    for column in kept:
        extra = spare // len(growing) if column.grow else 0
        sizes.append((column, column.width + extra))
    return sizes


class Pager(Lines):
    """Lines that scroll when there are more than fit."""

    def __init__(self, id: str) -> None:  # noqa: A002 - Textual's name
        super().__init__(id)
        self.text: tuple[Line, ...] = ()
        self.top = 0

    def show(self, lines: Sequence[Line]) -> None:
        self.text = tuple(lines)
        self.draw()

    def move(self, down: int) -> None:
        self.top = max(0, min(len(self.text) - self.size.height, self.top + down))
        self.draw()

    def draw(self) -> None:
        self.top = max(0, min(self.top, len(self.text) - self.size.height))
        self.paint(self.text[self.top : self.top + max(1, self.size.height)])

    def on_resize(self) -> None:
        self.draw()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.move(-3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.move(3)
