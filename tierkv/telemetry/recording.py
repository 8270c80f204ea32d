"""What agents said, in one file that can be read again: lines of JSON, packed with gzip or not.

The first line says who made it and with what; every other is a step: a snapshot, events, or the loss of an agent.
A file that was cut off in the middle is read as far as it goes.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, cast

from tierkv.errors import TierKVError
from tierkv.telemetry.histogram import HistogramSnapshot
from tierkv.telemetry.snapshot import (
    EngineSnapshot,
    Event,
    LinkSnapshot,
    MemorySnapshot,
    NodeSnapshot,
    TierSnapshot,
    Window,
)

SCHEMA = "tierkv.recording/1"
GZIP_MAGIC = b"\x1f\x8b"
LINE_MAX = 4 << 20
STEPS_MAX = 2_000_000

Json = dict[str, Any]


class BadRecording(TierKVError):
    """A file that is no recording of this version."""


@dataclass(frozen=True, slots=True)
class Header:
    """Who was recorded, with which versions, and the configuration without its secrets. ``targets``: their order."""

    cluster: str = ""
    time_unix_s: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    config: Mapping[str, object] = field(default_factory=dict[str, object])
    targets: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was heard of the agent at ``target``, at ``at_unix_s`` of the listener's clock.

    Exactly one of: ``snapshot``; ``events`` (with how many were dropped before them); ``ended``, why the connection
    did, with what it means for the agent (a phase, or "").
    """

    at_unix_s: float
    target: str
    snapshot: NodeSnapshot | None = None
    authenticated: bool = False
    events: tuple[Event, ...] = ()
    dropped: int = 0
    ended: str | None = None
    phase: str = ""


# --- to JSON ------------------------------------------------------------------------------------


def header_line(header: Header) -> str:
    return json.dumps({"schema": SCHEMA, **asdict(header)}, ensure_ascii=False, default=str)


def step_line(step: Step) -> str:
    body: Json = {"at": step.at_unix_s, "target": step.target}
    if step.snapshot is not None:
        body |= {"node": asdict(step.snapshot), "authenticated": step.authenticated}
    elif step.ended is not None:
        body |= {"ended": step.ended, "phase": step.phase}
    else:
        body |= {"events": [asdict(event) for event in step.events], "dropped": step.dropped}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


# --- from JSON ----------------------------------------------------------------------------------


def _made(kind: type[Any], body: Json, **parts: object) -> Any:
    """The dataclass from what of the body it knows; a newer writer's fields are left out."""
    known = {one.name for one in fields(kind)}
    return kind(**{name: value for name, value in body.items() if name in known and name not in parts}, **parts)


def _histogram(body: Json) -> HistogramSnapshot:
    return HistogramSnapshot({int(bucket): int(count) for bucket, count in body["counts"].items()}, body["sum_s"])


def _tier(body: Json) -> TierSnapshot:
    return _made(
        TierSnapshot,
        body,
        promote_s=_histogram(body["promote_s"]),
        store_s=_histogram(body["store_s"]),
        windows=tuple(_made(Window, one) for one in body["windows"]),
    )


def node_of(body: Json) -> NodeSnapshot:
    """The snapshot that ``asdict`` made the body of. Raises KeyError, TypeError or ValueError for any other."""
    return _made(
        NodeSnapshot,
        body,
        memory=_made(MemorySnapshot, body["memory"]),
        tiers=tuple(_tier(one) for one in body["tiers"]),
        links=tuple(_made(LinkSnapshot, one) for one in body["links"]),
        engines=tuple(_made(EngineSnapshot, one) for one in body["engines"]),
    )


def step_of(line: str) -> Step:
    """Raises BadRecording when the line is no step."""
    try:
        body = cast("Json", json.loads(line))
        at, target = float(body["at"]), str(body["target"])
        if "node" in body:
            return Step(at, target, node_of(body["node"]), bool(body["authenticated"]))
        if "ended" in body:
            return Step(at, target, ended=str(body["ended"]), phase=str(body["phase"]))
        events = tuple(_made(Event, one) for one in body["events"])
        return Step(at, target, events=events, dropped=int(body["dropped"]))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BadRecording(f"a line that is no step: {type(error).__name__}") from None


