"""A restore is made, shortened or left alone by what it is expected to take; one that turns out slow is given up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest
from agent_processes import assert_state, hybrid_layout, prompt, rows_layout
from explained_agent import Rig, demote, explained_agent, finding, restore, until
from throttled import ThrottledLink, throttled, towards

from tierkv.agents import break_even, remeasure
from tierkv.agents.break_even import PrefillCost, Rates, decide
from tierkv.agents.lookup import Candidate, Mark, Needs, Plan
from tierkv.codec.record import RecordKind
from tierkv.handoff.client import NotRestored, Restored
from tierkv.rpc.client import VaultClient
from tierkv.rpc.vault_port import Found
from tierkv.telemetry.explanation import Explanation

ROWS = Needs(rows=True, window=False, state=False)


# --- what computing costs ---------------------------------------------------------------------------


def test_two_lengths_tell_the_cost_of_a_token_and_of_attending_to_one():
    """1 ms a token and 2 us a pair, by hand: 1,000 tokens 1 + 1 = 2 s, 2,000 tokens 2 + 4 = 6 s."""
    cost = PrefillCost()
    cost.measured(0, 1000, 2.0)
    cost.measured(0, 2000, 6.0)
    assert cost.seconds(0, 4000) == pytest.approx(4 + 16)
    assert cost.seconds(1000, 2000) == pytest.approx(6 - 2)


def test_of_one_length_only_the_rate_is_known():
    cost = PrefillCost()
    assert cost.seconds(0, 1000) == 0
    cost.measured(0, 500, 1.0)
    assert cost.seconds(0, 1000) == pytest.approx(2.0)
    assert cost.seconds(400, 500) == pytest.approx(0.2)


def test_an_overhead_of_short_prompts_makes_no_negative_cost():
    cost = PrefillCost()
    cost.measured(0, 100, 1.0)
    cost.measured(0, 1000, 2.0)
    assert 0 < cost.seconds(0, 100) < cost.seconds(0, 10_000)


def test_old_prefills_are_forgotten_and_tiny_ones_left_out():
    cost = PrefillCost()
    cost.measured(0, 10, 100.0)
    cost.measured(0, 100, 1000.0)
    for _ in range(break_even.KEPT_SAMPLES):
        cost.measured(0, 100, 1.0)
    assert cost.seconds(0, 100) == pytest.approx(1.0)


# --- the decision -----------------------------------------------------------------------------------


class Memory:
    """A source whose rate is not a link's."""

    peer = "local"

    def promote(self, keys, *, timeout_s=None):
        raise NotImplementedError


def measured_client(bytes_per_s: float) -> VaultClient:
    client = VaultClient("127.0.0.1:1", None)
    client.link.measured_receive(int(bytes_per_s), 1.0, left=True)
    return client


def block(index: int, source, size_bytes: int = 100_000) -> Candidate:
    return Candidate(
        Found(bytes([index]) * 32, RecordKind.BLOCK, index * 256, 256, 256, size_bytes, 2 * size_bytes, 0, b"l"), source
    )


def checkpoint(position: int, source, size_bytes: int) -> Candidate:
    found = Found(b"s" * 32, RecordKind.STATE, position - position % 256, position % 256, 0, size_bytes, 0, 0, b"l")
    return Candidate(found, source)


def rate(tokens_per_s: float):
    return lambda start, end: (end - start) / tokens_per_s


async def test_the_cheaper_of_both():
    """Eight blocks of 100 kB at 1 MB/s take 0.8 s; 2,048 tokens at 1,000/s take 2 s, at 10,000/s 0.2 s."""
    client = measured_client(1e6)
    plan = Plan(b"l", ROWS, 2048, tuple(block(index, client) for index in range(8)), ())
    slow = decide(plan, 0, rate(1000), Rates(), 2)
    assert slow.plan is plan
    assert (slow.restore_s, slow.prefill_s) == (pytest.approx(0.8), pytest.approx(2.048))
    fast = decide(plan, 0, rate(10_000), Rates(), 2)
    assert fast.plan is None
    assert (fast.restore_s, fast.prefill_s) == (pytest.approx(0.8), pytest.approx(0.2048))
    await client.close()


async def test_a_prefix_from_memory_and_the_rest_computed():
    client = measured_client(1e6)
    rows = (*(block(index, Memory()) for index in range(3)), *(block(index, client) for index in range(3, 8)))
    decision = decide(Plan(b"l", ROWS, 2048, rows, ()), 0, rate(10_000), Rates(), 2)
    assert decision.plan is not None
    assert (decision.plan.position, len(decision.plan.rows)) == (768, 3)
    await client.close()


