"""The vault in RAM: records in an arena that was set aside once, and a catalog over it."""

from __future__ import annotations

from tierkv.codec.record import RecordHeader
from tierkv.errors import BadFrame, RecordTooLarge, StoreFull
from tierkv.identity.blocks import BlockKey
from tierkv.store.arena import PAGE_BYTES, Arena, Runs
from tierkv.store.base import Shrinking, StoreStats
from tierkv.store.cataloged import CatalogStore
from tierkv.store.clock import Clock
from tierkv.store.forecast import shrinking
from tierkv.store.index import NONE
from tierkv.store.ram_streams import RamReader, RamWriter


class RamStore(CatalogStore):
    """A ``Store`` whose bytes never exceed ``cap_bytes``; see ``base.Store`` for what each method promises.

    Resident memory is the arena (``cap_bytes``), 8 bytes a page, about 400 bytes and 8 for each token id a record, and
    up to 10 MB for headers made a moment ago, reasons of misses and events.

    One lock guards the catalog and the lists of free pages. It is held for bookkeeping only: writers and readers copy
    outside of it, in pages that are theirs alone until they commit, abort or close.

    Raises ValueError for a cap without a single page or an unknown policy.
    """

    def __init__(
        self,
        cap_bytes: int,
        max_record_bytes: int = 1 << 30,
        clock: Clock | None = None,
        undo_s: float = 60.0,
        ttl_s: float = 0.0,
        policy: str = "lru",
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        super().__init__(clock, undo_s, ttl_s, policy)
        self._arena = Arena(cap_bytes, page_bytes)
        self._max_record_bytes = min(max_record_bytes, self._arena.cap_bytes)

    # --- records in and out -------------------------------------------------------------------

    def begin(self, size_bytes: int, epoch: int) -> RamWriter:
        self._take_back_forgotten()
        with self._lock:
            if size_bytes > self._max_record_bytes:
                self._catalog.journal.refused("too_large")
                raise RecordTooLarge(size_bytes, self._max_record_bytes)
            if size_bytes <= 0:
                raise BadFrame("bad_length", "a record has at least its header")
            pages = self._take(self._arena.pages_for(size_bytes), size_bytes)
        return RamWriter(self, self._arena.extents(pages, size_bytes), pages, epoch)

    def open(self, key: BlockKey, *, count_hit: bool = True) -> RamReader | None:
        with self._lock:
            row = self._catalog.index.find(key)
            if row == NONE:
                return None
            if count_hit:
                self._catalog.use(row, hit=True)
            self._catalog.open(row)
            index = self._catalog.index
            entry = self._catalog.entry(row)
            pages = self._arena.chain(index.place[row])
        return RamReader(self, row, entry, self._arena.extents(pages, entry.size_bytes))

    # --- looking after ------------------------------------------------------------------------

    def sweep(self) -> None:
        self._take_back_forgotten()
        with self._lock:
            self._catalog.expire()
            self._purger.expire()
            self._find_unwanted()
        self._arena.prepare()

    @property
    def set_aside_bytes(self) -> int:
        """The most that ``adjust`` can make the cap."""
        return self._arena.mapped_bytes

    def adjust(
        self,
        *,
        cap_bytes: int | None = None,
        undo_s: float | None = None,
        ttl_s: float | None = None,
        dead_after_s: float | None = None,
    ) -> None:
        """What is given is in force; a lower cap evicts at once. Raises StoreFull (nothing is evicted then) when what
        is pinned, leased or being read does not fit below it."""
        with self._lock:
            if cap_bytes is not None:
                self._recap(cap_bytes)
            if undo_s is not None:
                self._purger.undo_s = undo_s
            if ttl_s is not None:
                self._catalog.ttl_s = ttl_s
            if dead_after_s is not None:
                self._catalog.dead_after_s = dead_after_s
                self._unwanted_at_s = float("-inf")

    def would_evict(self, cap_bytes: int) -> Shrinking:
        """What a cap of ``cap_bytes`` would make leave now."""
        with self._lock:
            arena, catalog = self._arena, self._catalog
            wanted = arena.pages - self._pages_under(cap_bytes) - arena.withheld_pages - arena.free_pages
            if wanted <= 0:
                return Shrinking()
            catalog.expire_leases()
            if wanted > catalog.reclaimable():
                return Shrinking(refused=True)
            return shrinking(catalog, self._purger, wanted, arena.page_bytes)

    def _pages_under(self, cap_bytes: int) -> int:
        return max(1, min(self._arena.pages, cap_bytes // self._arena.page_bytes))

    def _recap(self, cap_bytes: int) -> None:
        arena, catalog = self._arena, self._catalog
        pages = self._pages_under(cap_bytes)
        more = arena.pages - pages - arena.withheld_pages
        if more > arena.free_pages:
            catalog.expire_leases()
        if more > arena.free_pages + catalog.reclaimable():
            raise StoreFull(arena.used_bytes, cap_bytes)
        if more > arena.free_pages:
            self._purger.give_up(more - arena.free_pages)
        if more > arena.free_pages:
            catalog.evict(more - arena.free_pages)
        arena.withhold(arena.pages - pages)

    def stats(self) -> StoreStats:
        with self._lock:
            catalog, index = self._catalog, self._catalog.index
            return StoreStats(
                size_bytes=self._arena.used_bytes,
                cap_bytes=self._arena.cap_bytes,
                records=len(index.by_key),
                tokens=index.visible_tokens,
                pinned_records=catalog.pinned,
                quarantined_records=catalog.journal.quarantined,
                evictions=catalog.journal.evictions,
                epoch=self._purger.epoch,
                leases=catalog.leases,
                index_bytes=index.memory_bytes,
                policy=catalog.policy.name,
                refusals=dict(catalog.journal.refusals),
            )

    def close(self) -> None:
        """Nothing more goes in; what is being read stays readable until it is closed."""
        with self._lock:
            self._closed = True

    # --- for the writers and readers ----------------------------------------------------------

    def _take(self, count: int, size_bytes: int) -> Runs:
        """Pages for one record, with the lock held; nothing is evicted unless that makes room enough."""
        arena, catalog = self._arena, self._catalog
        if count > arena.free_pages:
            catalog.expire_leases()
        if self._closed or count > arena.free_pages + catalog.reclaimable():
            catalog.journal.refused("full")
            raise StoreFull(size_bytes, arena.cap_bytes)
        if count > arena.free_pages:
            self._purger.give_up(count - arena.free_pages)
        if count > arena.free_pages:
            catalog.evict(count - arena.free_pages)
        return arena.take(count)

    def _release(self, row: int) -> None:
        index = self._catalog.index
        self._arena.give(self._arena.chain(index.place[row]))

    def publish(self, header: RecordHeader, size_bytes: int, pages: Runs, epoch: int) -> str:
        """What ``RecordWriter.commit`` promises, for a verified record; its pages are the store's from now on."""
        with self._lock:
            try:
                outcome = self._admit(header, epoch)
            except BaseException:
                self._arena.give(pages)
                raise
            if outcome == "present":
                self._arena.give(pages)
                return outcome
            self._catalog.publish(
                header, size_bytes=size_bytes, charge=self._arena.pages_for(size_bytes), place=self._arena.link(pages)
            )
            return outcome

    def give_back(self, pages: Runs) -> None:
        """Pages of a writer that gave up."""
        with self._lock:
            self._arena.give(pages)
