"""Stores on disk for the tests: small segments, a clock of the test's own, and an end without a farewell."""

from __future__ import annotations

import os
from pathlib import Path

from store_records import FakeClock

from tierkv.store.disk import DiskStore
from tierkv.store.disk_options import DiskOptions
from tierkv.store.log.files import Disk

KIB, MIB = 1 << 10, 1 << 20


def open_store(path: Path, *, clock: FakeClock | None = None, disk: Disk | None = None, **options) -> DiskStore:
    """A store of 8 MiB in segments of 1 MiB with an arena of 1 MiB in pages of 4 KiB, loaded before this returns.

    It syncs what it is asked to sync, but nothing by the clock.
    """
    background = options.pop("load_in_background", False)
    values = {
        "disk_bytes": 8 * MIB, "ram_bytes": MIB, "segment_bytes": MIB, "min_free_bytes": 0, "page_bytes": 4096,
        "durability": "batched", "sync_s": 1e6, "sync_bytes": 1 << 60, **options,
    }  # fmt: skip
    return DiskStore(path, DiskOptions(**values), clock=clock or FakeClock(), disk=disk, load_in_background=background)


def abandon(store: DiskStore) -> None:
    """As if the process had been killed: descriptors are closed, nothing more is written."""
    store._keeper.stop()
    if store._behind is not None:
        store._behind.stop()
    if store._syncer is not None:
        store._syncer.stop()
    store._log.close()
    store._folder.close()


def on_disk(path: Path) -> int:
    """Bytes that the folder's files take, as du counts them."""
    return sum(each.stat().st_blocks * 512 for each in path.iterdir())


def flip(path: Path, offset: int, mask: int = 0x10) -> None:
    """One bit of the file is wrong."""
    fd = os.open(path, os.O_RDWR)
    byte = os.pread(fd, 1, offset)[0]
    os.pwrite(fd, bytes([byte ^ mask]), offset)
    os.close(fd)
