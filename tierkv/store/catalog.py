"""What a store knows and decides, wherever the bytes lie: what is in sight, in use, next to go, and why it went.

A store owns one catalog and one lock; every method here is called under that lock and moves no record bytes. The store
says where a record's bytes are (``place``) and how much room they take (``charge``), gets the row back through
``release`` when that room is free again, and is told through ``changed`` of rows that were pinned, unpinned, set aside,
brought back, or removed while somebody reads them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.errors import ForeignRecord
from tierkv.identity.blocks import BlockKey
from tierkv.store.base import IndexEntry
from tierkv.store.clock import Clock
from tierkv.store.index import NONE, Index, State
from tierkv.store.journal import Fate, Journal
from tierkv.store.policy import Policy

MAX_LEASE_S = 10.0
# Bounds how long one sweep holds the lock: about 5 us a record.
EXPIRED_PER_SWEEP = 2_000


class Catalog:
    """Rows in sight and their lives."""

    def __init__(
        self,
        clock: Clock,
        policy: Policy,
        ttl_s: float,
        release: Callable[[int], None],
        changed: Callable[[int], None] | None = None,
    ) -> None:
        self.clock = clock
        self.policy = policy
        self.ttl_s = ttl_s
        self.index = Index()
        self.journal = Journal()
        self.dead_after_s = 0.0
        self.purged_charge = 0
        self.pinned = 0
        self._release = release
        self._changed = changed
        self._readers: dict[int, int] = {}
        self._leases: dict[int, float] = {}
        self._lease_ends: list[tuple[float, int]] = []
        # Rows and stamps of identities that were not seen for long, tails last: what goes before the policy is asked.
        self._unwanted: list[tuple[int, int]] = []

    # --- looking ------------------------------------------------------------------------------

    @property
    def to_unix_s(self) -> float:
        """What turns the index's monotonic times into dates; taken anew each time, since the wall clock may jump."""
        return self.clock.wall() - self.clock.monotonic()

    def entry(self, row: int) -> IndexEntry:
        return self.index.entry(row, self.to_unix_s)

    def children(self, parent: BlockKey, kinds: Iterable[RecordKind], like: bytes | None, limit: int) -> list[int]:
        """At most ``limit`` rows in sight, the longest agreement with ``like`` first, then the most recently used."""
        index, wanted = self.index, frozenset(int(kind) for kind in kinds)
        rows = (row for row in index.children_of_key(parent) if index.kind[row] in wanted)
        if like is None:
            return heapq.nlargest(limit, rows, key=index.used_s.__getitem__)
        best: list[tuple[int, float, int]] = []
        bar = 8
        for row in rows:
            tokens = index.tokens[row]
            if index.kind[row] == RecordKind.BLOCK:
                # Equal up to the bar is worth a closer look; one comparison of bytes tells most of them apart.
                if tokens[:bar] != like[:bar]:
                    continue
                beyond = tokens[bar : bar + 8] == like[bar : bar + 8]
                rank = (_agreeing_bytes(tokens, like) if beyond else bar, index.used_s[row], row)
            elif like.startswith(tokens):
                rank = (len(tokens), index.used_s[row], row)
            else:
                continue
            if len(best) < limit:
                heapq.heappush(best, rank)
            else:
                heapq.heappushpop(best, rank)
                bar = max(8, best[0][0])
        return [row for _, _, row in sorted(best, reverse=True)]

    @property
    def leases(self) -> int:
        return len(self._leases)

    def reclaimable(self) -> int:
        """Room that can be had without touching anything that is being read, leased, pinned or needed by such."""
        index, seen = self.index, set[int]()
        room = index.visible_charge - index.held_charge + self.purged_charge
        for row in self._readers:
            # Readers are few and come and go quickly, so their ancestors are found here and not kept count of.
            while index.state[row] == State.VISIBLE and not index.holds[row] and row not in seen:
                seen.add(row)
                room -= index.charge[row]
                if index.parent[row] == NONE:
                    break
                row = index.parent[row]
        return room

    # --- coming -------------------------------------------------------------------------------

    def check_kin(self, header: RecordHeader) -> None:
        """Raises ForeignRecord for a record that contradicts its parent, if that is here."""
        index, parent = self.index, self.index.find(header.parent)
        if parent == NONE:
            return
        if index.facts(parent).root != header.root:
            raise ForeignRecord("foreign_model", "the record names another model than its parent")
        if index.start[parent] + len(index.tokens[parent]) // 8 != header.start:
            raise ForeignRecord("foreign_position", "the record does not start where its parent ends")

    def publish(self, header: RecordHeader, *, size_bytes: int, charge: int, place: int) -> int:
        """The record is in sight; it takes the place, the pin and the hits of one of its key that was there before."""
        index, known = self.index, self.index.find(header.key)
        pinned = hits = 0
        if known != NONE:
            pinned, hits = index.pinned[known], index.hits[known]
            self.remove(known, "replaced")
        row = index.add(header, size_bytes=size_bytes, charge=charge, place=place, now_s=self.clock.monotonic())
        index.hits[row] = hits
        self.policy.admitted(row, header.key)
        if pinned:
            self.pin((row,))
        self.offer(row)
        return row

    def load(self, load_rows: Callable[[Index], range]) -> None:
        """Rows that ``load_rows`` added to the index are in sight as they were before a restart."""
        index = self.index
        added = load_rows(index)
        rows = np.arange(added.start, added.stop)
        self.policy.admitted_many(rows, index.keys[added.start : added.stop])
        for row in rows[index.column("pinned")[rows] != 0].tolist():
            self.pinned += 1
            index.hold(row)
        self._offer_all(rows)

    def change_policy(self, policy: Policy) -> None:
        """Another policy decides from now on; it is told of every record, the least recently used first."""
        index = self.index
        purged: list[int] = np.nonzero(index.column("state") == State.PURGED)[0].tolist()
        policy.admitted_many(np.array(purged, np.int64), [index.keys[row] for row in purged])
        for row in purged:
            policy.gone(row)
        here = np.nonzero(index.in_sight())[0]
        rows: list[int] = here[np.argsort(index.column("used_s")[here], kind="stable")].tolist()
        policy.admitted_many(np.array(rows, np.int64), [index.keys[row] for row in rows])
        self.policy = policy
        self._offer_all(np.array(rows, np.int64))

    def _offer_all(self, rows: NDArray[np.int64]) -> None:
        """``offer`` of each of the rows [n], in their order."""
        index = self.index
        free = (index.column("first_child")[rows] == NONE) & (index.column("holds")[rows] == 0)
        for row in rows[free].tolist():
            self.offer(row)

    # --- use ----------------------------------------------------------------------------------

    def use(self, row: int, *, hit: bool) -> None:
        self.index.used_s[row] = self.clock.monotonic()
        self.index.hits[row] += hit
        self.policy.used(row)

    def open(self, row: int) -> None:
        """A reader more: the record's bytes stay until as many ``close``."""
        self._readers[row] = self._readers.get(row, 0) + 1

    def close(self, row: int) -> None:
        left = self._readers[row] - 1
        if left:
            self._readers[row] = left
            return
        del self._readers[row]
        state = self.index.state[row]
        if state == State.VISIBLE:
            self.offer(row)
        elif state == State.PURGED:
            self.purged_charge += self.index.charge[row]
        else:
            self._free(row)

    def lease(self, keys: Iterable[BlockKey], seconds: float) -> None:
        until = self.clock.monotonic() + min(max(seconds, 0.0), MAX_LEASE_S)
        for key in keys:
            row = self.index.find(key)
            if row == NONE:
                continue
            known = self._leases.get(row)
            if known is None:
                self.index.hold(row)
                heapq.heappush(self._lease_ends, (until, row))
            if known is None or known < until:
                self._leases[row] = until

    def pin(self, rows: Sequence[int]) -> None:
        for row in rows:
            if not self.index.pinned[row]:
                self.index.pinned[row] = 1
                self.pinned += 1
                self.index.hold(row)
                self._tell_changed(row)

    def unpin(self, rows: Sequence[int]) -> None:
        for row in rows:
            if self.index.pinned[row]:
                self.index.pinned[row] = 0
                self.pinned -= 1
                self.unhold(row)
                self._tell_changed(row)

    def unhold(self, row: int) -> None:
        self.index.unhold(row)
        self.offer(row)

    def offer(self, row: int) -> None:
        """Tells the policy of a row that may go now."""
        if row != NONE and self.may_go(row):
            self.policy.offered(row)

    def may_go(self, row: int) -> bool:
        index = self.index
        return (
            index.state[row] == State.VISIBLE
            and not index.holds[row]
            and index.first_child[row] == NONE
            and row not in self._readers
        )

    # --- going --------------------------------------------------------------------------------

    def evict(self, wanted: int) -> int:
        """Gives up records, leaves first, until ``wanted`` charge is released or nothing may go; returns how much."""
        released = 0
        while released < wanted:
            row, why = self._next_unwanted(), "its model was not used for long"
            if row is None:
                row, why = self.policy.victim(self.may_go), f"the vault was full, policy {self.policy.name}"
            if row is None:
                break
            released += self.index.charge[row]
            self.remove(row, "evicted", why)
        return released

    def would_evict(self, wanted: int) -> list[int]:
        """The rows that ``evict`` would give up now, in its order."""
        index, policy, unwanted = self.index, self.policy.copy(), self._unwanted.copy()
        gone, released = dict[int, None](), 0

        def may_go(row: int) -> bool:
            children = index.children_of(row)
            free = index.state[row] == State.VISIBLE and not index.holds[row] and row not in self._readers
            return free and row not in gone and all(child in gone for child in children)

        while released < wanted:
            row = None
            while unwanted and row is None:
                first, stamp = unwanted.pop()
                row = first if index.stamp[first] == stamp and may_go(first) else None
            if row is None and (row := policy.victim(may_go)) is None:
                break
            released += index.charge[row]
            gone[row] = None
            policy.gone(row)
            parent = index.parent[row]
            if parent != NONE and may_go(parent):
                policy.offered(parent)
        return list(gone)

    def find_unwanted(self) -> None:
        """From now on records of identities not used for ``dead_after_s`` go before any other. 5 ms for 100,000."""
        index = self.index
        self._unwanted.clear()
        if self.dead_after_s <= 0 or not index.keys:
            return
        here = index.in_sight()
        last_use: dict[BlockKey, float] = {}
        by_facts = np.full(int(index.column("facts_id").max()) + 1, -np.inf)
        np.maximum.at(by_facts, index.column("facts_id")[here], index.column("used_s")[here])
        for number in np.nonzero(by_facts > -np.inf)[0].tolist():
            root = index.facts_numbered(number).root
            last_use[root] = max(last_use.get(root, -np.inf), by_facts[number])
        before = self.clock.monotonic() - self.dead_after_s
        dead = [
            n for n in np.nonzero(by_facts > -np.inf)[0].tolist() if last_use[index.facts_numbered(n).root] < before
        ]
        rows: list[int] = np.nonzero(here & np.isin(index.column("facts_id"), dead))[0].tolist()
        self._unwanted = [(row, index.stamp[row]) for row in sorted(rows, key=index.start.__getitem__)]

    def _next_unwanted(self) -> int | None:
        index = self.index
        while self._unwanted:
            row, stamp = self._unwanted.pop()
            if index.stamp[row] == stamp and self.may_go(row):
                return row
        return None

    def remove(self, row: int, reason: str, why: str = "") -> None:
        """The record is out of sight for good; its room is released when its last reader closes."""
        self._hide(row, State.DOOMED, reason, why)
        if row not in self._readers:
            self._free(row)
        else:
            self._tell_changed(row)

    def set_aside(self, row: int) -> None:
        """The record is out of sight, but ``bring_back`` can still undo that."""
        self._hide(row, State.PURGED, "purged")
        self._tell_changed(row)
        if row not in self._readers:
            self.purged_charge += self.index.charge[row]

    def bring_back(self, row: int) -> bool:
        """In sight again, unless a record as good has come under its key in the meantime."""
        index = self.index
        rival = index.find(index.keys[row])
        if rival != NONE and index.fidelity[rival] <= index.fidelity[row]:
            self.let_go(row)
            return False
        if rival != NONE:
            self.remove(rival, "replaced")
        if row not in self._readers:
            self.purged_charge -= index.charge[row]
        index.show(row)
        self.pinned += index.pinned[row]
        if index.pinned[row]:
            index.hold(row)
        self.policy.returned(row)
        self.offer(row)
        self._tell_changed(row)
        return True

    def let_go(self, row: int) -> None:
        """A row that was set aside is beyond undo."""
        if row in self._readers:
            self.index.state[row] = State.DOOMED
            self._tell_changed(row)
        else:
            self.purged_charge -= self.index.charge[row]
            self._free(row)

    def is_open(self, row: int) -> bool:
        return row in self._readers

    def expire(self) -> None:
        """Leases that are over end; records not used for ``ttl_s`` go, unless something that stays needs them."""
        now = self.clock.monotonic()
        self._expire_leases(now)
        if self.ttl_s <= 0:
            return
        index, before = self.index, now - self.ttl_s
        old = index.in_sight() & (index.column("used_s") <= before)
        old &= (index.column("first_child") == NONE) & (index.column("holds") == 0)
        rows: list[int] = np.nonzero(old)[0].tolist()
        left = EXPIRED_PER_SWEEP
        for row in rows:
            while left and row != NONE and self.may_go(row) and index.used_s[row] <= before:
                parent = index.parent[row]
                self.remove(row, "expired", "not used for longer than ttl_s")
                row, left = parent, left - 1

    def expire_leases(self) -> None:
        self._expire_leases(self.clock.monotonic())

    def _expire_leases(self, now: float) -> None:
        ends = self._lease_ends
        while ends and ends[0][0] <= now:
            _, row = heapq.heappop(ends)
            until = self._leases.get(row)
            if until is None:
                continue
            if until > now:
                heapq.heappush(ends, (until, row))
                continue
            del self._leases[row]
            self.unhold(row)

    def _tell_changed(self, row: int) -> None:
        if self._changed is not None:
            self._changed(row)

    def _hide(self, row: int, state: State, reason: str, why: str = "") -> None:
        index = self.index
        self._leases.pop(row, None)
        end = index.start[row] + len(index.tokens[row]) // 8
        fate = Fate(
            reason, self.clock.wall(), why, RecordKind(index.kind[row]), end,
            index.parent_keys[row],
        )  # fmt: skip
        self.journal.gone(index.keys[row], fate, index.size[row])
        parent = index.parent[row]
        index.hide(row, state)
        self.pinned -= index.pinned[row]
        self.policy.gone(row)
        self.offer(parent)

    def _free(self, row: int) -> None:
        self._release(row)
        self.index.drop(row)

    # --- telling ------------------------------------------------------------------------------

    def quarantine(self, row: int, reason: str) -> None:
        """A record in sight was found damaged: it goes."""
        key = self.index.keys[row]
        self.remove(row, "quarantined", reason)
        self.journal.damaged(key, reason)

    def refuse_damaged(self, key: BlockKey | None, reason: str) -> None:
        """A record arrived damaged or foreign; a sound one of its key that is in sight stays."""
        self.journal.refusals[reason] += 1
        self.journal.damaged(key, reason)
        if key and self.index.find(key) == NONE:
            self.journal.remember(key, Fate("quarantined", self.clock.monotonic() + self.to_unix_s, reason))


def _agreeing_bytes(left: bytes, right: bytes) -> int:
    """Leading token ids, 8 bytes each, that agree; in bytes."""
    low, high = 0, min(len(left), len(right)) // 8
    while low < high:
        middle = (low + high + 1) // 2
        if left[low * 8 : middle * 8] == right[low * 8 : middle * 8]:
            low = middle
        else:
            high = middle - 1
    return low * 8
