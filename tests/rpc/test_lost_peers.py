"""Peers that die, freeze, are absent, silent, or something else; and that they are found again.

Bounds are several times what is measured: they tell a hang from an answer, not fast from slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import signal
import socket
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from running_vaults import Vault, VaultProcess, running_vault
from wire_records import ROOT, blocks_of, each, prompt, put, record, take

from tierkv.codec.record import RecordKind
from tierkv.demo.processes import free_port
from tierkv.errors import BreakerOpen, DeadlineExceeded, NotAuthenticated, PeerError, Unreachable, WrongService
from tierkv.rpc.auth import Token, load_token
from tierkv.rpc.client import NodeClient, VaultClient
from tierkv.rpc.link import Link

TOKEN = Token("some-token-some-token", True, "given")
HANG_S = 30.0


@contextlib.contextmanager
def listener(answer: bytes = b"") -> Iterator[str]:
    """Accepts, says ``answer`` once, and then nothing."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    kept.append(connection)
                    if answer:
                        connection.sendall(answer)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()
    thread.join(5)


async def failure(awaitable) -> PeerError:
    async with asyncio.timeout(HANG_S):
        with pytest.raises(PeerError) as raised:
            await awaitable
    return raised.value


async def test_a_closed_port_is_unreachable_and_named():
    peer = f"127.0.0.1:{free_port()}"
    client = VaultClient(peer, TOKEN)
    error = await failure(client.probe(prompt(10), blocks=True))
    assert isinstance(error, Unreachable)
    assert str(error) == f"{peer}: nothing listens there (connection refused)"
    await client.close()


async def test_a_silent_listener_is_given_up():
    with listener() as peer:
        client = VaultClient(peer, TOKEN)
        error = await failure(client.probe(prompt(10), blocks=True))
        assert isinstance(error, DeadlineExceeded | Unreachable | WrongService)
        await client.close()


@pytest.mark.parametrize("banner", [b"SSH-2.0-OpenSSH_9.6\r\n", b"-ERR unknown command\r\n", b"\x00" * 200])
async def test_another_protocol_on_the_port_is_a_peer_error(banner: bytes):
    with listener(banner) as peer:
        client = VaultClient(peer, TOKEN)
        error = await failure(client.probe(prompt(10), blocks=True))
        assert isinstance(error, DeadlineExceeded | Unreachable | WrongService)
        await client.close()


async def test_a_web_server_on_the_port_is_the_wrong_service():
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, args=(0.05,), daemon=True).start()
        client = VaultClient(f"127.0.0.1:{web.server_port}", TOKEN)
        error = await failure(client.probe(prompt(10), blocks=True))
        assert isinstance(error, WrongService), error
        await client.close()
        web.shutdown()


async def test_an_agent_without_a_vault_is_the_wrong_service():
    from tierkv.agents.runtime import AgentRuntime
    from tierkv.telemetry.node import NodeTelemetry

    runtime = AgentRuntime(
        role="inference", name="i", host="127.0.0.1", port=0, token=TOKEN, insecure=False,
        telemetry=NodeTelemetry("inference", "i"),
    )  # fmt: skip
    await runtime.start()
    client = VaultClient(runtime.address, TOKEN, connect_timeout_s=5, probe_timeout_s=10, frame_timeout_s=10)
    for call in (client.probe(prompt(10), blocks=True), put(client, blocks_of(prompt(300)))):
        client.link.breaker = type(client.link.breaker)(client.peer)
        assert isinstance(await failure(call), WrongService)
    await client.close()
    await runtime.stop(0)


async def test_a_vault_killed_in_mid_promote_ends_the_restore(vault_process: VaultProcess):
    client = VaultClient(vault_process.peer, load_token(), connect_timeout_s=5, frame_timeout_s=10)
    big = record(RecordKind.STATE, ROOT, [1], 0, size=20 << 20, segments=1)
    await put(client, [big])

    async def restore() -> None:
        async for _ in client.promote([big.key] * 50):
            if vault_process.process.poll() is None:
                vault_process.kill()

    assert isinstance(await failure(restore()), Unreachable)
    with pytest.raises(BreakerOpen):
        await client.probe(prompt(10), blocks=True)
    await client.close()


