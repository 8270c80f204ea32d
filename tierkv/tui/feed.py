"""What the console listens to: one worker an agent, reconnecting for ever, folded into one frozen view on demand.

The screen asks for ``view()`` at its own pace; however fast the agents talk, nothing here draws.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tierkv.errors import NotAuthenticated, WrongService
from tierkv.tasks import ended
from tierkv.telemetry.recording import Step
from tierkv.telemetry.snapshot import Event, NodeSnapshot
from tierkv.tui import record as steps
from tierkv.tui.model import ClusterView, EventLine, EventsView, cluster_view
from tierkv.tui.record import Phase, TargetRecord

INTERVAL_S = 0.5
SILENCE_S = 3.0
"""An open stream that says nothing for six intervals is given up: a frozen peer or a black hole keeps it open."""

BACKOFF_FIRST_S = 0.5
BACKOFF_LAST_S = 5.0
EVENTS_KEPT = 2000
TEXT_MAX = 1000
ATTRIBUTES_MAX = 32

_CAUSE = re.compile(r"^not reachable \(.*: ([^:()]+)\)$", re.DOTALL)
"""gRPC's long story about a connection; its last words are the operating system's, such as "Connection refused"."""


@dataclass(frozen=True, slots=True)
class Target:
    """``host:port`` of an agent; ``expected`` is False when nobody named it (a default address)."""

    address: str
    expected: bool = True


class Source(Protocol):
    """One agent, as the feed hears it. Both iterators end or raise when the connection does."""

    def snapshots(self, interval_s: float) -> AsyncIterator[tuple[NodeSnapshot, bool]]:
        """Snapshots, each with whether this console's token was accepted."""
        ...

    def events(self, after_id: int) -> AsyncIterator[tuple[Sequence[Event], int]]:
        """Batches of events after ``after_id``, each with how many were dropped before it."""
        ...

    async def close(self) -> None: ...


class Feed(Protocol):
    """Live agents, a recording or a fixed view: whatever screens may be opened on."""

    async def run(self) -> None:
        """Listens until it is cancelled."""
        ...

    def view(self) -> ClusterView: ...


class EventLog:
    """The newest ``kept`` events of all agents, numbered in the order they are shown."""

    def __init__(self, kept: int = EVENTS_KEPT) -> None:
        self._lines: deque[EventLine] = deque(maxlen=kept)
        self._waiting: deque[Event] = deque(maxlen=kept)
        self._next = 1
        self._dropped = 0
        self._forgotten = 0
        self._view = EventsView()

    def add(self, events: Sequence[Event], dropped: int = 0) -> None:
        """The events wait for the next ``view``; more than ``kept`` of them are dropped and counted."""
        self._dropped += dropped + max(0, len(self._waiting) + len(events) - (self._waiting.maxlen or 0))
        self._waiting.extend(_bounded(event) for event in events)
        if dropped:
            self._view = replace(self._view, dropped=self._dropped)

    def view(self) -> EventsView:
        """All kept events; what came since the last call is put in order of time first."""
        if self._waiting:
            for event in sorted(self._waiting, key=lambda event: event.time_unix_s):
                self._forgotten += len(self._lines) == self._lines.maxlen
                self._lines.append(EventLine(self._next, event))
                self._next += 1
            self._waiting.clear()
            self._view = EventsView(tuple(self._lines), self._dropped, self._forgotten)
        return self._view


