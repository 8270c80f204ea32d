"""Made-up records, and what a benchmark does with a store full of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tierkv.codec.frame import FrameHeader, FrameType, payload_hash
from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey, block_key

MIB = 1 << 20
MESSAGE_BYTES = 2 * MIB
ROOT = BlockKey(b"\x07" * 32)
LAYOUT = b"l" * 12_000


def make_record(number: int, segments: int = 16, segment_bytes: int = 64 << 10) -> bytes:
    """One block record with raw uint8 segments; the payload cannot be compressed."""
    random = np.random.default_rng(number)
    body = bytearray()
    for layer in range(segments):
        payload = random.bytes(segment_bytes)
        body += FrameHeader(
            FrameType.SEGMENT, 0, "uint8", (segment_bytes,), 0, segment_bytes, segment_bytes, payload_hash(payload),
            layer=layer,
        ).pack() + payload  # fmt: skip
    return header_of(number, ROOT, 0, segments, len(body), segments * segment_bytes).pack_frame() + bytes(body)


def header_of(
    number: int, parent: BlockKey, start: int, segments: int, segment_bytes: int, raw_bytes: int
) -> RecordHeader:
    tokens = np.arange(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
    return RecordHeader(
        RecordKind.BLOCK, block_key(parent, tokens, (), start), parent, ROOT, tokens, start, b"d" * 16, LAYOUT, 0, 0,
        1.0, segments, segment_bytes, raw_bytes, "bench", "raw",
    )  # fmt: skip


def copy_all(target: np.ndarray, records: list[bytes]) -> None:
    at = 0
    for record in records:
        if at + len(record) > len(target):
            at = 0
        target[at : at + len(record)] = np.frombuffer(record, np.uint8)
        at += len(record)


def put_all(store: Any, records: list[bytes]) -> None:
    for record in records:
        writer = store.begin(len(record), store.epoch)
        view = memoryview(record)
        for at in range(0, len(record), MESSAGE_BYTES):
            writer.write(view[at : at + MESSAGE_BYTES])
        writer.commit()


def get_all(store: Any, keys: list[BlockKey]) -> None:
    for key in keys:
        reader = store.open(key)
        assert reader is not None
        with reader:
            for at in range(0, reader.size_bytes, MESSAGE_BYTES):
                reader.read(at, MESSAGE_BYTES)
