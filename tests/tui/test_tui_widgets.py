"""What the line widgets draw, as text, against pictures drawn by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from tui_cluster import GIB, MIB, event, events_view, healthy, inference, vault, view_of

from tierkv.tui.filter import EventFilter, parse_filter
from tierkv.tui.model import ClusterView
from tierkv.tui.theme import ASCII, UNICODE
from tierkv.tui.widgets.cluster import cluster_line, why_lines
from tierkv.tui.widgets.events import event_line, scrolled, selected
from tierkv.tui.widgets.lines import plain
from tierkv.tui.widgets.meter import meter, spark
from tierkv.tui.widgets.misses import miss_lines
from tierkv.tui.widgets.nodes import node_lines
from tierkv.tui.widgets.tiers import tier_lines


def text(spans) -> str:
    return "".join(part for part, _ in spans)


@pytest.mark.parametrize(
    ("used", "mark", "drawn"),
    [
        (0.0, None, "──────────"),
        (0.5, None, "━━━━━─────"),
        (0.55, None, "━━━━━╸────"),
        (1.0, None, "━━━━━━━━━━"),
        (0.001, None, "╸─────────"),
        (0.3, 0.6, "━━━───┃───"),
        (0.9, 0.6, "━━━━━━┃━━─"),
        (0.9, 1.0, "━━━━━━━━━┃"),
        (7.0, 0.6, "━━━━━━┃━━━"),
        (float("nan"), float("nan"), "──────────"),
    ],
)
def test_the_meter_shows_use_and_the_mark_across_it(used, mark, drawn) -> None:
    assert text(meter(used, mark, 10, UNICODE)) == drawn


def test_what_is_beyond_the_mark_has_a_role_of_its_own() -> None:
    assert meter(0.9, 0.6, 10, ASCII) == [("======", "ok"), ("|", "mark"), ("==", "bad"), ("-", "faint")]


@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(allow_nan=True), st.integers(0, 60))
def test_a_meter_is_always_as_wide_as_asked(used: float, mark: float, width: int) -> None:
    assert cell_len(text(meter(used, mark, width, UNICODE))) == width


def test_the_sparkline_scales_to_its_largest_and_tells_unknown_from_zero() -> None:
    assert text(spark([None, 0.0, 1.0, 3.5, 7.0], 5, UNICODE)) == " ▁▁▄▇"
    assert spark([0.0], 1, UNICODE) == [("▁", "faint")]
    assert text(spark([None, 0.0, 1.0, 4.0, 8.0], 5, ASCII)) == " _.=@"


def test_the_sparkline_averages_what_shares_a_cell() -> None:
    assert text(spark([0.0, 2.0, 7.0, 7.0, None, None], 3, UNICODE)) == "▁▇ "


def test_the_cluster_line() -> None:
    assert plain(cluster_line(healthy(), 80, UNICODE)) == [
        " TierKV  lab  ● 3/3 up  SmolLM2-135M  0.4 s old          authenticated 07:23:23"
    ]
    paused = plain(cluster_line(healthy(read_only=True), 80, UNICODE, paused=True))
    assert paused == [" TierKV  lab  ● 3/3 up  SmolLM2-135M  0.4 s old    PAUSED   read-only  07:23:23"]
    assert plain(cluster_line(ClusterView(), 60, ASCII))[0].startswith(" TierKV  o 0/0 up  no data yet")


def test_the_nodes_at_80_columns() -> None:
    view = view_of(inference(1), vault(0), at=13, lost=("127.0.0.1:50051",))
    assert plain(node_lines(view_of(inference(0), vault(0), at=0), 80, 5, UNICODE)) == [
        " NODES                  role      memory         used/mark doing",
        " ● live    mini         inference ━━━━━╸──┃───── 40/60%    promoting 3 prefixes",
        " ● live    nas          kv-vault  ━━━╸────────── 25%       idle",
    ]
    assert plain(node_lines(view, 80, 5, ASCII))[2] == (
        " o lost    nas          kv-vault  ====---------- 25%       stale 13 s - connec~"
    )


def test_skew_of_clock_and_version_stands_at_the_node() -> None:
    view = view_of(vault(0, version="9.9"), at=0)
    skewed = replace(view, nodes=(replace(view.nodes[0], skew_s=-37.0),))
    assert plain(node_lines(skewed, 120, 5, UNICODE))[1].endswith("clock -37 s · version 9.9 · idle")


def test_nodes_that_do_not_fit_are_summed_up_gravest_first() -> None:
    snapshots = [vault(0, name=f"v{i:02}", address=f"v{i:02}:1") for i in range(50)]
    view = view_of(*snapshots, at=0, lost=("v33:1",))
    lines = plain(node_lines(view, 80, 4, UNICODE))
    assert len(lines) == 5
    assert "lost    v33" in lines[1]
    assert lines[4] == " + 47 more nodes: 47 live"


def test_the_tiers_at_80_columns() -> None:
    view = healthy()
    assert plain(tier_lines(view, view, 80, UNICODE)) == [
        " TIERS       size/cap hit 1m  10m   p50   p99 in/s out/s evict/s  5 min",
        " hot        3.0G/8.0G    75%  50%     –     –    0     0       0             ▁",
        " local     not in use",
        " cold KV    1.0G/4.0G    80%  80%  12ms 220ms  10M     0       0             ▇",
        " cold SSM   1.0G/4.0G    80%  80%     –     –  10M     0       0             ▇",
    ]


def test_a_stale_tier_says_how_old_it_is() -> None:
    view = view_of(vault(0), at=40, lost=("127.0.0.1:50051",))
    assert plain(tier_lines(view, view, 80, UNICODE))[3] == (
        " cold KV ○  1.0G/4.0G    80%  80%     –     –    –     –       –  stale 40 s"
    )


def test_misses_and_what_was_saved() -> None:
    assert plain(miss_lines(healthy(), 80, 3, UNICODE)) == [
        " MISSES by reason            total in 1 min          PREFILL SAVED",
        "  never stored                   2        –          41s of prefill",
        "                                                     12.3k tokens not prefilled",
        "                                                     no damaged records",
    ]


def test_more_reasons_than_lines_are_summed_up() -> None:
    reasons = {f"reason_{i}": 10 - i for i in range(6)}
    kv = replace(inference(0).tiers[1], miss_reasons=reasons)
    lines = plain(miss_lines(view_of(inference(0, tiers=(kv,)), at=0), 80, 3, UNICODE))
    assert [line[:35].split() for line in lines[1:]] == [
        ["reason", "0", "10"],
        ["reason", "1", "9"],
        ["4", "other", "reasons", "26"],
    ]


def test_an_event_at_80_columns() -> None:
    warned = event(7, "evicted 9 blocks", severity="warning", kind="evict", node="nas")
    assert text(event_line(warned, 80, UNICODE)).rstrip() == " 07:23:27 ▲ nas        evict    evicted 9 blocks"


def test_scrolling_stays_with_the_events_it_shows() -> None:
    view = events_view(*(event(i, str(i)) for i in range(1, 11)))
    everything = EventFilter()

    def shown(bottom):
        return [int(line.event.message) for line in selected(view.lines, everything, bottom, 3)]

    assert shown(None) == [8, 9, 10]
    up = scrolled(view.lines, everything, None, 3, 2)
    assert shown(up) == [6, 7, 8]
    assert shown(scrolled(view.lines, everything, up, 3, 100)) == [1, 2, 3]
    assert scrolled(view.lines, everything, up, 3, -2) is None
    assert scrolled(view.lines[:2], everything, None, 3, 5) is None


def test_scrolling_moves_by_matching_events() -> None:
    view = events_view(*(event(i, str(i), node="nas" if i % 2 else "pi") for i in range(1, 11)))
    odd = parse_filter("node:nas")
    up = scrolled(view.lines, odd, None, 2, 1)
    assert [line.event.message for line in selected(view.lines, odd, up, 2)] == ["5", "7"]


HOSTILE = "\x1b[2J\u202e[red]ノード[/red]\x00\n" + "a" * 300


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_no_line_is_wider_than_the_screen_whatever_the_names(width: int, glyphs) -> None:
    bad = vault(0, name=HOSTILE, role=HOSTILE, version=HOSTILE, activity=HOSTILE)
    kv = replace(inference(0).tiers[1], miss_reasons={HOSTILE: 1 << 63}, size_bytes=1 << 63, cap_bytes=1 << 63)
    mini = inference(0, name=HOSTILE, tiers=(kv,), engines=(replace(inference(0).engines[0], model=HOSTILE),))
    view = view_of(mini, bad, at=0, lost=(bad.address,), name=HOSTILE)
    lines = [
        *cluster_line(view, width, glyphs, paused=True),
        *why_lines(view, width, 2, glyphs),
        *node_lines(view, width, 3, glyphs),
        *tier_lines(view, view, width, glyphs),
        *miss_lines(view, width, 3, glyphs),
        event_line(event(1, HOSTILE, node=HOSTILE, kind=HOSTILE, severity=HOSTILE), width, glyphs),
    ]
    assert max(cell_len(line) for line in plain(lines)) <= width


def test_a_busy_vault_says_what_moves() -> None:
    kv = vault(0).tiers[0]
    later = vault(1, tiers=(replace(kv, bytes_in=kv.bytes_in + 42 * MIB, bytes_out=kv.bytes_out + 2 * GIB),))
    assert plain(node_lines(view_of(vault(0), later, at=1), 80, 3, UNICODE))[1].endswith("in 42M/s out 2.0G/s")
