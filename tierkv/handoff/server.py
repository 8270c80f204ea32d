"""The agent's end of the hand-off: a Unix socket server in the agent's event loop.

It greets engines, makes an arena for each connection, frames and bounds the messages, and hands connections to a
HandoffService. A connection that says something malformed is closed and counted; nothing else happens to the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Protocol

from tierkv.errors import HandoffError, StartupError
from tierkv.handoff.arena import Arena, Regions
from tierkv.handoff.protocol import HEADER, VERSION, Message, pack, unpack_body, unpack_header
from tierkv.handoff.refusals import refusal_text

HELLO_TIMEOUT_S = 5.0
TELL_AGAIN_S = 60.0
COLLECT_AFTER_S = 1.0
MAX_CONNECTIONS = 64


class Connection:
    """One accepted and greeted connection. Owned by the event loop.

    On "control" ``allocate`` and ``release`` manage this arena's regions; on "demote" the hook does.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Message, arena: Arena
    ) -> None:
        self.channel = hello.text("channel", 16)
        self.engine_id = hello.text("engine_id", 64)
        self.engine = hello.text("engine", 64)
        self.build = hello.text("build", 256)
        self.pid = hello.integer("pid")
        self.arena = arena
        self.regions = Regions(arena.size_bytes)
        self._reader = reader
        self._writer = writer
        self._sending = asyncio.Lock()
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()

    async def receive(self) -> Message | None:
        """The next message; None at a clean end. Raises HandoffError for anything malformed."""
        try:
            head = await self._reader.readexactly(HEADER.size)
            json_bytes, blob_bytes = unpack_header(head)
            text = await self._reader.readexactly(json_bytes)
            blob = await self._reader.readexactly(blob_bytes) if blob_bytes else b""
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise HandoffError("hook", "the connection ended inside a message") from error
            return None
        except ConnectionError:
            return None
        return unpack_body(text, blob)

    async def send(self, op: str, message: Mapping[str, object] | None = None, blob: bytes = b"") -> None:
        """Written, in order; waits while the hook does not read. Raises HandoffError when it is gone."""
        try:
            async with self._sending:
                self._writer.write(pack(op, message, len(blob)) + blob)
                await self._writer.drain()
        except (ConnectionError, RuntimeError) as error:
            raise HandoffError("hook", f"the hook is gone: {error}") from error

    async def allocate(self, length: int) -> int:
        """The offset of a region; waits, first come first served, until the hook has freed enough.

        Raises HandoffError if the arena can never hold it.
        """
        if length > self.arena.size_bytes:
            raise HandoffError("hook", f"{length} bytes do not fit an arena of {self.arena.size_bytes}")
        if not self._waiting:
            offset = self.regions.allocate(length)
            if offset is not None:
                return offset
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((length, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(future.result())
            raise

    def release(self, offset: int) -> None:
        """Raises HandoffError if no region starts there."""
        self.regions.release(offset)
        while self._waiting:
            length, future = self._waiting[0]
            if future.done():
                self._waiting.popleft()
                continue
            given = self.regions.allocate(length)
            if given is None:
                return
            self._waiting.popleft()
            future.set_result(given)

    def region(self, offset: int, length: int) -> memoryview:
        """Raises HandoffError if it is not inside the arena."""
        if length < 0 or offset < 0 or offset + length > self.arena.size_bytes:
            raise HandoffError("hook", "a region outside the arena")
        return self.arena.view[offset : offset + length]

    def abort(self) -> None:
        """The hook is hung up on; ``receive`` sees the end."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """The socket is closed; the memory goes as soon as no job reads it any more."""
        self._writer.close()
        with contextlib.suppress(ConnectionError, OSError):
            await self._writer.wait_closed()
        # Giving 256 MiB back takes the kernel tens of milliseconds, which other engines do not wait for.
        if not await asyncio.to_thread(self.arena.close):
            # What was cut off in the middle may hold its views in a cycle of a task, its error and their frames, for as
            # long as an idle agent collects no garbage; and an arena is 256 MiB.
            asyncio.get_running_loop().call_later(COLLECT_AFTER_S, gc.collect)


class HandoffService(Protocol):
    """What the agent does with a connection. Returns when the connection has ended; HandoffError closes it."""

    async def serve(self, connection: Connection) -> None: ...


class HandoffServer:
    """Listens on ``path`` (mode 0600 in a directory of mode 0700)."""

    def __init__(
        self,
        path: Path,
        service: HandoffService,
        *,
        arena_bytes: int,
        settings: Callable[[], Mapping[str, object]],
        node: str = "",
        count: Callable[[str], None] = lambda _reason: None,
        tell: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """``tell`` hears of a refused engine, of each reason at most once a minute."""
        self.path = path
        self._service = service
        self._arena_bytes = arena_bytes
        self._settings = settings
        self._node = node
        self._count = count
        self._tell = tell
        self._told_s: dict[str, float] = {}
        self._listener: socket.socket | None = None
        self._inode = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._greeting = asyncio.Lock()

    async def start(self) -> None:
        """Engines can connect. Raises StartupError if another agent answers on the socket or it cannot be made."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.parent.chmod(0o700)
            self._replace_stale()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(self.path))
            self.path.chmod(0o600)
            listener.listen(64)
            listener.setblocking(False)
        except OSError as error:
            why = error.strerror or str(error)
            if "path too long" in why:
                why = f"its path has {len(os.fsencode(self.path))} bytes, and a socket's at most 100 or so; name a"
                why += " shorter one with TIERKV_SOCKET (or inference.socket), or a shorter TIERKV_HOME"
            raise StartupError(f"cannot listen on the hand-off socket {self.path}: {why}") from error
        self._listener = listener
        self._inode = self.path.stat().st_ino
        self._spawn(self._accept(listener))

    def _replace_stale(self) -> None:
        """A socket on which nobody answers is what a killed agent left behind."""
        if not self.path.exists():
            return
        if not self.path.is_socket():
            raise StartupError(f"{self.path} is there and is no socket: remove it, or name another (inference.socket)")
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            probe.settimeout(1.0)
            probe.connect(str(self.path))
        except (ConnectionRefusedError, FileNotFoundError):
            self.path.unlink(missing_ok=True)
            return
        except TimeoutError:
            pass
        finally:
            probe.close()
        raise StartupError(
            f"another inference agent already listens on {self.path}; stop it, or give this one its own "
            "socket (inference.socket, or TIERKV_SOCKET)"
        )

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # out of descriptors: the next one may fit
                self._count("handoff_accept_failed")
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            self._spawn(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        connection: Connection | None = None
        try:
            connection = await self._greet(sock)
            if connection is not None:
                await self._service.serve(connection)
        except (HandoffError, TimeoutError, OSError):
            self._count("handoff_malformed" if connection is not None else "handoff_bad_hello")
        finally:
            if connection is not None:
                await connection.close()
            else:
                sock.close()

    async def _greet(self, sock: socket.socket) -> Connection | None:
        """The hello, the arena, and the connection; None when it was refused with a reason."""
        if not _same_user(sock):
            self._count("handoff_foreign_user")
            return None
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            hello = await _read_hello(sock)
        if hello is None:  # somebody only looked whether an agent is here
            return None
        reason = self._objection(hello)
        arena: Arena | None = None
        if not reason:
            try:
                async with self._greeting:
                    if _has_left(sock):
                        self._count("handoff_left_early")
                        return None
                    writable = hello.fields.get("channel") == "control"
                    arena = await asyncio.to_thread(Arena.create, self._arena_bytes, writable=writable)
            except HandoffError:
                reason = "no_shared_memory"
        if arena is None:
            self._refused(reason)
            await asyncio.get_running_loop().sock_sendall(sock, pack("refused", {"reason": reason}))
            return None
        return await self._welcome(sock, hello, arena)

    async def _welcome(self, sock: socket.socket, hello: Message, arena: Arena) -> Connection:
        try:
            body = {
                "version": VERSION, "arena_bytes": arena.size_bytes,
                "settings": dict(self._settings()), "node": self._node,
            }  # fmt: skip
            greeting = pack("hello", body)
            sent = socket.send_fds(sock, [greeting], [arena.fd])
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await asyncio.get_running_loop().sock_sendall(sock, greeting[sent:])
            reader, writer = await asyncio.open_unix_connection(sock=sock, limit=1 << 20)
            return Connection(reader, writer, hello, arena)
        except BaseException:
            arena.close()
            raise

    def _refused(self, reason: str) -> None:
        self._count(f"handoff_refused_{reason}")
        now_s = time.monotonic()
        if now_s - self._told_s.get(reason, -math.inf) >= TELL_AGAIN_S:
            self._told_s[reason] = now_s
            self._tell(f"an engine is not served: {refusal_text(reason)}")

    def _objection(self, hello: Message) -> str:
        if hello.op != "hello" or hello.fields.get("version") != VERSION:
            return "other_version"
        if hello.fields.get("channel") not in ("control", "demote"):
            return "unknown_channel"
        for name, limit in (("engine", 64), ("build", 256), ("engine_id", 64)):
            hello.text(name, limit)
        hello.integer("pid")
        return "too_many_engines" if len(self._tasks) > MAX_CONNECTIONS else ""

    async def stop(self) -> None:
        """Every connection is closed and the socket is gone, unless another agent has put its own in its place."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(OSError):
                if self.path.stat().st_ino == self._inode:
                    self.path.unlink()


async def _read_hello(sock: socket.socket) -> Message | None:
    """Exactly one message, byte for byte, so that nothing behind it is lost; None when the peer says nothing and goes.

    Raises HandoffError.
    """
    loop = asyncio.get_running_loop()

    async def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = await loop.sock_recv(sock, count - len(data))
            if not more and data:
                raise HandoffError("hook", "the connection ended inside the hello")
            if not more:
                return b""
            data += more
        return data

    head = await exactly(HEADER.size)
    if not head:
        return None
    json_bytes, blob_bytes = unpack_header(head)
    if blob_bytes or json_bytes > 65536:
        raise HandoffError("hook", "not a hello")
    return unpack_body(await exactly(json_bytes))


def _has_left(sock: socket.socket) -> bool:
    """Whether the peer has hung up: while this agent was frozen or busy, hooks may have given up."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _same_user(sock: socket.socket) -> bool:
    """Whether the peer runs as the same user (root may always); the socket's mode is the first guard."""
    if sys.platform != "linux":
        return True
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in (os.getuid(), 0)
