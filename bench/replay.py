"""A trace through hook, agent and vault, every row compared, memory watched: ``tierkv bench replay --requests 100000``.

The engine's side is the real hook: mlx-lm's prompt cache with TierKV's in front, in this process, holding real MLX
arrays of a very small cache (one layer, one head of 8). Agent and vaults are processes of their own. A prompt that is
not found is "computed": its rows are a function of all tokens before them, so whatever comes back is compared with what
must come back, row by row. Without ``--trace`` conversations are made up: a few system prompts, turns that go on from
the last one, some that come back much later. ``--trace`` takes a JSON-lines trace with ``hash_ids`` (ids of prefix
blocks), as the Mooncake project publishes them; ``--block`` is how many tokens stand for one id.

Reported: requests a second, hits by kind, wrong rows (must be 0), and the resident memory of each process after a tenth
of the requests and at the end; growth is the slope of a line through the second half, for 100,000 requests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
from _agents import start
from _scratch import scratch_folder
from mlx_lm.models.cache import KVCache, LRUPromptCache

from tierkv.handoff.client import HandoffClient
from tierkv.hooks.memory import MemoryReading, MemoryRule
from tierkv.hooks.mlx_lm import install
from tierkv.hooks.mlx_models import seen_files

WIDTH = 8
VOCABULARY = 32000


# --- traces -------------------------------------------------------------------------------------


def conversations(count: int, seed: int = 7) -> Iterator[list[int]]:
    """Prompts of made-up conversations: 8 system prompts, up to 6 turns, one turn in ten long after the last."""
    rng = random.Random(seed)
    systems = [[rng.randrange(VOCABULARY) for _ in range(rng.choice((80, 200, 320)))] for _ in range(8)]
    running: list[list[int]] = []
    resting: list[list[int]] = []
    for _ in range(count):
        if resting and rng.random() < 0.1:
            prompt = resting.pop(rng.randrange(len(resting)))
        elif running and rng.random() < 0.7:
            prompt = running.pop(rng.randrange(len(running)))
        else:
            prompt = list(rng.choice(systems))
        prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(20, 120))]
        yield prompt
        if len(prompt) < 900:
            (resting if rng.random() < 0.2 else running).append(prompt)
        for group, most in ((running, 40), (resting, 400)):
            if len(group) > most:
                group.pop(0)


def from_trace(path: Path, count: int, block: int) -> Iterator[list[int]]:
    """Prompts of a trace, again and again with other tokens until there are ``count``."""
    with path.open(encoding="utf-8") as file:
        requests = [json.loads(line)["hash_ids"] for line in file]
    for number in range(count):
        again, index = divmod(number, len(requests))
        prompt: list[int] = []
        for name in requests[index][: 2048 // block]:
            prompt += np.random.default_rng([again, name]).integers(0, VOCABULARY, block).tolist()
        yield prompt


# --- an engine without a model --------------------------------------------------------------------


def rows_of(tokens: list[int]) -> np.ndarray:
    """[n, WIDTH] float32: row i depends on every token up to i, and is never 0."""
    ids = np.asarray(tokens, np.int64)
    chain = np.cumsum((ids + 1) * (np.arange(len(ids)) % 251 + 1)) % 8191 + 1
    return (chain[:, None] + np.arange(WIDTH)).astype(np.float32)


def computed(tokens: list[int]) -> list[KVCache]:
    cache, rows = KVCache(), mx.array(rows_of(tokens))[None, None]
    cache.update_and_fetch(rows, -rows)
    mx.eval(cache.keys, cache.values)
    return [cache]


def wrong_rows(cache: list[Any], tokens: list[int]) -> int:
    keys = np.array(cache[0].keys[0, 0, : len(tokens)])
    values = np.array(cache[0].values[0, 0, : len(tokens)])
    wanted = rows_of(tokens)
    return int((np.any(keys != wanted, axis=1) | np.any(values != -wanted, axis=1)).sum())


class _Provider:
    def __init__(self, key: tuple[str, None, None]) -> None:
        self.model_key, self.cli_args = key, SimpleNamespace(kv_bits=None)


class Engine:
    """mlx-lm's prompt cache of ``entries`` prompts, tiered, without a server."""

    def __init__(self, home: Path, entries: int) -> None:
        (home / "model.safetensors").write_bytes(b"a model of one layer")
        (home / "config.json").write_text("{}")
        self.module: Any = SimpleNamespace(LRUPromptCache=LRUPromptCache, ModelProvider=_Provider)
        client = HandoffClient(home / "s", "bench", "bench 1", connect_budget_s=10.0)
        client.settings["offer_budget_s"] = 5.0
        memory = MemoryRule(lambda: MemoryReading(0, 1 << 40))
        self.installation = install(client=client, memory=memory, server=self.module)
        self.key = (str(home), None, None)
        self.installation.tiers.book.loaded(self.key, seen_files(self.key), _Provider(self.key), [KVCache()])
        self.cache = self.module.LRUPromptCache(entries)
        self.wrong = 0

    def wait_ready(self) -> None:
        client = self.installation.tiers.client
        while not client.wait_available(1.0) or any(model.state != "ready" for model in client._models):
            client.report_hot({})
            time.sleep(0.05)

    def serve(self, tokens: list[int]) -> None:
        """One request, as the server's generation thread handles it."""
        cache, rest = self.cache.fetch_nearest_cache(self.key, tokens)
        have = len(tokens) - len(rest)
        if have:
            self.wrong += wrong_rows(cache, tokens[:have])
        # A small model is quick: what was measured of it decides nothing here, so that vaults are used.
        self.installation.tiers.counters.prefills.clear()
        self.cache.insert_cache(self.key, tokens[:-1], computed(tokens[:-1]))

    def close(self) -> None:
        self.installation.remove(1.0)


