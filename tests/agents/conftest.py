"""A private home for every test, and clusters that end with it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_processes import Cluster


@pytest.fixture(autouse=True)
def tierkv_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("TIERKV_HOME", str(home))
    monkeypatch.delenv("TIERKV_TOKEN", raising=False)
    monkeypatch.delenv("TIERKV_SOCKET", raising=False)
    return home


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """In a short path: a Unix socket's name has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="tierkv-") as home:
        running = Cluster(Path(home))
        yield running
        running.close()


@pytest.fixture(scope="session")
def shared() -> Iterator[Cluster]:
    """One KV vault, one SSM vault and one agent for the whole run; tests use models of their own."""
    with tempfile.TemporaryDirectory(prefix="tierkv-") as home:
        running = Cluster(Path(home))
        running.agent(running.vault("kv-vault"), running.vault("ssm-vault"))
        yield running
        running.close()
