"""Reading a TOML file with the line of every key; whatever is wrong with the file itself is a ConfigError."""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from tierkv.errors import ConfigError

LIMIT_BYTES = 1 << 20

KeyPath = tuple[str | int, ...]

_AT = re.compile(r"\(at line (\d+), column (\d+)\)")
# More decimal digits than Python reads as one number.
_HUGE = re.compile(r"\d(?:_?\d){4299,}")
_PLAIN = {"Cannot overwrite a value": "a key is given twice"}
_DEEPEST = 16
_BARE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its text without a byte-order mark, its values, and the line of each key and table (from 1)."""

    path: Path
    text: str
    values: dict[str, object]
    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])

    def line_of(self, path: KeyPath) -> int:
        """The line of the key, else of the nearest table around it, else 0."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return 0


def read(path: Path) -> Source:
    """The parsed file. Raises ConfigError that says what is wrong and where, never anything else."""
    return parse(decode(path, read_bytes(path)), path)


def read_bytes(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError(f"{path} is a directory; name the file, for example {path / 'tierkv.toml'}")
        if stat.S_ISFIFO(mode):  # opening a pipe that nobody writes to would wait for ever
            raise ConfigError(f"{path} is a pipe, not a regular file")
        with path.open("rb") as file:
            data = file.read(LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    if len(data) > LIMIT_BYTES:
        raise ConfigError(f"{path} is larger than 1 MiB; that is not a tierkv.toml")
    return data


def decode(path: Path, data: bytes) -> str:
    if data.startswith(_UTF16):
        raise ConfigError(f"{path} is UTF-16; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}: line {line}: not UTF-8 (byte 0x{data[error.start]:02x}); save it as UTF-8"
        ) from None


def parse(text: str, path: Path) -> Source:
    try:
        values = tomllib.loads(text)
        deep = _is_deep(values)
    except RecursionError:
        deep = True
    except ValueError as error:
        raise ConfigError(f"{path}: {_syntax_message(str(error), text)}") from None
    if deep:
        raise ConfigError(f"{path}: nested too deeply")
    return Source(path, text, values, _key_lines(text))


def _is_deep(values: dict[str, object]) -> bool:
    """Whether something lies deeper than any key of ours could, level by level, without recursion."""
    level: list[object] = [values]
    for _ in range(_DEEPEST):
        level = [
            inner
            for node in level
            for inner in (node.values() if isinstance(node, dict) else cast("list[object]", node))
            if isinstance(inner, dict | list)
        ]
    return bool(level)


def _syntax_message(message: str, text: str) -> str:
    match = _AT.search(message)
    if match is None and (number := _HUGE.search(text)):
        digits = sum(char.isdigit() for char in number[0])
        return f"line {text.count(chr(10), 0, number.start()) + 1}: a number of {digits:,} digits; no key takes one"
    if match is None:
        return _PLAIN.get(message.partition(" (at ")[0], message.partition(";")[0])
    line, column = int(match[1]), int(match[2])
    shown = text.splitlines()[line - 1 : line]
    problem = _AT.sub("", message).strip()
    problem = _PLAIN.get(problem, problem)
    lines = [f"line {line}, column {column}: {problem}"]
    if shown and shown[0].isprintable() and len(shown[0]) <= 200:
        lines += [f"    {shown[0]}", "    " + " " * (column - 1) + "^"]
        value = shown[0].partition("=")[2].strip()
        if problem == "Invalid value" and re.match(r"[A-Za-z0-9./~_-]+$", value):
            lines.append(f'    text needs quotes: "{value}"')
    return "\n".join(lines)


# --- where keys are: a scan of text that tomllib has already accepted -----------------------------

_PIECE = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}\n=]|[^"\'#\[\]{}\n=]+',
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Statement:
    """One header ("[" or "[[") or assignment: its key as written, its first line, where its text lies.

    ``start`` is where its line begins, ``end`` is before the line break that ends it; ``value_start`` and
    ``value_end`` enclose the value alone, without blanks and a trailing comment.
    """

    header: str
    key: str
    line: int
    start: int
    end: int
    value_start: int
    value_end: int


def statements(text: str) -> Iterator[Statement]:
    """Headers and assignments of a valid document, in order."""
    line, first, begin, depth, written = 1, 1, 0, 0, ""
    value_start = value_end = 0
    for match in _PIECE.finditer(text + "\n"):
        piece = match.group()
        if not value_start and not written and (piece.isspace() or piece.startswith("#")):
            begin, first = (match.end(), line + 1) if piece == "\n" else (begin, first)
        elif piece == "\n" and depth == 0:
            header = "" if value_start else "[[" if written.strip().startswith("[[") else "["
            name = written.strip().strip("[]").strip() if header else written.strip()
            yield Statement(header, name, first, begin, match.start(), value_start, value_end)
            begin, first, written, value_start = match.end(), line + 1, "", 0
        elif value_start:
            depth += (piece in "[{") - (piece in "]}")
            if not piece.isspace() and not piece.startswith("#"):
                value_end = match.start() + len(piece.rstrip())
        elif piece == "=":
            value_start = value_end = match.end()
        elif not piece.startswith("#"):
            written += piece
        line += piece.count("\n")


def dotted(name: str) -> tuple[str, ...]:
    """The parts of a key as written: ``a."b.c".d`` has three."""
    if _BARE.fullmatch(name):
        return tuple(name.split("."))
    parts: list[str] = []
    table: object = tomllib.loads(f"{name} = 0")
    while isinstance(table, dict):
        part, table = next(iter(table.items()))  # pyright: ignore[reportUnknownVariableType]
        parts.append(str(part))
    return tuple(parts)


def located(text: str) -> Iterator[tuple[Statement, KeyPath]]:
    """Every statement with the path of the table or key that it defines; entries of arrays of tables by index."""
    arrays: dict[KeyPath, int] = {}
    prefix: KeyPath = ()
    for statement in statements(text):
        if not statement.header:
            yield statement, (*prefix, *dotted(statement.key))
            continue
        prefix = _indexed(dotted(statement.key), arrays)
        if statement.header == "[[":
            arrays[prefix] = arrays.get(prefix, -1) + 1
            prefix = (*prefix, arrays[prefix])
        yield statement, prefix


def _key_lines(text: str) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}
    for statement, path in located(text):
        for end in range(1, min(len(path), _DEEPEST) + 1):
            lines.setdefault(path[:end], statement.line)
    return lines


def _indexed(parts: tuple[str, ...], arrays: dict[KeyPath, int]) -> KeyPath:
    """The path with the index of the current entry after every array of tables on the way."""
    path: KeyPath = ()
    for number, part in enumerate(parts):
        path = (*path, part)
        if path in arrays and number < len(parts) - 1:
            path = (*path, arrays[path])
    return path
