"""The console's application: a feed, a clock that asks it for a view, and screens that draw views."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.style import Style
from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.screen import ModalScreen, Screen
from textual.theme import ThemeProvider
from textual.timer import Timer

from tierkv.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError
from tierkv.telemetry.recording import BadRecording, Recorder, Step, read_recording
from tierkv.tui.feed import EVENTS_KEPT, Feed, LiveFeed, Target
from tierkv.tui.incident import Incident, config_values, header
from tierkv.tui.model import ClusterView
from tierkv.tui.operate import Operator, Purged, Selection, holders_of
from tierkv.tui.replay import ReplayFeed
from tierkv.tui.screens.base import Deed, ViewScreen
from tierkv.tui.screens.config import ConfigView
from tierkv.tui.screens.events import Events
from tierkv.tui.screens.help import Help
from tierkv.tui.screens.nodes import Nodes
from tierkv.tui.screens.overview import Overview
from tierkv.tui.screens.palette import Palette
from tierkv.tui.screens.prefixes import Prefixes
from tierkv.tui.screens.purge import Purge, told
from tierkv.tui.screens.requests import Explained, Requests
from tierkv.tui.screens.work import as_json
from tierkv.tui.text import clean, counted
from tierkv.tui.theme import DARK, LIGHT, THEMES, Glyphs, Role, glyphs_for, palette
from tierkv.tui.widgets.keys import Key, keys_of
from tierkv.units import rfc3339

if TYPE_CHECKING:
    from tierkv.rpc.auth import Token

REFRESH_HZ_MAX = 4.0
OWN_KEYS = ("cluster.name", "console.theme", "console.refresh_hz", "console.read_only")
"""Keys that the console itself takes over when a change is applied."""

CHANGING = frozenset({"purge", "undo", "pin", "apply"})
"""Actions that change something at the agents: dimmed while the console is read-only."""

DEFAULT_TARGETS = ("127.0.0.1:50050", "127.0.0.1:50051", "127.0.0.1:50052")
"""Inference agent, KV vault, SSM vault on this machine."""


class Console(App[int]):
    """Shows ``feed.view()`` at most ``refresh_hz`` (up to 4) times a second, however fast the feed is."""

    TITLE = "TierKV"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar = [
        Binding("1", "view('overview')", "Views", key_display="1-5"),
        Binding("2", "view('nodes')", "Nodes", show=False),
        Binding("3", "view('prefixes')", "Prefixes", show=False),
        Binding("4", "view('events')", "Events", show=False),
        Binding("5", "view('config')", "Configuration", show=False),
        Binding("x", "purge", "Purge", show=False),
        Binding("u", "undo", "Undo purge", show=False),
        Binding("i", "requests", "Explain requests", show=False),
        Binding("b", "bundle", "Incident bundle", show=False),
        Binding("left_square_bracket", "seek(-10)", "Back 10 s", key_display="["),
        Binding("right_square_bracket", "seek(10)", "On 10 s", key_display="]"),
        Binding("left_curly_bracket", "seek(-60)", "Back 1 min", key_display="{", show=False),
        Binding("right_curly_bracket", "seek(60)", "On 1 min", key_display="}", show=False),
        Binding("plus", "faster(1)", "Faster", key_display="+", show=False),
        Binding("minus", "faster(-1)", "Slower, then still", key_display="-", show=False),
        Binding("q", "leave", "Quit"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("colon", "command_palette", "Palette", key_display=":"),
        Binding("ctrl+p", "command_palette", "Palette", show=False),
        Binding("ctrl+c", "interrupt", "Quit at once", show=False, priority=True),
    ]

    def __init__(
        self,
        feed: Feed,
        *,
        refresh_hz: float = REFRESH_HZ_MAX,
        theme: str = "auto",
        glyphs: Glyphs | None = None,
        operator: Operator | None = None,
        config_path: Path | None = None,
        incident: Incident | None = None,
        recorded: Mapping[str, object] | None = None,
    ) -> None:
        # Without colour nothing but attributes may reach the terminal; Textual alone would turn colours into greys.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.feed = feed
        self.operator = operator
        self._config_path = config_path
        self._incident = incident
        self._warned_of: Deed | None = None
        self._recorded = recorded
        self.last_purge: list[Purged] = []
        self._view = ClusterView()
        self.glyphs = glyphs or glyphs_for()
        self.repaints = 0
        self._period_s = period_s(refresh_hz)
        self._clock: Timer | None = None
        self._styles: dict[str, Mapping[Role, Style]] = {}
        for ours in (DARK, LIGHT):
            self.register_theme(ours)
        self.theme = theme_named(theme, self.available_themes)

    @property
    def palette(self) -> Mapping[Role, Style]:
        """Styles of the theme in force."""
        styles = self._styles.get(self.theme)
        if styles is None:
            styles = self._styles[self.theme] = palette(self.theme_variables)
        return styles

    def on_mount(self) -> None:
        for name, screen in (
            ("overview", Overview()),
            ("nodes", Nodes()),
            ("prefixes", Prefixes()),
            ("events", Events()),
            ("config", ConfigView(self._config_path, self._recorded)),
        ):
            self.install_screen(screen, name)
        self.push_screen("overview")
        self.theme_changed_signal.subscribe(self, lambda _theme: self._forget_styles())
        self.run_worker(self.feed.run(), name="feed", exit_on_error=True)
        self._clock = self.set_interval(self._period_s, self.tick)
        self.call_after_refresh(self.tick)
        if isinstance(self.feed, ReplayFeed) and self.feed.missing:
            self.call_after_refresh(self._tell_damaged, self.feed.missing)

    def _tell_damaged(self, missing: str) -> None:
        if isinstance(self.screen, ViewScreen):
            self.screen.tell(f"the recording is damaged: {missing}", "bad")

    @property
    def view(self) -> ClusterView:
        """What was shown last."""
        return self._view

    def tick(self) -> None:
        self.show(self.feed.view())

    def show(self, view: ClusterView) -> None:
        """Every open screen that draws views draws this one."""
        self.repaints += 1
        if view.read_only != self._view.read_only:
            self._view = view
            self.screen.refresh_bindings()
        self._view = view
        for screen in self.screen_stack:
            if isinstance(screen, ViewScreen):
                screen.show(view)

    def _forget_styles(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, ViewScreen | Help):
                screen.forget_styles()

    def take_over(self, changes: Mapping[str, object]) -> None:
        """What of an applied change is the console's own is in force."""
        if "console.theme" in changes:
            self.theme = theme_named(str(changes["console.theme"]) or "auto", self.available_themes)
        if isinstance(hz := changes.get("console.refresh_hz"), int) and self._clock is not None:
            self._clock.stop()
            self._period_s = period_s(hz)
            self._clock = self.set_interval(self._period_s, self.tick)
        if isinstance(self.feed, LiveFeed):
            self.feed.read_only = self.feed.read_only or bool(changes.get("console.read_only"))
            self.feed.cluster_name = str(changes.get("cluster.name", self.feed.cluster_name))

    def action_leave(self) -> None:
        if self._lets_go():
            self.exit(EXIT_OK)

    def _lets_go(self) -> bool:
        """False, once, while agents are being changed: leaving now would leave that half done."""
        busy = [each for each in self.screen_stack if isinstance(each, Deed) and each.under_way]
        if not busy or busy[0] is self._warned_of:
            return True
        self._warned_of = busy[0]
        busy[0].warn("agents are being changed; once more leaves that half done")
        return False

    # --- views and what is done in any of them -----------------------------------------------------

    def action_view(self, name: str) -> None:
        """The view is on the screen; whatever was drilled into or asked is closed."""
        while len(self.screen_stack) > 2:
            self.pop_screen()
        if self.screen is not self.get_screen(name):
            self.switch_screen(name)
        self.call_after_refresh(self.tick)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002 - Textual's
        """None, which dims it, for what would change something while nothing may be changed."""
        return self.may(action)

    def may(self, action: str) -> bool | None:
        if action in CHANGING and (self.operator is None or self._view.read_only):
            return None
        if action in ("seek", "faster"):
            return isinstance(self.feed, ReplayFeed)
        if action == "requests":
            return self.operator is not None
        if action == "bundle":
            return self._incident is not None
        return not (action == "undo" and not self.last_purge)

    def action_seek(self, by_s: int) -> None:
        if isinstance(self.feed, ReplayFeed):
            self.feed.seek(by_s)
            self.tick()

    def action_faster(self, up: int) -> None:
        if isinstance(self.feed, ReplayFeed):
            self.feed.faster(up)
            self.tick()

    def action_bundle(self) -> None:
        """The last minutes are in one file in the working directory, for ``tierkv tui --replay``."""
        if self._incident is None:
            return
        path = Path(f"tierkv-incident-{time.strftime('%Y%m%d-%H%M%S')}.ndjson.gz")
        try:
            targets = [node.target for node in self._view.nodes]
            count = self._incident.write(path, self._view.name, config_values(self._config_path), targets)
        except OSError as error:
            self.say(f"{path}: {error.strerror}", "bad")
        else:
            self.say(f"{path}: {count:,} steps, for --replay")

    def action_requests(self) -> None:
        """The last requests of the engines lie over the present view."""
        if not isinstance(self.screen, ModalScreen | Requests | Explained):
            self.push_screen(Requests())
            self.tick()

    def action_purge(self) -> None:
        if isinstance(self.screen, ModalScreen):
            return
        offer: Callable[[], list[Selection]] = getattr(self.screen, "purgeable", list)
        self.push_screen(Purge(self._view, holders_of(self._view), offer()), self._purged)

    def _purged(self, purged: list[Purged] | None) -> None:
        if not purged:
            return
        self.last_purge = [one for one in purged if one.undo_token] or self.last_purge
        self.say(*told(purged))
        self.screen.refresh_bindings()
        self._look_again()

    def action_undo(self) -> None:
        operator, last = self.operator, self.last_purge
        if operator is None or not last:
            return
        self.last_purge = []

        async def undo() -> None:
            done = await operator.undo(last)
            failed = [one for one in done if one.error]
            back = sum(one.records for one in done)
            if failed:
                self.say(clean(f"{failed[0].holder.name}: {failed[0].error}"), "bad")
            else:
                self.say(f"{counted(back, 'record')} brought back")
            self._look_again()

        self.run_worker(undo(), group="undo")

    def _look_again(self) -> None:
        refresh = getattr(self.screen, "action_refresh", None)
        if refresh is not None:
            refresh()

    def say(self, text: str, role: str = "strong") -> None:
        """``text`` stands in the last line of the screen for a while."""
        tell = getattr(self.screen, "tell", None)
        if tell is not None and text:
            tell(text, role)

    def export(self, name: str, value: object, tell: Callable[[str, Role], None]) -> None:
        """``value`` is in a JSON file in the working directory; ``tell`` says where."""
        path = Path(f"tierkv-{name}-{time.strftime('%Y%m%d-%H%M%S')}.json")
        document = {"schema": f"tierkv.{name}-view/1", "time": rfc3339(self._view.now_unix_s), "view": value}
        try:
            path.write_text(as_json(document) + "\n", encoding="utf-8")
        except OSError as error:
            tell(f"{path}: {error.strerror}", "bad")
        else:
            tell(f"written to {path.absolute()}", "strong")

    def action_interrupt(self) -> None:
        if self._lets_go():
            self.exit(EXIT_INTERRUPTED)

    def action_command_palette(self) -> None:
        if not isinstance(self.screen, Palette):
            self.push_screen(Palette())

    def search_themes(self) -> None:
        self.push_screen(Palette([ThemeProvider], "a theme, or a part of its name"))

    def action_help(self) -> None:
        keys = keys_of(self, self.screen.active_bindings.values(), self.glyphs)
        screen = self.screen
        self.push_screen(Help(keys, screen.words() if isinstance(screen, ViewScreen) else ()))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Every action of the screen, then Textual's own that make sense here."""
        for key in keys_of(self, screen.active_bindings.values(), self.glyphs):
            if key.enabled and key.action not in ("command_palette", "back"):
                yield SystemCommand(key.description, f"key {key.keys}", self._doing(key))
        yield SystemCommand("Theme", "Change the colours", self.action_change_theme)
        yield SystemCommand("Save a picture", "Write this screen to an SVG file", lambda: self.deliver_screenshot())

    def _doing(self, key: Key) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            await self.run_action(key.action, key.node)

        return run


