"""A purge takes what it showed, can be taken back, and what comes too late stays out."""

from __future__ import annotations

import pytest
from store_records import PAGE, get, make_chain, make_record, put

from tierkv.codec.record import RecordKind
from tierkv.errors import StaleEpoch, StaleToken, StoreFull, UsageError
from tierkv.identity.blocks import BlockKey
from tierkv.store.base import Selector

OTHER = BlockKey(b"\x02" * 32)


def fill(store, records) -> None:
    for record in records:
        put(store, record)


def visible(store, records) -> list[int]:
    return [n for n, entry in enumerate(store.lookup([record.key for record in records])) if entry]


def forked():
    """Two prompts that share two blocks: [shared, shared, a tail, b block, b tail]."""
    left = make_chain(2, tail=10)
    right_block = make_record(range(1000, 1256), left[1].key, start=512, seed=5)
    right_tail = make_record(range(9), right_block.key, start=768, seed=6)
    return [*left, right_block, right_tail]


# --- the preview -------------------------------------------------------------------------------


def test_a_preview_shows_what_would_go_and_changes_nothing(make_store):
    store = make_store()
    records = forked()
    fill(store, records)
    shown = store.preview_purge(Selector())
    assert (shown.records, shown.prefixes, shown.pinned_records) == (5, 2, 0)
    assert shown.bytes == sum(len(record.data) for record in records)
    assert shown.tokens == 256 * 3 + 10 + 9
    assert {example.leaf.header.key for example in shown.examples} == {records[2].key, records[4].key}
    assert visible(store, records) == [0, 1, 2, 3, 4]
    assert store.epoch == 0


def test_a_prefix_takes_only_what_no_other_prefix_uses(make_store):
    store = make_store()
    records = forked()
    fill(store, records)
    result = store.purge(store.preview_purge(Selector(prefixes=(records[4].key[:4],))).token)
    assert (result.records, result.epoch) == (2, 1)
    assert visible(store, records) == [0, 1, 2]


def test_all_prefixes_of_a_trunk_take_the_trunk_too(make_store):
    store = make_store()
    records = forked()
    fill(store, records)
    store.purge(store.preview_purge(Selector(prefixes=(records[2].key, records[4].key))).token)
    assert visible(store, records) == []


@pytest.mark.parametrize(
    ("selector", "left"),
    [
        (Selector(root=OTHER), [0, 2]),
        (Selector(model="b"), [0, 2]),
        (Selector(tier="ssm"), [0, 1]),
        (Selector(tier="kv"), [2]),
        (Selector(model="a", tier="kv"), [1, 2]),
        (Selector(model="nobody"), [0, 1, 2]),
        (Selector(prefixes=(b"\xff" * 32,)), [0, 1, 2]),
    ],
)
def test_every_field_narrows_the_choice(make_store, selector, left):
    store = make_store()
    records = [
        make_record([1], model="a"),
        make_record([2], OTHER, root=OTHER, model="b"),
        make_record([3], kind=RecordKind.STATE, model="a"),
    ]
    fill(store, records)
    store.purge(store.preview_purge(selector).token)
    assert visible(store, records) == left


def test_age_counts_from_the_last_use_and_spares_what_a_younger_record_needs(make_store, clock):
    store = make_store()
    records = forked()
    fill(store, records)
    clock.advance(100)
    store.touch([records[3].key])
    clock.advance(10)
    store.purge(store.preview_purge(Selector(older_than_s=50)).token)
    assert visible(store, records) == [0, 1, 3]


def test_pinned_records_and_the_heads_they_stand_on_stay_unless_the_prefix_is_named(make_store):
    store = make_store()
    records = forked()
    fill(store, records)
    assert store.pin(Selector(prefixes=(records[4].key,))) == 2
    shown = store.preview_purge(Selector())
    assert (shown.records, shown.pinned_records) == (1, 2)
    store.purge(shown.token)
    assert visible(store, records) == [0, 1, 3, 4]
    named = store.preview_purge(Selector(prefixes=(records[4].key,)))
    assert (named.records, named.pinned_records) == (4, 2)
    store.purge(named.token)
    assert visible(store, records) == []
    assert store.stats().pinned_records == 0


