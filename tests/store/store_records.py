"""Real records with raw segments, a clock that stands still until it is told to go on, and the two verbs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from tierkv.codec.frame import FrameHeader, FrameType, payload_hash
from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey, PromptChain, block_key, state_key, window_key
from tierkv.store.ram import RamStore

PAGE = 4096
ROOT = BlockKey(b"\x01" * 32)
_KEYS = {RecordKind.BLOCK: block_key, RecordKind.WINDOW: window_key, RecordKind.STATE: state_key}


@dataclass
class FakeClock:
    now_s: float = 1000.0
    wall_s: float = 1_700_000_000.0

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.wall_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.wall_s += seconds


@dataclass(frozen=True)
class Record:
    """A record as it goes over the wire."""

    header: RecordHeader
    data: bytes = field(repr=False)

    @property
    def key(self) -> BlockKey:
        return self.header.key

    @property
    def pages(self) -> int:
        return -(-len(self.data) // PAGE)


def segment_frame(values: np.ndarray, position: int = 0) -> bytes:
    payload = values.tobytes()
    header = FrameHeader(
        FrameType.SEGMENT,
        0,
        str(values.dtype),
        values.shape,
        position,
        len(payload),
        len(payload),
        payload_hash(payload),
    )
    return header.pack() + payload


def make_record(
    tokens,
    parent: BlockKey = ROOT,
    *,
    start: int = 0,
    root: BlockKey = ROOT,
    kind: RecordKind = RecordKind.BLOCK,
    payload_bytes: int = 64,
    segments: int = 1,
    fidelity: int = 0,
    seed: int = 0,
    **fields,
) -> Record:
    """A sound record with ``segments`` raw uint8 segments of ``payload_bytes`` in all."""
    ids = np.asarray(tokens, np.int64)
    random = np.random.default_rng(seed)
    cuts = [payload_bytes * i // max(1, segments) for i in range(segments + 1)]
    body = b"".join(
        segment_frame(random.integers(0, 256, after - before, np.uint8), start) for before, after in pairwise(cuts)
    )
    values = {
        "layout_digest": b"L" * 16, "layout": b"[layout]", "epoch": 0, "created_unix_s": 1.5, "model": "m",
        "codec": "raw", **fields,
    }  # fmt: skip
    key = _KEYS[kind](parent, ids, fields.get("media", ()), start)
    header = RecordHeader(
        kind=kind, key=key, parent=parent, root=root, tokens=ids, start=start,
        fidelity=fidelity, segments=segments, segment_bytes=len(body), raw_bytes=payload_bytes, **values,
    )  # fmt: skip
    return Record(header, header.pack_frame() + body)


def with_header(record: Record, **fields) -> Record:
    """The same segments behind a header that says something else; the key is not made anew."""
    header = replace(record.header, **fields)
    return Record(header, header.pack_frame() + record.data[len(record.header.pack_frame()) :])


def make_chain(blocks: int, *, first_token: int = 0, root: BlockKey = ROOT, tail: int = 0, **fields) -> list[Record]:
    """The records of one prompt: full blocks, then a partial one of ``tail`` tokens if that is not 0."""
    ids = np.arange(first_token, first_token + blocks * BLOCK_TOKENS + tail)
    chain = PromptChain.of(root, ids)
    starts = range(0, len(ids), BLOCK_TOKENS)
    return [
        make_record(ids[at : at + BLOCK_TOKENS], chain.parent_at(at), start=at, root=root, seed=at, **fields)
        for at in starts
    ]


def put(store: RamStore, record: Record, *, epoch: int | None = None, step: int | None = None) -> str:
    """Stores a record in pieces of ``step`` bytes and returns the outcome."""
    writer = store.begin(len(record.data), store.epoch if epoch is None else epoch)
    step = step or len(record.data)
    for at in range(0, len(record.data), step):
        writer.write(record.data[at : at + step])
    return writer.commit()


def get(store: RamStore, key: BlockKey, *, count_hit: bool = True) -> bytes | None:
    reader = store.open(key, count_hit=count_hit)
    if reader is None:
        return None
    with reader:
        return reader.read(0, reader.size_bytes)
