"""The first screen: cluster line, why, nodes, tiers, misses, events, keys."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.reactive import reactive
from textual.widgets import Input, Static

from tierkv.tui.filter import EventFilter, parse_filter
from tierkv.tui.model import ClusterView
from tierkv.tui.screens.base import ViewScreen
from tierkv.tui.widgets.cluster import cluster_line, why_lines
from tierkv.tui.widgets.events import EventFeed
from tierkv.tui.widgets.keys import key_line, keys_of
from tierkv.tui.widgets.lines import Line, Lines, left
from tierkv.tui.widgets.marks import Marks, mark_words
from tierkv.tui.widgets.misses import WORDS as MISS_WORDS
from tierkv.tui.widgets.misses import miss_lines
from tierkv.tui.widgets.nodes import HEADINGS as NODE_HEADINGS
from tierkv.tui.widgets.nodes import node_lines, rows_needed, state_words
from tierkv.tui.widgets.tiers import WORDS as TIER_WORDS
from tierkv.tui.widgets.tiers import tier_lines
from tierkv.tui.widgets.words import Words

MIN_WIDTH, MIN_HEIGHT = 60, 16
TIER_LINES = 5
PANELS = {
    "too-small": "",
    "cluster": "bar",
    "why": "",
    "nodes": "panel",
    "tiers": "panel",
    "misses": "panel",
    "keys": "bar",
}
"""Panels from top to bottom and their class in the stylesheet; the event feed stands above the last."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Heights in lines; ``gap`` blank lines stand above each panel where there is room."""

    why: int
    nodes: int
    misses: int
    gap: int

    @property
    def needed(self) -> int:
        return 2 + self.why + 1 + self.nodes + TIER_LINES + (1 + self.misses if self.misses else 0) + 4 * self.gap


def plan(width: int, height: int, nodes: int, reasons: int = 0) -> Plan:
    """How the lines of a terminal are shared out; events get what is left, at least three lines."""
    why = 2 if height >= 20 and width < 130 else 1
    misses = 0 if height < 20 else 3 if height < 44 else min(6, max(3, reasons))
    gap = 1 if height >= 30 else 0
    events_min = 4 if height < 20 else 5 if height < 36 else 10
    bare = Plan(why, 0, misses, gap).needed
    rows = rows_needed(nodes, width, max(1, height - bare - events_min))
    return Plan(why, rows, misses, gap)


class FilterInput(Input):
    """One line for the event filter, in place of the line of keys. Its cursor stands still: blinking is repainting."""

    def on_mount(self) -> None:
        self.cursor_blink = False


