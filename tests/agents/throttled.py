"""A TCP proxy in front of a vault that lets only so many bytes a second through, towards the reader."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

PIECE_BYTES = 8 << 10


class ThrottledLink:
    """``bytes_per_s`` may be changed at any time; ``passed`` counts what went to the reader."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.passed = 0
        self.address = ""
        self._target = ("", 0)
        self._free_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            inner_reader, inner_writer = await asyncio.open_connection(*self._target)
            try:
                await asyncio.gather(self._pump(reader, inner_writer, False), self._pump(inner_reader, writer, True))
            finally:
                inner_writer.close()
                writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slow: bool) -> None:
        while data := await reader.read(PIECE_BYTES):
            if slow:
                self.passed += len(data)
                self._free_s = max(self._free_s, time.monotonic()) + len(data) / self.bytes_per_s
                await asyncio.sleep(max(0.0, self._free_s - time.monotonic()))
            writer.write(data)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def throttled(bytes_per_s: float) -> AsyncIterator[ThrottledLink]:
    """Listening on 127.0.0.1; ``towards`` says where to, before anybody connects."""
    link = ThrottledLink(bytes_per_s)
    # A small buffer: what is in it counts as passed and is not yet read.
    server = await asyncio.start_server(link._serve, "127.0.0.1", 0, limit=2 * PIECE_BYTES)
    link.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield link
    finally:
        server.close()
        for task in list(link._tasks):
            task.cancel()
        await asyncio.gather(*link._tasks, return_exceptions=True)


def towards(link: ThrottledLink, address: str) -> None:
    host, _, port = address.rpartition(":")
    link._target = (host, int(port))
