"""The tiers table: where the state is, how often it is found, what it costs, and how that went in five minutes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierkv.tui.model import ClusterView, TierView
from tierkv.tui.text import UNKNOWN, age, percent, short_duration, short_rate, short_size
from tierkv.tui.theme import Glyphs, Role
from tierkv.tui.widgets.lines import Line, Span, left, right
from tierkv.tui.widgets.marks import Change, Marks, sign
from tierkv.tui.widgets.meter import meter, spark
from tierkv.tui.widgets.words import Words

SPARKS = (60, 30, 20, 15, 12, 10, 6, 5)
"""Widths of the history that take a whole number of buckets a cell."""


@dataclass(frozen=True, slots=True)
class Column:
    """One number of the table. ``told``: what the help says of it. ``keep``: columns with a lower number stay when the
    screen gets narrow. ``marked``: the number itself where its change is marked; rates change all the time."""

    title: str
    told: str
    width: int
    keep: int
    value: Callable[[TierView], str]
    marked: Callable[[TierView], float | None] | None = None


def _size(tier: TierView) -> str:
    if not tier.cap_bytes:
        return short_size(tier.size_bytes)
    return f"{short_size(tier.size_bytes)}/{short_size(tier.cap_bytes)}"


COLUMNS = (
    Column(
        "size/cap", "what it holds now, and the most that it may hold",
        9, 0, _size, lambda tier: tier.size_bytes,
    ),
    Column(
        "hit 1m", "of the last minute's lookups, how many found something here",
        6, 1, lambda tier: percent(tier.hit_1m), lambda tier: tier.hit_1m,
    ),
    Column(
        "10m", "the same over ten minutes",
        4, 2, lambda tier: percent(tier.hit_10m), lambda tier: tier.hit_10m,
    ),
    Column(
        "p50", "half of its restores took no longer, since the agents started",
        5, 3, lambda tier: short_duration(tier.promote_p50_s), lambda tier: tier.promote_p50_s,
    ),
    Column(
        "p99", "99 of 100 of its restores took no longer",
        5, 4, lambda tier: short_duration(tier.promote_p99_s), lambda tier: tier.promote_p99_s,
    ),
    Column(
        "in/s", "bytes a second that are stored into it",
        4, 5, lambda tier: short_size(tier.rates.bytes_in_per_s if tier.rates else None),
    ),
    Column(
        "out/s", "bytes a second that are read from it",
        5, 6, lambda tier: short_size(tier.rates.bytes_out_per_s if tier.rates else None),
    ),
    Column(
        "evict/s", "records a second that left to make room",
        7, 7, lambda tier: short_rate(tier.rates.evictions_per_s if tier.rates else None),
    ),
)  # fmt: skip
ROWS = {
    "hot": "the engine's own prompt cache",
    "local": "the vault inside the inference agent (inference.local_vault_bytes)",
    "cold KV": "attention state in the vaults",
    "cold SSM": "recurrent checkpoints of hybrid models in the vaults",
}
FILL, TRAFFIC, SHORT_TRAFFIC = "fill", "traffic, 5 min", "5 min"
GRAPHS = {
    FILL: "how full it is; only where the screen is wide",
    SHORT_TRAFFIC: "its traffic, in and out, over the last five minutes",
}
WORDS = (
    Words("TIERS", (*Words.of("", COLUMNS).told, *GRAPHS.items())),
    Words.named("TIERS, line by line", ROWS),
)
NAME = 10
WIDE = 118
"""From here on every tier has a fill meter."""


@dataclass(frozen=True, slots=True)
class Layout:
    columns: tuple[Column, ...]
    gap: int
    fill: int
    spark: int


def layout(width: int) -> Layout:
    """The columns that fit into ``width``, the space between them, and what is left for meter and history."""
    columns = list(COLUMNS)
    while columns and 1 + NAME + sum(column.width + 1 for column in columns) > width:
        columns.pop()
    fill = min(24, (width - 94) // 2) if width >= WIDE else 0
    used = 1 + NAME + sum(column.width for column in columns) + (fill + 2 if fill else 0)
    gap = max(1, min(3, (width - used - 12) // (len(columns) + 1)))
    rest = width - used - gap * len(columns) - 2 - 1
    return Layout(tuple(columns), gap, fill, next((size for size in SPARKS if size <= rest), 0))


def tier_lines(
    view: ClusterView, live: ClusterView, width: int, glyphs: Glyphs, marks: Marks | None = None
) -> list[Line]:
    """Heading and one line a tier: numbers from ``view`` (which may be paused), history from ``live``."""
    plan, marks = layout(width), marks or Marks()
    heading: list[Span] = [left(" TIERS", 1 + NAME, "head", glyphs)]
    if plan.fill:
        heading.append(left(FILL, plan.fill + 2, "dim", glyphs))
    heading += [right(column.title, plan.gap + column.width, "dim", glyphs) for column in plan.columns]
    if plan.spark:
        title = TRAFFIC if plan.spark >= 14 else SHORT_TRAFFIC
        heading.append(left(f"  {title}", plan.spark + 2, "dim", glyphs))
    return [tuple(heading), *(_row(tier, live.tier(tier.name), plan, width, glyphs, marks) for tier in view.tiers)]


def _row(tier: TierView, live: TierView, plan: Layout, width: int, glyphs: Glyphs, marks: Marks) -> Line:
    name = 1 + NAME
    if tier.state == "absent":
        return (left(f" {tier.label}", name, "dim", glyphs), left("not in use", width - name, "faint", glyphs))
    known = tier.state == "live"
    role: Role = "text" if known else "dim"
    accent: Role = "accent" if known else "dim"
    shape = {"partial": f" {glyphs.silent}", "stale": f" {glyphs.lost}"}.get(tier.state, "")
    spans: list[Span] = [left(f" {tier.label}{shape}", name, "strong" if known else "dim", glyphs)]
    if plan.fill:
        spans += [*meter(tier.fill or 0.0, None, plan.fill, glyphs, accent), ("  ", "text")]
    change: Change = ""
    for column in plan.columns:
        spans.append((sign(change, glyphs), "mark"))
        value = column.value(tier)
        change = marks.seen(tier.name, column.title, value, column.marked(tier)) if column.marked and known else ""
        shown, faint = (glyphs.unknown, True) if value == UNKNOWN else (value, False)
        shade: Role = "faint" if faint else "strong" if change else role
        spans.append(right(shown, plan.gap - 1 + column.width, shade, glyphs))
    if plan.spark:
        spans.append((f"{sign(change, glyphs)} ", "mark"))
    if plan.spark and live.state == "stale":
        spans.append(left(f"stale {age(live.age_s)}", plan.spark, "dim", glyphs))
    elif plan.spark:
        spans += spark(live.history, plan.spark, glyphs, accent)
    return tuple(spans)
