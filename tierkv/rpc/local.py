"""A vault in the agent's own process: the same port as a remote one, without a wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from tierkv.codec.record import RecordHeader
from tierkv.identity.blocks import BlockKey, PromptChain
from tierkv.rpc import outgo
from tierkv.rpc.intake import store_whole
from tierkv.rpc.probing import ALL_FIDELITIES, ProbeQuery, judge, look_up
from tierkv.rpc.tracing import Traced, trace
from tierkv.rpc.vault_port import Missing, Piece, ProbeResult, StoreOutcome
from tierkv.store.base import Store
from tierkv.telemetry.node import NodeTelemetry
from tierkv.telemetry.snapshot import LinkSnapshot

PIECE_BYTES = 4 << 20
LOCAL_PEER = "local"

T = TypeVar("T")


class LocalVault:
    """Implements ``VaultPort`` over a store of this process; work on bytes runs in ``executor`` (default: the loop's).

    The store stays the caller's: ``close`` does not close it. ``telemetry`` gets the tier's counts under ``tier_name``.
    """

    def __init__(
        self,
        store: Store,
        *,
        telemetry: NodeTelemetry | None = None,
        tier_name: str = "local",
        max_record_bytes: int = 1 << 30,
        executor: Executor | None = None,
    ) -> None:
        self._store = store
        self._telemetry = telemetry
        self._tier = telemetry.tier(tier_name) if telemetry else None
        self._max_record_bytes = max_record_bytes
        self._executor = executor

    @property
    def peer(self) -> str:
        return LOCAL_PEER

    def link_snapshot(self, tier: str) -> LinkSnapshot:
        """Memory is always up; nothing is measured."""
        return LinkSnapshot(LOCAL_PEER, tier, "up")

    async def probe(
        self,
        chain: PromptChain,
        *,
        blocks: bool = False,
        windows: bool = False,
        states: bool = False,
        worst_fidelity: int = ALL_FIDELITIES,
        peek: bool = False,
        timeout_s: float | None = None,  # noqa: ARG002 - an index in memory answers at once
    ) -> ProbeResult:
        """What the store has of the prompt."""
        query = ProbeQuery(chain.root, chain.keys, 0, chain.tokens, blocks, windows, states, worst_fidelity, peek)
        return judge(chain, await self._run(look_up, self._store, query, self._tier))

    async def store(
        self, records: AsyncIterator[tuple[RecordHeader, Sequence[bytes | bytearray | memoryview]]]
    ) -> list[StoreOutcome]:
        """One outcome a record, in order."""
        outcomes: list[StoreOutcome] = []
        async for header, buffers in records:
            done = await self._run(store_whole, self._store, self._tier, buffers, self._max_record_bytes)
            outcomes.append(StoreOutcome(header.key, done.accepted, done.outcome))
        return outcomes

    async def promote(
        self,
        keys: Sequence[BlockKey],
        *,
        timeout_s: float | None = None,  # noqa: ARG002 - bounded by memory, not by a peer
    ) -> AsyncIterator[Piece | Missing]:
        """The records in the order asked; use ``contextlib.aclosing`` to leave early."""
        for index, key in enumerate(keys):
            opened = await self._run(outgo.open_verified, self._store, key, self._damaged)
            if isinstance(opened, str):
                yield Missing(index, opened)
                continue
            with opened:
                for offset in range(0, opened.size_bytes, PIECE_BYTES):
                    data = await self._run(opened.read, offset, PIECE_BYTES)
                    if self._tier is not None:
                        self._tier.bytes_out(len(data))
                    yield Piece(index, opened.size_bytes, offset, memoryview(data))

    async def touch(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of the keys are there; those are young again."""
        return await self._run(self._store.touch, keys)

    async def trace(self, root: BlockKey, keys: Sequence[BlockKey], beginning: bytes) -> Traced:
        """What became of a prompt's records."""
        return await self._run(trace, self._store, root, keys, beginning)

    async def close(self) -> None:
        """Nothing to do: the store belongs to whoever made it."""

    def _damaged(self) -> None:
        if self._telemetry is not None:
            self._telemetry.count("damaged_records")

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args))