async def test_a_vault_killed_in_mid_store_ends_the_demotion(vault_process: VaultProcess):
    client = VaultClient(vault_process.peer, load_token(), connect_timeout_s=5, frame_timeout_s=10)
    big = record(RecordKind.STATE, ROOT, [1], 0, size=4 << 20, segments=1)

    async def endless():
        for n in range(100_000):
            if n == 3:
                vault_process.kill()
            yield big.header, [big.data]

    assert isinstance(await failure(client.store(endless())), Unreachable)
    await client.close()


async def test_a_frozen_vault_is_noticed_and_found_again(vault_process: VaultProcess):
    client = VaultClient(vault_process.peer, load_token(), connect_timeout_s=5)
    records = blocks_of(prompt(600))
    await put(client, records)
    vault_process.signal(signal.SIGSTOP)
    began = time.monotonic()
    assert isinstance(await failure(client.probe(prompt(600), blocks=True)), DeadlineExceeded | Unreachable)
    assert isinstance(await failure(take(client, [records[0].key])), PeerError)
    while client.link.breaker.state == "closed" and time.monotonic() - began < HANG_S:
        await failure(client.probe(prompt(600), blocks=True))
    assert client.link_snapshot("kv").state in ("down", "backoff")
    vault_process.signal(signal.SIGCONT)
    assert await eventually_found(client, prompt(600)) == 2
    await client.close()


async def eventually_found(client: VaultClient, chain) -> int:
    until = time.monotonic() + HANG_S
    while True:
        try:
            return (await client.probe(chain, blocks=True, timeout_s=5)).leading_blocks
        except PeerError:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)


async def test_a_vault_that_comes_back_is_asked_again_without_waiting_for_the_back_off(vault_process: VaultProcess):
    client = VaultClient(vault_process.peer, load_token(), connect_timeout_s=5)
    await put(client, blocks_of(prompt(600)))
    vault_process.kill()
    for _ in range(4):
        client.link.breaker.retry_now()
        await failure(client.probe(prompt(600), blocks=True))
        await asyncio.sleep(0.05)
    client.link.breaker._open_until = time.monotonic() + 1000.0
    vault_process.start()
    assert await eventually_found(client, prompt(600)) == 0
    assert client.link_snapshot("kv").state == "up"
    assert client.link_snapshot("kv").failures >= 4
    await client.close()


async def test_a_link_that_is_back_and_not_asked_yet_is_not_called_down(vault_process: VaultProcess):
    client = VaultClient(vault_process.peer, load_token(), connect_timeout_s=5)
    await put(client, blocks_of(prompt(600)))
    vault_process.kill()
    await failure(client.probe(prompt(600), blocks=True))
    assert client.link_snapshot("kv").state == "down"
    vault_process.start()
    until = time.monotonic() + HANG_S
    while client.link_snapshot("kv").state == "down":
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    assert client.link_snapshot("kv").state == "unknown"
    vault_process.kill()
    while client.link_snapshot("kv").state == "unknown":
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    assert client.link_snapshot("kv").state == "down"
    await client.close()


async def test_a_watch_ends_when_the_agent_dies_and_when_it_stops(vault_process: VaultProcess):
    for number in (signal.SIGKILL, signal.SIGTERM):
        client = NodeClient(vault_process.peer, connect_timeout_s=5)

        async def watch(client=client, number=number) -> None:
            async for _ in client.watch_snapshots(0.1):
                vault_process.signal(number)

        assert isinstance(await failure(watch()), PeerError)
        await client.close()
        vault_process.process.wait(HANG_S)
        if number is signal.SIGKILL:
            vault_process.start()
    assert vault_process.process.returncode == 0


