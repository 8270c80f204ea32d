"""How long a vault that is lost goes unnoticed, and how long one that is back: ``tierkv bench peers [--json]``.

A real vault in a process of its own and the client that the agent uses, with the time limits it ships with. The vault
is killed (SIGKILL), closed (SIGTERM), frozen (SIGSTOP) or black-holed (behind a proxy that stops to move bytes but
keeps every connection), or never was there: nothing listens, a web server does, an SSH server's banner comes, something
accepts and is silent. At that moment questions are asked all the time (``asked``), or there is a restore or a store
without end; one that is closed serves them for 2 s more and counts as lost when its process is gone. What is shown is
the time from the fault to the call's end, then how long after the vault is there again it answers a client that goes
on asking. Medians and the longest.
Targets: killed or closed 0.5 s, absent, wrong or silent 1.5 s, frozen or black-holed 3 s, found again 2 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.server
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from _agents import TOKEN, start
from _leaving import leave_with
from _scratch import scratch_folder
from transport import MIB, make_records

from tierkv.codec.record import RecordHeader
from tierkv.errors import PeerError
from tierkv.rpc.auth import Token
from tierkv.rpc.client import VaultClient

RESTORED_TIMES, STORED_TIMES = 1_000, 100_000
LOST = {"killed": 0.5, "closed": 0.5, "frozen": 3.0, "black-holed": 3.0}
NEVER = {"absent": 1.5, "web server": 1.5, "SSH banner": 1.5, "silent": 1.5}
FOUND_S = 2.0
Record = tuple[RecordHeader, list[bytes]]


class Proxy:
    """Moves bytes to and from the vault's port while it is ``open``."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.open = asyncio.Event()
        self.open.set()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.open.wait()
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.target)
        for pair in ((reader, inner_writer), (inner_reader, writer)):
            task = asyncio.create_task(self._pump(*pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 18):
                await self.open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()


class Vault:
    """One vault with records in it, that can be lost and come back on its port."""

    def __init__(self, home: Path) -> None:
        self.home, self._count = home, 0
        self.process, self.port = self._started(0)

    def _started(self, port: int) -> tuple[subprocess.Popen[bytes], int]:
        self._count += 1
        return start("vault", self.home, name=f"v{self._count}", port=port, max_bytes=512 * MIB, undo_s=0.0)

    async def lose(self, fault: str, proxy: Proxy) -> float:
        """The moment from which on nothing comes: one that is closed serves on for as long as it lives."""
        if fault == "black-holed":
            proxy.open.clear()
            return time.perf_counter()
        signals = {"killed": signal.SIGKILL, "closed": signal.SIGTERM, "frozen": signal.SIGSTOP}
        os.kill(self.process.pid, signals[fault])
        if fault == "closed":
            await asyncio.to_thread(self.process.wait, 30)
        return time.perf_counter()

    async def bring_back(self, fault: str, proxy: Proxy) -> None:
        if fault == "black-holed":
            proxy.open.set()
        elif fault == "frozen":
            os.kill(self.process.pid, signal.SIGCONT)
        else:
            await asyncio.to_thread(self.process.wait, 30)
            self.process, self.port = await asyncio.to_thread(self._started, self.port)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)


def client_of(port: int) -> VaultClient:
    return VaultClient(f"127.0.0.1:{port}", Token(TOKEN, True, "given"))


async def ask(client: VaultClient, records: list[Record]) -> None:
    await client.touch([records[0][0].key])


async def go_on_asking(client: VaultClient, records: list[Record]) -> None:
    """One that has been told to end answers until it does."""
    while True:
        await ask(client, records)
        await asyncio.sleep(0.02)


async def restore(client: VaultClient, records: list[Record]) -> None:
    async for _ in client.promote([header.key for header, _ in records] * RESTORED_TIMES):
        pass


async def store(client: VaultClient, records: list[Record], times: int = STORED_TIMES) -> None:
    async def each() -> AsyncIterator[Record]:
        for _ in range(times):
            for record in records:
                yield record

    await client.store(each())


CALLS: dict[str, Callable[[VaultClient, list[Record]], Awaitable[None]]] = {
    "asked": go_on_asking,
    "in a restore": restore,
    "in a store": store,
}


async def until_it_fails(call: Awaitable[None]) -> float:
    """The moment at which the call ends with a failure of the peer's."""
    try:
        async with asyncio.timeout(60):
            await call
    except PeerError:
        return time.perf_counter()
    raise SystemExit("a call to a lost vault succeeded")


