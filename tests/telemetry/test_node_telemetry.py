"""Counters, windows, events and snapshots, against traffic that is known."""

from __future__ import annotations

import threading

import pytest

from tierkv.telemetry.events import EventRing
from tierkv.telemetry.histogram import Histogram, HistogramSnapshot, bucket_of, upper_bound_s
from tierkv.telemetry.node import MAX_COUNTERS, NodeTelemetry
from tierkv.telemetry.snapshot import EngineSnapshot, LinkSnapshot, MemorySnapshot
from tierkv.telemetry.tier import MAX_REASONS, TierSizes, TierTelemetry


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_tier_counts_what_happened(clock: Clock):
    tier = TierTelemetry("kv", clock)
    tier.hit(300, 1000)
    tier.hit(200)
    tier.miss("evicted")
    tier.miss("evicted")
    tier.miss("timed_out")
    tier.evicted(4)
    tier.bytes_in(70)
    tier.bytes_out(30)
    tier.stored(2)
    tier.refused("full")
    tier.promote_s.add(0.010)
    seen = tier.snapshot()
    assert (seen.hits, seen.hit_tokens, seen.misses, seen.evictions) == (2, 500, 3, 4)
    assert (seen.bytes_in, seen.bytes_out, seen.stores) == (70, 1030, 2)
    assert dict(seen.miss_reasons) == {"evicted": 2, "timed_out": 1}
    assert dict(seen.refusals) == {"full": 1}
    assert seen.promote_s.total == 1
    assert [window.seconds for window in seen.windows] == [60.0, 600.0]


def test_windows_forget_and_totals_do_not(clock: Clock):
    tier = TierTelemetry("kv", clock)
    tier.hit()
    clock.now_s += 30
    tier.miss("evicted")
    tier.evicted(2)

    def windows() -> list[tuple[int, int, int]]:
        return [(window.hits, window.misses, window.evictions) for window in tier.snapshot().windows]

    assert windows() == [(1, 1, 2), (1, 1, 2)]
    clock.now_s += 31
    assert windows() == [(0, 1, 2), (1, 1, 2)]
    clock.now_s += 30
    assert windows() == [(0, 0, 0), (1, 1, 2)]
    clock.now_s += 100_000
    assert windows() == [(0, 0, 0), (0, 0, 0)]
    assert tier.snapshot().hits == 1


def test_sizes_are_read_at_snapshot_time(clock: Clock):
    tier = TierTelemetry("kv", clock)
    sizes = [TierSizes(size_bytes=1), TierSizes(size_bytes=2, cap_bytes=9, records=3, tokens=4, pinned_records=1)]
    tier.sizes_from(lambda: sizes.pop(0))
    assert tier.snapshot().size_bytes == 1
    seen = tier.snapshot()
    assert (seen.size_bytes, seen.cap_bytes, seen.records, seen.tokens, seen.pinned_records) == (2, 9, 3, 4, 1)


def test_the_number_of_reasons_and_counters_is_bounded():
    tier = TierTelemetry("kv")
    node = NodeTelemetry("r", "n")
    for n in range(2 * MAX_COUNTERS):
        tier.miss(f"reason {n}")
        node.count(f"counter {n}")
    seen = tier.snapshot()
    assert len(seen.miss_reasons) == MAX_REASONS + 1
    assert sum(seen.miss_reasons.values()) == seen.misses == 2 * MAX_COUNTERS
    counters = node.snapshot().counters
    assert (len(counters), sum(counters.values())) == (MAX_COUNTERS + 1, 2 * MAX_COUNTERS)


