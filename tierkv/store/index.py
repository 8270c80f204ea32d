"""The record index: columns by row, so that 100,000 records cost no objects for the garbage collector to visit.

A row is a small integer that names a record as long as it lives; rows are used again. Rows in sight form trees: a
row's parent is the record whose key is its parent key; rows whose parent is not here (the first block of a prompt, or
a checkpoint whose blocks live on another vault) hang together under that key.

``holds`` makes "what may go" exact: a row is held while something protects it (a lease, a pin) or one of its children
is held. Rows in sight that are not held can all be evicted, children before parents.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.identity.blocks import BlockKey, Media
from tierkv.store.base import IndexEntry
from tierkv.store.facts import Facts, FactsPool

NONE = -1


class State(IntEnum):
    FREE = 0
    VISIBLE = 1
    PURGED = 2  # out of sight until its undo window is over
    DOOMED = 3  # out of sight; a reader still has it open


# Beyond the token ids, CPython 3.11 on 64 bits, checked by bench/store.py with tracemalloc: the key (80), its dict
# entry and row number (100), token object (33), three list slots (24), the columns with their spare room (120).
_ROW_BYTES = 360
# Headers made a moment ago: 8 us each to make, 0.6 KB each to keep.
_KEPT_HEADERS = 4_096
_HEADER_BYTES = 600
_COLUMNS = {
    "state": "B", "kind": "B", "fidelity": "B", "pinned": "B",
    "holds": "I", "parent": "i", "first_child": "i", "next_sibling": "i", "prev_sibling": "i",
    "facts_id": "I", "header_bytes": "I", "segments": "I", "charge": "I", "hits": "I",
    "start": "Q", "raw_bytes": "Q", "size": "Q", "place": "Q", "stamp": "Q", "epoch": "Q",
    "created_s": "d", "stored_s": "d", "used_s": "d",
}  # fmt: skip


class Index:
    """Rows, keys and trees. No lock and no clock of its own: the catalog that owns it has both.

    ``charge``: what the record takes of the store's room, in the store's unit (pages in RAM). ``place``: where its
    bytes are, for the store to know. ``stamp``: a number no other stored record has, so that a row used again is told
    apart. ``stored_s`` and ``used_s`` are monotonic seconds.
    """

    state: array[int]
    kind: array[int]
    fidelity: array[int]
    pinned: array[int]
    holds: array[int]
    parent: array[int]
    first_child: array[int]
    next_sibling: array[int]
    prev_sibling: array[int]
    facts_id: array[int]
    header_bytes: array[int]
    segments: array[int]
    charge: array[int]
    hits: array[int]
    start: array[int]
    raw_bytes: array[int]
    size: array[int]
    place: array[int]
    stamp: array[int]
    epoch: array[int]
    created_s: array[float]
    stored_s: array[float]
    used_s: array[float]

    def __init__(self) -> None:
        for name, code in _COLUMNS.items():
            setattr(self, name, array(code))
        self.keys: list[BlockKey] = []
        self.parent_keys: list[BlockKey] = []
        self.tokens: list[bytes] = []
        self.by_key: dict[BlockKey, int] = {}
        self.orphans: dict[BlockKey, int] = {}
        self.visible_charge = 0
        self.held_charge = 0
        self.visible_tokens = 0
        self._free: list[int] = []
        self._facts = FactsPool()
        self._extras: dict[int, tuple[str, tuple[Media, ...]]] = {}
        self._headers: dict[int, RecordHeader] = {}
        self._stamps = 0
        self._token_bytes = 0

    # --- rows ---------------------------------------------------------------------------------

    def add(self, header: RecordHeader, *, size_bytes: int, charge: int, place: int, now_s: float) -> int:
        """A new row in sight, linked to its parent and children. Its key must not be in sight yet."""
        row = self._free.pop() if self._free else self._grow()
        tokens = header.tokens.tobytes()
        self._stamps += 1
        self.keys[row], self.parent_keys[row], self.tokens[row] = header.key, header.parent, tokens
        self.kind[row], self.fidelity[row], self.pinned[row], self.holds[row] = header.kind, header.fidelity, 0, 0
        self.facts_id[row] = self._facts.share(header)
        self.header_bytes[row], self.segments[row] = size_bytes - header.segment_bytes, header.segments
        self.charge[row], self.place[row], self.size[row], self.hits[row] = charge, place, size_bytes, 0
        self.start[row], self.raw_bytes[row] = header.start, header.raw_bytes
        self.stamp[row], self.epoch[row] = self._stamps, header.epoch
        self.created_s[row], self.stored_s[row], self.used_s[row] = header.created_unix_s, now_s, now_s
        if header.scalars or header.media:
            self._extras[row] = (header.scalars, header.media)
        self._token_bytes += len(tokens)
        self.show(row)
        return row

    def add_many(
        self,
        columns: Mapping[str, NDArray[Any]],
        keys: Sequence[BlockKey],
        parent_keys: Sequence[BlockKey],
        tokens: Sequence[bytes],
        facts: Sequence[Facts],
        extras: Mapping[int, tuple[str, tuple[Media, ...]]],
    ) -> range:
        """New rows in sight, as they were before a restart; none of the keys is in sight yet.

        ``columns`` hold the index's own by name, [n]; absent ones are 0. ``facts_id`` counts in ``facts``.
        """
        first, count = len(self.keys), len(keys)
        facts_id = columns["facts_id"]
        users = np.bincount(facts_id, minlength=len(facts)).tolist()
        known = np.array([self._facts.share(each, n) if n else 0 for each, n in zip(facts, users, strict=True)])
        made = {**columns, "facts_id": known[facts_id] if count else facts_id}
        made["stamp"] = np.arange(self._stamps + 1, self._stamps + 1 + count)
        made["state"] = np.full(count, State.VISIBLE)
        for name in ("parent", "first_child", "next_sibling", "prev_sibling"):
            made[name] = np.full(count, NONE)
        self._stamps += count
        for name, code in _COLUMNS.items():
            column: array[Any] = getattr(self, name)
            values = made[name].astype(code).view(np.uint8).data if name in made else bytes(column.itemsize * count)
            column.frombytes(values)
        self.keys += keys
        self.parent_keys += parent_keys
        self.tokens += tokens
        self._token_bytes += sum(map(len, tokens))
        self._extras.update({first + row: extra for row, extra in extras.items()})
        rows = range(first, first + count)
        self._show_many(rows, parent_keys)
        return rows

    def drop(self, row: int) -> None:
        """Forgets a row that is out of sight."""
        self._token_bytes -= len(self.tokens[row])
        self._facts.unshare(self.facts_id[row])
        self._extras.pop(row, None)
        self._headers.pop(row, None)
        self.state[row] = State.FREE
        self.keys[row] = self.parent_keys[row] = BlockKey(b"")
        self.tokens[row] = b""
        self._free.append(row)

    def show(self, row: int) -> None:
        """Puts a row in sight: by key, under its parent, over the children that wait for it."""
        key = self.keys[row]
        self.by_key[key] = row
        self.state[row] = State.VISIBLE
        self.visible_charge += self.charge[row]
        self.visible_tokens += len(self.tokens[row]) // 8
        self.first_child[row] = NONE
        self._attach(row)
        self._adopt(row)

    def _show_many(self, rows: range, parent_keys: Sequence[BlockKey]) -> None:
        """As ``show`` of each of the last rows. What is linked like a chain, as nearly all are, is linked at once."""
        first, keys = rows.start, self.keys[rows.start :]
        awaited = self.orphans.keys() & keys
        self.by_key.update(zip(keys, rows, strict=True))
        parents = np.fromiter(map(self.by_key.get, parent_keys, repeat(NONE)), np.int64, len(rows))
        first_child = self.column("first_child")
        places = np.nonzero(parents != NONE)[0]
        places = places[first_child[parents[places]] == NONE]
        first_child[parents[places]] = first + places
        lone = places[first_child[parents[places]] == first + places]
        self.column("parent")[first + lone] = parents[lone]
        pairs = zip(parent_keys, parents.tolist(), strict=True)
        self.parent_keys[first:] = [key if parent == NONE else self.keys[parent] for key, parent in pairs]
        others = np.ones(len(rows), bool)
        others[lone] = False
        for place in np.nonzero(others)[0].tolist():
            self._attach(first + place)
        for key in awaited:
            self._adopt(self.by_key[key])
        self.visible_charge += int(self.column("charge")[first:].sum())
        self.visible_tokens += sum(map(len, self.tokens[first:])) // 8

    def hide(self, row: int, state: State) -> None:
        """Takes a row out of sight; its children wait for another record of its key."""
        if self.holds[row]:
            self.held_charge -= self.charge[row]
            self.unhold(self.parent[row])
        self._detach(row)
        self._orphan_children(row)
        del self.by_key[self.keys[row]]
        self.state[row] = state
        self.holds[row] = 0
        self.visible_charge -= self.charge[row]
        self.visible_tokens -= len(self.tokens[row]) // 8

    def extras_of(self, row: int) -> tuple[str, tuple[Media, ...]] | None:
        """Scalars and media of the row, if it has any."""
        return self._extras.get(row)

    def header(self, row: int) -> RecordHeader:
        """The record's header as it was stored, made from the columns; the same prompt asks for it again and again."""
        known = self._headers.get(row)
        if known is None:
            if len(self._headers) >= _KEPT_HEADERS:
                self._headers.clear()
            known = self._headers[row] = self._header(row)
        return known

    def _header(self, row: int) -> RecordHeader:
        facts = self.facts(row)
        scalars, media = self._extras.get(row, ("", ()))
        return RecordHeader(
            RecordKind(self.kind[row]), self.keys[row], self.parent_keys[row], facts.root,
            np.frombuffer(self.tokens[row], "<i8"), self.start[row], facts.layout_digest, facts.layout,
            self.fidelity[row], self.epoch[row], self.created_s[row], self.segments[row],
            self.size[row] - self.header_bytes[row], self.raw_bytes[row], facts.model, facts.codec, scalars, media,
        )  # fmt: skip

    def entry(self, row: int, to_unix_s: float) -> IndexEntry:
        return IndexEntry(
            self.header(row), self.size[row], self.stored_s[row] + to_unix_s, self.used_s[row] + to_unix_s,
            self.hits[row], bool(self.pinned[row]),
        )  # fmt: skip

    def snapshot(self) -> Index:
        """A copy to read from without the lock: about 5 ms for 100,000 rows."""
        other = Index()
        for name in (*_COLUMNS, "keys", "parent_keys", "tokens"):
            setattr(other, name, getattr(self, name)[:])
        other._facts, other._extras = self._facts.snapshot(), dict(self._extras)
        return other

    def facts(self, row: int) -> Facts:
        return self._facts[self.facts_id[row]]

    def facts_numbered(self, number: int) -> Facts:
        """The facts with this ``facts_id``."""
        return self._facts[number]

    def facts_where(self, good: Callable[[Facts], bool]) -> list[int]:
        """Ids of the facts that pass."""
        return self._facts.where(good)

    def find(self, key: BlockKey) -> int:
        """The row in sight with this key, or NONE."""
        return self.by_key.get(key, NONE)

    def column(self, name: str) -> NDArray[Any]:
        """A column as numpy sees it, [rows]; let go of it before the next row is added."""
        values: array[Any] = getattr(self, name)
        return np.frombuffer(values, values.typecode) if values else np.zeros(0, values.typecode)

    def in_sight(self) -> NDArray[np.bool_]:
        """[rows] bool: which rows are visible records."""
        return self.column("state") == State.VISIBLE

    @property
    def memory_bytes(self) -> int:
        """An estimate of the index's own memory, token ids included."""
        rows = len(self.keys) * _ROW_BYTES + len(self.orphans) * 180 + len(self._headers) * _HEADER_BYTES
        return rows + self._token_bytes + self._facts.memory_bytes

    # --- trees --------------------------------------------------------------------------------

    def children_of(self, row: int) -> Iterator[int]:
        child = self.first_child[row]
        while child != NONE:
            following = self.next_sibling[child]
            yield child
            child = following

    def children_of_key(self, key: BlockKey) -> Iterator[int]:
        """Rows in sight whose parent key this is, whether or not that parent is here."""
        row = self.by_key.get(key, NONE)
        child = self.first_child[row] if row != NONE else self.orphans.get(key, NONE)
        while child != NONE:
            following = self.next_sibling[child]
            yield child
            child = following

    def is_leaf(self, row: int) -> bool:
        return self.first_child[row] == NONE

    def is_only_child(self, row: int) -> bool:
        return self.next_sibling[row] == NONE and self.prev_sibling[row] == NONE

    def path(self, row: int) -> list[int]:
        """The row and its ancestors that are here, the row first."""
        found: list[int] = []
        while row != NONE:
            found.append(row)
            row = self.parent[row]
        return found

    # --- holds --------------------------------------------------------------------------------

    def hold(self, row: int) -> None:
        """One more protection of a row in sight. Constant time for a chain taken head first."""
        while row != NONE:
            self.holds[row] += 1
            if self.holds[row] > 1:
                return
            self.held_charge += self.charge[row]
            row = self.parent[row]

    def unhold(self, row: int) -> None:
        """One protection of a row in sight less. Of the rows that this frees only ``row`` itself can be a leaf."""
        while row != NONE:
            self.holds[row] -= 1
            if self.holds[row]:
                return
            self.held_charge -= self.charge[row]
            row = self.parent[row]

    # --- inside -------------------------------------------------------------------------------

    def _grow(self) -> int:
        for name in _COLUMNS:
            getattr(self, name).append(0)
        self.keys.append(BlockKey(b""))
        self.parent_keys.append(BlockKey(b""))
        self.tokens.append(b"")
        return len(self.keys) - 1

    def _attach(self, row: int) -> None:
        parent_key = self.parent_keys[row]
        parent = self.by_key.get(parent_key, NONE)
        if parent != NONE:
            self.parent_keys[row] = self.keys[parent]
            after, self.first_child[parent] = self.first_child[parent], row
        else:
            after = self.orphans.get(parent_key, NONE)
            if after != NONE:
                self.parent_keys[row] = self.parent_keys[after]
            self.orphans[self.parent_keys[row]] = row
        self.parent[row], self.prev_sibling[row], self.next_sibling[row] = parent, NONE, after
        if after != NONE:
            self.prev_sibling[after] = row

    def _detach(self, row: int) -> None:
        before, after, parent = self.prev_sibling[row], self.next_sibling[row], self.parent[row]
        if after != NONE:
            self.prev_sibling[after] = before
        if before != NONE:
            self.next_sibling[before] = after
        elif parent != NONE:
            self.first_child[parent] = after
        elif after != NONE:
            self.orphans[self.parent_keys[row]] = after
        else:
            del self.orphans[self.parent_keys[row]]
        self.parent[row] = self.prev_sibling[row] = self.next_sibling[row] = NONE

    def _adopt(self, row: int) -> None:
        """The children that wait for the row come before those that it has."""
        key = self.keys[row]
        child = first = self.orphans.pop(key, NONE)
        last, held = NONE, False
        while child != NONE:
            self.parent[child], self.parent_keys[child] = row, key
            if self.holds[child]:
                if held:
                    self.holds[row] += 1
                else:
                    self.hold(row)
                held = True
            last, child = child, self.next_sibling[child]
        if last != NONE:
            after, self.first_child[row] = self.first_child[row], first
            self.next_sibling[last] = after
            if after != NONE:
                self.prev_sibling[after] = last

    def _orphan_children(self, row: int) -> None:
        child = self.first_child[row]
        if child == NONE:
            return
        self.orphans[self.keys[row]] = child
        while child != NONE:
            self.parent[child] = NONE
            child = self.next_sibling[child]
        self.first_child[row] = NONE