def period_s(refresh_hz: float) -> float:
    """Between two repaints, of which there are at most ``REFRESH_HZ_MAX`` a second."""
    return 1.0 / min(REFRESH_HZ_MAX, max(0.1, refresh_hz))


def theme_named(name: str, known: Mapping[str, object], environment: Mapping[str, str] | None = None) -> str:
    """A theme that exists: "dark", "light", any of Textual's, or for "auto" what the terminal says of itself."""
    if name in THEMES:
        return THEMES[name].name
    if name in known:
        return name
    env = os.environ if environment is None else environment
    behind = env.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT.name if behind in ("7", "15") else DARK.name


def targets_of(addresses: Sequence[str]) -> list[Target]:
    """The addresses to listen to; without any, this machine's default ports, whose absence is no fault."""
    return [Target(one) for one in addresses] or [Target(one, expected=False) for one in DEFAULT_TARGETS]


def run(
    targets: Sequence[str] = (),
    token: Token | Callable[[], Token | None] | None = None,
    cluster_name: str = "",
    read_only: bool = False,
    *,
    refresh_hz: float = REFRESH_HZ_MAX,
    theme: str = "auto",
    events_kept: int = EVENTS_KEPT,
    config_path: Path | None = None,
    record: Path | None = None,
    replay: Path | None = None,
) -> int:
    """The console has been opened on ``targets`` ("host:port") and closed again; the exit code.

    Without targets it listens to this machine's default ports. ``record``: everything heard goes into that file;
    ``replay``: that file is shown instead of agents. Needs a terminal; raises UsageError without one.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "tierkv tui needs a terminal; for scripts there are 'tierkv status --json' and 'tierkv events'"
        )
    if not sys.stderr.isatty():
        raise UsageError("tierkv tui draws on standard error: that must be the terminal, too, and not a file")
    if replay is not None:
        missing: list[str] = []
        try:
            told = read_recording(replay, missing.append)
        except OSError as error:
            raise UsageError(f"--replay {replay}: {error.strerror or error}") from None
        except BadRecording as error:
            raise UsageError(f"--replay {error}") from None
        feed = ReplayFeed(*told, missing="; ".join(dict.fromkeys(missing)))
        code = Console(feed, refresh_hz=refresh_hz, theme=theme, recorded=feed.header.config).run()
        return EXIT_FAILED if code is None else code
    from tierkv.tui.live import live_feed
    from tierkv.tui.live_operator import LiveOperator

    incident, recorder = Incident(), None
    if record is not None:
        try:
            listed = [target.address for target in targets_of(targets)]
            recorder = Recorder(record, header(cluster_name, config_values(config_path), listed))
        except OSError as error:
            raise UsageError(f"--record {record}: {error.strerror}") from None

    def tap(step: Step) -> None:
        incident.add(step)
        if recorder is not None:
            recorder.add(step)

    feed = live_feed(
        targets_of(targets), token, cluster_name=cluster_name, read_only=read_only, events_kept=events_kept, tap=tap
    )
    operator = LiveOperator(lambda: token() if callable(token) else token)
    app = Console(
        feed, refresh_hz=refresh_hz, theme=theme, operator=operator, config_path=config_path, incident=incident
    )
    try:
        code = app.run()
    finally:
        if recorder is not None:
            recorder.close()
    return EXIT_FAILED if code is None else code
