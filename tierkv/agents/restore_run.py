"""One restore on its way: records come on concurrent streams and are decoded into the hook's arena while they come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, cast

from tierkv.agents.break_even import PrefillSeconds, Rates
from tierkv.agents.decode import Frame, ParsedRecord, batches, decode_into, parse_record
from tierkv.agents.fetch import Fetcher, Flight, Stream
from tierkv.agents.layouts import Layouts, signature_json
from tierkv.agents.lookup import Candidate, Mark, Needs, Plan
from tierkv.agents.reasons import RecordMissing
from tierkv.errors import BadFrame, HandoffError, PeerError, TierKVError
from tierkv.handoff.server import Connection
from tierkv.identity.blocks import PromptChain
from tierkv.state.layout import Layout
from tierkv.tasks import ended

# One decoding job and one message to the hook for at most this much.
REGION_BYTES = 32 << 20
# The agent stops a little before the hook does, so that what has come by then is used; and rows that a checkpoint
# belongs to a little before that, so that one that they do reach can still be brought.
BUDGET_FRACTION = 0.9
ROWS_FRACTION = 0.8
# A link whose rate nobody knows shows it within this; then, and every so often, the rest is expected anew.
FIRST_LOOK_S = 0.1
LOOK_EVERY_S = 0.05
# So long, as a fraction of computing, is the first byte waited for.
SILENT_FRACTION = 0.25
NOT_WORTH_IT = "not_worth_it"


def _unknown(start: int, end: int) -> float:  # noqa: ARG001
    return 0.0


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """``expected``: the signature of a fresh cache as canonical JSON, "" if the engine does not know it.

    ``chain`` is the prompt up to ``limit``; ``rows_from`` <= ``have`` <= ``limit``. ``prefill``: what computing would
    take. ``above``: positions up to it are of no use. ``more``: the same prompt comes in another form if this one gives
    nothing.
    """

    id: int
    model: str
    chain: PromptChain
    have: int
    rows_from: int
    limit: int
    expected: str
    budget_s: float
    prefill: PrefillSeconds = _unknown
    above: int = 0
    more: bool = False

    @property
    def floor(self) -> int:
        """Only positions beyond it count."""
        return max(self.have, self.above)


@dataclass(slots=True)
class RestoreOutcome:
    """``position`` 0: nothing was restored, for ``reason``."""

    position: int = 0
    reason: str = ""
    fidelity: int = 0
    codecs: set[str] = field(default_factory=set[str])
    bytes_by_tier: dict[str, int] = field(default_factory=dict[str, int])
    scalars: dict[str, Any] = field(default_factory=dict[str, Any])
    used: list[tuple[Candidate, int]] = field(default_factory=list[tuple[Candidate, int]])
    failures: list[tuple[Candidate, str, str]] = field(default_factory=list[tuple[Candidate, str, str]])
    seconds: float = 0.0

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_tier.values())

    @property
    def codec(self) -> str:
        return "+".join(sorted(self.codecs))

    def count(self, candidate: Candidate, parsed: ParsedRecord, size_bytes: int) -> None:
        tier = candidate.found.kind.tier
        self.bytes_by_tier[tier] = self.bytes_by_tier.get(tier, 0) + size_bytes
        self.fidelity = max(self.fidelity, parsed.header.fidelity)
        self.codecs.update(parsed.header.codec.split("+") if parsed.header.codec else ())
        self.used.append((candidate, size_bytes))


class LayoutSurprise(Exception):
    """The first record shows a layout that the plan was not made for; it is known now, so look again."""


class HookGone(TierKVError):
    """The engine's end of the connection is closed; nothing of this restore is wanted any more."""


# The hook freed no regions, or did not read, until the time was over.
HOOK_SLOW = "hook_slow"
# What one record can end with; anything else is a fault of the agent.
_FAILURES = (TierKVError, RecordMissing, TimeoutError)


@dataclass(frozen=True, slots=True)
class RestoreParts:
    """What every restore of an agent uses. ``failed`` counts a record that did not come whole, and names the reason.

    ``weighs``: whether a restore that turns out slower than computing is given up.
    """

    fetcher: Fetcher
    layouts: Layouts
    pool: Executor
    workers: int
    failed: Callable[[Candidate, BaseException], str]
    rates: Rates
    weighs: Callable[[], bool]


