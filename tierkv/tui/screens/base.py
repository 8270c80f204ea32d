"""What every screen of the console shares: it is shown a view, and knows the app's glyphs and palette."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.screen import Screen

from tierkv.tui.model import ClusterView
from tierkv.tui.theme import Role
from tierkv.tui.widgets.lines import Lines, Span
from tierkv.tui.widgets.words import Words

if TYPE_CHECKING:
    from tierkv.tui.app import Console

NEWS_S = 8.0
NO_NEWS: Span = ("", "text")


class ViewScreen(Screen[None]):
    """A screen that draws a ClusterView; ``show`` is called at most ``refresh_hz`` times a second."""

    news: Span = NO_NEWS

    @property
    def console_app(self) -> Console:
        return self.app  # type: ignore[return-value]

    def tell(self, text: str, role: Role = "strong") -> None:
        """``text`` stands in the last line for a while."""
        self.news = (text, role)
        self.paint_keys()

        def over() -> None:
            if self.news == (text, role):
                self.news = NO_NEWS
                self.paint_keys()

        self.set_timer(NEWS_S, over)

    def paint_keys(self) -> None:
        """The last line, which is of keys or of news, is what it should be."""
        raise NotImplementedError(f"{type(self).__name__}.paint_keys")

    def show(self, view: ClusterView) -> None:
        """``view`` is on the screen with the next update."""
        raise NotImplementedError(f"{type(self).__name__}.show")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002 - Textual's
        """What would change something is dimmed while nothing may be changed."""
        return self.console_app.may(action)

    def words(self) -> tuple[Words, ...]:
        """What the help says of the columns."""
        return ()

    def forget_styles(self) -> None:
        for lines in self.query(Lines):
            lines.forget_styles()


class Deed:
    """A dialog that changes agents. ``under_way``: it has begun, and is half done until they have answered."""

    under_way = False

    def warn(self, text: str) -> None:
        """``text`` stands in the dialog."""
        raise NotImplementedError(f"{type(self).__name__}.warn")