def header_of(line: str) -> Header:
    try:
        body = cast("Json", json.loads(line))
        if body["schema"] != SCHEMA:
            raise BadRecording(f"its schema is {str(body['schema'])[:60]!r}, not {SCHEMA!r}")
        targets = body.get("targets", ())
        if not isinstance(targets, list | tuple):
            raise TypeError
        return _made(Header, body, targets=tuple(str(one) for one in cast("list[object]", targets)))
    except (KeyError, TypeError, ValueError, RecursionError):
        raise BadRecording("its first line is no header of a recording") from None


# --- files --------------------------------------------------------------------------------------


class Recorder:
    """Writes steps to ``path``; with ``max_bytes`` the oldest half goes (``path``.1 is the half before).

    What an earlier recording left there gets ".old" behind its name. Raises OSError.
    """

    def __init__(self, path: Path, header: Header, max_bytes: int = 0) -> None:
        self.path, self._header, self._max_bytes = path, header, max_bytes
        self._file: IO[str] | None = None
        self._size = 0
        for before in (path, path.with_name(path.name + ".1")):
            if before.exists():
                before.replace(before.with_name(before.name + ".old"))
        self._begin()

    def _begin(self) -> None:
        if self._file is not None:
            self._file.close()
        if self.path.exists():
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        self._file = self.path.open("w", encoding="utf-8")
        self._size = 0
        self._put(header_line(self._header))

    def _put(self, line: str) -> None:
        assert self._file is not None
        self._file.write(line + "\n")
        self._size += len(line) + 1

    def add(self, step: Step) -> None:
        if self._max_bytes and self._size > self._max_bytes // 2:
            self._begin()
        self._put(step_line(step))

    def flush(self) -> None:
        """Everything so far can be read by others."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def write_packed(path: Path, header: Header, lines: Sequence[str]) -> None:
    """One gzip file with the header and the lines of steps. Raises OSError."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(header_line(header) + "\n")
        for line in lines:
            file.write(line + "\n")


def read_recording(path: Path, missing: Callable[[str], None] = lambda _: None) -> tuple[Header, list[Step]]:
    """The header and all whole steps, the half before (``path``.1) included. ``missing`` is told what was left out.

    Raises BadRecording, OSError.
    """
    earlier = path.with_name(path.name + ".1")
    header, steps = _read(path, missing)
    if earlier.exists():
        try:
            steps = _read(earlier, missing)[1] + steps
        except BadRecording:
            pass
    if not steps:
        raise BadRecording(f"{path} holds no steps")
    steps.sort(key=lambda step: step.at_unix_s)
    return header, steps


def _read(path: Path, missing: Callable[[str], None]) -> tuple[Header, list[Step]]:
    with path.open("rb") as probe:
        packed = probe.read(2) == GZIP_MAGIC
    steps: list[Step] = []
    damaged, first = 0, ""
    lines = _lines(path, gzip.open if packed else open, missing)
    try:
        header = header_of(next(lines, ""))
    except BadRecording as error:
        raise BadRecording(f"{path}: {error}") from None
    for line in lines:
        try:
            steps.append(step_of(line))
        except BadRecording as error:
            damaged, first = damaged + 1, first or str(error)
        if len(steps) >= STEPS_MAX:
            missing(f"only its first {STEPS_MAX:,} steps are shown")
            break
    if damaged and not steps:
        raise BadRecording(f"{path}: {first}")
    if damaged:
        missing("1 damaged line is left out" if damaged == 1 else f"{damaged:,} damaged lines are left out")
    return header, steps


def _lines(path: Path, opener: Callable[..., Any], missing: Callable[[str], None]) -> Iterator[str]:
    with opener(path, "rt", encoding="utf-8", errors="replace") as file:
        try:
            while line := cast("str", file.readline(LINE_MAX)):
                if line.endswith("\n"):
                    yield line
                else:
                    missing("a line without an end is left out")
        except (EOFError, zlib.error, OSError):  # BadGzipFile is an OSError
            missing("what follows cannot be unpacked")
