"""The vault on disk: a log of segments that outlives the process, a catalog over it, and an arena as its hot part.

- A record is checked while it arrives in pages of the arena, appended to the log with one write, published, and then
  acknowledged: a process that is killed loses nothing it has acknowledged. Its pages stay as the hot copy. Only with
  durability "none" it is published and acknowledged first and written behind; it is read from its pages until then.
- What is read cold comes into the arena with one read; without room there it is read piece by piece.
- Room on the disk is counted as the system counts it. What is evicted is punched out of its file before the room is
  used again; where files cannot be punched, mostly dead segments are compacted.
- Pins, purges and undone purges are marks beside the records themselves (see ``log.format``). A restart ends every undo
  window. Ages count the time that the vault has run: clocks that jump and long nights age nothing.

Locks, in the order they are taken: the room's (one makes room at a time), ``_log_lock`` (appends, marks and purges
have one order, the same on the disk as in memory), the burials', ``_lock`` (the catalog, for bookkeeping only).
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from tierkv.codec.record import RecordHeader
from tierkv.errors import BadFrame, RecordTooLarge, Refused, StoreFull, StoreUnwritable
from tierkv.identity.blocks import BlockKey
from tierkv.store.arena import Arena, Runs
from tierkv.store.base import Checked, DiskStats, Finding, PurgePreview, PurgeResult, Selector, Shrinking, StoreStats
from tierkv.store.cataloged import CatalogStore
from tierkv.store.clock import Clock
from tierkv.store.disk_behind import MAX_BEHIND_BYTES, UNPLACED, Behind, WriteBehind
from tierkv.store.disk_options import DiskOptions
from tierkv.store.disk_reader import ColdReader
from tierkv.store.disk_room import Burials, Room, Trouble
from tierkv.store.hot import Hot
from tierkv.store.index import NONE, State
from tierkv.store.journal import Fate
from tierkv.store.log.check import check_segment
from tierkv.store.log.files import Disk
from tierkv.store.log.folder import Folder, Meta
from tierkv.store.log.format import ALIGN, Mark, entry_blocks
from tierkv.store.log.hints import HINT_ROW_BYTES
from tierkv.store.log.keeping import Keeper
from tierkv.store.log.scan import Damage, Found
from tierkv.store.log.segment import Segment
from tierkv.store.log.segments import SegmentLog, place_of, place_parts
from tierkv.store.log.syncer import Syncer
from tierkv.store.ram_streams import RamReader, RamWriter
from tierkv.units import format_size

_LEAST_CAP_BYTES = 64 * ALIGN

_logger = logging.getLogger(__name__)

# The vault's age is on the disk at most so much behind.
_SAVE_META_S = 30.0

_MARKS = {State.VISIBLE: Mark.LIVE, State.PURGED: Mark.PURGED, State.DOOMED: Mark.DEAD}

T = TypeVar("T")


class DiskStore(CatalogStore):
    """A ``Store`` in a folder; see ``base.Store`` for what each method promises.

    Resident memory is ``ram_bytes``, the index (``StoreStats.index_bytes``) and about 10 MB. Loading goes on in a
    thread after the constructor has returned: until it is done a key that is not known yet is missing as "loading".

    Raises StartupError when the folder cannot be had and ValueError for impossible options.
    """

    def __init__(
        self,
        path: Path,
        options: DiskOptions,
        *,
        clock: Clock | None = None,
        disk: Disk | None = None,
        load_in_background: bool = True,
    ) -> None:
        super().__init__(clock, options.undo_s, options.ttl_s, options.policy)
        if options.disk_bytes < 64 * ALIGN:
            raise ValueError(f"disk_bytes must be at least {64 * ALIGN}")
        self._options = options
        self._disk = disk or Disk()
        self._arena = Arena(options.ram_bytes, options.page_bytes)
        self._hot = Hot(self._arena, self._must_stay)
        self._catalog.dead_after_s = options.dead_after_s
        segment_bytes = max(16 * ALIGN, min(options.segment_bytes, options.disk_bytes // 8))
        self._max_record_bytes = min(options.max_record_bytes, self._arena.cap_bytes, options.disk_bytes // 2)
        self._log_lock = threading.Lock()
        self._changed: list[int] = []
        self._trouble = Trouble(self._catalog, self._lock)
        self._behind: WriteBehind | None = None
        self._folder = Folder(path, self._disk)
        try:
            self._log = SegmentLog(self._folder, self._disk, segment_bytes)
            self._log.sequence = secrets.randbits(40)
            self._burials = Burials(self._log, lambda: self._purger.epoch, self._trouble)
            self._keeper = Keeper(self, self._catalog, self._lock, self._log_lock, self._log)
            self._room = Room(
                self._disk, self._log, self._keeper, self._catalog, self._purger, self._lock, self._burials,
                cap_bytes=options.disk_bytes, min_free_bytes=options.min_free_bytes,
            )  # fmt: skip
            self._begin_life()
        except BaseException:
            self._folder.close()
            raise
        self._syncer = (
            None
            if options.durability == "none"
            else Syncer(self._log.sync, self._trouble.note, options.sync_bytes, options.sync_s)
        )
        if options.durability == "none":
            self._behind = WriteBehind(
                self._append, self._catalog, self._room, self._trouble, self._lock, self._log_lock,
                min(MAX_BEHIND_BYTES, self._arena.cap_bytes // 4),
            )  # fmt: skip
        self._keeper.load(in_background=load_in_background)

    def _begin_life(self) -> None:
        """The epoch and the age go on where the last process left them; every segment is counted."""
        folder, meta = self._folder, self._folder.meta
        segments = [self._log.attach(number) for number in folder.segments()]
        epoch = max([meta.epoch, *(segment.epoch for segment in segments)])
        if folder.meta_damage:
            # How many purges there were is not known: later than all of them.
            epoch += 1 + secrets.randbits(20)
            self._catalog.journal.quarantined += 1
            reason = f"{folder.meta_damage} vault.meta"
            self._catalog.journal.note("quarantine", reason, file="vault.meta", reason=reason)
        self._zero_s = max([meta.vault_s, *(segment.vault_s for segment in segments)]) - self._catalog.clock.monotonic()
        self._purger.resume(epoch)
        self._trouble.reason = folder.read_only
        if not folder.read_only:
            try:
                self._save_meta()
            except OSError as error:
                self._trouble.note(error)

    # --- records in ---------------------------------------------------------------------------

    def begin(self, size_bytes: int, epoch: int) -> RamWriter:
        self._tidy()
        if size_bytes > self._max_record_bytes:
            self._refused("too_large")
            raise RecordTooLarge(size_bytes, self._max_record_bytes)
        if size_bytes <= 0:
            raise BadFrame("bad_length", "a record has at least its header")
        if self._folder.read_only:
            self._refused(self._folder.read_only)
            raise StoreUnwritable(self._folder.read_only, f"{self._folder.path} cannot be written")
        count = self._arena.pages_for(size_bytes)
        with self._room.lock:
            with self._lock:
                pages = None if self._closed else self._hot.take(count)
            if pages is None and self._write_behind():
                with self._lock:
                    pages = self._hot.take(count)
            if pages is None:
                self._refused("full")
                raise StoreFull(size_bytes, self._arena.cap_bytes)
            try:
                self._room.make(self._reservation(pages), size_bytes)
            except BaseException:
                with self._lock:
                    self._arena.give(pages)
                raise
            with self._lock:
                self._room.reserved += self._reservation(pages)
        return RamWriter(self, self._arena.extents(pages, size_bytes), pages, epoch)

    def publish(self, header: RecordHeader, size_bytes: int, pages: Runs, epoch: int) -> str:
        """What ``RecordWriter.commit`` promises, for a verified record; its pages are the store's from now on."""
        hint_bytes = HINT_ROW_BYTES + 8 * header.n_tokens + len(header.scalars)
        record = Behind(pages, size_bytes, hint_bytes, self._reservation(pages))
        try:
            outcome = self._publish_unwritten(header, record, epoch)
            if outcome == "present":
                self.give_back(pages)
            if outcome:
                return outcome
            with self._log_lock:
                self._refuse_when_closed()
                with self._lock:
                    outcome = self._admit(header, epoch)
                    known = self._catalog.index.find(header.key)
                    pinned = known != NONE and bool(self._catalog.index.pinned[known])
                if outcome == "present":
                    self.give_back(pages)
                    return outcome
                try:
                    place = self._append(record, pinned)
                except OSError as error:
                    self._refused(self._trouble.note(error))
                    raise StoreUnwritable(
                        self._trouble.reason, f"{self._folder.path} takes no record: {error}"
                    ) from error
                with self._lock:
                    if self._has_as_good(header):  # it was acknowledged from RAM meanwhile
                        outcome = "present"
                        self._burials.add(place, entry_blocks(size_bytes))
                    else:
                        self._publish(header, record, place)
                        self._room.reserved -= record.reserved
                if outcome == "present":
                    self.give_back(pages)
        except BaseException:
            self.give_back(pages)
            raise
        self._bury()
        self._acknowledge(size_bytes)
        return outcome

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise StoreUnwritable("closed", f"{self._folder.path} is closed")

    def _has_as_good(self, header: RecordHeader) -> bool:
        known = self._catalog.index.find(header.key)
        return known != NONE and self._catalog.index.fidelity[known] <= header.fidelity

    def _publish_unwritten(self, header: RecordHeader, record: Behind, epoch: int) -> str:
        """The outcome where no write is waited for; "" where one is, as for a record that takes another's place."""
        if self._behind is None:
            return ""
        with self._lock:
            if self._closed or self._keeper.loading or not self._behind.takes(record.size_bytes):
                return ""
            outcome = self._admit(header, epoch)
            if outcome == "stored":
                self._behind.add(self._publish(header, record, UNPLACED), record)
        return "" if outcome == "replaced" else outcome

    def _publish(self, header: RecordHeader, record: Behind, place: int) -> int:
        size_bytes = record.size_bytes
        row = self._catalog.publish(header, size_bytes=size_bytes, charge=entry_blocks(size_bytes), place=place)
        self._hot.put(row, record.pages)
        return row

    def _append(self, record: Behind, pinned: bool) -> int:
        """The record's place in the log; called with the log's lock held. Raises OSError."""
        pieces = self._arena.extents(record.pages, record.size_bytes).pieces(0, record.size_bytes)
        place, _ = self._log.append(
            pieces, record.size_bytes, pinned=pinned, epoch=self._purger.epoch, vault_s=self.vault_s,
            hint_bytes=record.hint_bytes,
        )  # fmt: skip
        self._trouble.reason = ""
        return place

    def _write_behind(self) -> bool:
        """Whether everything that was acknowledged from RAM is in the log now."""
        if self._behind is None:
            return False
        try:
            with self._log_lock:
                self._behind.write_all()
        except (OSError, BadFrame) as error:
            self._trouble.note(error)
            return False
        return True

    def _acknowledge(self, size_bytes: int) -> None:
        if self._syncer is None:
            return
        ticket = self._syncer.wrote(size_bytes)
        if self._options.durability == "always":
            try:
                self._syncer.wait(ticket)
            except OSError as error:
                raise StoreUnwritable(self._trouble.note(error), f"the record may not be durable: {error}") from error

    def give_back(self, pages: Runs) -> None:
        """Pages of a writer that gave up, and the room that was kept for it on the disk."""
        with self._lock:
            self._arena.give(pages)
            self._room.reserved -= self._reservation(pages)

    def _reservation(self, pages: Runs) -> int:
        """Blocks on the disk for a record that fills these pages, its share of a hint included."""
        size_bytes = sum(count for _, count in pages) * self._arena.page_bytes
        return entry_blocks(size_bytes) + 2

    # --- records out --------------------------------------------------------------------------

    def open(self, key: BlockKey, *, count_hit: bool = True) -> RamReader | ColdReader | None:
        """As ``Store.open``. Raises CorruptionError or OSError for a record whose bytes cannot be had."""
        catalog, index = self._catalog, self._catalog.index
        with self._lock:
            row = index.find(key)
            if row == NONE:
                return None
            if count_hit:
                catalog.use(row, hit=True)
            catalog.open(row)
            entry = catalog.entry(row)
            pages = self._hot.pages(row)
            if pages is not None:
                return RamReader(self, row, entry, self._arena.extents(pages, entry.size_bytes))
            number, block = place_parts(index.place[row])
            segment = self._log.acquire(number)
            pages = self._hot.take(self._arena.pages_for(entry.size_bytes))
        try:
            if segment is None:
                raise BadFrame("lost_segment", f"segment {number} is gone")
            if pages is None:
                return ColdReader(self, row, entry, segment.acquire(), block)
            extents = self._arena.extents(pages, entry.size_bytes)
            segment.read_record(block, entry.size_bytes, extents.pieces(0, entry.size_bytes))
        except BaseException:
            if pages is not None:
                with self._lock:
                    self._arena.give(pages)
            self.end_reading(row)
            raise
        finally:
            if segment is not None:
                segment.let_go()
        with self._lock:
            rival = self._hot.pages(row)
            if rival is not None:
                self._arena.give(pages)
                extents = self._arena.extents(rival, entry.size_bytes)
            else:
                self._hot.put(row, pages)
        return RamReader(self, row, entry, extents)

    def end_reading(self, row: int) -> None:
        super().end_reading(row)
        self._bury()

    def fate(self, key: BlockKey) -> Fate:
        fate = super().fate(key)
        return Fate("loading") if fate.reason == "never_stored" and self._keeper.loading else fate

    # --- keeping ------------------------------------------------------------------------------

    def pin(self, selector: Selector) -> int:
        return self._changing(lambda: super(DiskStore, self).pin(selector))

    def unpin(self, selector: Selector) -> int:
        return self._changing(lambda: super(DiskStore, self).unpin(selector))

    def quarantine(self, key: BlockKey, reason: str) -> None:
        super().quarantine(key, reason)
        self._bury()

    def discard(self, key: BlockKey) -> None:
        super().discard(key)
        self._bury()

    def preview_purge(self, selector: Selector) -> PurgePreview:
        """Raises Refused while the store is loading: what it does not know yet cannot be shown."""
        self._refuse_while_loading()
        return super().preview_purge(selector)

    def purge(self, token: str) -> PurgeResult:
        """As ``Store.purge``; on the disk as well when it returns. Raises StoreUnwritable when it may not be."""
        return self._changing(lambda: super(DiskStore, self).purge(token), epoch_too=True)

    def undo_purge(self, undo_token: str) -> tuple[int, int]:
        return self._changing(lambda: super(DiskStore, self).undo_purge(undo_token))

    def _changing(self, change: Callable[[], T], *, epoch_too: bool = False) -> T:
        """Makes a change of marks; when it returns the disk says the same as memory.

        Nothing is buried in between: a record may give way to one whose mark still has to be written.
        """
        if self._folder.read_only:
            raise StoreUnwritable(self._folder.read_only, f"{self._folder.path} cannot be written")
        self._refuse_while_loading()
        with self._log_lock, self._burials.lock:
            self._refuse_when_closed()
            # What was given up before must not come back in place of what is purged now.
            if not self._burials.bury_now():
                raise StoreUnwritable(self._trouble.reason, f"{self._folder.path} cannot be written")
            done = change()
            try:
                if epoch_too:
                    self._save_meta()
                self._write_marks()
                if self._syncer is not None:
                    self._log.sync()
            except (OSError, BadFrame) as error:
                raise StoreUnwritable(
                    self._trouble.note(error), f"this is done, but may not outlive a restart: {error}"
                ) from error
        self._bury()
        return done

    def _row_changed(self, row: int) -> None:
        self._changed.append(row)

    def _write_marks(self) -> None:
        with self._lock:
            index, rows = self._catalog.index, dict.fromkeys(self._changed)
            self._changed.clear()
            marks = [
                (row, index.place[row], _MARKS[State(index.state[row])], index.pinned[row])
                for row in rows
                if index.state[row] != State.FREE
            ]
        for done, (_, place, mark, pinned) in enumerate(marks):
            try:
                self._log.mark(place, mark, pinned=bool(pinned), epoch=self._purger.epoch)
            except BaseException as error:
                # The rest is written at the next occasion; a damaged entry is believed by nobody anyway.
                left = marks[done + isinstance(error, BadFrame) :]
                with self._lock:
                    self._changed += [row for row, *_ in left]
                raise

    def _refuse_while_loading(self) -> None:
        if self._keeper.loading:
            raise Refused("the vault is still loading its records: ask again in a moment")

    # --- looking after ------------------------------------------------------------------------

    def sweep(self) -> None:
        self._tidy()
        with self._lock:
            self._catalog.expire()
            self._purger.expire()
            self._find_unwanted()
        self._bury()
        self._arena.prepare()
        if self._folder.read_only or self._closed:
            return
        try:
            with self._log_lock:
                self._write_marks()
            self._keeper.sweep(self._options.compact_bytes_per_s)
            if self.vault_s - self._folder.meta.vault_s > _SAVE_META_S:
                self._save_meta()
        except (OSError, BadFrame) as error:
            self._trouble.note(error)

    def adjust(
        self,
        *,
        cap_bytes: int | None = None,
        undo_s: float | None = None,
        ttl_s: float | None = None,
        dead_after_s: float | None = None,
    ) -> None:
        """What is given is in force; a lower cap on the disk evicts at once. Raises StoreFull (nothing is evicted then)
        when what is pinned, leased or being read does not fit below it."""
        if cap_bytes is not None:
            self._room.recap(max(cap_bytes, _LEAST_CAP_BYTES))
        with self._lock:
            if undo_s is not None:
                self._purger.undo_s = undo_s
            if ttl_s is not None:
                self._catalog.ttl_s = ttl_s
            if dead_after_s is not None:
                self._catalog.dead_after_s = dead_after_s
                self._unwanted_at_s = float("-inf")

    def would_evict(self, cap_bytes: int) -> Shrinking:
        """What a cap of ``cap_bytes`` on the disk would make leave now."""
        return self._room.would_evict(max(cap_bytes, _LEAST_CAP_BYTES))

    def check(self, *, repair: bool) -> Iterator[Checked]:
        """Reads the files, not the hot copies. Damage outside of records is left to fsck of a closed folder."""
        self._write_behind()
        segments = self._log.segments()
        done, sound, total = 0, 0, sum(segment.size_bytes for segment in segments)
        for segment in segments:
            if self._log.acquire(segment.number) is None:
                continue
            before = done
            try:
                for found in check_segment(segment):
                    if isinstance(found, Found):
                        sound += 1
                        done = before + (found.head.block + found.head.blocks) * ALIGN
                        yield Checked(done, total, sound)
                    elif (finding := self._finding(segment, found, repair)) is not None:
                        yield Checked(done, total, sound, finding)
            finally:
                segment.let_go()
            done = before + segment.size_bytes
            yield Checked(done, total, sound)

    def _finding(self, segment: Segment, damage: Damage, repair: bool) -> Finding | None:
        """None for what was evicted while it was being read."""
        with self._lock:
            index = self._catalog.index
            here = index.column("place") == place_of(segment.number, damage.block)
            rows: list[int] = np.nonzero(here & index.in_sight())[0].tolist()
            key = index.keys[rows[0]] if rows else BlockKey(b"")
        if not rows and (damage.key or segment.is_blank(damage.block)):
            return None
        if rows and repair:
            self.quarantine(key, damage.reason)
        at, size = damage.block * ALIGN, damage.blocks * ALIGN
        return Finding(segment.path.name, at, damage.reason, size, key, bool(rows) and repair)

    def compact(self) -> Iterator[tuple[int, int]]:
        """Segments that are mostly dead or small are made into full ones; (done, of how many) after each."""
        return self._keeper.compact_all()

    def stats(self) -> StoreStats:
        used, dead = self._log.used_blocks * ALIGN, self._log.dead_blocks * ALIGN
        segments = self._log.segments()
        with self._lock:
            catalog, index = self._catalog, self._catalog.index
            disk = DiskStats(
                folder=str(self._folder.path),
                disk_bytes=used,
                disk_cap_bytes=self._room.cap_bytes,
                ram_bytes=self._arena.used_bytes,
                ram_cap_bytes=self._arena.cap_bytes,
                dead_bytes=dead,
                unsynced_bytes=min(self._log.dirty_bytes, used) + (self._behind.size_bytes if self._behind else 0),
                segments=len(segments),
                segments_loaded=sum(segment.loaded for segment in segments),
                hot_records=len(self._hot),
                damaged=self._keeper.damaged,
                torn=self._keeper.torn,
                durability=self._options.durability,
                problem=self._trouble.reason,
            )
            return StoreStats(
                size_bytes=used,
                cap_bytes=self._room.cap_bytes,
                records=len(index.by_key),
                tokens=index.visible_tokens,
                pinned_records=catalog.pinned,
                quarantined_records=catalog.journal.quarantined,
                evictions=catalog.journal.evictions,
                epoch=self._purger.epoch,
                leases=catalog.leases,
                index_bytes=index.memory_bytes,
                policy=catalog.policy.name,
                loading=self._keeper.loading,
                refusals=dict(catalog.journal.refusals),
                disk=disk,
            )

    def close(self) -> None:
        """Nothing more goes in; everything is synced, hints are written and the folder is free for another process."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._keeper.stop()
        if self._behind is not None:
            self._behind.stop()
            if not self._folder.read_only and not self._write_behind():
                lost = format_size(self._behind.size_bytes)
                _logger.error(
                    "%s: %s that were acknowledged are lost: %s", self._folder.path, lost, self._trouble.reason
                )
        if self._syncer is not None:
            self._syncer.stop()
        self._tidy()
        if not self._folder.read_only:
            try:
                with self._log_lock:
                    self._keeper.close_files()
                    self._save_meta()
            except OSError as error:
                self._trouble.note(error)
        self._log.close()
        self._folder.close()

    # --- time ---------------------------------------------------------------------------------

    @property
    def vault_s(self) -> float:
        """Seconds that the vault has run, in this process and those before."""
        return self._catalog.clock.monotonic() + self._zero_s

    @property
    def zero_s(self) -> float:
        """The vault's age when this process's clock stood at 0."""
        return self._zero_s

    def _save_meta(self) -> None:
        self._folder.save(Meta(self._purger.epoch, self.vault_s), durable=self._options.durability != "none")

    # --- for those who work beside ------------------------------------------------------------

    def _must_stay(self, row: int) -> bool:
        """Whether the row's pages are being read, or are all that there is of it; called with the lock held."""
        return self._catalog.is_open(row) or (self._behind is not None and self._behind.holds(row))

    def _release(self, row: int) -> None:
        self._hot.drop(row)
        if self._behind is None or not self._behind.forget(row):
            index = self._catalog.index
            self._burials.add(index.place[row], index.charge[row])

    def bury(self, place: int, blocks: int) -> None:
        """The entry is to be buried at the next occasion."""
        self._burials.add(place, blocks)

    def _bury(self) -> bool:
        return self._burials.bury()

    def _tidy(self) -> None:
        self._take_back_forgotten()
        self._bury()

    def _refused(self, reason: str) -> None:
        with self._lock:
            self._catalog.journal.refused(reason)