async def test_a_wrong_token_opens_the_breaker_too(vault: Vault):
    client = vault.client(TOKEN)
    assert isinstance(await failure(client.probe(prompt(10), blocks=True)), NotAuthenticated)
    assert isinstance(await failure(client.probe(prompt(10), blocks=True)), BreakerOpen)


async def test_a_refusal_in_the_middle_of_a_long_store_says_why(vault: Vault):
    big = record(RecordKind.STATE, ROOT, [1], 0, size=20 << 20, segments=1)
    for _ in range(3):
        client = vault.client(TOKEN)
        assert isinstance(await failure(put(client, [big] * 10)), NotAuthenticated)


async def test_what_the_senders_own_iterator_raises_ends_the_call_and_is_no_fault_of_the_vault(vault: Vault):
    client = vault.client()

    async def failing():
        async for item in each(blocks_of(prompt(300))):
            yield item
            raise RuntimeError("the encoder failed")

    with pytest.raises(RuntimeError, match="encoder"):
        await client.store(failing())
    assert client.link.breaker.state == "closed"
    assert await put(client, blocks_of(prompt(300))) in (["stored", "stored"], ["present", "stored"])


async def test_a_cancelled_probe_says_nothing_about_the_vault(vault: Vault):
    client = vault.client()
    task = asyncio.create_task(client.probe(prompt(10), blocks=True))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.link.breaker.state == "closed"
    await client.probe(prompt(10), blocks=True)


async def test_a_closed_client_is_unreachable(vault: Vault):
    client = vault.client()
    await client.probe(prompt(10), blocks=True)
    await client.close()
    assert isinstance(await failure(client.probe(prompt(10), blocks=True)), Unreachable)


async def test_the_time_for_a_restore_is_kept(vault: Vault):
    big = record(RecordKind.STATE, ROOT, [1], 0, size=20 << 20, segments=1)
    client = vault.client()
    await put(client, [big])

    async def slow() -> None:
        async with contextlib.aclosing(client.promote([big.key] * 20, timeout_s=0.3)) as items:
            async for _ in items:
                await asyncio.sleep(0.1)

    assert isinstance(await failure(slow()), DeadlineExceeded)


class FailingChannel:
    """A channel that is never connected, and whose state changes when told."""

    def __init__(self) -> None:
        self.change = asyncio.Event()
        self.waits = 0

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        self.waits += 1
        await self.change.wait()
        self.change.clear()

    async def close(self) -> None:
        return


@pytest.mark.parametrize("steps_between", range(8))
async def test_a_link_closes_also_while_its_channel_changes(steps_between: int):
    """In the very step in which the change is on its way to who watches it; else an agent never ends."""
    link = Link("127.0.0.1:1")
    await link.channel.close()
    channel = link.channel = FailingChannel()  # type: ignore[assignment]
    with pytest.raises(Unreachable):
        async with link.attempt():
            raise Unreachable("127.0.0.1:1", "gone")
    async with asyncio.timeout(HANG_S):
        while not channel.waits:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    channel.change.set()
    for _ in range(steps_between):
        await asyncio.sleep(0)
    closing = asyncio.create_task(link.close())
    done, _ = await asyncio.wait({closing}, timeout=4)  # it looks again every 5 s
    assert done, "it goes on"


async def test_a_link_knows_its_round_trip_and_rates():
    async with running_vault() as vault:
        client = vault.client()
        assert client.link_snapshot("kv").state == "unknown"
        big = record(RecordKind.STATE, ROOT, [1], 0, size=8 << 20)
        await put(client, [big])
        await take(client, [big.key])
        await client.probe(prompt(10), blocks=True)
        link = client.link_snapshot("kv")
        assert (link.state, link.peer, link.tier, link.failures) == ("up", vault.runtime.address, "kv", 0)
        assert link.rtt_s > 0
        assert link.receive_bytes_per_s > 1e6
        assert link.send_bytes_per_s > 1e6
