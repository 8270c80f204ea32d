"""The whole first screen as one frozen value, computed from the latest snapshots by a pure function.

Screens, screenshots and replay all draw a ClusterView and know nothing else. Bytes, seconds and fractions are plain
numbers here; how they look is the widgets' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from tierkv import __version__
from tierkv.telemetry.histogram import HistogramSnapshot
from tierkv.telemetry.snapshot import SKEW_S, Event, MemorySnapshot, NodeSnapshot, TierSnapshot
from tierkv.tui.record import BUCKET_S, BUCKETS, TIERS, History, Observation, TargetRecord, is_over, tier_of

STALE_AFTER_S = 2.5
"""Five missed snapshots at 2 Hz: a frozen peer shows within 3 s."""

NodeState = Literal["live", "over", "silent", "lost", "connecting", "down", "absent", "refused", "foreign"]
TierState = Literal["live", "partial", "stale", "absent"]

UP: frozenset[NodeState] = frozenset({"live", "over"})
LABELS = {"hot": "hot", "local": "local", "kv": "cold KV", "ssm": "cold SSM"}


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, over the record's rate window."""

    bytes_in_per_s: float = 0.0
    bytes_out_per_s: float = 0.0
    evictions_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeView:
    """One agent. ``age_s`` is None before its first snapshot; ``skew_s`` > 0: its clock is ahead of this one."""

    target: str
    name: str
    role: str
    state: NodeState
    age_s: float | None = None
    error: str = ""
    activity: str = ""
    version: str = ""
    memory: MemorySnapshot = field(default_factory=MemorySnapshot)
    skew_s: float = 0.0
    restarts: int = 0
    over_since_unix_s: float | None = None
    over_grown_bytes: int = 0
    rates: Rates | None = None
    snapshot: NodeSnapshot | None = None

    @property
    def up(self) -> bool:
        return self.state in UP

    @property
    def counts(self) -> bool:
        """False for an address that nobody named and nobody answers at."""
        return self.state != "absent"

    @property
    def skewed(self) -> bool:
        return abs(self.skew_s) > SKEW_S


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier over all agents.

    ``partial``: some agent that holds it is lost, its last size is still counted and its rates are not; ``stale``: all
    of them are, everything is as of ``age_s`` ago. Fractions and latencies are None where nothing was measured.
    """

    name: str
    label: str
    state: TierState = "absent"
    age_s: float = 0.0
    size_bytes: int = 0
    cap_bytes: int = 0
    records: int = 0
    hit_1m: float | None = None
    hit_10m: float | None = None
    promote_p50_s: float | None = None
    promote_p99_s: float | None = None
    rates: Rates | None = None
    history: tuple[float | None, ...] = (None,) * BUCKETS

    @property
    def fill(self) -> float | None:
        return self.size_bytes / self.cap_bytes if self.cap_bytes else None


@dataclass(frozen=True, slots=True)
class MissView:
    reason: str
    count: int
    last_minute: int


@dataclass(frozen=True, slots=True)
class Saved:
    """Prefill that restores made unnecessary, since the agents' start."""

    seconds: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class EventLine:
    """An event and its place in the console's own order."""

    number: int
    event: Event


