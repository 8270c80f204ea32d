"""What handing an entry over costs the engine's own thread, against one memcpy: ``tierkv bench demote [--json]``.

The real hook (``hooks.demote.HandOver``) on real mlx-lm caches, evaluated beforehand as the engine does; the agent and
the mover are left out, since neither runs on that thread. The entries: a whole prompt, the new tokens of a longer
turn, the same when the mover has much to do (then they are copied at once), and a hybrid's prompt with its recurrent
state. ``thread`` is all that the thread spends, ``copy`` the part after evaluation; ``memcpy`` copies the handed-over
bytes once into memory that is there already. Medians of a run in which the two alternate. Target: copy <= 1.5 of
memcpy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from _leaving import leave_with
from mlx_lm.models.cache import ArraysCache, KVCache

from tierkv.handoff.client import Offer
from tierkv.hooks.counters import HotCounters
from tierkv.hooks.demote import HandOver


class Client:
    """An agent that wants everything from ``rows_from`` on."""

    def __init__(self, rows_from: int, state: bool) -> None:
        self.rows_from, self.state = rows_from, state

    def offer(self, model: Any, tokens: Any, position: int, layout: Any, **_: Any) -> Offer:
        return Offer(1, model, position, self.rows_from, False, self.state)

    def dropped(self, transfer_id: int, reason: str) -> None:
        raise SystemExit(f"a transfer was dropped: {reason}")


class Mover:
    def __init__(self, behind: bool) -> None:
        self.taken: Any = None
        self.behind = behind

    def is_behind(self, more_bytes: int) -> bool:
        return self.behind

    def submit(self, transfer: Any) -> bool:
        self.taken = transfer
        return True


def rows_cache(layers: int, heads: int, n: int, dtype: mx.Dtype) -> list[Any]:
    caches: list[Any] = []
    for _ in range(layers):
        cache = KVCache()
        cache.update_and_fetch(*(mx.random.normal((1, heads, n, 64)).astype(dtype) for _ in range(2)))
        caches.append(cache)
    mx.eval([cache.state for cache in caches])
    return caches


def hybrid_cache(n: int, dtype: mx.Dtype) -> list[Any]:
    caches: list[Any] = rows_cache(2, 2, n, dtype)
    for _ in range(6):
        state = ArraysCache(2)
        state[0], state[1] = mx.random.normal((1, 3, 1024)), mx.random.normal((1, 8, 64, 64))
        mx.eval(state[0], state[1])
        caches.append(state)
    return caches


def measure(
    name: str, caches: list[Any], n: int, rows_from: int, repeat: int, *, state: bool = False, behind: bool = False
) -> dict[str, Any]:
    counters, mover = HotCounters(), Mover(behind)
    over = HandOver(Client(rows_from, state), mover, counters)  # type: ignore[arg-type]
    ids = np.arange(n)
    threads, copies, memcpys, size = [], [], [], 0
    target = np.ones(1, np.uint8)
    for turn in range(repeat + 1):
        before = counters.copy_s
        began = time.perf_counter()
        assert over.hand_over(SimpleNamespace(id=0), ids, (), n, caches) == ""  # type: ignore[arg-type]
        took, copied = time.perf_counter() - began, counters.copy_s - before
        given = [*mover.taken.rows.values(), *mover.taken.checkpoint.values()]
        parts = [np.ascontiguousarray(each) for each in given]
        size = sum(each.nbytes for each in parts)
        source = np.concatenate([each.reshape(-1).view(np.uint8) for each in parts])
        if len(target) != size:
            target = np.ones(size, np.uint8)
        began = time.perf_counter()
        np.copyto(target, source)
        memcpy = time.perf_counter() - began
        if turn:
            threads.append(took)
            copies.append(copied)
            memcpys.append(memcpy)
    thread_s, copy_s, memcpy_s = map(statistics.median, (threads, copies, memcpys))
    return {
        "entry": name, "bytes": size, "thread_s": thread_s, "copy_s": copy_s, "memcpy_s": memcpy_s,
        "copy_of_memcpy": copy_s / memcpy_s, "thread_of_memcpy": thread_s / memcpy_s,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    n = options.tokens
    rows = rows_cache(30, 3, n, mx.bfloat16)
    runs = [
        measure("whole prompt, bfloat16", rows, n, 0, options.repeat),
        measure("the last 512 tokens", rows, n, n - 512, options.repeat),
        measure("... and the mover is busy", rows, n, n - 512, options.repeat, behind=True),
        measure("hybrid, float32", hybrid_cache(n, mx.float32), n, 0, options.repeat, state=True),
    ]
    if options.json:
        print(json.dumps({"schema": "tierkv.bench.demote/1", "tokens": n, "runs": runs}))
        return
    print(f"{'entry':<27}{'MB':>7}{'thread':>10}{'copy':>10}{'memcpy':>10}{'copy / memcpy':>15}")
    for run in runs:
        times = "".join(f"{run[name] * 1e3:>7.2f} ms" for name in ("thread_s", "copy_s", "memcpy_s"))
        print(f"{run['entry']:<27}{run['bytes'] / 1e6:>7.1f}{times}{run['copy_of_memcpy']:>15.2f}")


if __name__ == "__main__":
    leave_with(main)
