"""Keys of tierkv.toml that an agent takes over while it runs, and what a change of them would evict at once."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tierkv.store.base import Shrinking, Store, StoreStats
from tierkv.telemetry.snapshot import NodeSnapshot
from tierkv.units import format_size


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What would leave at once; ``note`` says it for people."""

    evict_bytes: int = 0
    evict_prefixes: int = 0
    note: str = ""


def _always(_: Any) -> str:
    return ""


def _nothing(_: Any) -> WhatIf | None:
    return None


@dataclass(frozen=True, slots=True)
class LiveKey:
    """``set`` takes a checked value over, or raises Refused and leaves everything as it was.

    ``why_not`` says why a value needs a restart, "" where it does not.
    """

    set: Callable[[Any], Awaitable[None] | None]
    what_if: Callable[[Any], WhatIf | None] = _nothing
    why_not: Callable[[Any], str] = _always


class Shrinkable(Protocol):
    """A store whose cap can be lowered while it runs."""

    def stats(self) -> StoreStats: ...

    def would_evict(self, cap_bytes: int) -> Shrinking: ...


def store_keys(store: Store, prefix: str = "vault") -> dict[str, LiveKey]:
    """The live keys of a vault's store; a store that cannot be adjusted has none."""
    adjust: Callable[..., None] | None = getattr(store, "adjust", None)
    most_bytes: int = getattr(store, "set_aside_bytes", 0)
    if adjust is None:
        return {}
    shrinkable = cast("Shrinkable", store)

    def too_much(value: int) -> str:
        return f"only {format_size(most_bytes)} were set aside at the start" if value > most_bytes else ""

    on_disk = store.stats().disk is not None
    cap, why_not = (f"{prefix}.disk_bytes", _always) if on_disk else (f"{prefix}.max_bytes", too_much)
    return {
        cap: LiveKey(lambda value: adjust(cap_bytes=value), lambda value: shrinking(shrinkable, value), why_not),
        f"{prefix}.undo_s": LiveKey(lambda value: adjust(undo_s=value)),
        f"{prefix}.ttl_s": LiveKey(lambda value: adjust(ttl_s=value)),
        f"{prefix}.dead_after_s": LiveKey(lambda value: adjust(dead_after_s=value)),
        f"{prefix}.policy": LiveKey(store.set_policy),
    }


def shrinking(store: Shrinkable, cap_bytes: int) -> WhatIf:
    """What a smaller cap would evict, as the store itself works it out."""
    found = store.would_evict(cap_bytes)
    if found.refused:
        return WhatIf(note="would be refused: too much is pinned, leased or being read")
    purged = f"{format_size(found.purged_bytes)} of purged records are beyond undo then" if found.purged_bytes else ""
    if not found.records:
        return WhatIf(note=purged or f"{format_size(store.stats().size_bytes)} are in use: nothing is evicted")
    count = f"{found.prefixes} prefix" + ("" if found.prefixes == 1 else "es")
    note = f"would evict {format_size(found.bytes)}, {count} now" + (f"; {purged}" if purged else "")
    return WhatIf(found.bytes, found.prefixes, note)


def lower_threshold(snapshot: NodeSnapshot, fraction: float) -> WhatIf:
    """What the engines of an agent would evict at that mark; how many prefixes follows from their mean size."""
    memory = snapshot.memory
    excess = math.ceil(memory.used_bytes - fraction * memory.total_bytes)
    hot = next((tier for tier in snapshot.tiers if tier.name == "hot"), None)
    if not memory.total_bytes or excess <= 0:
        return WhatIf(note=f"memory is {memory.used_fraction:.0%} used: nothing is evicted")
    if hot is None or not hot.records:
        return WhatIf(note="memory is above that mark, but no engine has a cache to evict")
    each = hot.size_bytes / hot.records
    evictable = hot.size_bytes - each
    if excess > evictable:
        return WhatIf(note=f"cannot be reached: {format_size(memory.used_bytes - hot.size_bytes)} are not cache")
    count = math.ceil(excess / each) if each else 0
    what = f"{count} prefix" + ("" if count == 1 else "es")
    return WhatIf(excess, count, f"would evict {format_size(excess)}, {what} now")
