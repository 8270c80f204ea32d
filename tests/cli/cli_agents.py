"""Real agents for the command line to talk to: a vault in a thread, records to put into it, and the program itself."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tierkv.agents.runtime import AgentRuntime
from tierkv.agents.vault import VaultOptions, build_vault_agent
from tierkv.codec.frame import CodecId, FrameHeader, FrameType, payload_hash
from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.identity.blocks import BlockKey, block_key
from tierkv.rpc.auth import load_or_create_token
from tierkv.rpc.client import VaultClient

# A machine that does much else may need this long for a connection to itself.
CONNECT_S = 20.0


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def program(*words: str, stdin: str = "", timeout: float = 60, **environment: str) -> Ran:
    """The installed program in a process of its own; nobody's terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "tierkv", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


class VaultThread:
    """A real vault agent on a free port of this machine, in a loop of its own."""

    def __init__(self, **options: Any) -> None:
        self._options = {"name": "nas", "port": 0, "max_bytes": 16 << 20, "max_record_bytes": 1 << 20, **options}
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._runtime: AgentRuntime | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.port = 0

    def __enter__(self) -> VaultThread:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._runtime is not None
        asyncio.run_coroutine_threadsafe(self._runtime.stop(0.0), self._loop)
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._runtime = build_vault_agent(VaultOptions(**self._options))
        self.port = await self._runtime.start()
        self._ready.set()
        await self._runtime.run()

    def store(self, *, model: str, blocks: int = 1, seed: int = 0) -> BlockKey:
        """A chain of whole blocks of 256 tokens; returns the leaf's key."""
        return asyncio.run(_store(self.address, model, blocks, seed))


async def _store(address: str, model: str, blocks: int, seed: int) -> BlockKey:
    client = VaultClient(address, load_or_create_token(), connect_timeout_s=CONNECT_S)
    records = list(_chain(model, blocks, seed))

    async def sending() -> AsyncIterator[tuple[RecordHeader, list[bytes]]]:
        for header, segment in records:
            yield header, [header.pack_frame(), segment]

    try:
        outcomes = await client.store(sending())
        assert all(outcome.accepted for outcome in outcomes), outcomes
    finally:
        await client.close()
    return records[-1][0].key


def _chain(model: str, blocks: int, seed: int) -> list[tuple[RecordHeader, bytes]]:
    rng = np.random.default_rng(seed)
    root = BlockKey(rng.bytes(32))
    parent, chain = root, []
    for number in range(blocks):
        tokens = rng.integers(0, 1000, 256, dtype=np.int64)
        payload = rng.bytes(4096)
        frame = FrameHeader(
            FrameType.SEGMENT, CodecId.RAW, "uint8", (4096,), 256 * number, 4096, 4096, payload_hash(payload)
        )
        segment = frame.pack() + payload
        key = block_key(parent, tokens)
        header = RecordHeader(
            RecordKind.BLOCK, key, parent, root, tokens, 256 * number, bytes(16), b"{}", 0, 0, time.time(),
            1, len(segment), 4096, model=model, codec="raw",
        )  # fmt: skip
        chain.append((header, segment))
        parent = key
    return chain


def config_file(folder: Path, *, kv: int, ssm: int = 1, inference: int = 2, more: str = "") -> Path:
    """A configuration whose absent agents are at ports where nothing listens."""
    path = folder / "tierkv.toml"
    path.write_text(
        f"[cluster]\nname = 'test'\n[cluster.kv_cold]\nport = {kv}\n[cluster.ssm_cold]\nport = {ssm}\n"
        f"[inference]\nport = {inference}\n{more}"
    )
    return path
