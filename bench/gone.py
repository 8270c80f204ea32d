"""What TierKV costs a prompt that it cannot help: time to first token, cold, with and without it.

    tierkv bench gone [--tokens 512] [--rounds 9] [--link 200000] [--json]


The real ``mlx_lm.server`` on the demonstration's model, in turn without TierKV; with TierKV, whose vaults are gone;
and with TierKV and a vault that has the prompt, behind a link so slow that computing is quicker. Every prompt is new
to the engine. The servers stand side by side and take turns, so that each sees the same machine: ratios are medians of
pairs in one run. The slow link is a proxy that lets ``--link`` bytes a second through. Target: with the vaults gone
within 3 % of the engine alone; behind the slow link no slower than a glance (some tenths of a second).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from _scratch import scratch_folder

from tierkv.demo import blas
from tierkv.demo.engine import Engine
from tierkv.demo.models import model_folder
from tierkv.demo.processes import free_port
from tierkv.demo.text import Tokens, library_text

TOKEN = "benchmark-token-benchmark"


class SlowLink(threading.Thread):
    """A TCP proxy that lets so many bytes a second through to whoever connects."""

    def __init__(self, target: int, bytes_per_s: float) -> None:
        super().__init__(daemon=True)
        self.target, self.bytes_per_s, self.port = target, bytes_per_s, 0
        self._ready = threading.Event()
        self._free_s = 0.0
        self.start()
        self._ready.wait(10)

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._joined, "127.0.0.1", 0, limit=16 << 10)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await server.serve_forever()

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.target)
        await asyncio.gather(self._pump(reader, inner_writer, False), self._pump(inner_reader, writer, True))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slow: bool) -> None:
        try:
            while data := await reader.read(8 << 10):
                if slow:
                    self._free_s = max(self._free_s, time.monotonic()) + len(data) / self.bytes_per_s
                    await asyncio.sleep(max(0.0, self._free_s - time.monotonic()))
                writer.write(data)
                await writer.drain()
            writer.close()
        except OSError:
            writer.close()


class Rig:
    """Processes that end with it."""

    def __init__(self, home: Path, model: Path) -> None:
        self.home, self.model = home, model
        self.processes: list[subprocess.Popen[bytes]] = []

    def spawn(self, name: str, words: list[str], **environment: str) -> None:
        home = self.home / name.split("-")[0]
        home.mkdir(exist_ok=True)
        own = {key: value for key, value in os.environ.items() if not key.startswith("TIERKV_")}
        with (self.home / f"{name}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    words, stdout=log, stderr=log,
                    env={**own, "TIERKV_HOME": str(home), "TIERKV_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1", **environment},
                )
            )  # fmt: skip

    def agent(self, name: str, role: str, config: str) -> int:
        home, port = self.home / name, free_port()
        home.mkdir(exist_ok=True)
        file = home / "tierkv.toml"
        file.write_text(config.format(port=port))
        ready = home / "ready"
        words = [sys.executable, "-m", "tierkv", "agent", "--role", role, "--name", name, "--config", str(file)]
        self.spawn(f"{name}-agent", [*words, "--ready-file", str(ready)])
        until = time.monotonic() + 90
        while not ready.exists():
            if time.monotonic() > until:
                raise SystemExit(f"{name} did not start: {(self.home / f'{name}-agent.log').read_text()}")
            time.sleep(0.05)
        return port

    def engine(self, name: str, *, tiered: bool) -> Engine:
        port = free_port()
        server = ["--model", str(self.model), "--port", str(port), "--log-level", "WARNING", "--prompt-cache-size", "2"]
        module = ["tierkv.hooks.mlx_lm", "--"] if tiered else ["mlx_lm.server"]
        environment = {**blas.preload_environment(), "MLX_DISABLE_COMPILE": "1"}
        self.spawn(f"{name}-engine", [sys.executable, "-m", *module, *server], **environment)
        engine, until = Engine(port), time.monotonic() + 180
        while not engine.is_healthy():
            if time.monotonic() > until:
                raise SystemExit(f"{name} did not start: {(self.home / f'{name}-engine.log').read_text()}")
            time.sleep(0.1)
        return engine

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def inference(kv: int) -> str:
    return (
        f"[cluster.kv_cold]\nport = {kv}\n[cluster.ssm_cold]\nport = {kv}\n"
        '[inference]\nport = {port}\nmemory_threshold = 0.99\nkv_codec = "int8"\n'
    )


def prompts(folder: Path, tokens: int, count: int) -> list[str]:
    """Texts that share no beginning."""
    cut = Tokens(folder)
    ids = cut.encode(library_text()[: 12 * tokens * (count + 1)])
    rng = random.Random(3)
    return [
        f"{rng.random()} " + cut.decode(ids[number * tokens : (number + 1) * tokens - 12]) for number in range(count)
    ]


def measure(home: Path, model: Path, tokens: int, rounds: int, link: float) -> dict[str, Any]:
    rig = Rig(home, model)
    try:
        vault = rig.agent("vault", "kv-vault", '[vault]\nport = {port}\nmax_bytes = "1GiB"\n')
        slow = SlowLink(vault, 1e9)
        rig.agent("gone", "inference", inference(free_port()))
        rig.agent("slow", "inference", inference(slow.port))
        engines = {
            "alone": rig.engine("alone", tiered=False), "gone": rig.engine("gone", tiered=True),
            "slow": rig.engine("slow", tiered=True),
        }  # fmt: skip
        texts = prompts(model, tokens, rounds + 4)
        # Warm: weights in memory, identities known, two lengths of prefill measured.
        for name, engine in engines.items():
            for text in (texts[rounds][: 4 * tokens // 3], texts[rounds + 1], texts[rounds + 2]):
                engine.stream(text, 2)
            print(f"{name} is warm", file=sys.stderr)
        time.sleep(3)
        for text in texts[:rounds]:  # into the vault, and out of the engine that has it
            engines["slow"].stream(text, 2)
        time.sleep(4)
        slow.bytes_per_s = link
        seen: dict[str, list[float]] = {name: [] for name in engines}
        for number, text in enumerate(texts[: rounds - 2]):
            names = list(engines)
            for name in names[number % 3 :] + names[: number % 3]:
                seen[name].append(engines[name].stream(text, 2).ttft_s)
            print(", ".join(f"{name} {times[-1]:.2f} s" for name, times in seen.items()), file=sys.stderr)
        result: dict[str, Any] = {"tokens": tokens, "rounds": len(seen["alone"]), "link_bytes_per_s": link}
        for name, times in seen.items():
            ratios = [mine / alone for mine, alone in zip(times, seen["alone"], strict=True)]
            more = [mine - alone for mine, alone in zip(times, seen["alone"], strict=True)]
            result[name] = {
                "ttft_s": statistics.median(times), "of_alone": statistics.median(ratios),
                "more_s": statistics.median(more), "best_s": min(times),
            }  # fmt: skip
        return result
    finally:
        rig.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--link", type=float, default=2e5, help="bytes a second of the slow link")
    parser.add_argument("--model", choices=("hybrid", "smollm2"), default="smollm2")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = model_folder(options.model, lambda line: print(line, file=sys.stderr))
    with scratch_folder() as home:
        result = measure(home, model, options.tokens, options.rounds, options.link)
    if options.json:
        print(json.dumps({"schema": "tierkv.bench.gone/1", **result}))
        return
    print(f"cold prompts of {result['tokens']} tokens, {result['rounds']} rounds")
    for name, what in (("alone", "engine alone"), ("gone", "vaults gone"), ("slow", "slow link")):
        one = result[name]
        print(f"{what:<14}{one['ttft_s']:8.2f} s {one['of_alone']:8.3f} of alone {one['more_s'] * 1e3:+9.0f} ms")


if __name__ == "__main__":
    main()