async def one_loss(vault: Vault, records: list[Record], fault: str, name: str) -> tuple[float, float]:
    """Seconds until the loss is noticed, and until the vault that is there again has answered."""
    proxy = Proxy(vault.port)
    await proxy.start()
    client = client_of(proxy.port if fault == "black-holed" else vault.port)
    await store(client, records, times=1)
    under_way = asyncio.create_task(until_it_fails(CALLS[name](client, records)))
    await asyncio.sleep(0.2)
    assert not under_way.done(), "the call is over before the fault"
    began = await vault.lose(fault, proxy)
    noticed = max(0.0, await under_way - began)
    await asyncio.sleep(1.0)
    await vault.bring_back(fault, proxy)
    began = time.perf_counter()
    while True:
        with contextlib.suppress(PeerError):
            await ask(client, records)
            break
        await asyncio.sleep(0.02)
    found = time.perf_counter() - began
    await client.close()
    await proxy.close()
    return noticed, found


# --- what never was a vault ---------------------------------------------------------------------


class QuietHandler(http.server.BaseHTTPRequestHandler):
    def log_message(self, format: str, *words: object) -> None:  # noqa: A002 - the name that http.server gives it
        """Says nothing on standard error."""


@contextlib.contextmanager
def impostor(kind: str) -> Iterator[int]:
    """A port on which there is this instead of a vault."""
    if kind == "web server":
        with http.server.HTTPServer(("127.0.0.1", 0), QuietHandler) as web:
            thread = threading.Thread(target=web.serve_forever, args=(0.05,), daemon=True)
            thread.start()
            yield web.server_port
            web.shutdown()
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if kind == "absent":
            listener.close()
        kept: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    kept.append(connection)
                    if kind == "SSH banner":
                        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=accept, daemon=True).start()
        yield port
        if kind != "absent":
            listener.shutdown(socket.SHUT_RDWR)
        for connection in kept:
            connection.close()


async def never_there(kind: str, records: list[Record], name: str) -> float:
    with impostor(kind) as port:
        client = client_of(port)
        began = time.perf_counter()
        ended = await until_it_fails(CALLS[name](client, records))
        await client.close()
    return ended - began


# --- the table ----------------------------------------------------------------------------------


async def measure(home: Path, rounds: int) -> list[dict[str, Any]]:
    records = make_records(16 * MIB)
    lines: list[dict[str, Any]] = []
    vault = Vault(home)
    try:
        for fault, wanted in LOST.items():
            times = {name: [await one_loss(vault, records, fault, name) for _ in range(rounds)] for name in CALLS}
            noticed = {name: [each[0] for each in pairs] for name, pairs in times.items()}
            found = [each[1] for pairs in times.values() for each in pairs]
            lines.append({"fault": fault, "wanted_s": wanted, "noticed_s": noticed, "found_again_s": found})
            print(f"{fault}: done", file=sys.stderr, flush=True)
    finally:
        vault.close()
    for kind, wanted in NEVER.items():
        noticed = {name: [await never_there(kind, records, name) for _ in range(rounds)] for name in CALLS}
        lines.append({"fault": kind, "wanted_s": wanted, "noticed_s": noticed, "found_again_s": []})
    return lines


def shown(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({max(seconds):.2f})" if seconds else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times for each fault and call (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    with scratch_folder() as home:
        lines = asyncio.run(measure(home, options.rounds))
    late = [
        line["fault"]
        for line in lines
        if max(max(each) for each in line["noticed_s"].values()) > line["wanted_s"]
        or max(line["found_again_s"], default=0.0) > FOUND_S
    ]
    if options.json:
        print(json.dumps({"schema": "tierkv.bench.peers/1", "lines": lines, "late": late}))
        return
    print("seconds until the call ended: median (longest)")
    print(f"{'':<13}" + "".join(f"{name:>15}" for name in CALLS) + f"{'wanted':>9}{'found again':>15}{'wanted':>9}")
    for line in lines:
        cells = "".join(f"{shown(line['noticed_s'][name]):>15}" for name in CALLS)
        again = f"{shown(line['found_again_s']):>15}{FOUND_S:>9}" if line["found_again_s"] else ""
        print(f"{line['fault']:<13}{cells}{line['wanted_s']:>9}{again}")
    print(f"too late: {', '.join(late)}" if late else "all within what is wanted")


if __name__ == "__main__":
    leave_with(main)