# --- measuring ----------------------------------------------------------------------------------


def growth(samples: list[tuple[int, int]]) -> float:
    """MB that the memory grows in 100,000 requests, from a line through the second half of the samples."""
    half = np.array(samples[len(samples) // 2 :], np.float64)
    return float(np.polyfit(half[:, 0], half[:, 1], 1)[0]) * 100_000 / 1e6 if len(half) > 2 else 0.0


def replay(prompts: Iterator[list[int]], total: int, entries: int, vault_bytes: int, home: Path) -> dict[str, Any]:
    children = []
    try:
        kv, kv_port = start("vault", home, name="kv", role="kv-vault", max_bytes=vault_bytes, max_record_bytes=1 << 20)
        children.append(kv)
        agent, _ = start(
            "inference", home, name="agent", socket=str(home / "s"), kv_cold=[f"127.0.0.1:{kv_port}"],
            ssm_cold=[f"127.0.0.1:{kv_port}"], kv_codec="lossless", min_store_tokens=16, min_restore_tokens=16,
            handoff_bytes=32 << 20, break_even=False,
        )  # fmt: skip
        children.append(agent)
        engine = Engine(home, entries)
        engine.wait_ready()
        watched = {"engine": psutil.Process(), "agent": psutil.Process(agent.pid), "vault": psutil.Process(kv.pid)}
        seen: dict[str, list[tuple[int, int]]] = {name: [] for name in watched}
        every, began = max(1, total // 200), time.monotonic()
        for number, tokens in enumerate(prompts, 1):
            engine.serve(tokens)
            if number % every == 0:
                for name, process in watched.items():
                    seen[name].append((number, process.memory_info().rss))
            if number % max(1, total // 20) == 0:
                sizes = ", ".join(f"{name} {samples[-1][1] / 1e6:.0f} MB" for name, samples in seen.items())
                rate = number / (time.monotonic() - began)
                print(
                    f"{number:,} requests, {rate:.0f}/s, {sizes}, wrong rows {engine.wrong}",
                    file=sys.stderr,
                    flush=True,
                )
        seconds = time.monotonic() - began
        engine.installation.mover.drain(10)
        counters = engine.installation.tiers.counters
        result = {
            "requests": total, "seconds": seconds, "wrong_rows": engine.wrong, "hits": dict(counters.hits),
            "not_restored": dict(counters.not_restored), "refusals": dict(counters.refusals),
            "evictions": counters.evictions, "restored_tokens": counters.restored_tokens,
            "memory": {
                name: {
                    "tenth_bytes": samples[len(samples) // 10][1], "end_bytes": samples[-1][1],
                    "growth_mb_per_100k": growth(samples),
                }
                for name, samples in seen.items()
            },
        }  # fmt: skip
        engine.close()
        return result
    finally:
        for child in reversed(children):
            child.terminate()
        for child in children:
            child.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2_000, help="about 30 a second (2,000)")
    parser.add_argument("--trace", type=Path, default=None, help="a JSON-lines trace with hash_ids")
    parser.add_argument("--block", type=int, default=64, help="tokens that stand for one id of the trace")
    parser.add_argument("--entries", type=int, default=8, help="prompts that the engine's own cache holds")
    parser.add_argument("--vault-mib", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    total = options.requests
    prompts = from_trace(options.trace, total, options.block) if options.trace else conversations(total)
    with scratch_folder() as folder:
        os.environ["TIERKV_HOME"] = str(folder)
        result = replay(prompts, total, options.entries, options.vault_mib << 20, folder)
    if options.json:
        print(json.dumps({"schema": "tierkv.bench.replay/1", **result}))
        return
    print(f"{result['requests']:,} requests in {result['seconds']:.0f} s; wrong rows {result['wrong_rows']}")
    print(f"hits {result['hits']}, not restored {result['not_restored']}, refused {result['refusals']}")
    print(f"{'process':8} {'at a tenth':>12} {'at the end':>12} {'growth per 100,000':>20}")
    for name, each in result["memory"].items():
        tenth, end = each["tenth_bytes"] / 1e6, each["end_bytes"] / 1e6
        print(f"{name:8} {tenth:9.1f} MB {end:9.1f} MB {each['growth_mb_per_100k']:17.1f} MB")


if __name__ == "__main__":
    main()
