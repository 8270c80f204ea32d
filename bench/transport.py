"""A vault over loopback against raw TCP, in alternation: ``python bench/transport.py [--sittings N] [--json]``.

Both sides of both ways are real: a vault process with a RAM store that verifies what it takes and gives, and a TCP
process that sends from and receives into one buffer. The reader puts the bytes into a buffer of its own either way.
What a byte costs depends on where the system happens to run the two processes of a way, raw TCP's most of all (from
0.17 to 0.34 s of a client's CPU per GB on one machine within an hour), and stays so while they live. So all of them are
started anew for every sitting, and what is shown are medians over the sittings' medians.
Targets of a get: throughput >= 0.5 of raw TCP, client CPU <= 2.5x, server CPU <= 2x.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import psutil
from _scratch import scratch_folder

from tierkv.agents.memory import keep_freed_memory
from tierkv.codec.frame import FrameHeader, FrameType, payload_hash
from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey, PromptChain
from tierkv.rpc.auth import load_token
from tierkv.rpc.client import VaultClient
from tierkv.rpc.vault_port import Piece
from tierkv.store.base import Selector

MIB = 1 << 20
RECORDS = 32
SEGMENTS = 32
WARM_UP = 2  # rounds that pay for connections and fresh pages, of which a reader needs more while it falls behind
ROOT = BlockKey(b"\x07" * 32)
_ORDER = struct.Struct("<BQ")
_GET, _PUT = 1, 2

_VAULT = """
import asyncio, sys
from tierkv.agents.vault import VaultOptions, run_vault
asyncio.run(run_vault(VaultOptions("bench", port=0, max_bytes=int(sys.argv[1]), undo_s=0.0, ready_fd=1)))
"""


@dataclass(frozen=True)
class Round:
    """One transfer. CPU in seconds per 10^9 bytes."""

    bytes_per_s: float
    client_cpu_s_per_gb: float
    server_cpu_s_per_gb: float


@dataclass(frozen=True)
class Line:
    way: str
    direction: str
    bytes_per_s: float
    ratio_to_tcp: float
    client_cpu_s_per_gb: float
    client_cpu_ratio_to_tcp: float
    server_cpu_s_per_gb: float
    server_cpu_ratio_to_tcp: float


_SPEED, _CLIENT, _SERVER = map(attrgetter, ("bytes_per_s", "client_cpu_s_per_gb", "server_cpu_s_per_gb"))


# --- raw TCP ------------------------------------------------------------------------------------


def serve_tcp() -> None:
    """Gives or takes as many bytes as each order says, from and into one buffer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        connection, _ = server.accept()
        buffer = memoryview(np.ones(1 << 28, np.uint8)).cast("B")
        with connection:
            while order := connection.recv(_ORDER.size, socket.MSG_WAITALL):
                direction, size = _ORDER.unpack(order)
                if direction == _GET:
                    connection.sendall(buffer[:size])
                else:
                    receive_into(connection, buffer[:size])
                    connection.sendall(b"k")


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    place = 0
    while place < len(buffer):
        place += connection.recv_into(buffer[place:])


class Tcp:
    name = "raw TCP"

    def __init__(self, port: int, source: memoryview, target: memoryview) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._source, self._target = source, target

    async def get(self) -> int:
        self._connection.sendall(_ORDER.pack(_GET, len(self._target)))
        receive_into(self._connection, self._target)
        return len(self._target)

    async def put(self) -> int:
        self._connection.sendall(_ORDER.pack(_PUT, len(self._source)))
        self._connection.sendall(self._source)
        self._connection.recv(1)
        return len(self._source)

    async def reset(self) -> None:
        """Nothing to forget."""


# --- a vault ------------------------------------------------------------------------------------


class Vault:
    name = "vault"

    def __init__(self, port: int, records: list[tuple[RecordHeader, list[bytes]]], target: memoryview) -> None:
        self.client = VaultClient(f"127.0.0.1:{port}", load_token(), connect_timeout_s=10, frame_timeout_s=30)
        self._records, self._target = records, target
        self._bytes = sum(len(part) for _, parts in records for part in parts)

    async def get(self) -> int:
        place, target = 0, self._target
        async for item in self.client.promote([header.key for header, _ in self._records]):
            assert isinstance(item, Piece)
            target[place : place + len(item.data)] = item.data
            place += len(item.data)
        assert place == self._bytes
        return place

    async def put(self) -> int:
        async def records():
            for record in self._records:
                yield record

        outcomes = await self.client.store(records())
        assert {outcome.outcome for outcome in outcomes} == {"stored"}, outcomes[0]
        return self._bytes

    async def reset(self) -> None:
        """The store is empty, so that the next put is one; records are of the present epoch."""
        result = await self.client.purge((await self.client.preview_purge(Selector())).token)
        self._records = [
            ((fresh := replace(header, epoch=result.epoch)), [fresh.pack_frame(), *parts[1:]])
            for header, parts in self._records
        ]
        await asyncio.sleep(1.2)


