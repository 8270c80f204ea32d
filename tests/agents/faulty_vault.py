"""A vault that does wrong on purpose: a real vault whose answers are spoilt on the way out.

By hand:

    python tests/agents/faulty_vault.py --port 50051 --fault truncate --token TOKEN
    python tests/agents/faulty_vault.py --list

Its fault can be changed while it runs: write a fault's name and a newline to its standard input ("none" heals it).
An inference agent with ``[cluster.kv_cold] port = 50051`` then has a vault that fails as told; ``tierkv status`` and
``tierkv events`` show what it makes of it.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tierkv.agents.runtime import AgentRuntime
from tierkv.agents.vault import VaultOptions, build_vault_agent
from tierkv.codec.record import verify_record
from tierkv.demo.processes import free_port
from tierkv.rpc.bulk import CHUNK_BYTES, MessageWriter, encode_message, message_payload, read_chunks
from tierkv.rpc.channels import EOF
from tierkv.v1 import vault_service_pb2 as pb

# Before a vault is there at all.
LISTENERS = {
    "silent": "accepts and says nothing",
    "web": "a web server on the port",
    "banner": "an SSH server on the port",
    "black-hole": "never accepts: connects hang or are queued and nothing is read",
}
# In a vault's answer to BatchPromote, or to every call.
FAULTS = {
    "none": "does right",
    "truncate": "the last message of a restore is cut in half",
    "cut-short": "a restore's stream ends before its last record",
    "damage": "one bit of every record is flipped",
    "damage-late": "one bit of every record after the first is flipped",
    "reorder": "pieces of a record come in the wrong order",
    "duplicate": "every message comes twice",
    "oversize": "records claim to have an exabyte",
    "too-long": "records are longer than they said",
    "huge-message": "messages larger than any may be",
    "other-version": "chunks of another version",
    "other-prompt": "answers with the record of another prompt",
    "garbage": "random bytes instead of messages",
    "empty": "messages without anything in them",
    "missing": "has nothing of what it promised",
    "wrong-index": "pieces of records that nobody asked for",
    "overclaim": "a probe promises records that are not there",
    "probe-garbage": "a probe is answered with random bytes",
    "freeze": "stops in mid-restore and keeps the connection",
    "freeze-all": "answers no call and keeps the connection",
    "trickle": "sends a byte now and then",
    "deny": "says that the token is wrong",
    "unimplemented": "knows none of the calls",
    "internal": "every call fails inside",
    "full": "refuses every record: full",
    "crash": "ends the process in mid-restore (only by hand)",
}
FOREVER_S = 3600.0

Handler = Callable[[bytes, Any], Awaitable[bytes | None]]


class FaultyVault:
    """A real vault in a thread of its own. ``fault`` may be set at any time and counts from the next message on.

    ``delay_s``: before the first message of every restore. ``promotes`` and ``keys_asked`` count what was asked for.
    """

    def __init__(self, *, port: int = 0, token: str | None = None, fault: str = "none", **options: Any) -> None:
        self.fault = fault
        self.delay_s = 0.0
        self.promotes = 0
        self.keys_asked = 0
        self.probes = 0
        self._options = VaultOptions("faulty", port=port, token=token, **{"max_bytes": 64 << 20, **options})
        self._seen_keys: list[bytes] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="faulty-vault")
        self._runtime: AgentRuntime | None = None

    @property
    def port(self) -> int:
        return self._runtime.port if self._runtime is not None else 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> FaultyVault:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return self

    async def _start(self) -> None:
        runtime = build_vault_agent(self._options)
        registrations = runtime._registrations
        registrations[:] = [(self._spoiling(register), name) for register, name in registrations]
        await runtime.start()
        self._runtime = runtime

    def stop(self) -> None:
        if self._runtime is not None:
            asyncio.run_coroutine_threadsafe(self._runtime.stop(0), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    # --- between the servicer and the wire ----------------------------------------------------------

    def _spoiling(self, register: Callable[[Any], None]) -> Callable[[Any], None]:
        vault = self

        class Server:
            """What a servicer registers with: its handlers go on to the real server, wrapped."""

            def __init__(self, server: grpc.aio.Server) -> None:
                self._server = server

            def add_generic_rpc_handlers(self, handlers: Any) -> None:
                self._server.add_generic_rpc_handlers(tuple(_Wrapped(handler, vault) for handler in handlers))

            def __getattr__(self, name: str) -> Any:
                return getattr(self._server, name)

        return lambda server: register(Server(server))

    async def unary(self, method: str, call: Handler, request: bytes, context: Any) -> bytes | None:
        await self._before(context)
        if method == "Store" and self.fault == "full":
            return await self._full(context)
        answer = await call(request, context)
        if method == "Probe" and answer is not None:
            self.probes += 1
            if self.fault == "probe-garbage":
                return os.urandom(300)
            if self.fault == "overclaim":
                return _overclaimed(answer)
        return answer

    async def _before(self, context: Any) -> None:
        if self.fault == "freeze-all":
            await asyncio.sleep(FOREVER_S)
        codes = {"deny": "UNAUTHENTICATED", "unimplemented": "UNIMPLEMENTED", "internal": "INTERNAL"}
        if self.fault in codes:
            await context.abort(grpc.StatusCode[codes[self.fault]], f"a fault was asked for: {self.fault}")

    @staticmethod
    async def _full(context: Any) -> bytes:
        records: dict[int, bytearray] = {}
        while (message := await context.read()) is not EOF:
            for chunk in read_chunks(message):
                if chunk.kind == 1:
                    records.setdefault(chunk.index, bytearray()).extend(chunk.data)
        keys = [bytes(verify_record(records[index]).key) for index in sorted(records)]
        return pb.StoreResponse(
            results=[pb.StoreResult(key=key, outcome="full", accepted=False) for key in keys]
        ).SerializeToString()

    async def stream(self, method: str, call: Handler, request: bytes, context: Any) -> None:
        await self._before(context)
        if method != "BatchPromote":
            await call(request, context)
            return
        self.promotes += 1
        self.keys_asked += len(pb.BatchPromoteRequest.FromString(request).keys)
        await asyncio.sleep(self.delay_s)
        await call(self._asked(request), _SpoiltContext(context, self))

    def _asked(self, request: bytes) -> bytes:
        """The request, or one for other prompts' records that were asked for before."""
        parsed = pb.BatchPromoteRequest.FromString(request)
        keys = list(parsed.keys)
        if self.fault == "other-prompt":
            others = [key for key in self._seen_keys if key not in keys][-len(keys) :] or keys[::-1]
            del parsed.keys[:]
            parsed.keys.extend(others[index % len(others)] for index in range(len(keys)))
            return parsed.SerializeToString()
        self._seen_keys = [*dict.fromkeys([*self._seen_keys, *keys])]
        return request


