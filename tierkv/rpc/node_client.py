"""Any agent as ``tierkv status``, ``tierkv events`` and the console read it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from tierkv.errors import Unreachable
from tierkv.rpc import telemetry_wire as wire
from tierkv.rpc.auth import Token
from tierkv.rpc.caller import Caller, next_message, parsed
from tierkv.rpc.channels import CONNECT_TIMEOUT_S
from tierkv.rpc.explain_wire import explanation_from_proto, line_from_proto
from tierkv.telemetry.explanation import Explanation, RequestLine
from tierkv.telemetry.snapshot import Event, NodeSnapshot
from tierkv.v1 import node_service_pb2 as pb

GET_TIMEOUT_S = 2.0
# The agent asks its vaults, and each may walk a large index.
EXPLAIN_TIMEOUT_S = 8.0
# A watched agent that is this late behind its interval has stopped: the connection's keepalive needs longer to say so.
LATE_S = 2.0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """``authenticated``: this agent takes our token, so purges and changes are possible. ``rtt_s`` is 0 in a watch.

    ``skew_s`` > 0: its clock is ahead of this machine's; 0 in a watch.
    """

    node: NodeSnapshot
    authenticated: bool
    rtt_s: float = 0.0
    skew_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events in order; ``dropped`` of those before the first were not kept."""

    events: tuple[Event, ...]
    dropped: int


class NodeClient(Caller):
    """Reads one agent. Owned by one event loop. Every method raises PeerError."""

    service = "tierkv.v1.NodeService"
    breaks = False

    def __init__(self, peer: str, token: Token | None = None, *, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        super().__init__(peer, token, connect_timeout_s)

    async def get_node(self, timeout_s: float = GET_TIMEOUT_S) -> NodeReport:
        """One snapshot, and how long the answer took once connected."""
        began = time.perf_counter()
        answer = await self._unary("GetNode", pb.GetNodeRequest(), pb.GetNodeResponse, timeout_s)
        rtt_s = self._link.rtt_s or time.perf_counter() - began
        node = wire.node_from_proto(answer.node)
        return NodeReport(node, answer.authenticated, rtt_s, node.now_unix_s - time.time())

    async def requests(self, limit: int = 0) -> list[RequestLine]:
        """The last requests of an inference agent's engines, the latest first; ``limit`` 0 means 50.

        Raises Refused where there are no engines.
        """
        request = pb.ListRequestsRequest(limit=limit)
        answer = await self._unary("ListRequests", request, pb.ListRequestsResponse, GET_TIMEOUT_S)
        return [line_from_proto(line) for line in answer.requests]

    async def explain(self, number: int = 0) -> Explanation:
        """Why the request of that number (0: the last) was answered as it was. Raises Refused when it is not known."""
        request = pb.ExplainRequest(id=number)
        return explanation_from_proto(await self._unary("Explain", request, pb.ExplainResponse, EXPLAIN_TIMEOUT_S))

    async def explain_prompt(self, tokens: Sequence[int], model: str = "") -> Explanation:
        """What would be found for a prompt now, for ``model`` or the model announced last. Raises Refused."""
        request = pb.ExplainRequest(tokens=tokens, model=model)
        return explanation_from_proto(await self._unary("Explain", request, pb.ExplainResponse, EXPLAIN_TIMEOUT_S))

    async def watch_snapshots(self, interval_s: float = 0.5) -> AsyncIterator[NodeReport]:
        """A snapshot at once and then every ``interval_s`` (0.1 to 60), until the agent goes: then PeerError."""
        request = pb.WatchSnapshotsRequest(interval_s=interval_s)
        async with self._link.attempt() as attempt:
            call = self._server_stream("WatchSnapshots", request)
            try:
                # Watchers tick together: the first gap may be half an interval longer.
                while data := await next_message(call, self.peer, 1.5 * interval_s + LATE_S, "no snapshot"):
                    self._link.alive(attempt)
                    answer = parsed(self.peer, pb.WatchSnapshotsResponse, data)
                    yield NodeReport(wire.node_from_proto(answer.node), answer.authenticated)
                raise Unreachable(self.peer, "the agent has stopped")
            finally:
                call.cancel()

    async def watch_events(self, after_id: int = 0, *, follow: bool = True) -> AsyncIterator[EventBatch]:
        """Kept events after ``after_id``, then, if ``follow``, new ones until the agent goes (PeerError)."""
        request = pb.WatchEventsRequest(after_id=after_id, no_follow=not follow)
        async with self._link.attempt() as attempt:
            call = self._server_stream("WatchEvents", request)
            try:
                limit_s = None if follow else GET_TIMEOUT_S
                while data := await next_message(call, self.peer, limit_s, "no events"):
                    self._link.alive(attempt)
                    answer = parsed(self.peer, pb.WatchEventsResponse, data)
                    yield EventBatch(tuple(wire.event_from_proto(item) for item in answer.events), answer.dropped)
                if follow:
                    raise Unreachable(self.peer, "the agent has stopped")
            finally:
                call.cancel()