class RestoreRun:
    """Regions, flights and tasks are given back whatever ends it. ``run`` is called once.

    Plan and pieces are sent here; the answer that closes the restore is the caller's.
    """

    def __init__(
        self, parts: RestoreParts, request: RestoreRequest, connection: Connection, plan: Plan, began_s: float
    ) -> None:
        self._parts = parts
        self._request = request
        self._connection = connection
        self._plan = plan
        self._deadline_s = began_s + request.budget_s * BUDGET_FRACTION
        self._rows_deadline_s = began_s + request.budget_s * (ROWS_FRACTION if plan.marks else BUDGET_FRACTION)
        self._rows_end = 0
        self._given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._layout = parts.layouts.get(plan.digest)
        self._planning = asyncio.Lock()
        self._planned = False
        self._waits_for_hook = 0
        self._outcome = RestoreOutcome()
        self._slots = asyncio.Semaphore(parts.workers + 1)
        self._limit = min(REGION_BYTES, connection.arena.size_bytes // 4)
        self._flying: list[Flight] = []

    async def run(self) -> RestoreOutcome:
        """Raises LayoutSurprise before anything was sent, HandoffError or HookGone when the hook is gone."""
        wanted = [*self._plan.rows, *self._plan.checkpoints()]
        flights = self._take_off(wanted)
        n_rows = len(self._plan.rows)
        sizes = {flight: each.found.size_bytes for flight, each in zip(flights, wanted, strict=True)}
        pace = asyncio.create_task(self._watch_pace(sizes))
        try:
            rows_end, mark = await _both(self._rows(flights[:n_rows]), self._marks(flights[n_rows:]))
            mark = await self._reached_mark(rows_end, mark)
        finally:
            pace.cancel()
            for flight in self._flying:
                flight.leave()
        outcome = self._outcome
        outcome.position = self._position(rows_end, mark)
        if not outcome.position:
            outcome.reason = outcome.reason or "failed"
        return outcome

    def _position(self, rows_end: int, mark: Mark | None) -> int:
        """Where the restored state stands, 0 when too little of it came."""
        if self._plan.marks:
            return mark.position if mark is not None and rows_end >= mark.position else 0
        position = self._request.chain.clamp(min(rows_end, self._plan.position))
        return position if position > self._request.floor else 0

    def _take_off(self, candidates: Sequence[Candidate]) -> list[Flight]:
        """One stream for each source of each tier, all at once."""
        by_source: dict[tuple[str, str], list[Candidate]] = {}
        for each in candidates:
            by_source.setdefault((each.source.peer, each.found.kind.tier), []).append(each)
        flights: dict[bytes, Flight] = {}
        for group in by_source.values():
            keys = [each.found.key for each in group]
            flights.update(zip(keys, self._parts.fetcher.want(group[0].source, keys), strict=True))
        found = [flights[each.found.key] for each in candidates]
        self._flying += found
        return found

    def _land(self, flight: Flight) -> None:
        if flight in self._flying:
            self._flying.remove(flight)
            flight.leave()

    # --- rows and checkpoints -----------------------------------------------------------------------

    async def _rows(self, flights: Sequence[Flight]) -> int:
        """How far the rows reach without a gap."""
        if not self._plan.needs.rows:
            return self._plan.position
        reached = min(self._request.rows_from, self._plan.position)
        jobs = zip(self._plan.rows, flights, strict=True)
        tasks = [asyncio.create_task(self._deliver(candidate, flight)) for candidate, flight in jobs]
        async with ended(tasks):
            for candidate, task in zip(self._plan.rows, tasks, strict=True):
                if not await self._came(task, candidate, self._rows_deadline_s):
                    break  # later rows are useless without this one
                reached = candidate.found.start + candidate.found.agreeing
                self._rows_end = reached
        return reached

    async def _marks(self, flights: Sequence[Flight]) -> Mark | None:
        """The furthest checkpoint that came whole."""
        for number, mark in enumerate(self._plan.marks):
            if self._given_up.done():
                break
            if number:
                flights = self._take_off(mark.candidates())
            if await self._mark_came(mark, flights):
                return mark
        return None

    async def _mark_came(self, mark: Mark, flights: Sequence[Flight]) -> bool:
        candidates = mark.candidates()
        jobs = zip(candidates, flights, strict=True)
        tasks = [asyncio.create_task(self._deliver(candidate, flight)) for candidate, flight in jobs]
        async with ended(tasks):
            came = [
                await self._came(task, each, self._deadline_s) for each, task in zip(candidates, tasks, strict=True)
            ]
        return all(came)

    async def _reached_mark(self, rows_end: int, mark: Mark | None) -> Mark | None:
        """The checkpoint, or the furthest earlier one that the rows that came do reach, brought while there is time."""
        if mark is None or rows_end >= mark.position or self._given_up.done():
            return mark
        earlier = next((each for each in self._plan.marks if each.position <= rows_end), None)
        if earlier is None or not await self._mark_came(earlier, self._take_off(earlier.candidates())):
            return None
        return earlier

    async def _came(self, task: asyncio.Task[None], candidate: Candidate, deadline_s: float) -> bool:
        left_s = max(0.001, deadline_s - time.monotonic())
        done, _ = await asyncio.wait({task, self._given_up}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if task not in done and self._given_up.done():
            self._outcome.reason = self._given_up.result()
            return False
        error = task.exception() if task in done else TimeoutError()
        if error is None:
            return True
        if isinstance(error, HookGone | LayoutSurprise) or not isinstance(error, _FAILURES):
            raise error
        # A record that came, and that the hook makes no room for, is no fault of its vault.
        slow_hook = task not in done and self._waits_for_hook
        self._outcome.reason = HOOK_SLOW if slow_hook else self._parts.failed(candidate, error)
        problem = str(error) if isinstance(error, PeerError) and not slow_hook else ""
        self._outcome.failures.append((candidate, self._outcome.reason, problem))
        return False

    # --- pace ---------------------------------------------------------------------------------------

    async def _watch_pace(self, sizes: Mapping[Flight, int]) -> None:
        """What is still missing is given up when, at the pace so far, computing it would be quicker."""
        plan, have = self._plan, self._request.have
        whole_s = self._request.prefill(have, plan.position)
        if not whole_s or not self._parts.weighs():
            return
        patience_s = max(2 * FIRST_LOOK_S, SILENT_FRACTION * whole_s)
        await asyncio.sleep(FIRST_LOOK_S)
        while not self._given_up.done():
            # Of a restore with a checkpoint nothing counts before all of it is there.
            reached = have if plan.marks else min(max(have, self._rows_end), plan.position)
            if _left_s(sizes, patience_s) > self._request.prefill(reached, plan.position):
                self._given_up.set_result(NOT_WORTH_IT)
            await asyncio.sleep(LOOK_EVERY_S)

    # --- one record ---------------------------------------------------------------------------------

    async def _deliver(self, candidate: Candidate, flight: Flight) -> None:
        """The record is in the hook's hands. Raises what is wrong with it."""
        data = await flight.record()
        async with self._slots:
            parsed = parse_record(data, candidate, self._request.chain, self._layout)
            await self._plan_once(parsed.layout)
            scalars = _scalars(parsed)
            for frames, size in batches(parsed.frames, self._limit):
                await self._piece(frames, size, parsed.layout)
        self._outcome.scalars.update(scalars)
        self._outcome.count(candidate, parsed, len(data))
        self._land(flight)

    async def _plan_once(self, layout: Layout) -> None:
        """The hook knows the plan before the first piece; the first record may be what tells the layout."""
        async with self._planning:
            if self._planned:
                return
            self._layout = self._parts.layouts.learn(layout)
            other_kinds = Needs.of(layout) != self._plan.needs
            if other_kinds or (self._request.expected and signature_json(layout) != self._request.expected):
                raise LayoutSurprise
            first_row = min(self._request.rows_from, self._plan.position)
            body = {"id": self._request.id, "position": self._plan.position, "first_row": first_row}
            await self._send("plan", body, layout.to_json())
            self._planned = True

    async def _piece(self, frames: Sequence[Frame], size: int, layout: Layout) -> None:
        connection = self._connection
        if size > connection.arena.size_bytes:
            raise BadFrame("array_over_arena", f"an array of {size} bytes does not fit the hand-off's memory")
        self._waits_for_hook += 1
        try:
            offset = await connection.allocate(size)
        finally:
            self._waits_for_hook -= 1
        region = connection.region(offset, size)
        began_s = time.perf_counter()
        job = asyncio.get_running_loop().run_in_executor(self._parts.pool, decode_into, frames, region, layout)
        try:
            segments = await asyncio.shield(job)
        except asyncio.CancelledError:
            # The thread may still write into the region: it goes back after that.
            job.add_done_callback(lambda done: (connection.release(offset), done.cancelled() or done.exception()))
            raise
        except BaseException:
            connection.release(offset)
            raise
        self._parts.rates.decoded(size, time.perf_counter() - began_s)
        await self._send("piece", {"id": self._request.id, "offset": offset, "bytes": size, "segments": segments})

    async def _send(self, op: str, body: Mapping[str, object], blob: bytes = b"") -> None:
        self._waits_for_hook += 1
        try:
            await self._connection.send(op, body, blob)
        except HandoffError as error:
            raise HookGone(str(error)) from error
        finally:
            self._waits_for_hook -= 1


def _left_s(sizes: Mapping[Flight, int], patience_s: float) -> float:
    """How long, at the pace so far, the slowest stream needs for what has not come yet."""
    missing: dict[Stream, int] = {}
    for flight, size_bytes in sizes.items():
        if not flight.is_over:
            missing[flight.stream] = missing.get(flight.stream, 0) + size_bytes
    return max((stream.left_s(n_bytes, patience_s) for stream, n_bytes in missing.items()), default=0.0)


def _scalars(parsed: ParsedRecord) -> dict[str, Any]:
    if not parsed.header.scalars:
        return {}
    try:
        values = json.loads(parsed.header.scalars)
    except (ValueError, RecursionError) as error:
        raise BadFrame("bad_scalars", "a checkpoint's small values cannot be read") from error
    if not isinstance(values, dict) or len(parsed.header.scalars) > 1 << 18:
        raise BadFrame("bad_scalars", "a checkpoint's small values are not a small object")
    return cast("dict[str, Any]", values)


async def _both(rows: Coroutine[Any, Any, int], marks: Coroutine[Any, Any, Mark | None]) -> tuple[int, Mark | None]:
    """Both at once; the first that raises ends the other."""
    first, second = asyncio.create_task(rows), asyncio.create_task(marks)
    async with ended([first, second]):
        await asyncio.wait([first, second], return_when=asyncio.FIRST_EXCEPTION)
        for task in (first, second):
            if task.done() and task.exception() is not None:
                await task
        return await first, await second
