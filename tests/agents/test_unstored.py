"""What was to be stored and was not is told to whoever asks for it later: which vault did not take it, and why."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from agent_processes import TOKEN, assert_state, hybrid_layout, prompt
from explained_agent import Rig, demote, explained_agent, finding, restore, until
from faulty_vault import FaultyVault

from tierkv.agents import unstored
from tierkv.agents.unstored import NOT_STORED, Unstored
from tierkv.codec.record import RecordKind
from tierkv.handoff.client import NotRestored
from tierkv.identity.blocks import BlockKey, PromptChain

ROOT = BlockKey(b"r" * 32)
VAULT = "kv:v:1"


def chain_of(n: int, seed: int = 0) -> PromptChain:
    return PromptChain.of(ROOT, prompt(n, seed))


# --- the book ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [70, 256, 300, 700, 1024])
def test_the_same_prompt_and_a_longer_one_are_told(n: int):
    """The record after ``reach`` counts: a full block by its key, a shorter one by how it begins."""
    book, chain = Unstored(), chain_of(n)
    for start in range(0, n, 256):
        book.add(VAULT, chain, RecordKind.BLOCK, start, min(n, start + 256), "full")
    longer = PromptChain.of(ROOT, np.concatenate([chain.tokens, prompt(600, 5)]))
    for asked in (chain, longer):
        for reach in range(0, n, 128):
            told = book.of(VAULT, asked, reach)
            # Of a last block of fewer than 64 tokens nothing is remembered.
            if 0 < n - reach // 256 * 256 < 64:
                assert told is None
            else:
                assert told is not None
                assert told[1] == "full"
    assert book.of("kv:other:1", chain, 0) is None
    assert book.of("ssm:v:1", chain, 0) is None
    assert book.of(VAULT, chain_of(n, 1), 0) is None


@pytest.mark.parametrize("n", [70, 300, 700])
def test_a_checkpoint_is_told_to_prompts_that_go_on_behind_it(n: int):
    book, chain = Unstored(), chain_of(n)
    book.add("ssm:v:1", chain, RecordKind.STATE, n // 256 * 256, n, "full")
    longer = PromptChain.of(ROOT, np.concatenate([chain.tokens, prompt(600, 5)]))
    assert book.of("ssm:v:1", longer, 0)[1] == "full"  # type: ignore[index]
    assert book.of("ssm:v:1", chain, 0)[1] == "full"  # type: ignore[index]
    assert book.of("ssm:v:1", longer, n // 256 * 256 + 256) is None
    assert book.of("ssm:v:1", chain_of(n, 1), 0) is None
    assert book.of(VAULT, chain, 0) is None


def test_the_first_reason_stays_and_little_is_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unstored, "MAX_REMEMBERED", 3)
    book = Unstored()
    book.add("kv:", chain_of(300), RecordKind.BLOCK, 0, 256, "vault_down")
    book.add("kv:", chain_of(300), RecordKind.BLOCK, 0, 256, "queue_full")
    assert book.of(VAULT, chain_of(300), 0)[1] == "its vault could not be reached for too long"  # type: ignore[index]
    for seed in range(1, 4):
        book.add(VAULT, chain_of(300, seed), RecordKind.BLOCK, 0, 256, "full")
    assert book.of(VAULT, chain_of(300), 0) is None
    assert len(book._places) == 3


# --- with real agents -------------------------------------------------------------------------------


async def refused(rig: Rig, tokens: np.ndarray, engine) -> None:
    await demote(engine, tokens)
    assert isinstance(await restore(engine, tokens), NotRestored)


@pytest.mark.parametrize("n", [200, 600])
async def test_a_prompt_that_the_vault_refused(n: int):
    faulty = FaultyVault(token=TOKEN, fault="full").start()
    try:
        async with explained_agent(kv_address=faulty.address) as rig:
            engine = await rig.engine()
            tokens = prompt(n)
            await refused(rig, tokens, engine)
            told = await rig.explain()
            kv = finding(told, "kv")
            assert kv.reason == NOT_STORED
            assert 0 < kv.gone_unix_s <= told.request.time_unix_s
            assert told.sentence.startswith(f"nothing was restored of {n} tokens: could not be stored ")
            assert told.sentence.endswith(" before (the vault refused it: full)")
            misses = next(each for each in rig.agent.telemetry.snapshot().tiers if each.name == "kv").miss_reasons
            assert misses == {NOT_STORED: 1}
            # Another prompt was never offered.
            assert isinstance(await restore(engine, prompt(n, 7)), NotRestored)
            assert finding(await rig.explain(), "kv").reason == "never_stored"
            # Once it is there after all, the first request is told as it was.
            faulty.fault = "none"
            await demote(engine, tokens)
            assert_state(await restore(engine, tokens), engine.layout, tokens, n - 1)
            assert finding(await rig.explain(), "kv").reason == ""
            assert (await rig.explain(1)).sentence == told.sentence
    finally:
        faulty.stop()


async def test_a_checkpoint_that_its_vault_refused():
    async with explained_agent() as rig:
        engine = await rig.engine(hybrid_layout())
        tokens = prompt(600)
        rig.ssm.store._max_record_bytes = 1
        await refused(rig, tokens, engine)
        told = await rig.explain()
        assert finding(told, "ssm").reason == NOT_STORED
        assert "(the vault refused it: " in told.sentence
        kv = finding(told, "kv")
        assert (kv.found_tokens, kv.reason, kv.detail) == (599, "", "")


async def test_a_prompt_whose_vault_was_down_for_too_long(monkeypatch: pytest.MonkeyPatch):
    faulty = FaultyVault(token=TOKEN, fault="internal").start()
    try:
        async with explained_agent(kv_address=faulty.address) as rig:
            (sender,) = (each for name, each in rig.agent.demoter._senders.items() if name.startswith("kv:"))
            monkeypatch.setattr(sender, "_keep_s", 0.1)
            engine = await rig.engine()
            tokens = prompt(600)
            await asyncio.to_thread(engine.demote, tokens)
            await until(lambda: not len(rig.agent.pending))
            faulty.fault = "none"

            (_, client), *_ = rig.agent._clients
            await until(lambda: client.link.breaker.state != "open")
            assert isinstance(await restore(engine, tokens), NotRestored)
            told = await rig.explain()
            assert finding(told, "kv").reason == NOT_STORED
            assert "its vault could not be reached for too long" in told.sentence
    finally:
        faulty.stop()


async def test_what_an_engine_did_not_finish(monkeypatch: pytest.MonkeyPatch):
    async with explained_agent() as rig:
        engine = await rig.engine()
        tokens = prompt(600)
        offer = await asyncio.to_thread(engine.client.offer, engine.model, tokens, 600, engine.layout)
        assert offer is not None
        engine.client.dropped(offer.transfer_id, "mover_full")
        await asyncio.to_thread(engine.client.flush_outbox)
        await until(lambda: "transfers_failed_mover_full" in rig.agent.telemetry.snapshot().counters)
        assert isinstance(await restore(engine, tokens), NotRestored)
        assert "(too much was already waiting in the engine)" in (await rig.explain()).sentence


async def test_a_state_that_the_hook_cannot_hand_over_is_named(monkeypatch: pytest.MonkeyPatch):
    async with explained_agent() as rig:
        engine = await rig.engine()
        await asyncio.to_thread(
            engine.client.report_hot, {"refusals": {"too_short": 9, "engine_x": 5, "batched_cache": 2}}
        )
        await until(lambda: bool(rig.agent.hot.refusals(next(iter(rig.agent.engines._engines)))))
        assert isinstance(await restore(engine, prompt(600)), NotRestored)
        told = await rig.explain()
        assert finding(told, "kv").reason == "never_stored"
        assert told.sentence.endswith(
            "never stored (its engine could not hand over 2 states: its cache is that of a batch)"
        )
        # Also where another prompt is nearer; what was in the way for a while alone is not told there.
        await demote(engine, prompt(400, 3))
        assert isinstance(await restore(engine, prompt(600)), NotRestored)
        differs = "the nearest stored prompt differs from token 1 on"
        assert (await rig.explain()).sentence.endswith(
            f"{differs} (its engine could not hand over 2 states: its cache is that of a batch)"
        )
        await asyncio.to_thread(engine.client.report_hot, {"refusals": {"no_agent": 7}})
        await until(lambda: "no_agent" in rig.agent.hot.refusals(next(iter(rig.agent.engines._engines))))
        assert (await rig.explain()).sentence.endswith(differs)
