"""A key changes with everything it depends on; the golden values come from a plain call of blake3."""

import struct

import numpy as np
import pytest
from blake3 import blake3

from tierkv.identity.blocks import (
    BLOCK_TOKENS,
    BlockKey,
    Media,
    PromptChain,
    as_tokens,
    block_key,
    common_prefix,
    state_key,
    window_key,
)

ROOT = BlockKey(bytes(range(32)))
TOKENS = as_tokens(range(1000, 1000 + BLOCK_TOKENS))


def by_hand(purpose: str, parent: bytes, ids: list[int], media: list[tuple[int, int, bytes]] = ()) -> bytes:  # type: ignore[assignment]
    """Parent, count, ids as little-endian int64, then count of media and each medium."""
    data = parent + struct.pack("<I", len(ids)) + b"".join(struct.pack("<q", each) for each in ids)
    data += struct.pack("<I", len(media))
    for offset, length, digest in media:
        data += struct.pack("<III", offset, length, len(digest)) + digest
    return blake3(data, derive_key_context=purpose).digest()


def test_keys_are_those_of_a_plain_blake3_call():
    ids = TOKENS.tolist()
    assert block_key(ROOT, TOKENS) == by_hand("tierkv 2026 v1 block key", ROOT, ids)
    assert window_key(ROOT, TOKENS[:5]) == by_hand("tierkv 2026 v1 window checkpoint key", ROOT, ids[:5])
    assert state_key(ROOT, TOKENS[:0]) == by_hand("tierkv 2026 v1 state checkpoint key", ROOT, [])
    medium = Media(start=260, length=7, content_hash=b"picture")
    assert block_key(ROOT, TOKENS, [medium], 256) == by_hand(
        "tierkv 2026 v1 block key", ROOT, ids, [(4, 7, b"picture")]
    )


def test_golden_key():
    """Fixed for ever: later builds find stored records under it. Made with blake3 alone."""
    golden = "4329a68d5da33a1c6134c16c078bd1117bfaf3325f1657c6073a65502d17712e"
    assert block_key(BlockKey(bytes(32)), as_tokens([7])).hex() == golden


@pytest.mark.parametrize("place", [0, 1, 100, BLOCK_TOKENS - 1])
def test_one_other_token_gives_another_key(place: int):
    other = TOKENS.copy()
    other[place] += 1
    assert block_key(ROOT, other) != block_key(ROOT, TOKENS)
    assert state_key(ROOT, other) != state_key(ROOT, TOKENS)


def test_order_length_parent_and_purpose_are_part_of_the_key():
    keys = {
        block_key(ROOT, TOKENS),
        block_key(ROOT, TOKENS[::-1].copy()),
        block_key(ROOT, TOKENS[:-1]),
        block_key(BlockKey(bytes(32)), TOKENS),
        window_key(ROOT, TOKENS),
        state_key(ROOT, TOKENS),
    }
    assert len(keys) == 6


def test_media_change_the_key_of_the_block_they_start_in_only():
    inside = Media(10, 20, b"a")
    assert block_key(ROOT, TOKENS, [inside]) != block_key(ROOT, TOKENS)
    assert block_key(ROOT, TOKENS, [inside]) != block_key(ROOT, TOKENS, [Media(10, 20, b"b")])
    assert block_key(ROOT, TOKENS, [inside]) != block_key(ROOT, TOKENS, [Media(11, 20, b"a")])
    assert block_key(ROOT, TOKENS, [inside]) != block_key(ROOT, TOKENS, [Media(10, 21, b"a")])
    assert block_key(ROOT, TOKENS, [Media(BLOCK_TOKENS, 5, b"a")]) == block_key(ROOT, TOKENS)


def test_negative_and_large_ids_are_kept_and_others_refused():
    assert as_tokens([-(1 << 60), 1 << 62]).tolist() == [-(1 << 60), 1 << 62]
    for wrong in ([1.5], [[1, 2]], np.array([1 << 63], np.uint64)):
        with pytest.raises(ValueError, match="64-bit"):
            as_tokens(wrong)


def test_a_chain_names_every_position():
    ids = as_tokens(range(700))
    chain = PromptChain.of(ROOT, ids)
    first = block_key(ROOT, ids[:256])
    second = block_key(first, ids[256:512])
    assert chain.keys == (first, second)
    assert chain.parent_at(0) == chain.parent_at(255) == ROOT
    assert chain.parent_at(600) == second
    assert chain.tail_key(512) == second
    assert chain.tail_key(700) == block_key(second, ids[512:], (), 512)
    assert chain.state_key(300) == state_key(first, ids[256:300])
    assert chain.window_key(256) == window_key(first, ids[:0])


def test_a_change_in_the_first_block_changes_every_key():
    ids = as_tokens(range(1024))
    other = ids.copy()
    other[3] = -1
    assert not set(PromptChain.of(ROOT, ids).keys) & set(PromptChain.of(ROOT, other).keys)


def test_no_position_inside_a_medium():
    chain = PromptChain.of(ROOT, as_tokens(range(600)), [Media(100, 50, b"x"), Media(400, 200, b"y")])
    assert [chain.clamp(p) for p in (99, 100, 101, 149, 150, 399, 401, 600)] == [99, 100, 100, 100, 150, 399, 400, 600]


def test_common_prefix():
    assert common_prefix(as_tokens([1, 2, 3]), as_tokens([1, 2, 4, 5])) == 2
    assert common_prefix(as_tokens([]), as_tokens([1])) == 0
    assert common_prefix(as_tokens([1, 2]), as_tokens([1, 2, 3])) == 2
