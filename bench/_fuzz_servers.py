"""Fuzz targets with a peer behind them: every gRPC method of a vault and an inference agent, and both ends of the
hand-off socket. Real servers on loopback, in threads of this process, so that their lines count as coverage."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import _fuzz_decoders as decoders
import _fuzzing as fuzzing
import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message

from tierkv.agents.inference import InferenceAgent, InferenceOptions, build_inference_agent
from tierkv.agents.vault import VaultOptions, build_vault_agent
from tierkv.config.running import Base
from tierkv.errors import HandoffError, UnsupportedState
from tierkv.handoff.arena import Arena
from tierkv.handoff.client import HandoffClient, ModelAnnouncement, NotRestored, Restored, model_files
from tierkv.handoff.protocol import HEADER, MAGIC, VERSION, pack
from tierkv.identity.blocks import PromptChain
from tierkv.rpc import wire
from tierkv.rpc.channels import ERROR_KEY
from tierkv.rpc.probing import whole_query
from tierkv.state import mlx_cache
from tierkv.v1 import node_service_pb2, vault_service_pb2

TOKEN = "a-token-for-fuzzing-only"
CALL_S = 10.0
# Of a stream that would go on for ever.
MESSAGES_READ = 3
STREAM_S = 0.1
ARENA_BYTES = 1 << 20
HOOK_BUDGET_S = 0.2
SERVICES = {
    "tierkv.v1.VaultService": vault_service_pb2.DESCRIPTOR.services_by_name["VaultService"],
    "tierkv.v1.NodeService": node_service_pb2.DESCRIPTOR.services_by_name["NodeService"],
}
# What a server may answer: INTERNAL and UNKNOWN are its own faults, except where a message is no message to gRPC.
FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
# Fields that name another machine: they stay what the example says.
PEERS = ("peer", "target", "address", "host")


class Loop:
    """An event loop in a thread; ``faults`` holds what its servers logged as unexpected."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="servers", daemon=True)
        self.thread.start()
        self.faults: list[str] = []
        handler = logging.Handler(logging.ERROR)
        handler.emit = self._heard
        self._handler = handler
        logging.getLogger("tierkv").addHandler(handler)
        logging.getLogger("asyncio").addHandler(handler)

    def _heard(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text = f"{text}: {type(error).__name__}: {error}"
        self.faults.append(text)

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 120.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def check(self) -> None:
        """Raises for what a server logged as unexpected since the last call."""
        if self.faults:
            said, self.faults[:] = "; ".join(self.faults), []
            raise AssertionError(f"a server logged: {said}")

    def close(self) -> None:
        for name in ("tierkv", "asyncio"):
            logging.getLogger(name).removeHandler(self._handler)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


class Servers:
    """A vault, an inference agent with that vault behind it, and an engine that has stored something."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tierkv-fuzz-")
        self.home = Path(self._folder.name)
        self.loop = Loop()
        self.tokens = np.arange(600, dtype=np.int64)
        self.chain = PromptChain.of(decoders.ROOT, self.tokens)
        self.vault = self.loop.run(self._vault())
        self.agent: InferenceAgent = self.loop.run(self._agent())
        self.channels = {
            "vault": grpc.insecure_channel(self.vault.address),
            "agent": grpc.insecure_channel(self.agent.runtime.address),
        }

    async def _vault(self) -> Any:
        options = VaultOptions("v", port=0, max_bytes=16 << 20, max_record_bytes=1 << 20, token=TOKEN)
        runtime = build_vault_agent(options)
        runtime.configured_by(*self._configuration("[vault]\nmax_bytes = '16MiB'\nmax_record_bytes = '1MiB'\n"))
        await runtime.start()
        return runtime

    async def _agent(self) -> InferenceAgent:
        agent = build_inference_agent(
            InferenceOptions(
                "i", port=0, socket=self.home / "run" / "s.sock", kv_cold=(self.vault.address,), token=TOKEN,
                handoff_bytes=ARENA_BYTES, min_store_tokens=1, min_restore_tokens=1, local_vault_bytes=4 << 20,
                max_record_bytes=1 << 20,
            )
        )  # fmt: skip
        agent.runtime.configured_by(*self._configuration("[inference]\nmin_store_tokens = 1\n"))
        await agent.start()
        return agent

    def _configuration(self, text: str) -> tuple[Base, Any]:
        path = Path(tempfile.mkdtemp(dir=self.home)) / "tierkv.toml"
        path.write_text(text)
        base = Base(path, {}, {})
        return base, base.check(base.read(), {})

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self.loop.run(self.agent.stop())
        self.loop.run(self.vault.stop(0))
        self.loop.close()
        self._folder.cleanup()


class Method(decoders.Base):
    """One method of one server. A client stream's messages follow one another, 4 bytes of length before each."""

    def __init__(self, servers: Servers, where: str, service: str, method: Any) -> None:
        self.name = f"{where}-{service.rpartition('.')[2]}-{method.name}"
        self._servers, self._method = servers, method
        self._request: type[Message] = _message_class(method.input_type)
        path = f"/{service}/{method.name}"
        channel = servers.channels[where]
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        self._call = getattr(channel, kind)(path)

    def examples(self) -> Sequence[bytes]:
        name = self._method.name
        if name == "Store":
            return decoders.Streams.examples(self)  # pyright: ignore[reportArgumentType]
        made = self._request()
        if name == "Probe":
            query = whole_query(
                self._servers.chain, blocks=True, windows=True, states=True, worst_fidelity=255, peek=False, max_keys=64
            )
            made = wire.query_to_proto(query)
        for field in made.DESCRIPTOR.fields:
            if field.name == "keys" and not len(made.keys):
                made.keys.extend(self._servers.chain.keys)
        return [made.SerializeToString(), b""]

    def mutators(self) -> Sequence[fuzzing.Mutator]:
        return () if self._method.client_streaming else (self._fields_changed,)

    def _fields_changed(self, rng: random.Random, data: bytes) -> bytes:
        made = self._request()
        with suppress(DecodeError):
            made.ParseFromString(data)
        for _ in range(rng.choice((1, 1, 2))):
            _junk_in(rng, made)
        return made.SerializeToString()

    def feed(self, data: bytes) -> str:
        if not self._method.client_streaming and _names_a_peer(self._request, data):
            return "left_out"
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        sent: Any = iter(_split(data)) if self._method.client_streaming else data
        outcome = "ok"
        try:
            call = self._call(sent, timeout=STREAM_S if self._method.server_streaming else CALL_S, metadata=metadata)
            if self._method.server_streaming:
                for _, _ in zip(range(MESSAGES_READ), call, strict=False):
                    pass
                call.cancel()
        except grpc.RpcError as error:
            status = error.code()  # pyright: ignore[reportAttributeAccessIssue]
            outcome = status.name.lower()
            if status in FAULTS:
                trailing = dict(error.trailing_metadata() or ())  # pyright: ignore[reportAttributeAccessIssue]
                if ERROR_KEY not in trailing:
                    raise AssertionError(f"{status.name}: {error.details()}") from error  # pyright: ignore
            if status is grpc.StatusCode.DEADLINE_EXCEEDED and not self._method.server_streaming:
                raise AssertionError(f"no answer in {CALL_S:g} s") from error
        self._servers.loop.check()
        return outcome


def _message_class(descriptor: Any) -> type[Message]:
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(descriptor)


def _split(data: bytes) -> list[bytes]:
    messages: list[bytes] = []
    while len(data) >= 4 and len(messages) < 64:
        length = int.from_bytes(data[:4], "little")
        messages.append(data[4 : 4 + length])
        data = data[4 + length :]
    return messages


def _junk_in(rng: random.Random, made: Message) -> None:
    """One field of the message, at any depth, has a value that nobody means."""
    fields = list(made.DESCRIPTOR.fields)
    if not fields:
        return
    field = rng.choice(fields)
    kinds = {
        field.CPPTYPE_STRING: lambda: rng.choice(
            (rng.randbytes(rng.choice((0, 1, 31, 32, 33, 5000))), b"\x05" * 32)
            if field.type == field.TYPE_BYTES
            else ("", "x", "y" * 5000, "\x00", "../..", "[red]", "kv", "9" * 30)
        ),
        field.CPPTYPE_BOOL: lambda: rng.random() < 0.5,
        field.CPPTYPE_DOUBLE: lambda: rng.choice((0.0, -1.0, 1e308, float("nan"), float("inf"), 0.05)),
        field.CPPTYPE_FLOAT: lambda: rng.choice((0.0, -1.0, float("nan"))),
        field.CPPTYPE_ENUM: lambda: rng.choice((0, 1, 2, 99)),
    }
    if field.name in PEERS:
        return
    with suppress(ValueError, TypeError, AttributeError):
        if field.message_type is not None:
            held = getattr(made, field.name)
            _junk_in(rng, held.add() if field.is_repeated else held)
        else:
            value = kinds.get(field.cpp_type, lambda: rng.choice(fuzzing.INTERESTING))
            if field.is_repeated:
                getattr(made, field.name).extend(value() for _ in range(rng.choice((1, 3, 300))))
            else:
                setattr(made, field.name, value())


def _names_a_peer(request: type[Message], data: bytes) -> bool:
    """Whether the request names a machine: one that was made up is not called."""
    made = request()
    try:
        made.ParseFromString(data)
    except DecodeError:
        return False
    return any(getattr(made, name, "") for name in PEERS)


# --- the hand-off socket --------------------------------------------------------------------------------


def message(fields: dict[str, Any], blob: bytes = b"") -> bytes:
    text = json.dumps(fields).encode()
    return HEADER.pack(MAGIC, len(text), len(blob)) + text + blob


def message_junk(rng: random.Random, data: bytes) -> bytes:
    """One message of the run with something in its JSON changed, or taken away, doubled or put elsewhere."""
    parts: list[tuple[bytes, bytes]] = []
    place = 0
    while place + HEADER.size <= len(data):
        magic, json_bytes, blob_bytes = HEADER.unpack_from(data, place)
        if magic != MAGIC or json_bytes + blob_bytes > len(data) - place:
            break
        place += HEADER.size
        parts.append((data[place : place + json_bytes], data[place + json_bytes : place + json_bytes + blob_bytes]))
        place += json_bytes + blob_bytes
    if not parts:
        return data
    at = rng.randrange(len(parts))
    text, blob = parts[at]
    if rng.random() < 0.2:
        parts = rng.choice((parts[:at] + parts[at + 1 :], parts[: at + 1] + parts[at:], parts[::-1]))
    elif rng.random() < 0.2 and blob:
        parts[at] = (text, rng.choice(fuzzing.RAW)(rng, blob))
    else:
        with suppress(ValueError, RecursionError):
            parts[at] = (json.dumps(fuzzing.with_junk(rng, json.loads(text))).encode(), blob)
    return b"".join(HEADER.pack(MAGIC, len(text), len(blob)) + text + blob for text, blob in parts)


class AgentSocket(decoders.Base):
    """What a hostile hook sends an agent after a good hello. The first byte: control or demote."""

    name = "handoff-agent"

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        folder = servers.home / "model"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"w" * 100)
        (folder / "config.json").write_text("{}")
        self._announcement = ModelAnnouncement("m", model_files(folder), "{}").to_json()

    def examples(self) -> Sequence[bytes]:
        ids = self._servers.tokens[:300].astype("<i8").tobytes()
        layout = decoders.LAYOUT.to_json()
        announce = message({"op": "announce", "model": 0, "announcement": self._announcement, "fidelity": 0})
        ask = {"id": 2, "model": 0, "have": 0, "rows_from": 0, "limit": 299, "media": [], "budget_s": 0.2,
               "expected": decoders.LAYOUT.signature()}  # fmt: skip
        offer = {"op": "offer", "id": 1, "model": 0, "position": 300, "media": [], "tokens_bytes": len(ids)}
        segments = [[0, 0, 0, 0, [1, 2, 256, 8]], [0, 1, 0, 16384, [1, 2, 256, 8]]]
        control = [
            announce, message(offer, ids + layout), message({"op": "restore", **ask}, ids),
            message({"op": "probe", **ask}, ids), message({"op": "free", "offset": 0}),
        ]  # fmt: skip
        demote = [
            message({"op": "begin", "transfer": 1, "scalars": {"1": {"offset": 3}}}),
            message({"op": "piece", "transfer": 1, "offset": 0, "bytes": 32768, "segments": segments}),
            message({"op": "end", "transfer": 1}), message({"op": "dropped", "transfer": 1, "reason": "x"}),
            message({"op": "report", "stats": {"entries": 1, "refusals": {"dtype": 1}, "prefills": [[0, 0, 99, 1.0]]}}),
            message({"op": "served", "restore": 0, "model": None, "tokens": 9, "have": 0, "position": 0, "reason": ""}),
            message({"op": "hit", "model": 0, "position": 100, "media": [[1, 2, "aa"]]}, ids),
            message({"op": "flush", "timeout_s": 0.01}),
        ]  # fmt: skip
        return [b"c" + b"".join(control), b"d" + b"".join(demote), *(b"c" + each for each in control[1:])]

    def mutators(self) -> Sequence[fuzzing.Mutator]:
        return (lambda rng, data: data[:1] + message_junk(rng, data[1:]),)

    def feed(self, data: bytes) -> str:
        kind = "demote" if data[:1] == b"d" else "control"
        hello = {"version": VERSION, "channel": kind, "engine": "f", "build": "f", "pid": 1, "engine_id": "fuzz"}
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(CALL_S)
            sock.connect(str(self._servers.agent.server.path))
            sock.sendall(pack("hello", hello))
            answer, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, 1)
            for descriptor in descriptors:
                socket.close(descriptor)
            if b"refused" in answer:
                return "refused"
            with suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(data[1:])
                sock.shutdown(socket.SHUT_WR)
            outcome = self._rest(sock)
        counters = self._servers.agent.telemetry.snapshot().counters
        crashed = [name for name in counters if "crashed" in name]
        if crashed:
            raise AssertionError(f"the agent counted {crashed}")
        self._servers.loop.check()
        return outcome

    @staticmethod
    def _rest(sock: socket.socket) -> str:
        """How the agent ended the connection, after whatever it answers."""
        read = 0
        while True:
            try:
                data = sock.recv(1 << 16)
            except ConnectionResetError:
                return "reset"
            except TimeoutError:
                raise AssertionError("the agent neither answers nor hangs up") from None
            if not data:
                return "answered" if read else "closed"
            read += len(data)