class _Wrapped(grpc.GenericRpcHandler):
    def __init__(self, inner: Any, vault: FaultyVault) -> None:
        self._inner, self._vault = inner, vault

    def service(self, handler_call_details: Any) -> Any:
        handler, vault = self._inner.service(handler_call_details), self._vault
        if handler is None:
            return None
        method = handler_call_details.method.rpartition("/")[2]

        async def unary(request: Any, context: Any) -> Any:
            return await vault.unary(method, handler.unary_unary or handler.stream_unary, request, context)

        async def stream(request: Any, context: Any) -> None:
            await vault.stream(method, handler.unary_stream, request, context)

        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(stream)
        return (
            grpc.stream_unary_rpc_method_handler(unary)
            if handler.stream_unary is not None
            else grpc.unary_unary_rpc_method_handler(unary)
        )


class _SpoiltContext:
    """Messages of one BatchPromote on their way out."""

    def __init__(self, context: Any, vault: FaultyVault) -> None:
        self._context, self._vault = context, vault
        self._sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: bytes) -> None:
        async for spoilt in self._spoilt(message):
            await self._context.write(spoilt)
        self._sent += 1

    async def _spoilt(self, message: bytes) -> AsyncIterator[bytes]:
        fault = self._vault.fault
        if fault in ("freeze", "crash"):
            yield _begun(message)
            if fault == "crash":
                os._exit(1)
            await asyncio.sleep(FOREVER_S)
        elif fault == "trickle":
            for piece in _singly(message):
                yield piece
                await asyncio.sleep(0.3)
        elif fault == "duplicate":
            yield message
            yield message
        elif fault == "cut-short":
            if not self._sent:
                yield _without_end(message)
        else:
            yield SPOILERS.get(fault, lambda data: data)(message)