@dataclass(frozen=True, slots=True)
class EventsView:
    """The kept events, oldest first. ``dropped``: lost on the way here; ``forgotten``: pushed out by newer ones."""

    lines: tuple[EventLine, ...] = ()
    dropped: int = 0
    forgotten: int = 0


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Everything that a screen may show, as of ``now_unix_s``. ``replay``: where in a recording, "" when live."""

    name: str = ""
    now_unix_s: float = 0.0
    nodes: tuple[NodeView, ...] = ()
    tiers: tuple[TierView, ...] = ()
    misses: tuple[MissView, ...] = ()
    saved: Saved = Saved()
    damaged_records: int = 0
    models: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    age_s: float | None = None
    authenticated: bool = False
    read_only: bool = True
    events: EventsView = EventsView()
    replay: str = ""

    @property
    def counted(self) -> tuple[NodeView, ...]:
        return tuple(node for node in self.nodes if node.counts)

    @property
    def up(self) -> int:
        return sum(node.up for node in self.nodes)

    def tier(self, name: str) -> TierView:
        return next((tier for tier in self.tiers if tier.name == name), TierView(name, LABELS.get(name, name)))


def cluster_view(
    records: Sequence[TargetRecord],
    *,
    now_s: float,
    now_unix_s: float,
    name: str = "",
    read_only: bool = False,
    events: EventsView = EventsView(),
    replay: str = "",
) -> ClusterView:
    """The view of ``records`` at ``now_s``; an agent that is reached at two addresses counts once."""
    known = [record for record in unique(records) if record.last]
    nodes = tuple(node_view(record, now_s) for record in unique(records))
    live = [record for record in known if _is_live(record, now_s)]
    newest = max((record.last.received_s for record in known if record.last), default=None)
    authenticated = bool(live) and all(record.authenticated for record in live)
    return ClusterView(
        name=name,
        now_unix_s=now_unix_s,
        nodes=nodes,
        tiers=tuple(tier_view(tier, known, now_s) for tier in TIERS),
        misses=miss_views(known),
        saved=_saved(known),
        damaged_records=sum(
            tier.quarantined_records for record in known if record.last for tier in record.last.snapshot.tiers
        ),
        models=_distinct(engine.model for node in nodes if node.snapshot for engine in node.snapshot.engines),
        versions=_distinct((__version__, *(node.version for node in nodes if node.snapshot))),
        age_s=None if newest is None else max(0.0, now_s - newest),
        authenticated=authenticated,
        read_only=read_only or not authenticated,
        events=events,
        replay=replay,
    )


def unique(records: Sequence[TargetRecord]) -> list[TargetRecord]:
    """The records in their order, without those whose agent another record heard from more recently."""
    best: dict[str, TargetRecord] = {}
    for record in records:
        if record.last:
            node_id = record.last.snapshot.node_id
            rival = best.get(node_id)
            if rival is None or rival.last is None or record.last.received_s > rival.last.received_s:
                best[node_id] = record
    return [r for r in records if r.last is None or best[r.last.snapshot.node_id] is r]


def _is_live(record: TargetRecord, now_s: float) -> bool:
    return record.phase == "live" and record.last is not None and now_s - record.last.received_s <= STALE_AFTER_S


def node_state(record: TargetRecord, now_s: float) -> NodeState:
    if record.phase in ("refused", "foreign"):
        return "refused" if record.phase == "refused" else "foreign"
    if record.last is None:
        if not record.error:
            return "connecting"
        return "down" if record.expected else "absent"
    if record.phase != "live":
        return "lost"
    if not _is_live(record, now_s):
        return "silent"
    return "over" if is_over(record.last.snapshot) else "live"


def node_view(record: TargetRecord, now_s: float) -> NodeView:
    """One agent's row; what was last known stays when it is lost."""
    state = node_state(record, now_s)
    if record.last is None:
        return NodeView(record.target, record.target, "", state, error=record.error)
    known = cast("NodeView | None", record.memo.get(state))
    if known is None:
        known = record.memo[state] = _node_view(record, record.last, state)
    return replace(known, age_s=max(0.0, now_s - record.last.received_s))


def _node_view(record: TargetRecord, last: Observation, state: NodeState) -> NodeView:
    """All but the age."""
    snapshot = last.snapshot
    hot, was_hot = tier_of(snapshot, "hot"), tier_of(record.over.snapshot, "hot") if record.over else None
    return NodeView(
        target=record.target,
        name=snapshot.name or record.target,
        role=snapshot.role,
        state=state,
        error=record.error,
        activity=snapshot.activity,
        version=snapshot.version,
        memory=snapshot.memory,
        skew_s=snapshot.now_unix_s - last.received_unix_s,
        restarts=record.restarts,
        over_since_unix_s=record.over.received_unix_s if record.over else None,
        over_grown_bytes=hot.size_bytes - was_hot.size_bytes if hot and was_hot else 0,
        rates=_summed([rates for tier in TIERS if (rates := tier_rates(record, tier))]) if state in UP else None,
        snapshot=snapshot,
    )


def tier_rates(record: TargetRecord, name: str) -> Rates | None:
    """Rates of one tier over the record's window; None before its second snapshot."""
    memo = record.memo
    if name not in memo:
        memo[name] = _tier_rates(record, name)
    return cast("Rates | None", memo[name])


def _tier_rates(record: TargetRecord, name: str) -> Rates | None:
    if len(record.tail) < 2:
        return None
    first, last = record.tail[0], record.tail[-1]
    before, after = tier_of(first.snapshot, name), tier_of(last.snapshot, name)
    seconds = _elapsed(first, last)
    if before is None or after is None or seconds <= 0:
        return None
    return Rates(
        max(0, after.bytes_in - before.bytes_in) / seconds,
        max(0, after.bytes_out - before.bytes_out) / seconds,
        max(0, after.evictions - before.evictions) / seconds,
    )


def _elapsed(first: Observation, last: Observation) -> float:
    """Seconds by the agent's own clock, which no network jitter touches, unless that clock was set meanwhile."""
    here = last.received_s - first.received_s
    there = last.snapshot.now_unix_s - first.snapshot.now_unix_s
    return there if there > 0 and abs(there - here) <= max(1.0, here / 2) else here