class HookSocket(decoders.Base):
    """What a hostile agent answers a hook after a good hello, until it hangs up."""

    name = "handoff-hook"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tierkv-fuzz-")
        self._path = Path(self._folder.name) / "a.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(8)
        self._answer = b""
        self._arena = Arena.create(ARENA_BYTES, writable=True)
        self._tokens = np.arange(300, dtype=np.int64)
        threading.Thread(target=self._serve, name="hostile", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(sock,), daemon=True).start()

    def _talk(self, sock: socket.socket) -> None:
        with sock, suppress(OSError):
            hello = sock.recv(1 << 16)
            body = {"version": VERSION, "arena_bytes": ARENA_BYTES, "settings": {}, "node": "f"}
            if b'"demote"' in hello:  # its writer seals it: one for each
                own = Arena.create(ARENA_BYTES, writable=False)
                socket.send_fds(sock, [pack("hello", body)], [own.fd])
                own.close()
                while sock.recv(1 << 16):
                    pass
                return
            socket.send_fds(sock, [pack("hello", body)], [self._arena.fd])
            while data := sock.recv(1 << 20):
                if b'"op":"announce"' not in data or b'"op":"restore"' in data or b'"op":"offer"' in data:
                    sock.sendall(self._answer)
                    sock.shutdown(socket.SHUT_WR)  # and reads on: what the hook frees is no fault

    def examples(self) -> Sequence[bytes]:
        layout = decoders.LAYOUT.to_json()
        plan = message({"op": "plan", "id": 1, "position": 256, "first_row": 0}, layout)
        segments = [[0, 0, 0, 0, [1, 2, 256, 8]], [0, 1, 0, 16384, [1, 2, 256, 8]], [1, 0, 256, 32768, [1, 3, 8]]]
        piece = message({"op": "piece", "id": 1, "offset": 0, "bytes": 65536, "segments": segments})
        done = message({
            "op": "done", "id": 1, "position": 256, "scalars": {}, "fidelity": 0, "codec": "raw", "bytes": 5
        })  # fmt: skip
        offer = {"op": "offer", "id": 1, "transfer": 3, "rows_from": 0, "window": False, "state": True, "reason": ""}
        return [
            plan + piece + done, message({"op": "working", "id": 1}) + plan + piece + done, message(offer),
            message({"op": "none", "id": 1, "reason": "never_stored"}),
            message({"op": "failed", "id": 1, "reason": "timed_out"}),
        ]  # fmt: skip

    def mutators(self) -> Sequence[fuzzing.Mutator]:
        return (message_junk,)

    def feed(self, data: bytes) -> str:
        self._answer = data
        client = HandoffClient(self._path, "f", "f", connect_budget_s=1.0)
        try:
            model = client.announce(ModelAnnouncement("m", ()))
            if not client.wait_available(CALL_S):
                raise AssertionError(f"no connection: {client.last_error}")
            if sum(data[:64]) % 4 == 0:
                offer = client.offer(model, self._tokens, 300, decoders.LAYOUT, budget_s=HOOK_BUDGET_S)
                return "no_offer" if offer is None else "offer"
            got = client.restore(
                model, self._tokens, limit=299, expected=decoders.LAYOUT.signature(), budget_s=HOOK_BUDGET_S
            )
            return got.reason[:40] if isinstance(got, NotRestored) else _built(got)
        except HandoffError as error:
            raise AssertionError(f"the request path sees {error}") from error
        finally:
            client.close()

    def close(self) -> None:
        self._listener.close()
        self._arena.close()
        self._folder.cleanup()


def _built(got: Restored) -> str:
    """What an engine makes of it."""
    try:
        mlx_cache.build(got.layout, got.position, got.arrays, got.scalars, first_row=got.first_row)
    except UnsupportedState as error:
        return f"not_built_{error.reason}"
    return "restored"


def methods(servers: Servers) -> list[Method]:
    """Every method of every service of both servers."""
    return [
        Method(servers, where, service, method)
        for where in servers.channels
        for service, descriptor in SERVICES.items()
        for method in descriptor.methods
    ]


__all__ = ["AgentSocket", "HookSocket", "Servers", "methods"]
