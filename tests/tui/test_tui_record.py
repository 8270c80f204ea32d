"""What the console remembers of one agent, step by step."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tui_cluster import MIB, START_UNIX_S, inference, vault

from tierkv.tui.record import BUCKET_S, BUCKETS, History, TargetRecord, connecting, failed, observed


def fed(*times: float, make=vault) -> TargetRecord:
    record = TargetRecord("nas:50051")
    for t in times:
        record = observed(record, make(t), True, 1000 + t, START_UNIX_S + t)
    return record


def test_the_rate_window_reaches_just_over_three_seconds_back() -> None:
    record = fed(*(i / 2 for i in range(21)))
    assert [one.received_s for one in record.tail] == [1007.0, 1007.5, 1008.0, 1008.5, 1009.0, 1009.5, 1010.0]


def test_the_minute_is_kept_in_steps_of_five_seconds() -> None:
    record = fed(*(float(i) for i in range(200)))
    times = [one.received_s - 1000 for one in record.minute]
    assert times == [135.0 + 5 * i for i in range(13)]


def test_a_new_run_starts_new_rates_and_counts_as_a_restart() -> None:
    record = observed(fed(0, 0.5, 1), vault(2, node_id="run-2"), True, 1002, START_UNIX_S + 2)
    assert (record.restarts, len(record.tail), len(record.minute)) == (1, 1, 1)


def test_counters_that_went_back_start_new_rates_without_a_restart() -> None:
    back = replace(vault(2).tiers[0], bytes_in=1)
    record = observed(fed(0, 0.5, 1), vault(2, tiers=(back,)), True, 1002, START_UNIX_S + 2)
    assert (record.restarts, len(record.tail)) == (0, 1)


def test_a_lost_agent_keeps_its_data_until_it_answers() -> None:
    record = failed(fed(0, 1), "connection refused", 1003)
    assert (record.phase, record.error, record.since_s) == ("lost", "connection refused", 1003)
    again = connecting(failed(connecting(record), "still refused", 1004))
    assert (again.phase, again.attempts, again.since_s) == ("lost", 2, 1003)
    assert again.last.snapshot == vault(1)
    back = observed(again, vault(9), True, 1009, START_UNIX_S + 9)
    assert (back.phase, back.error, back.attempts, len(back.tail)) == ("live", "", 0, 1)


def test_an_agent_that_never_answered_is_not_lost() -> None:
    assert failed(connecting(TargetRecord("x:1")), "refused", 5).phase == "connecting"


def test_history_counts_bytes_in_buckets_of_five_seconds() -> None:
    """10 MiB a second: from 1000 s to 1010 s, the first snapshot only starts the count."""
    history = fed(*(i / 2 for i in range(21))).history["kv"]
    assert history.newest == 1010 // BUCKET_S
    assert history.values == (45 * MIB, 50 * MIB, 5 * MIB)


def test_what_moved_while_nobody_listened_belongs_to_no_bucket() -> None:
    record = observed(failed(fed(0, 1), "gone", 1001), vault(31), True, 1031, START_UNIX_S + 31)
    assert record.history["kv"].values == (10 * MIB, None, None, None, None, None, 0)


def test_over_remembers_where_the_stretch_began() -> None:
    def over(t: float):
        snapshot = inference(t)
        return replace(snapshot, memory=replace(snapshot.memory, used_bytes=snapshot.memory.total_bytes * 7 // 10))

    record = observed(fed(0, make=inference), over(1), True, 1001, START_UNIX_S + 1)
    record = observed(record, over(2), True, 1002, START_UNIX_S + 2)
    assert record.over.received_s == 1001
    assert observed(record, inference(3), True, 1003, START_UNIX_S + 3).over is None


def test_tiers_that_do_not_exist_leave_no_trace() -> None:
    record = TargetRecord("x:1")
    for i in range(50):
        strange = replace(vault(i).tiers[0], name=f"tier-{i}")
        record = observed(record, vault(i, tiers=(strange,)), True, 1000 + i, START_UNIX_S + i)
    assert record.history == {}


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0, 1e9)), max_size=80))
def test_history_is_bounded_and_loses_nothing_within_five_minutes(steps: list[tuple[int, float]]) -> None:
    history, model, newest = History(), {}, None
    for bucket, amount in sorted(steps, key=lambda step: step[0]):
        history = history.added(bucket, amount)
        model[bucket] = model.get(bucket, 0.0) + amount
        newest = bucket
    assert len(history.values) <= BUCKETS
    if newest is not None:
        expected = tuple(model.get(newest - back) for back in range(BUCKETS - 1, -1, -1))
        assert history.aligned(newest) == expected
