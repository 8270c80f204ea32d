"""What all vaults together have of a prompt, and the best restore that can be made of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tierkv.agents.pending import PendingRecords, PendingSource
from tierkv.codec.record import RecordKind
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey, PromptChain, common_prefix
from tierkv.rpc.vault_port import Found, Missing, Piece, ProbeResult
from tierkv.state.layout import Layout
from tierkv.store.journal import NEVER_STORED


class Source(Protocol):
    """Where a record's bytes come from: a vault, or the queue of pending records."""

    @property
    def peer(self) -> str: ...

    def promote(
        self, keys: Sequence[BlockKey], *, timeout_s: float | None = None
    ) -> AsyncIterator[Piece | Missing]: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    found: Found
    source: Source


@dataclass(frozen=True, slots=True)
class Needs:
    """Which kinds of layers a model has; None where nobody has seen its layout yet."""

    rows: bool
    window: bool
    state: bool

    @classmethod
    def of(cls, layout: Layout) -> Needs:
        return cls(*(bool(layout.having(kind)) for kind in ("rows", "window", "state")))


@dataclass(slots=True)
class View:
    """Candidates of all sources, nearer sources first. ``reasons``: why a tier has no more, by tier."""

    blocks: dict[int, list[Candidate]] = field(default_factory=dict[int, list[Candidate]])
    partials: list[Candidate] = field(default_factory=list[Candidate])
    windows: list[Candidate] = field(default_factory=list[Candidate])
    states: list[Candidate] = field(default_factory=list[Candidate])
    reasons: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, source: Source, result: ProbeResult, usable: Callable[[Candidate], bool]) -> None:
        def candidates(found: Sequence[Found]) -> list[Candidate]:
            return [each for each in (Candidate(item, source) for item in found) if usable(each)]

        for index, found in result.blocks.items():
            self.blocks.setdefault(index, []).extend(candidates([found]))
        self.partials += candidates([result.partial] if result.partial is not None else [])
        self.windows += candidates(result.windows)
        self.states += candidates(result.states)

    def digests(self) -> set[bytes]:
        every = [*self.blocks.values(), self.partials, self.windows, self.states]
        return {each.found.layout_digest for group in every for each in group}


def pending_result(pending: PendingRecords, chain: PromptChain, source: PendingSource) -> ProbeResult:
    """What the queue has of the prompt, as a vault would say it."""
    blocks: dict[int, Found] = {}
    for index, key in enumerate(chain.keys):
        record = pending.get(key)
        if record is not None:
            blocks[index] = source.take(record, record.header.n_tokens)
    best: Found | None = None
    checkpoints: dict[RecordKind, list[Found]] = {RecordKind.WINDOW: [], RecordKind.STATE: []}
    for boundary in range(0, len(chain.tokens) + 1, BLOCK_TOKENS):
        parent, rest = chain.parent_at(boundary), chain.tokens[boundary : boundary + BLOCK_TOKENS]
        for kind, into in checkpoints.items():
            for record in pending.children(parent, kind):
                tail = record.header.tokens
                if len(tail) <= len(rest) and np.array_equal(tail, rest[: len(tail)]):
                    into.append(source.take(record, len(tail)))
        if len(chain.keys) > boundary // BLOCK_TOKENS and chain.keys[boundary // BLOCK_TOKENS] in pending:
            continue
        for record in pending.children(parent, RecordKind.BLOCK):
            agreeing = common_prefix(record.header.tokens, rest)
            if agreeing and (best is None or boundary + agreeing > best.start + best.agreeing):
                best = source.take(record, agreeing)
    return ProbeResult(
        blocks, len(blocks), best, tuple(checkpoints[RecordKind.WINDOW]), tuple(checkpoints[RecordKind.STATE]),
        0, NEVER_STORED, source.peer,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mark:
    """Checkpoints at one position; None where the model has no such layers."""

    position: int
    window: Candidate | None
    state: Candidate | None

    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(each for each in (self.window, self.state) if each is not None)


@dataclass(frozen=True, slots=True)
class Plan:
    """A restore up to ``position``: row records in order, and checkpoints with earlier ones to fall back on.

    ``marks`` is empty for a model whose layers are all rows.
    """

    digest: bytes
    needs: Needs
    position: int
    rows: tuple[Candidate, ...]
    marks: tuple[Mark, ...]

    def records(self) -> int:
        return len(self.rows) + len(self.checkpoints())

    def checkpoints(self) -> tuple[Candidate, ...]:
        """Those of the furthest position."""
        return self.marks[0].candidates() if self.marks else ()


def best_plan(
    view: View,
    chain: PromptChain,
    *,
    limit: int,
    at_least: int,
    rows_from: int,
    needs_of: Callable[[bytes], Needs | None],
) -> Plan | None:
    """The restore that reaches furthest, at a position in [at_least, limit]; None when there is none.

    ``needs_of`` says for a layout's digest what its layers need, None to leave that layout out.
    """
    plans = (
        _plan_of(digest, needs, view, chain, limit, at_least, rows_from)
        for digest in sorted(view.digests())
        if (needs := needs_of(digest)) is not None
    )
    return max((plan for plan in plans if plan is not None), key=lambda plan: plan.position, default=None)


def _plan_of(
    digest: bytes, needs: Needs, view: View, chain: PromptChain, limit: int, at_least: int, rows_from: int
) -> Plan | None:
    rows, end = _rows(digest, view, limit) if needs.rows else ([], limit)
    if not (needs.window or needs.state):
        position = chain.clamp(min(end, limit))
        marks: tuple[Mark, ...] = ()
    else:
        marks = _marks(digest, needs, view, chain, min(end, limit), at_least)
        position = marks[0].position if marks else -1
    if position < at_least:
        return None
    used = tuple(each for each in rows if each.found.end > rows_from and each.found.start < position)
    return Plan(digest, needs, position, used, marks)


def _rows(digest: bytes, view: View, limit: int) -> tuple[list[Candidate], int]:
    """The leading run of blocks with this layout and the record behind it that agrees longest."""
    rows: list[Candidate] = []
    end = 0
    while end < limit:
        block = next((each for each in view.blocks.get(len(rows), ()) if each.found.layout_digest == digest), None)
        if block is None:
            break
        rows.append(block)
        end = block.found.end
    tails = [each for each in view.partials if each.found.start == end and each.found.layout_digest == digest]
    if end < limit and tails:
        tail = max(tails, key=lambda each: each.found.agreeing)
        rows.append(tail)
        end += tail.found.agreeing
    return rows, end


def _marks(digest: bytes, needs: Needs, view: View, chain: PromptChain, end: int, at_least: int) -> tuple[Mark, ...]:
    """Positions in [at_least, end] with every checkpoint that is needed, the furthest first."""

    def by_position(candidates: list[Candidate]) -> dict[int, Candidate]:
        positions: dict[int, Candidate] = {}
        for each in candidates:
            position = each.found.end
            if each.found.layout_digest == digest and at_least <= position <= end and chain.clamp(position) == position:
                positions.setdefault(position, each)
        return positions

    windows, states = by_position(view.windows), by_position(view.states)
    both = windows.keys() & states.keys() if needs.window and needs.state else windows.keys() | states.keys()
    marks = (
        Mark(position, windows.get(position) if needs.window else None, states.get(position) if needs.state else None)
        for position in sorted(both, reverse=True)
    )
    return tuple(mark for mark in marks if mark.candidates())
