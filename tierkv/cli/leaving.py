"""How a command's process ends: by a signal, when whoever reads its output has left, and whatever threads linger."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn

from tierkv.errors import Terminated

_WORDS = {signal.SIGINT: b"tierkv: interrupted\n", signal.SIGTERM: b"tierkv: terminated\n"}


def leave_at_once_on_signals() -> None:
    """SIGINT and SIGTERM end the process with one line and 130 or 143: for as long as nothing has begun.

    An exception raised in the middle of an import may be swallowed there, or leave half a module behind.
    """
    _catch(_leave)


def raise_on_signals() -> None:
    """From now on SIGINT raises KeyboardInterrupt, and SIGTERM Terminated, so that what has begun is ended in order."""
    _catch(_raise)


def _catch(handler: signal._HANDLER) -> None:
    for number in _WORDS:
        # Whoever started this process may want it deaf to ctrl-c, as a shell does for what runs behind it.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _leave(number: int, _: object) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, _WORDS[signal.Signals(number)])
    os._exit(128 + number)


def _raise(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)


def streams_that_can_be_written() -> None:
    """``sys.stdout`` and ``sys.stderr`` exist, also where the process was started with them closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
            continue
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Whoever read it has left; what is still buffered must not complain at exit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, BrokenPipeError):
            stream.flush()
            continue
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def end(code: int) -> NoReturn:
    """The process has ended: what a library's threads still wait for cannot keep a command that is done."""
    if logging := sys.modules.get("logging"):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
