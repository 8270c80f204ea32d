"""A small coverage-guided fuzzer: mutate what reached new lines, keep what reaches more.

A target takes bytes and says how it ended ("ok" or a reason); any other exception, a message that takes longer than
``HANG_S`` and memory that grows without end are faults. Coverage is the lines of ``tierkv`` that ran, in all threads.
"""

from __future__ import annotations

import faulthandler
import json
import random
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

import psutil

import tierkv

ROOT = str(Path(tierkv.__file__).parent)
HANG_S = 15.0
# Far beyond what one message may cost; a machine that swaps is not the place to find out more.
GROWTH_BYTES = 400 << 20
MAX_MESSAGE_BYTES = 1 << 18
MAX_CORPUS = 400
INTERESTING = (0, 1, 2, 7, 8, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
JUNK: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 255, 2**31, 2**48, 2**53, 2**63, 2**70, -(2**63), 1.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "x" * 3000, "\x00", "\ud800", "..", [], {}, [[]], [None], [1, 2, 3], {"": 0},
    {"0": {"0": 0}}, [[[[[[[[]]]]]]]],
)  # fmt: skip

Mutator = Callable[[random.Random, bytes], bytes]


class Target(Protocol):
    """``name`` names the folder of its seeds. ``feed`` raises what is a fault."""

    name: str

    def examples(self) -> Sequence[bytes]: ...

    def feed(self, data: bytes) -> str: ...

    def mutators(self) -> Sequence[Mutator]: ...

    def close(self) -> None: ...


# A function that showed nothing new so often is looked at only now and then: tracing lines costs most of the time.
DRY_CALLS, LOOK_EVERY = 30, 16


class Coverage:
    """Lines of ``tierkv`` that ran since the start, in every thread that was started while this is on."""

    def __init__(self) -> None:
        self.lines: set[tuple[int, int]] = set()
        self._calls: dict[CodeType, int] = {}
        self._theirs: set[CodeType] = set()

    def __enter__(self) -> Coverage:
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # pyright: ignore[reportArgumentType]

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        del event
        code = frame.f_code
        if code in self._theirs:
            return None
        calls = self._calls.get(code)
        if calls is None and not code.co_filename.startswith(ROOT):
            self._theirs.add(code)
            return None
        self._calls[code] = calls = (calls or 0) + 1
        return self._line if calls < DRY_CALLS or calls % LOOK_EVERY == 0 else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            place = (id(frame.f_code), frame.f_lineno)
            if place not in self.lines:
                self.lines.add(place)
                self._calls[frame.f_code] = 0
        return self._line


