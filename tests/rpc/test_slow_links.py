"""Links that are slow and have taken seconds of bytes already, which is no reason to give them up."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator

import pytest
from running_vaults import VaultProcess, running_vault
from wire_records import ROOT, put, record, take

from tierkv.codec.record import RecordKind
from tierkv.errors import DeadlineExceeded, PeerError, Unreachable
from tierkv.rpc.auth import load_token
from tierkv.rpc.client import STORE_GAP_S, VaultClient

RATE = 600_000


@contextlib.asynccontextmanager
async def slow_link(target: str) -> AsyncIterator[str]:
    """Each connection gets RATE bytes a second each way; what the system takes beyond that waits in its buffers."""
    host, port = target.split(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(8 << 10):
                await asyncio.sleep(len(data) / RATE)
                writer.write(data)
                await writer.drain()
        writer.close()

    pumps: list[asyncio.Task[None]] = []

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        pumps.extend(asyncio.create_task(pump(*pair)) for pair in ((reader, inner_writer), (inner_reader, writer)))

    server = await asyncio.start_server(joined, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for task in pumps:
        task.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)


def records(size: int, count: int = 3):
    return [record(RecordKind.STATE, ROOT, [size, n], 0, size=size, segments=1, seed=n) for n in range(count)]


async def test_what_takes_seconds_arrives_both_ways():
    sent = records(800_000)
    async with running_vault() as vault, slow_link(vault.runtime.address) as peer:
        client = VaultClient(peer, vault.token)
        outcomes = await put(client, sent)
        assert outcomes == ["stored"] * 3
        assert await take(client, [each.key for each in sent]) == [each.data for each in sent]
        await client.close()


async def test_a_question_does_not_wait_behind_what_is_stored():
    async with running_vault() as vault, slow_link(vault.runtime.address) as peer:
        client = VaultClient(peer, vault.token)
        small = records(100)
        await put(client, small)
        storing = asyncio.create_task(put(client, records(2_000_000, 2)))
        await asyncio.sleep(1.0)
        assert await client.touch([each.key for each in small]) == [True] * 3
        assert not storing.done()
        assert set(await storing) == {"stored"}
        await client.close()


async def test_a_vault_that_freezes_in_mid_store_is_told_from_a_slow_link(vault_process: VaultProcess):
    client = VaultClient(vault_process.peer, load_token())
    big = record(RecordKind.STATE, ROOT, [1], 0, size=4 << 20, segments=1)

    async def endless():
        for n in range(100_000):
            if n == 3:
                vault_process.signal(signal.SIGSTOP)
            yield big.header, [big.data]

    began = time.monotonic()
    with pytest.raises((DeadlineExceeded, Unreachable)):
        await client.store(endless())
    assert time.monotonic() - began < STORE_GAP_S
    vault_process.signal(signal.SIGCONT)
    await client.close()


async def test_the_connection_for_stores_is_made_anew_when_a_vault_is_back(vault_process: VaultProcess):
    client = VaultClient(vault_process.peer, load_token(), connect_timeout_s=5)
    first = records(1000, 1)
    await put(client, first)
    vault_process.kill()
    with contextlib.suppress(PeerError):
        await client.touch([first[0].key])
    vault_process.start()
    until = time.monotonic() + 30
    while True:
        with contextlib.suppress(PeerError):
            assert await client.touch([first[0].key]) == [False]
            break
        assert time.monotonic() < until
        await asyncio.sleep(0.02)
    assert await put(client, first) == ["stored"]
    await client.close()


async def test_a_restore_that_is_left_before_its_first_message_says_how_slow_the_link_may_be():
    """Less than the first message in that time: not "2 bytes a second"."""
    async with running_vault() as vault, slow_link(vault.runtime.address) as peer:
        client = VaultClient(peer, vault.token)
        await put(vault.client(), records(800_000, 1))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.25):
                await take(client, [records(800_000, 1)[0].key])
        assert 10_000 < client.link.receive_rate(60.0) < 2 * RATE
        await client.close()


async def test_what_a_restore_left_on_the_way_holds_up_nothing_that_follows():
    """Nor does the next restore wait for it: both have connections without it."""
    async with running_vault() as vault, slow_link(vault.runtime.address) as peer:
        client = VaultClient(peer, vault.token)
        big, small = records(3_000_000, 1)[0], records(100, 1)[0]
        await put(vault.client(), [big, small])
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.6):
                    await take(client, [big.key])
            assert await client.touch([small.key]) == [True]
            assert await take(client, [small.key]) == [small.data]
        await client.close()


async def test_restores_that_share_a_connection_outlive_the_one_that_leaves():
    async with running_vault() as vault:
        client = vault.client()
        sent = records(4_000_000, 3)
        await put(client, sent)
        staying = [asyncio.create_task(take(client, [each.key for each in sent])) for _ in range(3)]
        async with contextlib.aclosing(client.promote([each.key for each in sent])) as items:
            async for _ in items:
                break
        assert await take(client, [sent[0].key]) == [sent[0].data]
        for each in staying:
            assert await each == [one.data for one in sent]
        streams = client._incoming._streams
        assert sum(streams.values()) == 0
        assert len(streams) == 1, "the one that was left is closed"
