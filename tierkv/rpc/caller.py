"""One call to one service of a peer, with a deadline and errors that are ours."""

from __future__ import annotations

import asyncio
import getpass
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from tierkv.errors import DeadlineExceeded, WrongService
from tierkv.rpc.auth import Token
from tierkv.rpc.channels import CONNECT_TIMEOUT_S, EOF
from tierkv.rpc.link import Link

M = TypeVar("M", bound=Message)
T = TypeVar("T")


async def within(peer: str, awaitable: Awaitable[T], seconds: float, problem: str) -> T:
    """What the awaitable gives. Raises DeadlineExceeded, saying ``problem``, after ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except TimeoutError:
        raise DeadlineExceeded(peer, f"{problem} for {seconds:.3g} s") from None


def parsed(peer: str, message_type: type[M], data: bytes) -> M:
    """Raises WrongService when the bytes are not such a message."""
    try:
        return message_type.FromString(data)
    except DecodeError:
        raise WrongService(peer, "answered something that is not the message asked for") from None


def current_actor() -> str:
    """Who asks for a purge or a change, for the event log of the agent."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


class Caller:
    """Calls the methods of ``service`` at ``peer``. Owned by one event loop."""

    service: str
    breaks = True

    def __init__(self, peer: str, token: Token | None, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self._link = Link(peer, connect_timeout_s, breaks=self.breaks)
        self._metadata = token.metadata if token else ()

    @property
    def peer(self) -> str:
        return self._link.peer

    @property
    def link(self) -> Link:
        """The connection: its breaker, round trip and rates."""
        return self._link

    async def close(self) -> None:
        """No call is possible afterwards; those that run end with Unreachable."""
        await self._link.close()

    async def _unary(
        self, name: str, request: Message, answer: type[M], timeout_s: float, *, total_s: float | None = None
    ) -> M:
        """One small call. ``timeout_s`` counts from the connection on; ``total_s``, if given, from now on."""
        until = None if total_s is None else time.monotonic() + total_s
        async with self._link.attempt(total_s):
            left_s = timeout_s if until is None else max(0.001, min(timeout_s, until - time.monotonic()))
            began = time.perf_counter()
            method = self._link.channel.unary_unary(self._path(name))
            data = await method(request.SerializeToString(), timeout=left_s, metadata=self._metadata)
            self._link.measured_rtt(time.perf_counter() - began)
            return parsed(self.peer, answer, data)

    def _client_stream(self, name: str, channel: grpc.aio.Channel) -> Any:
        """A call that takes messages as bytes."""
        return channel.stream_unary(self._path(name))(metadata=self._metadata)

    def _server_stream(self, name: str, request: Message, channel: grpc.aio.Channel | None = None) -> Any:
        """A call that gives messages as bytes; on the link's own connection if no other is given."""
        method = (channel or self._link.channel).unary_stream(self._path(name))
        return method(request.SerializeToString(), metadata=self._metadata)

    def _path(self, name: str) -> str:
        return f"/{self.service}/{name}"


async def next_message(call: Any, peer: str, seconds: float | None, problem: str) -> bytes | None:
    """The stream's next message; None at its end. ``seconds`` None: the connection's keepalive is the only bound."""
    data = await (call.read() if seconds is None else within(peer, call.read(), seconds, problem))
    return None if data is EOF else data
