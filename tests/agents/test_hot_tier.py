import pytest

from tierkv.agents.hot_tier import HotTier
from tierkv.telemetry.node import NodeTelemetry


@pytest.fixture
def hot() -> HotTier:
    return HotTier(NodeTelemetry("inference", "engine", "127.0.0.1:1"))


def test_prefill_saved_is_counted_at_the_rate_the_engine_reported(hot: HotTier):
    assert hot.prefill_s("a", 1000) == 0.0
    hot.report("a", {"prefill_tokens_per_s": 200.0})
    hot.report("b", {"prefill_tokens_per_s": 50})
    assert (hot.prefill_s("a", 1000), hot.prefill_s("b", 1000)) == (5.0, 20.0)
    hot.forget("a")
    assert hot.prefill_s("a", 1000) == 0.0


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf"), 1e30, "fast", None])
def test_rate_that_is_none_is_left_out(hot: HotTier, rate: object):
    hot.report("a", {"prefill_tokens_per_s": 100.0})
    hot.report("a", {"prefill_tokens_per_s": rate})
    assert hot.prefill_s("a", 1000) == 10.0


def test_reasons_that_engines_give_are_counted_once_each(hot: HotTier):
    tier = hot._telemetry.tier("hot")
    hot.report("a", {"refusals": {"batched_cache": 2}, "not_restored": {"agent_silent": 1}})
    hot.report("a", {"refusals": {"batched_cache": 2, "dtype": 1}, "not_restored": {"agent_silent": 4}})
    hot.report("b", {"refusals": {"dtype": 5}})
    assert dict(tier.snapshot().refusals) == {"batched_cache": 2, "dtype": 6}
    assert hot._telemetry.snapshot().counters["engines_not_restored_agent_silent"] == 4


@pytest.mark.parametrize(
    "said",
    [{"the prompt's text": 1}, {"Upper": 1}, {"": 1}, {"x" * 41: 1}, {"a": -1}, {"ok": "3"}, {"ok": 1.5}, [["ok", 1]],
     "ok", None, {3: 3}],
)  # fmt: skip
def test_reasons_that_are_none_are_left_out(hot: HotTier, said: object):
    hot.report("a", {"refusals": said, "not_restored": said})
    assert dict(hot._telemetry.tier("hot").snapshot().refusals) == {}
    assert not [name for name in hot._telemetry.snapshot().counters if name.startswith("engines_")]


def test_what_left_the_engine_is_one_event_a_report_with_its_reason(hot: HotTier):
    hot.report("a", {"evictions": 9, "evicted_bytes": 1 << 30, "evicted_for": {"cache_full": 9}})
    hot.forget("a")
    for engine in "ab":
        hot.report(engine, {"evictions": 0, "evicted_bytes": 0, "evicted_for": {}})
    hot.report("a", {"evictions": 3, "evicted_bytes": 3 << 20, "evicted_for": {"cache_full": 3}})
    hot.report("a", {"evictions": 3, "evicted_bytes": 3 << 20, "evicted_for": {"cache_full": 3}})
    hot.report("a", {"evictions": 5, "evicted_bytes": 7 << 20, "evicted_for": {"cache_full": 4, "over_threshold": 1}})
    hot.report("b", {"evictions": 1, "evicted_bytes": 0, "evicted_for": {"overwritten": 1}})
    events, _ = hot._telemetry.events.after(0)
    assert [(event.kind, event.message) for event in events] == [
        ("evict", "3 prefixes have left the engine's cache (3.0 MiB): it was full"),
        ("evict", "2 prefixes have left the engine's cache (4.0 MiB): it was full, memory was over its mark"),
        ("evict", "1 prefix has left the engine's cache: another prompt took the place"),
    ]
    assert events[1].attributes == {
        "tier": "hot", "prefixes": "2", "bytes": str(4 << 20), "reason": "cache_full over_threshold",
    }  # fmt: skip


@pytest.mark.parametrize("said", [None, [], "cache_full", {"the prompt": 1}, {"cache_full": -1}, {"cache_full": "1"}])
def test_evictions_without_a_plausible_reason_are_no_event(hot: HotTier, said: object):
    hot.report("a", {})
    hot.report("a", {"evictions": 2, "evicted_bytes": 5, "evicted_for": said})
    assert hot._telemetry.events.after(0)[0] == []
    assert hot._telemetry.tier("hot").snapshot().evictions == 2


def test_the_number_of_reasons_is_bounded(hot: HotTier):
    hot.report("a", {"refusals": {f"reason_{n}": 1 for n in range(10_000)}})
    assert len(hot._telemetry.tier("hot").snapshot().refusals) <= 64
