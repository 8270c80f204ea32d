"""What of a prompt a vault has: ``look_up`` answers from the index, ``judge`` is the reader's own check of an answer.

The vault is never trusted: a full block counts when its key is one of ours, a checkpoint when its key is the one that
our tokens give at its place, a partial match up to where our own comparison (or, before the bytes are here, the
vault's claim) says that tokens agree; ``check_belongs`` proves that after the fetch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey, PromptChain, Tokens, common_prefix
from tierkv.rpc.vault_port import Found, ProbeResult
from tierkv.store.base import IndexEntry, Store
from tierkv.store.journal import NEVER_STORED, NOTHING_MISSING, Fate
from tierkv.telemetry.tier import TierTelemetry

ALL_FIDELITIES = 255
LEASE_S = 10.0
MAX_CHECKPOINTS = 64
MAX_CHILDREN = 64
MAX_UNCOMPARED = 8
# Prompts up to this many tokens are compared in one round trip; ids take about 3 bytes each on the wire.
WINDOW_TOKENS = 8192

REASON_TOO_LOSSY = "too_lossy"
REASON_NEVER_STORED = "never_stored"


@dataclass(frozen=True, slots=True)
class ProbeQuery:
    """``tokens`` are the prompt's ids from ``tokens_start`` (a block boundary) on."""

    root: BlockKey
    keys: Sequence[BlockKey]
    tokens_start: int
    tokens: Tokens
    blocks: bool
    windows: bool
    states: bool
    worst_fidelity: int = ALL_FIDELITIES
    peek: bool = False

    def slice_at(self, start: int) -> Tokens | None:
        """The prompt's ids of the block at ``start``; None when the query does not carry them."""
        offset = start - self.tokens_start
        if offset < 0 or offset > len(self.tokens):
            return None
        return self.tokens[offset : offset + BLOCK_TOKENS]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A record that may serve. ``tail`` is set where the vault could not compare: the record's own tokens."""

    key: BlockKey
    kind: RecordKind
    block_index: int
    n_tokens: int
    agreeing: int
    size_bytes: int
    raw_bytes: int
    fidelity: int
    layout_digest: bytes
    tail: Tokens | None = None


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    candidates: tuple[Candidate, ...]
    leading_blocks: int
    epoch: int
    missing: Fate
    node: str = ""

    @property
    def is_complete(self) -> bool:
        """False when blocks follow the leading run that the vault could not compare: ask again with their tokens."""
        return not any(c.kind is RecordKind.BLOCK and c.tail is not None for c in self.candidates)


# --- the vault's side ---------------------------------------------------------------------------


def look_up(store: Store, query: ProbeQuery, tier: TierTelemetry | None = None) -> ProbeAnswer:
    """What the store has for the query. Reads the index only; leases what it answers and counts, unless peeking."""
    epoch = store.epoch
    found: list[Candidate] = []
    leading, fate = 0, NOTHING_MISSING
    if query.blocks:
        leading, fate = _blocks(store, query, found)
    kinds = [kind for kind, wanted in ((RecordKind.WINDOW, query.windows), (RecordKind.STATE, query.states)) if wanted]
    if kinds:
        _checkpoints(store, query, kinds, found)
        if not found:
            fate = fate if fate.reason else _missing_checkpoint(store, query)
    answer = ProbeAnswer(tuple(found), leading, epoch, fate)
    if not query.peek:
        store.lease([candidate.key for candidate in found], LEASE_S)
        if tier is not None and answer.is_complete:
            _count(tier, answer)
    return answer


def _count(tier: TierTelemetry, answer: ProbeAnswer) -> None:
    reach = max((c.block_index * BLOCK_TOKENS + c.agreeing for c in _usable(answer)), default=0)
    if reach or any(c.kind is not RecordKind.BLOCK for c in answer.candidates):
        tier.hit(reach)
    else:
        tier.miss(answer.missing.reason or REASON_NEVER_STORED)


def _usable(answer: ProbeAnswer) -> Iterable[Candidate]:
    """Candidates that serve from the root on: blocks of the leading run and the one after it, and checkpoints."""
    return (c for c in answer.candidates if c.kind is not RecordKind.BLOCK or c.block_index <= answer.leading_blocks)


