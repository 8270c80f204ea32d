"""Writers, readers and a janitor at once: every byte read is one that was stored."""

from __future__ import annotations

import threading

import numpy as np
from store_records import PAGE, make_chain, make_record, put

from tierkv.errors import StaleEpoch, StaleToken, StoreFull
from tierkv.store.base import Selector
from tierkv.store.ram import RamStore


def run_all(*works) -> None:
    """Runs the works in threads of their own and raises what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(work) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_four_threads_hammering_one_store():
    store = RamStore(120 * PAGE, page_bytes=PAGE, undo_s=0.01)
    chains = [make_chain(4, first_token=n * 10_000, tail=9, payload_bytes=3 * PAGE, segments=2) for n in range(12)]
    records = [record for chain in chains for record in chain]
    data_of = {record.key: record.data for record in records}
    served = [0, 0]
    for record in records[:20]:
        put(store, record)

    def write(seed: int):
        def work() -> None:
            random = np.random.default_rng(seed)
            for number in random.integers(0, len(records), 150):
                try:
                    if random.random() < 0.1:
                        store.begin(len(records[number].data), store.epoch).abort()
                    put(store, records[number], step=2000)
                except (StoreFull, StaleEpoch):
                    pass

        return work

    def read(seed: int):
        def work() -> None:
            random = np.random.default_rng(seed)
            for number in random.integers(0, len(records), 400):
                key = records[number].key
                store.lease([key], 0.001)
                reader = store.open(key)
                if reader is None:
                    continue
                with reader:
                    got = b"".join(reader.read(at, 1500) for at in range(0, reader.size_bytes, 1500))
                assert got == data_of[key]
                served[seed % 2] += 1

        return work

    def keep_house() -> None:
        for turn in range(60):
            store.sweep()
            store.prefixes(Selector())
            store.children(records[turn % len(records)].header.parent, [1, 2, 3])
            if turn % 10 == 9:
                try:
                    token = store.purge(store.preview_purge(Selector(prefixes=(records[turn].key,))).token).undo_token
                    store.undo_purge(token)
                except StaleToken:
                    pass
            assert store.stats().size_bytes <= 120 * PAGE

    run_all(write(1), write(2), read(10), read(11), keep_house)
    assert all(served)
    store.sweep()
    store.purge(store.preview_purge(Selector()).token)
    threading.Event().wait(0.02)
    store.sweep()
    assert store.stats().size_bytes == 0
    assert store._arena.take(120) == [(0, 120)]


def test_writers_of_the_same_keys_leave_one_record_each():
    store = RamStore(64 * PAGE, page_bytes=PAGE)
    records = [make_record([n], payload_bytes=PAGE, seed=n) for n in range(8)]
    outcomes: list[str] = []

    def work() -> None:
        outcomes.extend(put(store, record, step=700) for record in records)

    run_all(*[work] * 4)
    assert sorted(outcomes) == ["present"] * 24 + ["stored"] * 8
    assert store.stats().size_bytes == sum(record.pages for record in records) * PAGE
