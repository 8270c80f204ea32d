"""Brings whole records from their sources, each at most once at a time however many restores want it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Sequence
from typing import cast

import numpy as np

from tierkv.agents.lookup import Source
from tierkv.agents.reasons import RecordMissing
from tierkv.errors import BadFrame, TierKVError
from tierkv.identity.blocks import BlockKey
from tierkv.rpc.vault_port import Missing, Piece

# Received and not yet decoded, for each stream: enough to keep the decoder busy, little beside a prompt's state.
MAX_WAITING_BYTES = 64 << 20


class Flight:
    """One record on its way. ``record`` gives its bytes, or raises PeerError, BadFrame or RecordMissing.

    They are kept until the last of those who wanted them has left.
    """

    def __init__(self, key: BlockKey, stream: Stream) -> None:
        self.key = key
        self.waiters = 0
        self.size_bytes = 0
        self.stream = stream
        self._data = memoryview(b"")
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._future.add_done_callback(lambda future: future.cancelled() or future.exception())

    @property
    def is_over(self) -> bool:
        return self._future.done()

    async def record(self) -> memoryview:
        await asyncio.shield(self._future)
        return self._data

    def arrived(self, data: memoryview) -> None:
        if not self._future.done():
            self.size_bytes = len(data)
            if self.waiters > 0:
                self._data = data
            self._future.set_result(None)

    def failed(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)

    def leave(self) -> None:
        """One restore is done with this record; what nobody waits for any more is not brought."""
        self.waiters -= 1
        if self.waiters <= 0:
            self._data = memoryview(b"")
            self.stream.left(self)


class Stream:
    """One BatchPromote and the flights it serves."""

    def __init__(self, source: Source, keys: Sequence[BlockKey], max_record_bytes: int) -> None:
        self.flights = [Flight(key, self) for key in keys]
        self._source = source
        self._max_record_bytes = max_record_bytes
        self._waiting_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._left = 0
        self._received_bytes = 0
        self._part_bytes = 0
        self._began_s = time.monotonic()
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"promote from {source.peer}")

    def left_s(self, missing_bytes: int, patience_s: float) -> float:
        """How long ``missing_bytes`` more need at the pace so far; of a silent one 0, and later for ever."""
        elapsed_s = time.monotonic() - self._began_s
        if not self._received_bytes:
            return math.inf if elapsed_s > patience_s else 0.0
        return max(0, missing_bytes - self._part_bytes) * elapsed_s / self._received_bytes

    def left(self, flight: Flight) -> None:
        self._waiting_bytes -= flight.size_bytes
        self._left += 1
        self._room.set()
        if self._left == len(self.flights):
            self.task.cancel()

    async def _run(self) -> None:
        try:
            await self._receive()
            self._fail_rest(RecordMissing("cut_short"))
        except asyncio.CancelledError:
            self._fail_rest(RecordMissing("cancelled"))
            raise
        except TierKVError as error:
            self._fail_rest(error)
        except Exception as error:  # a source's fault ends a restore, never the agent
            self._fail_rest(error)

    def _fail_rest(self, error: BaseException) -> None:
        for flight in self.flights:
            flight.failed(error)

    async def _receive(self) -> None:
        buffer = np.empty(0, np.uint8)
        filled = 0
        keys = [flight.key for flight in self.flights]
        async with contextlib.aclosing(cast("AsyncGenerator[Piece | Missing]", self._source.promote(keys))) as items:
            async for item in items:
                flight = self.flights[item.index]
                if isinstance(item, Missing):
                    flight.failed(RecordMissing(item.reason))
                    continue
                self._received_bytes += len(item.data)
                self._part_bytes = (item.offset + len(item.data)) % item.total
                if item.offset == 0:
                    if item.total > self._max_record_bytes:
                        raise BadFrame("oversized", f"a record of {item.total} bytes")
                    if len(item.data) == item.total:
                        await self._arrived(flight, item.data)
                        continue
                    buffer, filled = np.empty(item.total, np.uint8), 0
                filled = _put(buffer, filled, item)
                if filled == item.total:
                    await self._arrived(flight, buffer.data)

    async def _arrived(self, flight: Flight, data: memoryview) -> None:
        flight.arrived(data)
        if flight.waiters > 0:
            self._waiting_bytes += len(data)
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._room.clear()
            await self._room.wait()


def _put(buffer: np.ndarray, filled: int, item: Piece) -> int:
    end = item.offset + len(item.data)
    if item.offset != filled or item.total != len(buffer) or end > len(buffer):
        raise BadFrame("reordered", "pieces of a record that do not follow one another")
    buffer[item.offset : end] = np.frombuffer(item.data, np.uint8)
    return end


class Fetcher:
    """Single-flight: a record that is on its way already is not asked for again. Owned by the event loop."""

    def __init__(self, max_record_bytes: int = 1 << 30) -> None:
        self._max_record_bytes = max_record_bytes
        self._flying: dict[tuple[str, BlockKey], Flight] = {}
        self.shared = 0

    def want(self, source: Source, keys: Sequence[BlockKey]) -> list[Flight]:
        """Flights for ``keys`` in their order; the caller calls ``leave`` on each exactly once."""
        wanted: dict[BlockKey, Flight] = {}
        for key in keys:
            flight = self._flying.get((source.peer, key))
            if flight is not None and not flight.is_over:
                wanted[key] = flight
                self.shared += 1
        rest = [key for key in keys if key not in wanted]
        if rest:
            stream = Stream(source, rest, self._max_record_bytes)
            stream.task.add_done_callback(lambda _task: self._landed(source.peer, stream))
            for flight in stream.flights:
                wanted[flight.key] = flight
                self._flying[source.peer, flight.key] = flight
        for flight in wanted.values():
            flight.waiters += 1
        return [wanted[key] for key in keys]

    def _landed(self, peer: str, stream: Stream) -> None:
        for flight in stream.flights:
            if self._flying.get((peer, flight.key)) is flight:
                del self._flying[peer, flight.key]