@pytest.mark.parametrize("selector", [Selector(tier="hot"), Selector(prefixes=(b"abc",))])
def test_a_selector_without_sense_is_refused(make_store, selector):
    for call in ("preview_purge", "pin", "unpin", "prefixes"):
        with pytest.raises(UsageError):
            getattr(make_store(), call)(selector)


# --- the token ---------------------------------------------------------------------------------


def test_what_was_stored_since_the_preview_is_not_purged(make_store):
    store = make_store()
    old, new = make_record([1]), make_record([2])
    put(store, old)
    token = store.preview_purge(Selector()).token
    put(store, new)
    assert store.purge(token).records == 1
    assert visible(store, [old, new]) == [1]


def test_what_is_gone_since_the_preview_makes_it_smaller(make_store):
    store = make_store()
    records = [make_record([n]) for n in range(3)]
    fill(store, records)
    token = store.preview_purge(Selector()).token
    store.quarantine(records[0].key, "bad")
    store.pin(Selector(prefixes=(records[1].key,)))
    assert store.purge(token).records == 1
    assert visible(store, records) == [1]


def test_what_was_used_since_the_preview_is_not_old_any_more(make_store, clock):
    store = make_store()
    records = [make_record([n]) for n in range(2)]
    fill(store, records)
    clock.advance(100)
    token = store.preview_purge(Selector(older_than_s=50)).token
    get(store, records[0].key)
    store.purge(token)
    assert visible(store, records) == [0]


def test_a_named_prefix_that_has_grown_makes_the_token_stale(make_store):
    store = make_store()
    head = make_chain(1)[0]
    put(store, head)
    token = store.preview_purge(Selector(prefixes=(head.key,))).token
    put(store, make_record([1], head.key, start=256))
    with pytest.raises(StaleToken):
        store.purge(token)
    assert visible(store, [head]) == [0]


def test_a_named_prefix_that_was_stored_anew_makes_the_token_stale(make_store):
    store = make_store()
    lossy, exact = (make_record(range(256), fidelity=f) for f in (20, 0))
    put(store, lossy)
    named = store.preview_purge(Selector(prefixes=(lossy.key,))).token
    broad = store.preview_purge(Selector()).token
    put(store, exact)
    with pytest.raises(StaleToken):
        store.purge(named)
    assert store.purge(broad).records == 0
    assert visible(store, [exact]) == [0]


def test_a_token_works_once_and_for_five_minutes(make_store, clock):
    store = make_store()
    put(store, make_record([1]))
    token = store.preview_purge(Selector()).token
    late = store.preview_purge(Selector()).token
    store.purge(token)
    clock.advance(301)
    for used in (token, late, "", "0" * 32):
        with pytest.raises(StaleToken):
            store.purge(used)


def test_only_so_many_previews_are_kept(make_store):
    store = make_store()
    put(store, make_record([1]))
    first = store.preview_purge(Selector()).token
    for _ in range(16):
        last = store.preview_purge(Selector()).token
    with pytest.raises(StaleToken):
        store.purge(first)
    assert store.purge(last).records == 1


# --- the undo window ---------------------------------------------------------------------------


def test_undo_brings_back_exactly_what_was(make_store, clock):
    store = make_store()
    records = forked()
    fill(store, records)
    get(store, records[2].key)
    store.pin(Selector(prefixes=(records[2].key,)))
    before = [store.lookup([record.key])[0] for record in records]
    shape = [(p.leaf.header.key, p.chain, p.own_keys) for p in store.prefixes(Selector())]
    stats = store.stats()
    named = Selector(prefixes=(records[2].key, records[4].key))
    result = store.purge(store.preview_purge(named).token)
    assert (result.records, result.undo_s) == (5, 60.0)
    assert store.stats().records == 0
    assert {store.missing_reason(record.key) for record in records} == {"purged"}
    clock.advance(59)
    assert store.undo_purge(result.undo_token) == (5, sum(len(record.data) for record in records))
    after = [store.lookup([record.key])[0] for record in records]
    assert [(e.hits, e.pinned, e.last_hit_unix_s) for e in after] == [
        (e.hits, e.pinned, e.last_hit_unix_s) for e in before
    ]
    assert [(p.leaf.header.key, p.chain, p.own_keys) for p in store.prefixes(Selector())] == shape
    assert [get(store, record.key) for record in records] == [record.data for record in records]
    again = store.stats()
    assert (again.records, again.tokens, again.pinned_records) == (stats.records, stats.tokens, stats.pinned_records)


