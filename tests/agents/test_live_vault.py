"""What a vault takes over while it runs, over gRPC and at SIGHUP, and that its store then does so."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "store"))

from store_records import FakeClock, make_chain, make_record, put

from tierkv.agents.live_keys import WhatIf, shrinking
from tierkv.agents.runtime import AgentRuntime
from tierkv.agents.vault import VaultOptions, build_vault_agent
from tierkv.config.running import Base
from tierkv.errors import StoreFull
from tierkv.identity.blocks import BlockKey
from tierkv.rpc.auth import load_or_create_token
from tierkv.rpc.config_client import ConfigClient
from tierkv.store.base import Selector
from tierkv.store.disk import DiskStore
from tierkv.store.disk_options import DiskOptions
from tierkv.store.ram import RamStore

TOKEN = "a-token-for-tests-only"
MIB = 1 << 20
OTHER = BlockKey(b"\x02" * 32)
DAY = 86400.0
Store = RamStore | DiskStore


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["ram", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Store:
    """Closed by the agent that it is given to."""
    if request.param == "ram":
        return RamStore(8 * MIB, clock=clock)
    options = DiskOptions(disk_bytes=8 * MIB, ram_bytes=MIB, min_free_bytes=0)
    return DiskStore(tmp_path / "vault", options, clock=clock, load_in_background=False)


def text(store: Store, **values: str) -> str:
    cap = "disk_bytes" if isinstance(store, DiskStore) else "max_bytes"
    given = {cap: "8MiB", "undo_s": "60s", "ttl_s": "0s", "dead_after_s": "0s", "policy": "lru"}
    given |= {cap if name == "cap" else name: value for name, value in values.items()}
    return "[vault]\n" + "".join(f'{name} = "{value}"\n' for name, value in given.items())


@asynccontextmanager
async def running(store: Store, path: Path) -> AsyncIterator[AgentRuntime]:
    path.write_text(text(store))  # noqa: ASYNC240
    base = Base(path, {}, {})
    runtime = build_vault_agent(VaultOptions("nas", port=0, token=TOKEN), store)
    runtime.configured_by(base, base.check(base.read(), {}))
    await runtime.start()
    serving = asyncio.create_task(runtime.run())
    await asyncio.sleep(0)  # from here on the signal is caught
    try:
        yield runtime
    finally:
        await runtime.stop(0.0)
        await serving


Change = Callable[[AgentRuntime, Store, Path, dict[str, str]], Awaitable[None]]


async def over_grpc(runtime: AgentRuntime, store: Store, _: Path, values: dict[str, str]) -> None:
    cap = "disk_bytes" if isinstance(store, DiskStore) else "max_bytes"
    client = ConfigClient(runtime.address, load_or_create_token(TOKEN, None))
    try:
        changes = {f"vault.{cap if name == 'cap' else name}": value for name, value in values.items()}
        applied = await client.apply(changes, actor="a test")
        assert {each.effect for each in applied.effects} <= {"live", "unchanged"}, applied
    finally:
        await client.close()


async def at_sighup(runtime: AgentRuntime, store: Store, path: Path, values: dict[str, str]) -> None:
    path.write_text(text(store, **values))  # noqa: ASYNC240
    before = runtime.configuration.state().revision
    os.kill(os.getpid(), signal.SIGHUP)
    for _ in range(400):
        if runtime.configuration.state().revision > before:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the file was not read again")


def fill(store: Store) -> list[BlockKey]:
    """Two records of one model, one of another, then two more of the first."""
    records = [make_record([n], payload_bytes=400_000, seed=n) for n in range(4)]
    old = make_record([9], root=OTHER, parent=OTHER, model="old", payload_bytes=400_000)
    for record in (*records[:2], old, *records[2:]):
        assert put(store, record) == "stored"
    return [*(record.key for record in records), old.key]


def ends(store: Store) -> set[BlockKey]:
    """The last keys of all prefixes."""
    return {prefix.chain[-1] for prefix in store.prefixes(Selector())}


def chains(store: Store, clock: FakeClock, payload_bytes: int, blocks: int) -> None:
    """Twelve chains of ``blocks`` records; the third is used again, and so is the fifth, twice."""
    made = [make_chain(blocks, first_token=10_000 * n, payload_bytes=payload_bytes) for n in range(12)]
    for chain in made:
        for record in chain:
            assert put(store, record) == "stored"
        clock.advance(1)
    for chain in (made[2], made[4], made[4]):
        store.touch([record.key for record in chain])


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
@pytest.mark.parametrize(("payload_bytes", "blocks"), [(1, 1), (5_000, 3), (60_000, 2), (70_000, 1), (30_000, 5)])
def test_what_a_smaller_cap_would_evict_is_what_it_evicts(
    store: Store, clock: FakeClock, payload_bytes: int, blocks: int, policy: str
) -> None:
    """In RAM whole pages, on the disk whole blocks; leaves first, so that a chain may lose only its end."""
    store.set_policy(policy)
    chains(store, clock, payload_bytes, blocks)
    full = store.stats().size_bytes
    for cap_bytes in (full, full * 3 // 4, full // 2, full // 3):
        before, prefixes = store.stats(), ends(store)
        told = shrinking(store, cap_bytes)
        asked = store.stats()
        assert (asked.records, asked.size_bytes) == (before.records, before.size_bytes)
        try:
            store.adjust(cap_bytes=cap_bytes)
        except StoreFull:
            assert told.note == "would be refused: too much is pinned, leased or being read"
            assert store.stats().records == before.records
            continue
        after = store.stats()
        assert told.evict_prefixes == len(prefixes - ends(store))
        assert told.evict_bytes <= before.size_bytes - after.size_bytes
        if isinstance(store, RamStore):
            assert told.evict_bytes == before.size_bytes - after.size_bytes
        else:  # 4 KiB and 2 KiB a token of each segment that is empty now go too
            gone_segments = before.disk.segments - after.disk.segments
            assert (before.size_bytes - after.size_bytes - told.evict_bytes > 0) == (gone_segments > 0)
        assert (told.evict_bytes == 0) == (before.records == after.records)
    store.close()


def test_pinned_and_purged_records_and_models_out_of_use_are_counted_as_what_they_are(
    store: Store, clock: FakeClock
) -> None:
    """Five records: one purged a moment ago, one of a model not used for long, one pinned, two others. Each step takes
    a byte away, and with it one record."""
    keys = fill(store)
    store.adjust(dead_after_s=DAY)
    clock.advance(2 * DAY)
    store.touch(keys[:4])
    store.purge(store.preview_purge(Selector(prefixes=(keys[0],))).token)
    store.pin(Selector(prefixes=(keys[1],)))
    store.sweep()
    for gone in (0, 4, 2, 3):
        cap_bytes = store.stats().size_bytes - 1
        told = shrinking(store, cap_bytes)
        assert told.evict_prefixes == (0 if gone == 0 else 1)
        assert (told.evict_bytes >= 400_000) == (gone != 0)
        assert ("purged records are beyond undo then" in told.note) == (gone == 0)
        before = [entry is not None for entry in store.lookup(keys)]
        store.adjust(cap_bytes=cap_bytes)
        after = [entry is not None and n != gone for n, entry in enumerate(store.lookup(keys))]
        assert [entry is not None for entry in store.lookup(keys)] == after
        assert sum(before) - sum(after) == told.evict_prefixes
    told = shrinking(store, 300_000)
    assert told == WhatIf(note="would be refused: too much is pinned, leased or being read")
    with pytest.raises(StoreFull):
        store.adjust(cap_bytes=300_000)
    assert [entry is not None for entry in store.lookup(keys)] == [False, True, False, False, False]


@pytest.mark.parametrize("change", [over_grpc, at_sighup])
async def test_policy_undo_ages_and_cap_change_while_a_vault_runs(
    store: Store, clock: FakeClock, tmp_path: Path, change: Change
) -> None:
    def here() -> list[bool]:
        return [entry is not None for entry in store.lookup(keys)]

    path = tmp_path / "tierkv.toml"
    async with running(store, path) as runtime:
        keys = fill(store)
        values = {"policy": "s3fifo", "undo_s": "7s", "dead_after_s": "1d"}
        await change(runtime, store, path, values)
        assert store.stats().policy == "s3fifo"
        assert store.purge(store.preview_purge(Selector(prefixes=(keys[3],))).token).undo_s == 7.0
        clock.advance(2 * DAY)
        store.touch(keys[:2])
        store.sweep()
        # What was used last among records of a model in use stays; the other model's record leaves first.
        values["cap"] = str(store.stats().size_bytes - 100_000)
        await change(runtime, store, path, values)
        assert here() == [True, True, True, False, False]
        values["ttl_s"] = "1h"
        await change(runtime, store, path, values)
        store.sweep()
        assert here() == [True, True, False, False, False]
        assert store.missing_reason(keys[2]) == "expired"
        values |= {"policy": "lru", "ttl_s": "0s"}
        await change(runtime, store, path, values)
        clock.advance(2 * DAY)
        store.sweep()
        assert here() == [True, True, False, False, False]
        assert store.stats().policy == "lru"


@pytest.mark.parametrize("change", [over_grpc])
async def test_an_age_that_was_shortened_counts_at_the_next_sweep(
    store: Store, clock: FakeClock, tmp_path: Path, change: Change
) -> None:
    async with running(store, tmp_path / "tierkv.toml") as runtime:
        keys = fill(store)
        clock.advance(2 * DAY)
        store.touch(keys[:1])
        store.sweep()
        await change(runtime, store, tmp_path / "tierkv.toml", {"dead_after_s": "1d"})
        store.sweep()
        cap = str(store.stats().size_bytes - 100_000)
        await change(runtime, store, tmp_path / "tierkv.toml", {"cap": cap})
        assert [entry is not None for entry in store.lookup(keys)] == [True, True, True, True, False]
