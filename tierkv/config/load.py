"""Finding tierkv.toml, laying the environment and flags over it, checking everything, knowing where it came from."""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tierkv import paths
from tierkv.config import faults as explain
from tierkv.config.faults import Location, path_text
from tierkv.config.keys import by_path, value_from_text
from tierkv.config.model import Config
from tierkv.config.source import Source, read
from tierkv.errors import ConfigError, ConfigFaults, Fault

_ENVIRONMENT = re.compile(r"^TIERKV_([A-Z0-9_]*?[A-Z0-9])__([A-Z0-9_]+)$")
_LISTS = (("cluster", "kv_cold"), ("cluster", "ssm_cold"))


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from. ``kind``: "default", "file", "env" or "flag"; ``name``: path, variable or flag."""

    kind: str
    name: str = ""
    line: int = 0

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.name}:{self.line}"
        return f"${self.name}" if self.kind == "env" else self.name or self.kind


DEFAULT = Origin("default")


@dataclass(frozen=True, slots=True)
class Flag:
    """A value from the command line: the flag's name as typed, and the value as TOML would hold it."""

    name: str
    value: object


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked configuration; ``path`` is None when no file was found; ``origins`` by key path as in the file."""

    config: Config
    path: Path | None
    origins: Mapping[str, Origin] = field(default_factory=dict[str, Origin])
    warnings: tuple[Fault, ...] = ()

    def origin(self, key: str) -> Origin:
        return self.origins.get(key, DEFAULT)


def search_path(explicit: str | Path | None = None, environ: Mapping[str, str] | None = None) -> list[Path]:
    """Where a configuration is looked for, first match wins; one that is named must exist."""
    environ = os.environ if environ is None else environ
    named = explicit or environ.get("TIERKV_CONFIG")
    if named:
        return [Path(named).expanduser()]
    return [Path("tierkv.toml"), paths.config_dir() / "tierkv.toml", Path("/etc/tierkv/tierkv.toml")]


def find(explicit: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Path | None:
    """The file to read, or None. Raises ConfigError when one that is named does not exist."""
    environ = os.environ if environ is None else environ
    candidates = search_path(explicit, environ)
    for candidate in candidates:
        try:
            if candidate.exists() or candidate.is_symlink():
                return candidate
        except OSError as error:
            raise ConfigError(f"{candidate} cannot be read: {error.strerror}") from None
    if explicit or environ.get("TIERKV_CONFIG"):
        source = "--config" if explicit else "TIERKV_CONFIG"
        raise ConfigError(f"{candidates[0]} does not exist (named by {source})")
    return None


def load(
    explicit: str | Path | None = None,
    *,
    flags: Mapping[str, Flag] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """The configuration in force: flags over environment over file over defaults.

    Raises ConfigFaults with every fault of file, environment and flags at once, or ConfigError when the file cannot
    be read at all.
    """
    environ = os.environ if environ is None else environ
    path = find(explicit, environ)
    return load_source(read(path) if path else None, flags=flags, environ=environ)


def load_source(
    source: Source | None, *, flags: Mapping[str, Flag] | None = None, environ: Mapping[str, str] | None = None
) -> Loaded:
    """As ``load``, from a file that is already parsed (or none); an empty ``environ`` leaves the environment out."""
    merge = _Merge(source)
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if match := _ENVIRONMENT.match(name):
            merge.environment(name, match, text)
    for key, flag in (flags or {}).items():
        merge.put(_location(key), flag.value, Origin("flag", flag.name))
    config = merge.check()
    notes = (Fault(key, None, text, "", *merge.where(key)) for key, text in explain.warnings(config))
    return Loaded(config, source.path if source else None, merge.origins(), tuple(notes))


def _location(key: str) -> Location:
    """``cluster.kv_cold[1].host`` as a path."""
    parts: list[str | int] = []
    for part in key.split("."):
        name, _, index = part.partition("[")
        parts += [name, int(index.rstrip("]"))] if index else [name]
    return tuple(parts)


_NAMES = ("HOME", "CONFIG", "TOKEN", "SOCKET", "DEBUG", "EXO", "ALL_RANKS_HOOKED", "NO_BLAS", "ASCII")


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[Fault]:
    """Variables that look as if they were for TierKV and are read by nobody."""
    found: list[Fault] = []
    known = {f"TIERKV_{name}" for name in _NAMES}
    for name in sorted(os.environ if environ is None else environ):
        if name.startswith("TIERKV_") and name not in known and not _ENVIRONMENT.match(name):
            section, _, key = name.removeprefix("TIERKV_").partition("_")
            meant = f"{section}.{key}".lower()
            hint = f"did you mean TIERKV_{section}__{key}?" if meant in by_path() else "TIERKV_SECTION__KEY sets a key"
            found.append(Fault(name, None, "is not used", hint))
    return found


class _Merge:
    """Values of all sources in one tree, and the origin of each leaf that is not a default."""

    def __init__(self, source: Source | None) -> None:
        self._source = source
        self._values: dict[str, Any] = copy.deepcopy(source.values) if source else {}
        self._over: dict[Location, Origin] = {}
        self._faults: list[Fault] = []

    def environment(self, name: str, match: re.Match[str], text: str) -> None:
        parts = [match[1].lower(), *match[2].lower().split("__")]
        location: list[str | int] = [int(part) if part.isdigit() else part for part in parts]
        if tuple(location[:2]) in _LISTS and len(location) > 2 and isinstance(location[2], str):
            entries = self._peek(tuple(location[:2]))
            if isinstance(entries, list) and len(entries) > 1:  # pyright: ignore[reportUnknownArgumentType]
                hint = f"write {name.replace(match[2], match[2].replace('__', '__0__', 1))} for the first"
                self._faults.append(Fault(path_text(tuple(location)), text, "names one of several entries", hint, name))
                return
            if isinstance(entries, list) and entries:
                location.insert(2, 0)
        elif (
            tuple(location[:2]) in _LISTS and location[2:3] == [0] and isinstance(self._peek(tuple(location[:2])), dict)
        ):
            del location[2]  # the file has a lone table there
        self.put(tuple(location), _environment_value(tuple(location), text), Origin("env", name))

    def put(self, location: Location, value: object, origin: Origin) -> None:
        """Lays one value over the tree; a place that cannot hold it is left to the check to complain about."""
        node: Any = self._values
        for part, following in itertools.pairwise(location):
            if isinstance(node, list):
                items: list[Any] = node  # pyright: ignore[reportUnknownVariableType]
                if not isinstance(part, int) or part > len(items):
                    self._misplaced(location, value, origin)
                    return
                if part == len(items):
                    items.append({})
                node = items[part]
            elif isinstance(node, dict):
                node = node.setdefault(part, [] if isinstance(following, int) else {})  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if not isinstance(node, dict):
            self._misplaced(location, value, origin)
            return
        node[location[-1]] = value
        self._over[location] = origin

    def _misplaced(self, location: Location, value: object, origin: Origin) -> None:
        self._faults.append(Fault(path_text(location), value, "does not fit what the file has there", "", origin.name))

    def _peek(self, location: Location) -> object:
        node: Any = self._values
        for part in location:
            node = node.get(part) if isinstance(node, dict) else None  # pyright: ignore
        return node

    # --- checking ---

    def check(self) -> Config:
        """The whole configuration, or ConfigFaults with everything that is wrong."""
        values = copy.deepcopy(self._values)
        faulty: set[Location] = set()
        config: Config | None = None
        for _ in range(3):
            try:
                config = Config.model_validate(values)
                break
            except ValidationError as error:
                for part in error.errors(include_url=False):
                    location = self._as_written(part["loc"])
                    faulty.add(location)
                    self._faults.append(explain.from_pydantic(part, *self._where(location), location))
                    _remove(values, location)
        if config is not None:
            self._cross_check(config, faulty)
        if self._faults:
            ordered = sorted(self._faults, key=lambda fault: (fault.line == 0, fault.line))
            raise ConfigFaults(str(self._source.path) if self._source else "configuration", tuple(ordered))
        assert config is not None
        return config

    def _cross_check(self, config: Config, faulty: set[Location]) -> None:
        for location, problem, suggestion in explain.cross_checks(config):
            place = self._as_written(location)
            if place not in faulty:
                value = self._peek(place)
                shown = None if isinstance(value, dict | list) else value
                self._faults.append(Fault(path_text(place), shown, problem, suggestion, *self._where(place)))

    def _as_written(self, location: Location) -> Location:
        """Without the index that a lone table was given on its way into the model."""
        if location[:2] in _LISTS and len(location) > 2 and isinstance(self._peek(location[:2]), dict):
            return (*location[:2], *location[3:])
        return location

    def _where(self, location: Location) -> tuple[str, int]:
        for end in range(len(location), 0, -1):
            if location[:end] in self._over:
                return self._over[location[:end]].name, 0
        line = self._source.line_of(location) if self._source else 0
        if line:
            return f"line {line}", line
        # A table that is nobody's: what put something into it.
        below = [origin.name for place, origin in self._over.items() if place[: len(location)] == location]
        return ", ".join(sorted(below)), 0

    def where(self, key: str) -> tuple[str, int]:
        return self._where(tuple(key.split(".")))

    # --- provenance ---

    def origins(self) -> dict[str, Origin]:
        found: dict[str, Origin] = {}
        self._collect(self._values, (), found)
        return found

    def _collect(self, node: object, location: Location, found: dict[str, Origin]) -> None:
        if isinstance(node, dict):
            for name, value in node.items():  # pyright: ignore[reportUnknownVariableType]
                self._collect(value, (*location, str(name)), found)  # pyright: ignore
        elif isinstance(node, list) and location in _LISTS:
            for number, value in enumerate(node):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
                self._collect(value, (*location, number), found)  # pyright: ignore[reportUnknownArgumentType]
        elif location in self._over:
            found[path_text(location)] = self._over[location]
        elif self._source is not None:
            found[path_text(location)] = Origin("file", str(self._source.path), self._source.line_of(location))


def _remove(values: dict[str, Any], location: Location) -> None:
    """Takes the faulty leaf out, with the whole list around an entry, so that the rest can be checked as well."""
    node: Any = values
    try:
        trail = [node := node[part] for part in location[:-1]]
        while trail and isinstance(trail[-1], list):
            trail.pop()
        parent = trail[-1] if trail else values
        parent.pop(location[len(trail)])  # pyright: ignore[reportArgumentType]
    except (KeyError, IndexError, TypeError):
        return  # it went with an earlier fault


def _environment_value(location: Location, text: str) -> object:
    pattern = path_text(tuple(part for part in location if not isinstance(part, int)))
    for list_name in ("cluster.kv_cold", "cluster.ssm_cold"):
        pattern = pattern.replace(f"{list_name}.", f"{list_name}[].")
    key = by_path().get(pattern)
    return value_from_text(key, text) if key else text
