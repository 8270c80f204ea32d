"""The strip of nodes: state, role, memory against its mark, and what each is doing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.tui.model import UP, ClusterView, NodeState, NodeView
from tierkv.tui.text import age, counted, percent, short_size
from tierkv.tui.theme import Glyphs, Role
from tierkv.tui.widgets.lines import Line, Span, left
from tierkv.tui.widgets.marks import Change, Marks, sign
from tierkv.tui.widgets.meter import meter
from tierkv.tui.widgets.words import Words

ROW_MIN = 76
"""Columns below which two rows of nodes do not go side by side."""

USED = 9
"""As wide as its heading, "used/mark"."""

WORDS: dict[NodeState, str] = {
    "live": "live",
    "over": "over",
    "silent": "silent",
    "lost": "lost",
    "connecting": "wait",
    "down": "down",
    "absent": "none",
    "refused": "refused",
    "foreign": "foreign",
}
ROLES: dict[NodeState, Role] = {
    "live": "ok",
    "over": "warn",
    "silent": "bad",
    "lost": "bad",
    "connecting": "wait",
    "down": "bad",
    "absent": "dim",
    "refused": "bad",
    "foreign": "bad",
}
STATES: dict[NodeState, str] = {
    "live": "it answers, and its memory is below its mark",
    "over": "its memory is above its mark",
    "silent": "connected, but nothing was heard for seconds",
    "lost": "the connection broke; what is shown is as old as it says; tried again for ever",
    "connecting": "not connected yet",
    "down": "named in tierkv.toml, and nothing answers there",
    "absent": "nobody named it and nothing answers there",
    "refused": "it does not take this user's token",
    "foreign": "what answers there is no agent of TierKV",
}
HEADINGS = {
    "role": "inference beside an engine; kv-vault and ssm-vault keep state for others",
    "memory": "of the machine, by whatever runs there; the bar is the mark",
    "used/mark": "the same as numbers: above the mark the engine's prompt cache evicts",
    "doing": "what it does now, or why nobody knows; whether its clock or version is off",
}
GRAVEST_FIRST: tuple[NodeState, ...] = (
    "lost",
    "silent",
    "down",
    "refused",
    "foreign",
    "over",
    "connecting",
    "live",
    "absent",
)


@dataclass(frozen=True, slots=True)
class _Columns:
    name: int
    meter: int
    doing: int


def _columns(width: int) -> _Columns:
    name = 9 if width < 70 else 12 if width < 120 else 18
    bar = 10 if width < 70 else 14 if width < 100 else min(32, 14 + (width - 100) // 3)
    return _Columns(name, bar, max(0, width - (1 + 10 + name + 1 + 9 + 1 + bar + 1 + USED + 1 + 1)))


def state_words(glyphs: Glyphs) -> Words:
    """Every state by its shape and word."""
    told = {f"{shape_of(state, glyphs)} {WORDS[state]}": text for state, text in STATES.items()}
    return Words.named("STATES", told)


def shape_of(state: NodeState, glyphs: Glyphs) -> str:
    return {
        "live": glyphs.live,
        "over": glyphs.over,
        "silent": glyphs.silent,
        "lost": glyphs.lost,
        "connecting": glyphs.waiting,
        "down": glyphs.lost,
        "absent": glyphs.absent,
    }.get(state, glyphs.refused)


def node_lines(view: ClusterView, width: int, rows: int, glyphs: Glyphs, marks: Marks | None = None) -> list[Line]:
    """The heading and at most ``rows`` lines of nodes; what does not fit is summed up, the gravest states first."""
    marks = marks or Marks()
    across = 1 if len(view.nodes) <= rows else max(1, width // ROW_MIN)
    cell = width // across
    shown, rest = _chosen(view.nodes, rows * across)
    lines: list[Line] = [_heading(cell, across, glyphs)]
    parts: list[Line] = [_row(node, view, cell, glyphs, marks) for node in shown]
    marks.keep({node.target for node in view.nodes})
    if rest:
        parts.append((left(f" + {_summed(rest)}", cell, "dim", glyphs),))
    height = -(-len(parts) // across)
    lines.extend(tuple(span for part in parts[y::height] for span in part) for y in range(height))
    return lines


def rows_needed(nodes: int, width: int, most: int) -> int:
    """How many lines the strip wants, of at most ``most``."""
    if nodes <= most:
        return max(1, nodes)
    return min(most, -(-nodes // max(1, width // ROW_MIN)))


def _chosen(nodes: Sequence[NodeView], most: int) -> tuple[Sequence[NodeView], Sequence[NodeView]]:
    if len(nodes) <= most:
        return nodes, ()
    ordered = sorted(nodes, key=lambda node: GRAVEST_FIRST.index(node.state))
    return ordered[: most - 1], ordered[most - 1 :]


def _summed(nodes: Sequence[NodeView]) -> str:
    by_state: list[tuple[NodeState, int]] = [
        (state, sum(node.state == state for node in nodes)) for state in GRAVEST_FIRST
    ]
    return f"{counted(len(nodes), 'more node')}: " + ", ".join(f"{n} {WORDS[state]}" for state, n in by_state if n)


def _heading(width: int, across: int, glyphs: Glyphs) -> Line:
    columns = _columns(width)
    titled = 1 + 9 + 1 + columns.name + 1
    widths = (9 + 1, columns.meter + 1, USED + 1, columns.doing)
    titles = (left(title, size, "dim", glyphs) for title, size in zip(HEADINGS, widths, strict=True))
    labels: Line = (*titles, (" ", "text"))
    again: Line = (left("", titled, "text", glyphs), *labels)
    return (left(" NODES", titled, "head", glyphs), *labels, *(again * (across - 1)))


def _row(node: NodeView, view: ClusterView, width: int, glyphs: Glyphs, marks: Marks) -> Line:
    columns = _columns(width)
    role, state = ROLES[node.state], marks.seen(node.target, "state", node.state)
    fresh = node.state in UP
    body: Role = "text" if fresh else "dim"
    named: list[Span] = [left(node.name, columns.name, "strong" if fresh else "dim", glyphs), (" ", "text")]
    named.append(left(node.role, 9, body, glyphs))
    if node.snapshot is None:
        named = [left(node.target, columns.name + 1 + 9, "dim", glyphs)]
    return (
        (" ", "text"),
        *_marked(f"{shape_of(node.state, glyphs)} {WORDS[node.state]}", 10, role, state, glyphs),
        *named,
        (" ", "text"),
        *_memory(node, columns.meter, glyphs, marks),
        left(doing(node, view, glyphs), columns.doing, body if node.state != "over" else "warn", glyphs),
        (" ", "text"),
    )


def _memory(node: NodeView, width: int, glyphs: Glyphs, marks: Marks) -> list[Span]:
    memory = node.memory
    if node.snapshot is None or not memory.total_bytes:
        return [left("", width + 1 + USED + 1, "text", glyphs)]
    mark = memory.threshold_fraction if memory.threshold_fraction > 0 else None
    used = percent(memory.used_fraction)
    text = f"{used.rstrip('%')}/{percent(mark)}" if mark else used
    role: Role = "dim" if not node.up else "warn" if node.state == "over" else "text"
    fill, over = ("ok", "bad") if node.up else ("dim", "dim")
    change = marks.seen(node.target, "memory", text, memory.used_fraction)
    return [
        *meter(memory.used_fraction, mark, width, glyphs, fill, over),
        (" ", "text"),
        *_marked(text, USED + 1, "strong" if change and role == "text" else role, change, glyphs),
    ]


def _marked(text: str, width: int, role: Role, change: Change, glyphs: Glyphs) -> list[Span]:
    """``text`` with its mark right behind it, in exactly ``width`` cells."""
    return [(text, role), left(sign(change, glyphs), width - len(text), "mark", glyphs)]


def doing(node: NodeView, view: ClusterView, glyphs: Glyphs) -> str:
    """What the node does, or why nobody knows; faults before activity."""
    joint = f" {glyphs.dot} "
    if node.state in ("lost", "silent"):
        return joint.join(part for part in (f"stale {age(node.age_s or 0)}", node.error) if part)
    if node.state == "connecting":
        return "connecting"
    if not node.up:
        return node.error or "no agent answers"
    parts = [f"clock {'+' if node.skew_s > 0 else '-'}{age(abs(node.skew_s))}"] if node.skewed else []
    if view.versions and node.version != view.versions[0]:
        parts.append(f"version {node.version or 'unknown'}")
    parts.append(node.activity or _traffic(node))
    return joint.join(parts)


def _traffic(node: NodeView) -> str:
    rates = node.rates
    if rates is None:
        return "idle"
    moving = [
        f"{word} {short_size(rate)}/s"
        for word, rate in (("in", rates.bytes_in_per_s), ("out", rates.bytes_out_per_s))
        if rate >= 1
    ]
    return " ".join(moving) or "idle"
