"""Purging by hand: see what would go, take exactly that out of sight, take it back, and refuse what arrives too late.

- A preview gives a token for exactly the records that it showed. What was stored since is not purged.
- Pinned records, and the heads of chains that they stand on, stay; unless the person named the prefix itself.
- "Not used for so long" never takes a record that a younger one needs.
- A token is stale when it is unknown, used or older than 5 minutes, and, where prefixes were named, when one of them
  has grown or was stored anew since: then what would be purged is no longer what was shown.
- Purged bytes stay until the undo window is over, but they are the first to go when room is needed.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from tierkv.codec.record import RecordHeader
from tierkv.errors import StaleToken
from tierkv.identity.blocks import BlockKey
from tierkv.store.base import PurgePreview, PurgeResult, Selector
from tierkv.store.catalog import Catalog
from tierkv.store.index import NONE, Index
from tierkv.store.prefixes import describe
from tierkv.store.select import matches_header, needed, pinned, select, younger_than

PREVIEW_VALID_S = 300.0
MAX_PREVIEWS = 16
EXAMPLES = 5
# How long after a purge a writer may still come with an older epoch and be judged by what the purge covered; older ones
# are refused whatever they bring.
MARK_VALID_S = 900.0
MAX_MARKS = 64


@dataclass(frozen=True, slots=True)
class _Preview:
    """Keys, heads first, and the stamps of their records as they were shown."""

    selector: Selector
    keys: list[BlockKey]
    stamps: array[int]
    until_s: float


@dataclass(frozen=True, slots=True)
class _Undo:
    """Rows out of sight, heads first: set aside until they are brought back or let go from here."""

    epoch: int
    rows: array[int]
    until_s: float


@dataclass(frozen=True, slots=True)
class _Mark:
    """What a purge covered, to judge writers that began before it."""

    epoch: int
    at_s: float
    selector: Selector
    keys: set[bytes]
    tails: dict[bytes, list[bytes]]

    def covers(self, header: RecordHeader) -> bool:
        """Whether a late record would bring back what was purged: itself, what follows it, or a longer form of it."""
        if not matches_header(self.selector, header):
            return False
        if not self.selector.prefixes:
            return self.selector.older_than_s <= 0
        tokens = header.tokens.tobytes()
        late = (
            header.key in self.keys
            or header.parent in self.keys
            or any(tokens.startswith(tail) for tail in self.tails.get(header.parent, ()))
        )
        if late:
            self.keys.add(header.key)
        return late


class Purger:
    """The purges of one catalog; called under its owner's lock."""

    def __init__(self, catalog: Catalog, undo_s: float) -> None:
        self.epoch = 0
        self._catalog = catalog
        self.undo_s = undo_s
        self._floor = 0
        self._previews: OrderedDict[str, _Preview] = OrderedDict()
        self._undos: OrderedDict[str, _Undo] = OrderedDict()
        self._marks: list[_Mark] = []

    def resume(self, epoch: int) -> None:
        """The store was opened again at this epoch: writers that began before it are refused, whatever they bring."""
        self.epoch = self._floor = max(self.epoch, epoch)

    # --- purging ------------------------------------------------------------------------------

    def preview(self, selector: Selector) -> PurgePreview:
        """What ``purge`` with the returned token would take. Raises UsageError."""
        catalog, index = self._catalog, self._catalog.index
        now = catalog.clock.monotonic()
        chosen = select(index, selector, now)
        rows = self._without_needed(selector, chosen)
        token = secrets.token_hex(16)
        self._previews[token] = _Preview(
            selector, [index.keys[row] for row in rows], array("Q", _stamps(index, rows)), now + PREVIEW_VALID_S
        )
        while len(self._previews) > MAX_PREVIEWS:
            self._previews.popitem(last=False)
        ends = [row for row in rows if index.is_leaf(row)]
        examples = sorted(ends, key=index.used_s.__getitem__, reverse=True)[:EXAMPLES]
        return PurgePreview(
            token,
            len(rows),
            sum(index.size[row] for row in rows),
            len(ends),
            sum(len(index.tokens[row]) // 8 for row in rows),
            sum(index.pinned[row] for row in chosen),
            tuple(describe(index, examples, catalog.to_unix_s)),
        )

    def purge(self, token: str) -> PurgeResult:
        """Takes out of sight what the preview showed and still is as it was. Raises StaleToken."""
        catalog, index = self._catalog, self._catalog.index
        now = catalog.clock.monotonic()
        preview = self._previews.pop(token, None)
        if preview is None or preview.until_s < now:
            raise StaleToken("this purge was previewed too long ago, or has been done already: look at it again")
        rows = self._still_as_shown(preview, now)
        self.epoch += 1
        self._mark(preview.selector, rows, now)
        size = sum(index.size[row] for row in rows)
        undo_token = secrets.token_hex(16)
        self._undos[undo_token] = _Undo(self.epoch, array("I", rows), now + self.undo_s)
        for row in reversed(rows):
            catalog.set_aside(row)
        catalog.journal.note(
            "purge", f"{len(rows)} records purged", records=str(len(rows)), bytes=str(size), epoch=str(self.epoch)
        )
        return PurgeResult(len(rows), size, undo_token, self.undo_s, self.epoch)

    def undo(self, undo_token: str) -> tuple[int, int]:
        """Records and bytes in sight again. Raises StaleToken."""
        catalog, index = self._catalog, self._catalog.index
        undo = self._undos.pop(undo_token, None)
        if undo is None:
            raise StaleToken("this purge cannot be taken back: its window is over, or it was taken back already")
        if undo.until_s < catalog.clock.monotonic():
            self._let_go(undo)
            raise StaleToken("this purge cannot be taken back: its window is over")
        self._marks = [mark for mark in self._marks if mark.epoch != undo.epoch]
        records = size = 0
        for row in undo.rows:
            if catalog.bring_back(row):
                records, size = records + 1, size + index.size[row]
        catalog.journal.note("purge", f"{records} records brought back", records=str(records), bytes=str(size))
        return records, size

    # --- time and room ------------------------------------------------------------------------

    def expire(self) -> None:
        """Undo windows, previews and marks whose time is over go."""
        now = self._catalog.clock.monotonic()
        for token in [token for token, undo in self._undos.items() if undo.until_s < now]:
            self._let_go(self._undos.pop(token))
        for token in [token for token, preview in self._previews.items() if preview.until_s < now]:
            del self._previews[token]
        while self._marks and (len(self._marks) > MAX_MARKS or self._marks[0].at_s < now - MARK_VALID_S):
            self._floor = max(self._floor, self._marks.pop(0).epoch)

    def give_up(self, wanted: int) -> int:
        """Purged records are beyond undo, oldest purge first, tails before heads, until ``wanted`` charge is free."""
        catalog, index, released = self._catalog, self._catalog.index, 0
        for undo in self._undos.values():
            being_read = array("I")
            while undo.rows and released < wanted:
                row = undo.rows.pop()
                if catalog.is_open(row):
                    being_read.append(row)
                    continue
                released += index.charge[row]
                catalog.let_go(row)
            undo.rows.extend(reversed(being_read))
            if released >= wanted:
                break
        return released

    def would_give_up(self, wanted: int) -> int:
        """How much charge ``give_up`` would set free."""
        catalog, released = self._catalog, 0
        for undo in self._undos.values():
            for row in reversed(undo.rows):
                if released >= wanted:
                    return released
                released += 0 if catalog.is_open(row) else catalog.index.charge[row]
        return released

    # --- late writers -------------------------------------------------------------------------

    def stale(self, header: RecordHeader, epoch: int) -> int:
        """The epoch of a purge that a record written at ``epoch`` comes too late for; 0 if there is none."""
        if epoch > self.epoch:
            epoch = 0  # said by a vault that lived before this one: nothing is known of what the writer saw
        if epoch < self._floor:
            return self._floor
        return next((mark.epoch for mark in self._marks if mark.epoch > epoch and mark.covers(header)), 0)

    # --- inside -------------------------------------------------------------------------------

    def _without_needed(self, selector: Selector, chosen: list[int]) -> list[int]:
        catalog, index = self._catalog, self._catalog.index
        staying = list[int]()
        if not selector.prefixes:
            staying += pinned(index)
        if selector.older_than_s > 0:
            staying += younger_than(index, selector.older_than_s, catalog.clock.monotonic())
        kept = needed(index, staying)
        return [row for row in chosen if row not in kept]

    def _still_as_shown(self, preview: _Preview, now: float) -> list[int]:
        index, named = self._catalog.index, bool(preview.selector.prefixes)
        rows = list[int]()
        for key, stamp in zip(preview.keys, preview.stamps, strict=True):
            row = index.find(key)
            if row == NONE:
                continue
            if index.stamp[row] == stamp:
                rows.append(row)
            elif named:
                raise StaleToken("a prefix has been stored anew since the preview: look at it again")
        shown = set(rows)
        if named and any(child not in shown for row in rows for child in index.children_of(row)):
            raise StaleToken("a prefix has grown since the preview: look at it again")
        if preview.selector.older_than_s > 0:
            before = now - preview.selector.older_than_s
            rows = [row for row in rows if index.used_s[row] <= before]
        return self._without_needed(preview.selector, rows)

    def _mark(self, selector: Selector, rows: list[int], now: float) -> None:
        index = self._catalog.index
        keys, tails = set[bytes](), dict[bytes, list[bytes]]()
        if selector.prefixes:
            keys.update(index.keys[row] for row in rows)
            for row in rows:
                if index.is_leaf(row):
                    tails.setdefault(index.parent_keys[row], []).append(index.tokens[row])
        self._marks.append(_Mark(self.epoch, now, selector, keys, tails))

    def _let_go(self, undo: _Undo) -> None:
        for row in undo.rows:
            self._catalog.let_go(row)


def _stamps(index: Index, rows: list[int]) -> Iterator[int]:
    return (index.stamp[row] for row in rows)
