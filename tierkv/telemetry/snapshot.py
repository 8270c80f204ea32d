"""The one frozen snapshot that feeds the console, ``tierkv status`` and recordings.

Field by field the same as ``proto/tierkv/v1/telemetry.proto``; ``tierkv.rpc.telemetry_wire`` maps one to the other.
Bytes are integers, durations seconds, times seconds since the Unix epoch. Counters run since the agent's start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierkv.telemetry.histogram import EMPTY, HistogramSnapshot

SKEW_S = 2.0
"""Clocks that differ by less are within what NTP and a busy machine explain."""


@dataclass(frozen=True, slots=True)
class Window:
    seconds: float
    hits: int = 0
    misses: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One tier as one agent sees it: "hot", "local", "kv" or "ssm".

    A vault reports the tier it holds with its real size; an inference agent reports hits, misses and latencies of
    its remote tiers with size 0.
    """

    name: str
    size_bytes: int = 0
    cap_bytes: int = 0
    records: int = 0
    tokens: int = 0
    hits: int = 0
    misses: int = 0
    miss_reasons: Mapping[str, int] = field(default_factory=dict[str, int])
    evictions: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    stores: int = 0
    refusals: Mapping[str, int] = field(default_factory=dict[str, int])
    promote_s: HistogramSnapshot = EMPTY
    store_s: HistogramSnapshot = EMPTY
    windows: tuple[Window, ...] = ()
    pinned_records: int = 0
    quarantined_records: int = 0
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    total_bytes: int = 0
    used_bytes: int = 0
    rss_bytes: int = 0
    threshold_fraction: float = 0.0
    device_bytes: int = 0
    note: str = ""

    @property
    def used_fraction(self) -> float:
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0


@dataclass(frozen=True, slots=True)
class LinkSnapshot:
    """A link from the inference agent to one vault.

    ``state`` is "up", "down", "backoff" or, while nothing was asked of the vault since it is there (again), "unknown".
    """

    peer: str
    tier: str
    state: str = "unknown"
    rtt_s: float = 0.0
    receive_bytes_per_s: float = 0.0
    send_bytes_per_s: float = 0.0
    failures: int = 0
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """``quality_...``: live samples of the model served, see ``inference.quality_sample``; 0 dB: nothing was lost.

    ``quality_top1_fraction`` and ``quality_kl_mean`` are both 0 where what the model says next was not compared: caches
    that hold more than rows.
    """

    kind: str
    build: str = ""
    model: str = ""
    identity: str = ""
    attached: bool = False
    prefill_tokens_saved: int = 0
    prefill_s_saved: float = 0.0
    note: str = ""
    quality_codec: str = ""
    quality_samples: int = 0
    quality_kl_mean: float = 0.0
    quality_top1_fraction: float = 0.0
    quality_snr_db_min: float = 0.0
    quality_raised_layers: int = 0


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    node_id: str
    name: str
    role: str
    version: str
    address: str
    pid: int
    started_unix_s: float
    now_unix_s: float
    sequence: int
    memory: MemorySnapshot = field(default_factory=MemorySnapshot)
    tiers: tuple[TierSnapshot, ...] = ()
    links: tuple[LinkSnapshot, ...] = ()
    engines: tuple[EngineSnapshot, ...] = ()
    activity: str = ""
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    last_event_id: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. ``kind``: demote, promote, evict, miss, purge, config, link, start, fault, ..."""

    id: int
    time_unix_s: float
    kind: str
    severity: str
    node: str
    message: str
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])