class LiveFeed:
    """Listens to ``targets`` through sources that ``connect`` makes. Owned by one event loop.

    ``tap`` is told every step: what a recording is made of.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        connect: Callable[[str], Source],
        *,
        cluster_name: str = "",
        read_only: bool = False,
        events_kept: int = EVENTS_KEPT,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
        tap: Callable[[Step], None] | None = None,
    ) -> None:
        self._targets = tuple({target.address: target for target in targets}.values())
        self._connect = connect
        self.cluster_name, self.read_only = cluster_name, read_only
        self._clock, self._wall_clock, self._jitter = clock, wall_clock, jitter
        self._records = {t.address: TargetRecord(t.address, expected=t.expected) for t in self._targets}
        self._tap = tap or (lambda _: None)
        self._heard: dict[str, tuple[str, int]] = {}
        self.log = EventLog(events_kept)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for target in self._targets:
                group.create_task(self._follow(target.address), name=f"follow {target.address}")

    def view(self) -> ClusterView:
        return cluster_view(
            tuple(self._records.values()),
            now_s=self._clock(),
            now_unix_s=self._wall_clock(),
            name=self.cluster_name,
            read_only=self.read_only,
            events=self.log.view(),
        )

    async def _follow(self, target: str) -> None:
        wait_s = BACKOFF_FIRST_S
        while True:
            self._records[target] = steps.connecting(self._records[target])
            error, phase = await self._listen(target)
            if self._records[target].attempts == 0:
                wait_s = BACKOFF_FIRST_S
            self._ended(target, error, phase)
            await asyncio.sleep(wait_s * (0.75 + 0.25 * self._jitter()))
            wait_s = min(BACKOFF_LAST_S, wait_s * 2)

    async def _listen(self, target: str) -> tuple[str, Phase | None]:
        """Why the connection ended; an agent that cannot be followed must never end the console."""
        source: Source | None = None
        try:
            source = self._connect(target)
            first = asyncio.Event()
            snapshots = asyncio.create_task(self._take_snapshots(target, source, first))
            events = asyncio.create_task(self._take_events(target, source, first))
            async with ended((snapshots, events)):
                done, _ = await asyncio.wait((snapshots, events), return_when=asyncio.FIRST_COMPLETED)
                await (snapshots if snapshots in done else events)  # raises why it ended
        except Exception as caught:
            return _said(caught), _phase(caught)
        finally:
            if source is not None:
                await _closed(source)
        return "closed", None

    async def _take_snapshots(self, target: str, source: Source, first: asyncio.Event) -> None:
        stream = source.snapshots(INTERVAL_S)
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    snapshot, authenticated = await anext(stream)
            except TimeoutError:
                raise TimeoutError(f"silent for {SILENCE_S:.0f} s") from None
            except StopAsyncIteration:
                raise ConnectionError("the agent closed the connection") from None
            self._observe(target, snapshot, authenticated)
            first.set()

    def _observe(self, target: str, snapshot: NodeSnapshot, authenticated: bool) -> None:
        before = self._records[target]
        now_s = self._clock()
        after = steps.observed(before, snapshot, authenticated, now_s, self._wall_clock())
        self._records[target] = after
        self._tap(Step(self._wall_clock(), target, snapshot, authenticated))
        if before.last is None:
            return
        if after.restarts > before.restarts:
            self._note(target, snapshot.name, "info", f"restarted, now process {snapshot.pid}")
        elif before.phase == "lost":
            self._note(target, snapshot.name, "info", f"back after {now_s - before.last.received_s:.0f} s")

    async def _take_events(self, target: str, source: Source, first: asyncio.Event) -> None:
        """Follows the events from where the last connection to the same run of the agent stopped."""
        await first.wait()
        last = self._records[target].last
        run = last.snapshot.node_id if last else ""
        known_run, after_id = self._heard.get(target, ("", 0))
        async for events, dropped in source.events(after_id if known_run == run else 0):
            self.log.add(events, dropped)
            self._tap(Step(self._wall_clock(), target, events=tuple(events), dropped=dropped))
            if events:
                self._heard[target] = (run, events[-1].id)
        raise ConnectionError("the agent closed the connection")

    def _ended(self, target: str, error: str, phase: Phase | None) -> None:
        before = self._records[target]
        self._records[target] = steps.failed(before, error, self._clock(), phase)
        if before.phase == "live" or phase != before.phase:
            self._tap(Step(self._wall_clock(), target, ended=error, phase=phase or ""))
        if before.phase == "live" and before.last:
            self._note(target, before.last.snapshot.name, "warning", f"lost: {error}")

    def _note(self, target: str, node: str, severity: str, message: str) -> None:
        """An event of the console's own, about a connection."""
        note = Event(0, self._wall_clock(), "link", severity, node, message)
        self.log.add([note])
        self._tap(Step(self._wall_clock(), target, events=(note,)))


class FixedFeed:
    """One view that never changes: for pictures and tests."""

    def __init__(self, shown: ClusterView) -> None:
        self._shown = shown

    async def run(self) -> None:
        return

    def view(self) -> ClusterView:
        return self._shown


async def _closed(source: Source) -> None:
    try:
        async with asyncio.timeout(1.0):
            await source.close()
    except Exception:
        return


def _phase(error: Exception) -> Phase | None:
    if isinstance(error, NotAuthenticated):
        return "refused"
    return "foreign" if isinstance(error, WrongService) else None


def _said(error: Exception) -> str:
    """The error in a few words, without the address that stands beside it anyway."""
    text = str(error).removeprefix(f"{getattr(error, 'peer', '')}: ") or type(error).__name__
    cause = _CAUSE.search(text)
    return cause[1].lower() if cause else text.splitlines()[0][:200]


def _bounded(event: Event) -> Event:
    """The event with text of a length that 2,000 of them may have; agents send short ones."""
    if len(event.message) <= TEXT_MAX and len(event.attributes) <= ATTRIBUTES_MAX:
        return event
    attributes = dict(itertools.islice(event.attributes.items(), ATTRIBUTES_MAX))
    return replace(event, message=event.message[:TEXT_MAX], attributes=attributes)
