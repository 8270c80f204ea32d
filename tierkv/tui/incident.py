"""The last minutes of what the console heard, always at hand: one file for a colleague."""

from __future__ import annotations

import platform
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tierkv import __version__
from tierkv.telemetry.recording import Header, Step, step_line, write_packed

KEPT_S = 900.0
SNAPSHOT_EVERY_S = 2.0
KEPT_BYTES = 64 << 20
SECRET = ("tenant", "token", "token_file")


class Incident:
    """Keeps what ``add`` is told for ``kept_s``, packed: of every agent a snapshot each 2 s, all events and losses."""

    def __init__(self, kept_s: float = KEPT_S, clock: Callable[[], float] = time.time) -> None:
        self._kept_s, self._clock = kept_s, clock
        self._lines: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._last: dict[str, float] = {}

    def add(self, step: Step) -> None:
        if step.snapshot is not None:
            if 0 <= step.at_unix_s - self._last.get(step.target, float("-inf")) < SNAPSHOT_EVERY_S:
                return
            self._last[step.target] = step.at_unix_s
        packed = zlib.compress(step_line(step).encode(), 1)
        self._lines.append((step.at_unix_s, packed))
        self._size += len(packed)
        while self._lines and (self._lines[0][0] < step.at_unix_s - self._kept_s or self._size > KEPT_BYTES):
            self._size -= len(self._lines.popleft()[1])

    def write(self, path: Path, cluster: str, config: Mapping[str, object], targets: Sequence[str] = ()) -> int:
        """The file is there; how many steps it holds. Raises OSError."""
        lines = [zlib.decompress(packed).decode() for _, packed in self._lines]
        write_packed(path, header(cluster, config, targets), lines)
        return len(lines)


def header(cluster: str, config: Mapping[str, object], targets: Sequence[str] = ()) -> Header:
    """What a recording begins with: versions, the configuration without what is secret, agents as they are listed."""
    shown = {key: value for key, value in config.items() if key.rpartition(".")[2] not in SECRET}
    versions = {"tierkv": __version__, "python": platform.python_version(), "system": platform.platform()}
    return Header(cluster, time.time(), versions, shown, tuple(targets))


def config_values(path: Path | None) -> dict[str, object]:
    """Every value of the file, for the header; empty when it cannot be read."""
    from tierkv.config.load import load
    from tierkv.config.rows import rows
    from tierkv.errors import ConfigError

    try:
        return {row.path: row.value for row in rows(load(path))}
    except ConfigError:
        return {}
