"""Snapshots and events as the console reads them, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from running_vaults import Vault, running_vault

from tierkv.rpc.auth import Token
from tierkv.rpc.node_service import bounded_interval_s, until_tick_s
from tierkv.v1 import node_service_pb2 as pb
from tierkv.v1 import node_service_pb2_grpc


async def test_a_node_says_who_it_is_and_whether_our_token_counts(vault: Vault):
    report = await vault.node_client(vault.token).get_node()
    assert (report.node.role, report.node.name, report.node.address) == ("kv-vault", "v", vault.runtime.address)
    assert [tier.name for tier in report.node.tiers] == ["kv"]
    assert report.node.memory.total_bytes >= report.node.memory.used_bytes > report.node.memory.rss_bytes > 0
    assert report.authenticated
    assert not (await vault.node_client(None).get_node()).authenticated
    assert not (await vault.node_client(Token("wrong-wrong-wrong-wrong", True, "")).get_node()).authenticated


async def test_snapshots_keep_coming_with_rising_numbers(vault: Vault):
    seen = []
    async with contextlib.aclosing(vault.node_client().watch_snapshots(0.1)) as reports:
        async for report in reports:
            seen.append(report.node.sequence)
            if len(seen) == 4:
                break
    assert seen == sorted(set(seen))


async def test_fifty_watchers_share_snapshots(vault: Vault):
    before = vault.runtime.telemetry.snapshot().sequence

    async def watch(n: int) -> None:
        async with contextlib.aclosing(vault.node_client().watch_snapshots(0.2)) as reports:
            for _ in range(n):
                await anext(reports)

    await asyncio.gather(*(watch(6) for _ in range(50)))
    taken = vault.runtime.telemetry.snapshot().sequence - before
    assert taken < 300 / 4


async def test_events_are_kept_followed_and_numbered(vault: Vault):
    telemetry = vault.runtime.telemetry
    for n in range(3):
        telemetry.emit("demote", "info", f"event {n}", records=str(n))
    first = telemetry.events.last_id - 2
    client = vault.node_client()
    kept = [event async for batch in client.watch_events(first - 1, follow=False) for event in batch.events]
    assert [(event.id, event.message) for event in kept] == [(first + n, f"event {n}") for n in range(3)]
    assert (kept[1].kind, kept[1].node, kept[1].attributes) == ("demote", "v", {"records": "1"})
    async with contextlib.aclosing(client.watch_events(kept[-1].id)) as batches:
        waiting = asyncio.create_task(anext(batches))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(telemetry.emit, "promote", "info", "from another thread")
        assert [event.message for event in (await waiting).events] == ["from another thread"]


async def test_a_reader_who_is_too_late_is_told_how_many_it_missed():
    async with running_vault(events_kept=10) as vault:
        for n in range(30):
            vault.runtime.telemetry.emit("demote", "info", f"{n}")
        last = vault.runtime.telemetry.events.last_id
        batches = [batch async for batch in vault.node_client().watch_events(5, follow=False)]
        assert [event.id for batch in batches for event in batch.events] == list(range(last - 9, last + 1))
        assert batches[0].dropped == last - 10 - 5


async def test_an_id_from_an_earlier_run_gets_everything(vault: Vault):
    batches = [batch async for batch in vault.node_client().watch_events(10**9, follow=False)]
    assert batches[0].events[0].id == 1


async def test_a_burst_of_events_arrives_whole(vault: Vault):
    got: list[int] = []

    async def follow() -> None:
        async with contextlib.aclosing(vault.node_client().watch_events()) as batches:
            async for batch in batches:
                got.extend(event.id for event in batch.events)
                if got[-1] >= 1500:
                    return

    task = asyncio.create_task(follow())
    while (last := vault.runtime.telemetry.events.last_id) < 1500:
        vault.runtime.telemetry.emit("evict", "info", f"{last}")
        if last % 100 == 0:
            await asyncio.sleep(0)
    await asyncio.wait_for(task, 30)
    assert got == list(range(1, got[-1] + 1))


async def test_beyond_loopback_telemetry_needs_the_token():
    async with running_vault(token="given-on-purpose-123456", host="0.0.0.0") as vault:
        address = f"127.0.0.1:{vault.runtime.port}"
        from tierkv.errors import NotAuthenticated
        from tierkv.rpc.client import NodeClient

        for token, fits in ((None, False), (vault.token, True)):
            client = NodeClient(address, token, connect_timeout_s=5)
            if fits:
                assert (await client.get_node()).authenticated
            else:
                with pytest.raises(NotAuthenticated):
                    await client.get_node()
            await client.close()


async def test_health_is_open_and_names_the_services(vault: Vault):
    async with grpc.aio.insecure_channel(vault.runtime.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "tierkv.v1.VaultService", "tierkv.v1.NodeService"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        node = await node_service_pb2_grpc.NodeServiceStub(channel).GetNode(pb.GetNodeRequest())
        assert node.node.role == "kv-vault"


@pytest.mark.parametrize("flag", [False, True])
async def test_reflection_is_there_only_when_asked_for(flag: bool):
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with running_vault(reflection=flag) as vault, grpc.aio.insecure_channel(vault.runtime.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        if flag:
            answer = await call.read()
            assert "tierkv.v1.VaultService" in [item.name for item in answer.list_services_response.service]
        else:
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()


@pytest.mark.parametrize(("now_s", "left_s"), [(10.0, 0.5), (10.125, 0.375), (10.375, 0.625)])
def test_watchers_of_one_interval_tick_together(now_s: float, left_s: float):
    assert until_tick_s(0.5, now_s) == left_s
    assert (now_s + left_s) % 0.5 == 0


@pytest.mark.parametrize(
    ("asked", "used"), [(0, 0.5), (-1, 0.5), (float("nan"), 0.5), (float("inf"), 0.5), (0.001, 0.1), (1e9, 60), (2, 2)]
)
def test_intervals_are_bounded(asked: float, used: float):
    assert bounded_interval_s(asked) == used
