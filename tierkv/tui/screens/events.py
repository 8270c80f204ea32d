"""All events with one under the cursor; drilled into one: what it says, what led to it, and where the data is now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding

from tierkv.rpc.admin import RecordLine
from tierkv.telemetry.snapshot import Event
from tierkv.tui.filter import FIELDS
from tierkv.tui.model import EventLine
from tierkv.tui.operate import Holder, holders_of, nowhere
from tierkv.tui.screens.work import WorkScreen, as_json
from tierkv.tui.text import age, clock, wrap
from tierkv.tui.widgets.events import SEVERITIES, event_line, shape_of
from tierkv.tui.widgets.lines import Line, left
from tierkv.tui.widgets.table import Column, Pager, Table

CAUSE_S = 120.0
CAUSES = {
    "evict": ("config", "demote", "store", "pin", "purge"),
    "expire": ("config",),
    "miss": ("evict", "expire", "purge", "link", "quarantine", "stop"),
    "refuse": ("config", "purge", "pin", "evict"),
    "link": ("stop", "start", "link"),
    "purge": ("purge",),
}
"""What may have led to an event of a kind; the same attributes lead to any."""

SHARED = ("key", "keys", "model", "transfer", "peer", "engine")


def causes(lines: Sequence[EventLine], event: Event, most: int = 6) -> list[Event]:
    """The newest earlier events that may have led to ``event``: of a kind that leads there, or about the same thing."""
    told = {(name, event.attributes[name]) for name in SHARED if name in event.attributes}
    found: list[Event] = []
    for line in reversed(lines):
        before = line.event
        if before is event or before.time_unix_s > event.time_unix_s:
            continue
        if event.time_unix_s - before.time_unix_s > CAUSE_S or len(found) >= most:
            break
        same = any((name, before.attributes.get(name)) in told for name in SHARED)
        if same or before.kind in CAUSES.get(event.kind, ()):
            found.append(before)
    return found


def keys_of_event(event: Event) -> list[bytes]:
    """The record keys that an event names, as far as they are whole enough to ask for."""
    found: list[bytes] = []
    for name in ("keys", "key"):
        for word in event.attributes.get(name, "").replace(",", " ").split():
            try:
                key = bytes.fromhex(word)
            except ValueError:
                continue
            if 4 <= len(key) <= 32:
                found.append(key)
    return found


class Events(WorkScreen):
    """The newest first; the cursor stays on its event while new ones come."""

    tab = "events"
    BINDINGS = [
        Binding("enter", "open", "Open"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("s", "sort", "Sort", show=False),
        Binding("S", "sort_reversed", "Reverse the order", show=False),
        Binding("space", "pause", "Pause"),
        Binding("y", "copy", "Copy the row", show=False),
        Binding("Y", "copy_json", "Copy the row as JSON", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        columns: tuple[Column[EventLine], ...] = (
            Column(
                "time", "when, by the clock of the node, in this machine's time zone",
                8, lambda r: clock(r.event.time_unix_s), 0, lambda r: r.event.time_unix_s, role=_dim,
            ),
            Column(
                "severity", "error, warning, info or debug",
                9, self._severity, 4, lambda r: r.event.severity, role=_role,
            ),
            Column(
                "node", "where it happened",
                12, lambda r: r.event.node, 1, lambda r: r.event.node,
            ),
            Column(
                "kind", "what it is about: evict, demote, miss, link, config, purge, ...",
                9, lambda r: r.event.kind, 2, lambda r: r.event.kind, role=lambda _: "accent",
            ),
            Column(
                "message", "what happened; enter says what led to it and where the data is now",
                20, lambda r: r.event.message, 0, grow=True, role=_role,
            ),
        )  # fmt: skip
        self.table: Table[EventLine] = Table("table", columns, lambda r: str(r.number), "nothing has happened yet")
        self._newest = -1
        self._following = True

    def _severity(self, line: EventLine) -> str:
        return f"{shape_of(line.event.severity, self.console_app.glyphs)} {line.event.severity}"

    def body(self) -> ComposeResult:
        yield self.table

    def main(self) -> Table[Any]:
        return self.table

    def filter_fields(self) -> tuple[str, ...]:
        return FIELDS

    def draw(self) -> None:
        lines = self.held.events.lines
        newest = lines[-1].number if lines else -1
        events = self.held.events
        self.crumb = f"{len(lines):,} kept"
        if self.wanted:
            self.crumb = f"{len(self.table.shown):,} of {len(lines):,}"
        if events.dropped:
            self.crumb += f", {events.dropped:,} dropped"
        if newest == self._newest and len(lines) == len(self.table.rows):
            self.table.draw()
            return
        at_top = not self.table.shown or self.table.cursor == str(self.table.shown[0].number)
        self._newest = newest
        if at_top and lines:
            self.table.cursor = ""
        self.table.show(lines[::-1])

    def exported(self) -> Any:
        return [asdict(line.event) for line in self.table.shown]

    def action_open(self) -> None:
        if self.table.chosen is not None:
            event = self.table.chosen.event
            self.app.push_screen(EventDetail(event, causes(self.held.events.lines, event), holders_of(self.view)))
            self.console_app.tick()

    def on_table_opened(self) -> None:
        self.action_open()

    def action_copy(self) -> None:
        if self.table.chosen is not None:
            event = self.table.chosen.event
            self.copied(f"{clock(event.time_unix_s)} {event.node} {event.kind} {event.message}", "the event")

    def action_copy_json(self) -> None:
        if self.table.chosen is not None:
            self.copied(as_json(asdict(self.table.chosen.event)), "the event as JSON")


def _dim(_: EventLine) -> Any:
    return "dim"


def _role(line: EventLine) -> Any:
    return SEVERITIES.get(line.event.severity, "text")


class EventDetail(WorkScreen):
    tab = "events"
    drilled = True
    BINDINGS = [
        Binding("Y", "copy_json", "Copy as JSON"),
        Binding("escape,left", "back", "Back"),
    ]

    def __init__(self, event: Event, led: list[Event], holders: list[Holder]) -> None:
        super().__init__()
        self.event, self.led, self._holders = event, led, holders
        self.crumb = f"{event.kind} at {clock(event.time_unix_s)}"
        self.pager = Pager("event")
        self.keys = keys_of_event(event)
        self.where: dict[bytes, list[tuple[str, RecordLine]]] | None = None

    def body(self) -> ComposeResult:
        yield self.pager

    def main(self) -> Pager:
        return self.pager

    def on_mount(self) -> None:
        operator = self.console_app.operator
        if operator is None or not self.keys:
            return

        async def ask() -> None:
            where: dict[bytes, list[tuple[str, RecordLine]]] = {}
            for key in self.keys[:8]:
                found = await operator.records(self._holders, key)
                where[key] = [(h.name, r) for h, records in found for r in records if r.key.startswith(key)]
            self.where = where
            self.redraw()

        self.run_worker(ask(), exclusive=True, group="where")

    def draw(self) -> None:
        self.pager.show(list(self._lines()))

    def exported(self) -> Any:
        return {"event": asdict(self.event), "before": [asdict(one) for one in self.led]}

    def action_copy_json(self) -> None:
        self.copied(as_json(self.exported()), "the event as JSON")

    def _lines(self) -> Iterator[Line]:
        width, glyphs, event = self.size.width, self.console_app.glyphs, self.event
        role = SEVERITIES.get(event.severity, "text")
        for number, text in enumerate(wrap(event.message, width - 4, 6, glyphs.ellipsis)):
            yield ((f" {shape_of(event.severity, glyphs)} " if number == 0 else "   ", role), (text, role))
        ago = age(max(0.0, self.view.now_unix_s - event.time_unix_s))
        facts = [("kind", event.kind), ("node", event.node), ("severity", event.severity)]
        facts.append(("time", f"{clock(event.time_unix_s)}, {ago} ago"))
        for label, text in [*facts, *sorted(event.attributes.items())]:
            yield (left(f"   {label}", 15, "dim", glyphs), left(text, width - 15, "text", glyphs))
        yield ()
        yield (left(" BEFORE IT, what may have led here", width, "head", glyphs),)
        yield from (event_line(one, width, glyphs) for one in self.led)
        if not self.led:
            yield (left("  nothing that is known here", width, "dim", glyphs),)
        if self.keys:
            yield ()
            yield (left(" WHERE IT IS NOW", width, "head", glyphs),)
            yield from self._places(width)

    def _places(self, width: int) -> Iterator[Line]:
        glyphs = self.console_app.glyphs
        for key in self.keys[:8]:
            name = f"  {key.hex()[:8]}"
            if self.where is None:
                yield (left(name, 12, "text", glyphs), left("asking", width - 12, "dim", glyphs))
                continue
            places = self.where.get(key, [])
            text = ", ".join(f"at {node} ({record.codec})" for node, record in places)
            role = "ok" if places else "warn"
            yield (left(name, 12, "text", glyphs), left(text or nowhere(self.view), width - 12, role, glyphs))
