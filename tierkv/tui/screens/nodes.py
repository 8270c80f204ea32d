"""All nodes as a table, and one of them whole: settings in force, versions, links, histograms, events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding

from tierkv.rpc.config_port import ConfigState
from tierkv.telemetry.histogram import HistogramSnapshot, upper_bound_s
from tierkv.telemetry.snapshot import TierSnapshot
from tierkv.tui.model import LABELS, NodeView
from tierkv.tui.screens.work import WorkScreen, as_json
from tierkv.tui.text import age, clean, clock, counted, percent, short_count, short_duration, short_size
from tierkv.tui.theme import Glyphs, Role
from tierkv.tui.widgets.events import event_line
from tierkv.tui.widgets.lines import Line, Span, left, right
from tierkv.tui.widgets.meter import meter, spark
from tierkv.tui.widgets.nodes import ROLES, WORDS, doing, shape_of, state_words
from tierkv.tui.widgets.table import Column, Pager, Table, number
from tierkv.tui.widgets.words import Words
from tierkv.units import format_size

EVENTS_SHOWN = 12
LABEL = 12
TIER_HEADINGS = {
    "size": "bytes of state that it holds",
    "cap": "the most that it may hold",
    "records": "blocks and checkpoints that it holds",
    "hit": "of all lookups since the start, how many found something",
    "evicted": "records that left to make room",
}
RESTORES = "restores: p50 p99"
LINK_HEADINGS = {
    "tier": "kv: attention state; ssm: recurrent checkpoints",
    "state": "up; down; backoff: left alone for a while; unknown: not asked yet",
    "rtt": "the last round trip",
    "in/s": "bytes a second that the link brought when it was busy",
    "out/s": "bytes a second that it took when it was busy",
    "failures": "calls that failed, since the start",
}


def worst_rtt_s(node: NodeView) -> float | None:
    """The worst round trip among the node's links that are up."""
    links = node.snapshot.links if node.snapshot else ()
    return max((link.rtt_s for link in links if link.state == "up" and link.rtt_s), default=None)


def held_bytes(node: NodeView) -> int | None:
    return sum(tier.size_bytes for tier in node.snapshot.tiers) if node.snapshot else None


