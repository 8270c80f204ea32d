"""One sentence that says why the cluster is as it is: the gravest cause that the data supports, with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tierkv.tui.model import ClusterView, NodeView
from tierkv.tui.record import tier_of
from tierkv.tui.text import age, clock, counted, percent, short_count, short_duration
from tierkv.units import format_rate, format_size

Severity = Literal["ok", "warn", "bad", "wait"]

FULL_FRACTION = 0.95
MANY_MISSES = 5


@dataclass(frozen=True, slots=True)
class Why:
    """``severity`` is also a word on the screen, never a colour alone."""

    severity: Severity
    text: str


def why(view: ClusterView) -> Why:
    """The first cause that applies, gravest first; every one is derived from ``view`` alone."""
    for cause in CAUSES:
        found = cause(view)
        if found:
            return found
    return _healthy(view)


def _nobody(view: ClusterView) -> Why | None:
    """No agent has ever answered."""
    if any(node.snapshot for node in view.nodes):
        return None
    refused = next((node for node in view.nodes if node.state in ("refused", "foreign")), None)
    if refused:
        return _refused(view)
    if not view.nodes or any(node.state == "connecting" for node in view.nodes):
        return Why("wait", "Connecting to " + _listed([node.target for node in view.nodes]) + ".")
    targets = _listed([node.target for node in view.nodes])
    return Why(
        "bad", f"No agent answers at {targets}. Start one: tierkv agent --role inference (or kv-vault, ssm-vault)."
    )


def _refused(view: ClusterView) -> Why | None:
    for node in view.nodes:
        if node.state == "refused":
            return Why("bad", f"{node.name} does not accept this console's token: {node.error or 'not authenticated'}.")
        if node.state == "foreign":
            return Why("bad", f"{node.target} is not a TierKV agent of this version: {node.error or 'wrong service'}.")
    return None


def _all_lost(view: ClusterView) -> Why | None:
    known = [node for node in view.nodes if node.snapshot]
    if view.up or not known:
        return None
    who = f"{known[0].name} has" if len(known) == 1 else f"All {len(known)} agents have"
    return Why(
        "bad", f"{who} stopped answering; everything here is {age(view.age_s or 0)} old. Still trying to reconnect."
    )


def _lost(view: ClusterView) -> Why | None:
    lost = [node for node in view.nodes if node.state in ("lost", "silent")]
    if not lost:
        return None
    node = max(lost, key=lambda one: _held(one))
    others = f" (and {counted(len(lost) - 1, 'other')})" if len(lost) > 1 else ""
    start = f"{node.name}{others} has not answered for {age(node.age_s or 0)}"
    if node.role == "inference":
        return Why("bad", f"{start}: its engine goes on without restores and nothing of it is demoted.")
    held = format_size(_held(node))
    kind = {"kv-vault": "cold KV", "ssm-vault": "checkpoints"}.get(node.role, "data")
    if not _held(node):
        return Why("bad", f"{start}: nothing can be stored there; it held nothing.")
    return Why("bad", f"{start}: {held} of {kind} cannot be restored, such prompts are prefilled instead.")


def _held(node: NodeView) -> int:
    if node.snapshot is None or node.role == "inference":
        return 0
    return sum(tier.size_bytes for tier in node.snapshot.tiers)


def _over(view: ClusterView) -> Why | None:
    over = [node for node in view.nodes if node.state == "over"]
    if not over:
        return None
    node = max(over, key=lambda one: one.memory.used_fraction - one.memory.threshold_fraction)
    memory = node.memory
    since = f" since {clock(node.over_since_unix_s, seconds=False)}" if node.over_since_unix_s else ""
    start = (
        f"{node.name} is over its mark{since} ({percent(memory.used_fraction)} of memory used, "
        f"mark {percent(memory.threshold_fraction)})"
    )
    if memory.note:
        return Why("warn", f"{start}: {memory.note}.")
    hot = tier_of(node.snapshot, "hot") if node.snapshot else None
    excess = memory.used_bytes - int(memory.threshold_fraction * memory.total_bytes)
    if node.over_grown_bytes > 0:
        return Why("warn", f"{start} because its hot tier grew by {format_size(node.over_grown_bytes)} since then.")
    if hot and hot.size_bytes >= excess:
        return Why(
            "warn", f"{start}: evicting {format_size(excess)} of its {format_size(hot.size_bytes)} hot cache clears it."
        )
    cache = format_size(hot.size_bytes) if hot else "nothing"
    return Why("warn", f"{start}, only {cache} of that is hot cache, evicting cannot clear it.")


def _unlinked(view: ClusterView) -> Why | None:
    """An inference agent cannot reach a vault, although both may be up."""
    for node in view.nodes:
        for link in node.snapshot.links if node.snapshot and node.up else ():
            if link.state in ("down", "backoff"):
                said = link.last_error.removeprefix(f"{link.peer}: ")
                error = f": {said.rstrip('.')}" if said else ""
                return Why("warn", f"{node.name} cannot reach {link.peer} ({link.tier} tier, {link.state}){error}.")
    return None


def _full(view: ClusterView) -> Why | None:
    """A tier that is at its cap and evicts, and who fills it."""
    for tier in view.tiers:
        if tier.fill is None or tier.fill < FULL_FRACTION or not tier.rates or not tier.rates.evictions_per_s:
            continue
        pace = f"{tier.rates.evictions_per_s:.1f} evictions/s"
        size = f"{format_size(tier.size_bytes)} of {format_size(tier.cap_bytes)}"
        feeder = _feeder(view, tier.name)
        cause = f" because {feeder} demotes {format_rate(tier.rates.bytes_in_per_s)} into it" if feeder else ""
        return Why("warn", f"{tier.label} is full ({size}, {pace}){cause}.")
    return None


def _feeder(view: ClusterView, tier: str) -> str:
    """The inference agent that sends most into ``tier``; empty where that is not known."""

    def sent(node: NodeView) -> float:
        links = node.snapshot.links if node.snapshot and node.up else ()
        return sum(link.send_bytes_per_s for link in links if link.tier == tier)

    senders = [node for node in view.nodes if node.role == "inference" and sent(node) > 0]
    return max(senders, key=sent).name if senders else ""


def _skewed(view: ClusterView) -> Why | None:
    for node in view.nodes:
        if node.up and node.skewed:
            side = "ahead of" if node.skew_s > 0 else "behind"
            skew = f"{node.name}'s clock is {age(abs(node.skew_s))} {side} this machine's"
            return Why("warn", f"{skew}; the times of its events are off.")
    if len(view.versions) > 1:
        running = _listed([f"{node.version} on {node.name}" for node in view.nodes if node.snapshot])
        return Why("warn", f"Versions differ: {running}; this console is {view.versions[0]}.")
    return None


def _missing(view: ClusterView) -> Why | None:
    """Most lookups of the last minute missed, and the commonest reason."""
    recent = sum(miss.last_minute for miss in view.misses)
    rates = [tier.hit_1m for tier in view.tiers if tier.hit_1m is not None]
    if recent < MANY_MISSES or not rates or max(rates) >= 0.5:
        return None
    top = view.misses[0]
    reason = top.reason.replace("_", " ")
    return Why("ok", f"{top.last_minute} of {recent} misses in the last minute: {reason}{_meaning(top.reason)}.")


def _meaning(reason: str) -> str:
    return {
        "never_stored": ", so these prompts are new",
        "evicted": ", so the cold tiers are too small for this working set",
        "timed_out": ", so a link or a vault is too slow",
        "identity_pending": ", so the weights are still being hashed",
    }.get(reason, "")


def _healthy(view: ClusterView) -> Why:
    nodes = view.counted
    up = (
        f"All {len(nodes)} agents are up"
        if len(nodes) > 1
        else f"{nodes[0].name} is up"
        if nodes
        else "Nothing to show"
    )
    down = [node.target for node in nodes if not node.up]
    if down:
        return Why("warn", f"{view.up} of {len(nodes)} agents are up; nobody answers at {_listed(down)}.")
    rates = [f"{tier.label} {percent(tier.hit_1m)}" for tier in view.tiers if tier.hit_1m is not None]
    hits = f"hit rate over the last minute: {', '.join(rates)}" if rates else "no lookups in the last minute"
    if not view.saved.tokens:
        return Why("ok", f"{up}; {hits}.")
    saved = f"{short_duration(view.saved.seconds)} of prefill ({short_count(view.saved.tokens)} tokens) saved so far"
    return Why("ok", f"{up}; {hits}; {saved}.")


def _listed(names: list[str], most: int = 3) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


CAUSES: tuple[Callable[[ClusterView], Why | None], ...] = (
    _nobody,
    _all_lost,
    _lost,
    _refused,
    _over,
    _unlinked,
    _full,
    _skewed,
    _missing,
)
