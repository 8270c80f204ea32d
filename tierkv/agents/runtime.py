"""What every agent is: one loop, one gRPC server with health, telemetry and the token gate, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

import tierkv.rpc.channels as channels
from tierkv.agents.live_keys import LiveKey
from tierkv.agents.memory import keep_freed_memory
from tierkv.agents.supervisor import Job, Supervisor
from tierkv.errors import PortInUse, StartupError, UnsafeBind
from tierkv.rpc.auth import AuthInterceptor, Token, TokenGate, is_loopback
from tierkv.rpc.node_service import SERVICE as NODE_SERVICE
from tierkv.rpc.node_service import NodeServicer
from tierkv.telemetry.node import NodeTelemetry

if TYPE_CHECKING:
    from tierkv.agents.configured import Configured
    from tierkv.config.load import Loaded
    from tierkv.config.running import Base
    from tierkv.rpc.explain_wire import ExplainPort

GRACE_S = 2.0
# Calls that grace has not ended are cancelled; that takes no longer than this.
GOODBYE_S = 1.0
# Calls in flight over all connections; a watcher is one.
MAX_CALLS = 1024
REFUSALS_SHOWN_EVERY_S = 10.0

Closer = Callable[[], Awaitable[None] | None]


class AgentRuntime:
    """Use from one event loop: ``add_service``, ``start``, ``run``; ``stop`` may be called at any time, twice too."""

    def __init__(
        self,
        *,
        role: str,
        name: str,
        host: str,
        port: int,
        token: Token,
        insecure: bool,
        telemetry: NodeTelemetry,
        reflection: bool = False,
    ) -> None:
        self.role, self.name, self.host, self.port = role, name, host, port
        self.telemetry = telemetry
        self.gate = TokenGate(token, is_loopback(host), insecure)
        self._reflection = reflection
        self._supervisor = Supervisor(telemetry)
        self._registrations: list[tuple[Callable[[grpc.aio.Server], None], str]] = []
        self._closers: list[Closer] = []
        self._server: grpc.aio.Server | None = None
        self._health = HealthServicer()
        self._nodes: NodeServicer | None = None
        self._stop_asked = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._refusal_shown_s = float("-inf")
        self.live_keys: dict[str, LiveKey] = {}
        self.configuration: Configured | None = None
        self.explainer: ExplainPort | None = None

    @property
    def address(self) -> str:
        """``host:port`` as others dial it."""
        return join_address(self.host, self.port)

    # --- before start ----------------------------------------------------------------------------

    def add_service(self, register: Callable[[grpc.aio.Server], None], service_name: str) -> None:
        """``register`` is called with the server at start; health speaks of ``service_name``."""
        self._registrations.append((register, service_name))

    def on_stop(self, close: Closer) -> None:
        """``close`` is called at the end, when no call runs any more; last in, first out."""
        self._closers.append(close)

    def every(self, seconds: float, job: Job, name: str = "") -> None:
        """``job`` runs every ``seconds`` while the agent does; its failures are counted and shown."""
        self._supervisor.every(seconds, job, name)

    def background(self, coroutine: Coroutine[Any, Any, object], name: str) -> None:
        """Runs while the agent does; its failure is counted and shown."""
        self._supervisor.background(coroutine, name)

    def configured_by(self, base: Base, loaded: Loaded) -> None:
        """Before ``start``: what the agent was made from; ``live_keys`` can be changed over gRPC and by SIGHUP."""
        from tierkv.agents.configured import Configured

        self.configuration = Configured(base, loaded, self.role, self.live_keys, self.telemetry)

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> int:
        """The bound port; calls are served from now on. Raises UnsafeBind, PortInUse or another StartupError."""
        if not (self.gate.loopback_only or self.gate.insecure or self.gate.token.explicit):
            await _check_host(self.host)
            raise UnsafeBind(self.host)
        keep_freed_memory()
        server = grpc.aio.server(
            interceptors=[AuthInterceptor(self.gate, self._refused)],
            options=channels.server_options(),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        self._nodes = NodeServicer(self.telemetry, self.gate, self.configuration, self.explainer)
        self._registrations.insert(0, (self._nodes.register, NODE_SERVICE))
        for register, _ in self._registrations:
            register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._reflection:
            self._add_reflection(server)
        self.port = self._bind(server)
        self._server = server
        await server.start()
        for _, service in self._registrations:
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        self.telemetry.address = self.address
        self._supervisor.start()
        self.telemetry.emit("start", "info", f"{self.role} {self.name!r} listens on {self.address}")
        return self.port

    async def run(self) -> None:
        """Returns when SIGTERM, SIGINT or ``stop`` has ended the agent; a second signal ends it without grace."""
        with self.stopped_by_signals():
            await self._stop_asked.wait()
            await self.stop()

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Everything has ended: no new calls, running ones had ``grace_s``, tasks, then the closers."""
        self._stop_asked.set()
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._end(grace_s), name="stop")
        await asyncio.shield(self._stopping)

    async def _end(self, grace_s: float) -> None:
        self.telemetry.emit("stop", "info", f"{self.role} {self.name!r} stops")
        await self._health.enter_graceful_shutdown()
        if self._nodes is not None:
            self._nodes.stop()
        if self._server is not None:
            # Without a limit gRPC waits up to 20 s for a peer that does not read that it is being said goodbye to.
            await asyncio.wait((asyncio.create_task(self._server.stop(grace_s)),), timeout=grace_s + GOODBYE_S)
        await self._supervisor.stop()
        for close in reversed(self._closers):
            outcome = close()
            if inspect.isawaitable(outcome):
                await outcome

    @property
    def stop_asked(self) -> bool:
        """Somebody wants the agent to end; while it starts, this is how it learns of it."""
        return self._stop_asked.is_set()

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Within the block SIGTERM and SIGINT ask the agent to stop, also before it has started."""
        loop = asyncio.get_running_loop()
        caught: list[signal.Signals] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            # Only the main thread of a Unix process can; elsewhere whoever runs the loop stops the agent.
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, self._on_signal)
                caught.append(number)
        if self.configuration is not None:
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
                caught.append(signal.SIGHUP)
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._stop_asked.is_set() and self._server is not None:
            self._supervisor.background(self._server.stop(None), "stop at once")
        self._stop_asked.set()

    def _on_hangup(self) -> None:
        if self.configuration is not None:
            self._supervisor.background(self.configuration.reload(), "reload")

    # --- parts -----------------------------------------------------------------------------------

    def _refused(self, method: str) -> None:
        """Called for every call without the token; shown at most once in ten seconds."""
        self.telemetry.count("calls_refused")
        now_s = asyncio.get_running_loop().time()
        if now_s - self._refusal_shown_s >= REFUSALS_SHOWN_EVERY_S:
            self._refusal_shown_s = now_s
            text = method.rpartition("/")[2][:64]
            self.telemetry.emit("auth", "warning", "a call with a wrong token, or none, was refused", method=text)

    def _add_reflection(self, server: grpc.aio.Server) -> None:
        from grpc_reflection.v1alpha import reflection

        # The descriptors are registered by importing the generated modules, which the servicers do.
        names = [service for _, service in self._registrations]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)

    def _bind(self, server: grpc.aio.Server) -> int:
        try:
            port = server.add_insecure_port(self.address)
        except RuntimeError:
            port = 0
        if port:
            return port
        raise _why_not(self.host, self.port)


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


async def _check_host(host: str) -> None:
    """Raises StartupError for a name that nobody knows: no token would help."""
    try:
        await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), None)
    except socket.gaierror:
        raise StartupError(f"{host!r} is not an address of this machine") from None


def _why_not(host: str, port: int) -> StartupError:
    """gRPC does not say why it cannot bind; a plain socket does."""
    bare = host.strip("[]")
    try:
        family = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((bare, port))
    except socket.gaierror:
        return StartupError(f"{host!r} is not an address of this machine")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return PortInUse(host, port)
        return StartupError(f"cannot listen on {join_address(host, port)}: {error.strerror}")
    return PortInUse(host, port)


def announce_port(port: int, file: Path | None, descriptor: int | None, call: Callable[[int], None] | None) -> None:
    """Whoever started the agent knows its port: a file that is there as a whole or not at all, a pipe, or a call."""
    line = f"{port}\n".encode()
    if file is not None:
        draft = file.with_name(file.name + ".new")
        draft.write_bytes(line)
        draft.replace(file)
    if descriptor is not None:
        os.write(descriptor, line)
    if call is not None:
        call(port)
