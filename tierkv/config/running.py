"""What a process was started with, so that its configuration can be worked out again with changes on top."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierkv.config.edit import resolve_key, without_lone_index
from tierkv.config.faults import path_text
from tierkv.config.load import Flag, Loaded, load_source
from tierkv.config.source import Source, read
from tierkv.errors import ConfigFaults


@dataclass(frozen=True, slots=True)
class Base:
    """The file (None: there was none), the flags and the environment of a process."""

    path: Path | None = None
    flags: Mapping[str, Flag] = field(default_factory=dict[str, Flag])
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def read(self) -> Source | None:
        """The file as it is now. Raises ConfigError."""
        return read(self.path) if self.path else None

    def check(self, source: Source | None, changes: Mapping[str, Flag]) -> Loaded:
        """The configuration with ``changes`` (by place) over everything else. Raises ConfigFaults."""
        return load_source(source, flags={**self.flags, **changes}, environ=self.environ)

    def place(self, source: Source | None, key: str) -> str:
        """Where the key stands in this file. Raises ConfigFaults when there is no such key, ConfigError for an entry
        that this file does not have."""
        _, location = resolve_key(key)
        return path_text(without_lone_index(source.values if source else {}, location))

    @staticmethod
    def shown(key: str, values: Mapping[str, object]) -> str:
        """The key as ``rows`` names it: the only entry of a list has no index."""
        alone = key.replace("[0]", "")
        return alone if key not in values and alone in values else key


def problem_of(error: Exception) -> str:
    """The first fault in one line."""
    return str(error.faults[0]) if isinstance(error, ConfigFaults) else str(error)
