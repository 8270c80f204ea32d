"""The sentence names the gravest cause that the data supports."""

from dataclasses import replace

import pytest
from tui_cluster import GIB, MIB, START_UNIX_S, healthy, inference, records_of, tier, vault, view_of

from tierkv.telemetry.snapshot import LinkSnapshot, Window
from tierkv.tui.model import ClusterView, cluster_view
from tierkv.tui.record import TargetRecord, failed, observed
from tierkv.tui.why import why


def told(view: ClusterView) -> tuple[str, str]:
    return why(view).severity, why(view).text


def used(gib: float, t: float = 0, note: str = "", hot_gib: float = 3):
    snapshot = inference(t)
    hot = replace(snapshot.tiers[0], size_bytes=int(hot_gib * GIB))
    memory = replace(snapshot.memory, used_bytes=int(gib * GIB), note=note)
    return replace(snapshot, memory=memory, tiers=(hot, *snapshot.tiers[1:]))


def test_connecting() -> None:
    view = cluster_view([TargetRecord("a:1"), TargetRecord("b:1")], now_s=0, now_unix_s=0)
    assert told(view) == ("wait", "Connecting to a:1, b:1.")


def test_nobody_answers_says_what_to_do() -> None:
    records = [failed(TargetRecord(f"a:{i}"), "refused", 0) for i in range(4)]
    severity, text = told(cluster_view(records, now_s=0, now_unix_s=0))
    assert severity == "bad"
    assert text == (
        "No agent answers at a:0, a:1, a:2 and 1 more. "
        "Start one: tierkv agent --role inference (or kv-vault, ssm-vault)."
    )


def test_a_wrong_token() -> None:
    view = cluster_view([failed(TargetRecord("a:1"), "wrong token", 0, "refused")], now_s=0, now_unix_s=0)
    assert told(view) == ("bad", "a:1 does not accept this console's token: wrong token.")


def test_something_else_listens_there() -> None:
    view = cluster_view([failed(TargetRecord("a:1"), "HTTP/1.1 400", 0, "foreign")], now_s=0, now_unix_s=0)
    assert told(view) == ("bad", "a:1 is not a TierKV agent of this version: HTTP/1.1 400.")


def test_all_lost() -> None:
    view = view_of(inference(0), vault(0), at=12, lost=("127.0.0.1:50050", "127.0.0.1:50051"))
    assert told(view) == (
        "bad",
        "All 2 agents have stopped answering; everything here is 12 s old. Still trying to reconnect.",
    )


def test_a_lost_vault_names_what_cannot_be_restored() -> None:
    view = view_of(inference(12), vault(0), at=12, lost=("127.0.0.1:50051",))
    assert told(view) == (
        "bad",
        "nas has not answered for 12 s: 1.0 GiB of cold KV cannot be restored, such prompts are prefilled instead.",
    )


def test_a_lost_inference_agent_does_not_stop_its_engine() -> None:
    view = view_of(inference(0), vault(12), at=12, lost=("127.0.0.1:50050",))
    assert told(view)[1] == (
        "mini has not answered for 12 s: its engine goes on without restores and nothing of it is demoted."
    )


def test_over_the_mark_because_the_hot_tier_grew() -> None:
    view = view_of(used(50, 0), used(62, 60), used(66, 120, hot_gib=6.4), at=120)
    assert told(view)[1] == (
        "mini is over its mark since 07:24 (66% of memory used, mark 60%) "
        "because its hot tier grew by 3.4 GiB since then."
    )


def test_over_the_mark_and_evicting_would_help() -> None:
    assert told(view_of(used(61), at=0))[1] == (
        "mini is over its mark since 07:23 (61% of memory used, mark 60%): "
        "evicting 1.0 GiB of its 3.0 GiB hot cache clears it."
    )


