"""What the screens behind 2 to 5 share: the cluster line, the tabs, a body, and one line for keys, filter or news."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Input, Static

from tierkv.tui.filter import EventFilter, parse_filter
from tierkv.tui.model import ClusterView
from tierkv.tui.operate import Holder
from tierkv.tui.screens.base import ViewScreen
from tierkv.tui.screens.overview import MIN_HEIGHT, MIN_WIDTH, FilterInput, too_small
from tierkv.tui.text import fit
from tierkv.tui.widgets.cluster import cluster_line
from tierkv.tui.widgets.keys import key_line, keys_of
from tierkv.tui.widgets.lines import Line, Lines, Span, left, span_width, spread
from tierkv.tui.widgets.marks import mark_words
from tierkv.tui.widgets.table import Pager, Table
from tierkv.tui.widgets.words import Words

TABS = ("overview", "nodes", "prefixes", "events", "config")
REFRESH_S = 5.0


class WorkScreen(ViewScreen):
    """``body`` is what a screen adds. ``tab`` names it; ``crumb`` says what it has drilled into.

    ``drilled``: it was opened from another screen, and esc goes back there.
    """

    CSS_PATH = "work.tcss"
    AUTO_FOCUS = ""
    BINDINGS = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "move(-1000000)", "First", show=False),
        Binding("end,G", "move(1000000)", "Last", show=False),
        Binding("space", "pause", "Pause", show=False),
        Binding("z", "maximise", "Zoom", show=False),
        Binding("e", "export", "Export the view", show=False),
        Binding("escape", "back", "Back", show=False),
    ]
    tab = "overview"
    drilled = False
    paused: reactive[bool] = reactive(False, init=False)

    def __init__(self) -> None:
        super().__init__()
        self.view = ClusterView()
        self.held = ClusterView()
        self.crumb = ""
        self.wanted = EventFilter()
        self._head, self._tabs, self._keys = (
            Lines("cluster", classes="bar"),
            Tabs("tabs"),
            Lines("keys", classes="bar"),
        )
        self._small = Lines("too-small")

    # --- to be given by each screen --------------------------------------------------------------

    def body(self) -> ComposeResult:
        """The widgets between the tabs and the last line."""
        raise NotImplementedError

    def draw(self) -> None:
        """The body shows ``self.held``."""
        raise NotImplementedError

    def main(self) -> Table[Any] | Pager:
        """What the arrow keys move in."""
        raise NotImplementedError

    def exported(self) -> Any:
        """The view as JSON can hold it."""
        raise NotImplementedError

    def words(self) -> tuple[Words, ...]:
        table = self.main()
        if not isinstance(table, Table):
            return ()
        marked = any(column.marked for column in table.columns)
        return (Words.of("COLUMNS", table.columns), *([mark_words(self.console_app.glyphs)] if marked else []))

    # --- frame -----------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield self._small
        yield self._head
        yield self._tabs
        yield from self.body()
        yield self._keys
        with Horizontal(id="filter-line"):
            yield Static("/", markup=False, id="prompt")
            yield FilterInput(placeholder="words  !not  name:text", compact=True, select_on_focus=False)

    def show(self, view: ClusterView) -> None:
        self.view = view
        if not self.paused:
            self.held = view
        if self.is_current or self.is_attached:
            self.redraw()

    def redraw(self) -> None:
        width, height = self.size
        if not self.is_attached or not width or not self._keys.is_attached:
            return
        small = width < MIN_WIDTH or height < MIN_HEIGHT
        self.set_class(small, "-small")
        if small:
            self._small.styles.height = 4
            self._small.paint(too_small(width, height))
            return
        app, glyphs = self.console_app, self.console_app.glyphs
        with app.batch_update():
            self._head.paint(cluster_line(self.view, width, glyphs, paused=self.paused))
            self.paint_keys()
            self.draw()
            self._tabs.paint([tab_line(self.tab, self.crumb, self.wanted.text, width, self)])

    def paint_keys(self) -> None:
        width, (text, role) = self.size.width, self.news
        if text:
            self._keys.paint([(left(f" {text}", width, role, self.console_app.glyphs),)])
        else:
            keys = keys_of(self.console_app, self.active_bindings.values(), self.console_app.glyphs)
            self._keys.paint(key_line(keys, width))

    def on_resize(self) -> None:
        self.call_after_refresh(self.redraw)

    def on_screen_resume(self) -> None:
        self.show(self.console_app.view)
        self.call_after_refresh(self.redraw)
        self.resumed()

    def resumed(self) -> None:
        """The screen is in front again."""

    def watch_paused(self) -> None:
        self.held = self.view
        self.redraw()

    # --- actions ---------------------------------------------------------------------------------

    def action_pause(self) -> None:
        self.paused = not self.paused

    def action_maximise(self) -> None:
        self.toggle_class("-maximised")
        self.call_after_refresh(self.redraw)

    def action_move(self, down: int) -> None:
        self.main().move(down)

    def action_page(self, pages: int) -> None:
        self.main().move(pages * max(1, self.main().size.height - 2))

    def action_sort(self) -> None:
        table = self.main()
        if isinstance(table, Table):
            table.sort_next()

    def action_sort_reversed(self) -> None:
        table = self.main()
        if isinstance(table, Table):
            table.sort_reversed()

    def action_export(self) -> None:
        self.console_app.export(self.tab, self.exported(), self.tell)

    def action_filter(self) -> None:
        self.add_class("-filtering")
        field = self.query_one(FilterInput)
        field.value = self.wanted.text
        field.focus()

    def action_back(self) -> None:
        """Undoes the innermost thing: what is being typed, the filter, the zoom, the drill."""
        if self.has_class("-filtering"):
            self.close_prompt()
        elif self.wanted:
            self.filter_by("")
        elif self.has_class("-maximised"):
            self.action_maximise()
        else:
            self.leave()

    def leave(self) -> None:
        """Back to where this was opened from; a view of its own goes nowhere."""
        if self.drilled:
            self.app.pop_screen()
            self.console_app.tick()

    def filter_by(self, text: str) -> None:
        self.wanted = parse_filter(text, self.filter_fields())
        table = self.main()
        if isinstance(table, Table):
            table.filter(self.wanted)
        self.redraw()

    def filter_fields(self) -> tuple[str, ...]:
        table = self.main()
        return tuple(column.title.lower() for column in table.columns) if isinstance(table, Table) else ()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.typed(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.entered(event.value)

    def typed(self, text: str) -> None:
        """Every letter typed into the last line."""
        if self.has_class("-filtering"):
            self.filter_by(text)

    def entered(self, text: str) -> None:  # noqa: ARG002 - others use it
        self.close_prompt()

    def close_prompt(self) -> None:
        self.remove_class("-filtering")
        self.set_focus(None)
        self.paint_keys()  # it was drawn for one who types

    def copied(self, text: str, what: str) -> None:
        self.console_app.copy_to_clipboard(text)
        self.tell(f"{what} is in the clipboard")


class AskedTable(WorkScreen):
    """A table of what agents are asked for: when it comes to the front, when other agents can be asked, and from time
    to time, unless it is paused."""

    table: Table[Any]
    _asked: tuple[Holder, ...] = ()

    def who(self) -> Sequence[Holder]:
        """The agents that can be asked now."""
        raise NotImplementedError

    async def ask(self) -> None:
        """The table shows what the agents answer now."""
        raise NotImplementedError

    def body(self) -> ComposeResult:
        yield self.table

    def main(self) -> Table[Any]:
        return self.table

    def on_mount(self) -> None:
        self.set_interval(REFRESH_S, self._again)

    def resumed(self) -> None:
        self.action_refresh()

    def _again(self) -> None:
        if self.is_current and not self.paused:
            self.action_refresh()

    def show(self, view: ClusterView) -> None:
        super().show(view)
        if self.is_current and not self.paused and tuple(self.who()) != self._asked:
            self.action_refresh()

    def action_refresh(self) -> None:
        self._asked = tuple(self.who())
        self.run_worker(self.ask, exclusive=True, group="asked")


class Tabs(Lines):
    """The line that ``tab_line`` paints: a click on a view's name opens it."""

    def on_click(self, event: events.Click) -> None:
        at = 1
        for name in TABS:
            width = len(_tab(name))
            if at <= event.x < at + width:
                event.stop()
                self.console_app.action_view(name)
                return
            at += width


def _tab(name: str) -> str:
    return f" {TABS.index(name) + 1} {name.capitalize()} "


def tab_line(tab: str, crumb: str, wanted: str, width: int, widget: Widget) -> Line:
    """All five views, the present one marked, and where one has drilled to."""
    spans: list[Span] = [(" ", "text")]
    tabs: list[Span] = [(_tab(name), "select" if name == tab else "dim") for name in TABS]
    spans += tabs
    if crumb and not (wanted and width < 100):
        glyphs = widget.app.glyphs  # type: ignore[attr-defined]
        spans.append((f" {glyphs.cursor} {crumb}", "strong"))
    room = max(8, width - span_width(spans) - 9)
    end: list[Span] = [("filter ", "dim"), (fit(wanted, min(len(wanted), room)) + " ", "strong")] if wanted else []
    return spread(spans, end, width)


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else str(value)
