"""The seam every vault store stands behind: the gRPC servicer, the local vault and the tests know only this.

All methods are called from one event loop's thread or from its executor; an implementation guards its own state with
a lock. Bytes in and bytes out are whole records as ``tierkv.codec.record`` lays them out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.identity.blocks import BlockKey, Tokens
from tierkv.store.journal import Fate


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """What the index knows of one visible record without touching its bytes."""

    header: RecordHeader
    size_bytes: int
    stored_unix_s: float
    last_hit_unix_s: float
    hits: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class OtherIdentity:
    """Another model identity, or the same model served otherwise, under which prompts begin alike."""

    root: BlockKey
    model: str
    records: int


@dataclass(frozen=True, slots=True)
class Selector:
    """Which records: every field that is set narrows the choice; a default Selector means everything.

    ``prefixes`` are leaf keys or their first 4 bytes or more: the records that only those prefixes use.
    """

    root: bytes = b""
    model: str = ""
    prefixes: tuple[bytes, ...] = ()
    older_than_s: float = 0.0
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A chain from the root to a record without children, or to a checkpoint."""

    leaf: IndexEntry
    chain: tuple[BlockKey, ...]
    own_keys: tuple[BlockKey, ...]
    own_bytes: int
    total_bytes: int
    last_hit_unix_s: float
    hits: int
    codecs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PurgePreview:
    token: str
    records: int
    bytes: int
    prefixes: int
    tokens: int
    pinned_records: int
    examples: tuple[Prefix, ...]


@dataclass(frozen=True, slots=True)
class PurgeResult:
    records: int
    bytes: int
    undo_token: str
    undo_s: float
    epoch: int


@dataclass(frozen=True, slots=True)
class Shrinking:
    """What a smaller cap would make leave at once, in the room that the store gives it (whole pages or blocks).

    ``prefixes``: ends of chains among the records. ``purged_bytes``: of purges that could be taken back until then.
    ``refused``: it would not fit even then, and nothing would leave.
    """

    bytes: int = 0
    records: int = 0
    prefixes: int = 0
    purged_bytes: int = 0
    refused: bool = False


@dataclass(frozen=True, slots=True)
class DiskStats:
    """What a store on disk knows beyond others. ``dead_bytes`` take room until they are compacted.

    ``damaged``: damaged places found in files since the store was opened; ``torn``: writes that the end of an earlier
    process had cut short. ``problem``: why nothing can be written just now, as a slug, or "".
    """

    folder: str
    disk_bytes: int
    disk_cap_bytes: int
    ram_bytes: int
    ram_cap_bytes: int
    dead_bytes: int
    unsynced_bytes: int
    segments: int
    segments_loaded: int
    hot_records: int
    damaged: int
    torn: int
    durability: str
    problem: str


@dataclass(frozen=True, slots=True)
class StoreStats:
    """``index_bytes`` is an estimate of the index's own memory; counters run since the store was opened."""

    size_bytes: int
    cap_bytes: int
    records: int
    tokens: int
    pinned_records: int
    quarantined_records: int
    evictions: int
    epoch: int
    leases: int
    index_bytes: int
    policy: str
    loading: bool = False
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    disk: DiskStats | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it was written: in which file, where, what. ``key`` is the record's, if it is known."""

    file: str
    offset: int
    reason: str
    size_bytes: int = 0
    key: bytes = b""
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class Checked:
    """How far a check is: bytes of how many, sound records so far, and what the last step found."""

    done_bytes: int
    total_bytes: int
    records: int
    finding: Finding | None = None


class RecordWriter(Protocol):
    """Takes one record's bytes in order. Nothing is visible before ``commit``; ``abort`` is safe at any time."""

    def write(self, data: bytes | memoryview) -> None:
        """Raises BadFrame as soon as the header frame is complete and wrong, or when more arrives than announced."""
        ...

    def commit(self) -> str:
        """Verifies every frame, publishes, and returns "stored", "replaced" or "present".

        "present": a record of this key and at least this fidelity is already visible; the new bytes are dropped.
        Raises BadFrame, ForeignRecord (quarantined and counted) or StaleEpoch; the writer is then aborted.
        """
        ...

    def abort(self) -> None: ...


