"""Textual's palette of commands, in the glyphs that the terminal has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual.command import CommandPalette, Provider, SearchIcon

if TYPE_CHECKING:
    from tierkv.tui.app import Console


class Palette(CommandPalette):
    """Every action of the screen below. A terminal of ASCII gets no frames and no scroll bar."""

    DEFAULT_CSS = """
    Palette.-ascii #--input, Palette.-ascii LoadingIndicator {
        border: none;
    }
    Palette.-ascii CommandList {
        border: none;
        scrollbar-size: 0 0;
    }
    """

    def __init__(
        self, providers: Sequence[type[Provider]] | None = None, placeholder: str = "an action, or a part of its name"
    ) -> None:
        super().__init__(providers, placeholder=placeholder, id="--command-palette")

    def on_mount(self) -> None:
        console: Console = self.app  # type: ignore[assignment]
        self.set_class(console.glyphs.ascii, "-ascii")
        self.query_one(SearchIcon).icon = ":"
