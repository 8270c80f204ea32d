"""The view is a pure function of the records; the numbers here are worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tui_cluster import GIB, MIB, START_UNIX_S, healthy, histogram, inference, records_of, tier, vault, view_of

from tierkv.telemetry.histogram import upper_bound_s
from tierkv.telemetry.snapshot import Window
from tierkv.tui.model import ClusterView, cluster_view
from tierkv.tui.record import TargetRecord, failed, observed


def test_rates_are_differences_over_the_agents_own_clock() -> None:
    """10 MiB a second for three seconds, whatever the jitter of their arrival."""
    record = TargetRecord("nas:50051")
    for t, arrived in ((0, 0.0), (1, 1.4), (2, 2.0), (3, 3.3)):
        record = observed(record, vault(t), True, 1000 + arrived, START_UNIX_S + arrived)
    view = cluster_view([record], now_s=1003.4, now_unix_s=START_UNIX_S + 3.4)
    assert view.tier("kv").rates.bytes_in_per_s == 10 * MIB
    assert view.nodes[0].rates.bytes_in_per_s == 10 * MIB


def test_a_clock_that_was_set_meanwhile_does_not_spoil_rates() -> None:
    jumped = replace(vault(2), now_unix_s=START_UNIX_S + 3600)
    view = view_of(vault(0), at=0)
    record = records_of(vault(0))["127.0.0.1:50051"]
    record = observed(record, jumped, True, 1002, START_UNIX_S + 2)
    view = cluster_view([record], now_s=1002, now_unix_s=START_UNIX_S + 2)
    assert view.tier("kv").rates.bytes_in_per_s == 10 * MIB
    assert view.nodes[0].skewed
    assert view.nodes[0].skew_s == 3598


def test_no_rate_before_the_second_snapshot_and_after_a_restart() -> None:
    assert view_of(vault(0), at=0).tier("kv").rates is None
    assert view_of(vault(0), vault(1), vault(2, node_id="new"), at=2).tier("kv").rates is None


def test_sizes_come_from_holders_hits_from_users() -> None:
    kv = healthy().tier("kv")
    assert (kv.size_bytes, kv.cap_bytes, kv.records) == (GIB, 4 * GIB, 400)
    assert (kv.hit_1m, kv.hit_10m) == (0.8, 0.8)


def test_hit_rates_add_before_they_divide() -> None:
    """9 of 10 and 10 of 90 are 19 of 100, not the mean of 90 % and 11 %."""
    busy = replace(tier("kv"), windows=(Window(60, 9, 1),))
    lazy = replace(tier("kv"), windows=(Window(60, 10, 80),))
    view = view_of(inference(0, tiers=(busy,)), inference(0, node_id="b", address="b:1", name="b", tiers=(lazy,)), at=0)
    assert view.tier("kv").hit_1m == 0.19
    assert view.tier("kv").hit_10m is None


def test_percentiles_come_from_merged_buckets() -> None:
    """99 calls of 1 ms on one node and 99 of 1 s on another: the median is the 99th of 198, in the bucket of 1 ms;
    the mean of the two medians would be half a second."""
    fast = tier("kv", promote_s=histogram(*[0.001] * 99))
    slow = tier("kv", promote_s=histogram(*[1.0] * 99))
    kv = view_of(
        inference(0, tiers=(fast,)), inference(0, node_id="b", address="b:1", name="b", tiers=(slow,)), at=0
    ).tier("kv")
    assert 0.001 <= kv.promote_p50_s <= 0.001 * 2**0.25
    assert 1.0 <= kv.promote_p99_s <= 2**0.25


def test_the_p99_of_a_hundred_is_the_ninety_ninth() -> None:
    assert healthy().tier("kv").promote_p99_s == upper_bound_s(70)  # 0.2 s: log2(200000) * 4 = 70.4


def test_a_lost_vault_keeps_its_size_loses_its_rates_and_says_so() -> None:
    view = view_of(vault(0), vault(1), inference(12), at=13, lost=("127.0.0.1:50051",))
    node, kv = view.nodes[0], view.tier("kv")
    assert (node.state, node.age_s, node.error, node.rates) == ("lost", 12, "connection refused", None)
    assert (kv.state, kv.age_s, kv.size_bytes, kv.rates) == ("stale", 12, GIB, None)
    assert (view.up, len(view.counted)) == (1, 2)


def test_one_of_two_vaults_lost_makes_the_tier_partial() -> None:
    other = [vault(t, name="attic", address="attic:1") for t in (0, 12, 12.5)]
    kv = view_of(vault(0), *other, at=13, lost=("127.0.0.1:50051",)).tier("kv")
    assert (kv.state, kv.size_bytes, kv.rates.bytes_in_per_s) == ("partial", 2 * GIB, 10 * MIB)


def test_an_open_stream_without_news_is_silent_after_two_and_a_half_seconds() -> None:
    assert view_of(vault(0), at=2.5).nodes[0].state == "live"
    assert view_of(vault(0), at=2.6).nodes[0].state == "silent"


def test_states_before_the_first_snapshot() -> None:
    def state(record: TargetRecord) -> str:
        return cluster_view([record], now_s=1, now_unix_s=1).nodes[0].state

    new, default = TargetRecord("x:1"), TargetRecord("x:1", expected=False)
    assert state(new) == "connecting"
    assert state(failed(new, "refused", 1)) == "down"
    assert state(failed(default, "refused", 1)) == "absent"
    assert state(failed(new, "no token", 1, "refused")) == "refused"
    assert state(failed(new, "nginx", 1, "foreign")) == "foreign"


def test_over_the_mark() -> None:
    over = replace(inference(0).memory, used_bytes=61 * GIB)
    assert view_of(inference(0, memory=over), at=0).nodes[0].state == "over"
    at_it = replace(inference(0).memory, used_bytes=60 * GIB)
    assert view_of(inference(0, memory=at_it), at=0).nodes[0].state == "live"
    assert view_of(vault(0), at=0).nodes[0].state == "live"


def test_one_agent_at_two_addresses_counts_once_with_its_newer_data() -> None:
    first = records_of(vault(0))["127.0.0.1:50051"]
    second = observed(TargetRecord("localhost:50051"), vault(1), True, 1001, START_UNIX_S + 1)
    view = cluster_view([first, second], now_s=1001, now_unix_s=START_UNIX_S + 1)
    assert [node.target for node in view.nodes] == ["localhost:50051"]
    assert view.tier("kv").size_bytes == GIB


def test_misses_of_the_last_minute_by_reason() -> None:
    def asked(t: float, never: int, slow: int):
        return inference(t, tiers=(tier("kv", miss_reasons={"never_stored": never, "timed_out": slow}),))

    view = view_of(asked(0, 10, 3), asked(30, 14, 3), asked(70, 20, 4), at=70)
    got = [(miss.reason, miss.count, miss.last_minute) for miss in view.misses]
    assert got == [("never_stored", 20, 10), ("timed_out", 4, 1)]


def test_the_minute_of_misses_is_a_minute() -> None:
    """At 70 s the minute began at 10 s; the snapshot before that is of 0 s, the one of 30 s is inside."""
    record = records_of(inference(0), inference(30), inference(70))["127.0.0.1:50050"]
    assert [one.received_s for one in record.minute] == [1000, 1030, 1070]


def test_authenticated_means_every_live_agent_took_the_token() -> None:
    assert not view_of(vault(0), at=0).read_only
    assert view_of(vault(0), at=0, read_only=True).read_only
    assert view_of(vault(0), at=0, authenticated=False).read_only
    assert not view_of(vault(0), at=0, authenticated=False).authenticated
    assert cluster_view([], now_s=0, now_unix_s=0).read_only


def test_versions_start_with_the_consoles_own() -> None:
    view = view_of(vault(0), inference(0, version="9.9"), at=0)
    assert view.versions == ("0.1.0", "9.9")


def test_saved_prefill_and_damage_are_summed() -> None:
    damaged = tuple(replace(one, quarantined_records=2) for one in vault(0).tiers)
    view = view_of(inference(0), vault(0, tiers=damaged), at=0)
    assert (view.saved.seconds, view.saved.tokens, view.damaged_records) == (41.0, 12_345, 2)


def test_history_is_bytes_a_second() -> None:
    """Half-second snapshots over 10 s at 10 MiB/s: a first bucket of 4.5 s of traffic, then a full one."""
    view = view_of(*(vault(i / 2) for i in range(20)), at=9.9)
    history = view.tier("kv").history
    assert len(history) == 60
    assert history[:58] == (None,) * 58
    assert history[58] == 45 * MIB / 5
    assert history[59] == pytest.approx(50 * MIB / 4.9, rel=1e-6)


snapshots = st.builds(
    lambda who, t, bytes_in, hits, used, run: replace(
        (inference if who == 0 else vault)(t),
        node_id=f"{who}-{run}",
        memory=replace(inference(0).memory, used_bytes=used),
        tiers=(tier("kv", bytes_in=bytes_in, hits=hits, windows=(Window(60, hits, 3),)),),
    ),
    st.integers(0, 1),
    st.floats(0, 400),
    st.integers(0, 1 << 60),
    st.integers(0, 1000),
    st.integers(0, 200 * GIB),
    st.integers(0, 2),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(snapshots, max_size=25), st.floats(0, 500))
def test_any_course_of_events_gives_a_sane_view(course: list, later: float) -> None:
    records = {role: TargetRecord(role) for role in ("inference", "kv-vault")}
    now = 0.0
    for step, one in enumerate(course):
        now = max(now, one.now_unix_s - START_UNIX_S)
        records[one.role] = observed(records[one.role], one, True, 1000 + now, START_UNIX_S + now)
        if step % 7 == 6:
            records[one.role] = failed(records[one.role], "gone", 1000 + now)
    view = cluster_view(tuple(records.values()), now_s=1000 + now + later, now_unix_s=0)
    assert isinstance(view, ClusterView)
    assert 0 <= view.up <= len(view.nodes)
    for one in view.tiers:
        assert one.hit_1m is None or 0 <= one.hit_1m <= 1
        assert one.rates is None or one.rates.bytes_in_per_s >= 0
        assert all(value is None or value >= 0 for value in one.history)
        assert one.size_bytes >= 0
