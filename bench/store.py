"""The RAM store against memcpy, its bookkeeping, and the memory of its index: ``python bench/store.py [--json]``.

Ratios come from alternating rounds of one run, so that a busy machine slows both sides. Targets: put >= 0.4 of memcpy,
get >= 0.5, bookkeeping <= 5 us an operation, index <= 400 bytes a record beyond the token ids.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from _leaving import leave_with
from _records import MIB, ROOT, copy_all, get_all, header_of, make_record, put_all

from tierkv.codec.record import RecordHeader
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey
from tierkv.store.base import Selector
from tierkv.store.catalog import Catalog
from tierkv.store.clock import SystemClock
from tierkv.store.policy import POLICIES, Policy, policy_named
from tierkv.store.prefixes import describe
from tierkv.store.ram import RamStore
from tierkv.store.select import leaves


@dataclass(frozen=True)
class Throughput:
    shape: str
    record_bytes: int
    segments: int
    memcpy_bytes_per_s: float
    put_bytes_per_s: float
    get_bytes_per_s: float
    put_ratio: float
    get_ratio: float


@dataclass(frozen=True)
class Bookkeeping:
    policy: str
    operation: str
    us: float


def throughput(shape: str, segments: int, segment_bytes: int, rounds: int, total: int) -> Throughput:
    """Rates of one record shape through a full arena: every put evicts, every page has been touched before."""
    size = len(make_record(0, segments, segment_bytes))
    records = [make_record(number, segments, segment_bytes) for number in range(max(2, 2 * total // size))]
    store = RamStore(total, max_record_bytes=total)
    target = np.ones(total, np.uint8)
    keys = [RecordHeader.unpack_frame(record)[0].key for record in records]
    batch = max(1, total // size // 2)
    times: dict[str, list[float]] = {"memcpy": [], "put": [], "get": []}
    cursor = 0
    for each in range(rounds + 3):
        chosen = [(cursor + i) % len(records) for i in range(batch)]
        cursor += batch
        batch_records = [records[i] for i in chosen]
        spent = {
            "memcpy": timed(partial(copy_all, target, batch_records)),
            "put": timed(partial(put_all, store, batch_records)),
            "get": timed(partial(get_all, store, [keys[i] for i in chosen])),
        }
        if each >= 3:
            for name, seconds in spent.items():
                times[name].append(seconds)
    moved = batch * size
    put_ratio = statistics.median(m / p for m, p in zip(times["memcpy"], times["put"], strict=True))
    get_ratio = statistics.median(m / g for m, g in zip(times["memcpy"], times["get"], strict=True))
    rates = [moved / statistics.median(times[name]) for name in ("memcpy", "put", "get")]
    return Throughput(shape, size, segments, *rates, put_ratio, get_ratio)


def timed(work: Callable[[], object]) -> float:
    """Seconds of this thread's own processor time: other people's load does not count."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def chain_headers(count: int, blocks: int = 100) -> list[RecordHeader]:
    """Headers of ``count`` blocks in chains of ``blocks``."""
    headers: list[RecordHeader] = []
    parent = ROOT
    for number in range(count):
        depth = number % blocks
        header = header_of(number, ROOT if depth == 0 else parent, depth * BLOCK_TOKENS, 60, 3_000_000, 6_000_000)
        parent = header.key
        headers.append(header)
    return headers


