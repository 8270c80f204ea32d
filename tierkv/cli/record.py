"""``tierkv record``: what the agents say goes into a file, without a screen, for ``tierkv tui --replay``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.cli.context import add_connect, loaded, token_of
from tierkv.cli.output import plural, warn
from tierkv.cli.parser import Commands
from tierkv.cli.tui import addresses
from tierkv.errors import EXIT_OK, EXIT_UNREACHABLE, UsageError
from tierkv.tasks import ended
from tierkv.units import parse_duration, parse_size

if TYPE_CHECKING:
    from tierkv.telemetry.recording import Recorder, Step

_EXAMPLE = """\
  tierkv record night.ndjson                       until ctrl-c, the last 256 MiB
  tierkv record incident.ndjson --for 10min
  tierkv tui --replay incident.ndjson
"""
FLUSH_S = 1.0


def add(commands: Commands) -> None:
    parser = commands.add("record", _record, "write what the agents say to a file, to be replayed", example=_EXAMPLE)
    parser.add_argument("file", metavar="FILE", help="where to; what is there already becomes FILE.old")
    parser.add_argument("--for", dest="duration", metavar="TIME", default="", help="leave after so long: 10min, 2h")
    parser.add_argument("--keep", metavar="SIZE", default="256MiB", help="about so much is kept (default 256MiB)")
    add_connect(parser)


def _record(arguments: argparse.Namespace) -> int:
    configuration = loaded(arguments)
    try:
        seconds = parse_duration(arguments.duration) if arguments.duration else None
        keep = parse_size(arguments.keep)
    except ValueError as error:
        raise UsageError(f"--for, --keep: {error}") from None
    from tierkv.telemetry.recording import Recorder
    from tierkv.tui.feed import Target
    from tierkv.tui.incident import config_values, header
    from tierkv.tui.live import live_feed

    name = configuration.config.cluster.name
    named = addresses(configuration, arguments.connect)
    wanted = [Target(one) for one in named or ("127.0.0.1:50050", "127.0.0.1:50051", "127.0.0.1:50052")]
    about = header(name, config_values(configuration.path), [target.address for target in wanted])
    try:
        recorder = Recorder(Path(arguments.file), about, keep)
    except OSError as error:
        raise UsageError(f"{arguments.file}: {error.strerror}") from None
    counting = _Counting(recorder)
    feed = live_feed(wanted, lambda: token_of(configuration), cluster_name=name, tap=counting.add)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_listen(feed.run(), recorder, seconds))
    recorder.close()
    warn(f"{plural(counting.snapshots, 'snapshot')} and {plural(counting.events, 'event')} in {arguments.file}")
    return EXIT_OK if counting.snapshots else EXIT_UNREACHABLE


class _Counting:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.snapshots = self.events = 0

    def add(self, step: Step) -> None:
        self.snapshots += step.snapshot is not None
        self.events += len(step.events)
        self._recorder.add(step)


async def _listen(running: object, recorder: Recorder, seconds: float | None) -> None:
    async def flush() -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            recorder.flush()

    tasks = [asyncio.ensure_future(running), asyncio.create_task(flush())]  # type: ignore[arg-type]
    async with ended(tasks):
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