class Overview(ViewScreen):
    """Tables can be paused; the header, the meters and the graphs always go on."""

    CSS_PATH = "overview.tcss"
    AUTO_FOCUS = ""
    BINDINGS = [
        Binding("space", "pause", "Pause", priority=False),
        Binding("slash", "filter", "Filter events", key_display="/"),
        Binding("z", "maximise", "Zoom events"),
        Binding("up,k", "scroll_events(1)", "Scroll events up", show=False),
        Binding("down,j", "scroll_events(-1)", "Scroll events down", show=False),
        Binding("pageup", "page_events(1)", "Page up", show=False),
        Binding("pagedown", "page_events(-1)", "Page down", show=False),
        Binding("home,g", "oldest", "Oldest event", show=False),
        Binding("end,G", "newest", "Newest event", show=False),
        Binding("e", "export", "Export the view", show=False),
        Binding("escape", "back", "Back", show=False),
    ]

    paused: reactive[bool] = reactive(False, init=False)
    maximised: reactive[bool] = reactive(False, init=False)
    wanted: reactive[EventFilter] = reactive(EventFilter(), init=False)

    def __init__(self) -> None:
        super().__init__()
        self._view = ClusterView()
        self._held = ClusterView()
        self._panels = {name: Lines(name, classes=classes) for name, classes in PANELS.items()}
        self._marks = {name: Marks() for name in ("nodes", "tiers", "misses")}
        self.feed = EventFeed("events")
        self._ready = False

    def compose(self) -> ComposeResult:
        *above, keys = self._panels.values()
        yield from above
        yield self.feed
        yield keys
        with Horizontal(id="filter-line"):
            yield Static("/", markup=False)
            yield FilterInput(
                placeholder="words  node:nas  kind:evict  severity:error  !not", compact=True, select_on_focus=False
            )

    def on_mount(self) -> None:
        self._ready = True

    def words(self) -> tuple[Words, ...]:
        glyphs = self.console_app.glyphs
        nodes = (Words.named("NODES", NODE_HEADINGS), state_words(glyphs))
        return (*TIER_WORDS, *nodes, *MISS_WORDS, mark_words(glyphs))

    def show(self, view: ClusterView) -> None:
        self._view = view
        if not self.paused:
            self._held = view
        self._draw()

    def _draw(self) -> None:
        if not self._ready or not self.is_attached or not self.size.width:
            return
        width, height = self.size
        small = width < MIN_WIDTH or height < MIN_HEIGHT
        self.set_class(small, "-small")
        if small:
            self._paint("too-small", too_small(width, height))
            return
        with self.app.batch_update():
            self._draw_panels(width, height)

    def _draw_panels(self, width: int, height: int) -> None:
        view, held, glyphs = self._view, self._held, self.console_app.glyphs
        heights = plan(width, height, len(view.nodes), len(held.misses))
        self.set_class(bool(heights.gap), "-roomy")
        self.set_class(not heights.misses, "-short")
        self._paint("cluster", cluster_line(view, width, glyphs, paused=self.paused))
        self._paint("why", why_lines(view, width, heights.why, glyphs), heights.why)
        self._paint("nodes", node_lines(view, width, heights.nodes, glyphs, self._marks["nodes"]))
        self._paint("tiers", tier_lines(held, view, width, glyphs, self._marks["tiers"]), TIER_LINES)
        if heights.misses:
            self._paint("misses", miss_lines(held, width, heights.misses, glyphs, self._marks["misses"]))
        keys = key_line(keys_of(self.console_app, self.active_bindings.values(), glyphs), width)
        text, role = self.news
        self._paint("keys", [(left(f" {text}", width, role, glyphs),)] if text else keys)
        self.feed.show(held.events, self.wanted)

    def _paint(self, name: str, lines: list[Line], height: int | None = None) -> None:
        widget = self._panels[name]
        wanted = height or len(lines)
        if widget.styles.height is None or widget.styles.height.value != wanted:
            widget.styles.height = wanted
        widget.paint(lines)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def watch_paused(self) -> None:
        self._held = self._view
        self._draw()

    def watch_maximised(self) -> None:
        self.set_class(self.maximised, "-maximised")
        self.call_after_refresh(self._draw)

    def watch_wanted(self) -> None:
        self._draw()

    def action_pause(self) -> None:
        self.paused = not self.paused

    def action_maximise(self) -> None:
        self.maximised = not self.maximised

    def action_scroll_events(self, up: int) -> None:
        self.feed.scroll_events(up)

    def action_page_events(self, pages: int) -> None:
        self.feed.scroll_events(pages * max(1, self.feed.rows - 1))

    def action_oldest(self) -> None:
        self.feed.to_oldest()

    def action_newest(self) -> None:
        self.feed.follow()

    def action_export(self) -> None:
        self.console_app.export("overview", asdict(self._held), self.tell)

    def paint_keys(self) -> None:
        self._draw()

    def action_filter(self) -> None:
        """The line of keys becomes an input; the feed follows every letter."""
        self.add_class("-filtering")
        field = self.query_one(FilterInput)
        field.value = self.wanted.text
        field.focus()

    def action_back(self) -> None:
        """Undoes the innermost thing: filter being typed, scrolling, zoom, filter in force."""
        if self.has_class("-filtering") or (self.wanted and self.feed.bottom is None and not self.maximised):
            self._close_filter()
            self.wanted = EventFilter()
        elif self.feed.bottom is not None:
            self.feed.follow()
        elif self.maximised:
            self.maximised = False

    def on_input_changed(self, event: Input.Changed) -> None:
        if self.has_class("-filtering"):
            self.wanted = parse_filter(event.value)

    def on_input_submitted(self) -> None:
        self._close_filter()

    def _close_filter(self) -> None:
        self.remove_class("-filtering")
        self.set_focus(None)
        self._draw()  # the line of keys was drawn for one who types


def too_small(width: int, height: int) -> list[Line]:
    """What the console says where it does not fit."""
    return [
        (("TierKV", "head"),),
        ((f"needs {MIN_WIDTH}x{MIN_HEIGHT},", "text"),),
        ((f"this is {width}x{height}", "text"),),
        (("q quits", "dim"),),
    ]