def tier_view(name: str, known: Sequence[TargetRecord], now_s: float) -> TierView:
    """One row of the tiers table.

    Sizes, traffic and evictions are told by who holds the tier (vaults; the inference agent for its own), hits and
    latencies by who uses it (inference agents); each side stands in where the other is absent.
    """
    reporting = [(r, tier) for r in known if r.last and (tier := tier_of(r.last.snapshot, name))]
    if not reporting:
        return TierView(name, LABELS[name])
    users = [pair for pair in reporting if _role(pair[0]) == "inference"]
    holders = [pair for pair in reporting if _role(pair[0]) != "inference"] if name in ("kv", "ssm") else users
    users, holders = users or holders or reporting, holders or users or reporting
    live = [pair for pair in holders if _is_live(pair[0], now_s)]
    ages = [now_s - record.last.received_s for record, _ in holders if record.last and (record, _) not in live]
    state: TierState = "live" if not ages else "partial" if live else "stale"
    using = [tier for record, tier in users if _is_live(record, now_s)] or [tier for _, tier in users]
    promote = HistogramSnapshot.merged(tier.promote_s for tier in using)
    if not promote.total:
        promote = HistogramSnapshot.merged(tier.promote_s for _, tier in holders)
    return TierView(
        name=name,
        label=LABELS[name],
        state=state,
        age_s=max(ages, default=0.0),
        size_bytes=sum(tier.size_bytes for _, tier in holders),
        cap_bytes=sum(tier.cap_bytes for _, tier in holders),
        records=sum(tier.records for _, tier in holders),
        hit_1m=hit_fraction(using, 60),
        hit_10m=hit_fraction(using, 600),
        promote_p50_s=promote.quantile(0.5),
        promote_p99_s=promote.quantile(0.99),
        rates=_summed([rates for record, _ in live if (rates := tier_rates(record, name))]) if live else None,
        history=_history([record for record, _ in holders], name, now_s),
    )


def _role(record: TargetRecord) -> str:
    return record.last.snapshot.role if record.last else ""


def hit_fraction(tiers: Sequence[TierSnapshot], seconds: float) -> float | None:
    """Hits over lookups of the agents' windows of ``seconds``, added before dividing; None without lookups."""
    windows = [window for tier in tiers for window in tier.windows if window.seconds == seconds]
    hits, misses = sum(window.hits for window in windows), sum(window.misses for window in windows)
    return hits / (hits + misses) if hits + misses else None


def _summed(parts: Sequence[Rates]) -> Rates | None:
    if not parts:
        return None
    return Rates(
        sum(part.bytes_in_per_s for part in parts),
        sum(part.bytes_out_per_s for part in parts),
        sum(part.evictions_per_s for part in parts),
    )


def _history(records: Sequence[TargetRecord], name: str, now_s: float) -> tuple[float | None, ...]:
    """Bytes a second in each bucket, summed; None where no agent was heard."""
    newest = int(now_s // BUCKET_S)
    rows = [record.history.get(name, History()).aligned(newest) for record in records]
    sums = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    growing_s = max(1.0, now_s - newest * BUCKET_S)
    spans_s = [BUCKET_S] * (BUCKETS - 1) + [growing_s]
    return tuple(sum(known) / span_s if known else None for known, span_s in zip(sums, spans_s, strict=True))


def miss_views(known: Sequence[TargetRecord]) -> tuple[MissView, ...]:
    """Misses by reason as the inference agents count them (vaults where there is none), most of the minute first."""
    asking = [record for record in known if _role(record) == "inference"] or list(known)
    totals: dict[str, int] = {}
    recent: dict[str, int] = {}
    for record in asking:
        if record.last is None:
            continue
        old = record.minute[0].snapshot if record.minute else record.last.snapshot
        for tier in record.last.snapshot.tiers:
            before = tier_of(old, tier.name)
            for reason, count in tier.miss_reasons.items():
                totals[reason] = totals.get(reason, 0) + count
                was = before.miss_reasons.get(reason, 0) if before else 0
                recent[reason] = recent.get(reason, 0) + max(0, count - was)
    views = (MissView(reason, count, recent[reason]) for reason, count in totals.items() if count)
    return tuple(sorted(views, key=lambda view: (-view.last_minute, -view.count, view.reason)))


def _saved(known: Sequence[TargetRecord]) -> Saved:
    engines = [engine for record in known if record.last for engine in record.last.snapshot.engines]
    return Saved(sum(e.prefill_s_saved for e in engines), sum(e.prefill_tokens_saved for e in engines))


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name))
