"""Restores over a link against raw TCP of as many bytes, one after the other in one run.

    tierkv bench link                      both ends here, over loopback
    tierkv bench link --serve              on the vault's machine: prints what to run on the engine's

A restore is what an engine waits for: lookup, transfer, decoding and the copy out of shared memory. The agent is where
the engine is. State is made up: SmolLM2's shape, ``--tokens`` of it. Wanted on 1 GbE: >= 0.95 of raw TCP.
"""

from __future__ import annotations

import argparse
import json
import secrets
import socket
import statistics
import struct
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from _agents import start
from _scratch import scratch_folder
from restore import BenchEngine, make_state, smollm2_layout

_ORDER = struct.Struct("<Q")
_MOST_BYTES = 1 << 30


class TcpServer:
    """Sends as many bytes as each order asks for, from one buffer, to whoever connects."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while len(order := connection.recv(_ORDER.size, socket.MSG_WAITALL)) == _ORDER.size:
                (size,) = _ORDER.unpack(order)
                connection.sendall(memoryview(np.ones(min(size, _MOST_BYTES), np.uint8)).cast("B"))


def tcp_seconds(connection: socket.socket, target: memoryview) -> float:
    """How long it takes until ``target`` is full, from the order on."""
    began = time.perf_counter()
    connection.sendall(_ORDER.pack(len(target)))
    place = 0
    while place < len(target):
        got = connection.recv_into(target[place:])
        if not got:
            raise SystemExit("the other end closed its raw connection")
        place += got
    return time.perf_counter() - began


def serve(host: str, home: Path) -> int:
    token = secrets.token_hex(16)
    vault, port = start("vault", home, name="kv", role="kv-vault", max_bytes=1 << 30, host=host, token=token)
    raw = TcpServer(host)
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    print(f"tierkv bench link {shown} --ports {port},{raw.port} --token {token}", flush=True)
    try:
        return vault.wait()
    finally:
        vault.terminate()
        vault.wait(10)


@dataclass(frozen=True)
class Found:
    tokens: int
    codec: str
    moved_bytes: int
    tcp_bytes_per_s: float
    restore_s: float
    ratio_to_tcp: float
    ratio_to_tcp_range: tuple[float, float]


def measure(host: str, ports: tuple[int, int], token: str, options: argparse.Namespace, home: Path) -> Found:
    vault_port, raw_port = ports
    agent, _ = start(
        "inference", home, name="agent", socket=str(home / "bench.sock"), kv_codec=options.codec, token=token,
        kv_cold=[f"{host}:{vault_port}"], break_even=False,
    )  # fmt: skip
    try:
        layout = smollm2_layout("bfloat16")
        engine = BenchEngine(home, "smollm2", layout, options.tokens)
        engine.store(make_state(layout, options.tokens))
        moved = engine.restore().bytes_moved
        target = memoryview(np.ones(moved, np.uint8)).cast("B")
        rounds: list[tuple[float, float]] = []
        with socket.create_connection((host, raw_port), timeout=60) as connection:
            tcp_seconds(connection, target)
            for _ in range(options.rounds):
                raw_s = tcp_seconds(connection, target)
                began = time.perf_counter()
                engine.restore()
                rounds.append((raw_s, time.perf_counter() - began))
        engine.close()
    finally:
        agent.terminate()
        agent.wait(10)
    ratios = sorted(raw_s / restore_s for raw_s, restore_s in rounds)
    return Found(
        options.tokens, options.codec, moved, moved / statistics.median(raw_s for raw_s, _ in rounds),
        statistics.median(restore_s for _, restore_s in rounds), statistics.median(ratios), (ratios[0], ratios[-1]),
    )  # fmt: skip


def here(options: argparse.Namespace, home: Path) -> Found:
    token = secrets.token_hex(16)
    (home / "vault").mkdir()
    vault, port = start("vault", home / "vault", name="kv", role="kv-vault", max_bytes=1 << 30, token=token)
    try:
        return measure("127.0.0.1", (port, TcpServer("127.0.0.1").port), token, options, home)
    finally:
        vault.terminate()
        vault.wait(10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", nargs="?", help="the machine that serves")
    parser.add_argument("--serve", nargs="?", const="0.0.0.0", metavar="ADDRESS", help="serve on this address, or all")
    parser.add_argument("--ports", default="", help="as --serve prints them")
    parser.add_argument("--token", default="", help="as --serve prints it")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    with scratch_folder() as home:
        if options.serve:
            return serve(options.serve, home)
        if options.host:
            first, _, second = options.ports.partition(",")
            if not (first.isdigit() and second.isdigit() and options.token):
                parser.error("a host needs --ports and --token as --serve printed them")
            found = measure(options.host, (int(first), int(second)), options.token, options, home)
        else:
            found = here(options, home)
    if options.json:
        print(json.dumps({"schema": "tierkv.bench.link/1", **asdict(found)}, indent=2))
        return 0
    low, high = found.ratio_to_tcp_range
    print(
        f"{found.tokens:,} tokens, {found.codec}: {found.moved_bytes / 1e6:.1f} MB in {found.restore_s:.3f} s, "
        f"{found.ratio_to_tcp:.2f} of raw TCP ({low:.2f} to {high:.2f}; {found.tcp_bytes_per_s / 1e6:.0f} MB/s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
