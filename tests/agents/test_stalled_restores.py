"""A vault that answers questions and stalls in restores holds up one of them, and then none for a while."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from agent_processes import TOKEN
from faulty_vault import FaultyVault

from tierkv.errors import BreakerOpen, DeadlineExceeded
from tierkv.rpc import client as client_module
from tierkv.rpc.auth import load_or_create_token
from tierkv.rpc.client import VaultClient
from tierkv.rpc.vault_port import Piece

sys.path.append(str(Path(__file__).resolve().parents[1] / "rpc"))

from wire_records import blocks_of, prompt, put

BACKOFF_S = 0.5
CHAIN = prompt(600)


@pytest.fixture
def vault() -> Iterator[FaultyVault]:
    faulty = FaultyVault(token=TOKEN).start()
    yield faulty
    faulty.stop()


@pytest.fixture
async def client(vault: FaultyVault, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VaultClient]:
    monkeypatch.setattr(client_module, "STALLED_BACKOFF_S", BACKOFF_S)
    made = VaultClient(vault.address, load_or_create_token(TOKEN, None), connect_timeout_s=5.0, probe_timeout_s=5.0)
    await put(made, blocks_of(CHAIN))
    yield made
    await made.close()


async def whole(client: VaultClient, timeout_s: float | None = None) -> int:
    found = await client.probe(CHAIN, blocks=True)
    assert found.leading_blocks == 2
    items = [item async for item in client.promote(list(CHAIN.keys[:2]), timeout_s=timeout_s)]
    return sum(len(item.data) for item in items if isinstance(item, Piece))


@pytest.mark.parametrize("fault", ["freeze", "trickle"])
@pytest.mark.parametrize("timeout_s", [None, 0.4])
async def test_only_one_restore_is_held_up(vault: FaultyVault, client: VaultClient, fault: str, timeout_s):
    assert await whole(client) > 0
    vault.fault = fault
    if fault == "trickle" and timeout_s is None:
        timeout_s = 0.8  # its pieces come faster than a silence is noticed
    with pytest.raises(DeadlineExceeded):
        await whole(client, timeout_s)
    asked = vault.promotes
    began_s = time.monotonic()
    with pytest.raises(BreakerOpen, match=r"it failed a moment ago.*a restore"):
        await whole(client, timeout_s)
    assert vault.promotes == asked
    # The first trial after a while is held up again, and then nobody for twice as long.
    await asyncio.sleep(BACKOFF_S - (time.monotonic() - began_s) + 0.05)
    with pytest.raises(DeadlineExceeded):
        await whole(client, timeout_s)
    await asyncio.sleep(BACKOFF_S + 0.05)
    with pytest.raises(BreakerOpen):
        await whole(client, timeout_s)
    vault.fault = "none"
    await asyncio.sleep(BACKOFF_S)
    assert await whole(client) > 0
    assert await whole(client) > 0


async def test_a_reader_that_leaves_or_takes_its_time_stalls_nothing(client: VaultClient):
    for wait_s in (0.0, 2 * client_module.STALLED_S):
        stream = client.promote(list(CHAIN.keys[:2]))
        await anext(stream)
        await asyncio.sleep(wait_s)
        await stream.aclose()
        assert await whole(client) > 0


async def test_a_restore_that_cannot_begin_leaves_the_next_trial_free(vault: FaultyVault, client: VaultClient):
    vault.fault = "freeze"
    with pytest.raises(DeadlineExceeded):
        await whole(client)
    await asyncio.sleep(BACKOFF_S + 0.05)
    with pytest.raises(DeadlineExceeded):  # the trial, with no time left
        _ = [item async for item in client.promote(list(CHAIN.keys[:2]), timeout_s=0.0)]
    vault.fault = "none"
    assert await whole(client) > 0
