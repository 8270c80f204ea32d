"""One connection of a hook to the agent: framed messages with deadlines, and the arena that came with it."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tierkv.errors import HandoffError
from tierkv.handoff.arena import Arena, Regions
from tierkv.handoff.protocol import HEADER, VERSION, Message, pack, unpack_body, unpack_header
from tierkv.handoff.refusals import refusal_text

_CHUNK_BYTES = 1 << 18
# A connect waits only while the agent's queue of connections is full.
_CONNECT_S = 5.0
_LOOK_S = 0.25


class Refusal(HandoffError):
    """The agent will not have this hook; the message says why."""


class Channel:
    """A connected socket and its shared memory. Used by one thread at a time.

    Every call ends by its ``deadline`` (of ``time.monotonic``) and raises HandoffError when the peer is gone, sends
    something malformed, or does not take what is sent. A receive that only timed out can be called again.
    """

    def __init__(self, sock: socket.socket, path: Path) -> None:
        self._socket = sock
        self._path = str(path)
        self._received = bytearray()
        self.arena: Arena | None = None
        self.regions = Regions(0)
        self.hello = Message("hello")

    @classmethod
    def open(cls, path: Path, hello: Mapping[str, object], *, writable: bool, budget_s: float) -> Channel:
        """Connected, greeted and with the arena mapped. Raises HandoffError with the agent's reason otherwise."""
        channel = cls.connected(path)
        channel.greet(hello, writable=writable, deadline=time.monotonic() + budget_s)
        return channel

    @classmethod
    def connected(cls, path: Path) -> Channel:
        """Connected; the agent need not be awake for that.

        Raises HandoffError, caused by FileNotFoundError or ConnectionRefusedError where nobody listens.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_CONNECT_S)
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            raise HandoffError(str(path), str(error)) from error
        return cls(sock, path)

    def greet(
        self,
        hello: Mapping[str, object],
        *,
        writable: bool,
        deadline: float,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """The agent has answered the hello and the arena is mapped.

        Raises HandoffError with the agent's reason otherwise, also soon after ``given_up()``; it is closed then.
        """
        try:
            self.send("hello", {"version": VERSION, "pid": os.getpid(), **hello}, deadline=deadline)
            while not self.readable(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
                if given_up() or time.monotonic() >= deadline:
                    raise HandoffError(self._path, "the agent does not answer")
            self._greeted(deadline, writable)
        except (OSError, HandoffError) as error:
            self.close()
            raise error if isinstance(error, HandoffError) else HandoffError(self._path, str(error)) from error

    def _greeted(self, deadline: float, writable: bool) -> None:
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK_BYTES, 1)
        try:
            self._received += data
            message = self.receive(deadline)
            if message is None:
                raise HandoffError(self._path, "the agent does not answer")
            if message.op == "refused":
                raise Refusal(self._path, refusal_text(message.text("reason")))
            if message.op != "hello" or message.integer("version") != VERSION or not descriptors:
                raise Refusal(self._path, refusal_text("other_version"))
            arena_bytes = message.integer("arena_bytes")
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        self.hello = message
        self.arena = Arena.attach(descriptors[0], arena_bytes, writable=writable)
        self.regions = Regions(self.arena.size_bytes)

    def region(self, offset: int, length: int) -> memoryview:
        """Raises HandoffError if it is not inside the arena."""
        if self.arena is None or offset + length > self.arena.size_bytes:
            raise HandoffError(self._path, "a region outside the arena")
        return self.arena.view[offset : offset + length]

    def send(self, op: str, message: Mapping[str, object] | None = None, blob: bytes = b"", *, deadline: float) -> None:
        try:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            self._socket.sendall(pack(op, message, len(blob)) + blob)
        except OSError as error:
            raise HandoffError(self._path, f"the agent does not take messages: {error}") from error

    def receive(self, deadline: float) -> Message | None:
        """The next message, or None when the deadline comes first."""
        while True:
            message = self._buffered()
            if message is not None:
                return message
            left = deadline - time.monotonic()
            if not self.readable(max(0.0, left)):
                if left <= 0:
                    return None
                continue
            try:
                data = self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                raise HandoffError(self._path, f"the connection broke: {error}") from error
            if not data:
                raise HandoffError(self._path, "the agent closed the connection")
            self._received += data

    def _buffered(self) -> Message | None:
        buffer = self._received
        if len(buffer) < HEADER.size:
            return None
        json_bytes, blob_bytes = unpack_header(memoryview(buffer)[: HEADER.size])
        body = HEADER.size + json_bytes
        if len(buffer) < body + blob_bytes:
            return None
        message = unpack_body(bytes(buffer[HEADER.size : body]), bytes(buffer[body : body + blob_bytes]))
        del buffer[: body + blob_bytes]
        return message

    def readable(self, wait_s: float) -> bool:
        """Whether bytes (or the end of the stream) can be read within ``wait_s``."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        try:
            return bool(poller.poll(wait_s * 1000))
        except OSError as error:
            raise HandoffError(self._path, f"the connection broke: {error}") from error

    @property
    def hung_up(self) -> bool:
        """Whether the agent has closed its end. Costs one system call and reads nothing."""
        poller = select.poll()
        try:
            poller.register(self._socket, 0)
            return bool(poller.poll(0))
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        self._socket.close()
        if self.arena is not None:
            self.arena.close()
