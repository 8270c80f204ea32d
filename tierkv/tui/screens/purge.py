"""Purge with its blast radius first: choose, see what every holder says would go, type its name, take it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input
from textual.worker import Worker

from tierkv.tui.model import ClusterView
from tierkv.tui.operate import Holder, Preview, Purged, Selection, away_of
from tierkv.tui.screens.base import Deed
from tierkv.tui.text import clean, counted, fit, short_duration
from tierkv.tui.theme import Glyphs, Role
from tierkv.tui.widgets.lines import Line, Lines, left
from tierkv.tui.widgets.table import Column, Table
from tierkv.units import format_duration, format_size

if TYPE_CHECKING:
    from tierkv.tui.app import Console

AGES_S = (3600.0, 86_400.0, 7 * 86_400.0)
WIDTH = 70
EXAMPLES = 3
FRAME = 5
"""Lines of the dialog beside its text: padding, the field, a blank line and the buttons."""


def selections(view: ClusterView, holders: Sequence[Holder], first: Sequence[Selection]) -> list[Selection]:
    """What may be purged, from the narrowest to everything; what the screen offers comes first."""
    found = list(first)
    found += [Selection("model", model=model) for model in view.models]
    found += [Selection("older", older_than_s=seconds) for seconds in AGES_S]
    found += [Selection("node", one.address, one.name) for one in holders]
    found += [Selection("tier", tier=tier) for tier in ("kv", "ssm")]
    found.append(Selection("all"))
    return list(dict.fromkeys(found))


class Choice(Button):
    """A button at which one may begin to type: letters go into the dialog's field, and none of them is a command."""

    def on_key(self, event: events.Key) -> None:
        screen = self.screen
        if isinstance(screen, Purge) and event.is_printable and event.character and not event.character.isspace():
            event.stop()
            event.prevent_default()
            screen.type(event.character)


