"""Snapshots of a small cluster, whose numbers the tests work out by hand."""

from __future__ import annotations

from dataclasses import replace

from tierkv.telemetry.histogram import HistogramSnapshot, bucket_of
from tierkv.telemetry.snapshot import (
    EngineSnapshot,
    Event,
    LinkSnapshot,
    MemorySnapshot,
    NodeSnapshot,
    TierSnapshot,
    Window,
)
from tierkv.tui.app import Console
from tierkv.tui.model import ClusterView, EventLine, EventsView, cluster_view
from tierkv.tui.record import TargetRecord, failed, observed

GIB = 1 << 30
MIB = 1 << 20
START_UNIX_S = 1_777_793_000.0


def histogram(*seconds: float) -> HistogramSnapshot:
    counts: dict[int, int] = {}
    for value in seconds:
        counts[bucket_of(value)] = counts.get(bucket_of(value), 0) + 1
    return HistogramSnapshot(counts, sum(seconds))


def tier(name: str, **values) -> TierSnapshot:
    return TierSnapshot(name, **values)


def inference(now: float = 0.0, **values) -> NodeSnapshot:
    """mini: 40 of 100 GiB used, mark 60 %; 8 of 10 lookups of the minute hit in the cold KV tier."""
    base = NodeSnapshot(
        node_id="run-mini",
        name="mini",
        role="inference",
        version="0.1.0",
        address="127.0.0.1:50050",
        pid=100,
        started_unix_s=START_UNIX_S - 3600,
        now_unix_s=START_UNIX_S + now,
        sequence=int(now * 2),
        memory=MemorySnapshot(100 * GIB, 40 * GIB, GIB, 0.60),
        tiers=(
            tier(
                "hot",
                size_bytes=3 * GIB,
                cap_bytes=8 * GIB,
                records=12,
                windows=(Window(60, 30, 10), Window(600, 100, 100)),
            ),
            tier(
                "kv",
                hits=8,
                misses=2,
                miss_reasons={"never_stored": 2},
                promote_s=histogram(*[0.010] * 98, 0.2, 0.2),
                windows=(Window(60, 8, 2), Window(600, 80, 20)),
            ),
        ),
        links=(LinkSnapshot("127.0.0.1:50051", "kv", "up", 0.0003, 900 * MIB, 100 * MIB),),
        engines=(EngineSnapshot("mlx-lm", "mlx-lm 0.32.2", "models/SmolLM2-135M", "ab12", True, 12_345, 41.0),),
        activity="promoting 3 prefixes",
    )
    return replace(base, **values)


def vault(now: float = 0.0, *, kind: str = "kv", name: str = "nas", **values) -> NodeSnapshot:
    """nas: 1 of 4 GiB of cold KV; bytes_in grows by 10 MiB a second."""
    base = NodeSnapshot(
        node_id=f"run-{name}",
        name=name,
        role=f"{kind}-vault",
        version="0.1.0",
        address="127.0.0.1:50051" if kind == "kv" else "127.0.0.1:50052",
        pid=200,
        started_unix_s=START_UNIX_S - 7200,
        now_unix_s=START_UNIX_S + now,
        sequence=int(now * 2),
        memory=MemorySnapshot(64 * GIB, 16 * GIB, GIB),
        tiers=(
            tier(
                kind,
                size_bytes=GIB,
                cap_bytes=4 * GIB,
                records=400,
                bytes_in=int((1000 + now * 10) * MIB),
                bytes_out=500 * MIB,
                windows=(Window(60, 8, 2), Window(600, 80, 20)),
            ),
        ),
    )
    return replace(base, **values)


def event(number: int, message: str = "stored 12 blocks", **values) -> Event:
    base = Event(number, START_UNIX_S + number, "demote", "info", "mini", message)
    return replace(base, **values)


class StagedFeed:
    """A feed whose view the test sets."""

    def __init__(self, view: ClusterView | None = None) -> None:
        self.staged = view or ClusterView()

    async def run(self) -> None:
        return

    def view(self) -> ClusterView:
        return self.staged


def records_of(*snapshots: NodeSnapshot, authenticated: bool = True) -> dict[str, TargetRecord]:
    """One record an agent, fed with its snapshots; monotonic time 1000 is START_UNIX_S."""
    records: dict[str, TargetRecord] = {}
    for one in snapshots:
        record = records.get(one.address, TargetRecord(one.address))
        now = one.now_unix_s - START_UNIX_S
        records[one.address] = observed(record, one, authenticated, 1000 + now, START_UNIX_S + now)
    return records


def view_of(
    *snapshots: NodeSnapshot, at: float, lost: tuple[str, ...] = (), authenticated: bool = True, **settings
) -> ClusterView:
    """The view ``at`` seconds after START_UNIX_S; addresses in ``lost`` were lost right after their last snapshot."""
    records = records_of(*snapshots, authenticated=authenticated)
    for address in lost:
        last = records[address].last
        records[address] = failed(records[address], "connection refused", last.received_s)
    return cluster_view(
        tuple(records.values()), now_s=1000 + at, now_unix_s=START_UNIX_S + at, **{"name": "lab", **settings}
    )


def events_view(*events: Event, dropped: int = 0) -> EventsView:
    return EventsView(tuple(EventLine(i + 1, one) for i, one in enumerate(events)), dropped)


def healthy(**settings) -> ClusterView:
    """mini, nas and pi, all live, three seconds of data."""
    times = [i / 2 for i in range(7)]
    snapshots = [make(t) for t in times for make in (inference, vault, _pi)]
    events = events_view(*(event(i) for i in range(3)))
    return view_of(*snapshots, at=3.4, **{"events": events, **settings})


def _pi(now: float) -> NodeSnapshot:
    return vault(now, kind="ssm", name="pi")


def screen_text(app: Console) -> list[str]:
    """The lines of the terminal as plain text, read back from the compositor's strips."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip).rstrip() for strip in strips]
