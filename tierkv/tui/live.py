"""The feed over gRPC: what ``tierkv.rpc`` says, in the shape that the console listens to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from tierkv.rpc.auth import Token
from tierkv.rpc.node_client import NodeClient
from tierkv.telemetry.recording import Step
from tierkv.telemetry.snapshot import Event, NodeSnapshot
from tierkv.tui.feed import EVENTS_KEPT, LiveFeed, Target


class NodeSource:
    """One agent over one channel; made anew for every attempt, so that no state of a dead connection survives."""

    def __init__(self, address: str, token: Token | None) -> None:
        self._client = NodeClient(address, token)

    async def snapshots(self, interval_s: float) -> AsyncIterator[tuple[NodeSnapshot, bool]]:
        async for report in self._client.watch_snapshots(interval_s):
            yield report.node, report.authenticated

    async def events(self, after_id: int) -> AsyncIterator[tuple[Sequence[Event], int]]:
        async for batch in self._client.watch_events(after_id):
            yield batch.events, batch.dropped

    async def close(self) -> None:
        await self._client.close()


def live_feed(
    targets: Sequence[Target],
    token: Token | Callable[[], Token | None] | None,
    *,
    cluster_name: str = "",
    read_only: bool = False,
    events_kept: int = EVENTS_KEPT,
    tap: Callable[[Step], None] | None = None,
) -> LiveFeed:
    """A feed that listens to agents over gRPC with ``token``; one that is called is read anew for every connection."""
    return LiveFeed(
        targets,
        lambda address: NodeSource(address, token() if callable(token) else token),
        cluster_name=cluster_name,
        read_only=read_only,
        events_kept=events_kept,
        tap=tap,
    )
