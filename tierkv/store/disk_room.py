"""Room on a vault's disk: who leaves for what is to come, and that what has left is erased from its file."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tierkv.errors import BadFrame, StoreFull, StoreUnwritable
from tierkv.store.base import Shrinking
from tierkv.store.catalog import Catalog
from tierkv.store.forecast import shrinking
from tierkv.store.log.files import Disk, refusal_reason
from tierkv.store.log.format import ALIGN
from tierkv.store.log.keeping import Keeper
from tierkv.store.log.segments import SegmentLog
from tierkv.store.purge import Purger

# Where files cannot be punched, so much of the disk's share may be alive: the rest is what compaction works with.
_LIVE_SHARE_WITHOUT_PUNCHING = 0.8


class Trouble:
    """Whether the disk does what it is told. ``reason``: a slug, "" while it does; ``lock`` guards the catalog."""

    def __init__(self, catalog: Catalog, lock: threading.Lock) -> None:
        self.reason = ""
        self._catalog, self._lock = catalog, lock

    def note(self, error: OSError | BadFrame) -> str:
        """The reason; it is shown, and told once until the disk does again."""
        reason = refusal_reason(error) if isinstance(error, OSError) else error.reason
        with self._lock:
            if self.reason != reason:
                self._catalog.journal.note("disk", f"the vault's disk fails: {error}", reason=reason)
            self.reason = reason
        return reason


class Burials:
    """Entries that are to be erased. Whoever comes next does it, without the catalog's lock."""

    def __init__(self, log: SegmentLog, epoch: Callable[[], int], trouble: Trouble) -> None:
        self.lock = threading.Lock()
        self._log, self._epoch, self._trouble = log, epoch, trouble
        self._waiting: deque[tuple[int, int]] = deque()

    def add(self, place: int, blocks: int) -> None:
        self._waiting.append((place, blocks))

    @property
    def waiting_blocks(self) -> int:
        return sum(blocks for _, blocks in tuple(self._waiting))

    def bury(self) -> bool:
        """Whatever was added before this call is erased from its file; False if the disk refuses."""
        with self.lock:
            return self.bury_now()

    def bury_now(self) -> bool:
        """As ``bury``, for who holds ``lock`` already."""
        while self._waiting:
            place, blocks = self._waiting[0]
            try:
                self._log.bury(place, blocks, self._epoch())
            except OSError as error:
                self._trouble.note(error)
                return False
            self._waiting.popleft()
        return True


class Room:
    """What may still be written: within ``cap_bytes``, and leaving ``min_free_bytes`` on the file system.

    ``lock``: one makes room at a time. ``reserved``: blocks that writers were promised; the catalog's lock guards it.
    """

    def __init__(
        self,
        disk: Disk,
        log: SegmentLog,
        keeper: Keeper,
        catalog: Catalog,
        purger: Purger,
        catalog_lock: threading.Lock,
        burials: Burials,
        *,
        cap_bytes: int,
        min_free_bytes: int,
    ) -> None:
        self.lock = threading.Lock()
        self.cap_bytes = cap_bytes
        self.reserved = 0
        self._disk, self._log, self._keeper, self._burials = disk, log, keeper, burials
        self._catalog, self._purger, self._catalog_lock = catalog, purger, catalog_lock
        self._min_free_bytes = min_free_bytes

    def make(self, blocks: int, size_bytes: int) -> None:
        """So many blocks may be written; called with ``lock`` held. Nothing is evicted that cannot make room enough.

        Raises StoreFull, or StoreUnwritable where the file system is what is full.
        """
        while (short := self._short(blocks, self.cap_bytes)) > 0:
            with self._catalog_lock:
                self._catalog.expire_leases()
                if short > self._catalog.reclaimable() + (0 if self._log.can_punch else self._log.dead_blocks):
                    break
                wanted = self._to_evict(short, self.cap_bytes)
                wanted -= self._purger.give_up(wanted)
                if wanted > 0:
                    self._catalog.evict(wanted)
            if not self._burials.bury():
                break
            self._keeper.drop_empty()
            if self._short(blocks, self.cap_bytes) > 0 and (self._log.can_punch or not self._keeper.compact_one()):
                break
        else:
            return
        full = blocks > self._spare_blocks() - self.reserved
        with self._catalog_lock:
            self._catalog.journal.refused("disk_full" if full else "full")
        if full:
            raise StoreUnwritable("disk_full", f"the file system of {self._log.folder.path} is full")
        raise StoreFull(size_bytes, self.cap_bytes)

    def recap(self, cap_bytes: int) -> None:
        """The cap is another one; what does not fit below it has left. Raises as ``make``, then nothing is changed."""
        with self.lock:
            before, self.cap_bytes = self.cap_bytes, cap_bytes
            try:
                self.make(0, 0)
            except (StoreFull, StoreUnwritable):
                self.cap_bytes = before
                raise

    def would_evict(self, cap_bytes: int) -> Shrinking:
        """What ``recap`` would make leave now; what segments take beside their records is not counted."""
        short = self._short(0, cap_bytes) - (self._burials.waiting_blocks if self._log.can_punch else 0)
        if short <= 0:
            return Shrinking()
        with self._catalog_lock:
            self._catalog.expire_leases()
            if short > self._catalog.reclaimable() + (0 if self._log.can_punch else self._log.dead_blocks):
                return Shrinking(refused=True)
            return shrinking(self._catalog, self._purger, self._to_evict(short, cap_bytes), ALIGN)

    def _to_evict(self, short: int, cap_bytes: int) -> int:
        """Blocks that must go so that ``short`` come free; called with the catalog's lock held."""
        if self._log.can_punch:
            return short
        live = self._catalog.index.visible_charge + self._catalog.purged_charge
        return max(0, live + short - int(self._cap_blocks(cap_bytes) * _LIVE_SHARE_WITHOUT_PUNCHING))

    def _cap_blocks(self, cap_bytes: int) -> int:
        """Without punching, compaction needs room for what it copies."""
        spare = 0 if self._log.can_punch else self._log.segment_bytes
        return (cap_bytes - spare) // ALIGN

    def _short(self, blocks: int, cap_bytes: int) -> int:
        """How many blocks are missing for so many more."""
        growth = min(self._cap_blocks(cap_bytes) - self._log.used_blocks, self._spare_blocks())
        return blocks + self.reserved - growth

    def _spare_blocks(self) -> int:
        """What the file system has left for the vault; below 0 when others took some of what is to stay free."""
        try:
            return (self._disk.free_bytes(self._log.folder.path) - self._min_free_bytes) // ALIGN
        except OSError:
            return 0