def _blocks(store: Store, query: ProbeQuery, found: list[Candidate]) -> tuple[int, Fate]:
    """Full blocks by key and the best child of the last leading one; the leading run and why it ends."""
    entries = store.lookup(query.keys)
    leading, fate = len(query.keys), NOTHING_MISSING
    for index, entry in enumerate(entries):
        if entry is not None and _serves(entry, query) and entry.header.is_full_block:
            found.append(_candidate(entry, index, BLOCK_TOKENS))
        elif index < leading:
            leading = index
            fate = Fate(REASON_TOO_LOSSY) if entry is not None else store.fate(query.keys[index])
    parent = query.keys[leading - 1] if leading else query.root
    lossy = _after_leading(store, query, parent, leading, found)
    if not found and not fate.reason:
        fate = Fate(REASON_TOO_LOSSY if lossy else REASON_NEVER_STORED)
    return leading, fate


def _after_leading(store: Store, query: ProbeQuery, parent: BlockKey, index: int, found: list[Candidate]) -> bool:
    """Adds the child that agrees longest, or a few with their tokens. True if there were only too lossy ones."""
    tokens = query.slice_at(index * BLOCK_TOKENS)
    children = store.children(parent, (RecordKind.BLOCK,), like=tokens, limit=MAX_CHILDREN)
    serving = [child for child in children if _serves(child, query)]
    if tokens is None:
        found += [_candidate(child, index, 0, with_tail=True) for child in serving[:MAX_UNCOMPARED]]
    else:
        best = max(((_agreeing(child.header, tokens), -i) for i, child in enumerate(serving)), default=(0, 0))
        if best[0]:
            found.append(_candidate(serving[-best[1]], index, best[0]))
    return bool(children) and not serving


def _agreeing(header: RecordHeader, tokens: Tokens) -> int:
    """Leading tokens in common; a part of a record ends before its first media region, whose hash may differ."""
    n = common_prefix(header.tokens, tokens)
    if n == header.n_tokens or not header.media:
        return n
    return min(n, *(max(0, item.start - header.start) for item in header.media))


def _checkpoints(store: Store, query: ProbeQuery, kinds: Sequence[RecordKind], found: list[Candidate]) -> None:
    """Adds checkpoints whose tail is a prefix of the prompt, longest first, up to a bound for each kind."""
    left = dict.fromkeys(kinds, MAX_CHECKPOINTS)
    for index in range(len(query.keys), -1, -1):
        parent = query.keys[index - 1] if index else query.root
        wanted = [kind for kind in kinds if left[kind]]
        if not wanted:
            return
        tokens = query.slice_at(index * BLOCK_TOKENS)
        children = store.children(parent, wanted, like=tokens, limit=MAX_CHILDREN)
        for child in sorted(children, key=lambda entry: -entry.header.n_tokens):
            kind = child.header.kind
            if not left[kind] or not _serves(child, query):
                continue
            if tokens is None and child.header.n_tokens:
                found.append(_candidate(child, index, 0, with_tail=True))
            elif not child.header.n_tokens or np.array_equal(
                child.header.tokens, tokens[: child.header.n_tokens] if tokens is not None else []
            ):
                found.append(_candidate(child, index, child.header.n_tokens))
            else:
                continue
            left[kind] -= 1


def _missing_checkpoint(store: Store, query: ProbeQuery) -> Fate:
    """The index cannot know which checkpoint would have served; the last chain key is the best hint."""
    return store.fate(query.keys[-1]) if query.keys else NEVER_STORED


def _serves(entry: IndexEntry, query: ProbeQuery) -> bool:
    exact_enough = query.worst_fidelity >= ALL_FIDELITIES or entry.header.fidelity <= query.worst_fidelity
    return exact_enough and entry.header.root == query.root


def _candidate(entry: IndexEntry, index: int, agreeing: int, *, with_tail: bool = False) -> Candidate:
    header = entry.header
    return Candidate(
        header.key,
        header.kind,
        index,
        header.n_tokens,
        agreeing,
        entry.size_bytes,
        header.raw_bytes,
        header.fidelity,
        header.layout_digest,
        header.tokens if with_tail else None,
    )