def test_a_snapshot_holds_everything_and_is_numbered(clock: Clock):
    node = NodeTelemetry("kv-vault", "attic", "127.0.0.1:1", clock=clock, monotonic=clock)
    node.memory_from(lambda: MemorySnapshot(100, 60, 5, note="from the probe"))
    node.tier("kv").hit()
    assert node.tier("kv") is node.tier("kv")
    node.set_link(LinkSnapshot("a:1", "kv", "up"))
    node.set_link(LinkSnapshot("a:1", "kv", "down"))
    node.set_engine(EngineSnapshot("mlx-lm"))
    node.set_engine(EngineSnapshot("exo"))
    node.remove_engine("exo")
    node.set_memory_threshold(0.6)
    node.set_activity("idle")
    node.count("demotions", 3)
    node.on_snapshot(lambda: node.count("probed"))
    clock.now_s += 5
    first, second = node.snapshot(), node.snapshot()
    assert (first.sequence, second.sequence) == (1, 2)
    assert (first.role, first.name, first.address) == ("kv-vault", "attic", "127.0.0.1:1")
    assert (first.started_unix_s, first.now_unix_s) == (1000.0, 1005.0)
    assert first.memory == MemorySnapshot(100, 60, 5, threshold_fraction=0.6, note="from the probe")
    assert first.memory.used_fraction == 0.6
    assert [link.state for link in first.links] == ["down"]
    assert [engine.kind for engine in first.engines] == ["mlx-lm"]
    assert dict(second.counters) == {"demotions": 3, "probed": 2}
    assert first.activity == "idle"
    assert first.node_id != NodeTelemetry("r", "n").snapshot().node_id


def test_events_have_consecutive_ids_and_the_oldest_go():
    ring = EventRing(3)
    for n in range(5):
        ring.add(float(n), "k", "info", "node", f"m{n}", {})
    events, dropped = ring.after(0)
    assert ([event.id for event in events], dropped) == ([3, 4, 5], 2)
    assert [event.id for event in ring.after(4)[0]] == [5]
    assert ring.after(5) == ([], 0)
    assert [event.id for event in ring.after(0, limit=1)[0]] == [3]
    assert [event.id for event in ring.after(99)[0]] == [3, 4, 5]


def test_long_texts_and_many_attributes_are_cut():
    event = EventRing().add(0.0, "k", "info", "n", "x" * 9000, {f"{n:02}" * 900: "v" * 900 for n in range(99)})
    assert len(event.message) == 500
    assert len(event.attributes) == 16
    assert max(len(key) + len(value) for key, value in event.attributes.items()) <= 400


def test_listeners_hear_every_event_until_they_leave():
    ring, heard = EventRing(), []
    leave = ring.subscribe(lambda: heard.append(1))
    ring.add(0.0, "k", "info", "n", "m", {})
    leave()
    leave()
    ring.add(0.0, "k", "info", "n", "m", {})
    assert heard == [1]


def test_counting_from_many_threads_loses_nothing():
    node = NodeTelemetry("r", "n")
    tier = node.tier("kv")

    def work() -> None:
        for _ in range(2000):
            node.count("c")
            tier.hit(1)
            tier.store_s.add(0.001)
            node.emit("k", "info", "m")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = node.snapshot()
    assert seen.counters["c"] == 8000
    assert (seen.tiers[0].hits, seen.tiers[0].hit_tokens, seen.tiers[0].store_s.total) == (8000, 8000, 8000)
    assert seen.last_event_id == 8000


def test_quantiles_are_at_most_a_quarter_octave_above_the_value():
    histogram = Histogram()
    for milliseconds in range(1, 1001):
        histogram.add(milliseconds / 1000)
    seen = histogram.snapshot()
    assert seen.total == 1000
    assert seen.sum_s == pytest.approx(500.5)
    for q, exact in ((0.5, 0.5), (0.99, 0.99)):
        value = seen.quantile(q)
        assert value is not None
        assert exact <= value <= exact * 2**0.25
    assert HistogramSnapshot().quantile(0.5) is None


def test_histograms_add_up():
    left, right = HistogramSnapshot({1: 2, 3: 4}, 1.0), HistogramSnapshot({3: 1}, 0.5)
    assert HistogramSnapshot.merged([left, right]) == HistogramSnapshot({1: 2, 3: 5}, 1.5)


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (1e-6, 0), (2e-6, 4), (1.0, 79), (1e9, 127)])
def test_buckets_are_quarter_octaves_from_a_microsecond(seconds: float, bucket: int):
    assert bucket_of(seconds) == bucket
    assert bucket == 127 or seconds <= upper_bound_s(bucket)