async def test_an_earlier_checkpoint_that_is_nearer():
    """Rows are in memory, the last checkpoint behind a slow link, an earlier one in memory."""
    client = measured_client(1e6)
    needs = Needs(rows=True, window=False, state=True)
    rows = tuple(block(index, Memory()) for index in range(8))
    marks = (
        Mark(2000, None, checkpoint(2000, client, 5_000_000)), Mark(1700, None, checkpoint(1700, Memory(), 5_000_000)),
    )  # fmt: skip
    decision = decide(Plan(b"l", needs, 2000, rows, marks), 0, rate(2000), Rates(), 2)
    assert decision.plan is not None
    assert (decision.plan.position, len(decision.plan.rows), len(decision.plan.marks)) == (1700, 7, 1)
    await client.close()


async def test_what_nobody_has_measured_is_tried():
    client = VaultClient("127.0.0.1:1", None)
    plan = Plan(b"l", ROWS, 2048, tuple(block(index, client) for index in range(8)), ())
    assert decide(plan, 0, rate(1e9), Rates(), 2).plan is plan
    assert decide(plan, 0, lambda start, end: 0.0, Rates(), 2).plan is plan
    await client.close()


async def test_decoding_and_building_count():
    plan = Plan(b"l", ROWS, 2048, tuple(block(index, Memory()) for index in range(8)), ())
    rates = Rates(decode_bytes_per_s=1e6, build_bytes_per_s=1.6e6)
    assert break_even.restore_s(plan, rates, 2) == pytest.approx(0.8 + 1.0)


async def test_a_slow_link_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch):
    client = measured_client(1e3)
    plan = Plan(b"l", ROWS, 2048, tuple(block(index, client) for index in range(8)), ())
    assert decide(plan, 0, rate(1000), Rates(), 2).plan is None
    monkeypatch.setattr(break_even, "RATE_AGE_S", 0.0)
    assert decide(plan, 0, rate(1000), Rates(), 2).plan is plan
    await client.close()


# --- real agents behind a slow link ---------------------------------------------------------------------


@contextlib.asynccontextmanager
async def slow_rig(bytes_per_s: float, **options) -> AsyncIterator[tuple[Rig, ThrottledLink]]:
    async with throttled(1e9) as link, explained_agent(kv_address=link.address, **options) as rig:
        towards(link, rig.kv.runtime.address)
        link.bytes_per_s = bytes_per_s
        yield rig, link


async def explained(rig: Rig, link: ThrottledLink, bytes_per_s: float) -> Explanation:
    """Over a link that is quick while the vault is asked."""
    link.bytes_per_s = 1e9
    told = await rig.explain()
    link.bytes_per_s = bytes_per_s
    return told


async def stored(rig: Rig, link: ThrottledLink, engine, tokens: np.ndarray, bytes_per_s: float) -> None:
    """The prompt is in the vault; from now on the link is slow, and nobody knows its rate."""
    link.bytes_per_s = 1e9
    await demote(engine, tokens)
    link.bytes_per_s = bytes_per_s
    link.passed = 0


async def test_a_slow_link_and_a_fast_engine_cost_a_glance_and_no_wait():
    """4,000 tokens are 16 MB, 160 s at 100 kB/s; the engine computes them in 0.4 s. Nothing worth a wait comes."""
    async with slow_rig(1e5) as (rig, link):
        engine = await rig.engine(rows_layout(16))
        tokens = prompt(4001)
        await stored(rig, link, engine, tokens, 1e5)
        await rig.prefilled(engine, (0, 2000, 0.2), (0, 4000, 0.4))
        assert await restore(engine, tokens) == NotRestored("not_worth_it")
        passed = link.passed
        first = await explained(rig, link, 1e5)
        # What a link holds by itself, a glance long; the whole prompt would have been 16 MB.
        assert passed < 1_000_000
        assert first.request.seconds < 2.0
        assert first.sentence.endswith("it came slower than computing takes")
        passed = link.passed
        assert await restore(engine, tokens) == NotRestored("not_worth_it")
        # Only the answer to the question came.
        assert link.passed - passed < 100_000
        second = await explained(rig, link, 1e5)
        assert "restoring was expected to take" in second.sentence
        assert ", computing 400 ms" in second.sentence
        assert finding(second, "kv").reason == "not_worth_it"
        assert second.expected_restore_s > second.expected_prefill_s == pytest.approx(0.4, rel=0.01)
        assert rig.agent.telemetry.snapshot().counters["restores_given_up"] == 1


async def weighed(rig: Rig, link: ThrottledLink, bytes_per_s: float, *, layers: int = 16, prefill_s: float = 0.4):
    """An engine, 4,001 stored tokens of which computing 4,000 takes so long, and the client of the link."""
    engine = await rig.engine(rows_layout(layers))
    tokens = prompt(4001)
    await stored(rig, link, engine, tokens, bytes_per_s)
    await rig.prefilled(engine, (0, 2000, prefill_s / 2), (0, 4000, prefill_s))
    (_, client), *_ = rig.agent._clients
    return engine, tokens, client


