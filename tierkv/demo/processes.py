"""Child processes that end when the demonstration does, however it ends, and that say why when they end early."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tierkv.demo.watcher import Watcher
from tierkv.errors import Terminated, TierKVError

_GRACE_S = 5.0
# Below the ephemeral ports of Linux (32768) and macOS (49152).
_QUIET_PORTS = range(20000, 32000)
_TAIL_LINES = 12
_TAIL_BYTES = 16 << 10


class DemoFailed(TierKVError):
    """The demonstration ran and did not show what it is for."""


class ChildFailed(DemoFailed):
    """A process of the demonstration ended or never became ready; ``name`` says which."""

    def __init__(self, name: str, what: str, tail: str) -> None:
        self.name, self.tail = name, tail
        super().__init__(f"the {name} {what}; its last lines:\n{tail}" if tail else f"the {name} {what}")


class Child:
    """One process in a session of its own, its output in a file."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name.replace(' ', '-')}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=dict(environment),
                # ctrl-c at the terminal is for the demonstration, which ends its children in order.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises ChildFailed when the process has ended."""
        code = self._process.poll()
        if code is not None:
            what = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise ChildFailed(self.name, what, self.tail())

    def fail(self, what: str) -> NoReturn:
        self.check()
        raise ChildFailed(self.name, what, self.tail())

    def tail(self) -> str:
        """The last lines it wrote, without control characters."""
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join("  " + "".join(c if c.isprintable() else " " for c in line)[:200] for line in lines)

    def stop(self) -> None:
        """The process and everything it started are gone: asked first, killed after the grace."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        # Its session's leader is the child, so its process group outlives it as long as a grandchild does.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class Children:
    """All processes of the demonstration; ``stop`` ends them, the last started first."""

    def __init__(self, watcher: Watcher | None = None) -> None:
        self._running: list[Child] = []
        self._watcher = watcher

    def start(self, child: Callable[[], Child]) -> Child:
        made = child()
        self._running.append(made)
        if self._watcher is not None:
            self._watcher.add(-made.pid)  # its group
        return made

    def check(self) -> None:
        """Raises ChildFailed for the first that has ended."""
        for child in self._running:
            child.check()

    def stop(self, *only: Child) -> None:
        for child in reversed(only or tuple(self._running)):
            child.stop()
            self._running.remove(child)
            if self._watcher is not None:
                self._watcher.discard(-child.pid)

    def wait_until(self, ready: Callable[[], bool], child: Child, timeout_s: float) -> None:
        """Returns once ``ready``; raises ChildFailed when a process ends first or ``child`` takes too long."""
        until = time.monotonic() + timeout_s
        while not ready():
            self.check()
            if time.monotonic() > until:
                child.fail(f"is alive but was not ready within {timeout_s:.0f} s")
            time.sleep(0.05)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise Terminated, which is handled as ctrl-c is."""

    def interrupt(number: int, _: object) -> NoReturn:
        raise Terminated(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Within the block, which must be short, an impatient second ctrl-c does not stop the cleaning up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on, and that no system gives to whoever asks for any port."""
    for port in random.sample(_QUIET_PORTS, 100):
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port
    raise DemoFailed(f"no free TCP port between {_QUIET_PORTS.start} and {_QUIET_PORTS.stop}")


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


_LIBC = _libc()
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Runs in the child before exec: on Linux it gets SIGTERM when the demonstration is killed outright.

    The watcher does that everywhere; this also serves a child that it has not been told of yet.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
