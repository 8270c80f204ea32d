"""Keeps an inference agent running beside an engine: ``python -m tierkv.cli.beside SOCKET COMMAND...``.

Standard input is the other end of a pipe that the engine's process holds. When it closes, however the engine ended,
the agent is ended too. An agent that dies is started again, with a back-off. Standard library only: this process waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tierkv.errors import EXIT_REFUSED, EXIT_USAGE

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
# An agent that lived so long was well: its next death is the first again.
WELL_S = 60.0
# Another agent serves the engine meanwhile.
OTHERS_EVERY_S = 5.0
_LOOK_S = 0.2
_PROBE_S = 0.3
# An agent ends within its own grace of 2 s, and sends what it holds.
_END_S = 10.0


class Keeper:
    """Starts ``command`` again and again until ``close``; ``say`` gets each line that a person should read."""

    def __init__(self, place: Path, command: Sequence[str], say: Callable[[str], None]) -> None:
        self._place = place
        self._command = list(command)
        self._say = say
        self._closed = threading.Event()

    def close(self) -> None:
        """``run`` ends the agent and returns."""
        self._closed.set()

    def run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._closed.is_set():
            began_s = time.monotonic()
            code = self._once()
            if code is None:
                return
            if code in (EXIT_USAGE, EXIT_REFUSED):
                self._say(
                    f"the inference agent {how_it_ended(code)}; it is not started again, the engine goes on alone"
                )
                return
            if time.monotonic() - began_s >= WELL_S:
                backoff_s = FIRST_BACKOFF_S
            if answers(self._place):
                self._say("the engine uses another inference agent; when that is gone, one is started again")
            else:
                self._say(f"the inference agent {how_it_ended(code)}; it is started again in {backoff_s:g} s")
            self._closed.wait(backoff_s)
            backoff_s = min(LONGEST_BACKOFF_S, backoff_s * 2)
            while answers(self._place) and not self._closed.wait(OTHERS_EVERY_S):
                pass

    def _once(self) -> int | None:
        """One life of the agent: how it ended, None when it was asked to."""
        try:
            # It ends when its standard input closes, so also when this process is killed outright.
            agent = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        except OSError as error:
            self._say(f"the inference agent does not start: {error}")
            return 1
        while agent.poll() is None:
            if self._closed.wait(_LOOK_S):
                _end(agent)
                return None
        assert agent.stdin is not None
        agent.stdin.close()
        return agent.returncode


def _end(agent: subprocess.Popen[bytes]) -> None:
    agent.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        agent.wait(_END_S)
    agent.kill()
    agent.wait()


def how_it_ended(code: int) -> str:
    """``code`` as ``subprocess`` gives it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def answers(place: Path) -> bool:
    """Whether an inference agent listens on the socket."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as trial:
        trial.settimeout(_PROBE_S)
        try:
            trial.connect(str(place))
        except OSError:
            return False
    return True


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"tierkv: {text}\n".encode())


def main(argv: Sequence[str]) -> None:
    keeper = Keeper(Path(argv[0]), argv[1:], _tell)

    def wait_for_the_engine() -> None:
        while os.read(0, 4096):
            pass
        keeper.close()

    threading.Thread(target=wait_for_the_engine, name="stdin", daemon=True).start()
    keeper.run()


if __name__ == "__main__":
    main(sys.argv[1:])