def make_records(total_bytes: int) -> list[tuple[RecordHeader, list[bytes]]]:
    """Block records of a chain with raw segments, ``total_bytes`` of payload together."""
    chain = PromptChain.of(ROOT, np.arange(RECORDS * BLOCK_TOKENS))
    size = total_bytes // RECORDS // SEGMENTS
    records = []
    for index in range(RECORDS):
        start = index * BLOCK_TOKENS
        parts: list[bytes] = []
        for layer in range(SEGMENTS):
            payload = np.random.default_rng([index, layer]).integers(0, 256, size, np.uint8).tobytes()
            frame = FrameHeader(
                FrameType.SEGMENT, 0, "uint8", (size,), start, size, size, payload_hash(payload), layer=layer
            )
            parts += (frame.pack(), payload)
        header = RecordHeader(
            RecordKind.BLOCK, chain.keys[index], chain.parent_at(start), ROOT,
            chain.tokens[start : start + BLOCK_TOKENS], start, bytes(16), b"{}", 0, 0, time.time(), SEGMENTS,
            sum(map(len, parts)), size * SEGMENTS, "bench", "raw",
        )  # fmt: skip
        records.append((header, [header.pack_frame(), *parts]))
    return records


# --- measuring ----------------------------------------------------------------------------------


async def measured(call: Callable[[], Awaitable[int]], server: psutil.Process) -> Round:
    cpu_before, server_before = time.process_time(), cpu_of(server)
    began = time.perf_counter()
    size = await call()
    seconds = time.perf_counter() - began
    return Round(
        size / seconds,
        (time.process_time() - cpu_before) / size * 1e9,
        (cpu_of(server) - server_before) / size * 1e9,
    )


def cpu_of(process: psutil.Process) -> float:
    """Seconds of CPU that the process has had: by the scheduler's own count on Linux, else in ticks of 10 ms."""
    try:
        tasks = Path(f"/proc/{process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, ValueError, IndexError):
        times = process.cpu_times()
        return times.user + times.system


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[tuple[psutil.Process, int]]:
    """A child that prints its port first."""
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        yield psutil.Process(child.pid), int(child.stdout.readline())
    finally:
        child.terminate()
        child.wait()


Seen = dict[tuple[str, str], list[Round]]


async def run(rounds: int, size: int) -> Seen:
    """The rounds of one sitting, by way and direction."""
    keep_freed_memory()  # as every agent does
    records = make_records(size)
    total = sum(len(part) for _, parts in records for part in parts)
    target = memoryview(np.zeros(total, np.uint8)).cast("B")
    source = memoryview(np.ones(total, np.uint8)).cast("B")
    with (
        process(__file__, "--serve-tcp") as (tcp_process, tcp_port),
        process("-c", _VAULT, str(4 * size)) as (vault_process, vault_port),
    ):
        ways = ((Tcp(tcp_port, source, target), tcp_process), (Vault(vault_port, records, target), vault_process))
        seen: Seen = {}
        await ways[1][0].reset()
        for number in range(WARM_UP + rounds):
            for way, server in ways:
                put = await measured(way.put, server)
                got = await measured(way.get, server)
                await way.reset()
                if number >= WARM_UP:
                    seen.setdefault((way.name, "put"), []).append(put)
                    seen.setdefault((way.name, "get"), []).append(got)
    return seen


def line(name: str, direction: str, sittings: list[Seen]) -> Line:
    def middle(what: Callable[[Round], float]) -> float:
        return statistics.median(statistics.median(map(what, seen[name, direction])) for seen in sittings)

    def of_tcp(what: Callable[[Round], float]) -> float:
        ways = ((seen[name, direction], seen[Tcp.name, direction]) for seen in sittings)
        return statistics.median(
            statistics.median(map(what, mine)) / statistics.median(map(what, tcp)) for mine, tcp in ways
        )

    return Line(
        name, direction, middle(_SPEED), of_tcp(_SPEED), middle(_CLIENT), of_tcp(_CLIENT), middle(_SERVER),
        of_tcp(_SERVER),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sittings", type=int, default=7, help="how often the processes are started anew (7)")
    parser.add_argument("--rounds", type=int, default=5, help="transfers each way in a sitting (5)")
    parser.add_argument("--mib", type=int, default=128, help="bytes a transfer, in MiB (at most 200)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--serve-tcp", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_tcp:
        serve_tcp()
        return
    with scratch_folder() as home:
        os.environ["TIERKV_HOME"] = str(home)
        sittings = [
            asyncio.run(run(arguments.rounds, min(arguments.mib, 200) * MIB)) for _ in range(arguments.sittings)
        ]
    lines = [line(name, direction, sittings) for direction in ("get", "put") for name in (Tcp.name, Vault.name)]
    if arguments.json:
        document = {"schema": "tierkv.bench.transport/2", "lines": [asdict(each) for each in lines]}
        print(json.dumps(document, indent=2))
        return
    columns = f"{'GB/s':>6} {'of TCP':>7} {'client s/GB':>12} {'of TCP':>7} {'server s/GB':>12} {'of TCP':>7}"
    print(f"{'way':<8} {'':<4} {columns}")
    for each in lines:
        print(
            f"{each.way:<8} {each.direction:<4} {each.bytes_per_s / 1e9:6.2f} {each.ratio_to_tcp:7.2f} "
            f"{each.client_cpu_s_per_gb:12.2f} {each.client_cpu_ratio_to_tcp:7.2f} "
            f"{each.server_cpu_s_per_gb:12.2f} {each.server_cpu_ratio_to_tcp:7.2f}"
        )


if __name__ == "__main__":
    main()