class Purge(ModalScreen[list[Purged]], Deed):
    """Dismissed with what was purged; an empty list when nothing was."""

    CSS_PATH = "dialog.tcss"
    AUTO_FOCUS = ""
    BINDINGS = [
        Binding("escape", "back", "Back"),
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("home,g", "move(-1000000)", "First", show=False),
        Binding("end,G", "move(1000000)", "Last", show=False),
        Binding("left", "app.focus_previous", "The other button", show=False),
        Binding("right", "app.focus_next", "The other button", show=False),
        Binding("enter", "choose", "Choose", show=False),
    ]

    def __init__(self, view: ClusterView, holders: Sequence[Holder], first: Sequence[Selection] = ()) -> None:
        super().__init__()
        self._view, self._holders = view, holders
        self._offered = selections(view, holders, first)
        columns: tuple[Column[Selection], ...] = (
            Column("what", "what would be purged", 40, lambda one: one.text, grow=True),
        )
        self.table: Table[Selection] = Table("choices", columns, repr, "nothing to purge")
        self.what: Selection | None = None
        self.previews: list[Preview] = []
        self._asking: Worker[None] | None = None
        self._said: tuple[Line, ...] = ()
        self._text = Lines("text")

    @property
    def console_app(self) -> Console:
        return self.app  # type: ignore[return-value]

    def compose(self) -> ComposeResult:
        with Vertical(id="box"):
            yield self._text
            yield self.table
            yield Input(id="typed", compact=True, select_on_focus=False)
            with Horizontal(id="buttons"):
                yield Choice("Cancel", id="cancel", compact=True)
                yield Choice("Purge", id="purge", variant="error", compact=True, disabled=True)

    def on_mount(self) -> None:
        self.table.styles.height = min(len(self._offered) + 1, max(4, self.app.size.height - 8))
        # At once, for those who type ahead; drawn as soon as there is room.
        self.table.show(self._offered)
        self.call_after_refresh(self.table.draw)
        self._say(((" PURGE: what?", "head"), ("   enter shows what would go, esc leaves", "dim")))

    def warn(self, text: str) -> None:
        self._text.paint([*self._said[:-1], ((f" {text}", "warn"),)])

    def _say(self, *lines: Line) -> None:
        self._said = lines
        self._text.styles.height = len(lines)
        self._text.paint(lines)

    # --- choosing --------------------------------------------------------------------------------

    def action_move(self, down: int) -> None:
        if self.what is None:
            self.table.move(down)

    def on_table_opened(self) -> None:
        self.action_choose()

    def action_choose(self) -> None:
        if self.what is None and self.table.chosen is not None:
            self.choose(self.table.chosen)

    def choose(self, what: Selection) -> None:
        """The holders are asked what would go; nothing is removed."""
        self.what = what
        self.table.styles.display = "none"
        head = left(f" PURGE {what.text}", WIDTH, "head", self.console_app.glyphs)
        self._say((head,), ((" asking what would go; esc asks no more", "dim"),))
        self._asking = self.run_worker(self._ask(what), exclusive=True)

    async def _ask(self, what: Selection) -> None:
        operator = self.console_app.operator
        if operator is None:
            return
        away = [one for one in away_of(self._view) if what.address in ("", one.holder.address)]
        self.previews = [*await operator.preview(self._holders, what), *away]
        self.add_class("-asked")
        useful = [one for one in self.previews if one.plan and one.plan.records]
        self._say(*self._blast(what, useful))
        self.set_class(bool(useful), "-useful")
        self.query_one("#cancel", Button).focus()

    def _blast(self, what: Selection, useful: Sequence[Preview]) -> list[Line]:
        glyphs = self.console_app.glyphs
        plans = [one.plan for one in useful if one.plan]
        records, size = sum(plan.records for plan in plans), sum(plan.bytes for plan in plans)
        prefixes, tokens = sum(plan.prefixes for plan in plans), sum(plan.tokens for plan in plans)
        pinned = sum(plan.pinned_records for plan in plans)
        lines: list[Line] = [(left(f" PURGE {what.text}", WIDTH, "head", glyphs),)]
        if plans:
            text = f" would remove {counted(prefixes, 'prefix', 'prefixes')}, {counted(records, 'record')}, "
            lines.append(((f"{text}{format_size(size)}", "strong"),))
            lines.append(((f" to prefill again: {tokens:,} tokens{self._cost(tokens)}", "text"),))
        else:
            where = "at the nodes that answer" if any(one.plan is None for one in self.previews) else "there"
            lines.append(((f" nothing that would go is {where}", "strong"),))
        if pinned:
            lines.append(
                ((f" {glyphs.over} {counted(pinned, 'record')} of it {'is' if pinned == 1 else 'are'} pinned", "warn"),)
            )
        silent = sum(one.plan is None for one in self.previews)
        if silent:
            text = f" {glyphs.over} {counted(silent, 'node')} cannot be asked: what is there stays"
            lines.append(((text, "warn"),))
        room = self.app.size.height - FRAME - len(lines) - (2 if plans else 0)
        lines += self._by_holder(max(2, room), glyphs)
        if plans:
            lines.append(())
            lines.append(((f" To do it, type {what.typed}, then enter, and enter again.", "text"),))
        return lines

    def _by_holder(self, room: int, glyphs: Glyphs) -> list[Line]:
        """Each holder with its part, and some prefixes of it, in at most ``room`` lines: examples go first, then those
        with the least; who does not answer is always named first."""
        order = sorted(self.previews, key=lambda one: (one.plan is not None, -one.plan.bytes if one.plan else 0))
        for examples in (EXAMPLES, 1, 0):
            parts = [self._part(one, examples, glyphs) for one in order]
            if sum(map(len, parts)) <= room:
                return [line for part in parts for line in part]
        kept = room - 1
        rest = [one.plan for one in order[kept:] if one.plan]
        size, records = format_size(sum(plan.bytes for plan in rest)), sum(plan.records for plan in rest)
        more = f"   and {counted(len(order) - kept, 'more node', 'more nodes')}: {size}, {counted(records, 'record')}"
        return [*(self._part(one, 0, glyphs)[0] for one in order[:kept]), (left(more, WIDTH, "dim", glyphs),)]

    def _part(self, one: Preview, examples: int, glyphs: Glyphs) -> list[Line]:
        plan = one.plan
        said = f"{format_size(plan.bytes)}, {counted(plan.records, 'record')}" if plan else one.error
        role: Role = "text" if plan else "bad"
        name = left(f"   {fit(one.holder.name, 16, glyphs.ellipsis)}", 20, "text", glyphs)
        lines: list[Line] = [(name, left(said, 48, role, glyphs))]
        for prefix in plan.examples[:examples] if plan else ():
            text = f"     {prefix.leaf_key.hex()[:8]}  {prefix.tokens:,} tokens  {format_size(prefix.own_bytes)}"
            lines.append((left(f"{text}  {prefix.model}", WIDTH, "dim", glyphs),))
        return lines

    def _cost(self, tokens: int) -> str:
        saved = self._view.saved
        if not saved.tokens or not saved.seconds:
            return ""
        return f", about {short_duration(saved.seconds / saved.tokens * tokens)} of prefill"

    # --- doing -----------------------------------------------------------------------------------

    def type(self, letter: str) -> None:
        """The letter is in the field, where there is something to confirm."""
        if self.has_class("-useful"):
            field = self.query_one("#typed", Input)
            field.focus()
            field.cursor_position = len(field.value)
            field.insert_text_at_cursor(letter)

    def on_input_changed(self, event: Input.Changed) -> None:
        typed = self.what.typed if self.what else ""
        self.query_one("#purge", Button).disabled = not typed or event.value.strip() != typed
        if self._said and typed:
            self._text.paint(self._said)

    def on_input_submitted(self) -> None:
        if not self.query_one("#purge", Button).disabled:
            self.query_one("#purge", Button).focus()
        elif self.what is not None:
            self._text.paint([*self._said[:-1], ((f" That is not {self.what.typed}: nothing is purged.", "bad"),)])

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if self.under_way:
            return
        if event.button.id == "cancel":
            self.dismiss([])
        else:
            self.run_worker(self._purge(), exclusive=True)

    async def _purge(self) -> None:
        """Once it has begun the dialog stays until the holders have answered: what came of it is not to be lost."""
        operator = self.console_app.operator
        if operator is not None:
            self.under_way = True
            self._say(*self._said[:-1], ((" purging; what came of it is said here within 15 s", "warn"),))
            self.dismiss(await operator.purge(self.previews))

    def action_back(self) -> None:
        if self.under_way:
            return
        if self.what is None:
            self.dismiss([])
            return
        if self._asking is not None:
            self._asking.cancel()
        self.what, self.previews = None, []
        self.remove_class("-asked", "-useful")
        self.query_one("#typed", Input).value = ""
        self.set_focus(None)
        self.table.styles.display = "block"
        self.on_mount()


def told(purged: Sequence[Purged]) -> tuple[str, str]:
    """What became of a purge in one line, and its role."""
    done = [one for one in purged if not one.error]
    failed = [one for one in purged if one.error]
    text = ""
    if done:
        records, size = sum(one.records for one in done), sum(one.size_bytes for one in done)
        text = f"{counted(records, 'record')} purged, {format_size(size)}"
        undo_s = min((one.undo_s for one in done), default=0.0)
        text += f"; u takes it back for {format_duration(undo_s)}" if undo_s else ""
    if failed:
        text += f"{'; ' if text else ''}{clean(failed[0].holder.name)}: {clean(failed[0].error)}"
    return text, "bad" if failed else "strong"
