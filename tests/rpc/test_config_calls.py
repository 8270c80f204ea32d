"""Configuration over real gRPC: who may ask, all or nothing over several agents, what a vault's smaller cap evicts."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from running_vaults import running_vault
from wire_records import blocks_of, prompt, put

from tierkv.agents.runtime import AgentRuntime
from tierkv.agents.vault import VaultOptions, build_vault_agent
from tierkv.config.running import Base
from tierkv.errors import NotAuthenticated, Refused, StaleToken
from tierkv.rpc.auth import Token
from tierkv.rpc.client import VaultClient
from tierkv.rpc.config_client import ConfigClient, apply_everywhere, check_everywhere, undo_everywhere
from tierkv.rpc.config_port import evictions
from tierkv.store.ram import RamStore


async def vault_size(runtime: AgentRuntime) -> int:
    client = VaultClient(runtime.address, runtime.gate.token, connect_timeout_s=5.0)
    try:
        return (await client.stats()).tier.size_bytes
    finally:
        await client.close()


def base_in(folder: Path) -> Base:
    folder.mkdir(exist_ok=True)
    path = folder / "tierkv.toml"
    path.write_text("[vault]\nmax_bytes = '16MiB'\nmax_record_bytes = '1MiB'\nundo_s = 60\n")
    return Base(path, {}, {})


@contextlib.asynccontextmanager
async def served(folder: Path, **options):
    """A vault that knows its configuration, and a client with its token."""
    base = base_in(folder)
    store = RamStore(16 << 20, 1 << 20)
    runtime = build_vault_agent(VaultOptions("v", port=0, **options), store)
    runtime.configured_by(base, base.check(base.read(), {}))
    await runtime.start()
    client = ConfigClient(runtime.address, runtime.gate.token, connect_timeout_s=5.0)
    try:
        yield runtime, client
    finally:
        await client.close()
        await runtime.stop(0.1)


async def test_what_is_in_force_says_where_it_came_from(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client):
        state = await client.get()
        cap = next(one for one in state.values if one.key == "vault.max_bytes")
        assert (cap.value, cap.live, cap.pending) == (16 << 20, True, 16 << 20)
        assert cap.origin == f"{tmp_path / 'tierkv.toml'}:2"


async def test_changes_need_the_token_and_a_check_says_what_they_do(tmp_path: Path) -> None:
    async with served(tmp_path) as (runtime, client):
        check = await client.check({"vault.undo_s": "5s", "vault.port": 99999})
        assert [fault.key for fault in check.faults] == ["vault.port"]
        check = await client.check({"vault.undo_s": "5s", "vault.port": 6000})
        assert [(one.effect, one.after) for one in check.effects] == [("live", 5.0), ("restart", 6000)]
        stranger = ConfigClient(runtime.address, Token("wrong-wrong-wrong-wrong", True, ""))
        with pytest.raises(NotAuthenticated):
            await stranger.apply({"vault.undo_s": 5})
        await stranger.close()


async def test_a_smaller_cap_evicts_what_was_said_and_undo_lifts_it(tmp_path: Path) -> None:
    async with served(tmp_path) as (runtime, client):
        vault = VaultClient(runtime.address, runtime.gate.token, connect_timeout_s=5.0)
        for seed in range(8):
            await put(vault, blocks_of(prompt(256, seed), size=1 << 18))
        page = await vault.list_prefixes()
        records = await vault.describe_prefix(page.prefixes[0].leaf_key)
        assert [(one.start, one.end, one.own) for one in records] == [(0, 256, True)]
        await vault.close()
        held = await vault_size(runtime)
        check = await client.check({"vault.max_bytes": "2MiB"})
        n_bytes, prefixes = evictions(check.effects)
        assert n_bytes >= held - (2 << 20)
        assert 0 < prefixes < 8
        applied = await client.apply({"vault.max_bytes": "2MiB"}, revision=check.revision)
        assert applied.effects[0].effect == "live"
        assert await vault_size(runtime) <= 2 << 20
        await client.undo(applied.undo_token)
        cap = next(one for one in (await client.get()).values if one.key == "vault.max_bytes")
        assert cap.value == 16 << 20


async def test_watchers_learn_of_changes(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), contextlib.aclosing(client.watch()) as states:
        first = await anext(states)
        await client.apply({"vault.undo_s": 5})
        second = await asyncio.wait_for(anext(states), 10)
        assert second.revision == first.revision + 1


async def test_all_or_none(tmp_path: Path) -> None:
    async with served(tmp_path / "a") as (one, _), served(tmp_path / "b") as (two, client):
        token = one.gate.token
        peers = [one.address, two.address]
        changes = {"vault.undo_s": 5.0}
        checked = await check_everywhere(peers, token, changes)
        assert all(each.ready for each in checked)
        done = await apply_everywhere(checked, token, changes)
        assert all(each.in_force for each in done)
        back = await undo_everywhere(done, token)
        assert all(each.taken_back for each in back)

        checked = await check_everywhere(peers, token, changes)
        await client.apply({"vault.undo_s": 7.0})
        done = await apply_everywhere(checked, token, changes)
        assert [each.in_force for each in done] == [False, False]
        assert isinstance(done[1].error, StaleToken)
        values = {each.key: each.value for each in one.configuration.state().values}
        assert values["vault.undo_s"] == 60.0


async def test_an_agent_that_a_program_started_cannot_be_changed() -> None:
    async with running_vault() as vault:
        client = ConfigClient(vault.runtime.address, vault.token)
        with pytest.raises(Refused, match="not from a configuration"):
            await client.get()
        await client.close()
