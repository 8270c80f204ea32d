"""A tierkv.toml that is being edited: changes pile up, every fault is known at once, the file changes with ``write``.

Comments, order and spelling of lines that are not changed stay byte for byte.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from tierkv.config.atomic import locked, replace, replace_keeping
from tierkv.config.edit import resolve_key, set_value, without_lone_index
from tierkv.config.keys import Key, keys, value_from_text
from tierkv.config.load import DEFAULT, Loaded, Origin, load_source
from tierkv.config.rows import Row, rows
from tierkv.config.source import Source, decode, parse, read_bytes
from tierkv.errors import ConfigError, ConfigFaults, Fault

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Field:
    """One key as the form shows it: what file or default says, whether the draft changes it, what is wrong with it."""

    path: str
    key: Key
    value: object
    origin: Origin
    changed: bool = False
    fault: Fault | None = None

    @property
    def text(self) -> str:
        """The value as a person types it."""
        return self.key.shown(self.value)


class Draft:
    """The file at ``path`` as it was read, and the text it is to become. Raises ConfigError when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read()

    def _read(self) -> None:
        self._base = self._before = read_bytes(self.path)
        self.base_text = self.text = decode(self.path, self._base)
        self._look()

    def _look(self) -> None:
        """What the text says, as far as it can be read."""
        self.faults: tuple[Fault, ...] = ()
        self._fields: list[Field] | None = None
        self._loaded: Loaded | None = None
        self._source: Source | None = None
        try:
            self._source = parse(self.text, self.path)
            self._loaded = load_source(self._source, environ={})
        except ConfigFaults as error:
            self.faults = error.faults
        except ConfigError as error:
            self.faults = (Fault("", None, str(error)),)

    # --- reading ---------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        return self.text != self.base_text

    def fields(self) -> list[Field]:
        """Every key with its value; of a faulty file what it says at each key."""
        if self._fields is None:
            self._fields = self._read_fields()
        return self._fields

    def _read_fields(self) -> list[Field]:
        wrong = {fault.key: fault for fault in self.faults}
        before = self._values_of(self.base_text)
        if self._loaded is not None:
            return [
                Field(row.path, row.key, row.value, row.origin, row.path in before and before[row.path] != row.value)
                for row in rows(self._loaded)
            ]
        found: list[Field] = []
        for key in keys():
            if key.kind in ("peers", "peer"):
                continue
            path = key.path.replace("[]", "")
            value, there = self._raw(path)
            origin = Origin("file", str(self.path)) if there else DEFAULT
            found.append(Field(path, key, value if there else key.default, origin, fault=wrong.get(path)))
        return found

    def _raw(self, path: str) -> tuple[object, bool]:
        node: object = self._source.values if self._source else {}
        for part in path.split("."):
            if not isinstance(node, dict) or part not in node:
                return None, False
            node = node[part]  # pyright: ignore[reportUnknownVariableType]
        return node, True  # pyright: ignore[reportUnknownVariableType]

    def _values_of(self, text: str) -> dict[str, object]:
        try:
            return {row.path: row.value for row in self._rows_of(text)}
        except ConfigError:
            return {}

    def _rows_of(self, text: str) -> list[Row]:
        return rows(load_source(parse(text, self.path), environ={}))

    def changes(self) -> dict[str, object]:
        """Key path -> new value, for every key whose value the draft changes."""
        before, after = self._values_of(self.base_text), self._values_of(self.text)
        return {path: value for path, value in after.items() if value is not None and before.get(path) != value}

    def diff(self) -> list[str]:
        old, new = self.base_text.splitlines(), self.text.splitlines()
        return list(difflib.unified_diff(old, new, str(self.path), "edited", lineterm="", n=1))

    def line_of(self, path: str) -> int:
        """The line of the key in the text, from 1; 0 where it is not there."""
        if self._source is None:
            return next((fault.line for fault in self.faults if fault.key == path), 0)
        _, location = resolve_key(path)
        place = without_lone_index(self._source.values, location)
        return self._source.lines.get(place, 0)

    # --- changing --------------------------------------------------------------------------------

    def tried(self, name: str, text: str) -> tuple[Fault, ...]:
        """What would be wrong with that key if it had that value; empty when ``set`` would take it."""
        try:
            after = self._with(name, text)
            load_source(parse(after, self.path), environ={})
        except ConfigFaults as error:
            known = {fault.key for fault in self.faults}
            mine = tuple(fault for fault in error.faults if fault.key == name or fault.key not in known)
            return mine
        except ConfigError as error:
            return (Fault(name, text, str(error)),)
        return ()

    def set(self, name: str, text: str) -> tuple[Fault, ...]:
        """The draft has the value, unless it is faulty: then what is wrong with it."""
        found = self.tried(name, text)
        if not found and not self._says(name, text):
            self.text = self._with(name, text)
            self._look()
        return found

    def _says(self, name: str, text: str) -> bool:
        """The draft means that already, however it is spelt."""
        before, after = self._values_of(self.text), self._values_of(self._with(name, text))
        return bool(before) and before == after

    def set_text(self, text: str) -> None:
        """The whole text, as an editor left it; its faults are in ``faults``."""
        self.text = text
        self._look()

    def _with(self, name: str, text: str) -> str:
        key, location = resolve_key(name)
        source = parse(self.text, self.path)
        return set_value(self.text, without_lone_index(source.values, location), value_from_text(key, text))

    def revert(self) -> None:
        self.set_text(self.base_text)

    # --- the file --------------------------------------------------------------------------------

    def changed_on_disk(self) -> bool:
        """Somebody else has written the file since it was read; a file that is gone counts."""
        try:
            return read_bytes(self.path) != self._base
        except ConfigError:
            return True

    def reload(self) -> None:
        """The file as it is now; the draft's changes are gone."""
        self._read()

    def rebase(self) -> None:
        """The file as it is now is what the draft will replace, text for text."""
        text = self.text
        self._read()
        self.set_text(text)

    def write(self) -> Path:
        """The file holds the draft; mode kept, symlink followed, old text beside it as ``.bak``. Returns its path.

        Raises ConfigError when somebody else has written the file since it was read, or the draft has faults.
        """
        if self.faults:
            raise ConfigFaults(str(self.path), self.faults)
        target = Path(os.path.realpath(self.path))
        data = (_BOM if self._base.startswith(_BOM) else b"") + self.text.encode()
        try:
            with locked(target):
                if self.changed_on_disk():
                    raise ConfigError(f"{self.path} changed meanwhile; nothing was written")
                backup = replace_keeping(target, self._base, data)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror or error}") from None
        self._before, self._base, self.base_text = self._base, data, self.text
        self._look()
        return backup

    def take_back(self) -> bool:
        """The file holds what the last ``write`` replaced, and the draft its changes; False: somebody else wrote it."""
        target = Path(os.path.realpath(self.path))
        with locked(target):
            if self.changed_on_disk():
                return False
            replace(target, self._before, like=target)
        self._base = self._before
        self.base_text = decode(self.path, self._base)
        self._look()
        return True
