"""Vault messages to domain values and back, and what a vault accepts of a request. Every count is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tierkv.codec.record import RecordKind
from tierkv.errors import UsageError
from tierkv.identity.blocks import BLOCK_TOKENS, KEY_BYTES, BlockKey
from tierkv.rpc.channels import printable
from tierkv.rpc.probing import Candidate, ProbeAnswer, ProbeQuery
from tierkv.store.journal import Fate
from tierkv.v1 import vault_service_pb2 as pb

MAX_KEYS = 32768
MAX_TOKENS = 65536
LAST_UNIX_S = 1e11  # in the year 5138
MAX_POSITION = 1 << 40
MAX_CANDIDATES = MAX_KEYS + 1024
MAX_SLUG_CHARS = 64


def slug(text: str) -> str:
    """A short reason from the network, fit to be counted and shown."""
    return printable(text[:MAX_SLUG_CHARS])


# --- requests -----------------------------------------------------------------------------------


def checked_keys(keys: Sequence[bytes]) -> list[BlockKey]:
    """Raises UsageError unless there are at most 32,768 keys of 32 bytes."""
    if len(keys) > MAX_KEYS:
        raise UsageError(f"at most {MAX_KEYS} keys a call, not {len(keys)}")
    if any(len(key) != KEY_BYTES for key in keys):
        raise UsageError(f"a key has {KEY_BYTES} bytes")
    return [BlockKey(key) for key in keys]


def query_to_proto(query: ProbeQuery) -> pb.ProbeRequest:
    return pb.ProbeRequest(
        root=query.root,
        block_keys=query.keys,
        tokens_start=query.tokens_start,
        tokens=query.tokens.tolist(),
        want_blocks=query.blocks,
        want_windows=query.windows,
        want_states=query.states,
        worst_fidelity=query.worst_fidelity,
        peek=query.peek,
    )


def query_from_proto(request: pb.ProbeRequest) -> ProbeQuery:
    """Raises UsageError, naming the field, for a request out of bounds."""
    keys = checked_keys(request.block_keys)
    if len(request.root) != KEY_BYTES:
        raise UsageError(f"root has {KEY_BYTES} bytes, not {len(request.root)}")
    if len(request.tokens) > MAX_TOKENS:
        raise UsageError(f"at most {MAX_TOKENS} token ids a call, not {len(request.tokens)}")
    if request.tokens_start % BLOCK_TOKENS or request.tokens_start > MAX_POSITION:
        raise UsageError(f"tokens_start is a multiple of {BLOCK_TOKENS}")
    return ProbeQuery(
        BlockKey(request.root),
        keys,
        request.tokens_start,
        np.array(request.tokens, np.int64),
        request.want_blocks,
        request.want_windows,
        request.want_states,
        min(request.worst_fidelity, 255),
        request.peek,
    )


# --- answers ------------------------------------------------------------------------------------


def answer_to_proto(answer: ProbeAnswer, node: str) -> pb.ProbeResponse:
    return pb.ProbeResponse(
        records=[
            pb.ProbedRecord(
                key=c.key,
                kind=int(c.kind),
                block_index=c.block_index,
                n_tokens=c.n_tokens,
                agreeing_tokens=c.agreeing,
                size_bytes=c.size_bytes,
                fidelity=c.fidelity,
                layout_digest=c.layout_digest,
                tail=c.tail.tolist() if c.tail is not None else (),
                raw_bytes=c.raw_bytes,
            )
            for c in answer.candidates
        ],
        leading_blocks=answer.leading_blocks,
        epoch=answer.epoch,
        missing_reason=answer.missing.reason,
        node=node,
        missing_unix_s=answer.missing.unix_s,
        missing_why=answer.missing.why,
    )


def answer_from_proto(message: pb.ProbeResponse, max_record_bytes: int) -> ProbeAnswer:
    """What a vault answered; records that cannot be are left out."""
    candidates: list[Candidate] = []
    for record in message.records[:MAX_CANDIDATES]:
        possible = (
            record.kind in (1, 2, 3)
            and len(record.key) == KEY_BYTES
            and record.n_tokens <= BLOCK_TOKENS
            and len(record.tail) <= BLOCK_TOKENS
            and record.block_index <= MAX_POSITION
            and 0 < record.size_bytes <= max_record_bytes
        )
        if possible:
            candidates.append(_candidate(record))
    return ProbeAnswer(
        tuple(candidates),
        min(message.leading_blocks, MAX_KEYS),
        message.epoch,
        Fate(slug(message.missing_reason), moment(message.missing_unix_s), printable(message.missing_why)),
        slug(message.node),
    )


def _candidate(record: pb.ProbedRecord) -> Candidate:
    return Candidate(
        BlockKey(record.key),
        RecordKind(record.kind),
        record.block_index,
        record.n_tokens,
        record.agreeing_tokens,
        record.size_bytes,
        record.raw_bytes,
        record.fidelity,
        record.layout_digest,
        np.array(record.tail, np.int64) if record.tail else None,
    )


def moment(unix_s: float) -> float:
    """A time from the network, 0 (unknown) for what is none."""
    return unix_s if 0 <= unix_s < LAST_UNIX_S else 0.0


def joined(first: ProbeAnswer, again: ProbeAnswer) -> ProbeAnswer:
    """The second answer's blocks with the first one's checkpoints; the older epoch, so that a purge between counts."""
    checkpoints = tuple(c for c in first.candidates if c.kind is not RecordKind.BLOCK)
    return replace(again, candidates=again.candidates + checkpoints, epoch=min(first.epoch, again.epoch))
