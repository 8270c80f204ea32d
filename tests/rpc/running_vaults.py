"""Vaults to talk to: one in this process, and ones that can be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tierkv.agents.runtime import AgentRuntime
from tierkv.agents.vault import VaultOptions, build_vault_agent
from tierkv.rpc.auth import Token
from tierkv.rpc.client import NodeClient, VaultClient
from tierkv.store.ram import RamStore

GENEROUS = {"connect_timeout_s": 5.0, "probe_timeout_s": 10.0, "frame_timeout_s": 10.0}


@dataclass
class Vault:
    """A vault of this process with its insides, and clients that know its token."""

    runtime: AgentRuntime
    store: RamStore
    stack: contextlib.AsyncExitStack

    @property
    def token(self) -> Token:
        return self.runtime.gate.token

    def client(self, token: Token | None = None, **options) -> VaultClient:
        client = VaultClient(self.runtime.address, token or self.token, **{**GENEROUS, **options})
        self.stack.push_async_callback(client.close)
        return client

    def node_client(self, token: Token | None = None) -> NodeClient:
        client = NodeClient(self.runtime.address, token, connect_timeout_s=5.0)
        self.stack.push_async_callback(client.close)
        return client


@contextlib.asynccontextmanager
async def running_vault(*, cap_bytes: int = 64 << 20, **options) -> AsyncIterator[Vault]:
    store = RamStore(cap_bytes, options.get("max_record_bytes", 1 << 30))
    runtime = build_vault_agent(VaultOptions("v", port=0, **options), store)
    async with contextlib.AsyncExitStack() as stack:
        await runtime.start()
        stack.push_async_callback(runtime.stop, 0.1)
        yield Vault(runtime, store, stack)


class VaultProcess:
    """A vault that is a process; the same port is used again after a restart."""

    def __init__(self, home: Path, max_bytes: int = 64 << 20) -> None:
        self._home, self._max_bytes = home, max_bytes
        self.port = 0
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("vault_process.py")), str(self.port), str(self._max_bytes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TIERKV_HOME": str(self._home)},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def peer(self) -> str:
        return f"127.0.0.1:{self.port}"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
