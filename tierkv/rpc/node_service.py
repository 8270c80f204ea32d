"""``NodeService``, served by every agent: snapshots, events, configuration, explanations.

Fifty watchers share each snapshot.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import grpc

from tierkv.errors import Refused
from tierkv.rpc import telemetry_wire as wire
from tierkv.rpc.auth import TokenGate
from tierkv.rpc.config_port import ConfigPort
from tierkv.rpc.config_service import ConfigMethods
from tierkv.rpc.explain_wire import ExplainMethods, ExplainPort
from tierkv.rpc.serving import Context, server_stream, unary, write_in_time
from tierkv.telemetry.node import NodeTelemetry
from tierkv.v1 import node_service_pb2 as pb
from tierkv.v1 import telemetry_pb2

SERVICE = "tierkv.v1.NodeService"
DEFAULT_INTERVAL_S = 0.5
SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 0.1, 60.0
# Watchers tick together, so that those of one interval are served by one snapshot.
SNAPSHOT_AGE_S = 0.05
EVENTS_A_MESSAGE = 200
# Events come in bursts: a watcher waits a little after the first, and sends them together.
EVENT_PAUSE_S = 0.1
MAX_WATCHERS = 512
WRITE_TIMEOUT_S = 30.0


def bounded_interval_s(asked: float) -> float:
    if not math.isfinite(asked) or asked <= 0:
        return DEFAULT_INTERVAL_S
    return min(max(asked, SHORTEST_INTERVAL_S), LONGEST_INTERVAL_S)


def until_tick_s(interval_s: float, now_s: float) -> float:
    """Until the next common tick that is at least half an interval away."""
    left_s = interval_s - now_s % interval_s
    return left_s if left_s >= interval_s / 2 else left_s + interval_s


class NodeServicer:
    """Owned by the agent's event loop. ``stopping`` ends every watch."""

    def __init__(
        self,
        telemetry: NodeTelemetry,
        gate: TokenGate,
        configuration: ConfigPort | None = None,
        explainer: ExplainPort | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._gate = gate
        self._stopping = asyncio.Event()
        self._config = ConfigMethods(configuration, self._first_of, self._stopping.is_set)
        self._explain = ExplainMethods(explainer)
        self._watchers = 0
        self._taken_s = -math.inf
        self._snapshot = telemetry_pb2.NodeSnapshot()
        self._answers: dict[bool, bytes] = {}

    def register(self, server: grpc.aio.Server) -> None:
        handlers = {
            "GetNode": unary(pb.GetNodeRequest, self._get_node),
            "WatchSnapshots": server_stream(pb.WatchSnapshotsRequest, self._watch_snapshots),
            "WatchEvents": server_stream(pb.WatchEventsRequest, self._watch_events),
            **self._config.handlers(),
            **self._explain.handlers(),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def stop(self) -> None:
        """Watches end now."""
        self._stopping.set()

    async def _get_node(self, _: pb.GetNodeRequest, context: Context) -> pb.GetNodeResponse:
        self._refresh()
        return pb.GetNodeResponse(node=self._snapshot, authenticated=self._authenticated(context))

    async def _watch_snapshots(self, request: pb.WatchSnapshotsRequest, context: Context) -> None:
        interval_s = bounded_interval_s(request.interval_s)
        authenticated = self._authenticated(context)
        with self._watching():
            while not self._stopping.is_set():
                await write_in_time(context, self._answer(authenticated), WRITE_TIMEOUT_S)
                await self._pause(until_tick_s(interval_s, time.monotonic()))

    async def _watch_events(self, request: pb.WatchEventsRequest, context: Context) -> None:
        loop = asyncio.get_running_loop()
        fresh = asyncio.Event()
        unsubscribe = self._telemetry.events.subscribe(_waker(loop, fresh))
        try:
            with self._watching():
                after_id = request.after_id
                while not self._stopping.is_set():
                    fresh.clear()
                    after_id, sent = await self._send_events(context, after_id)
                    if not sent and request.no_follow:
                        return
                    if not sent:
                        await self._first_of(fresh)
                        await self._pause(EVENT_PAUSE_S)
        finally:
            unsubscribe()

    async def _send_events(self, context: Context, after_id: int) -> tuple[int, bool]:
        events, dropped = self._telemetry.events.after(after_id, EVENTS_A_MESSAGE)
        if not events:
            return min(after_id, self._telemetry.events.last_id), False
        message = pb.WatchEventsResponse(events=[wire.event_to_proto(event) for event in events], dropped=dropped)
        await write_in_time(context, message.SerializeToString(), WRITE_TIMEOUT_S)
        return events[-1].id, True

    # --- shared snapshots ----------------------------------------------------------------------

    def _refresh(self) -> None:
        now_s = time.monotonic()
        if now_s - self._taken_s > SNAPSHOT_AGE_S:
            self._snapshot = wire.node_to_proto(self._telemetry.snapshot())
            self._taken_s = now_s
            self._answers.clear()

    def _answer(self, authenticated: bool) -> bytes:
        self._refresh()
        if authenticated not in self._answers:
            message = pb.WatchSnapshotsResponse(node=self._snapshot, authenticated=authenticated)
            self._answers[authenticated] = message.SerializeToString()
        return self._answers[authenticated]

    # --- small things --------------------------------------------------------------------------

    def _authenticated(self, context: Context) -> bool:
        return self._gate.holds_token(context.invocation_metadata() or ())  # pyright: ignore[reportArgumentType]

    def _watching(self) -> _Counted:
        if self._watchers >= MAX_WATCHERS:
            raise Refused(f"{MAX_WATCHERS} watchers are connected already")
        return _Counted(self)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _first_of(self, fresh: asyncio.Event) -> None:
        """Waits until there is something new or the agent stops."""
        waiters = [asyncio.create_task(fresh.wait()), asyncio.create_task(self._stopping.wait())]
        try:
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
            await asyncio.gather(*waiters, return_exceptions=True)


class _Counted:
    """One watcher, counted while the block runs."""

    def __init__(self, servicer: NodeServicer) -> None:
        self._servicer = servicer

    def __enter__(self) -> None:
        self._servicer._watchers += 1

    def __exit__(self, *exc: object) -> None:
        self._servicer._watchers -= 1


def _waker(loop: asyncio.AbstractEventLoop, fresh: asyncio.Event) -> Callable[[], None]:
    def wake() -> None:
        # An event may be emitted by any thread, and by one that outlives the loop.
        if not loop.is_closed():
            loop.call_soon_threadsafe(fresh.set)

    return wake
