"""EXO's ``KVPrefixCache`` as it is built, found out by looking at it, and one entry of it.

EXO keeps an entry as one slot in each of several lists. Which lists there are, what the methods take and how long an
answer is has changed since February 2026, and the version's number does not say so: only what is there is looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from tierkv.errors import UnsupportedState
from tierkv.handoff.client import Media
from tierkv.hooks.prompt_tokens import Ids

CLASS = "KVPrefixCache"
REQUIRED_LISTS = frozenset({"prompts", "caches", "_snapshots", "_last_used"})
OPTIONAL_LISTS = frozenset({"_media_regions", "prefill_tps"})
# The parameters that the hook reads, in the order in which EXO takes them.
PARAMETERS = {
    "add_kv_cache": ("prompt_tokens", "cache"),
    "update_kv_cache": ("index", "prompt_tokens", "cache", "snapshots", "restore_pos"),
    "get_kv_cache": ("model", "prompt_tokens"),
    "_evict_if_needed": (),
    "get_memory_used_percentage": (),
}
MODULE_NAMES = (
    "_MEMORY_THRESHOLD", "get_memory_used_percentage", "make_kv_cache", "has_non_kv_caches", "snapshot_ssm_states",
)  # fmt: skip
MAX_HASH_BYTES = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """What this EXO's prefix cache has beyond what every one has."""

    lists: frozenset[str]
    get_parameters: tuple[str, ...]

    @classmethod
    def of(cls, module: ModuleType) -> Shape:
        """Raises UnsupportedState, naming what is strange, unless the hook knows how such a cache works."""
        missing = [name for name in (CLASS, *MODULE_NAMES) if not hasattr(module, name)]
        if missing:
            raise UnsupportedState("engine_version", f"this EXO's cache module has no {', '.join(missing)}")
        cache_class: Any = getattr(module, CLASS)
        for name, wanted in PARAMETERS.items():
            method = getattr(cache_class, name, None)
            said = tuple(inspect.signature(method).parameters)[1:] if callable(method) else None
            if said is None or said[: len(wanted)] != wanted:
                raise UnsupportedState("engine_version", f"this EXO's {CLASS}.{name} takes {said}, not {wanted}")
        held = vars(cache_class(None))
        # Whatever else holds several things may know entries by their place, which the hook changes.
        many = frozenset(name for name, value in held.items() if isinstance(value, Collection))
        many -= {name for name, value in held.items() if isinstance(value, str | bytes)}
        lists = frozenset(name for name in many if isinstance(held[name], list))
        strange = many - REQUIRED_LISTS - OPTIONAL_LISTS
        if strange or not lists >= REQUIRED_LISTS or not isinstance(held.get("_access_counter"), int):
            raise UnsupportedState("engine_version", f"this EXO's {CLASS} keeps its entries in {sorted(many)}")
        return cls(lists, tuple(inspect.signature(cache_class.get_kv_cache).parameters)[1:])


@dataclass(frozen=True, slots=True)
class Entry:
    """One slot of all lists. ``prompt``: mx.array [n] of token ids; the cache stands at n - 2 after EXO's prefill."""

    prompt: Any
    cache: Sequence[Any]
    snapshots: Sequence[Any]
    regions: Sequence[Any]

    @property
    def ids(self) -> Ids:
        return ids_of(self.prompt)


def ids_of(prompt: Any) -> Ids:
    return np.asarray(prompt.tolist(), dtype=np.int64)


def entry_at(cache: Any, index: int) -> Entry:
    regions = getattr(cache, "_media_regions", None)
    return Entry(
        cache.prompts[index],
        cache.caches[index],
        cache._snapshots[index] or (),
        regions[index] if regions else (),
    )


def whole(cache: Any, shape: Shape) -> bool:
    """Whether every list has one slot an entry; whatever broke that, the hook keeps its hands off."""
    return len({len(getattr(cache, name)) for name in shape.lists}) == 1


def insert(cache: Any, shape: Shape, at: int, entry: Entry, prefill_tps: float) -> None:
    """The entry is the newest of the cache, in slot ``at``."""
    cache._access_counter += 1
    slots = {
        "prompts": entry.prompt,
        "caches": entry.cache,
        "_snapshots": list(entry.snapshots) or None,
        "_media_regions": list(entry.regions),
        "_last_used": cache._access_counter,
        "prefill_tps": prefill_tps,
    }
    for name in shape.lists:
        getattr(cache, name).insert(at, slots[name])


def remove(cache: Any, shape: Shape, at: int) -> None:
    for name in shape.lists:
        getattr(cache, name).pop(at)


def entry_bytes(cache: Any, index: int) -> int:
    """What the arrays of an entry and of its snapshots take; arrays shared with others count in full."""
    states = [state for snapshot in cache._snapshots[index] or () for state in snapshot.states if state is not None]
    return sum(_layer_bytes(layer) for layer in (*cache.caches[index], *states))


def _layer_bytes(layer: Any) -> int:
    """The arrays that a layer's cache holds, at any depth; classes differ in whether they say it themselves."""
    found, todo, seen = 0, [layer], set[int]()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, list | tuple):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif hasattr(item, "nbytes") and hasattr(item, "dtype"):
            found += int(item.nbytes)
        else:
            todo.extend(getattr(item, "__dict__", {}).values())
            todo.extend(getattr(item, name, None) for name in getattr(type(item), "__slots__", ()))
    return found


def media_of(regions: Sequence[Any], before: int) -> tuple[Media, ...]:
    """EXO's media regions that start before ``before`` as the hand-off names them."""
    return tuple(
        Media(int(each.start_pos), int(each.end_pos) - int(each.start_pos), _hash(each.content_hash))
        for each in sorted(regions, key=lambda region: region.start_pos)
        if each.start_pos < before
    )


def _hash(text: Any) -> bytes:
    raw = str(text)
    try:
        digest = bytes.fromhex(raw)
    except ValueError:
        digest = raw.encode()
    if len(digest) <= MAX_HASH_BYTES:
        return digest
    import hashlib

    return hashlib.blake2b(digest).digest()


def inside_region(regions: Sequence[Any], position: int) -> bool:
    """Whether rows before ``position`` belong to an image that ends behind it: they depend on tokens to come."""
    return any(each.start_pos < position < each.end_pos for each in regions)
