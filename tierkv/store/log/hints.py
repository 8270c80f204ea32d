"""Hint files: what the index needs of one segment, so that a vault starts without reading its data.

A hint is a convenience and never believed against the data: it counts only when its checksum, its segment's generation
and size agree, and every read looks at the entry's own head and mark before it serves a byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierkv.errors import BadFrame
from tierkv.identity.blocks import BlockKey, Media
from tierkv.store.facts import Facts
from tierkv.store.log.files import Buffer
from tierkv.store.log.format import FORMAT

_HEAD = struct.Struct("<4sHHIIIIQQQ16s")
_CHECK = struct.Struct("<Q")
_MAGIC = b"TKH1"
_FACTS = struct.Struct("<32s16sIII")

ROW = np.dtype(
    [
        ("block", "<u8"), ("size", "<u8"), ("start", "<u8"), ("raw_bytes", "<u8"), ("epoch", "<u8"),
        ("created_s", "<f8"), ("stored_s", "<f8"), ("used_s", "<f8"),
        ("segments", "<u4"), ("header_bytes", "<u4"), ("hits", "<u4"), ("facts", "<u4"), ("n_tokens", "<u4"),
        ("kind", "u1"), ("fidelity", "u1"), ("pinned", "u1"), ("spare", "u1"),
        ("key", "V32"), ("parent", "V32"),
    ]
)  # fmt: skip

# A record's share of its segment's hint beside its tokens and scalars: its row and a part of the facts.
HINT_ROW_BYTES = 256

Extras = dict[int, tuple[str, tuple[Media, ...]]]


@dataclass(frozen=True, slots=True)
class Hint:
    """Rows of one segment, [n] of ``ROW``. ``tokens``: their ids one after another. Times in the vault's own age."""

    rows: NDArray[np.void]
    tokens: bytes | memoryview
    facts: tuple[Facts, ...]
    extras: Extras


def pack_hint(hint: Hint, *, segment: int, generation: int, end_block: int) -> list[Buffer]:
    """The hint file of a segment that is ``end_block`` blocks long."""
    extras = json.dumps(
        {
            str(row): [scalars, [[m.start, m.length, m.content_hash.hex()] for m in media]]
            for row, (scalars, media) in hint.extras.items()
        }
    ).encode()
    facts = b"".join(_pack_facts(each) for each in hint.facts)
    body = [hint.rows.tobytes(), hint.tokens, facts, extras]
    digest = xxhash.xxh3_128()
    for part in body:
        digest.update(part)
    head = _HEAD.pack(
        _MAGIC, FORMAT, ROW.itemsize, segment, len(hint.rows), len(facts), len(extras), len(hint.tokens), generation,
        end_block, digest.digest(),
    )  # fmt: skip
    return [head + _CHECK.pack(xxhash.xxh3_64_intdigest(head)), *body]


def unpack_hint(data: bytes, *, segment: int, generation: int, end_block: int) -> Hint:
    """Raises BadFrame: "damaged_hint", or "stale_hint" for one of another time."""
    if len(data) < _HEAD.size + _CHECK.size:
        raise BadFrame("damaged_hint", "a hint file is not whole")
    (magic, version, row_bytes, number, rows_count, facts_bytes, extras_bytes, token_bytes, of, end, digest) = (
        _HEAD.unpack_from(data)
    )
    if magic != _MAGIC or _CHECK.unpack_from(data, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(data[: _HEAD.size]):
        raise BadFrame("damaged_hint", "a hint file's header is damaged")
    if (version, row_bytes, number, of, end) != (FORMAT, ROW.itemsize, segment, generation, end_block):
        raise BadFrame("stale_hint", "a hint file is of another time")
    body = memoryview(data)[_HEAD.size + _CHECK.size :]
    ends = [rows_count * ROW.itemsize]
    for length in (token_bytes, facts_bytes, extras_bytes):
        ends.append(ends[-1] + length)
    if ends[-1] != len(body) or xxhash.xxh3_128_digest(body) != digest:
        raise BadFrame("damaged_hint", "a hint file's content is damaged")
    rows = np.frombuffer(body[: ends[0]], ROW)
    return Hint(rows, body[ends[0] : ends[1]], _facts(body[ends[1] : ends[2]]), _extras(body[ends[2] :]))


def _pack_facts(facts: Facts) -> bytes:
    model, codec = facts.model.encode(), facts.codec.encode()
    return (
        _FACTS.pack(facts.root, facts.layout_digest, len(facts.layout), len(model), len(codec))
        + facts.layout + model + codec
    )  # fmt: skip


def _facts(data: memoryview) -> tuple[Facts, ...]:
    found: list[Facts] = []
    at = 0
    while at < len(data):
        root, digest, *lengths = _FACTS.unpack_from(data, at)
        at += _FACTS.size
        layout, model, codec = _cut(data[at:], lengths)
        at += sum(lengths)
        found.append(Facts(BlockKey(root), digest, layout, model.decode(), codec.decode()))
    return tuple(found)


def _cut(data: memoryview, lengths: Sequence[int]) -> list[bytes]:
    pieces: list[bytes] = []
    at = 0
    for length in lengths:
        pieces.append(bytes(data[at : at + length]))
        at += length
    return pieces


def _extras(data: memoryview) -> Extras:
    return {
        int(row): (scalars, tuple(Media(start, length, bytes.fromhex(text)) for start, length, text in media))
        for row, (scalars, media) in json.loads(bytes(data)).items()
    }