class Stalls:
    """How long this process was kept from running at all: what a busy machine takes is no fault of a message."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.is_set():
            began = time.perf_counter()
            time.sleep(0.05)
            self.total_s += max(0.0, time.perf_counter() - began - 0.1)


@dataclass(slots=True)
class Found:
    """What one target did with its messages."""

    messages: int = 0
    new_lines: int = 0
    slowest_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list[str])
    corpus: list[bytes] = field(default_factory=list[bytes])


def fuzz(
    targets: Sequence[Target],
    messages: int,
    *,
    seed: int,
    coverage: Coverage,
    seeds: Callable[[str], Iterable[bytes]] = lambda _: (),
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Found]:
    """Feeds ``messages`` messages to the targets in turn. What a target was fed in a fault is in its text, in hex."""
    rng, process = random.Random(seed), psutil.Process()
    found = {target.name: Found(corpus=[*target.examples(), *seeds(target.name)]) for target in targets}
    with Stalls() as stalls:
        return _fed(targets, messages, rng, process, coverage, stalls, found, say)


def _fed(
    targets: Sequence[Target], messages: int, rng: random.Random, process: psutil.Process, coverage: Coverage,
    stalls: Stalls, found: dict[str, Found], say: Callable[[str], None],
) -> dict[str, Found]:  # fmt: skip
    for target in targets:
        for data in list(found[target.name].corpus):
            _one(target, data, found[target.name], coverage, stalls)
    began_bytes = process.memory_info().rss
    done = 0
    while done < messages:
        for target in targets:
            state = found[target.name]
            data = _mutated(rng, target, state.corpus)
            if _one(target, data, state, coverage, stalls) and len(state.corpus) < MAX_CORPUS:
                state.corpus.append(data)
            done += 1
            if done % 500 == 0:
                say(f"{done} messages, {len(coverage.lines)} lines, {process.memory_info().rss >> 20} MiB")
                if process.memory_info().rss > began_bytes + GROWTH_BYTES:
                    state.faults.append(f"memory grew to {process.memory_info().rss >> 20} MiB")
                    return found
            if done >= messages:
                break
    return found


def _one(target: Target, data: bytes, state: Found, coverage: Coverage, stalls: Stalls) -> bool:
    """Whether the message reached a line that nobody had reached."""
    before, began, stalled = len(coverage.lines), time.perf_counter(), stalls.total_s
    faulthandler.dump_traceback_later(HANG_S * 8, exit=True)
    try:
        outcome = target.feed(data)
    except Exception as error:
        outcome = "fault"
        state.faults.append(f"{type(error).__name__}: {error} at {_place(error)}; message {data[:400].hex()}")
    finally:
        faulthandler.cancel_dump_traceback_later()
    took = max(0.0, time.perf_counter() - began - (stalls.total_s - stalled))
    if took > HANG_S:
        state.faults.append(f"took {took:.1f} s; message {data[:400].hex()}")
    state.messages += 1
    state.slowest_s = max(state.slowest_s, took)
    state.outcomes[outcome] += 1
    new = len(coverage.lines) - before
    state.new_lines += new
    return new > 0


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else "?"


# --- mutations --------------------------------------------------------------------------------------


def _mutated(rng: random.Random, target: Target, corpus: Sequence[bytes]) -> bytes:
    data = rng.choice(corpus) if corpus else b""
    own = target.mutators()
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        if own and rng.random() < 0.6:
            data = rng.choice(own)(rng, data)
        else:
            data = rng.choice(RAW)(rng, data) if rng.random() < 0.9 else _spliced(rng, data, rng.choice(corpus))
    return data[:MAX_MESSAGE_BYTES]


def _flipped(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _number(rng: random.Random, data: bytes) -> bytes:
    form = rng.choice(("<B", "<H", "<I", "<Q", ">I", ">H"))
    size = struct.calcsize(form)
    if len(data) < size:
        return data
    at = rng.randrange(len(data) - size + 1)
    value = rng.choice(INTERESTING) & ((1 << (8 * size)) - 1)
    return data[:at] + struct.pack(form, value) + data[at + size :]


def _cut(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return rng.choice((data[:at], data[at:], data[:at] + data[at + rng.randrange(1, 64) :]))


def _grown(rng: random.Random, data: bytes) -> bytes:
    at, part = rng.randrange(len(data) + 1), data[: rng.randrange(1, 200)]
    return data[:at] + rng.choice((rng.randbytes(rng.randrange(1, 64)), part, part * 20, bytes(500))) + data[at:]


def _spliced(rng: random.Random, one: bytes, other: bytes) -> bytes:
    return one[: rng.randrange(len(one) + 1)] + other[rng.randrange(len(other) + 1) :]


RAW: tuple[Mutator, ...] = (_flipped, _flipped, _number, _number, _cut, _grown)


def with_junk(rng: random.Random, value: Any) -> Any:
    """The JSON value with one place in it changed, taken away, doubled or put elsewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        if rng.random() < 0.15:
            return {key: each for key, each in value.items() if key != name}
        if rng.random() < 0.05:
            return {**value, rng.choice(("", "op", "id", "x" * 300)): rng.choice(JUNK)}
        return {**value, name: with_junk(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return rng.choice((value[:at], value + value[:1], value * 3, value[::-1], [value]))
        return [*value[:at], with_junk(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.4:
        return value + rng.choice((-1, 1, 255, 256, -value, value))
    return rng.choice(JUNK)


def json_junk(rng: random.Random, data: bytes) -> bytes:
    """For targets of JSON lines: one line changed inside."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    try:
        lines[at] = json.dumps(with_junk(rng, json.loads(lines[at]))).encode()
    except (ValueError, RecursionError):
        return data
    return b"\n".join(lines)
