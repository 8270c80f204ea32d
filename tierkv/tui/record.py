"""What the console remembers of one agent: a frozen record, and the steps that lead from one to the next.

Every step is a pure function ``(record, what happened, when) -> record``. ``now_s`` is monotonic time and measures
ages; ``now_unix_s`` is this machine's wall clock and is compared with the agent's to find clock skew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tierkv.telemetry.snapshot import NodeSnapshot, TierSnapshot

BUCKET_S = 5.0
BUCKETS = 60
"""Five minutes of history, one bucket a cell of the widest sparkline."""

RATE_WINDOW_S = 3.0
"""Rates are taken over the last 3 s: at 2 Hz a rate between neighbours alone would jump with every snapshot."""

MINUTE_S = 60.0
MINUTE_STEP_S = 5.0

TIERS = ("hot", "local", "kv", "ssm")

Phase = Literal["connecting", "live", "lost", "refused", "foreign"]


@dataclass(frozen=True, slots=True)
class Observation:
    """A snapshot and when it came."""

    snapshot: NodeSnapshot
    received_s: float
    received_unix_s: float


@dataclass(frozen=True, slots=True)
class History:
    """Bytes moved by one tier, in buckets of BUCKET_S; ``values[-1]`` belongs to bucket ``newest``.

    None: nobody knows (no connection then), which is not the same as 0.
    """

    newest: int = 0
    values: tuple[float | None, ...] = ()

    def advanced(self, bucket: int) -> History:
        """The same history, up to ``bucket``."""
        if not self.values:
            return History(bucket, (None,))
        if bucket <= self.newest:
            return self
        gap: tuple[float | None, ...] = (None,) * min(bucket - self.newest, BUCKETS)
        return History(bucket, (self.values + gap)[-BUCKETS:])

    def added(self, bucket: int, amount: float) -> History:
        grown = self.advanced(bucket)
        return History(grown.newest, (*grown.values[:-1], (grown.values[-1] or 0.0) + amount))

    def aligned(self, newest: int) -> tuple[float | None, ...]:
        """Exactly BUCKETS values that end with bucket ``newest``."""
        values = self.advanced(newest).values if self.values else ()
        return (None,) * (BUCKETS - len(values)) + values


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """One address that the console listens to.

    ``tail`` covers the rate window and ``minute`` the last minute in steps of 5 s, both of the agent's present run.
    ``over``: the first observation of the present stretch over the memory mark. ``expected`` is False for addresses
    that nobody named: they are listened to but not missed.
    """

    target: str
    expected: bool = True
    phase: Phase = "connecting"
    since_s: float = 0.0
    error: str = ""
    authenticated: bool = False
    attempts: int = 0
    restarts: int = 0
    last: Observation | None = None
    tail: tuple[Observation, ...] = ()
    minute: tuple[Observation, ...] = ()
    history: Mapping[str, History] = field(default_factory=dict[str, History])
    over: Observation | None = None
    memo: dict[str, object] = field(init=False, repr=False, compare=False, default_factory=dict[str, object])
    """What was worked out of this very record: it never changes, and is drawn several times before the next."""


def tier_of(snapshot: NodeSnapshot, name: str) -> TierSnapshot | None:
    return next((tier for tier in snapshot.tiers if tier.name == name), None)


def same_run(before: NodeSnapshot, after: NodeSnapshot) -> bool:
    """True while the agent has not restarted: the same id and no counter that went back."""
    if before.node_id != after.node_id or after.sequence < before.sequence:
        return False
    for tier in after.tiers:
        was = tier_of(before, tier.name)
        if was and (tier.bytes_in < was.bytes_in or tier.bytes_out < was.bytes_out or tier.hits < was.hits):
            return False
    return True


def is_over(snapshot: NodeSnapshot) -> bool:
    memory = snapshot.memory
    return memory.threshold_fraction > 0 and memory.used_fraction > memory.threshold_fraction


def connecting(record: TargetRecord) -> TargetRecord:
    """Another attempt has begun; a lost agent stays lost until it answers."""
    phase: Phase = "lost" if record.last else "connecting"
    return replace(record, attempts=record.attempts + 1, phase=phase if record.phase != "live" else "lost")


def failed(record: TargetRecord, error: str, now_s: float, phase: Phase | None = None) -> TargetRecord:
    """The attempt or the stream ended; what was known is kept."""
    was_up = record.phase == "live"
    after: Phase = phase or ("lost" if record.last else "connecting")
    return replace(record, phase=after, error=error, since_s=now_s if was_up else record.since_s)


def observed(
    record: TargetRecord, snapshot: NodeSnapshot, authenticated: bool, now_s: float, now_unix_s: float
) -> TargetRecord:
    """A snapshot has come: the agent is live."""
    seen = Observation(snapshot, now_s, now_unix_s)
    continues = record.last is not None and same_run(record.last.snapshot, snapshot)
    if continues and record.phase == "live":
        tail = (*_within(record.tail, now_s - RATE_WINDOW_S), seen)
    else:
        tail = (seen,)
    minute = _within(record.minute, now_s - MINUTE_S) if continues else ()
    if not minute or now_s - minute[-1].received_s >= MINUTE_STEP_S:
        minute = (*minute, seen)
    restarted = record.last is not None and record.last.snapshot.node_id != snapshot.node_id
    return replace(
        record,
        phase="live",
        since_s=record.since_s if record.phase == "live" else now_s,
        error="",
        authenticated=authenticated,
        attempts=0,
        restarts=record.restarts + restarted,
        last=seen,
        tail=tail,
        minute=minute,
        history=_history(record, snapshot, now_s, continues),
        over=((record.over if continues else None) or seen) if is_over(snapshot) else None,
    )


def _within(seen: tuple[Observation, ...], oldest_s: float) -> tuple[Observation, ...]:
    """The observations not older than ``oldest_s``, and the one before them so that the window is covered whole."""
    first = next((i for i, one in enumerate(seen) if one.received_s > oldest_s), len(seen))
    return seen[max(0, first - 1) :]


def _history(record: TargetRecord, snapshot: NodeSnapshot, now_s: float, continues: bool) -> dict[str, History]:
    bucket = int(now_s // BUCKET_S)
    before = record.last.snapshot if record.last and continues and now_s - record.last.received_s <= BUCKET_S else None
    grown = dict(record.history)
    for tier in snapshot.tiers:
        if tier.name not in TIERS:
            continue
        was = tier_of(before, tier.name) if before else None
        moved = tier.bytes_in + tier.bytes_out - was.bytes_in - was.bytes_out if was else 0
        grown[tier.name] = grown.get(tier.name, History()).added(bucket, moved)
    return grown
