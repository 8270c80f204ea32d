"""The event feed: own lines, its own scrolling, follows the newest event until someone scrolls up."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events

from tierkv.telemetry.snapshot import Event
from tierkv.tui.filter import EventFilter
from tierkv.tui.model import EventLine, EventsView
from tierkv.tui.text import clock, fit, short_count
from tierkv.tui.theme import Glyphs, Role
from tierkv.tui.widgets.lines import Line, Lines, Span, left, spread

SEVERITIES: dict[str, Role] = {"error": "bad", "warning": "warn", "info": "text", "debug": "dim"}


def shape_of(severity: str, glyphs: Glyphs) -> str:
    return {"error": glyphs.refused, "warning": glyphs.over, "info": glyphs.dot}.get(severity, " ")


def selected(lines: Sequence[EventLine], wanted: EventFilter, bottom: int | None, rows: int) -> list[EventLine]:
    """At most ``rows`` matching events that end at number ``bottom`` (None: at the newest), oldest first."""
    found: list[EventLine] = []
    for line in reversed(lines):
        if len(found) >= rows:
            break
        if (bottom is None or line.number <= bottom) and wanted.matches(line.event):
            found.append(line)
    return found[::-1]


def scrolled(lines: Sequence[EventLine], wanted: EventFilter, bottom: int | None, rows: int, up: int) -> int | None:
    """The bottom event after scrolling ``up`` matching events (down when negative); None: follows the newest."""
    matching = [line.number for line in lines if wanted.matches(line.event)]
    if len(matching) <= rows:
        return None
    at = len(matching) - 1
    if bottom is not None:
        at = next((i for i in range(len(matching) - 1, -1, -1) if matching[i] <= bottom), rows - 1)
    at = max(rows - 1, at - up)
    return None if at >= len(matching) - 1 else matching[at]


def event_line(event: Event, width: int, glyphs: Glyphs) -> Line:
    role = SEVERITIES.get(event.severity, "text")
    node = 10 if width < 120 else 18
    fixed = 1 + 8 + 1 + 1 + 1 + node + 1 + 8 + 1
    quiet: Role = "dim" if role == "dim" else "text"
    return (
        (f" {clock(event.time_unix_s)} ", "dim"),
        (shape_of(event.severity, glyphs) + " ", role),
        (fit(event.node, node, glyphs.ellipsis) + " ", quiet),
        left(event.kind, 8 + 1, "accent" if quiet == "text" else "dim", glyphs),
        left(event.message, width - fixed, role, glyphs),
    )


def heading(view: EventsView, wanted: EventFilter, newer: int, width: int, glyphs: Glyphs) -> Line:
    """The title, how many there are, the filter in force, and what is not shown."""
    start: list[Span] = [(" EVENTS", "head"), (f"  {short_count(len(view.lines))} kept", "dim")]
    if wanted:
        matches = sum(wanted.matches(line.event) for line in view.lines)
        start.extend((("  filter ", "dim"), (wanted.text, "strong"), (f"  {short_count(matches)} match", "dim")))
    end: list[Span] = []
    if newer:
        end.append((f"{glyphs.down} {short_count(newer)} newer ", "warn"))
    if view.dropped:
        end.append((f"{short_count(view.dropped)} dropped ", "warn"))
    return spread(start, end, width)


class EventFeed(Lines):
    """``show`` it a view; ``scroll_by`` moves through the kept events."""

    def __init__(self, id: str) -> None:  # noqa: A002 - Textual's name
        super().__init__(id)
        self.view = EventsView()
        self.wanted = EventFilter()
        self.bottom: int | None = None

    @property
    def rows(self) -> int:
        """Lines for events, below the heading."""
        return max(0, self.size.height - 1)

    def show(self, view: EventsView, wanted: EventFilter) -> None:
        """The feed shows ``view`` through ``wanted``; where it was scrolled to stays in sight."""
        if wanted != self.wanted:
            self.bottom = None
        self.view, self.wanted = view, wanted
        self.draw()

    def draw(self) -> None:
        width, glyphs = self.size.width, self.console_app.glyphs
        shown = selected(self.view.lines, self.wanted, self.bottom, self.rows)
        if self.bottom is not None and len(shown) < self.rows:
            self.bottom = scrolled(self.view.lines, self.wanted, self.bottom, self.rows, 0)
            shown = selected(self.view.lines, self.wanted, self.bottom, self.rows)
        newer = 0
        if self.bottom is not None:
            newer = sum(line.number > self.bottom and self.wanted.matches(line.event) for line in self.view.lines)
        lines = [heading(self.view, self.wanted, newer, width, glyphs)]
        lines += [event_line(line.event, width, glyphs) for line in shown]
        if not shown:
            nothing = "nothing matches the filter" if self.wanted and self.view.lines else "nothing has happened yet"
            lines.append((left(f"  {nothing}", width, "dim", glyphs),))
        self.paint(lines)

    def scroll_events(self, up: int) -> None:
        self.bottom = scrolled(self.view.lines, self.wanted, self.bottom, self.rows, up)
        self.draw()

    def to_oldest(self) -> None:
        self.scroll_events(len(self.view.lines))

    def follow(self) -> None:
        """The newest event is at the bottom again, and stays there."""
        self.bottom = None
        self.draw()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.scroll_events(3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.scroll_events(-3)