@pytest.mark.parametrize("layers", [1, 16])
async def test_a_link_that_is_fast_again_is_used_again(monkeypatch: pytest.MonkeyPatch, layers: int):
    """Beside the next request that goes without it, it is measured again; records may be small or large."""
    monkeypatch.setattr(remeasure, "FIRST_PAUSE_S", 0.1)
    async with slow_rig(1e9) as (rig, link):
        engine, tokens, client = await weighed(rig, link, 1e9, layers=layers, prefill_s=4.0)
        client.link.measured_receive(20_000, 1.0, left=True)
        assert await restore(engine, tokens) == NotRestored("not_worth_it")
        await until(lambda: time.monotonic() - client.link.received_s > 0.1)
        link.passed = 0
        assert await restore(engine, tokens) == NotRestored("not_worth_it")
        await until(lambda: client.link.receive_rate(60.0) > 1e6)
        assert link.passed < 8_000_000
        assert_state(await restore(engine, tokens), engine.layout, tokens, 4000)


async def test_a_link_that_stays_slow_is_measured_less_and_less_often(monkeypatch: pytest.MonkeyPatch):
    """And nobody waits for it. Asked about 100 times in the time that the pauses make 1 + 2 + 4 + 8 of."""
    monkeypatch.setattr(remeasure, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(remeasure, "MOST_S", 0.05)
    async with slow_rig(1e5) as (rig, link):
        engine, tokens, client = await weighed(rig, link, 1e5)
        assert await restore(engine, tokens) == NotRestored("not_worth_it")
        promote, measured = client.promote, []

        def counted(keys, **options):
            measured.append(keys)
            return promote(keys, **options)

        monkeypatch.setattr(client, "promote", counted)
        began_s = time.monotonic()
        while time.monotonic() - began_s < 1.5:
            assert await restore(engine, tokens) == NotRestored("not_worth_it")
            await asyncio.sleep(0.01)
        assert 1 <= len(measured) <= 5
        assert rig.agent.telemetry.snapshot().counters["restores_given_up"] == 1


async def test_a_question_what_there_would_be_measures_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remeasure, "FIRST_PAUSE_S", 0.0)
    async with slow_rig(1e9) as (rig, link):
        _, tokens, client = await weighed(rig, link, 1e9)
        client.link.measured_receive(20_000, 1.0, left=True)
        at_s = client.link.received_s
        told = await rig.client.explain_prompt(tokens.tolist())
        assert finding(told, "kv").reason == "not_worth_it"
        await asyncio.sleep(0.2)
        assert client.link.received_s == at_s


async def test_what_came_before_it_was_given_up_is_used():
    """The first half is on its way at once, then the link all but stops."""
    async with slow_rig(1e9) as (rig, link):
        engine = await rig.engine(rows_layout(16))
        tokens = prompt(8001)
        await stored(rig, link, engine, tokens, 1e9)
        await rig.prefilled(engine, (0, 8000, 4.0))
        asked = asyncio.create_task(restore(engine, tokens))
        await until(lambda: link.passed > 4_000_000)
        link.bytes_per_s = 1e4
        got = await asked
        assert isinstance(got, Restored), got
        assert 0 < got.position < 8000
        assert_state(got, engine.layout, tokens, got.position)
        told = await explained(rig, link, 1e4)
        # A message that was on its way may keep the stream silent for longer than a frame may take.
        assert told.request.reason in ("not_worth_it", "timed_out")
        texts = ("the rest would have taken longer than computing it", "the rest did not come: the vault was too slow")
        assert any(text in told.sentence for text in texts)


async def test_switched_off_it_waits_for_the_link():
    async with slow_rig(1e9, break_even=False) as (rig, link):
        engine = await rig.engine()
        tokens = prompt(2001)
        await stored(rig, link, engine, tokens, 2e6)
        await rig.prefilled(engine, (0, 2000, 0.01))
        assert_state(await restore(engine, tokens), engine.layout, tokens, 2000)


async def test_what_arrived_before_the_deadline_is_used():
    """About 1.3 MB of 8 MB come in the 1 s that the hook waits; computing would take longer than everything."""
    async with slow_rig(1e9) as (rig, link):
        engine = await rig.engine(rows_layout(8))
        tokens = prompt(4001)
        await stored(rig, link, engine, tokens, 1.5e6)
        await rig.prefilled(engine, (0, 4000, 60.0))
        got = await restore(engine, tokens, budget_s=1.5)
        assert isinstance(got, Restored), got
        assert 0 < got.position < 4000
        assert got.position % 256 == 0
        assert_state(got, engine.layout, tokens, got.position)


async def test_an_earlier_checkpoint_is_used_when_the_rows_do_not_reach_the_last():
    async with slow_rig(1e9) as (rig, link):
        layout = hybrid_layout()
        engine = await rig.engine(layout)
        tokens = prompt(6001)
        link.bytes_per_s = 1e9
        await demote(engine, tokens[:600])
        # 0.9 MB of rows would take 2.3 s, and have 1.6.
        await stored(rig, link, engine, tokens[:6000], 4e5)
        await rig.prefilled(engine, (0, 6000, 600.0))
        got = await restore(engine, tokens, budget_s=2.0)
        assert isinstance(got, Restored), got
        assert_state(got, layout, tokens, 600)
