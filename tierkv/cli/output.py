"""stdout is data, stderr is everything else. Text from the network never reaches a terminal uncleaned."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, TextIO, cast


def say(text: str = "") -> None:
    """Data, on stdout."""
    print(text)


def warn(text: str) -> None:
    """Everything that is not data, on stderr, after what stdout already holds."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def document(command: str, **fields: Any) -> None:
    """One JSON document on stdout: ``{"schema": "tierkv.<command>/1", ...}``."""
    print(json.dumps({"schema": f"tierkv.{command}/1", **fields}, indent=2, ensure_ascii=False, allow_nan=False))


def line(command: str, **fields: Any) -> None:
    """One line of NDJSON, flushed at once."""
    print(json.dumps({"schema": f"tierkv.{command}/1", **fields}, ensure_ascii=False, allow_nan=False), flush=True)


def clean(text: str, most: int = 200) -> str:
    """Text of another process for a terminal: no control characters, bounded."""
    cut = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(char if char.isprintable() else "?" for char in cut)


def width() -> int:
    return max(40, shutil.get_terminal_size((80, 24)).columns)


class Style:
    """Colours on a terminal without NO_COLOR, nothing elsewhere. State is never told by colour alone."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or cast("TextIO", sys.stdout)
        self._on = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._on else text

    def bold(self, text: str) -> str:
        return self._wrap("1", text)

    def dim(self, text: str) -> str:
        return self._wrap("2", text)

    def good(self, text: str) -> str:
        return self._wrap("32", text)

    def bad(self, text: str) -> str:
        return self._wrap("31", text)

    def notable(self, text: str) -> str:
        return self._wrap("33", text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Lines of a table: columns as wide as their longest cell, two blanks between; ``right`` are right-aligned."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines: list[str] = []
    for row in [header, *rows]:
        cells = [
            cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])
            for column, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def plural(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
