"""What people ask of a vault: its prefixes, and what a purge would remove and has removed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierkv.telemetry.snapshot import TierSnapshot

if TYPE_CHECKING:  # the console's screens come up without numpy
    from tierkv.store.base import DiskStats, Finding


@dataclass(frozen=True, slots=True)
class PrefixSummary:
    """A chain from the root to a record without children. ``own_bytes`` only this prefix uses."""

    leaf_key: bytes
    root: bytes
    model: str
    tokens: int
    own_bytes: int
    total_bytes: int
    records: int
    created_unix_s: float
    last_hit_unix_s: float
    hits: int
    pinned: bool
    fidelity: int
    codecs: tuple[str, ...]
    tier: str


@dataclass(frozen=True, slots=True)
class PrefixPage:
    """The most recently used prefixes, and how many there are in all."""

    prefixes: tuple[PrefixSummary, ...]
    total: int


@dataclass(frozen=True, slots=True)
class RecordLine:
    """One record of a prefix, for positions [start, end). ``own``: no other prefix uses it."""

    key: bytes
    kind: int
    start: int
    end: int
    size_bytes: int
    fidelity: int
    codec: str
    stored_unix_s: float
    last_hit_unix_s: float
    hits: int
    pinned: bool
    own: bool


@dataclass(frozen=True, slots=True)
class PurgePlan:
    """What a purge would remove; ``token`` is good for exactly that, for 5 minutes."""

    token: str
    records: int
    bytes: int
    prefixes: int
    tokens: int
    pinned_records: int
    examples: tuple[PrefixSummary, ...]


@dataclass(frozen=True, slots=True)
class VaultStats:
    tier: TierSnapshot
    epoch: int
    index_bytes: int
    leases: int
    policy: str
    loading: bool
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    disk: DiskStats | None = None


@dataclass(frozen=True, slots=True)
class OperationStep:
    """How far an operation is. ``findings`` are new since the step before; ``refused`` counts from the beginning.

    Where records go to another vault: ``free_bytes`` is what it had free at first, ``kept`` how many it holds at the
    end (None before that, and of other operations).
    """

    done: int
    total: int
    done_bytes: int
    total_bytes: int
    finished: bool
    findings: tuple[Finding, ...] = ()
    refused: dict[str, int] = field(default_factory=dict[str, int])
    free_bytes: int | None = None
    kept: int | None = None
