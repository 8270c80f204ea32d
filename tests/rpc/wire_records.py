"""Prompts and sound records of raw segments for tests of the wire, and the two verbs of a client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierkv.codec.frame import FrameHeader, FrameType, payload_hash
from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey, PromptChain, block_key, state_key, window_key
from tierkv.rpc.vault_port import Missing, Piece, VaultPort

ROOT = BlockKey(b"\x05" * 32)
_KEYS = {RecordKind.BLOCK: block_key, RecordKind.WINDOW: window_key, RecordKind.STATE: state_key}


@dataclass(frozen=True)
class Record:
    header: RecordHeader
    data: bytes = field(repr=False)

    @property
    def key(self) -> BlockKey:
        return self.header.key


def prompt(n_tokens: int, seed: int = 0, root: BlockKey = ROOT) -> PromptChain:
    """Random ids; the same seed gives the same ids, so a longer prompt starts like a shorter one."""
    return PromptChain.of(root, np.random.default_rng(seed).integers(0, 32000, n_tokens))


def record(
    kind: RecordKind, parent: BlockKey, tokens, start: int, *, size: int = 1000, fidelity: int = 0, epoch: int = 0,
    root: BlockKey = ROOT, seed: int = 1, segments: int = 2, **fields,
) -> Record:  # fmt: skip
    ids = np.asarray(tokens, np.int64)
    random = np.random.default_rng(seed)
    body = b""
    for array in range(segments):
        payload = random.integers(0, 256, size, np.uint8).tobytes()
        frame = FrameHeader(
            FrameType.SEGMENT, 0, "uint8", (size,), start, size, size, payload_hash(payload), array=array
        )
        body += frame.pack() + payload
    media = fields.get("media", ())
    header = RecordHeader(
        kind, _KEYS[kind](parent, ids, media, start), parent, root, ids, start, b"L" * 16, b"{}", fidelity, epoch,
        1.5, segments, len(body), size * segments, "m", "raw", **fields,
    )  # fmt: skip
    return Record(header, header.pack_frame() + body)


def blocks_of(chain: PromptChain, *, partial: bool = True, **fields) -> list[Record]:
    """Every full block of the prompt and, if asked, its tail as a partial record."""
    records = []
    n = len(chain.tokens)
    for start in range(0, n if partial else n // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
        tokens = chain.tokens[start : start + BLOCK_TOKENS]
        records.append(record(RecordKind.BLOCK, chain.parent_at(start), tokens, start, seed=start, **fields))
    return records


def checkpoint(chain: PromptChain, position: int, kind: RecordKind = RecordKind.STATE, **fields) -> Record:
    start = position // BLOCK_TOKENS * BLOCK_TOKENS
    return record(kind, chain.parent_at(position), chain.tail_at(position), start, **fields)


async def each(records: Sequence[Record], cut: int = 700) -> AsyncIterator[tuple[RecordHeader, list[bytes]]]:
    """The records as a client takes them, in several buffers."""
    for item in records:
        yield item.header, [item.data[i : i + cut] for i in range(0, len(item.data), cut)]


async def put(vault: VaultPort, records: Sequence[Record]) -> list[str]:
    return [outcome.outcome for outcome in await vault.store(each(records))]


async def take(vault: VaultPort, keys: Sequence[BlockKey], **options) -> list[bytes | str]:
    """Every record's bytes, or why it is missing."""
    found: dict[int, bytearray | str] = {}
    async with contextlib.aclosing(vault.promote(keys, **options)) as items:
        async for item in items:
            if isinstance(item, Missing):
                found[item.index] = item.reason
                continue
            assert isinstance(item, Piece)
            whole = found.setdefault(item.index, bytearray())
            assert isinstance(whole, bytearray)
            assert len(whole) == item.offset
            whole += item.data
            assert len(whole) <= item.total
    return [value if isinstance(value := found[i], str) else bytes(value) for i in range(len(keys))]
