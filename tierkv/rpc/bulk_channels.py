"""Connections for large streams beside the one for questions, which are not to wait behind megabytes on a slow link.

A stream that is left before its end spoils its connection: what the peer has sent of it already is still on the way,
seconds of it perhaps, and whatever comes next would wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from tierkv.errors import Unreachable
from tierkv.rpc.channels import open_channel, wait_connected


class BulkChannel:
    """One connection at a time, for streams of one direction. Owned by one event loop."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._channel: grpc.aio.Channel | None = None
        self._streams: dict[grpc.aio.Channel, int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def prepare(self) -> None:
        """Begins to connect, if it is not, without waiting for it."""
        if self._closed:
            return
        lost = self._channel
        if lost is not None and lost.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            # It was lost with a peer that may be back by now, and would wait before it tries again.
            self.spoil(lost)
        if self._channel is None:
            self._channel = open_channel(self._peer, sends=True)
        self._channel.get_state(try_to_connect=True)

    @contextlib.asynccontextmanager
    async def stream(self, timeout_s: float) -> AsyncIterator[grpc.aio.Channel]:
        """A connected channel for one call. Raises what ``wait_connected`` does. See ``spoil``."""
        self.prepare()
        channel = self._channel
        if channel is None:
            raise Unreachable(self._peer, "the client is closed")
        self._streams[channel] = self._streams.get(channel, 0) + 1
        try:
            await wait_connected(channel, self._peer, timeout_s)
            yield channel
        finally:
            self._streams[channel] -= 1
            self._close_unused(channel)

    def spoil(self, channel: grpc.aio.Channel) -> None:
        """A stream of this channel was left: the next call gets another, and this is closed with its last stream."""
        if channel is self._channel:
            self._channel = None
            self._close_unused(channel)

    async def close(self) -> None:
        """Streams that run end with it."""
        self._closed = True
        if self._channel is not None:
            self.spoil(self._channel)
        for channel in list(self._streams):
            await channel.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _close_unused(self, channel: grpc.aio.Channel) -> None:
        if channel is not self._channel and not self._streams.get(channel, 0):
            self._streams.pop(channel, None)
            task = asyncio.create_task(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
