"""From a segment's files to rows of an index: by its hint where that counts, else by its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierkv.codec.record import RecordHeader
from tierkv.errors import BadFrame
from tierkv.identity.blocks import BlockKey
from tierkv.store.catalog import Catalog
from tierkv.store.facts import Facts
from tierkv.store.index import NONE, Index, State
from tierkv.store.log.format import ALIGN, ENTRY_OVERHEAD, Mark
from tierkv.store.log.hints import ROW, Extras, Hint, unpack_hint
from tierkv.store.log.scan import Damage, scan
from tierkv.store.log.segment import Segment
from tierkv.store.log.segments import place_of

# Places and blocks: entries that are to be buried.
Dead = list[tuple[int, int]]


@dataclass(slots=True)
class Content:
    """What a segment holds. ``dead``: what a purge or an eviction had not quite erased when the vault ended.

    ``torn_at``: the block where a write was cut short by the end of the process, 0 if none was.
    """

    hint: Hint
    by_hint: bool = False
    dead: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    damage: list[Damage] = field(default_factory=list[Damage])
    hint_damage: str = ""
    torn_at: int = 0
    epoch: int = 0
    vault_s: float = 0.0


def read_segment(segment: Segment, hint_path_bytes: bytes | None) -> Content:
    """Raises OSError."""
    problem = ""
    if hint_path_bytes is not None:
        try:
            hint = unpack_hint(
                hint_path_bytes, segment=segment.number, generation=segment.generation, end_block=segment.end_block
            )
            return Content(hint, by_hint=True)
        except BadFrame as error:
            problem = error.reason
        except (ValueError, KeyError, TypeError):
            problem = "damaged_hint"
    content = _read_data(segment)
    content.hint_damage = problem
    return content


def _read_data(segment: Segment) -> Content:
    maker = HintMaker()
    content = Content(maker.hint())
    for found in scan(segment):
        if isinstance(found, Damage):
            if found.tail and not segment.closed:
                content.torn_at = found.block
            else:
                content.damage.append(found)
            continue
        content.epoch = max(content.epoch, found.epoch)
        content.vault_s = max(content.vault_s, found.head.vault_s)
        if found.mark is Mark.LIVE and found.header is not None:
            maker.add(found.header, found.head.block, found.head.size_bytes, found.head.vault_s, found.pinned)
        else:
            content.dead.append((place_of(segment.number, found.head.block), found.head.blocks))
    content.hint = maker.hint()
    return content


class HintMaker:
    """Collects rows into a ``Hint``."""

    def __init__(self) -> None:
        self._rows: list[tuple[object, ...]] = []
        self._tokens: list[bytes] = []
        self._facts: dict[Facts, int] = {}
        self._extras: Extras = {}

    def add(self, header: RecordHeader, block: int, size_bytes: int, vault_s: float, pinned: bool) -> None:
        facts = Facts(header.root, header.layout_digest, header.layout, header.model, header.codec)
        if header.scalars or header.media:
            self._extras[len(self._rows)] = (header.scalars, header.media)
        self._tokens.append(header.tokens.tobytes())
        facts_number = self._facts.setdefault(facts, len(self._facts))
        row = (
            block, size_bytes, header.start, header.raw_bytes, header.epoch, header.created_unix_s, vault_s, vault_s,
            header.segments, size_bytes - header.segment_bytes, 0, facts_number, header.n_tokens, header.kind,
            header.fidelity, pinned, 0, header.key, header.parent,
        )  # fmt: skip
        self._rows.append(row)

    def hint(self) -> Hint:
        return Hint(np.array(self._rows, ROW), b"".join(self._tokens), tuple(self._facts), self._extras)


def load_hint(catalog: Catalog, segment: Segment, hint: Hint, to_monotonic_s: float) -> Dead:
    """The rows are in sight; returns the entries that are not, since another record of their key is better."""
    number, rows = segment.number, hint.rows
    blob, size = rows["key"].tobytes(), 32
    keys = [BlockKey(blob[at : at + size]) for at in range(0, len(blob), size)]
    chosen, dead = _chosen(catalog, keys, rows, number)
    now_s = catalog.clock.monotonic()
    ends = np.concatenate(([0], np.cumsum(rows["n_tokens"].astype(np.int64) * 8))).tolist()
    parents = rows["parent"].tobytes()
    if len(chosen) != len(keys):
        rows = rows[np.array(chosen, np.int64)]
    columns: dict[str, NDArray[np.generic]] = {
        name: rows[name]
        for name in ("kind", "fidelity", "pinned", "header_bytes", "segments", "hits", "start", "raw_bytes", "size",
                     "epoch", "created_s")
    }  # fmt: skip
    columns["facts_id"] = rows["facts"].astype(np.int64)
    columns["charge"] = _blocks(rows)
    columns["place"] = rows["block"] + np.uint64(place_of(number, 0))
    columns["stored_s"] = np.minimum(rows["stored_s"] + to_monotonic_s, now_s)
    columns["used_s"] = np.minimum(rows["used_s"] + to_monotonic_s, now_s)
    blob = memoryview(hint.tokens)
    tokens = [bytes(blob[ends[n] : ends[n + 1]]) for n in chosen]
    extras = {place: hint.extras[n] for place, n in enumerate(chosen) if n in hint.extras} if hint.extras else {}

    def add(index: Index) -> range:
        return index.add_many(
            columns, [keys[n] for n in chosen], [BlockKey(parents[n * size : n * size + size]) for n in chosen], tokens,
            hint.facts, extras,
        )  # fmt: skip

    catalog.load(add)
    segment.live_blocks += int(columns["charge"].sum())
    return dead


def _blocks(rows: NDArray[np.void]) -> NDArray[np.int64]:
    """Vectorised ``entry_blocks``."""
    return -(-(rows["size"].astype(np.int64) + ENTRY_OVERHEAD) // ALIGN)


def _chosen(catalog: Catalog, keys: Sequence[BlockKey], rows: NDArray[np.void], segment: int) -> tuple[list[int], Dead]:
    """Which rows to take: of two records of a key the more exact one, or the one that is in sight."""
    by_key = catalog.index.by_key
    if len(set(keys)) == len(keys) and by_key.keys().isdisjoint(keys):
        return list(range(len(keys))), []
    fidelity = rows["fidelity"].tolist()
    best: dict[BlockKey, int] = {}
    losers: list[int] = []
    for n, key in enumerate(keys):
        known = catalog.index.find(key)
        rival = best.get(key)
        if (known != NONE and catalog.index.fidelity[known] <= fidelity[n]) or (
            rival is not None and fidelity[rival] < fidelity[n]
        ):
            losers.append(n)
        else:
            if rival is not None:
                losers.append(rival)
            best[key] = n
    for key in best:
        known = catalog.index.find(key)
        if known != NONE:
            catalog.remove(known, "replaced")
    block, blocks = rows["block"].tolist(), _blocks(rows).tolist()
    return sorted(best.values()), [(place_of(segment, block[n]), blocks[n]) for n in losers]


def hint_of(index: Index, number: int, to_vault_s: float) -> Hint | None:
    """What a hint of the segment says now; None while a purge in it can still be undone."""
    here = (index.column("place") >> np.uint64(32)) == number
    state = index.column("state")
    if np.any(here & (state == State.PURGED)):
        return None
    chosen = np.nonzero(here & (state == State.VISIBLE))[0]
    rows = np.zeros(len(chosen), ROW)
    for name in ("kind", "fidelity", "pinned", "header_bytes", "segments", "hits", "start", "raw_bytes", "size",
                 "epoch", "created_s"):  # fmt: skip
        rows[name] = index.column(name)[chosen]
    rows["block"] = index.column("place")[chosen] & np.uint64(0xFFFFFFFF)
    rows["stored_s"] = index.column("stored_s")[chosen] + to_vault_s
    rows["used_s"] = index.column("used_s")[chosen] + to_vault_s
    numbers = chosen.tolist()
    facts = {number: place for place, number in enumerate(dict.fromkeys(index.facts_id[row] for row in numbers))}
    rows["facts"] = [facts[index.facts_id[row]] for row in numbers]
    tokens = [index.tokens[row] for row in numbers]
    rows["n_tokens"] = [len(each) // 8 for each in tokens]
    rows["key"] = np.frombuffer(b"".join(index.keys[row] for row in numbers), "V32")
    rows["parent"] = np.frombuffer(b"".join(index.parent_keys[row] for row in numbers), "V32")
    extras = {place: extra for place, row in enumerate(numbers) if (extra := index.extras_of(row)) is not None}
    return Hint(rows, b"".join(tokens), tuple(index.facts_numbered(number) for number in facts), extras)
