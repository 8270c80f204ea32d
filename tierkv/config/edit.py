"""Changing one value of tierkv.toml so that every other byte of the file stays as it is.

The new value is spliced into the text at the place of the old one. tomlkit formats the value (and rewrites inline
tables); a whole-document round trip through it is not used, because it puts a new key behind the comments of the
next table. Every edit is proved afterwards: parsed again, the document differs in that one leaf and nothing else.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tomlkit

from tierkv.config.atomic import locked, replace, replace_keeping
from tierkv.config.faults import closest, path_text
from tierkv.config.keys import Key, by_path, value_from_text
from tierkv.config.load import load_source
from tierkv.config.source import KeyPath, Statement, decode, located, parse, read_bytes
from tierkv.errors import ConfigError, ConfigFaults, Fault

_BOM = b"\xef\xbb\xbf"
_INDEX = re.compile(r"\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Edit:
    """A change that is checked and not yet written. ``before`` is None for a key that the file did not have."""

    path: Path
    key: Key
    location: str
    before: object
    after: object
    old_text: str
    new_text: str
    bom: bool = False

    @property
    def changes(self) -> bool:
        return self.old_text != self.new_text

    def diff(self) -> str:
        """A unified diff with no lines of context around it."""
        old, new = self.old_text.splitlines(), self.new_text.splitlines()
        return "\n".join(difflib.unified_diff(old, new, str(self.path), str(self.path), lineterm="", n=1))


def resolve_key(name: str) -> tuple[Key, KeyPath]:
    """The key table's entry and the path in the file for "vault.port" or "cluster.kv_cold[1].host".

    Raises ConfigFaults with a suggestion when there is no such key.
    """
    pattern = _INDEX.sub("[]", name)
    for list_name in ("cluster.kv_cold", "cluster.ssm_cold"):
        pattern = pattern.replace(f"{list_name}.", f"{list_name}[].")
    key = by_path().get(pattern)
    if key is None:
        near = closest(name, by_path()) or next((path for path in by_path() if path.endswith(f".{name}")), "")
        hint = f"did you mean {near.replace('[]', '')!r}?" if near else "see 'tierkv config schema'"
        raise ConfigFaults("the command line", (Fault(name, None, "unknown key", hint),))
    if key.kind in ("peers", "peer"):
        raise ConfigFaults("the command line", (Fault(name, None, "is a table", f"set {name}.host or {name}.port"),))
    location: list[str | int] = []
    for part in name.split("."):
        location.append(part.partition("[")[0])
        location.extend(int(index) for index in _INDEX.findall(part))
    return key, tuple(location)


def shown(name: str, value: object) -> str:
    """A value of key ``name`` for people: "4.0 GiB", "nothing"."""
    try:
        key, _ = resolve_key(name)
    except ConfigError:
        return str(value)
    return "nothing" if value is None else key.shown(value) or '""'


def plan(path: Path, name: str, text: str) -> Edit:
    """The edit that sets key ``name`` to what ``text`` says, checked, not written.

    Raises ConfigFaults when the file with that value would have faults, ConfigError when the file cannot be read or
    its layout does not allow the change.
    """
    key, location = resolve_key(name)
    data = read_bytes(path)
    old_text = decode(path, data)
    source = parse(old_text, path)
    value = value_from_text(key, text)
    location = without_lone_index(source.values, location)
    new_text = set_value(old_text, location, value)
    _prove(path, source.values, new_text, location, value)
    load_source(parse(new_text, path), environ={})
    before = _look(source.values, location)
    return Edit(path, key, path_text(location), before, value, old_text, new_text, data.startswith(_BOM))


def set_value(text: str, location: KeyPath, value: object) -> str:
    """The document with that leaf set; the line of the key changes, or one line (and a header, if needed) is added."""
    places = list(located(text))
    for statement, path in places:
        if statement.header or path != location[: len(path)]:
            continue
        if path == location:
            return _splice(text, statement, _toml(value))
        return _splice(
            text, statement, _inline(text[statement.value_start : statement.value_end], location, path, value)
        )
    return _insert(text, places, location, value)


def _toml(value: object) -> str:
    return tomlkit.item(value).as_string()


def _splice(text: str, statement: Statement, value: str) -> str:
    start = statement.value_start
    blanks = len(text[start : statement.value_end]) - len(text[start : statement.value_end].lstrip())
    return text[: start + blanks] + value + text[statement.value_end :]


def _inline(table: str, location: KeyPath, path: KeyPath, value: object) -> str:
    document = tomlkit.parse(f"v = {table.strip()}")
    node: Any = document["v"]
    for part in location[len(path) : -1]:
        node = node[part]
    node[location[-1]] = value
    return document.as_string().removeprefix("v = ")


def _insert(text: str, places: list[tuple[Statement, KeyPath]], location: KeyPath, value: object) -> str:
    """The key on a line of its own: after its commented default, else after the last key of its table, else in a new
    table at the end."""
    table, leaf = location[:-1], str(location[-1])
    newline = "\r\n" if "\r\n" in text else "\n"
    siblings = [statement for statement, path in places if not statement.header and path[:-1] == table]
    headers = [number for number, (statement, path) in enumerate(places) if statement.header and path == table]
    if headers:
        begin = places[headers[-1]][0].end
        follow = [statement.start for statement, _ in places[headers[-1] + 1 :] if statement.header]
        commented = re.compile(rf"^[ \t]*#[ \t]*{re.escape(leaf)}[ \t]*=[^\n]*$", re.MULTILINE)
        match = commented.search(text, begin, follow[0] if follow else len(text))
        after = match.end() if match else max([begin, *(statement.end for statement in siblings)])
        return _line_after(text, after, f"{leaf} = {_toml(value)}", newline)
    if siblings:
        prefix = siblings[-1].key.rpartition(".")[0]
        return _line_after(text, siblings[-1].end, f"{prefix}.{leaf} = {_toml(value)}", newline)
    name = ".".join(str(part) for part in table if not isinstance(part, int))
    gap = "" if not text else newline if text.endswith("\n") else newline * 2
    return f"{text}{gap}[{name}]{newline}{leaf} = {_toml(value)}{newline}"


def _line_after(text: str, end: int, line: str, newline: str) -> str:
    if end < len(text):
        cut = text.index("\n", end) + 1 if "\n" in text[end:] else len(text)
        if text[cut - 1] == "\n":
            return text[:cut] + line + newline + text[cut:]
    return text + newline + line + newline


def without_lone_index(values: dict[str, object], location: KeyPath) -> KeyPath:
    """``kv_cold[0].host`` and ``kv_cold.host`` both name the only entry, however the file writes it."""
    if len(location) < 3 or location[:2] not in (("cluster", "kv_cold"), ("cluster", "ssm_cold")):
        return location
    there = _look(values, location[:2])
    rest = tuple(part for part in location[2:] if not isinstance(part, int))
    index = next((part for part in location[2:] if isinstance(part, int)), None)
    if not isinstance(there, list):
        if index:
            raise ConfigError(f"{path_text(location[:2])} has no entry {index}")
        return (*location[:2], *rest)
    entries = cast("list[object]", there)
    if index is None and len(entries) > 1:
        raise ConfigError(
            f"{path_text(location[:2])} has {len(entries)} entries; name one: {path_text(location[:2])}[0]"
        )
    if (index or 0) >= len(entries):
        raise ConfigError(f"{path_text(location[:2])} has no entry {index or 0}")
    return (*location[:2], index or 0, *rest)


def _look(values: object, location: KeyPath) -> object:
    node: Any = values
    for part in location:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            return None
    return node


def _prove(path: Path, old: dict[str, object], new_text: str, location: KeyPath, value: object) -> None:
    """Raises ConfigError unless the new text means the old document with that leaf, and nothing else."""
    expected: Any = copy.deepcopy(old)
    node = expected
    for part in location[:-1]:
        node = node.setdefault(part, {}) if isinstance(node, dict) else node[part]  # pyright: ignore
    node[location[-1]] = value
    try:
        right = parse(new_text, path).values == expected
    except ConfigError:
        right = False
    if not right:
        raise ConfigError(f"{path}: {path_text(location)} cannot be set without rewriting other lines; edit it by hand")


# --- writing -----------------------------------------------------------------------------------


def write(edit: Edit) -> Path:
    """The file holds the new text; its mode is kept, a symlink is followed, the old text is beside it as ``.bak``.

    Returns the backup's path. Raises ConfigError when the file changed since the edit was planned or cannot be
    written; the file then is as it was.
    """
    target = Path(os.path.realpath(edit.path))
    old = (_BOM if edit.bom else b"") + edit.old_text.encode()
    new = (_BOM if edit.bom else b"") + edit.new_text.encode()
    try:
        with locked(target):
            if target.read_bytes() != old:
                raise ConfigError(f"{edit.path} changed meanwhile; nothing was written, try again")
            return replace_keeping(target, old, new)
    except OSError as error:
        raise ConfigError(f"{edit.path} cannot be written: {error.strerror or error}") from None


def take_back(edit: Edit) -> bool:
    """The file holds its old text again; False, and nothing is touched, when it no longer holds the new one."""
    target = Path(os.path.realpath(edit.path))
    old = (_BOM if edit.bom else b"") + edit.old_text.encode()
    try:
        with locked(target):
            if target.read_bytes() != (_BOM if edit.bom else b"") + edit.new_text.encode():
                return False
            replace(target, old, like=target)
    except OSError as error:
        raise ConfigError(f"{edit.path} cannot be written: {error.strerror or error}") from None
    return True
