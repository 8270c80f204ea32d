"""What a person may ask of the agents from the console, as plain values; ``live_operator`` does it over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tierkv.rpc.admin import PrefixSummary, PurgePlan, RecordLine
from tierkv.rpc.config_port import Acknowledged, Changes, Checked, ConfigState
from tierkv.telemetry.explanation import Explanation, RequestLine
from tierkv.tui.model import ClusterView
from tierkv.tui.text import age, clean

Scope = Literal["prefix", "model", "older", "node", "tier", "all"]


@dataclass(frozen=True, slots=True)
class Holder:
    """An agent that keeps records: where it is dialled, and its name."""

    address: str
    name: str


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records of which holders; ``address`` empty means all holders."""

    scope: Scope
    address: str = ""
    node: str = ""
    model: str = ""
    prefix: bytes = b""
    older_than_s: float = 0.0
    tier: str = ""

    @property
    def text(self) -> str:
        """What it is, for people."""
        match self.scope:
            case "prefix":
                return f"prefix {self.prefix.hex()[:8]} of {clean(self.model) or 'an unnamed model'}"
            case "model":
                return f"model {clean(self.model)}"
            case "older":
                return f"what was not used for {age(self.older_than_s)}"
            case "node":
                return f"node {clean(self.node)}"
            case "tier":
                return f"tier {'cold KV' if self.tier == 'kv' else 'cold SSM'}"
            case _:
                return "everything"

    @property
    def typed(self) -> str:
        """What has to be typed to purge it: short, and never something that a keyboard does not have."""
        name = {
            "prefix": self.prefix.hex()[:8],
            "model": clean(self.model).rstrip("/").rsplit("/", 1)[-1],
            "older": "older",
            "node": clean(self.node),
            "tier": self.tier,
        }.get(self.scope, "everything")
        return name if name.isascii() and 0 < len(name) <= 40 else "purge"


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """One prefix at one holder."""

    holder: Holder
    info: PrefixSummary

    @property
    def key(self) -> str:
        return f"{self.holder.address} {self.info.leaf_key.hex()}"


@dataclass(frozen=True, slots=True)
class PrefixList:
    """``total`` counts those that were not sent as well; ``failures``: (holder, why)."""

    rows: tuple[PrefixRow, ...] = ()
    total: int = 0
    failures: tuple[tuple[Holder, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Preview:
    """What a purge would remove at one holder, or why it does not say."""

    holder: Holder
    plan: PurgePlan | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Purged:
    """What was removed at one holder, and how to take it back."""

    holder: Holder
    records: int = 0
    size_bytes: int = 0
    undo_token: str = ""
    undo_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a small request at one holder."""

    holder: Holder
    records: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request of an engine, at the agent that knows why it was answered as it was."""

    holder: Holder
    line: RequestLine

    @property
    def key(self) -> str:
        return f"{self.holder.address} {self.line.id} {self.line.time_unix_s}"


class Operator(Protocol):
    """Nothing here raises for a holder that fails: its answer says why."""

    async def prefixes(self, holders: Sequence[Holder]) -> PrefixList: ...

    async def records(self, holders: Sequence[Holder], key: bytes) -> list[tuple[Holder, tuple[RecordLine, ...]]]: ...

    async def pin(self, holders: Sequence[Holder], what: Selection, on: bool) -> list[Done]: ...

    async def preview(self, holders: Sequence[Holder], what: Selection) -> list[Preview]: ...

    async def purge(self, previews: Sequence[Preview]) -> list[Purged]: ...

    async def undo(self, purged: Sequence[Purged]) -> list[Done]: ...

    async def config(self, address: str) -> ConfigState | str:
        """What is in force at an agent, or why it does not say."""
        ...

    async def check(self, addresses: Sequence[str], changes: Changes) -> list[Checked]: ...

    async def apply(self, checked: Sequence[Checked], changes: Changes) -> list[Acknowledged]: ...

    async def requests(self, holders: Sequence[Holder]) -> tuple[list[RequestRow], list[tuple[Holder, str]]]:
        """The last requests, and (holder, why) of those that do not tell."""
        ...

    async def explain(self, holder: Holder, number: int) -> Explanation | str:
        """Why that request was answered as it was, or why nobody says."""
        ...


def holders_of(view: ClusterView) -> list[Holder]:
    """The agents that are up and keep records."""
    found: list[Holder] = []
    for node in view.nodes:
        tiers = {tier.name for tier in node.snapshot.tiers} if node.snapshot else set()
        if node.up and (node.role.endswith("-vault") or "local" in tiers):
            found.append(Holder(node.target, node.name))
    return found


def away_of(view: ClusterView) -> list[Preview]:
    """The agents that may keep records and cannot be asked, each with why."""
    found: list[Preview] = []
    for node in view.nodes:
        tiers = {tier.name for tier in node.snapshot.tiers} if node.snapshot else set()
        keeps = not node.role or node.role.endswith("-vault") or "local" in tiers
        if keeps and node.counts and not node.up:
            since = f", stale {age(node.age_s)}" if node.age_s is not None else ""
            why = "connecting" if node.state == "connecting" else f"cannot be asked ({node.state}{since})"
            found.append(Preview(Holder(node.target, node.name), error=why))
    return found


def nowhere(view: ClusterView) -> str:
    """What is true of a record that no node has which was asked: it is gone only where all of them could be asked."""
    away = away_of(view)
    if not away:
        return "at no node: it is gone"
    more = f" and {len(away) - 1} more" if len(away) > 1 else ""
    return f"at no node that answers; {away[0].holder.name}{more} cannot be asked"


def explainers_of(view: ClusterView) -> list[Holder]:
    """The agents that are up and beside an engine: they know its requests."""
    return [Holder(node.target, node.name) for node in view.nodes if node.up and node.role == "inference"]


def chosen(holders: Sequence[Holder], what: Selection) -> list[Holder]:
    """The holders that the selection means."""
    return [one for one in holders if not what.address or one.address == what.address]
