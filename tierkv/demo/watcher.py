"""A process beside the demonstration that ends everything when the demonstration is killed outright.

It reads from a pipe whose other end only the demonstration holds, so it learns of that on every system. ``+N`` and
``-N`` say what to end and what has ended: a process, or with a negative N a process group, as for kill(2).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_GRACE_S = 5.0


class Watcher:
    """Runs until ``close``; when this process ends without it, what was added is ended and ``folder`` removed."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tierkv.demo.watcher", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # What is sent to the demonstration and all its group must not reach it.
            start_new_session=True,
        )

    def add(self, target: int) -> None:
        self._say(f"+{target}")

    def discard(self, target: int) -> None:
        self._say(f"-{target}")

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def _watch(folder: Path) -> None:
    targets: set[int] = set()
    for line in sys.stdin:
        (targets.add if line[0] == "+" else targets.discard)(int(line[1:]))
    running = {target for target in targets if _signalled(target, signal.SIGTERM)}
    until = time.monotonic() + _GRACE_S
    while running and time.monotonic() < until:
        time.sleep(0.05)
        running = {target for target in running if _signalled(target, 0)}
    for target in targets:
        _signalled(target, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _signalled(target: int, number: int) -> bool:
    """Whether there is still something to signal."""
    try:
        os.kill(target, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    _watch(Path(sys.argv[1]))
