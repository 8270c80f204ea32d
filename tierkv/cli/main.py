"""``tierkv``: finds the command, runs it, and turns whatever goes wrong into one clear message and an exit code."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from tierkv.cli.leaving import (
    discard_output,
    end,
    leave_at_once_on_signals,
    raise_on_signals,
    streams_that_can_be_written,
)
from tierkv.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    MissingExtra,
    TierKVError,
    UsageError,
    exit_code,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from tierkv.cli.parser import CommandParser

_EPILOG = """\
first steps on one machine:
  tierkv demo                          a real model, evicted and restored, in one command
  tierkv agent --role kv-vault         keeps attention state (a terminal of its own)
  tierkv agent --role ssm-vault        keeps recurrent checkpoints
  tierkv mlx-lm -- --model MODEL       the real mlx_lm.server with its prompt cache tiered
  tierkv install                       EXO's prefix cache tiered, from EXO's next start on
  tierkv status                        what every agent says of itself

exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 no agent reachable, 4 partly applied,
            5 refused (not authenticated, stale), 130 interrupted, 143 terminated (SIGTERM)
"""

# Of a path that somebody named.
_PATH_FAULTS = {"ENOENT", "EACCES", "EPERM", "EISDIR", "ENOTDIR", "EROFS", "ENAMETOOLONG", "ELOOP"}
# Which extra brings a package that a command turns out to need.
_EXTRAS = {
    "grpc": "vault",
    "google": "vault",
    "pydantic": "vault",
    "blake3": "vault",
    "xxhash": "vault",
    "tomlkit": "vault",
    "numba": "agent",
    "zstandard": "agent",
    "textual": "tui",
    "rich": "tui",
    "mlx": "mlx",
    "mlx_lm": "mlx",
}


def build_parser() -> CommandParser:
    # Only once signals are taken care of: ctrl-c while these are imported is no traceback.
    from tierkv import __version__
    from tierkv.cli import (
        agent,
        bench,
        config,
        demo,
        events,
        exo,
        explain,
        mlx_lm,
        prefixes,
        purge,
        quality,
        record,
        status,
        token,
        tui,
        version,
    )
    from tierkv.cli.parser import CommandParser, Commands, common_options

    parser = CommandParser(
        prog="tierkv",
        description="Keeps the KV cache that an LLM engine evicts on other machines, and gives it back.",
        epilog=_EPILOG,
        parents=[common_options(default=None)],
    )
    parser.add_argument("--version", action="version", version=f"tierkv {__version__}")
    commands = Commands(parser.add_subparsers(title="commands", metavar="COMMAND", dest="command"))
    for module in (
        agent,
        mlx_lm,
        exo,
        status,
        explain,
        quality,
        events,
        prefixes,
        purge,
        token,
        config,
        bench,
        demo,
        tui,
        record,
        version,
    ):
        module.add(commands)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command and its options; what follows a lone ``--`` is ``rest`` and is not looked at here."""
    from tierkv.cli.parser import near_miss

    words, rest = list(argv), None
    if "--" in words:
        cut = words.index("--")
        words, rest = words[:cut], words[cut + 1 :]
    parser = build_parser()
    known, unknown = parser.parse_known_args(words)
    if unknown:
        if rest is None and getattr(known, "takes_rest", False):
            command = f"tierkv {known.command}"
            parser.error(
                f"{unknown[0]} is not for {command} itself; the rest follows --: {command} -- {unknown[0]} ..."
            )
        used: CommandParser = getattr(known, "parser", parser)
        used.error(f"unknown argument: {' '.join(unknown)}{near_miss(unknown[0], parser, used)}")
    if rest is not None and not getattr(known, "takes_rest", False):
        parser.error("nothing may follow -- here")
    known.rest = rest or []
    return known


def main(argv: Sequence[str] | None = None, *, begins: Callable[[], None] = lambda: None) -> int:
    """Runs one command and returns its exit code; ``begins`` is called when it is known what to run."""
    streams_that_can_be_written()
    if not _debugging():
        # What gRPC's core has to say on stderr is said by our own errors.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        code = _run(sys.argv[1:] if argv is None else argv, begins)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return EXIT_OK
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)
    except Exception as error:
        try:
            return _report(error)
        except BrokenPipeError:
            discard_output()
            return exit_code(error)
    return code


def _run(words: Sequence[str], begins: Callable[[], None]) -> int:
    if not words:
        build_parser().print_help(sys.stderr)
        return EXIT_USAGE
    try:
        arguments = parse(words)
    except SystemExit as left:  # help or usage: it has been printed
        return int(left.code or EXIT_OK)
    _check_home()
    begins()
    return int(arguments.run(arguments) or EXIT_OK)


def _check_home() -> None:
    """Raises UsageError where each command would stumble over it in words of its own."""
    home = os.environ.get("TIERKV_HOME")
    if home and os.path.exists(home) and not os.path.isdir(home):  # noqa: PTH110, PTH112 - pathlib is not imported yet
        raise UsageError(f"TIERKV_HOME={home} is a file; it must name a folder (an absent one is made)")


def _debugging() -> bool:
    return os.environ.get("TIERKV_DEBUG") == "1"


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    code = exit_code(interrupt)
    try:
        from tierkv.cli.output import warn

        warn("tierkv: " + ("interrupted" if code == EXIT_INTERRUPTED else "terminated"))
    except BrokenPipeError:
        discard_output()
    return code


def _report(error: Exception) -> int:
    import errno
    import re
    import traceback

    from tierkv.cli.output import warn

    if _debugging():
        traceback.print_exception(error)
        return exit_code(error)
    if isinstance(error, ImportError) and (extra := _EXTRAS.get((error.name or "").partition(".")[0])):
        error = MissingExtra((error.name or "").partition(".")[0], extra)
    if isinstance(error, TierKVError):
        warn(f"tierkv: {error}")
        return exit_code(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        discard_output()
        warn(f"tierkv: cannot write: {error.strerror}")
        return EXIT_FAILED
    path = getattr(error, "filename2", None) or getattr(error, "filename", None)
    if isinstance(error, OSError) and isinstance(path, str) and errno.errorcode.get(error.errno or 0) in _PATH_FAULTS:
        warn(f"tierkv: {path.removesuffix('.new')}: {error.strerror}")
        return EXIT_FAILED
    text = re.sub(r"\s+", " ", str(error))[:500]
    warn(f"tierkv: {type(error).__name__}: {text}" if text else f"tierkv: {type(error).__name__}")
    warn("this is a fault of TierKV; TIERKV_DEBUG=1 shows where")
    return EXIT_FAILED


def entry() -> NoReturn:
    leave_at_once_on_signals()
    end(main(begins=raise_on_signals))


if __name__ == "__main__":
    entry()