def bookkeeping(count: int, policy: str) -> list[Bookkeeping]:
    """Time of each operation on an index of ``count`` records; "policy alone" is one of the four of a record's life."""
    headers = chain_headers(count)
    keys = [BlockKey(bytes(bytearray(header.key))) for header in headers]
    catalog = Catalog(SystemClock(), policy_named(policy), 0.0, lambda _: None)
    found: list[Bookkeeping] = []

    def note(operation: str, seconds: float, operations: int) -> None:
        found.append(Bookkeeping(policy, operation, seconds / operations * 1e6))

    publish = [(header, header.segment_bytes + 15_000) for header in headers]
    note("publish", timed(lambda: [catalog.publish(h, size_bytes=s, charge=48, place=0) for h, s in publish]), count)
    rows = [catalog.index.find(key) for key in keys]
    note("find and use", timed(lambda: [catalog.use(catalog.index.find(key), hit=True) for key in keys]), count)
    note("open and close", timed(lambda: [(catalog.open(row), catalog.close(row)) for row in rows]), count)
    note("lease", timed(lambda: catalog.lease(keys, 0.0)), count)
    note("lease ends", timed(catalog.expire_leases), count)
    note("entry with header", timed(lambda: [catalog.entry(row) for row in rows]), count)
    note("list prefixes, a record", timed(lambda: list_prefixes(catalog)), count)
    sample = count // 2
    note("evict", timed(lambda: catalog.evict(48 * sample)), sample)
    note("policy alone", timed(lambda: live(policy_named(policy), count)), 4 * count)
    return found


def list_prefixes(catalog: Catalog) -> None:
    ends = leaves(catalog.index, Selector(), catalog.clock.monotonic())
    describe(catalog.index.snapshot(), ends, catalog.to_unix_s)


def live(policy: Policy, count: int) -> None:
    """Every row is admitted, offered, used once more and given up."""
    for row in range(count):
        policy.admitted(row, row.to_bytes(8, "little"))
        policy.offered(row)
    for row in range(count):
        policy.used(row)
    while (row := policy.victim(lambda _: True)) is not None:
        policy.gone(row)


def index_bytes(count: int) -> tuple[float, float]:
    """Bytes a record beyond the token ids: measured by tracemalloc, and as ``StoreStats.index_bytes`` says."""
    frames = [header.pack_frame() for header in chain_headers(count)]
    gc.collect()
    tracemalloc.start()
    catalog = Catalog(SystemClock(), policy_named("lru"), 0.0, lambda _: None)
    for frame in frames:
        header, frame_bytes = RecordHeader.unpack_frame(frame)
        catalog.publish(header, size_bytes=header.segment_bytes + frame_bytes, charge=48, place=0)
    del header, frame
    gc.collect()
    measured = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    ids = count * BLOCK_TOKENS * 8
    return (measured - ids) / count, (catalog.index.memory_bytes - ids) / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    options = parser.parse_args()
    rounds, total, count = (5, 96 * MIB, 10_000) if options.quick else (21, 384 * MIB, 100_000)
    shapes = [
        throughput("60 segments of 48 KiB", 60, 48 << 10, rounds, total),
        throughput("16 segments of 64 KiB", 16, 64 << 10, rounds, total),
        throughput("64 segments of 256 KiB", 64, 256 << 10, rounds, total),
    ]
    operations = [each for policy in POLICIES for each in bookkeeping(count, policy)]
    measured, estimated = index_bytes(count)
    if options.json:
        document = {
            "schema": "tierkv.bench.store/1",
            "throughput": [asdict(shape) for shape in shapes],
            "bookkeeping": [asdict(operation) for operation in operations],
            "index": {"records": count, "bytes_per_record": measured, "estimated_bytes_per_record": estimated},
        }
        print(json.dumps(document, indent=2))
        return 0
    print(f"{'record':<26}{'memcpy GB/s':>12}{'put GB/s':>10}{'get GB/s':>10}{'put/memcpy':>12}{'get/memcpy':>12}")
    for shape in shapes:
        rates = (shape.memcpy_bytes_per_s, shape.put_bytes_per_s, shape.get_bytes_per_s)
        print(
            f"{shape.shape:<26}{rates[0] / 1e9:>12.2f}{rates[1] / 1e9:>10.2f}{rates[2] / 1e9:>10.2f}"
            f"{shape.put_ratio:>12.2f}{shape.get_ratio:>12.2f}"
        )
    print(f"\nbookkeeping at {count} records")
    for operation in operations:
        print(f"  {operation.policy:<8}{operation.operation:<24}{operation.us:>8.2f} us")
    print(f"\nindex, beyond the token ids: {measured:.0f} bytes a record ({estimated:.0f} by its own estimate)")
    return 0


if __name__ == "__main__":
    leave_with(main)
