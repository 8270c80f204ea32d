"""The store on disk against SQLite, memcpy and dd, its start with 100,000 records, and the memory of its index.

``tierkv bench vault-disk [--quick] [--json]``. Ratios come from alternating rounds of one run. Wanted: put >= 3x SQLite
blobs of the same sizes; get of what is in memory >= 0.5 of memcpy; 100 MB read cold >= 0.7 of dd of the same file;
100,000 records open with hints in <= 1 s; policy bookkeeping <= 5 us; index <= 400 bytes a record beyond the token ids.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _records import MESSAGE_BYTES, MIB, ROOT, copy_all, get_all, header_of, make_record, put_all
from _scratch import scratch_folder

from tierkv.codec.record import RecordHeader
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey
from tierkv.rpc.outgo import Outgo
from tierkv.store.disk import DiskStore
from tierkv.store.disk_options import DiskOptions
from tierkv.store.log.files import Disk
from tierkv.store.log.folder import Folder
from tierkv.store.log.format import SegmentHead, entry_blocks, pack_slot
from tierkv.store.log.hints import ROW, Hint, pack_hint
from tierkv.store.log.loading import HintMaker
from tierkv.store.policy import POLICIES


def open_store(folder: Path, **values: object) -> DiskStore:
    options = {"disk_bytes": 4 << 30, "ram_bytes": 128 * MIB, "min_free_bytes": 0, **values}
    return DiskStore(folder, DiskOptions(**options), load_in_background=False)  # type: ignore[arg-type]


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def open_all(store: DiskStore, keys: list[BlockKey]) -> None:
    for key in keys:
        reader = store.open(key)
        assert reader is not None
        reader.close()


def serve_all(store: DiskStore, keys: list[BlockKey]) -> None:
    outgo = Outgo(store, keys, MESSAGE_BYTES, lambda: None, lambda _: None)
    while messages := outgo.next_messages():
        for message in messages:
            message.encoded()
    outgo.close()


class Sqlite:
    """Blobs in SQLite as one would: write-ahead log, 64 KiB pages, synchronous=NORMAL, a commit for each record."""

    def __init__(self, path: Path) -> None:
        self.base = sqlite3.connect(path)
        self.base.executescript("PRAGMA page_size=65536; PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;")
        self.base.execute("CREATE TABLE records (key BLOB PRIMARY KEY, data BLOB)")

    def put_all(self, keys: list[BlockKey], records: list[bytes]) -> None:
        for key, record in zip(keys, records, strict=True):
            self.base.execute("INSERT OR REPLACE INTO records VALUES (?, ?)", (key, record))
            self.base.commit()


def throughput(folder: Path, rounds: int, batch: int) -> dict[str, float]:
    records = [make_record(number) for number in range(rounds * batch)]
    keys = [RecordHeader.unpack_frame(record)[0].key for record in records]
    store, small = open_store(folder / "v"), open_store(folder / "s", ram_bytes=2 * MIB)
    base = Sqlite(folder / "sqlite")
    target = np.ones(sum(map(len, records[:batch])), np.uint8)
    times: dict[str, list[float]] = {name: [] for name in ("memcpy", "put", "sqlite", "get_arena", "get_page_cache")}
    for turn in range(rounds):
        chosen = slice(turn * batch, (turn + 1) * batch)
        times["memcpy"].append(timed(lambda c=chosen: copy_all(target, records[c])))
        times["put"].append(timed(lambda c=chosen: put_all(store, records[c])))
        times["sqlite"].append(timed(lambda c=chosen: base.put_all(keys[c], records[c])))
        times["get_arena"].append(timed(lambda c=chosen: get_all(store, keys[c])))
        put_all(small, records[chosen])
        times["get_page_cache"].append(timed(lambda c=chosen: get_all(small, keys[c])))
    store.close()
    small.close()
    moved = sum(map(len, records[:batch]))

    def ratio(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(times[other], times[name], strict=True))

    found = {f"{name}_bytes_per_s": moved / statistics.median(each) for name, each in times.items()}
    return {
        **found,
        "put_over_sqlite": ratio("put", "sqlite"),
        "get_arena_over_memcpy": ratio("get_arena", "memcpy"),
        "get_page_cache_over_memcpy": ratio("get_page_cache", "memcpy"),
    }


def acknowledging(folder: Path, rounds: int) -> dict[str, float]:
    """How much sooner durability "none" acknowledges than "batched", in bursts that it is never further behind with."""
    records = [make_record(number) for number in range(rounds * 32)]
    stores = {name: open_store(folder / name, ram_bytes=512 * MIB, durability=name) for name in ("batched", "none")}
    for store in stores.values():
        while not store._arena.prepare(512 * MIB):
            pass
    times: dict[str, list[float]] = {name: [] for name in stores}
    for turn in range(rounds):
        burst = records[turn * 32 : turn * 32 + 32]
        for name, store in stores.items():
            times[name].append(timed(lambda s=store, burst=burst: put_all(s, burst)))
            while store.stats().disk.unsynced_bytes and name == "batched":
                time.sleep(0.05)
            store._write_behind()
    for store in stores.values():
        store.close()
    return {
        "put_none_over_batched": statistics.median(a / b for a, b in zip(times["batched"], times["none"], strict=True))
    }


def cold(folder: Path, rounds: int) -> dict[str, float]:
    """100 MB restored with nothing of the file in the page cache, against dd of it.

    Opened (the record is in memory then); served (also checked to its last byte and put into messages, as it leaves for
    the wire); and opened before the vault has had its memory ready, which it has a second after its start.
    """
    records = [make_record(number) for number in range(95)]
    keys = [RecordHeader.unpack_frame(record)[0].key for record in records]
    store = open_store(folder / "c")
    put_all(store, records)
    store.close()
    path = folder / "c" / "00000001.seg"
    block = ["dd", f"if={path}", "of=/dev/null", "bs=1M"]
    times: dict[str, list[float]] = {"dd": [], "cold": [], "cold_served": [], "cold_and_fresh_memory": []}
    for _ in range(rounds):
        for name in times:
            store = open_store(folder / "c")
            while name != "cold_and_fresh_memory" and not store._arena.prepare():
                pass
            forget(path)
            if name == "dd":
                times[name].append(timed(lambda: subprocess.run(block, check=True, capture_output=True)))
            else:
                read = serve_all if name == "cold_served" else open_all
                times[name].append(timed(lambda s=store, read=read: read(s, keys)))
            store.close()
    size = sum(map(len, records))
    found = {f"{name}_bytes_per_s": size / statistics.median(each) for name, each in times.items()}
    for name in ("cold", "cold_served", "cold_and_fresh_memory"):
        found[f"{name}_over_dd"] = statistics.median(b / a for a, b in zip(times[name], times["dd"], strict=True))
    return found


def forget(path: Path) -> None:
    """The file is on the disk and nothing of it in memory."""
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def start(folder: Path, count: int) -> dict[str, float]:
    """A folder of ``count`` records in chains of 100, its data sparse, its hints real: how long it takes to open."""
    path = folder / "many"
    base = Folder(path, Disk())
    per_segment, size = 250, 1_070_000
    blocks = entry_blocks(size)
    parent, number = ROOT, 0
    for segment in range(1, count // per_segment + 1):
        maker = HintMaker()
        for place in range(per_segment):
            depth = number % 100
            header = header_of(
                number, ROOT if depth == 0 else parent, depth * BLOCK_TOKENS, 16, size - 15_000, 16 * (64 << 10)
            )
            maker.add(header, 1 + place * blocks, size, 0.0, False)
            parent, number = header.key, number + 1
        end = 1 + per_segment * blocks
        head = bytearray(SegmentHead(segment, 0, 0.0).pack())
        head[64:88] = pack_slot(1, closed=True)
        with base.segment_path(segment).open("wb") as file:
            file.write(head)
            file.truncate(end * 4096)
        hint: Hint = maker.hint()
        base.hint_path(segment).write_bytes(b"".join(pack_hint(hint, segment=segment, generation=1, end_block=end)))
    base.close()
    gc.collect()
    took = []
    for _ in range(3):
        began = time.perf_counter()
        store = open_store(path, disk_bytes=1 << 40)
        took.append(time.perf_counter() - began)
        assert store.stats().records == count
        claimed = (store.stats().index_bytes - count * BLOCK_TOKENS * 8) / count
        store._log.close()
        store._folder.close()
        del store
        gc.collect()
    tracemalloc.start()
    store = open_store(path, disk_bytes=1 << 40)
    gc.collect()
    measured = (tracemalloc.get_traced_memory()[0] - count * BLOCK_TOKENS * 8) / count
    tracemalloc.stop()
    store._log.close()
    store._folder.close()
    assert ROW.itemsize
    return {
        "records": count,
        "open_s": min(took),
        "index_bytes_a_record": measured,
        "index_bytes_a_record_as_told": claimed,
    }


def bookkeeping(count: int) -> dict[str, float]:
    """Of a record's life, which is admitted, offered, used and given up, as seconds of this thread's own time."""
    found = {}
    for name, make in POLICIES.items():
        policy = make()
        keys = [number.to_bytes(8, "little") for number in range(count)]
        began = time.thread_time()
        for row, key in enumerate(keys):
            policy.admitted(row, key)
            policy.offered(row)
        for row in range(count):
            policy.used(row)
        while (row := policy.victim(lambda _: True)) is not None:
            policy.gone(row)
        found[f"{name}_us_an_operation"] = (time.thread_time() - began) / (4 * count) * 1e6
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure (default: where temporary files are, which may be memory)"
    )
    options = parser.parse_args()
    rounds, batch, count = (5, 32, 10_000) if options.quick else (9, 64, 100_000)
    with scratch_folder(options.folder) as folder:
        found = {
            **throughput(folder, rounds, batch),
            **acknowledging(folder, rounds),
            **cold(folder, 3 if options.quick else 5),
            **start(folder, count),
            **bookkeeping(count),
        }
    if options.json:
        print(json.dumps({"schema": "tierkv.bench.vault-disk/1", **found}, indent=2))
    else:
        for name, value in found.items():
            shown = f"{value / 1e9:.2f} GB/s" if name.endswith("_per_s") else f"{value:,.2f}"
            print(f"{name:<32}{shown:>16}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
