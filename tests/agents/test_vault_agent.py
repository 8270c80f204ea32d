"""The vault as a process and the runtime under it: starting, refusing to start, watching itself, and ending."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tierkv.agents import vault as vault_module
from tierkv.agents.runtime import AgentRuntime, announce_port, join_address
from tierkv.agents.vault import VaultOptions, build_vault_agent, self_test
from tierkv.errors import PeerError, PortInUse, StartupError, UnsafeBind, exit_code
from tierkv.rpc.auth import Token, load_token
from tierkv.rpc.client import NodeClient, VaultClient
from tierkv.store.ram import RamStore
from tierkv.telemetry.node import NodeTelemetry

GIVEN = Token("given-on-purpose-0123", True, "given")
MADE = Token("made-at-first-start-0", False, "/somewhere/token")
START = """
import asyncio, sys
from tierkv.agents.vault import VaultOptions, run_vault
asyncio.run(run_vault(VaultOptions("attic", role=sys.argv[1], port=0, max_bytes=1 << 24, ready_fd=1)))
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIERKV_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TIERKV_TOKEN", raising=False)
    return tmp_path / "home"


def runtime(host: str = "127.0.0.1", port: int = 0, token: Token = MADE, insecure: bool = False) -> AgentRuntime:
    return AgentRuntime(
        role="kv-vault", name="v", host=host, port=port, token=token, insecure=insecure,
        telemetry=NodeTelemetry("kv-vault", "v"),
    )  # fmt: skip


# --- starting -----------------------------------------------------------------------------------


async def test_a_port_in_use_is_named_and_nothing_is_left_running():
    first, second = runtime(), None
    port = await first.start()
    second = runtime(port=port)
    with pytest.raises(PortInUse) as refused:
        await second.start()
    assert (refused.value.port, exit_code(refused.value)) == (port, 1)
    assert str(port) in str(refused.value)
    await second.stop(0)
    await first.stop(0)


async def test_a_port_that_another_program_uses_is_in_use_too():
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortInUse):
        await runtime(port=other.getsockname()[1]).start()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