def test_over_the_mark_and_evicting_would_not_help() -> None:
    assert told(view_of(used(70), at=0))[1] == (
        "mini is over its mark since 07:23 (70% of memory used, mark 60%), "
        "only 3.0 GiB of that is hot cache, evicting cannot clear it."
    )


def test_what_the_agent_says_of_its_memory_wins() -> None:
    note = "threshold unreachable: 9.0 GiB are not cache"
    assert told(view_of(used(70, note=note), at=0))[1].endswith(f": {note}.")


def test_a_link_that_is_down() -> None:
    link = LinkSnapshot("nas:50051", "kv", "backoff", last_error="connection refused")
    view = view_of(inference(0, links=(link,)), vault(0), at=0)
    assert told(view) == ("warn", "mini cannot reach nas:50051 (kv tier, backoff): connection refused.")


def test_an_address_is_said_once() -> None:
    link = LinkSnapshot("nas:50051", "kv", "down", failures=3, last_error="nas:50051: nothing listens there.")
    view = view_of(inference(0, links=(link,)), vault(0), at=0)
    assert told(view) == ("warn", "mini cannot reach nas:50051 (kv tier, down): nothing listens there.")


def test_a_full_tier_names_who_fills_it() -> None:
    def full(t: float):
        kv = replace(vault(t).tiers[0], size_bytes=4 * GIB, evictions=int(t * 3))
        return vault(t, tiers=(kv,))

    view = view_of(inference(0), inference(2), full(0), full(2), at=2)
    assert told(view) == (
        "warn",
        "cold KV is full (4.0 GiB of 4.0 GiB, 3.0 evictions/s) because mini demotes 10.0 MiB/s into it.",
    )


def test_clock_skew_is_named() -> None:
    late = observed(TargetRecord("nas:1"), vault(-37), True, 1000, START_UNIX_S)
    view = cluster_view([late], now_s=1000, now_unix_s=START_UNIX_S)
    assert told(view) == ("warn", "nas's clock is 37 s behind this machine's; the times of its events are off.")


def test_version_skew_is_named() -> None:
    view = view_of(inference(0), vault(0, version="9.9"), at=0)
    assert told(view) == ("warn", "Versions differ: 0.1.0 on mini, 9.9 on nas; this console is 0.1.0.")


def test_mostly_misses_names_the_commonest_reason() -> None:
    def asked(t: float, never: int):
        kv = tier("kv", miss_reasons={"never_stored": never, "evicted": 1}, windows=(Window(60, 1, never),))
        return inference(t, tiers=(kv,))

    view = view_of(asked(0, 0), asked(30, 9), at=30)
    assert told(view) == ("ok", "9 of 9 misses in the last minute: never stored, so these prompts are new.")


def test_healthy_says_how_well_it_goes() -> None:
    assert told(healthy())[1] == (
        "All 3 agents are up; hit rate over the last minute: hot 75%, cold KV 80%, cold SSM 80%; "
        "41s of prefill (12.3k tokens) saved so far."
    )


def test_a_named_agent_that_never_answered_is_missed_a_default_one_is_not() -> None:
    up = records_of(vault(0))["127.0.0.1:50051"]
    now = {"now_s": 1000.0, "now_unix_s": START_UNIX_S}
    named = cluster_view([up, failed(TargetRecord("pi:1"), "refused", 1000)], **now)
    assert told(named) == ("warn", "1 of 2 agents are up; nobody answers at pi:1.")
    default = cluster_view([up, failed(TargetRecord("pi:1", expected=False), "refused", 1000)], **now)
    assert told(default)[1].startswith("nas is up; ")


@pytest.mark.parametrize("size", [0, 5 * MIB])
def test_a_lost_vault_that_held_nothing_is_no_loss(size: int) -> None:
    empty = vault(0, tiers=(replace(vault(0).tiers[0], size_bytes=size),))
    text = told(view_of(inference(12), empty, at=12, lost=("127.0.0.1:50051",)))[1]
    assert ("it held nothing" in text) is (size == 0)