def _payload(message: bytes) -> bytearray:
    return bytearray(message_payload(message))


def _wrapped(payload: bytes | bytearray) -> bytes:
    return encode_message([payload], len(payload))


def _truncated(message: bytes) -> bytes:
    payload = _payload(message)
    return _wrapped(payload[: len(payload) // 2])


def _flipped(message: bytes, *, first: int = 0) -> bytes:
    """One bit of each record in the message, in the middle of its longest chunk."""
    payload, place = _payload(message), 0
    for chunk in list(read_chunks(message)):
        place += CHUNK_BYTES
        if chunk.kind == 1 and chunk.index >= first:
            payload[place + len(chunk.data) // 2] ^= 0x10
        place += len(chunk.data)
    return _wrapped(payload)


def _rewritten(message: bytes, change: Callable[[list[Any]], list[tuple[int, int, int, bytes]]]) -> bytes:
    """The data chunks as ``change`` gives them, (index, total, offset, data); ends and misses stay."""
    writer = MessageWriter(1 << 30)
    chunks = list(read_chunks(message))
    for index, total, offset, data in change([chunk for chunk in chunks if chunk.kind == 1]):
        writer.add_data(index, total, offset, data)
    for chunk in chunks:
        if chunk.kind == 3:
            writer.add_end(chunk.index)
    return writer.flush() or b""


def _halves(chunks: list[Any]) -> list[tuple[int, int, int, bytes]]:
    out: list[tuple[int, int, int, bytes]] = []
    for chunk in chunks:
        half = max(1, len(chunk.data) // 2)
        out.append((chunk.index, chunk.total, chunk.offset + half, bytes(chunk.data[half:]) or b"x"))
        out.append((chunk.index, chunk.total, chunk.offset, bytes(chunk.data[:half])))
    return out


def _begun(message: bytes) -> bytes:
    """The first byte of the first record, and no end."""
    return (_singly(message) or [message])[0]


def _singly(message: bytes) -> list[bytes]:
    chunks = [chunk for chunk in read_chunks(message) if chunk.kind == 1]
    pieces: list[bytes] = []
    for chunk in chunks[:1]:
        for offset in range(min(100, len(chunk.data))):
            writer = MessageWriter()
            writer.add_data(chunk.index, chunk.total, chunk.offset + offset, bytes(chunk.data[offset : offset + 1]))
            pieces.append(writer.flush() or b"")
    return pieces


def _without_end(message: bytes) -> bytes:
    writer = MessageWriter(1 << 30)
    for chunk in [each for each in read_chunks(message) if each.kind == 1][:1]:
        writer.add_data(chunk.index, chunk.total, chunk.offset, bytes(chunk.data))
    return writer.flush() or b""


def _all_missing(message: bytes) -> bytes:
    writer = MessageWriter(1 << 30)
    chunks = list(read_chunks(message))
    for index in sorted({chunk.index for chunk in chunks if chunk.kind == 1 and chunk.offset == 0}):
        writer.add_missing(index, "evicted")
    for chunk in chunks:
        if chunk.kind == 3:
            writer.add_end(chunk.index)
    return writer.flush() or encode_message([], 0)


SPOILERS: dict[str, Callable[[bytes], bytes]] = {
    "truncate": _truncated,
    "damage": _flipped,
    "damage-late": lambda message: _flipped(message, first=1),
    "reorder": lambda message: _rewritten(message, _halves),
    "oversize": lambda message: _rewritten(
        message, lambda chunks: [(each.index, 1 << 60, each.offset, bytes(each.data)) for each in chunks]
    ),
    "too-long": lambda message: _rewritten(
        message,
        lambda chunks: [
            part
            for each in chunks
            for part in (
                (each.index, each.total, each.offset, bytes(each.data)),
                (each.index, each.total + 64, each.offset + len(each.data), b"z" * 64),
            )
        ],
    ),
    "huge-message": lambda message: _wrapped(bytes(_payload(message)) + bytes(9 << 20)),
    "other-version": lambda message: _wrapped(_payload(message).replace(b"TKC1", b"TKC9")),
    "garbage": lambda message: os.urandom(len(message)),
    "empty": lambda _: encode_message([], 0),
    "missing": _all_missing,
    "wrong-index": lambda message: _rewritten(
        message, lambda chunks: [(each.index + 1000, each.total, each.offset, bytes(each.data)) for each in chunks]
    ),
}


def _overclaimed(answer: bytes) -> bytes:
    """Every record of the answer under another key."""
    parsed = pb.ProbeResponse.FromString(answer)
    for record in parsed.records:
        record.key = os.urandom(len(record.key))
    return parsed.SerializeToString()


# --- ports without a vault ------------------------------------------------------------------------


class Listener:
    """Something on a port that is no vault; see LISTENERS."""

    def __init__(self, kind: str, port: int = 0) -> None:
        self._kind, self._kept = kind, []
        port = port or free_port()
        self._web: http.server.HTTPServer | None = None
        if kind == "web":
            self._web = http.server.HTTPServer(("127.0.0.1", port), http.server.BaseHTTPRequestHandler)
            self._socket = self._web.socket
            target: Callable[..., None] = self._web.serve_forever
        else:
            self._socket = socket.create_server(("127.0.0.1", port), backlog=0 if kind == "black-hole" else 16)
            target = self._accept
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=target, daemon=True)
        if kind != "black-hole":
            self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._kept.append(connection)
            if self._kind == "banner":
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    def stop(self) -> None:
        if self._web is not None:
            self._web.shutdown()
            self._web.server_close()
        else:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            self._socket.close()
        for connection in self._kept:
            connection.close()


# --- by hand --------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=50051, help="127.0.0.1:PORT (50051)")
    parser.add_argument("--fault", default="none", choices=[*FAULTS, *LISTENERS], metavar="FAULT", help="see --list")
    parser.add_argument("--token", help="as the agents have it; without it, the one in TierKV's folder")
    parser.add_argument("--role", default="kv-vault", choices=["kv-vault", "ssm-vault"])
    parser.add_argument("--list", action="store_true", help="what there is to go wrong")
    options = parser.parse_args()
    if options.list:
        for name, text in {**FAULTS, **LISTENERS}.items():
            print(f"{name:15} {text}")
        return 0
    if options.fault in LISTENERS:
        listener = Listener(options.fault, options.port)
        print(f"{options.fault} on {listener.address}; ctrl-c ends it", file=sys.stderr)
        return _until_interrupted(lambda: threading.Event().wait())
    vault = FaultyVault(port=options.port, token=options.token, fault=options.fault, role=options.role).start()
    print(f"a vault on {vault.address} with the fault {vault.fault!r}; ctrl-c ends it", file=sys.stderr)
    return _until_interrupted(lambda: _obey(vault))


def _obey(vault: FaultyVault) -> None:
    for line in sys.stdin:
        if line.strip() in FAULTS:
            vault.fault = line.strip()
            print(f"fault {vault.fault!r}", file=sys.stderr)
        elif line.strip():
            print(f"no such fault; there are: {', '.join(FAULTS)}", file=sys.stderr)
    threading.Event().wait()


def _until_interrupted(work: Callable[[], object]) -> int:
    try:
        work()
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
