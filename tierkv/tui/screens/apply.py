"""What a change of the configuration would do, agent by agent, before it is made; then every acknowledgement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button

from tierkv.errors import ConfigError, DeadlineExceeded, Unreachable
from tierkv.rpc.config_port import Acknowledged, Checked, ConfigEffect, evictions
from tierkv.tui.screens.base import Deed
from tierkv.tui.text import clean, counted, fit, wrap
from tierkv.tui.theme import Role
from tierkv.tui.widgets.lines import Line, Lines, left
from tierkv.tui.widgets.table import Pager
from tierkv.units import format_size

if TYPE_CHECKING:
    from tierkv.config.draft import Draft
    from tierkv.tui.app import Console

EFFECT_LINES = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    text: str
    role: Role = "strong"


def absent(checked: Sequence[Checked]) -> list[Checked]:
    """Agents that nobody reached: they do not stop the others, and read their file when they start."""
    return [one for one in checked if isinstance(one.error, Unreachable | DeadlineExceeded)]


class Apply(ModalScreen[Outcome | None], Deed):
    """Diff and effects; Apply writes the file and changes every agent, or neither."""

    CSS_PATH = "dialog.tcss"
    AUTO_FOCUS = "#cancel"
    BINDINGS = [
        Binding("escape", "leave", "Back"),
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("left", "app.focus_previous", "The other button", show=False),
        Binding("right", "app.focus_next", "The other button", show=False),
    ]

    def __init__(self, draft: Draft, agents: Sequence[str]) -> None:
        super().__init__()
        self.draft, self._agents = draft, agents
        self.changes = draft.changes()
        self.checked: list[Checked] = []
        self.pager = Pager("effects")
        self._status = Lines("status")

    @property
    def console_app(self) -> Console:
        return self.app  # type: ignore[return-value]

    def compose(self) -> ComposeResult:
        with Vertical(id="box"):
            yield self.pager
            yield self._status
            with Horizontal(id="buttons"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button("Apply", id="apply", variant="warning", compact=True, disabled=True)

    def on_mount(self) -> None:
        self._say("asking every agent what it would do", "dim")
        self.call_after_refresh(self._draw)
        self.run_worker(self._ask(), exclusive=True)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def action_move(self, down: int) -> None:
        self.pager.move(down)

    def action_leave(self) -> None:
        """Leaves, unless the change is on its way: half of the agents would have it then."""
        if not self.under_way:
            self.dismiss(None)

    def warn(self, text: str) -> None:
        self._say(text, "warn")

    def _say(self, text: str, role: Role) -> None:
        self._status.paint([((f" {text}", role),)])

    async def _ask(self) -> None:
        operator = self.console_app.operator
        if operator is None:
            self._say("this is a recording", "bad")
            return
        self.checked = await operator.check(self._agents, self.changes)
        gone = absent(self.checked)
        against = [one for one in self.checked if not one.ready and one not in gone]
        self._draw()
        if against:
            self._say(f"{against[0].peer} would not take it: nothing can be applied", "bad")
            return
        effects = [effect for one in self.checked if one.check for effect in one.check.effects]
        n_bytes, prefixes = evictions(effects)
        text = (
            f"would evict {format_size(n_bytes)}, {counted(prefixes, 'prefix', 'prefixes')} now"
            if n_bytes
            else "evicts nothing now"
        )
        if gone:
            text += f"; {counted(len(gone), 'agent')} not reached"
        self._say(text, "warn" if n_bytes or gone else "strong")
        self.query_one("#apply", Button).disabled = False

    def _draw(self) -> None:
        glyphs = self.console_app.glyphs
        width = max(40, self.pager.size.width)
        head, keys = " CHANGE of the configuration", "   tab and enter: do it; esc leaves"
        lines: list[Line] = [(left(head, len(head), "head", glyphs), left(keys, width - len(head), "dim", glyphs))]
        for text in self.draft.diff()[2:]:
            role: Role = "ok" if text.startswith("+") else "bad" if text.startswith("-") else "dim"
            if not text.startswith("@@"):
                lines.append((left(f"  {text.expandtabs(4)}", width, role, glyphs),))
        lines.append(())
        lines.append((left(" EFFECTS at each agent", width, "head", glyphs),))
        names = self._names()
        for one in self.checked:
            lines += self._effects(names.get(one.peer, one.peer), one, width)
        self.pager.styles.height = min(len(lines), max(4, self.app.size.height - 8))
        self.pager.show(lines)

    def _names(self) -> dict[str, str]:
        return {node.target: node.name for node in self.console_app.feed.view().nodes}

    def _effects(self, name: str, one: Checked, width: int) -> list[Line]:
        glyphs = self.console_app.glyphs
        head = left(f"  {fit(name, 13, glyphs.ellipsis)}", 16, "strong", glyphs)
        rest = width - 16
        if one.check is None:
            role: Role = "warn" if absent([one]) else "bad"
            return [(head, left(str(one.error).removeprefix(f"{one.peer}: "), rest, role, glyphs))]
        texts: list[tuple[str, Role]] = [(str(fault), "bad") for fault in one.check.faults]
        for effect in one.check.effects:
            if effect.effect != "not_used":
                texts.append(effect_text(effect))
            if effect.unsaved:
                texts.append((f"{'' if effect.never else 'only until its restart: '}{effect.unsaved}", "warn"))
        if not texts:
            texts = [("does not use what is changed", "dim")]
        indent = left("", 16, "text", glyphs)
        lines: list[Line] = []
        for text, shade in texts:
            for row in wrap(text, rest, EFFECT_LINES, glyphs.ellipsis):
                lines.append((indent if lines else head, left(row, rest, shade, glyphs)))
        return lines

    # --- doing -----------------------------------------------------------------------------------

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "cancel":
            self.action_leave()
        elif not self.under_way:
            self.under_way = True
            self._say("applying; if an agent refuses it is taken back everywhere", "warn")
            self.run_worker(self._apply(), exclusive=True)

    async def _apply(self) -> None:
        operator = self.console_app.operator
        if operator is None:
            return
        try:
            self.draft.write()
        except ConfigError as error:
            self.dismiss(Outcome(str(error).splitlines()[0], "bad"))
            return
        done = await operator.apply(self.checked, self.changes)
        if all(one.in_force for one in done):
            self.console_app.take_over(self.changes)
            kept = not any(effect.unsaved for one in done if one.applied for effect in one.applied.effects)
            self.dismiss(Outcome(self._acknowledged(done), "strong" if kept and not absent(self.checked) else "warn"))
            return
        restored = self.draft.take_back()
        names = self._names()
        refused = next((one for one in done if one.error), None)
        said = str(refused.error).removeprefix(f"{refused.peer}: ") if refused else "somebody refused"
        why = f"{names.get(refused.peer, refused.peer)}: {said}" if refused else said
        stuck = [names.get(one.peer, one.peer) for one in done if one.in_force]
        text = (
            f"taken back everywhere: {clean(why)}"
            if not stuck
            else f"NOT taken back at {', '.join(stuck)}: {clean(why)}"
        )
        self.dismiss(Outcome(text + ("" if restored else "; the file was changed by somebody else"), "bad"))

    def _acknowledged(self, done: Sequence[Acknowledged]) -> str:
        effects = [effect for one in done if one.applied for effect in one.applied.effects]
        live = sum(effect.effect == "live" for effect in effects)
        later = sum(effect.effect == "restart" and not effect.never for effect in effects)
        text = f"{counted(len(done), 'agent')} acknowledged: {live} at once"
        text += f", {later} after a restart" if later else ""
        gone = absent(self.checked)
        text += f"; not reached: {', '.join(one.peer for one in gone)}" if gone else ""
        names = self._names()
        unsaved = [
            (names.get(one.peer, one.peer), effect)
            for one in done
            for effect in (one.applied.effects if one.applied else ())
            if effect.unsaved
        ]
        for name, effect in unsaved[:1]:
            more = f" and {len(unsaved) - 1} more" if len(unsaved) > 1 else ""
            text += (
                f"; {clean(name)}{more}: {'not in force' if effect.never else 'until its restart'}, {effect.unsaved}"
            )
        return text + ("" if unsaved else "; written to every file")


def effect_text(effect: ConfigEffect) -> tuple[str, Role]:
    """One effect in a line, and its role."""
    from tierkv.config.edit import shown

    name = effect.key
    if effect.effect == "unchanged":
        return f"{name} is that already", "dim"
    change = f"{name} {shown(effect.key, effect.before)} -> {shown(effect.key, effect.after)}"
    note = f": {effect.note}" if effect.note else ""
    if effect.never:
        return f"{change}, not in force{note}", "bad"
    if effect.effect == "restart":
        return f"{change}, after a restart{note}", "wait"
    return f"{change}, at once{note}", "warn" if effect.evict_bytes else "ok"
