"""What is used in one place stays alive in the others: a vault hears of uses that it does not see itself."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from agent_processes import TOKEN, AgentProcess, Cluster, assert_state, hybrid_layout, prompt

from tierkv.handoff.client import NotRestored
from tierkv.rpc.auth import load_or_create_token
from tierkv.rpc.client import VaultClient


def last_uses(vault: AgentProcess) -> dict[bytes, float]:
    """When each prefix of the vault was used last, by leaf key."""

    async def ask() -> dict[bytes, float]:
        client = VaultClient(vault.address, load_or_create_token(TOKEN, None))
        try:
            return {each.leaf_key: each.last_hit_unix_s for each in (await client.list_prefixes()).prefixes}
        finally:
            await client.close()

    return asyncio.run(ask())


def wait_for_use(vaults: list[AgentProcess], before: list[dict[bytes, float]]) -> list[set[bytes]]:
    """Which prefixes of each vault have been used since; waits until some have, everywhere."""
    until = time.monotonic() + 20
    while True:
        now = [last_uses(vault) for vault in vaults]
        # Dates come from two clocks and wander by parts of a millisecond.
        younger = [
            {key for key, at in new.items() if at > old[key] + 0.05} for new, old in zip(now, before, strict=True)
        ]
        if all(younger) or time.monotonic() > until:
            return younger
        time.sleep(0.05)


@pytest.mark.parametrize("small", ["kv", "ssm"])
def test_hits_in_the_engine_keep_rows_and_checkpoints_alive_on_full_vaults(cluster: Cluster, small: str):
    caps = {"kv": 64 << 20, "ssm": 64 << 20, small: {"kv": 4 << 20, "ssm": 1 << 20}[small]}
    vaults = {tier: cluster.vault(f"{tier}-vault", max_bytes=cap) for tier, cap in caps.items()}
    kv, ssm = vaults["kv"], vaults["ssm"]
    cluster.agent(kv, ssm)
    engine = cluster.engine(layout=hybrid_layout()).ready()
    chat, *others = (prompt(600, seed=n) for n in range(40))
    engine.demote(chat)
    engine.demote(others[0])
    before = [last_uses(kv), last_uses(ssm)]
    time.sleep(0.2)
    engine.client.hit(engine.model, np.append(chat, 7), 600)
    assert [len(each) for each in wait_for_use([kv, ssm], before)] == [1, 1]
    for other in others[1:]:
        engine.demote(other)
        if vaults[small].tier(small).evictions:
            break
    assert_state(engine.restore(np.append(chat, 7)), engine.layout, chat, 600)
    assert isinstance(engine.restore(np.append(others[0], 7)), NotRestored)


def test_a_restore_from_the_local_vault_keeps_the_remote_copies_alive(cluster: Cluster):
    kv, ssm = cluster.vault("kv-vault"), cluster.vault("ssm-vault")
    agent = cluster.agent(kv, ssm, local_vault_bytes=64 << 20)
    engine = cluster.engine(layout=hybrid_layout()).ready()
    chat, other = prompt(600), prompt(600, seed=1)
    engine.demote(chat)
    engine.demote(other)
    before = [last_uses(kv), last_uses(ssm)]
    time.sleep(0.2)
    assert_state(engine.restore(np.append(chat, 7)), engine.layout, chat, 600)
    younger = wait_for_use([kv, ssm], before)
    assert [len(each) for each in younger] == [1, 1]
    hits = {each.name: each.hits for each in agent.snapshot().tiers}
    assert hits["local"] > 0
    assert kv.tier("kv").bytes_out == ssm.tier("ssm").bytes_out == 0


def test_of_several_vaults_the_one_that_holds_the_prompt_hears_of_its_use(cluster: Cluster):
    kv, ssm = [cluster.vault("kv-vault") for _ in range(2)], [cluster.vault("ssm-vault") for _ in range(2)]
    agent = cluster.agent(kv_cold=[each.address for each in kv], ssm_cold=[each.address for each in ssm])
    engine = cluster.engine(layout=hybrid_layout()).ready()
    prompts = [prompt(600, seed=200 + n) for n in range(6)]
    for each in prompts:
        engine.demote(each)
    before = [last_uses(vault) for vault in (*kv, *ssm)]
    assert [sum(map(len, before[:2])), sum(map(len, before[2:]))] == [6, 6]
    time.sleep(0.2)
    engine.client.hit(engine.model, np.append(prompts[0], 7), 600)

    def younger() -> list[int]:
        now = [last_uses(vault) for vault in (*kv, *ssm)]
        return [sum(at > old[key] + 0.05 for key, at in new.items()) for new, old in zip(now, before, strict=True)]

    until = time.monotonic() + 20
    while not (sum((counts := younger())[:2]) and sum(counts[2:])) and time.monotonic() < until:
        time.sleep(0.05)
    assert (sum(counts[:2]), sum(counts[2:])) == (1, 1), counts
    assert dict(agent.snapshot().counters).get("touches_failed", 0) == 0
