"""A vault agent with a folder: killed and started again, it serves what it acknowledged."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path

import pytest

from tierkv.agents.vault import VaultOptions, build_vault_agent, run_vault
from tierkv.errors import Refused, StartupError
from tierkv.rpc.auth import load_or_create_token
from tierkv.rpc.client import VaultClient
from tierkv.store.disk import DiskStore
from tierkv.store.disk_options import DiskOptions
from tierkv.store.log.files import Disk

TOKEN = "t" * 32


def options(folder: Path, **values) -> VaultOptions:
    return VaultOptions("v", port=0, token=TOKEN, persist_path=folder, ram_bytes=8 << 20, disk_bytes=64 << 20, **values)


def test_the_second_agent_on_a_folder_is_refused_and_the_first_lives_on(tmp_path):
    async def both() -> None:
        ready = asyncio.Event()
        first = asyncio.create_task(run_vault(options(tmp_path, on_ready=lambda _: ready.set())))
        await asyncio.wait_for(ready.wait(), 20)
        with pytest.raises(StartupError, match="two vaults cannot share one"):
            build_vault_agent(options(tmp_path))
        assert not first.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await first

    asyncio.run(both())
    assert {path.name for path in tmp_path.iterdir()} == {"vault.lock", "vault.meta"}


def test_a_start_leaves_nothing_of_its_self_test_and_no_epoch(tmp_path):
    async def start_and_stop() -> None:
        runtime = build_vault_agent(options(tmp_path))
        await runtime.start()
        await runtime.stop()

    for _ in range(3):
        asyncio.run(start_and_stop())
    store = DiskStore(tmp_path, DiskOptions(disk_bytes=8 << 20, ram_bytes=1 << 20))
    assert (store.epoch, store.stats().records, store.stats().disk.segments) == (0, 0, 0)
    store.close()


def test_a_disk_that_takes_nothing_is_a_refusal_over_the_wire_and_the_vault_lives_on(tmp_path):
    class Broken(Disk):
        broken = False

        def write(self, fd, buffers, offset):
            if self.broken:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            super().write(fd, buffers, offset)

    async def ask() -> None:
        disk = Broken()
        store = DiskStore(tmp_path, DiskOptions(disk_bytes=8 << 20, ram_bytes=1 << 20, min_free_bytes=0), disk=disk)
        runtime = build_vault_agent(options(tmp_path), store)
        await runtime.start()
        client = VaultClient(runtime.address, load_or_create_token(TOKEN, None))
        try:
            plan = await client.preview_purge()
            disk.broken = True
            with pytest.raises(Refused, match=r"cannot be written|may not outlive a restart"):
                await client.purge(plan.token)
            stats = await client.stats()
            assert stats.disk is not None
            assert stats.disk.problem == "read_only"
        finally:
            await client.close()
            await runtime.stop()

    asyncio.run(ask())
