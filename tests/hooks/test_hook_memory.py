"""When the engine's cache shrinks: the rule alone, with readings and a clock of the test."""

from tierkv.hooks.memory import SETTLE_S, MemoryReading, MemoryRule, Verdict, read_memory

GIB = 1 << 30


def rule(*readings):
    queue = list(readings)
    now = [0.0]
    made = MemoryRule(lambda: queue.pop(0) if len(queue) > 1 else queue[0], clock=lambda: now[0])
    return made, now


def test_below_the_threshold_nothing_goes():
    made, _ = rule(MemoryReading(6 * GIB, 10 * GIB))
    assert made.check(0.6, cache_bytes=3 * GIB, evictable_bytes=2 * GIB) == Verdict(0)


def test_above_it_the_excess_goes():
    made, _ = rule(MemoryReading(7 * GIB, 10 * GIB))
    assert made.check(0.6, cache_bytes=3 * GIB, evictable_bytes=2 * GIB) == Verdict(GIB)


def test_what_eviction_cannot_reach_is_not_tried():
    made, _ = rule(MemoryReading(9 * GIB, 10 * GIB))
    assert made.check(0.6, cache_bytes=3 * GIB, evictable_bytes=2 * GIB) == Verdict(
        0, "threshold unreachable: 6.0 GiB are not cache"
    )


def test_freed_bytes_count_as_free_until_the_system_shows_them():
    high, lower = MemoryReading(7 * GIB, 10 * GIB), MemoryReading(6 * GIB + GIB // 2, 10 * GIB)
    made, now = rule(high, high, lower, lower)
    assert made.check(0.6, cache_bytes=3 * GIB, evictable_bytes=2 * GIB).evict_bytes == GIB
    made.evicted(GIB)
    assert made.check(0.6, cache_bytes=2 * GIB, evictable_bytes=GIB) == Verdict(0)
    assert made.check(0.6, cache_bytes=2 * GIB, evictable_bytes=GIB) == Verdict(0)  # half of it is seen, half owed
    now[0] = SETTLE_S + 0.1
    assert made.check(0.6, cache_bytes=2 * GIB, evictable_bytes=GIB) == Verdict(GIB // 2)


def test_what_is_on_its_way_to_the_vaults_is_not_evicted_for_again():
    """An entry of 2 GiB that a slow link keeps in memory must not cost another one."""
    high, lower = MemoryReading(8 * GIB, 10 * GIB), MemoryReading(6 * GIB, 10 * GIB)
    made, now = rule(high, high, high, high, lower)
    kept = [2 * GIB]
    made.kept = lambda: kept[0]
    assert made.check(0.6, cache_bytes=6 * GIB, evictable_bytes=4 * GIB).evict_bytes == 2 * GIB
    made.evicted(2 * GIB)
    for minutes in (1, 2):
        now[0] = 60.0 * minutes
        assert made.check(0.6, cache_bytes=4 * GIB, evictable_bytes=2 * GIB) == Verdict(0)
    kept[0] = GIB  # the rest has gone, and the system does not show it: somebody else has it
    assert made.check(0.6, cache_bytes=4 * GIB, evictable_bytes=2 * GIB) == Verdict(GIB)
    kept[0] = 0
    assert made.check(0.6, cache_bytes=4 * GIB, evictable_bytes=2 * GIB) == Verdict(0)


def test_two_evictions_soon_after_each_other_are_both_owed():
    high, higher = MemoryReading(7 * GIB, 10 * GIB), MemoryReading(8 * GIB, 10 * GIB)
    made, _ = rule(high, higher, higher)
    assert made.check(0.6, cache_bytes=6 * GIB, evictable_bytes=4 * GIB).evict_bytes == GIB
    made.evicted(GIB)
    assert made.check(0.6, cache_bytes=5 * GIB, evictable_bytes=3 * GIB).evict_bytes == GIB
    made.evicted(GIB)
    assert made.check(0.6, cache_bytes=4 * GIB, evictable_bytes=2 * GIB) == Verdict(0)


def test_a_device_with_memory_of_its_own_has_the_same_threshold():
    made, _ = rule(MemoryReading(GIB, 100 * GIB, device_bytes=8 * GIB, device_total_bytes=10 * GIB))
    assert made.check(0.6, cache_bytes=5 * GIB, evictable_bytes=4 * GIB) == Verdict(2 * GIB)


def test_the_real_reading_is_plausible():
    reading = read_memory()
    assert 0 < reading.used_bytes < reading.total_bytes
    assert reading.device_bytes >= 0
