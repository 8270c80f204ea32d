"""A vault agent's process under ten times its limits: its memory, by the system's own count, is what was promised."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from agent_processes import TOKEN, AgentProcess, Cluster

from tierkv.codec.frame import FrameHeader, FrameType, payload_hash
from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.identity.blocks import BlockKey, PromptChain
from tierkv.rpc.auth import load_or_create_token
from tierkv.rpc.client import VaultClient

MIB = 1 << 20
ROOT = BlockKey(b"\x07" * 32)
CAP_BYTES = 24 * MIB
# Messages in flight, the index, events, what Python keeps: beyond ram_bytes and the process as it starts.
OVERHEAD_BYTES = 64 * MIB


def record(number: int, payload: bytes) -> tuple[RecordHeader, list[bytes]]:
    import numpy as np

    tokens = np.arange(256) + number * 256
    segment = FrameHeader(
        FrameType.SEGMENT, 0, "uint8", (len(payload),), 0, len(payload), len(payload), payload_hash(payload)
    ).pack() + payload  # fmt: skip
    key = PromptChain.of(ROOT, tokens).keys[0]
    header = RecordHeader(
        RecordKind.BLOCK, key, ROOT, ROOT, tokens, 0, b"d" * 16, b"layout", 0, 0, 0.0, 1, len(segment), len(payload),
        "m", "raw",
    )  # fmt: skip
    return header, [header.pack_frame(), segment]


async def fill(vault: AgentProcess, first: int, count: int) -> None:
    client = VaultClient(vault.address, load_or_create_token(TOKEN, None))

    async def records() -> AsyncIterator[tuple[RecordHeader, list[bytes]]]:
        for number in range(first, first + count):
            yield record(number, number.to_bytes(4, "little") * (256 << 10))

    try:
        outcomes = await client.store(records())
        assert {outcome.outcome for outcome in outcomes} == {"stored"}
    finally:
        await client.close()


@pytest.mark.parametrize("durable", [False, True])
def test_ten_times_the_limits_of_data_leave_a_vaults_memory_within_its_promise(
    cluster: Cluster, tmp_path: Path, durable: bool
) -> None:
    limits: dict[str, object] = {"max_bytes": CAP_BYTES, "max_record_bytes": 4 * MIB}
    if durable:
        folder = {"persist_path": str(tmp_path / "vault"), "min_free_bytes": 0}
        limits |= {**folder, "disk_bytes": 2 * CAP_BYTES, "ram_bytes": CAP_BYTES}
    vault = cluster.vault("kv-vault", **limits)
    process = psutil.Process(vault.process.pid)
    at_start = process.memory_info().rss
    turns = 10 * (2 if durable else 1)
    resident: list[int] = []
    for turn in range(turns):
        asyncio.run(fill(vault, turn * 24, 24))
        resident.append(process.memory_info().rss - at_start)
    tier = vault.tier("kv")
    assert tier.size_bytes <= tier.cap_bytes
    assert tier.evictions >= 200
    assert max(resident) <= CAP_BYTES + OVERHEAD_BYTES, resident
    # Allocators settle slowly; what would be kept of the second half's data is five times as much.
    assert max(resident[turns // 2 :]) <= max(resident[: turns // 2]) + CAP_BYTES, resident
    if durable:
        used = sum(path.stat().st_blocks * 512 for path in (tmp_path / "vault").iterdir())
        assert used <= 2 * CAP_BYTES
