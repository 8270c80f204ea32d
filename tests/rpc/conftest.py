"""Vaults to talk to: one in this process, and one that can be killed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from running_vaults import Vault, VaultProcess, running_vault


@pytest.fixture(autouse=True)
def tierkv_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("TIERKV_HOME", str(home))
    monkeypatch.delenv("TIERKV_TOKEN", raising=False)
    return home


@pytest.fixture
async def vault() -> AsyncIterator[Vault]:
    async with running_vault() as running:
        yield running


@pytest.fixture
def vault_process(tierkv_home: Path) -> Iterator[VaultProcess]:
    process = VaultProcess(tierkv_home)
    yield process
    process.close()
