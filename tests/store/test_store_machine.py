"""The RAM store against a model of about twenty lines, whatever the order of calls.

Every record takes one page, so the model needs no sizes. The store may choose which purged records it gives up for
room; the model only counts them and looks afterwards which came back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_records import PAGE, ROOT, FakeClock, get, make_chain, make_record, put

from tierkv.codec.record import RecordKind
from tierkv.errors import StoreFull
from tierkv.identity.blocks import BlockKey
from tierkv.store.base import Selector
from tierkv.store.ram import RamStore

OTHER = BlockKey(b"\x02" * 32)
UNDO_S = 60.0


def _universe():
    """A forked chain of 4 blocks with two checkpoints, and two blocks of another model; each at two fidelities."""
    found = []
    for root, name in ((ROOT, "m"), (OTHER, "o")):
        chain = make_chain(3, tail=5, root=root, model=name)
        fork = make_record([9, 9], chain[1].key, start=512, root=root, model=name)
        window = make_record([], chain[0].key, start=256, root=root, kind=RecordKind.WINDOW, model=name)
        state = make_record([4], chain[2].key, start=768, root=root, kind=RecordKind.STATE, model=name)
        for record in (*chain, fork, window, state) if root == ROOT else chain[:2]:
            worse = make_record(
                record.header.tokens, record.header.parent, start=record.header.start, root=root,
                kind=record.header.kind, model=name, fidelity=20, seed=77,
            )  # fmt: skip
            found.append((record, worse))
    return found


UNIVERSE = _universe()
RECORD_OF = {record.key: record for record, _ in UNIVERSE}
NUMBERS = st.integers(0, len(UNIVERSE) - 1)


@dataclass
class Seen:
    """A record in sight."""

    data: bytes
    fidelity: int
    use: int
    pinned: bool = False


@dataclass
class Model:
    cap: int
    clock: FakeClock
    seen: dict[bytes, Seen] = field(default_factory=dict)
    aside: list = field(default_factory=list)
    doomed: Counter = field(default_factory=Counter)
    readers: Counter = field(default_factory=Counter)
    leases: dict[bytes, float] = field(default_factory=dict)
    uses: int = 0

    def use(self, key) -> int:
        self.uses += 1
        return self.uses

    def used_pages(self) -> int:
        return len(self.seen) + sum(len(g["records"]) - g["lost"] for g in self.aside) + len(+self.doomed)

    def victims(self) -> list[bytes]:
        """In sight, without children in sight, not pinned, leased or read; least recently used first."""
        parents = {RECORD_OF[key].header.parent for key in self.seen}
        held = {key for key, until in self.leases.items() if until > self.clock.now_s}
        held |= {key for key, seen in self.seen.items() if seen.pinned or self.readers[id(seen)]}
        return sorted(self.seen.keys() - parents - held, key=lambda key: self.seen[key].use)

    def make_room(self) -> bool:
        if self.used_pages() < self.cap:
            return True
        for group in self.aside:
            if sum(not self.readers[id(seen)] for seen in group["records"].values()) > group["lost"]:
                group["lost"] += 1
                return True
        victims = self.victims()
        if victims:
            self.leave(victims[0])
        return bool(victims)

    def leave(self, key) -> Seen:
        seen = self.seen.pop(key)
        self.leases.pop(key, None)
        if self.readers[id(seen)]:
            self.doomed[id(seen)] = 1
        return seen


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.store = RamStore(6 * PAGE, page_bytes=PAGE, clock=self.clock, undo_s=UNDO_S)
        self.model = Model(6, self.clock)
        self.open: list = []

    @rule(number=NUMBERS, worse=st.booleans())
    def put(self, number, worse):
        record = UNIVERSE[number][worse]
        if not self.model.make_room():
            with pytest.raises(StoreFull):
                put(self.store, record)
            return
        old = self.model.seen.get(record.key)
        outcome = put(self.store, record)
        if old is not None and old.fidelity <= record.header.fidelity:
            assert outcome == "present"
            return
        assert outcome == ("stored" if old is None else "replaced")
        pinned = old is not None and old.pinned
        if old is not None:
            self.model.leave(record.key)
        self.model.seen[record.key] = Seen(record.data, record.header.fidelity, self.model.use(record.key), pinned)

    @rule()
    def abort(self):
        if self.model.make_room():
            writer = self.store.begin(PAGE, self.store.epoch)
            writer.abort()

    @rule(number=NUMBERS)
    def get(self, number):
        key = UNIVERSE[number][0].key
        seen = self.model.seen.get(key)
        assert get(self.store, key) == (seen.data if seen else None)
        if seen:
            seen.use = self.model.use(key)

    @rule(number=NUMBERS)
    def touch(self, number):
        key = UNIVERSE[number][0].key
        seen = self.model.seen.get(key)
        assert self.store.touch([key]) == [seen is not None]
        if seen:
            seen.use = self.model.use(key)

    @rule(number=NUMBERS)
    def open_reader(self, number):
        key = UNIVERSE[number][0].key
        reader = self.store.open(key, count_hit=False)
        seen = self.model.seen.get(key)
        assert (reader is None) == (seen is None)
        if seen:
            self.model.readers[id(seen)] += 1
            self.open.append((reader, seen))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close_reader(self, data):
        reader, seen = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        assert reader.read(0, 10**6) == seen.data
        reader.close()
        self.model.readers[id(seen)] -= 1
        if not self.model.readers[id(seen)]:
            self.model.doomed.pop(id(seen), None)

    @rule(number=NUMBERS, seconds=st.sampled_from([0.0, 3.0, 20.0]))
    def lease(self, number, seconds):
        key = UNIVERSE[number][0].key
        self.store.lease([key], seconds)
        if key in self.model.seen:
            until = self.clock.now_s + min(seconds, 10.0)
            self.model.leases[key] = max(until, self.model.leases.get(key, 0.0))

    @rule(seconds=st.sampled_from([1.0, 4.0, 61.0]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)
        self.store.sweep()
        for group in [g for g in self.model.aside if g["until"] < self.clock.now_s]:
            self.model.aside.remove(group)
            for seen in group["records"].values():
                if self.model.readers[id(seen)]:
                    self.model.doomed[id(seen)] = 1

    @rule(root=st.sampled_from([ROOT, OTHER]), pinned=st.booleans())
    def pin(self, root, pinned):
        (self.store.pin if pinned else self.store.unpin)(Selector(root=root))
        for key, seen in self.model.seen.items():
            if RECORD_OF[key].header.root == root:
                seen.pinned = pinned

    @rule(number=NUMBERS)
    def pin_a_prefix(self, number):
        """A prefix that ends here: the leaf and what only it stands on."""
        key = UNIVERSE[number][0].key
        children = Counter(RECORD_OF[each].header.parent for each in self.model.seen)
        own = []
        while key in self.model.seen and children[key] == len(own[:1]):
            own.append(key)
            key = RECORD_OF[key].header.parent
        assert self.store.pin(Selector(prefixes=(UNIVERSE[number][0].key,))) == len(own)
        for each in own:
            self.model.seen[each].pinned = True

    @rule(root=st.sampled_from([b"", ROOT, OTHER]))
    def purge(self, root):
        kept = set()
        for key in [key for key, seen in self.model.seen.items() if seen.pinned]:
            while key in self.model.seen:
                kept.add(key)
                key = RECORD_OF[key].header.parent
        chosen = [k for k in self.model.seen if root in (b"", RECORD_OF[k].header.root) and k not in kept]
        result = self.store.purge(self.store.preview_purge(Selector(root=root)).token)
        assert result.records == len(chosen)
        records = {key: self.model.seen.pop(key) for key in chosen}
        for key in chosen:
            self.model.leases.pop(key, None)
        group = {"token": result.undo_token, "records": records, "lost": 0, "until": self.clock.now_s + UNDO_S}
        self.model.aside.append(group)

    @precondition(lambda self: self.model.aside)
    @rule(data=st.data())
    def undo(self, data):
        group = self.model.aside.pop(data.draw(st.integers(0, len(self.model.aside) - 1)))
        records = group["records"]
        count, size = self.store.undo_purge(group["token"])
        back = 0
        for key, seen in records.items():
            now = get(self.store, key, count_hit=False)
            rival = self.model.seen.get(key)
            beaten = rival is not None and rival.fidelity <= seen.fidelity
            if now == seen.data and not beaten:
                if rival is not None:
                    self.model.leave(key)
                self.model.seen[key] = seen
                back += 1
                size -= len(seen.data)
            elif self.model.readers[id(seen)]:
                self.model.doomed[id(seen)] = 1
        assert (count, size) == (back, 0)
        assert back <= len(records) - group["lost"]

    @invariant()
    def the_same_is_in_sight(self):
        for key in RECORD_OF:
            entry = self.store.lookup([key])[0]
            seen = self.model.seen.get(key)
            assert (entry is None) == (seen is None)
            if seen:
                assert (entry.header.fidelity, entry.pinned) == (seen.fidelity, seen.pinned)
        stats = self.store.stats()
        assert stats.records == len(self.model.seen)
        assert stats.pinned_records == sum(seen.pinned for seen in self.model.seen.values())

    @invariant()
    def the_same_room_is_taken(self):
        stats = self.store.stats()
        assert stats.size_bytes == self.model.used_pages() * PAGE <= stats.cap_bytes


StoreMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase
