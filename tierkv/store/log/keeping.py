"""What goes on beside the calls: loading segments, writing their hints, compacting what is mostly dead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tierkv.codec.record import verify_record
from tierkv.errors import CorruptionError
from tierkv.store.catalog import Catalog
from tierkv.store.index import Index, State
from tierkv.store.log.format import ALIGN
from tierkv.store.log.hints import HINT_ROW_BYTES, pack_hint
from tierkv.store.log.loading import Content, hint_of, load_hint, read_segment
from tierkv.store.log.segment import Segment
from tierkv.store.log.segments import SegmentLog, place_parts
from tierkv.store.policy import policy_named

# A closed segment that did not change for so long gets a hint again.
_HINT_AFTER_S = 30.0
# Segments with less than this share of a full one alive are worth copying together.
_SMALL_SHARE = 0.25


class Home(Protocol):
    """The store."""

    @property
    def vault_s(self) -> float: ...

    @property
    def zero_s(self) -> float: ...

    def bury(self, place: int, blocks: int) -> None: ...


class Keeper:
    """``log_lock`` orders appends, marks and drops; ``lock`` guards the catalog (see ``DiskStore``)."""

    def __init__(
        self, home: Home, catalog: Catalog, lock: threading.Lock, log_lock: threading.Lock, log: SegmentLog
    ) -> None:
        self._home, self._catalog, self._lock, self._log_lock, self._log = home, catalog, lock, log_lock, log
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._credit_bytes = 0
        self.loading = True
        self.damaged = 0
        self.torn = 0

    # --- loading ------------------------------------------------------------------------------

    def load(self, *, in_background: bool) -> None:
        """Every segment that is there becomes rows, the newest first."""
        segments = self._log.segments()[::-1]
        for segment in segments:
            segment.loaded = False
        if in_background and segments:
            self._thread = threading.Thread(target=self._load_all, args=(segments,), name="vault-load", daemon=True)
            self._thread.start()
        else:
            self._load_all(segments)

    def stop(self) -> None:
        """No loading and no compaction goes on."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _load_all(self, segments: list[Segment]) -> None:
        for segment in segments:
            if self._stop.is_set():
                return
            try:
                self._load(segment)
            except OSError as error:
                self._tell_damage(segment, 0, f"cannot be read: {error.strerror}")
            segment.loaded = True
        with self._lock:
            # Segments were loaded the newest first; what leaves first goes by the last use.
            self._catalog.change_policy(policy_named(self._catalog.policy.name))
            self.loading = False

    def _load(self, segment: Segment) -> None:
        data: bytes | None = None
        if segment.has_hint:
            try:
                data = self._log.folder.hint_path(segment.number).read_bytes()
            except OSError:
                data = None
        content = read_segment(segment, data)
        with self._lock:
            losers = load_hint(self._catalog, segment, content.hint, -self._home.zero_s)
        segment.changed_s = self._home.vault_s
        for place, blocks in (*losers, *content.dead):
            segment.live_blocks += blocks
            self._home.bury(place, blocks)
        if not content.by_hint:
            self._after_scan(segment, content)

    def _after_scan(self, segment: Segment, content: Content) -> None:
        if segment.damage:
            self._tell_damage(segment, 0, segment.damage)
        if content.hint_damage == "damaged_hint":
            self._tell_damage(segment, 0, content.hint_damage)
        for damage in content.damage:
            self._tell_damage(segment, damage.block, damage.reason)
        if not segment.writable:
            return
        try:
            if content.torn_at:
                self.torn += 1
                segment.cut(content.torn_at * ALIGN)
                segment.end_block = content.torn_at
            self._log.forget_hint(segment)
            segment.set_slot(closed=True, generation=segment.generation + 1)
        except OSError as error:
            self._tell_damage(segment, 0, f"cannot be written: {error.strerror}")

    def _tell_damage(self, segment: Segment, block: int, reason: str) -> None:
        self.damaged += 1
        with self._lock:
            self._catalog.journal.quarantined += 1
            where = f"{segment.path.name} at {block * ALIGN}" if block else segment.path.name
            self._catalog.journal.note("quarantine", f"{where}: {reason}", file=segment.path.name, reason=reason)

    # --- sweeping -----------------------------------------------------------------------------

    def sweep(self, bytes_per_s: int) -> None:
        """One second's share of housekeeping. Raises OSError."""
        if self.loading:
            return
        with self._log_lock:
            self._drop_empty()
            quiet_s = self._home.vault_s - _HINT_AFTER_S
            for segment in self._log.segments():
                if segment.closed and not segment.has_hint and segment.changed_s < quiet_s:
                    self._write_hint(segment)
                    break
        self._credit_bytes = min(self._credit_bytes + bytes_per_s, 8 * bytes_per_s)
        if self._credit_bytes > 0 and (chosen := self._candidates()):
            self._credit_bytes -= chosen[0].live_blocks * ALIGN
            self._compact(chosen[0])

    def close_files(self) -> None:
        """Every segment is closed, synced and has its hint, as far as its purges allow. Raises OSError."""
        self._log.close_open()
        self._log.sync()
        self._drop_empty()
        for segment in self._log.segments():
            if segment.loaded and not segment.has_hint and segment.writable:
                self._write_hint(segment)

    def _write_hint(self, segment: Segment) -> None:
        with self._lock:
            hint = hint_of(self._catalog.index, segment.number, self._home.zero_s)
        if hint is None:
            return
        data = pack_hint(hint, segment=segment.number, generation=segment.generation, end_block=segment.end_block)
        self._log.folder.disk.replace(self._log.folder.hint_path(segment.number), data, durable=False)
        segment.hint_bytes = sum(map(len, data))
        segment.has_hint = True

    def drop_empty(self) -> None:
        """Segments in which nothing lives are gone. Raises OSError."""
        with self._log_lock:
            self._drop_empty()

    def _drop_empty(self) -> None:
        for segment in self._log.segments():
            may_go = segment.closed and segment.loaded and segment.writable and not segment.live_blocks
            if may_go and not self._rows(segment):
                self._log.drop(segment)

    def _rows(self, segment: Segment) -> list[int]:
        with self._lock:
            return self._rows_here(segment)

    def _rows_here(self, segment: Segment) -> list[int]:
        """Rows that have bytes in the segment, whatever their state; called with the lock held."""
        index = self._catalog.index
        here = (index.column("place") >> np.uint64(32)) == segment.number
        return np.nonzero(here & (index.column("state") != State.FREE))[0].tolist()

    # --- compaction ---------------------------------------------------------------------------

    def compact_all(self) -> Iterator[tuple[int, int]]:
        """(done, of how many) after each segment. Raises OSError."""
        with self._log_lock:
            self._drop_empty()
        chosen = self._candidates()
        for done, segment in enumerate(chosen, 1):
            self._compact(segment)
            yield done, len(chosen)

    def compact_one(self) -> bool:
        """Room came free from the segment with the most dead bytes; False if there is none. Raises OSError."""
        if self.loading:
            return False
        with self._log_lock:
            if self._log.open_segment is not None and self._log.open_segment.dead_blocks:
                self._log.close_open()
        ready = [s for s in self._log.segments() if s.closed and s.loaded and s.writable and s.dead_blocks]
        return any(self._compact(s) for s in sorted(ready, key=lambda s: s.live_blocks - s.dead_blocks))

    def _candidates(self) -> list[Segment]:
        """Closed segments that waste room or files, the emptiest first."""
        full = self._log.segment_bytes // ALIGN
        ready = [s for s in self._log.segments() if s.closed and s.loaded and s.writable]
        small = [s for s in ready if s.live_blocks < full * _SMALL_SHARE]
        wasteful = [s for s in ready if s.dead_blocks > s.live_blocks and s.dead_blocks > full // 8]
        chosen = {s.number: s for s in (small if len(small) > 1 else []) + wasteful}
        return sorted(chosen.values(), key=lambda s: s.live_blocks)

    def _compact(self, segment: Segment) -> bool:
        """What lives in the segment is in the open one, on the disk, and the file is gone; False if it must stay, or if
        another has dropped it meanwhile.

        Appends and purges wait meanwhile. What is evicted meanwhile is buried at its new place; who reads it has its
        pages or holds the old file open.
        """
        with self._log_lock:
            if not self._log.has(segment):
                return False
            with self._lock:
                rows = self._rows_here(segment)
                if any(self._catalog.index.state[row] == State.PURGED for row in rows):
                    return False
                moves = [_Move.of(self._catalog.index, row) for row in rows]
            try:
                for move in moves:
                    self._copy(segment, move)
                self._log.sync()
            except BaseException:
                # Nothing has moved: a copy that stayed would outlive a purge of its record.
                for move in moves:
                    if move.copy:
                        self._home.bury(move.copy, move.charge)
                raise
            with self._lock:
                strays = [move for move in moves if move.copy and not self._settle(move)]
            for move in strays:
                self._home.bury(move.copy, move.charge)
            self._log.drop(segment)
        return True

    def _copy(self, segment: Segment, move: _Move) -> None:
        with self._lock:
            if not move.holds(self._catalog.index):
                return
            pinned = bool(self._catalog.index.pinned[move.row])
        data = segment.read(place_parts(move.place)[1], 0, move.size_bytes)
        try:
            verify_record(data)
        except CorruptionError as error:
            with self._lock:
                if move.holds(self._catalog.index):
                    self._catalog.quarantine(move.row, str(error))
            return
        move.copy, _ = self._log.append(
            [data],
            move.size_bytes,
            pinned=pinned,
            epoch=move.epoch,
            vault_s=move.stored_s + self._home.zero_s,
            hint_bytes=move.hint_bytes,
        )

    def _settle(self, move: _Move) -> bool:
        if not move.holds(self._catalog.index):
            return False
        self._catalog.index.place[move.row] = move.copy
        return True


@dataclass(slots=True)
class _Move:
    """A row on its way to another place."""

    row: int
    stamp: int
    place: int
    size_bytes: int
    charge: int
    epoch: int
    stored_s: float
    hint_bytes: int
    copy: int = 0

    @classmethod
    def of(cls, index: Index, row: int) -> _Move:
        return cls(
            row, index.stamp[row], index.place[row], index.size[row], index.charge[row], index.epoch[row],
            index.stored_s[row], HINT_ROW_BYTES + len(index.tokens[row]),
        )  # fmt: skip

    def holds(self, index: Index) -> bool:
        """Whether the record is still in sight at its old place."""
        row = self.row
        return index.state[row] == State.VISIBLE and (index.stamp[row], index.place[row]) == (self.stamp, self.place)
