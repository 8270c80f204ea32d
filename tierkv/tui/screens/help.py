"""The keys of the screen below, made from its bindings, and the words over its columns, made from the columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen

from tierkv.tui.widgets.keys import Key, help_lines
from tierkv.tui.widgets.lines import Lines, left
from tierkv.tui.widgets.table import Pager
from tierkv.tui.widgets.words import Words, word_lines

if TYPE_CHECKING:
    from tierkv.tui.app import Console

WIDTH, NARROW = 48, 36
FRAME = 5
"""Lines of the dialog and of the screen around it that hold no key: padding, margin, heading."""


class Help(ModalScreen[None]):
    """``keys`` were collected from the screen that asked. Where they do not fit they scroll."""

    CSS_PATH = "help.tcss"
    BINDINGS = [
        Binding("escape,question_mark,q,enter", "dismiss", "Close", show=False),
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "move(-8)", "Page up", show=False),
        Binding("pagedown,space", "move(8)", "Page down", show=False),
        Binding("home,g", "move(-1000000)", "First", show=False),
        Binding("end,G", "move(1000000)", "Last", show=False),
    ]

    def __init__(self, keys: Sequence[Key], words: Sequence[Words] = ()) -> None:
        super().__init__()
        self._keys, self._words = keys, words
        self._head = Lines("help-head")
        self._pager = Pager("help")

    def compose(self) -> ComposeResult:
        with Vertical(id="box"):
            yield self._head
            yield self._pager

    def on_mount(self) -> None:
        self._lay_out()

    def on_resize(self) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        console: Console = self.app  # type: ignore[assignment]
        room = max(1, self.app.size.height - FRAME)
        wanted = max(2 if self._words else 1, -(-len(self._keys) // room))
        across = max(1, min((self.app.size.width - 6) // NARROW, wanted))
        width = WIDTH if across == 1 else NARROW
        lines = help_lines(self._keys, width, console.glyphs, across)
        lines += word_lines(self._words, width * across, console.glyphs)
        self.query_one("#box").styles.width = width * across + 4
        self._head.styles.width = self._pager.styles.width = width * across
        self._pager.styles.height = min(room, len(lines))
        self._pager.show(lines)
        below = "up, down: more keys, then the columns" if self._words else "up and down show the others"
        more = f"   {below}" if len(lines) > room else ""
        self._head.paint(
            [(left(" KEYS", 5, "head", console.glyphs), left(more, width * across - 5, "dim", console.glyphs))]
        )

    def action_move(self, down: int) -> None:
        self._pager.move(down)

    def forget_styles(self) -> None:
        for lines in self.query(Lines):
            lines.forget_styles()
