"""``tierkv events``: what happened on every agent, in order of time; --follow goes on."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from tierkv.cli import ask, output, snapshot_json
from tierkv.cli.ask import Answer, ask_all, exit_code_of
from tierkv.cli.context import Target, add_connect, loaded, targets, token_of
from tierkv.cli.output import Style, clean, say, warn
from tierkv.cli.parser import Commands
from tierkv.errors import EXIT_OK, TierKVError, exit_code

if TYPE_CHECKING:
    from tierkv.rpc.auth import Token
    from tierkv.telemetry.snapshot import Event

_EXAMPLE = """\
  tierkv events                                  what the agents still remember
  tierkv events --follow --kind evict --kind purge
  tierkv events --json | jq -r 'select(.severity == "error") | .message'
"""
_SEVERITIES = ("debug", "info", "warning", "error")
_RETRY_S = (0.5, 1.0, 2.0, 5.0)


def add(commands: Commands) -> None:
    parser = commands.add(
        "events", _events, "what happened: demote, promote, evict, miss, purge, ...", example=_EXAMPLE
    )
    parser.add_argument("--follow", "-f", action="store_true", help="go on with new ones until interrupted")
    parser.add_argument("--json", action="store_true", help="NDJSON: one document a line")
    parser.add_argument("--kind", action="append", default=[], metavar="KIND", help="only this kind; several times")
    parser.add_argument("--severity", choices=_SEVERITIES, default="debug", help="this severity or worse")
    parser.add_argument("--last", type=int, default=0, metavar="N", help="only the newest N of those remembered")
    add_connect(parser)


def _events(arguments: argparse.Namespace) -> int:
    configuration = loaded(arguments)
    asked = targets(configuration, arguments.connect)
    show = _Printer(arguments)
    try:
        return asyncio.run(_run(asked, token_of(configuration), show, arguments.follow))
    except KeyboardInterrupt as left:
        if arguments.follow:  # there is no other end
            return exit_code(left)
        raise


class _Printer:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._json = arguments.json
        self._kinds = set(arguments.kind)
        self._least = _SEVERITIES.index(arguments.severity)
        self.last = arguments.last
        self._style = Style()

    def wants(self, event: Event) -> bool:
        rank = _SEVERITIES.index(event.severity) if event.severity in _SEVERITIES else len(_SEVERITIES)
        return (not self._kinds or event.kind in self._kinds) and rank >= self._least

    def show(self, event: Event, address: str) -> None:
        if self._json:
            output.line("events", **snapshot_json.event(event, address))
            return
        severity = event.severity
        paint = {"error": self._style.bad, "warning": self._style.notable}.get(severity, lambda text: text)
        when = (snapshot_json.time_of(event.time_unix_s) or "?")[:19].replace("T", " ")
        mark = "" if severity in ("debug", "info") else f"{severity.upper()}: "
        told = f"{clean(event.node, 20):<12} {clean(event.kind, 12):<8} "
        say(f"{self._style.dim(when)}  {told}{paint(mark + clean(event.message, 500))}")


async def _run(asked: list[Target], token: Token | None, printer: _Printer, follow: bool) -> int:
    async def kept(target: Target) -> list[Event]:
        return await _kept(target, token)

    answers = await ask_all(asked, kept, 2 * ask.STATUS_BOUND_S)
    for answer in answers:
        if answer.error is not None:
            warn(f"tierkv: {answer.target.address}: {clean(answer.reason)}")
    found = [(event, answer) for answer in answers for event in answer.value or () if printer.wants(event)]
    found.sort(key=lambda pair: (pair[0].time_unix_s, pair[0].id))
    for event, answer in found[-printer.last :] if printer.last > 0 else found:
        printer.show(event, answer.target.address)
    if not any(answer.error is None for answer in answers):
        return exit_code_of(answers)
    if not follow:
        return EXIT_OK
    async with asyncio.TaskGroup() as group:
        for answer in answers:
            group.create_task(_follow(answer, token, printer))
    return EXIT_OK


async def _kept(target: Target, token: Token | None) -> list[Event]:
    from tierkv.rpc.node_client import NodeClient

    client = NodeClient(target.address, token, connect_timeout_s=ask.CONNECT_S)
    events: list[Event] = []
    try:
        async for batch in client.watch_events(follow=False):
            events += batch.events
    finally:
        await client.close()
    return events


async def _follow(answer: Answer[list[Event]], token: Token | None, printer: _Printer) -> None:
    """Shows new events for ever; a lost agent is said once and asked again with growing pauses."""
    from tierkv.rpc.node_client import NodeClient

    target, attempt, lost = answer.target, 0, answer.error is not None
    seen = answer.value[-1].id if answer.value else 0
    while True:
        client = NodeClient(target.address, token, connect_timeout_s=ask.CONNECT_S)
        try:
            async for batch in client.watch_events(seen):
                if lost:
                    warn(f"tierkv: {target.address}: answers again")
                attempt, lost = 0, False
                if batch.dropped:
                    warn(f"tierkv: {target.address}: {batch.dropped:,} events were not kept")
                for event in batch.events:
                    seen = event.id
                    if printer.wants(event):
                        printer.show(event, target.address)
        except TierKVError as error:
            if not lost:
                warn(f"tierkv: {clean(str(error))}")
            lost = True
        finally:
            await client.close()
        await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
        attempt += 1
