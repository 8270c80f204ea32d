"""What a stream brought is kept for those who want it, and no longer."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np

from tierkv.agents.fetch import MAX_WAITING_BYTES, Fetcher
from tierkv.identity.blocks import BlockKey
from tierkv.rpc.vault_port import Piece

KEYS = [BlockKey(bytes([number]) * 32) for number in range(4)]


class Source:
    """Records of ``size_bytes`` in one piece each; ``sent`` are weak references to their memory."""

    peer = "vault:1"

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.sent: list[weakref.ref] = []

    async def promote(self, keys, *, timeout_s=None):
        for index in range(len(keys)):
            array = np.full(self.size_bytes, index, np.uint8)
            self.sent.append(weakref.ref(array))
            data = memoryview(array)
            del array
            yield Piece(index, self.size_bytes, 0, data)
            del data

    def alive(self) -> int:
        gc.collect()
        return sum(each() is not None for each in self.sent)


def test_a_record_that_everybody_has_had_is_let_go_of_while_the_stream_lasts():
    async def run() -> None:
        source, fetcher = Source(1000), Fetcher()
        flights = fetcher.want(source, KEYS)
        again = fetcher.want(source, KEYS[:1])
        for number, flight in enumerate(flights):
            assert bytes(await flight.record()) == bytes([number]) * 1000
        assert source.alive() == 4
        for flight in flights[:2]:
            flight.leave()
        assert source.alive() == 3  # the first is wanted by another still
        assert bytes(await again[0].record()) == bytes(1000)
        again[0].leave()
        assert source.alive() == 2
        for flight in flights[2:]:
            flight.leave()
        assert source.alive() == 0

    asyncio.run(run())


def test_no_more_is_received_than_may_wait():
    """Of four records one more than fits is received before the first has left."""

    async def run() -> None:
        source, fetcher = Source(MAX_WAITING_BYTES // 2 + 1), Fetcher()
        flights = fetcher.want(source, KEYS)
        for expected, flight in zip((2, 3, 4, 4), flights, strict=True):
            await flight.record()
            await asyncio.sleep(0.05)
            assert len(source.sent) == expected
            flight.leave()

    asyncio.run(run())