# --- the reader's side --------------------------------------------------------------------------


def whole_query(
    chain: PromptChain, *, blocks: bool, windows: bool, states: bool, worst_fidelity: int, peek: bool, max_keys: int
) -> ProbeQuery:
    """The first question: all keys (at most ``max_keys``), and the ids of the prompt's last blocks."""
    keys = chain.keys[:max_keys]
    boundary = len(keys) * BLOCK_TOKENS
    start = max(0, boundary - WINDOW_TOKENS + BLOCK_TOKENS)
    tokens = chain.tokens[start : boundary + BLOCK_TOKENS]
    return ProbeQuery(chain.root, keys, start, tokens, blocks, windows, states, worst_fidelity, peek)


def repeated_query(chain: PromptChain, query: ProbeQuery, answer: ProbeAnswer) -> ProbeQuery:
    """The second question, for blocks only, with the ids at the place where the match ended."""
    start = min(answer.leading_blocks, len(query.keys)) * BLOCK_TOKENS
    tokens = chain.tokens[start : start + BLOCK_TOKENS]
    return ProbeQuery(query.root, query.keys, start, tokens, True, False, False, query.worst_fidelity, query.peek)


def judge(chain: PromptChain, answer: ProbeAnswer) -> ProbeResult:
    """The part of an answer that can be true. A candidate that cannot is left out."""
    blocks = {
        c.block_index: Found(
            c.key, c.kind, c.block_index * BLOCK_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS, c.size_bytes, c.raw_bytes,
            c.fidelity, c.layout_digest,
        )
        for c in answer.candidates
        if c.kind is RecordKind.BLOCK and c.block_index < len(chain.keys) and chain.keys[c.block_index] == c.key
    }  # fmt: skip
    leading = next((i for i in range(len(chain.keys)) if i not in blocks), len(chain.keys))
    return ProbeResult(
        dict(sorted(blocks.items())),
        leading,
        _best_partial(chain, answer, leading),
        _proved_checkpoints(chain, answer, RecordKind.WINDOW),
        _proved_checkpoints(chain, answer, RecordKind.STATE),
        answer.epoch,
        answer.missing,
        answer.node,
    )


def _best_partial(chain: PromptChain, answer: ProbeAnswer, leading: int) -> Found | None:
    start = leading * BLOCK_TOKENS
    tokens = chain.tokens[start : start + BLOCK_TOKENS]
    best: Found | None = None
    for c in answer.candidates:
        if c.kind is not RecordKind.BLOCK or c.block_index != leading:
            continue
        agreeing = common_prefix(c.tail, tokens) if c.tail is not None else c.agreeing
        agreeing = min(agreeing, c.n_tokens, len(tokens))
        if agreeing == c.n_tokens:
            # All of it is claimed to agree: then the key is one that we can make ourselves, media included.
            agreeing = agreeing if agreeing and chain.tail_key(start + agreeing) == c.key else 0
        else:
            agreeing = min([agreeing, *(m.start - start for m in chain.media if m.start >= start)])
        if agreeing > (best.agreeing if best else 0):
            best = Found(
                c.key, c.kind, start, c.n_tokens, agreeing, c.size_bytes, c.raw_bytes, c.fidelity, c.layout_digest
            )
    return best


def _proved_checkpoints(chain: PromptChain, answer: ProbeAnswer, kind: RecordKind) -> tuple[Found, ...]:
    """Longest first; each one's key is what our own tokens give at its place."""
    key_at = chain.window_key if kind is RecordKind.WINDOW else chain.state_key
    proved: dict[BlockKey, Found] = {}
    for c in answer.candidates:
        start = c.block_index * BLOCK_TOKENS
        end = start + c.n_tokens
        if c.kind is kind and c.n_tokens < BLOCK_TOKENS and end <= len(chain.tokens) and key_at(end) == c.key:
            proved[c.key] = Found(
                c.key, kind, start, c.n_tokens, c.n_tokens, c.size_bytes, c.raw_bytes, c.fidelity, c.layout_digest
            )
    return tuple(sorted(proved.values(), key=lambda found: -found.end))
