"""Which rows a Selector means, and what must stay because something that stays needs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.errors import UsageError
from tierkv.identity.blocks import KEY_BYTES, BlockKey, beginning_of
from tierkv.store.base import OtherIdentity, Selector
from tierkv.store.index import NONE, Index

MIN_PREFIX_BYTES = 4
MAX_OTHERS = 16
_TIERS = ("", "kv", "ssm")


def check_selector(selector: Selector) -> None:
    """Raises UsageError for a selector that cannot mean anything."""
    if selector.tier not in _TIERS:
        raise UsageError(f"unknown tier {selector.tier!r}; there are: kv, ssm")
    if any(len(prefix) < MIN_PREFIX_BYTES for prefix in selector.prefixes):
        raise UsageError(f"a prefix is named by at least the first {MIN_PREFIX_BYTES} bytes of its key")


def matches_header(selector: Selector, header: RecordHeader) -> bool:
    """Whether root, model and tier choose a record with this header."""
    return (
        selector.root in (b"", header.root)
        and selector.model in ("", header.model)
        and selector.tier in ("", header.kind.tier)
    )


def select(index: Index, selector: Selector, now_s: float) -> list[int]:
    """Rows in sight that the selector means, heads before tails. Raises UsageError."""
    check_selector(selector)
    if selector.prefixes:
        rows = np.array(used_only_by(index, leaves_named(index, selector.prefixes)), np.int64)
    else:
        rows = np.nonzero(index.in_sight())[0]
    return heads_first(index, _narrowed(index, selector, rows, now_s))


def leaves(index: Index, selector: Selector, now_s: float) -> list[int]:
    """The ends of the prefixes that the selector means: rows in sight without children. Raises UsageError."""
    check_selector(selector)
    if selector.prefixes:
        rows = np.array(leaves_named(index, selector.prefixes), np.int64)
    else:
        rows = np.nonzero(index.in_sight() & (index.column("first_child") == NONE))[0]
    return _narrowed(index, selector, rows, now_s)


def needed(index: Index, rows: Iterable[int]) -> set[int]:
    """The rows and all their ancestors: a chain without its head is useless."""
    found: set[int] = set()
    for row in rows:
        while row != NONE and row not in found:
            found.add(row)
            row = index.parent[row]
    return found


def younger_than(index: Index, age_s: float, now_s: float) -> list[int]:
    """Rows in sight that were used less than ``age_s`` ago."""
    return np.nonzero(index.in_sight() & (index.column("used_s") > now_s - age_s))[0].tolist()


def pinned(index: Index) -> list[int]:
    """Rows in sight that are pinned."""
    return np.nonzero(index.in_sight() & (index.column("pinned") != 0))[0].tolist()


def leaves_named(index: Index, prefixes: Sequence[bytes]) -> list[int]:
    """Rows without children whose key begins with one of these."""
    found = {index.find(BlockKey(prefix)) for prefix in prefixes} - {NONE}
    short = tuple(prefix for prefix in prefixes if len(prefix) < KEY_BYTES)
    if short:
        found.update(row for key, row in index.by_key.items() if key.startswith(short))
    return sorted(row for row in found if index.is_leaf(row))


def used_only_by(index: Index, ends: Sequence[int]) -> list[int]:
    """These leaves and every ancestor all of whose descendants are among what has been chosen already."""
    chosen: set[int] = set()
    missing_children: dict[int, int] = {}
    for end in ends:
        row = end
        while row != NONE and row not in chosen:
            chosen.add(row)
            row = index.parent[row]
            if row == NONE:
                break
            if row not in missing_children:
                missing_children[row] = sum(1 for _ in index.children_of(row))
            missing_children[row] -= 1
            if missing_children[row]:
                break
    return sorted(chosen)


def heads_first(index: Index, rows: list[int]) -> list[int]:
    """By position: a child starts where its parent ends."""
    return sorted(rows, key=lambda row: (index.start[row], row))


def _narrowed(index: Index, selector: Selector, rows: NDArray[np.int64], now_s: float) -> list[int]:
    mask = np.ones(len(rows), np.bool_)
    if selector.root or selector.model:
        good = index.facts_where(lambda f: selector.root in (b"", f.root) and selector.model in ("", f.model))
        mask &= np.isin(index.column("facts_id")[rows], np.array(good, np.uint32))
    if selector.tier:
        kinds = [kind for kind in RecordKind if kind.tier == selector.tier]
        mask &= np.isin(index.column("kind")[rows], np.array(kinds, np.uint8))
    if selector.older_than_s > 0:
        mask &= index.column("used_s")[rows] <= now_s - selector.older_than_s
    return rows[mask].tolist()


def same_beginning(index: Index, root: BlockKey, beginning: bytes) -> list[OtherIdentity]:
    """Identities other than ``root`` with a block in sight that begins a prompt so; at most 16, the fullest first."""
    if not beginning or not index.keys:
        return []
    heads = index.in_sight() & (index.column("start") == 0) & (index.column("kind") == int(RecordKind.BLOCK))
    numbers = index.column("facts_id")
    found: dict[BlockKey, str] = {}
    for row in np.nonzero(heads)[0].tolist():
        facts = index.facts_numbered(int(numbers[row]))
        if facts.root != root and facts.root not in found and beginning_of(index.tokens[row]) == beginning:
            found[facts.root] = facts.model
    counts = {other: _in_sight_of(index, other) for other in found}
    others = (OtherIdentity(other, found[other], counts[other]) for other in found)
    return sorted(others, key=lambda each: -each.records)[:MAX_OTHERS]


def _in_sight_of(index: Index, root: BlockKey) -> int:
    numbers = index.facts_where(lambda facts: facts.root == root)
    return int(np.count_nonzero(index.in_sight() & np.isin(index.column("facts_id"), numbers)))