def test_undo_keeps_the_order_of_eviction(make_store):
    store = make_store(pages=3)
    records = [make_record([n]) for n in range(3)]
    fill(store, records)
    store.touch([records[0].key])
    store.undo_purge(store.purge(store.preview_purge(Selector()).token).undo_token)
    put(store, make_record([9]))
    assert visible(store, records) == [0, 2]


def test_purged_bytes_count_until_the_window_is_over(make_store, clock):
    store = make_store()
    record = make_record([1])
    put(store, record)
    result = store.purge(store.preview_purge(Selector()).token)
    assert store.stats().size_bytes == PAGE
    clock.advance(60.1)
    store.sweep()
    assert store.stats().size_bytes == 0
    with pytest.raises(StaleToken):
        store.undo_purge(result.undo_token)


def test_an_undo_after_its_window_is_refused_even_before_a_sweep(make_store, clock):
    store = make_store()
    put(store, make_record([1]))
    result = store.purge(store.preview_purge(Selector()).token)
    clock.advance(60.1)
    with pytest.raises(StaleToken):
        store.undo_purge(result.undo_token)
    assert store.stats().size_bytes == 0


def test_purged_bytes_are_given_up_before_anything_in_sight(make_store):
    store = make_store(pages=4)
    chain = make_chain(2, tail=3)
    kept = make_record([-1], model="kept")
    fill(store, [*chain, kept])
    result = store.purge(store.preview_purge(Selector(model="m")).token)
    new = [make_record([-2]), make_record([-3])]
    fill(store, new)
    assert visible(store, [kept, *new]) == [0, 1, 2]
    assert store.stats().evictions == 0
    assert store.undo_purge(result.undo_token) == (1, len(chain[0].data))
    assert visible(store, chain) == [0]


def test_purged_bytes_that_are_being_read_are_not_given_up(make_store):
    store = make_store(pages=2)
    records = [make_record([n]) for n in range(2)]
    fill(store, records)
    reader = store.open(records[1].key)
    result = store.purge(store.preview_purge(Selector()).token)
    new = make_record([5])
    put(store, new)
    with pytest.raises(StoreFull), store.open(new.key):
        store.begin(1, 1)
    assert reader.read(0, 10**6) == records[1].data
    reader.close()
    assert store.undo_purge(result.undo_token)[0] == 1
    assert visible(store, [*records, new]) == [1, 2]


def test_undo_does_not_bring_back_what_has_come_anew_as_good(make_store):
    store = make_store()
    lossy, exact = (make_record(range(256), fidelity=f) for f in (20, 0))
    put(store, lossy)
    result = store.purge(store.preview_purge(Selector()).token)
    put(store, exact)
    assert store.undo_purge(result.undo_token) == (0, 0)
    assert get(store, exact.key) == exact.data
    assert store.stats().size_bytes == exact.pages * PAGE
    result = store.purge(store.preview_purge(Selector()).token)
    put(store, lossy)
    assert store.undo_purge(result.undo_token)[0] == 1
    assert get(store, exact.key) == exact.data
    assert store.stats().size_bytes == exact.pages * PAGE


def test_a_reader_goes_on_through_a_purge_and_the_end_of_its_window(make_store, clock):
    store = make_store(pages=1)
    record = make_record([1])
    put(store, record)
    reader = store.open(record.key)
    store.purge(store.preview_purge(Selector()).token)
    with pytest.raises(StoreFull):
        store.begin(1, 1)
    clock.advance(61)
    store.sweep()
    assert reader.read(0, 10**6) == record.data
    reader.close()
    assert store.stats().size_bytes == 0


def test_a_record_read_through_purge_and_undo_can_be_evicted_afterwards(make_store):
    store = make_store(pages=1)
    record = make_record([1])
    put(store, record)
    reader = store.open(record.key)
    result = store.purge(store.preview_purge(Selector()).token)
    assert store.undo_purge(result.undo_token)[0] == 1
    with pytest.raises(StoreFull):
        store.begin(1, 1)
    reader.close()
    put(store, make_record([2]))
    assert visible(store, [record]) == []


