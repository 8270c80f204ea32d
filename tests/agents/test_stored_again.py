"""What a vault has lost is stored again as soon as the prompt comes back, to the last token."""

from __future__ import annotations

import pytest
from agent_processes import assert_state, hybrid_layout, prompt, rows_layout
from explained_agent import Rig, demote, explained_agent, restore

from tierkv.handoff.client import NotRestored
from tierkv.store.base import Selector

LAYOUTS = {"rows": rows_layout(4), "window": hybrid_layout(window=True), "state": hybrid_layout()}


@pytest.fixture
async def rig():
    async with explained_agent() as running:
        yield running


def lose(vault) -> None:
    assert vault.store.purge(vault.store.preview_purge(Selector()).token).records


# 600 ends in a short block, 512 at a block's boundary, 100 is one short block, 1,100 has several blocks.
@pytest.mark.parametrize("length", [100, 512, 600, 1100])
@pytest.mark.parametrize(("name", "tier"), [("rows", "kv"), ("window", "kv"), ("state", "kv"), ("state", "ssm")])
async def test_a_prompt_that_a_vault_lost(rig: Rig, name: str, tier: str, length: int):
    layout = LAYOUTS[name]
    engine = await rig.engine(layout)
    tokens = prompt(length)
    await demote(engine, tokens)
    lose(rig.kv if tier == "kv" else rig.ssm)
    missed = await restore(engine, tokens, limit=length)
    assert isinstance(missed, NotRestored)
    await demote(engine, tokens)
    assert_state(await restore(engine, tokens, limit=length), layout, tokens, length)


async def test_two_checkpoints_of_a_prompt_of_which_the_vault_lost_both(rig: Rig):
    engine = await rig.engine(LAYOUTS["state"])
    tokens = prompt(900)
    await demote(engine, tokens[:600])
    await demote(engine, tokens)
    lose(rig.ssm)
    assert isinstance(await restore(engine, tokens, limit=900), NotRestored)
    await demote(engine, tokens[:600])
    assert_state(await restore(engine, tokens, limit=900), LAYOUTS["state"], tokens, 600)
    await demote(engine, tokens)
    assert_state(await restore(engine, tokens, limit=900), LAYOUTS["state"], tokens, 900)


@pytest.mark.parametrize("name", ["rows", "window"])
async def test_a_prompt_whose_end_was_evicted(name: str):
    """A full vault evicts the ends of prompts first."""
    layout = LAYOUTS[name]
    async with explained_agent(vault={"cap_bytes": 1 << 20}) as rig:
        engine = await rig.engine(layout)
        tokens = prompt(600)
        await demote(engine, tokens)
        for seed in range(1, 40):
            await demote(engine, prompt(600, seed))
            if getattr(await restore(engine, tokens, limit=600), "position", 0) < 600:
                break
        await demote(engine, tokens)
        assert_state(await restore(engine, tokens, limit=600), layout, tokens, 600)


async def test_what_a_vault_still_has_is_not_asked_for_again(rig: Rig):
    """Of another end of the same beginning nothing is said by what is found of this one."""
    layout = LAYOUTS["state"]
    engine = await rig.engine(layout)
    one, other = prompt(600), prompt(600)
    other[550:] += 1
    await demote(engine, one)
    await demote(engine, other)
    assert_state(await restore(engine, other, limit=600), layout, other, 600)
    assert not (await demote(engine, one)).wanted
    assert not (await demote(engine, other)).wanted