class Nodes(WorkScreen):
    tab = "nodes"
    BINDINGS = [
        Binding("enter", "open", "Open"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("s", "sort", "Sort"),
        Binding("S", "sort_reversed", "Reverse the order", show=False),
        Binding("y", "copy", "Copy the row", show=False),
        Binding("Y", "copy_json", "Copy the row as JSON", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.table: Table[NodeView] = Table("table", self._columns(), lambda node: node.target, "no agents yet")

    def _columns(self) -> tuple[Column[NodeView], ...]:
        return (
            Column(
                "state", "whether it answers: see STATES below",
                9, self._state, 0, lambda n: n.state, role=lambda n: ROLES[n.state], marked=True,
            ),
            Column(
                "name", "what it calls itself: cluster.node_name, else its host and role",
                12, lambda n: n.name, 0, lambda n: n.name, role=_fresh,
            ),
            Column(
                "role", "inference beside an engine; kv-vault and ssm-vault keep state for others",
                9, lambda n: n.role, 1, lambda n: n.role, role=_fresh,
            ),
            Column(
                "mem", "of the machine's memory, how much is in use by whatever runs there",
                4, _used, 2, _fraction, right=True, role=_fresh, descending=True, marked=True,
            ),
            Column(
                "mark", "inference.memory_threshold: above it the engine's prompt cache evicts",
                4, _mark, 3, lambda n: n.memory.threshold_fraction, right=True, role=_fresh, marked=True,
            ),
            number(
                "holds", "bytes of state in its tiers",
                5, 4, held_bytes, short_size, _fresh, marked=True,
            ),
            number(
                "in/s", "bytes a second that come in, over all its tiers",
                5, 6, lambda n: n.rates.bytes_in_per_s if n.rates else None, short_size, _fresh,
            ),
            number(
                "out/s", "bytes a second that go out, over all its tiers",
                5, 7, lambda n: n.rates.bytes_out_per_s if n.rates else None, short_size, _fresh,
            ),
            number(
                "p99", "99 of 100 of its restores took no longer, since it started",
                5, 5, promote_p99, short_duration, _fresh, marked=True,
            ),
            number(
                "rtt", "the slowest round trip of its links that are up",
                5, 8, worst_rtt_s, short_duration, _fresh,
            ),
            Column(
                "up", "how long its process has been running",
                4, _uptime, 9, lambda n: -(n.snapshot.started_unix_s if n.snapshot else 0), True, role=_fresh,
            ),
            Column(
                "version", "its TierKV; where it is not this console's, doing says so too",
                8, lambda n: n.version, 11, lambda n: n.version, role=self._version_role,
            ),
            Column(
                "doing", "what it does now, or why nobody knows; whether its clock or version is off",
                8, lambda n: doing(n, self.held, self.console_app.glyphs), 10, grow=True, role=_fresh,
            ),
        )  # fmt: skip

    def _state(self, node: NodeView) -> str:
        return f"{shape_of(node.state, self.console_app.glyphs)} {WORDS[node.state]}"

    def _version_role(self, node: NodeView) -> Role:
        return "warn" if self.held.versions and node.version not in ("", self.held.versions[0]) else _fresh(node)

    def words(self) -> tuple[Words, ...]:
        return (*super().words(), state_words(self.console_app.glyphs))

    def body(self) -> ComposeResult:
        yield self.table

    def main(self) -> Table[Any]:
        return self.table

    def draw(self) -> None:
        self.table.show(self.held.nodes)

    def exported(self) -> Any:
        return [_json(node) for node in self.table.shown]

    def action_open(self) -> None:
        if self.table.chosen is not None:
            self.app.push_screen(Node(self.table.chosen.target))
            self.console_app.tick()

    def on_table_opened(self) -> None:
        self.action_open()

    def action_copy(self) -> None:
        if self.table.chosen is not None:
            self.copied("\t".join(self.table.fields(self.table.chosen).values()), "the row")

    def action_copy_json(self) -> None:
        if self.table.chosen is not None:
            self.copied(as_json(_json(self.table.chosen)), "the node as JSON")


def _fresh(node: NodeView) -> Role:
    return "text" if node.up else "dim"


def _fraction(node: NodeView) -> float:
    return node.memory.used_fraction


def _used(node: NodeView) -> str:
    return percent(node.memory.used_fraction) if node.memory.total_bytes else ""


def _mark(node: NodeView) -> str:
    return percent(node.memory.threshold_fraction) if node.memory.threshold_fraction else ""


def _uptime(node: NodeView) -> str:
    if node.snapshot is None:
        return ""
    return short_duration(max(0.0, node.snapshot.now_unix_s - node.snapshot.started_unix_s))


def promote_p99(node: NodeView) -> float | None:
    """Of all restores of the node, from its tiers' buckets added up."""
    tiers = node.snapshot.tiers if node.snapshot else ()
    return HistogramSnapshot.merged(tier.promote_s for tier in tiers).quantile(0.99)


def _json(node: NodeView) -> Any:
    return asdict(node)


class Node(WorkScreen):
    """One node. Its configuration is asked for when the screen opens, and again with ``r``."""

    tab = "nodes"
    drilled = True
    BINDINGS = [
        Binding("r", "refresh", "Ask again"),
        Binding("Y", "copy_json", "Copy as JSON", show=False),
        Binding("escape,left", "back", "Back"),
    ]

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target
        self.pager = Pager("node")
        self.config: ConfigState | str = "not asked yet"

    def body(self) -> ComposeResult:
        yield self.pager

    def main(self) -> Pager:
        return self.pager

    def on_mount(self) -> None:
        self.action_refresh()

    def action_refresh(self) -> None:
        operator = self.console_app.operator
        if operator is None:
            self.config = "not in this recording"
            return

        async def ask() -> None:
            self.config = await operator.config(self.target)
            self.redraw()

        self.run_worker(ask(), exclusive=True, group="config")

    @property
    def node(self) -> NodeView | None:
        return next((node for node in self.held.nodes if node.target == self.target), None)

    def draw(self) -> None:
        node = self.node
        self.crumb = node.name if node else self.target
        if node is not None:
            self.pager.show(list(self._lines(node)))

    def exported(self) -> Any:
        values = self.config.values if isinstance(self.config, ConfigState) else ()
        return {"node": _json(self.node) if self.node else None, "config": {one.key: one.value for one in values}}

    def action_copy_json(self) -> None:
        self.copied(as_json(self.exported()), "the node as JSON")

    def words(self) -> tuple[Words, ...]:
        restores = "half and 99 of 100 took no longer; the bars: how many took how long"
        return (Words.named("TIERS", {**TIER_HEADINGS, "restores": restores}), Words.named("LINKS", LINK_HEADINGS))

    # --- drawing ---------------------------------------------------------------------------------

    def _lines(self, node: NodeView) -> Iterator[Line]:
        width, glyphs = self.size.width, self.console_app.glyphs
        yield from self._identity(node, width, glyphs)
        if node.snapshot is None:
            return
        yield from _engines(node, width, glyphs)
        yield from _tiers(node, width, glyphs)
        yield from _links(node, width, glyphs)
        yield from self._settings(width, glyphs)
        yield ()
        yield (left(" EVENTS of this node", width, "head", glyphs),)
        events = [line.event for line in self.held.events.lines if line.event.node == node.name]
        yield from (event_line(event, width, glyphs) for event in events[: -EVENTS_SHOWN - 1 : -1])
        if not events:
            yield (left("  nothing has happened yet", width, "dim", glyphs),)
        if node.snapshot.counters:
            yield ()
            yield (left(" COUNTERS", width, "head", glyphs),)
            yield from _counters(node, width, glyphs)

    def _identity(self, node: NodeView, width: int, glyphs: Glyphs) -> Iterator[Line]:
        state: Span = (f" {shape_of(node.state, glyphs)} {WORDS[node.state]}  ", ROLES[node.state])
        told = doing(node, self.held, glyphs)
        yield (state, (clean(f"{node.name}  {node.role}  "), "strong"), left(told, width - 40, _fresh(node), glyphs))
        snapshot = node.snapshot
        if snapshot is None:
            yield _field("address", node.target, width, glyphs)
            return
        up = short_duration(max(0.0, snapshot.now_unix_s - snapshot.started_unix_s))
        where = f"{node.target}  process {snapshot.pid}, up {up}, started {clock(snapshot.started_unix_s)}"
        yield _field("address", where, width, glyphs)
        console = self.held.versions[0] if self.held.versions else ""
        skew = (
            f"; its clock is {age(abs(node.skew_s))} {'ahead' if node.skew_s > 0 else 'behind'}" if node.skewed else ""
        )
        same = "" if node.version == console else f", this console is {console}"
        yield _field(
            "version", f"{node.version}{same}{skew}; restarted {counted(node.restarts, 'time')}", width, glyphs
        )
        memory = node.memory
        if memory.total_bytes:
            mark = memory.threshold_fraction or None
            bar = meter(memory.used_fraction, mark, 30, glyphs, "ok" if node.up else "dim", "bad")
            text = f"  {percent(memory.used_fraction)} of {format_size(memory.total_bytes)}"
            text += f", mark {percent(mark)}" if mark else ""
            yield (left(" memory", LABEL + 1, "dim", glyphs), *bar, left(text, width - 31 - LABEL, "text", glyphs))
            text = f"{format_size(memory.rss_bytes)} of it this agent"
            text += f", {format_size(memory.device_bytes)} on the device" if memory.device_bytes else ""
            yield _field("", text, width, glyphs, "dim")
            if memory.note:
                yield _field("", memory.note, width, glyphs, "warn")

    def _settings(self, width: int, glyphs: Glyphs) -> Iterator[Line]:
        yield ()
        if not isinstance(self.config, ConfigState):
            yield (left(" SETTINGS in force", 24, "head", glyphs), left(self.config, width - 24, "dim", glyphs))
            return
        from tierkv.config.edit import shown

        given = [one for one in self.config.values if one.origin != "default" or one.pending != one.value]
        where = self.config.path or "no file"
        yield (
            left(" SETTINGS in force", 24, "head", glyphs),
            left(f"revision {self.config.revision}, {where}; all others are defaults", width - 24, "dim", glyphs),
        )
        if self.config.last_fault:
            fault = self.config.last_fault.splitlines()[-1].strip()
            yield _field("", f"its last reload failed: {fault}", width, glyphs, "bad")
        for one in given:
            waits = one.pending != one.value
            note = f"{shown(one.key, one.pending)} after a restart" if waits else ""
            yield (
                left(f"  {one.key}", 31, "text", glyphs),
                left(shown(one.key, one.value), 15, "strong", glyphs),
                left("live" if one.live else "restart", 8, "dim", glyphs),
                left(note or one.origin, width - 54, "warn" if waits else "dim", glyphs),
            )


def _field(label: str, text: str, width: int, glyphs: Glyphs, role: Role = "text") -> Line:
    return (left(f" {label}", LABEL + 1, "dim", glyphs), left(text, width - LABEL - 1, role, glyphs))


def _engines(node: NodeView, width: int, glyphs: Glyphs) -> Iterator[Line]:
    for engine in node.snapshot.engines if node.snapshot else ():
        saved = f"; saved {short_count(engine.prefill_tokens_saved)} tokens, {short_duration(engine.prefill_s_saved)}"
        state = "attached" if engine.attached else "not attached"
        model = clean(engine.model).rstrip("/").rsplit("/", 1)[-1] or "no model yet"
        text = f"{engine.build or engine.kind}: {model}, {state}{saved}"
        yield _field("engine", text, width, glyphs)
        if engine.identity:
            yield _field("", f"identity {engine.identity}", width, glyphs, "dim")


def _tiers(node: NodeView, width: int, glyphs: Glyphs) -> Iterator[Line]:
    yield ()
    yield (
        left(" TIERS", LABEL + 1, "head", glyphs),
        *(right(title, 8, "dim", glyphs) for title in TIER_HEADINGS),
        left(f"   {RESTORES}", width - LABEL - 41, "dim", glyphs),
    )
    for tier in node.snapshot.tiers if node.snapshot else ():
        looked = tier.hits + tier.misses
        numbers = (
            short_size(tier.size_bytes),
            short_size(tier.cap_bytes) if tier.cap_bytes else glyphs.unknown,
            short_count(tier.records),
            percent(tier.hits / looked) if looked else glyphs.unknown,
            short_count(tier.evictions),
        )
        yield (
            left(f"  {LABELS.get(tier.name, tier.name)}", LABEL + 1, "strong", glyphs),
            *(right(number, 8, "text", glyphs) for number in numbers),
            ("   ", "text"),
            *_histogram(tier, width - LABEL - 44, glyphs),
        )


def _histogram(tier: TierSnapshot, width: int, glyphs: Glyphs) -> list[Span]:
    """Percentiles, and as many restores in each octave as there were, from the shortest to the longest."""
    found = tier.promote_s
    if not found.total or width < 16:
        return [left("none measured", max(0, width), "faint", glyphs)]
    text = (
        f"{short_duration(found.quantile(0.5))} {short_duration(found.quantile(0.99))} of {short_count(found.total)} "
    )
    cells = max(0, width - len(text))
    first, last = min(found.counts), max(found.counts)
    step = max(1, -(-(last - first + 1) // max(1, min(cells, 32))))
    groups = [
        float(sum(found.counts.get(bucket, 0) for bucket in range(start, start + step)))
        for start in range(first, last + 1, step)
    ]
    if cells < len(groups) + 8:
        return [left(text, width, "text", glyphs)]
    ends = f" {short_duration(upper_bound_s(first))}..{short_duration(upper_bound_s(last))}"
    return [(text, "text"), *spark(groups, len(groups), glyphs), left(ends, cells - len(groups), "dim", glyphs)]


def _links(node: NodeView, width: int, glyphs: Glyphs) -> Iterator[Line]:
    links = node.snapshot.links if node.snapshot else ()
    if not links:
        return
    yield ()
    yield (
        left(" LINKS", 24, "head", glyphs),
        *(left(title, size, "dim", glyphs) for title, size in zip(LINK_HEADINGS, (6, 9), strict=False)),
        *(right(title, 9, "dim", glyphs) for title in list(LINK_HEADINGS)[2:]),
    )
    for link in links:
        role: Role = "ok" if link.state == "up" else "bad" if link.state == "down" else "warn"
        yield (
            left(f"  {link.peer}", 24, "text", glyphs),
            left(link.tier, 6, "text", glyphs),
            left(link.state, 9, role, glyphs),
            right(short_duration(link.rtt_s) if link.rtt_s else glyphs.unknown, 9, "text", glyphs),
            right(short_size(link.receive_bytes_per_s), 9, "text", glyphs),
            right(short_size(link.send_bytes_per_s), 9, "text", glyphs),
            right(short_count(link.failures), 9, "text", glyphs),
            left(f"  {link.last_error}" if link.state != "up" else "", max(0, width - 75), "dim", glyphs),
        )


def _counters(node: NodeView, width: int, glyphs: Glyphs) -> Iterator[Line]:
    counters = sorted(node.snapshot.counters.items()) if node.snapshot else []
    room = 2 + max((len(clean(name)) for name, _ in counters), default=0)
    across = max(1, width // (room + 10))
    for start in range(0, len(counters), across):
        part = counters[start : start + across]
        spans: list[Span] = []
        for name, count in part:
            spans.append(left(f"  {name.replace('_', ' ')}", min(room, width - 10), "text", glyphs))
            spans += [right(short_count(count), 8, "strong", glyphs), ("  ", "text")]
        yield tuple(spans)
