"""A vault in the test's own process that can be slow, forgetful and dishonest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.errors import PeerError
from tierkv.identity.blocks import BlockKey, PromptChain, common_prefix
from tierkv.rpc.vault_port import Found, Missing, Piece, ProbeResult, StoreOutcome
from tierkv.store.journal import Fate

PIECE_BYTES = 64 << 10


class LyingVault:
    """Implements VaultPort over a dict. ``tamper(key, bytes)`` is what a restore gets instead of the record's bytes."""

    peer = "lying:1"

    def __init__(self) -> None:
        self.records: dict[BlockKey, tuple[RecordHeader, bytes]] = {}
        self.tamper: Callable[[BlockKey, bytes], bytes | None] = lambda _key, data: data
        self.claims: Callable[[Found], Found | None] = lambda found: found
        self.error: PeerError | None = None
        self.seconds_a_record = 0.0
        self.promotes: list[Sequence[BlockKey]] = []
        self.refuse_with = ""

    async def probe(self, chain: PromptChain, **options: object) -> ProbeResult:
        if self.error:
            raise self.error
        blocks: dict[int, Found] = {}
        partial, windows, states = None, [], []
        boundaries = {parent: index for index, parent in enumerate((chain.root, *chain.keys))}
        for header, data in self.records.values():
            index = boundaries.get(header.parent)
            if index is None:
                continue
            rest = chain.tokens[index * 256 :]
            agreeing = common_prefix(header.tokens, rest)
            found = self.claims(self._found(header, data, agreeing))
            if found is None:
                continue
            if header.kind is RecordKind.BLOCK:
                if header.key in chain.keys:
                    blocks[index] = found
                elif found.agreeing and (
                    partial is None or found.start + found.agreeing > partial.start + partial.agreeing
                ):
                    partial = found
            elif agreeing == header.n_tokens:
                (windows if header.kind is RecordKind.WINDOW else states).append(found)
        states.sort(key=lambda each: -each.end)
        windows.sort(key=lambda each: -each.end)
        missing = Fate("never_stored")
        return ProbeResult(blocks, len(blocks), partial, tuple(windows), tuple(states), 0, missing, "lying")

    @staticmethod
    def _found(header: RecordHeader, data: bytes, agreeing: int) -> Found:
        return Found(
            header.key, header.kind, header.start, header.n_tokens, agreeing, len(data), header.raw_bytes,
            header.fidelity, header.layout_digest,
        )  # fmt: skip

    async def store(self, records: AsyncIterator) -> list[StoreOutcome]:
        outcomes = []
        async for header, buffers in records:
            if self.error:
                raise self.error
            if self.refuse_with:
                outcomes.append(StoreOutcome(header.key, False, self.refuse_with))
                continue
            self.records[header.key] = (header, b"".join(bytes(part) for part in buffers))
            outcomes.append(StoreOutcome(header.key, True, "stored"))
        return outcomes

    async def promote(
        self, keys: Sequence[BlockKey], *, timeout_s: float | None = None
    ) -> AsyncIterator[Piece | Missing]:
        self.promotes.append(list(keys))
        for index, key in enumerate(keys):
            if self.seconds_a_record:
                await asyncio.sleep(self.seconds_a_record)
            if self.error:
                raise self.error
            held = self.records.get(key)
            data = self.tamper(key, held[1]) if held else None
            if data is None:
                yield Missing(index, "evicted")
                continue
            for offset in range(0, len(data), PIECE_BYTES):
                yield Piece(index, len(data), offset, memoryview(data)[offset : offset + PIECE_BYTES])

    async def touch(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self.records for key in keys]

    async def close(self) -> None:
        pass
