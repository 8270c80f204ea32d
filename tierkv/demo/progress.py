"""What the demonstration is doing, on stderr: lines that stay, and on a terminal one that moves."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text

# Off a terminal a step is only worth a line when nothing else was said for a while.
_SILENCE_S = 2.0


class PipeConsole(Console):
    """A console that leaves it to the command line what a closed pipe means; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Progress:
    """``say`` writes a line, ``step`` shows what is going on until the next one. ``hidden`` while a console is open."""

    def __init__(self) -> None:
        self._console = PipeConsole(file=sys.stderr, highlight=False, soft_wrap=True)
        self._status = Status("", console=self._console) if self._console.is_terminal else None
        self._began = self._spoken = time.monotonic()
        self._hidden = False

    def __enter__(self) -> Progress:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if self._status:
            self._status.stop()

    def say(self, line: str) -> None:
        if not self._hidden:
            self._write(line)

    def step(self, line: str) -> None:
        if self._hidden:
            return
        if self._status:
            self._status.update(Text(line))
        elif time.monotonic() - self._spoken >= _SILENCE_S:
            self._write(line)

    def hide(self) -> None:
        self._hidden = True
        if self._status:
            self._status.stop()

    def show(self) -> None:
        self._hidden = False
        if self._status:
            self._status.start()

    def _write(self, line: str) -> None:
        self._spoken = time.monotonic()
        minutes, seconds = divmod(int(self._spoken - self._began), 60)
        self._console.print(Text.assemble((f"{minutes:2d}:{seconds:02d}  ", "dim"), line))
