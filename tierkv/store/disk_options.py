"""What a store on disk is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tierkv.store.arena import PAGE_BYTES

Durability = Literal["none", "batched", "always"]
"""Whether an acknowledged record is synced never, within ``sync_s`` and ``sync_bytes``, or before it is acknowledged.

With "batched" and "always" it has been written before: a process that is killed loses nothing that it acknowledged.
With "none" it is acknowledged from RAM and written behind: a process that is killed loses what was not written yet, at
most 64 MiB or a quarter of ``ram_bytes``.
"""


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """``disk_bytes``: what the folder may take on the disk, all files together. ``ram_bytes``: the arena's size.

    ``sync_bytes``, ``sync_s``: with durability "batched", what a power failure may cost at most. ``min_free_bytes``
    stay free on the file system. ``dead_after_s``: identities not used for so long leave first (0: never).
    """

    disk_bytes: int
    ram_bytes: int = 256 << 20
    max_record_bytes: int = 1 << 30
    durability: Durability = "batched"
    sync_bytes: int = 64 << 20
    sync_s: float = 0.2
    min_free_bytes: int = 1 << 30
    dead_after_s: float = 0.0
    undo_s: float = 60.0
    ttl_s: float = 0.0
    policy: str = "lru"
    segment_bytes: int = 256 << 20
    compact_bytes_per_s: int = 32 << 20
    page_bytes: int = PAGE_BYTES
