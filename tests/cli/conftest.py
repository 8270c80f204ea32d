"""A home of its own, an empty working directory, the command line in this process, and a vault to ask."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_agents import CONNECT_S, Ran, VaultThread

from tierkv.cli import ask
from tierkv.cli.main import main


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's files are; the working directory is an empty folder beside it."""
    for name in [name for name in os.environ if name.startswith("TIERKV_")]:
        monkeypatch.delenv(name)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("TIERKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(ask, "CONNECT_S", CONNECT_S)
    monkeypatch.setattr(ask, "STATUS_BOUND_S", CONNECT_S)
    return tmp_path / "home"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """The command line in this process: exit code, stdout, stderr."""

    def call(*words: str) -> Ran:
        capsys.readouterr()
        try:
            code = main(words)
        except SystemExit as left:
            code = int(left.code or 0)
        told = capsys.readouterr()
        return Ran(code, told.out, told.err)

    return call


@pytest.fixture
def vault(home: Path) -> Iterator[VaultThread]:
    with VaultThread() as running:
        yield running