class RecordReader(Protocol):
    """An open record: it cannot be evicted or reused until ``close``. A context manager."""

    @property
    def entry(self) -> IndexEntry: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def in_memory(self) -> bool:
        """Whether ``views`` look at memory, so that nothing is waited for."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the record; shorter only at its end."""
        ...

    def views(self, offset: int, length: int) -> list[memoryview]:
        """As ``read``, in pieces and without a copy where the store has none to make; valid until ``close``."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> RecordReader: ...

    def __exit__(self, *exc: object) -> None: ...


class Store(Protocol):
    """Where a vault keeps records."""

    @property
    def epoch(self) -> int:
        """Rises with every purge."""
        ...

    def begin(self, size_bytes: int, epoch: int) -> RecordWriter:
        """Room for one record is set aside (evicting leaf-first) before anything is written.

        ``epoch`` is the one the writer saw when it probed. Raises RecordTooLarge or StoreFull.
        """
        ...

    def open(self, key: BlockKey, *, count_hit: bool = True) -> RecordReader | None:
        """The record for reading; counts as use. None if it is not here (see ``missing_reason``)."""
        ...

    def lookup(self, keys: Sequence[BlockKey]) -> list[IndexEntry | None]:
        """Index entries without counting as use."""
        ...

    def children(
        self, parent: BlockKey, kinds: Iterable[RecordKind], *, like: Tokens | None = None, limit: int = 1000
    ) -> list[IndexEntry]:
        """At most ``limit`` visible records of these kinds whose parent is ``parent``, most recently used first.

        With ``like`` (the prompt's ids after ``parent``), only those that can serve it, longest agreement first: blocks
        that agree in their first token at least, and checkpoints all of whose tokens lead ``like``.
        """
        ...

    def missing_reason(self, key: BlockKey) -> str:
        """ "never_stored", "evicted", "purged", "expired", "quarantined" or "loading"."""
        ...

    def fate(self, key: BlockKey) -> Fate:
        """What became of a key that is not in sight, when and why, as far as is remembered."""
        ...

    def lost_checkpoints(self, parents: Collection[BlockKey]) -> list[Fate]:
        """What became of checkpoints that stood on one of ``parents`` and are gone, the latest last."""
        ...

    def same_beginning(self, root: BlockKey, beginning: bytes) -> list[OtherIdentity]:
        """Other identities under which a prompt with this ``beginning_of`` is stored. Walks the whole index."""
        ...

    @property
    def remembers_since_unix_s(self) -> float:
        """Since when every record that left is remembered; what left before counts as never stored."""
        ...

    def lease(self, keys: Iterable[BlockKey], seconds: float) -> None:
        """Keeps these from being evicted for a while; a lease never outlives ``seconds``."""
        ...

    def touch(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Marks as just used; False for those that are not here."""
        ...

    def quarantine(self, key: BlockKey, reason: str) -> None:
        """Takes a damaged record out of sight and counts it."""
        ...

    def discard(self, key: BlockKey) -> None:
        """Takes a record out for good: no undo, no epoch, nothing to tell."""
        ...

    def set_policy(self, name: str) -> None:
        """From now on what leaves first is decided by this policy. Raises ValueError."""
        ...

    def pin(self, selector: Selector) -> int: ...

    def unpin(self, selector: Selector) -> int: ...

    def prefixes(self, selector: Selector) -> list[Prefix]:
        """Most recently used first."""
        ...

    def preview_purge(self, selector: Selector) -> PurgePreview:
        """A dry run and a token bound to exactly those records, valid for 5 minutes."""
        ...

    def purge(self, token: str) -> PurgeResult:
        """Removes from sight what the preview showed; bytes go after the undo window. Raises StaleToken."""
        ...

    def undo_purge(self, undo_token: str) -> tuple[int, int]:
        """Records and bytes that came back. Raises StaleToken when the window is over."""
        ...

    def records(self, selector: Selector) -> list[tuple[BlockKey, int]]:
        """Keys and sizes of the records that the selector means, heads before tails. Raises UsageError."""
        ...

    def check(self, *, repair: bool) -> Iterator[Checked]:
        """Every record is read where it is kept and checked to its last byte; damaged ones go if ``repair``."""
        ...

    def compact(self) -> Iterator[tuple[int, int]]:
        """Room that dead records take comes back; (done, of how many) after each step."""
        ...

    def sweep(self) -> None:
        """Called about once a second: expires leases, undo windows and aged records."""
        ...

    def stats(self) -> StoreStats: ...

    def events(self) -> Iterator[tuple[str, str, dict[str, str]]]:
        """Drains (kind, message, attributes) since the last call: evictions, quarantines, purges, refusals."""
        ...

    def close(self) -> None: ...