def test_an_undo_works_once(make_store):
    store = make_store()
    put(store, make_record([1]))
    result = store.purge(store.preview_purge(Selector()).token)
    store.undo_purge(result.undo_token)
    with pytest.raises(StaleToken):
        store.undo_purge(result.undo_token)


def test_without_an_undo_window_the_bytes_go_at_the_next_sweep(make_store, clock):
    store = make_store(undo_s=0.0)
    put(store, make_record([1]))
    assert store.purge(store.preview_purge(Selector()).token).undo_s == 0.0
    clock.advance(0.001)
    store.sweep()
    assert store.stats().size_bytes == 0


# --- late writers ------------------------------------------------------------------------------


def purge(store, selector):
    return store.purge(store.preview_purge(selector).token)


def test_a_writer_from_before_a_purge_that_covers_it_is_refused(make_store):
    store = make_store()
    record = make_record([1])
    writer = store.begin(len(record.data), store.epoch)
    writer.write(record.data)
    purge(store, Selector(model="m"))
    with pytest.raises(StaleEpoch) as caught:
        writer.commit()
    assert (caught.value.epoch, caught.value.purge_epoch) == (0, 1)
    assert store.stats().size_bytes == 0
    assert store.stats().refusals == {"stale_epoch": 1}
    assert put(store, record, epoch=1) == "stored"


@pytest.mark.parametrize("selector", [Selector(model="other"), Selector(root=OTHER), Selector(tier="ssm")])
def test_a_purge_of_something_else_refuses_nobody(make_store, selector):
    store = make_store()
    purge(store, selector)
    assert put(store, make_record([1]), epoch=0) == "stored"


def test_a_purged_prefix_does_not_come_back_in_pieces_or_in_a_longer_form(make_store):
    store = make_store()
    shared, tail = make_chain(1, tail=10)
    fill(store, [shared, tail, make_record([-5], shared.key, start=256)])
    purge(store, Selector(prefixes=(tail.key,)))
    longer = make_record(range(256, 512), shared.key, start=256)
    beyond = make_record([1, 2], longer.key, start=512)
    checkpoint = make_record(range(256, 266), shared.key, start=256, kind=RecordKind.STATE)
    for late in (tail, longer, beyond, checkpoint):
        with pytest.raises(StaleEpoch):
            put(store, late, epoch=0)
    sibling = make_record([7, 8], shared.key, start=256)
    assert put(store, sibling, epoch=0) == "stored"
    assert put(store, tail, epoch=1) == "stored"


def test_a_purge_by_age_does_not_refuse_what_is_written_now(make_store, clock):
    store = make_store()
    put(store, make_record([1]))
    clock.advance(10)
    purge(store, Selector(older_than_s=5))
    assert put(store, make_record([2]), epoch=0) == "stored"


def test_undo_lets_late_writers_in_again(make_store):
    store = make_store()
    record = make_record([1])
    result = purge(store, Selector())
    store.undo_purge(result.undo_token)
    assert put(store, record, epoch=0) == "stored"
    assert store.epoch == 1


def test_an_epoch_of_another_life_counts_as_older_than_every_purge(make_store):
    store = make_store()
    record = make_record([1])
    assert put(store, record, epoch=99) == "stored"
    purge(store, Selector())
    with pytest.raises(StaleEpoch):
        put(store, record, epoch=99)


def test_what_a_forgotten_purge_covered_is_refused_without_asking(make_store, clock):
    store = make_store()
    purge(store, Selector(model="other"))
    clock.advance(901)
    store.sweep()
    with pytest.raises(StaleEpoch):
        put(store, make_record([1]), epoch=0)
    assert put(store, make_record([1]), epoch=1) == "stored"


def test_purges_are_told(make_store):
    store = make_store()
    put(store, make_record([1]))
    result = purge(store, Selector())
    store.undo_purge(result.undo_token)
    assert [(kind, a["records"]) for kind, _, a in store.events()] == [("purge", "1"), ("purge", "1")]
