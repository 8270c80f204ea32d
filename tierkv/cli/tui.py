"""``tierkv tui``: the live console."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.cli.context import add_connect, loaded, targets, token_of
from tierkv.cli.output import say, width
from tierkv.cli.parser import Commands
from tierkv.errors import EXIT_OK, EXIT_UNREACHABLE

if TYPE_CHECKING:
    from tierkv.config import Loaded

_EXAMPLE = """\
  tierkv tui                                 the agents that tierkv.toml names, else this machine's
  tierkv tui --connect nas.local:50051 --read-only
  tierkv tui --record night.ndjson
  tierkv tui --replay night.ndjson
"""


def add(commands: Commands) -> None:
    parser = commands.add("tui", _tui, "the live console: nodes, prefixes, events, configuration", example=_EXAMPLE)
    parser.add_argument("--read-only", action="store_true", help="actions that change something are off")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--record", metavar="FILE", help="write everything that is heard to this file as well")
    files.add_argument("--replay", metavar="FILE", help="show a recording or an incident bundle; [ ] seek, + - speed")
    add_connect(parser)
    top = commands.add(
        "top",
        _top,
        "the console's first screen; with --once as text, for scripts and tickets",
        example="  tierkv top --once\n  watch -n 2 tierkv top --once",
    )
    top.add_argument("--once", action="store_true", help="print it once, as wide as the terminal, and leave")
    top.set_defaults(read_only=False, record=None, replay=None)
    add_connect(top)


def _tui(arguments: argparse.Namespace) -> int:
    configuration = loaded(arguments)
    console = configuration.config.console
    from tierkv.tui.app import run

    trust_the_terminal()
    return run(
        addresses(configuration, arguments.connect),
        lambda: token_of(configuration),
        configuration.config.cluster.name,
        arguments.read_only or console.read_only,
        refresh_hz=console.refresh_hz,
        theme=console.theme or "auto",
        config_path=configuration.path,
        record=Path(arguments.record) if arguments.record else None,
        replay=Path(arguments.replay) if arguments.replay else None,
    )


def addresses(configuration: Loaded, connect: list[str]) -> list[str]:
    """The agents that were named; none when nobody named any, so that this machine's are looked for."""
    named = configuration.path is not None or connect or configuration.config.console.connect
    return [target.address for target in targets(configuration, connect)] if named else []


def trust_the_terminal() -> None:
    """Where the terminal tells its size, COLUMNS and LINES of a shell that exported them count for nothing: they would
    hold for ever, whatever the window is resized to."""
    with contextlib.suppress(OSError, ValueError):
        if all(os.get_terminal_size(sys.stdout.fileno())):
            os.environ.pop("COLUMNS", None)
            os.environ.pop("LINES", None)


def _top(arguments: argparse.Namespace) -> int:
    if not arguments.once:
        return _tui(arguments)
    configuration = loaded(arguments)
    from tierkv.tui.once import listen, page

    name = configuration.config.cluster.name
    view = asyncio.run(listen(addresses(configuration, arguments.connect), token_of(configuration), name))
    for line in page(view, width()):
        say(line)
    return EXIT_OK if view.up else EXIT_UNREACHABLE
