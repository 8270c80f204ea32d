"""A node's snapshot as JSON: bytes are integers, durations seconds, times RFC 3339 UTC, histograms their quantiles."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tierkv.telemetry.histogram import HistogramSnapshot
from tierkv.telemetry.snapshot import Event, NodeSnapshot, TierSnapshot
from tierkv.units import rfc3339


def node(snapshot: NodeSnapshot) -> dict[str, Any]:
    return {
        "node_id": snapshot.node_id,
        "name": snapshot.name,
        "role": snapshot.role,
        "version": snapshot.version,
        "address": snapshot.address,
        "pid": snapshot.pid,
        "started": time_of(snapshot.started_unix_s),
        "now": time_of(snapshot.now_unix_s),
        "uptime_s": max(0.0, snapshot.now_unix_s - snapshot.started_unix_s),
        "sequence": snapshot.sequence,
        "activity": snapshot.activity,
        "memory": {**asdict(snapshot.memory), "used_fraction": snapshot.memory.used_fraction},
        "tiers": [tier(one) for one in snapshot.tiers],
        "links": [asdict(link) for link in snapshot.links],
        "engines": [asdict(engine) for engine in snapshot.engines],
        "counters": dict(snapshot.counters),
        "last_event_id": snapshot.last_event_id,
    }


def tier(snapshot: TierSnapshot) -> dict[str, Any]:
    plain = {name: getattr(snapshot, name) for name in _PLAIN}
    return {
        **plain,
        "miss_reasons": dict(snapshot.miss_reasons),
        "refusals": dict(snapshot.refusals),
        "promote": histogram(snapshot.promote_s),
        "store": histogram(snapshot.store_s),
        "windows": [asdict(window) for window in snapshot.windows],
    }


_PLAIN = (
    "name", "size_bytes", "cap_bytes", "records", "tokens", "hits", "misses", "hit_tokens", "evictions", "bytes_in",
    "bytes_out", "stores", "pinned_records", "quarantined_records",
)  # fmt: skip


def histogram(snapshot: HistogramSnapshot) -> dict[str, Any]:
    """Quantiles are null when nothing was measured."""
    return {
        "count": snapshot.total,
        "sum_s": snapshot.sum_s,
        "p50_s": snapshot.quantile(0.5),
        "p99_s": snapshot.quantile(0.99),
    }


def event(one: Event, address: str) -> dict[str, Any]:
    return {
        "time": time_of(one.time_unix_s),
        "node": one.node,
        "address": address,
        "id": one.id,
        "kind": one.kind,
        "severity": one.severity,
        "message": one.message,
        "attributes": dict(one.attributes),
    }


def time_of(unix_s: float) -> str | None:
    """None for a time that is not set or that no calendar holds."""
    try:
        return rfc3339(unix_s) if unix_s > 0 else None
    except (OverflowError, ValueError, OSError):
        return None
