"""An agent's own tierkv.toml, as far as the agent changes it: what it accepted is still so after its restart."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierkv.config.atomic import locked, replace, replace_keeping
from tierkv.config.edit import resolve_key, set_value, without_lone_index
from tierkv.config.load import Loaded
from tierkv.config.rows import rows
from tierkv.config.running import Base, problem_of
from tierkv.config.source import decode, parse, read_bytes
from tierkv.errors import ConfigError

_BOM = b"\xef\xbb\xbf"

NO_FILE = "it has no configuration file"


@dataclass(frozen=True, slots=True)
class Saved:
    """What a change made of the file: ``before`` and ``after`` are equal where the file says everything already.

    ``unsaved``: key -> why the agent will not have that value after its restart.
    """

    before: str = ""
    after: str = ""
    unsaved: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def changes(self) -> bool:
        return self.before != self.after


class OwnFile:
    """The file that ``base`` names. Nothing here raises for a file that cannot be changed: the answer says why."""

    def __init__(self, base: Base) -> None:
        self._base = base

    @property
    def path(self) -> Path | None:
        return self._base.path

    def plan(self, wanted: Mapping[str, object]) -> Saved:
        """What ``save`` would do to have every key (as ``rows`` names it) at its value after a restart."""
        if self._base.path is None:
            return Saved(unsaved=dict.fromkeys(wanted, NO_FILE))
        try:
            text = decode(self._base.path, read_bytes(self._base.path))
            now = self._values(text)
        except ConfigError as error:
            return Saved(unsaved=dict.fromkeys(wanted, f"its file is faulty: {problem_of(error)}"))
        before, unsaved = text, dict[str, str]()
        writable = _why_not_writable(self._base.path)
        for key, value in wanted.items():
            if now.get(key) == value:
                continue
            text, problem = (text, writable) if writable else self._with(text, key, value)
            if problem:
                unsaved[key] = problem
        return Saved(before, text, unsaved)

    def save(self, wanted: Mapping[str, object]) -> Saved:
        """The file says what it can say of ``wanted``; every other byte of it is as it was."""
        if self._base.path is None:
            return self.plan(wanted)
        target = _real(self._base.path)
        with locked(target):
            saved = self.plan(wanted)
            try:
                if saved.changes:
                    _write(target, saved.before, saved.after)
            except OSError as error:
                failed = f"{self._base.path} cannot be written: {error.strerror or error}"
                return Saved(saved.before, saved.before, {**dict.fromkeys(wanted, failed), **saved.unsaved})
        return saved

    def take_back(self, saved: Saved) -> bool:
        """The lines that ``save`` changed are as they were; False, and nothing is touched, where somebody else has
        changed them meanwhile or the file cannot be written."""
        if self._base.path is None or not saved.changes:
            return True
        target = _real(self._base.path)
        try:
            with locked(target):
                text = decode(target, read_bytes(target))
                restored = without_change(text, saved.before, saved.after)
                if restored is None:
                    return False
                replace(target, _encoded(target, restored), like=target)
        except (OSError, ConfigError):
            return False
        return True

    def _with(self, text: str, key: str, value: object) -> tuple[str, str]:
        """The text with the key, or the text and why the key would not be in force after a restart."""
        path = self._base.path
        assert path is not None
        try:
            about, location = resolve_key(key)
            if about.path.startswith("security.") or about.kind == "path":
                return text, "such a key is changed at the machine itself, by hand"
            values = parse(text, path).values
            changed = set_value(text, without_lone_index(values, location), about.spelled(value))
            source = parse(changed, path)
            loaded = self._base.check(source, {})
        except ConfigError as error:
            return text, f"its file cannot take it: {problem_of(error)}"
        if values_of(loaded).get(key) == value:
            return changed, ""
        return text, f"{loaded.origin(self._base.place(source, key))} wins at its start"

    def _values(self, text: str) -> dict[str, object]:
        assert self._base.path is not None
        return values_of(self._base.check(parse(text, self._base.path), {}))


def values_of(loaded: Loaded) -> dict[str, object]:
    return {row.path: row.value for row in rows(loaded)}


def without_change(text: str, before: str, after: str) -> str | None:
    """``text`` with every hunk that made ``after`` of ``before`` undone; None where one is not there exactly once."""
    if text == after:
        return before
    old, new, lines = (part.splitlines(keepends=True) for part in (before, after, text))
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        wanted = new[j1:j2]
        places = [at for at in range(len(lines)) if lines[at : at + len(wanted)] == wanted]
        if len(places) != 1 or not wanted:
            return None
        lines[places[0] : places[0] + len(wanted)] = old[i1:i2]
    return "".join(lines)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _why_not_writable(path: Path) -> str:
    """Replacing a file as a whole needs its folder too."""
    target = _real(path)
    may = os.access(target, os.W_OK) and os.access(target.parent, os.W_OK)
    return "" if may else f"the agent may not write {path}"


def _encoded(target: Path, text: str) -> bytes:
    return (_BOM if target.read_bytes().startswith(_BOM) else b"") + text.encode()


def _write(target: Path, before: str, after: str) -> None:
    replace_keeping(target, _encoded(target, before), _encoded(target, after))
