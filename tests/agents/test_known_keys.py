"""What an agent knows of stored keys stays cheap to use, however many prompts begin alike."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.agents.known import KnownKeys, Place
from tierkv.agents.routing import TierRouter
from tierkv.codec.record import RecordKind
from tierkv.identity import blocks
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey, PromptChain
from tierkv.rpc.vault_port import Found, ProbeResult
from tierkv.store.journal import Fate

ROOT = BlockKey(b"\x05" * 32)


def prompt(n_tokens: int, seed: int) -> PromptChain:
    """Prompts of one beginning of 256 tokens, each with an end of its own."""
    start = np.arange(BLOCK_TOKENS)
    return PromptChain.of(ROOT, np.r_[start, np.random.default_rng(seed).integers(0, 32000, n_tokens)][:n_tokens])


def end_of(chain: PromptChain) -> tuple[BlockKey, Place]:
    place = Place(chain.parent_at(len(chain.tokens) - 1), RecordKind.BLOCK, len(chain.tokens))
    key = place.key_in(chain)
    assert key is not None
    return key, place


def held(chain: PromptChain | None) -> ProbeResult:
    """A vault has the first block of this, or nothing at all."""
    first = {}
    if chain is not None:
        first[0] = Found(chain.keys[0], RecordKind.BLOCK, 0, BLOCK_TOKENS, BLOCK_TOKENS, 1000, 2000, 0, bytes(16))
    return ProbeResult(first, len(first), None, (), (), 0, Fate(""), "v")


@pytest.fixture
def router() -> TierRouter:
    return TierRouter("kv", None, ())


def test_what_a_vault_lost_of_a_prompt_is_forgotten_and_nothing_of_its_neighbours(router: TierRouter):
    chains = [prompt(BLOCK_TOKENS + 40 + seed % 3, seed) for seed in range(9)]
    for chain in chains:
        router.known.add(chain.keys[0], 0)
        key, place = end_of(chain)
        router.known.add(key, 0, place)
    router.learn(chains[4], held(chains[4]), lambda key: False)
    for chain in chains:
        assert router.known.holds(end_of(chain)[0], 0) == (chain is not chains[4])
    router.learn(chains[5], held(None), lambda key: False)
    assert len(router.known) == 0, "the block that all stand on is gone"


def test_ten_thousand_prompts_that_begin_alike_cost_a_lookup_no_more_than_256(router: TierRouter, monkeypatch):
    for seed in range(10_000):
        key, place = end_of(prompt(BLOCK_TOKENS + 1 + seed % BLOCK_TOKENS, seed))
        router.known.add(key, 0, place)
    router.known.add(prompt(600, 0).keys[0], 0)
    hashed = []
    key_of = blocks._key
    monkeypatch.setattr(blocks, "_key", lambda *words: hashed.append(1) or key_of(*words))
    chain = prompt(600, 99_999)
    del hashed[:]
    router.learn(chain, held(chain), lambda key: False)
    assert len(hashed) <= BLOCK_TOKENS
    assert len(router.known) == 10_001


def test_places_go_with_their_last_key_and_the_oldest_key_is_forgotten_first():
    known = KnownKeys(limit=3)
    parent, keys = BlockKey(b"p" * 32), [BlockKey(bytes([n]) * 32) for n in range(5)]
    for n in (0, 1):
        known.add(keys[n], 0, Place(parent, RecordKind.BLOCK, 7))
    known.add(keys[2], 0, Place(parent, RecordKind.WINDOW, 7))
    assert sorted(known.after([parent])) == keys[:3]
    assert {(each.kind, each.end) for each in known.places_after([parent])} == {
        (RecordKind.BLOCK, 7), (RecordKind.WINDOW, 7),
    }  # fmt: skip
    assert known.holds(keys[0], 0)
    known.add(keys[3], 0)
    assert not known.holds(keys[1], 0), "the least recently used"
    known.discard([keys[0]])
    assert [each.kind for each in known.places_after([parent])] == [RecordKind.WINDOW]
    known.discard([keys[2]])
    assert known.places_after([parent]) == []
    assert known.after([parent]) == []
    assert len(known) == 1
