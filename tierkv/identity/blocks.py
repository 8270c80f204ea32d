"""Chained block keys: the name of a piece of cached state says everything that it depends on.

A prompt is cut into blocks of 256 tokens. A block's key is a hash over the key of the block before it, its own
token ids and the media that start in it; the first block's parent is the model identity. So equal keys mean the
same model, the same tenant and the same tokens in the same order, up to a collision of BLAKE3 (2^-128), and even
then the reader compares the token ids that the record carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

BLOCK_TOKENS = 256
KEY_BYTES = 32
MAX_MEDIA_HASH_BYTES = 64
# So many tokens tell one prompt from another, and no shorter ones are stored by default.
BEGINNING_TOKENS = 64

BlockKey = NewType("BlockKey", bytes)
Tokens = NDArray[np.int64]

_BLOCK = "tierkv 2026 v1 block key"
_WINDOW = "tierkv 2026 v1 window checkpoint key"
_STATE = "tierkv 2026 v1 state checkpoint key"
_BEGINNING = "tierkv 2026 v1 beginning of a prompt"


@dataclass(frozen=True, slots=True)
class Media:
    """An image or sound in the prompt: it covers tokens [start, start + length) and has its own content hash."""

    start: int
    length: int
    content_hash: bytes


def as_tokens(ids: Sequence[int] | Tokens) -> Tokens:
    """Token ids as a contiguous int64 array; mlx-lm's image tokens are negative 60-bit integers.

    Raises ValueError if an id is not an integer of 64 bits or the array is not one-dimensional.
    """
    array = np.asarray(ids)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.dtype == np.uint64 and array.max() >> 63):
        raise ValueError("token ids are a flat sequence of 64-bit integers")
    return np.ascontiguousarray(array, dtype="<i8")


def block_key(parent: BlockKey, tokens: Tokens, media: Sequence[Media] = (), start: int = 0) -> BlockKey:
    """The key of the block that holds ``tokens`` (at most 256) after the chain ``parent``.

    ``start`` is the absolute position of the first token; media are those whose own start lies in the block.
    """
    return _key(_BLOCK, parent, tokens, media, start)


def window_key(parent: BlockKey, tail: Tokens, media: Sequence[Media] = (), start: int = 0) -> BlockKey:
    """The key of the attention-window checkpoint that stands ``len(tail)`` tokens after ``parent``."""
    return _key(_WINDOW, parent, tail, media, start)


def state_key(parent: BlockKey, tail: Tokens, media: Sequence[Media] = (), start: int = 0) -> BlockKey:
    """The key of the recurrent-state checkpoint that stands ``len(tail)`` tokens after ``parent``."""
    return _key(_STATE, parent, tail, media, start)


def _key(purpose: str, parent: BlockKey, tokens: Tokens, media: Sequence[Media], start: int) -> BlockKey:
    if len(parent) != KEY_BYTES:
        raise ValueError(f"a parent key has {KEY_BYTES} bytes, not {len(parent)}")
    if len(tokens) > BLOCK_TOKENS:
        raise ValueError(f"a block has at most {BLOCK_TOKENS} tokens, not {len(tokens)}")
    hasher = blake3(parent, derive_key_context=purpose)
    hasher.update(len(tokens).to_bytes(4, "little"))
    hasher.update(np.ascontiguousarray(tokens, dtype="<i8").tobytes())
    inside = [item for item in media if start <= item.start < start + len(tokens)]
    hasher.update(len(inside).to_bytes(4, "little"))
    for item in inside:
        hasher.update((item.start - start).to_bytes(4, "little") + item.length.to_bytes(4, "little"))
        hasher.update(len(item.content_hash).to_bytes(4, "little") + item.content_hash)
    return BlockKey(hasher.digest())


@dataclass(frozen=True, slots=True)
class PromptChain:
    """A prompt and the keys of its full blocks.

    ``keys[i]`` is the chain key after block i, that is at position ``(i + 1) * 256``.
    """

    root: BlockKey
    tokens: Tokens
    keys: tuple[BlockKey, ...]
    media: tuple[Media, ...] = ()

    @classmethod
    def of(cls, root: BlockKey, tokens: Sequence[int] | Tokens, media: Sequence[Media] = ()) -> PromptChain:
        ids = as_tokens(tokens)
        keys: list[BlockKey] = []
        parent = root
        for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            parent = block_key(parent, ids[start : start + BLOCK_TOKENS], media, start)
            keys.append(parent)
        return cls(root, ids, tuple(keys), tuple(media))

    def parent_at(self, position: int) -> BlockKey:
        """The chain key at the block boundary at or before ``position``."""
        blocks = position // BLOCK_TOKENS
        return self.keys[blocks - 1] if blocks else self.root

    def tail_at(self, position: int) -> Tokens:
        """The tokens between that boundary and ``position``."""
        return self.tokens[position // BLOCK_TOKENS * BLOCK_TOKENS : position]

    def tail_key(self, position: int) -> BlockKey:
        """The key of the partial block that ends at ``position``; at a boundary, of the full block before it."""
        boundary = position // BLOCK_TOKENS * BLOCK_TOKENS
        if boundary == position:
            return self.parent_at(position)
        return block_key(self.parent_at(position), self.tail_at(position), self.media, boundary)

    def window_key(self, position: int) -> BlockKey:
        boundary = position // BLOCK_TOKENS * BLOCK_TOKENS
        return window_key(self.parent_at(position), self.tail_at(position), self.media, boundary)

    def state_key(self, position: int) -> BlockKey:
        boundary = position // BLOCK_TOKENS * BLOCK_TOKENS
        return state_key(self.parent_at(position), self.tail_at(position), self.media, boundary)

    def clamp(self, position: int) -> int:
        """The largest position at or below ``position`` that does not lie inside a media region.

        Rows inside a media region depend on later tokens of the same region, so no restore ends there.
        """
        for item in sorted(self.media, key=lambda each: each.start, reverse=True):
            if item.start < position < item.start + item.length:
                position = item.start
        return position


def beginning_of(tokens: Tokens | bytes) -> bytes:
    """16 bytes that prompts with the same first 64 tokens have in common whatever their model; b"" for fewer tokens.

    ``tokens``: ids, or ids as little-endian int64 bytes.
    """
    ids = tokens if isinstance(tokens, bytes) else np.ascontiguousarray(tokens[:BEGINNING_TOKENS], "<i8").tobytes()
    if len(ids) < 8 * BEGINNING_TOKENS:
        return b""
    return blake3(ids[: 8 * BEGINNING_TOKENS], derive_key_context=_BEGINNING).digest(16)


def common_prefix(left: Tokens, right: Tokens) -> int:
    """How many leading tokens agree."""
    shorter = min(len(left), len(right))
    different = np.nonzero(left[:shorter] != right[:shorter])[0]
    return int(different[0]) if len(different) else shorter
