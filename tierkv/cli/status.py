"""``tierkv status``: what every agent says of itself, within a second and a half."""

from __future__ import annotations

import argparse
import asyncio
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tierkv.cli.ask import Answer, node_reports
from tierkv.cli.context import add_connect, loaded, targets, token_of
from tierkv.cli.output import Style, clean, document, plural, say, width
from tierkv.cli.parser import Commands
from tierkv.errors import EXIT_OK, EXIT_REFUSED, EXIT_UNREACHABLE, NotAuthenticated
from tierkv.telemetry.snapshot import SKEW_S
from tierkv.units import format_duration, format_rate, format_size

if TYPE_CHECKING:
    from tierkv.rpc.node_client import NodeReport
    from tierkv.telemetry.snapshot import EngineSnapshot, LinkSnapshot, MemorySnapshot, NodeSnapshot, TierSnapshot

_EXAMPLE = """\
  tierkv status                              the agents that tierkv.toml names, else this machine's
  tierkv status --connect nas.local:50051    this one alone
  tierkv status --json | jq '.nodes[] | select(.reachable | not) | .address'

exit codes: 0 at least one agent answered, 3 none did, 5 none without a token
"""
_INDENT, _LABEL = 6, 10


def add(commands: Commands) -> None:
    parser = commands.add(
        "status",
        _status,
        "what every agent says of itself",
        description="Asks every agent at once and shows: reachable, round trip, role, memory against its threshold,\n"
        "tier sizes, hits, misses with reasons, evictions, promote p50/p99, links, engine.",
        example=_EXAMPLE,
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")
    add_connect(parser)


def _status(arguments: argparse.Namespace) -> int:
    configuration = loaded(arguments)
    asked = targets(configuration, arguments.connect)
    answers = asyncio.run(node_reports(asked, token_of(configuration)))
    if arguments.json:
        document("status", cluster=configuration.config.cluster.name, nodes=[_as_json(answer) for answer in answers])
    else:
        _print(answers, Style())
    if any(answer.value for answer in answers):
        return EXIT_OK
    refused = any(isinstance(answer.error, NotAuthenticated) for answer in answers)
    return EXIT_REFUSED if refused else EXIT_UNREACHABLE


def _as_json(answer: Answer[NodeReport]) -> dict[str, Any]:
    from tierkv.cli import snapshot_json

    report, error = answer.value, answer.error
    return {
        "address": answer.target.address,
        "expected_role": answer.target.role or None,
        "reachable": report is not None,
        "error": {"kind": type(error).__name__, "message": answer.reason} if error else None,
        "rtt_s": report.rtt_s if report else None,
        "clock_skew_s": report.skew_s if report else None,
        "authenticated": report.authenticated if report else None,
        "node": snapshot_json.node(report.node) if report else None,
    }


def _print(answers: Sequence[Answer[NodeReport]], style: Style) -> None:
    for answer in answers:
        for text in node_lines(answer, style):
            say(text)
    up = sum(answer.value is not None for answer in answers)
    say(f"{up} of {plural(len(answers), 'agent')} up")
    if not up:
        say("start one with 'tierkv agent --role kv-vault' or see 'tierkv agent --help'")


def node_lines(answer: Answer[NodeReport], style: Style) -> list[str]:
    """A node in lines of at most the terminal's width."""
    report = answer.value
    if report is None:
        role = answer.target.role or "agent"
        head = f"{role}  {answer.target.address}"
        return [style.bad("DOWN  ") + style.bold(head), *_field("", clean(answer.reason))]
    node = report.node
    head = f"{clean(node.role, 20)}  {clean(node.name, 40)}"
    facts = [answer.target.address, format_duration(report.rtt_s), f"tierkv {clean(node.version, 20)}"]
    lines = [style.good("up    ") + style.bold(head)]
    facts.append("up " + format_duration(max(0.0, node.now_unix_s - node.started_unix_s)))
    if abs(report.skew_s) > SKEW_S:
        facts.append(f"clock {format_duration(abs(report.skew_s))} {'ahead' if report.skew_s > 0 else 'behind'}")
    if not report.authenticated:
        facts.append("read only (not authenticated)")
    lines += _field("", "  ".join(facts))
    lines += _field("memory", _memory(node.memory))
    if node.activity:
        lines += _field("doing", clean(node.activity))
    for engine in node.engines:
        lines += _field("engine", _engine(engine))
        if engine.quality_samples or engine.quality_raised_layers:
            lines += _field("quality", _quality(engine))
    for tier in node.tiers:
        lines += _field(clean(tier.name, _LABEL - 2), _size(tier), *_traffic(tier))
    for link in node.links:
        lines += _field("link", _link(link))
    return lines + _surprises(answer, node)


def _field(label: str, *texts: str) -> list[str]:
    """The label and its texts, wrapped with a hanging indent."""
    first, rest = " " * _INDENT + label.ljust(_LABEL), " " * (_INDENT + _LABEL)
    lines: list[str] = []
    for number, text in enumerate(texts):
        lines += textwrap.wrap(
            text, width(), initial_indent=rest if number else first, subsequent_indent=rest, break_on_hyphens=False
        )
    return lines


def _memory(memory: MemorySnapshot) -> str:
    text = f"{memory.used_fraction:.0%} of {format_size(memory.total_bytes)} in use"
    if memory.threshold_fraction:
        over = memory.used_fraction > memory.threshold_fraction
        text += f", {'OVER ' if over else ''}threshold {memory.threshold_fraction:.0%}"
    text += f"; this agent {format_size(memory.rss_bytes)}"
    if memory.device_bytes:
        text += f"; device {format_size(memory.device_bytes)}"
    return text + (f"; {clean(memory.note)}" if memory.note else "")


def _engine(engine: EngineSnapshot) -> str:
    build = clean(engine.build or engine.kind, 60)
    text = f"{build}: {clean(engine.model or 'no model yet', 80)}, {'attached' if engine.attached else 'not attached'}"
    if engine.attached and engine.model and not engine.identity:
        text += ", weights are being hashed"
    if engine.prefill_tokens_saved:
        text += f"; saved {engine.prefill_tokens_saved:,} tokens, {format_duration(engine.prefill_s_saved)} of prefill"
    return text + (f"; {clean(engine.note)}" if engine.note else "")


def _quality(engine: EngineSnapshot) -> str:
    """What live samples of restored prompts say."""
    better = f"{plural(engine.quality_raised_layers, 'layer')} put on a better codec"
    if not engine.quality_samples:
        return f"no sample yet; {better} before the agent was started"
    text = f"{plural(engine.quality_samples, 'sample')} of {clean(engine.quality_codec, 40)}"
    said = [f"worst layer {engine.quality_snr_db_min:.1f} dB" if engine.quality_snr_db_min else "every bit came back"]
    if engine.quality_top1_fraction or engine.quality_kl_mean:
        said[:0] = [f"KL {engine.quality_kl_mean:.1e}", f"same top token {engine.quality_top1_fraction:.1%}"]
    text += f": {', '.join(said)}"
    return f"{text}; {better}" if engine.quality_raised_layers else text


def _size(tier: TierSnapshot) -> str:
    if not tier.cap_bytes and not tier.size_bytes and not tier.records:
        return _counts(tier)
    text = format_size(tier.size_bytes)
    if tier.cap_bytes:
        text += f" of {format_size(tier.cap_bytes)} ({tier.size_bytes / tier.cap_bytes:.0%})"
    text += f", {plural(tier.records, 'record')}, {plural(tier.tokens, 'token')}"
    if tier.pinned_records:
        text += f", {tier.pinned_records:,} pinned"
    return f"{text}; {_counts(tier)}"


def _counts(tier: TierSnapshot) -> str:
    text = plural(tier.hits, "hit")
    text += f", {plural(tier.misses, 'miss', 'misses')}{_reasons(tier.miss_reasons)}"
    return f"{text}, {plural(tier.evictions, 'eviction')}"


def _reasons(reasons: Mapping[str, int]) -> str:
    most = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{clean(reason, 40)} {count:,}" for reason, count in most[:6])
    return f" ({shown}{', ...' if len(most) > 6 else ''})" if shown else ""


def _traffic(tier: TierSnapshot) -> list[str]:
    parts: list[str] = []
    if tier.promote_s.total:
        p50, p99 = tier.promote_s.quantile(0.5) or 0.0, tier.promote_s.quantile(0.99) or 0.0
        parts.append(f"promote p50 {format_duration(p50)}, p99 {format_duration(p99)} of {tier.promote_s.total:,}")
    if tier.bytes_in or tier.bytes_out:
        parts.append(f"in {format_size(tier.bytes_in)}, out {format_size(tier.bytes_out)}")
    if tier.refusals:
        parts.append(f"refused{_reasons(tier.refusals)}")
    if tier.quarantined_records:
        parts.append(f"{tier.quarantined_records:,} QUARANTINED")
    return ["; ".join(parts)] if parts else []


def _link(link: LinkSnapshot) -> str:
    text = f"{clean(link.tier, 20)} {clean(link.peer, 60)} {clean(link.state, 20)}"
    if link.rtt_s:
        text += f", {format_duration(link.rtt_s)}"
    rates = [
        f"{name} {format_rate(rate)}"
        for name, rate in (("receives", link.receive_bytes_per_s), ("sends", link.send_bytes_per_s))
        if rate
    ]
    text += "".join(f", {rate}" for rate in rates)
    if link.failures:
        text += f", {plural(link.failures, 'failure')}"
        text += f", last: {clean(link.last_error, 120)}" if link.last_error and link.state != "up" else ""
    return text


def _surprises(answer: Answer[NodeReport], node: NodeSnapshot) -> list[str]:
    expected = answer.target.role
    if expected and node.role and node.role != expected:
        return _field("note", f"the configuration expects {expected} here")
    return []
