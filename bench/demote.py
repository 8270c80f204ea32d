"""What handing an entry over costs the engine's own thread, against one memcpy: ``tierkv bench demote [--json]``.

The real hook (``hooks.demote.HandOver``) and mover on real mlx-lm caches, evaluated beforehand as the engine does; the
agent is left out: the mover never gets to it, so that all that is handed over waits. The entries: a whole prompt, the
new tokens of a longer turn, the same where so much waits already that the mover's second thread copies each of them to
let go of its buffer (while the next is handed over, as long as that takes), and a hybrid's prompt with its recurrent
state. ``thread`` is all that the thread spends, ``copy`` the part after evaluation; ``memcpy`` copies the handed-over
bytes once into memory that is there already, with nothing beside it. Medians of a run in which the two alternate.
Target: copy <= 1.5 of memcpy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from _leaving import leave_with
from mlx_lm.models.cache import ArraysCache, KVCache
from numpy.typing import NDArray

from tierkv.handoff.client import Offer
from tierkv.handoff.mover import Mover
from tierkv.handoff.transfer import Transfer
from tierkv.hooks.counters import HotCounters
from tierkv.hooks.demote import HandOver
from tierkv.state.layout import Layout

BURST = 2


class Client:
    """An agent that wants everything from ``rows_from`` on, and takes nothing of it."""

    def __init__(self) -> None:
        self.rows_from, self.state = 0, False
        self.lock = threading.Lock()
        self.links = SimpleNamespace(demote=SimpleNamespace(lock=self.lock, channel=None))

    def offer(self, model: Any, tokens: Any, position: int, layout: Any, **_: Any) -> Offer:
        return Offer(1, model, position, self.rows_from, False, self.state)

    def dropped(self, transfer_id: int, reason: str) -> None:
        raise SystemExit(f"a transfer was dropped: {reason}")

    def report_hot(self, report: Any) -> None:
        pass

    def flush_outbox(self) -> None:
        pass


class Busy:
    """A real mover with ``waiting`` in its queue, of which nothing can be made smaller."""

    def __init__(self, waiting: NDArray[np.uint8]) -> None:
        self.client = Client()
        self.client.lock.acquire()
        self.taken: Any = None
        self.waiting_bytes = waiting.nbytes
        self.mover = Mover(self.client)  # type: ignore[arg-type]
        self.mover.submit(Transfer(self.client.offer(None, None, 0, None), Layout(()), {(0, 0): waiting}))

    def submit(self, transfer: Transfer) -> bool:
        self.taken = transfer
        return self.mover.submit(transfer)

    def settle(self, bytes_each: int, of: int) -> None:
        """Waits until the second thread has done what it does beside the engine: ``of`` entries are small."""
        while self.mover.pending_bytes > self.waiting_bytes + of * bytes_each:
            time.sleep(1e-3)

    def close(self) -> None:
        self.client.lock.release()
        assert self.mover.drain(10)
        self.mover.close()


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
    name: str, caches: list[Any], n: int, rows_from: int, repeat: int, *, state: bool = False, waiting_bytes: int = 0
) -> dict[str, Any]:
    """Entries come in bursts, with nothing of the engine's between them."""
    threads, copies, memcpys, size = [], [], [], 0
    ids, target, waiting = np.arange(n), np.ones(1, np.uint8), np.ones(waiting_bytes, np.uint8)
    for turn in range(-(-repeat // BURST) + 1):
        busy, counters = Busy(waiting), HotCounters()
        busy.client.rows_from, busy.client.state = rows_from, state
        over = HandOver(busy.client, busy, counters)  # type: ignore[arg-type]
        for _ in range(BURST):
            before = counters.copy_s
            began = time.perf_counter()
            assert over.hand_over(SimpleNamespace(id=0), ids, (), n, caches) == ""  # type: ignore[arg-type]
            took, copied = time.perf_counter() - began, counters.copy_s - before
            if turn:
                threads.append(took)
                copies.append(copied)
        parts = [np.ascontiguousarray(each) for each in (*busy.taken.rows.values(), *busy.taken.checkpoint.values())]
        size = sum(each.nbytes for each in parts)
        if waiting_bytes:
            busy.settle(size, BURST)
        source = np.concatenate([each.reshape(-1).view(np.uint8) for each in parts])
        if len(target) != size:
            target = np.ones(size, np.uint8)
        for _ in range(BURST):
            began = time.perf_counter()
            np.copyto(target, source)
            if turn:
                memcpys.append(time.perf_counter() - began)
        busy.close()
    thread_s, copy_s, memcpy_s = map(statistics.median, (threads, copies, memcpys))
    return {
        "entry": name, "bytes": size, "thread_s": thread_s, "copy_s": copy_s, "memcpy_s": memcpy_s,
        "copy_of_memcpy": copy_s / memcpy_s, "thread_of_memcpy": thread_s / memcpy_s,
        "worst_copy_of_memcpy": max(copies) / memcpy_s,
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
        measure("... and the mover is busy", rows, n, n - 512, options.repeat, waiting_bytes=300 << 20),
        measure("hybrid, float32", hybrid_cache(n, mx.float32), n, 0, options.repeat, state=True),
    ]
    if options.json:
        print(json.dumps({"schema": "tierkv.bench.demote/1", "tokens": n, "runs": runs}))
        return
    print(f"{'entry':<27}{'MB':>7}{'thread':>10}{'copy':>10}{'memcpy':>10}{'copy / memcpy':>15}{'worst':>7}")
    for run in runs:
        times = "".join(f"{run[name] * 1e3:>7.2f} ms" for name in ("thread_s", "copy_s", "memcpy_s"))
        ratios = f"{run['copy_of_memcpy']:>15.2f}{run['worst_copy_of_memcpy']:>7.2f}"
        print(f"{run['entry']:<27}{run['bytes'] / 1e6:>7.1f}{times}{ratios}")


if __name__ == "__main__":
    leave_with(main)
