"""What every store with a catalog does alike, wherever its bytes lie: look up, keep, pin, purge, tell."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.errors import CorruptionError, StaleEpoch
from tierkv.identity.blocks import BlockKey, Tokens
from tierkv.store.base import (
    Checked,
    Finding,
    IndexEntry,
    OtherIdentity,
    Prefix,
    PurgePreview,
    PurgeResult,
    RecordReader,
    Selector,
)
from tierkv.store.catalog import Catalog
from tierkv.store.clock import Clock, SystemClock
from tierkv.store.index import NONE
from tierkv.store.journal import Fate
from tierkv.store.policy import policy_named
from tierkv.store.prefixes import describe
from tierkv.store.purge import Purger
from tierkv.store.select import leaves, same_beginning, select
from tierkv.store.verify import RecordVerifier

_UNWANTED_EVERY_S = 60.0
_CHECK_BYTES = 1 << 20


class CatalogStore:
    """The half of a ``Store`` that moves no record bytes; see ``base.Store`` for what each method promises.

    One lock guards the catalog. It is held for bookkeeping only. Raises ValueError for an unknown policy.
    """

    def __init__(self, clock: Clock | None, undo_s: float, ttl_s: float, policy: str) -> None:
        self._lock = threading.Lock()
        self._catalog = Catalog(clock or SystemClock(), policy_named(policy), ttl_s, self._release, self._row_changed)
        self._catalog.journal.since_unix_s = self._catalog.clock.wall()
        self._purger = Purger(self._catalog, undo_s)
        self._closed = False
        self._unwanted_at_s = float("-inf")
        # What a writer or reader that was forgotten still held; a deque, since the collector may run at any moment.
        self._forgotten: deque[Callable[[], None]] = deque()

    def _release(self, row: int) -> None:
        """The room of a row is free again; called with the lock held."""
        raise NotImplementedError

    def _find_unwanted(self) -> None:
        """Once a minute; called with the lock held."""
        now = self._catalog.clock.monotonic()
        if now >= self._unwanted_at_s:
            self._unwanted_at_s = now + _UNWANTED_EVERY_S
            self._catalog.find_unwanted()

    def _row_changed(self, row: int) -> None:
        """A row was pinned, unpinned, set aside or brought back; called with the lock held."""

    @property
    def epoch(self) -> int:
        return self._purger.epoch

    def lookup(self, keys: Sequence[BlockKey]) -> list[IndexEntry | None]:
        with self._lock:
            index, to_unix_s = self._catalog.index, self._catalog.to_unix_s
            rows = [index.find(key) for key in keys]
            return [None if row == NONE else index.entry(row, to_unix_s) for row in rows]

    def children(
        self, parent: BlockKey, kinds: Iterable[RecordKind], *, like: Tokens | None = None, limit: int = 1000
    ) -> list[IndexEntry]:
        ids = None if like is None else like.astype("<i8", copy=False).tobytes()
        with self._lock:
            index, to_unix_s = self._catalog.index, self._catalog.to_unix_s
            return [index.entry(row, to_unix_s) for row in self._catalog.children(parent, kinds, ids, limit)]

    def missing_reason(self, key: BlockKey) -> str:
        return self.fate(key).reason

    def fate(self, key: BlockKey) -> Fate:
        with self._lock:
            return self._catalog.journal.fate(key)

    def lost_checkpoints(self, parents: Collection[BlockKey]) -> list[Fate]:
        kinds = (RecordKind.WINDOW, RecordKind.STATE)
        with self._lock:
            lost = self._catalog.journal.lost_under(parents, kinds)
            return [fate for key, fate in lost if self._catalog.index.find(key) == NONE]

    def same_beginning(self, root: BlockKey, beginning: bytes) -> list[OtherIdentity]:
        with self._lock:
            return same_beginning(self._catalog.index, root, beginning)

    @property
    def remembers_since_unix_s(self) -> float:
        with self._lock:
            return self._catalog.journal.since_unix_s

    # --- keeping ------------------------------------------------------------------------------

    def lease(self, keys: Iterable[BlockKey], seconds: float) -> None:
        with self._lock:
            self._catalog.lease(keys, seconds)

    def touch(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._lock:
            rows = [self._catalog.index.find(key) for key in keys]
            for row in rows:
                if row != NONE:
                    self._catalog.use(row, hit=False)
        return [row != NONE for row in rows]

    def pin(self, selector: Selector) -> int:
        with self._lock:
            rows = select(self._catalog.index, selector, self._catalog.clock.monotonic())
            self._catalog.pin(rows)
        return len(rows)

    def unpin(self, selector: Selector) -> int:
        with self._lock:
            rows = select(self._catalog.index, selector, self._catalog.clock.monotonic())
            self._catalog.unpin(rows)
        return len(rows)

    # --- looking after ------------------------------------------------------------------------

    def quarantine(self, key: BlockKey, reason: str) -> None:
        with self._lock:
            row = self._catalog.index.find(key)
            if row != NONE:
                self._catalog.quarantine(row, reason)

    def prefixes(self, selector: Selector) -> list[Prefix]:
        with self._lock:
            ends = leaves(self._catalog.index, selector, self._catalog.clock.monotonic())
            index, to_unix_s = self._catalog.index.snapshot(), self._catalog.to_unix_s
        return describe(index, ends, to_unix_s)

    def preview_purge(self, selector: Selector) -> PurgePreview:
        with self._lock:
            return self._purger.preview(selector)

    def purge(self, token: str) -> PurgeResult:
        with self._lock:
            return self._purger.purge(token)

    def undo_purge(self, undo_token: str) -> tuple[int, int]:
        with self._lock:
            return self._purger.undo(undo_token)

    def discard(self, key: BlockKey) -> None:
        with self._lock:
            row = self._catalog.index.find(key)
            if row != NONE:
                self._catalog.remove(row, "discarded")

    def records(self, selector: Selector) -> list[tuple[BlockKey, int]]:
        with self._lock:
            index = self._catalog.index
            rows = select(index, selector, self._catalog.clock.monotonic())
            return [(index.keys[row], index.size[row]) for row in rows]

    def check(self, *, repair: bool) -> Iterator[Checked]:
        records = self.records(Selector())
        done, sound, total = 0, 0, sum(size for _, size in records)
        for key, size in records:
            done += size
            reason = self._why_damaged(key)
            if reason and repair:
                self.quarantine(key, reason)
            sound += not reason
            yield Checked(done, total, sound, Finding("", 0, reason, size, key, repair) if reason else None)

    def open(self, key: BlockKey, *, count_hit: bool = True) -> RecordReader | None:
        """As ``Store.open``."""
        raise NotImplementedError

    def _why_damaged(self, key: BlockKey) -> str:
        """ "" for a record that is sound, or gone by now."""
        try:
            reader = self.open(key, count_hit=False)
            if reader is None:
                return ""
            with reader:
                verifier = RecordVerifier(reader.size_bytes)
                for offset in range(0, reader.size_bytes, _CHECK_BYTES):
                    for view in reader.views(offset, _CHECK_BYTES):
                        verifier.feed(view)
                verifier.finish()
        except CorruptionError as error:
            return getattr(error, "reason", "damaged_record")
        return ""

    def compact(self) -> Iterator[tuple[int, int]]:
        return iter(())

    def set_policy(self, name: str) -> None:
        policy = policy_named(name)
        with self._lock:
            self._catalog.change_policy(policy)

    def events(self) -> Iterator[tuple[str, str, dict[str, str]]]:
        with self._lock:
            return iter(self._catalog.journal.drain())

    # --- for the writers and readers ----------------------------------------------------------

    def _admit(self, header: RecordHeader, epoch: int) -> str:
        purge_epoch = self._purger.stale(header, epoch)
        if purge_epoch:
            self._catalog.journal.refused("stale_epoch")
            raise StaleEpoch(epoch, purge_epoch)
        self._catalog.check_kin(header)
        index = self._catalog.index
        known = index.find(header.key)
        if known == NONE:
            return "stored"
        return "present" if index.fidelity[known] <= header.fidelity else "replaced"

    def forgotten(self, give_back: Callable[[], None]) -> None:
        """Called by the collector: takes no lock."""
        self._forgotten.append(give_back)

    def _take_back_forgotten(self) -> None:
        while True:
            try:
                give_back = self._forgotten.popleft()
            except IndexError:
                return
            give_back()

    def count_damaged(self, reason: str, key: BlockKey | None) -> None:
        """A record that arrived damaged or foreign: counted and told."""
        with self._lock:
            self._catalog.refuse_damaged(key, reason)

    def end_reading(self, row: int) -> None:
        with self._lock:
            self._catalog.close(row)