async def test_an_address_that_is_not_ours_is_not_called_a_port_in_use(host: str):
    with pytest.raises(StartupError) as refused:
        await runtime(host, token=GIVEN).start()
    assert not isinstance(refused.value, PortInUse)
    assert host in str(refused.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
async def test_a_bind_beyond_loopback_needs_a_token_that_was_given(host: str):
    with pytest.raises(UnsafeBind) as refused:
        await runtime(host).start()
    assert exit_code(refused.value) == 5
    assert "tierkv token new" in str(refused.value)


@pytest.mark.parametrize(("token", "insecure"), [(GIVEN, False), (MADE, True)])
async def test_a_bind_beyond_loopback_is_possible_on_purpose(token: Token, insecure: bool):
    agent = runtime("0.0.0.0", token=token, insecure=insecure)
    assert await agent.start() > 0
    await agent.stop(0)


def test_addresses_are_written_as_others_dial_them():
    assert join_address("127.0.0.1", 5) == "127.0.0.1:5"
    assert join_address("::1", 5) == "[::1]:5"


async def test_two_vaults_of_one_user_and_their_tools_share_the_token(home: Path):
    first, second = (build_vault_agent(VaultOptions("v", port=0, max_bytes=1 << 20)) for _ in range(2))
    assert first.gate.token == second.gate.token == load_token()
    assert (home / "token").stat().st_mode & 0o777 == 0o600
    await first.stop(0)
    await second.stop(0)


# --- the self-test ------------------------------------------------------------------------------


def test_the_self_test_leaves_nothing_behind():
    store = RamStore(1 << 20, undo_s=0)
    self_test(store)
    store.sweep()
    stats = store.stats()
    assert (stats.records, stats.quarantined_records, stats.evictions, dict(stats.refusals)) == (0, 0, 0, {})
    assert list(store.events()) == []


def test_a_store_that_gives_back_other_bytes_does_not_start(monkeypatch: pytest.MonkeyPatch):
    from tierkv.store.ram import RamReader

    monkeypatch.setattr(RamReader, "read", lambda self, offset, length: b"other bytes")
    with pytest.raises(StartupError, match="self-test"):
        build_vault_agent(VaultOptions("v", port=0, max_bytes=1 << 20))


def test_a_cap_that_cannot_be_is_a_start_up_error():
    with pytest.raises(StartupError, match="set aside"):
        build_vault_agent(VaultOptions("v", port=0, max_bytes=10))
    with pytest.raises(StartupError, match="policy"):
        build_vault_agent(VaultOptions("v", port=0, policy="no-such-policy"))


# --- background work ----------------------------------------------------------------------------


async def test_failing_background_work_is_counted_shown_and_repeated():
    agent = runtime()
    runs = []

    def failing() -> None:
        runs.append(1)
        raise ValueError("on purpose")

    async def once() -> None:
        raise KeyError("once")

    agent.every(0.01, failing, "the failing job")
    agent.background(once(), "the failing task")
    await agent.start()
    for _ in range(1000):
        if len(runs) >= 3:
            break
        await asyncio.sleep(0.01)
    faults = [event for event in agent.telemetry.events.after(0)[0] if event.kind == "fault"]
    assert {event.attributes["task"] for event in faults} == {"the failing job", "the failing task"}
    assert "ValueError: on purpose" in " ".join(event.message for event in faults)
    assert agent.telemetry.snapshot().counters["background_failures"] >= 4
    await agent.stop(0)
    ended = len(runs)
    await asyncio.sleep(0.05)
    assert len(runs) == ended


async def test_what_happens_in_the_store_reaches_counters_and_feed():
    store = RamStore(1 << 20)
    agent = build_vault_agent(VaultOptions("v", port=0), store)
    await agent.start()
    tier = agent.telemetry.tier("kv")
    for n in range(40):
        record = vault_module._probe_record(store.epoch)
        writer = store.begin(len(record), store.epoch)
        writer.write(record)
        assert writer.commit() == "stored", n
    evictions = store.stats().evictions
    assert evictions > 0
    assert tier.snapshot().evictions == tier.snapshot().evictions == evictions
    assert tier.snapshot().records == store.stats().records
    for _ in range(300):
        kinds = [event.kind for event in agent.telemetry.events.after(0)[0]]
        if "evict" in kinds:
            break
        await asyncio.sleep(0.02)
    assert "evict" in kinds
    assert "purge" not in kinds
    await agent.stop(0)


# --- ending -------------------------------------------------------------------------------------


async def test_a_server_that_cannot_say_goodbye_holds_up_no_stop(monkeypatch: pytest.MonkeyPatch):
    """gRPC waits up to 20 s for the peer of a clogged connection, now and then: not to be made at will."""
    agent, closed, forever = runtime(), [], asyncio.Event()
    await agent.start()
    stop = agent._server.stop

    async def clogged(grace_s: float) -> None:
        await stop(grace_s)
        await forever.wait()

    monkeypatch.setattr(agent._server, "stop", clogged)
    agent.on_stop(lambda: closed.append(1))
    async with asyncio.timeout(10):
        await agent.stop(grace_s=0)
    assert closed == [1]
    forever.set()


async def test_stop_closes_in_reverse_and_may_be_called_twice():
    agent, closed = runtime(), []
    agent.on_stop(lambda: closed.append("first"))

    async def last() -> None:
        closed.append("last")

    agent.on_stop(last)
    await agent.start()
    running = asyncio.create_task(agent.run())
    await asyncio.gather(agent.stop(0), agent.stop(0))
    await asyncio.wait_for(running, 10)
    assert closed == ["last", "first"]


async def test_watchers_do_not_hold_up_the_end():
    agent = runtime()
    await agent.start()
    client = NodeClient(agent.address, connect_timeout_s=5)
    watches = [client.watch_snapshots(60), client.watch_events()]
    await asyncio.gather(*(anext(watch) for watch in watches))
    await asyncio.wait_for(agent.stop(60), 20)
    for watch in watches:
        with pytest.raises(PeerError):
            async for _ in watch:
                pass
    await client.close()


def started(role: str) -> tuple[subprocess.Popen, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", START, role], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize(("number", "role", "tier"), [("SIGTERM", "kv-vault", "kv"), ("SIGINT", "ssm-vault", "ssm")])
async def test_a_signal_ends_the_process_in_order(number: str, role: str, tier: str):
    process, port = await asyncio.to_thread(started, role)
    client = VaultClient(f"127.0.0.1:{port}", load_token(), connect_timeout_s=10)
    assert (await client.stats()).tier.name == tier
    await client.close()
    process.send_signal(signal.Signals[number])
    _, stderr = await asyncio.to_thread(process.communicate, timeout=30)
    assert process.returncode == 0
    text = stderr.decode()
    assert f"{role} 'attic' listening on 127.0.0.1:{port} (cap 16.0 MiB, token from " in text
    assert len(text.splitlines()) == 1
    assert "Traceback" not in text


def test_the_ready_file_appears_whole(tmp_path: Path):
    file = tmp_path / "ready"
    seen = []
    announce_port(4711, file, None, seen.append)
    assert (file.read_text(), seen) == ("4711\n", [4711])
    assert [item.name for item in tmp_path.iterdir()] == ["ready"]


def test_a_vault_needs_neither_mlx_nor_numba_nor_the_console():
    code = (
        "import sys, tierkv.agents.vault; "
        "print([m for m in ('mlx', 'numba', 'textual', 'pydantic', 'rich') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
