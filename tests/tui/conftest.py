"""Every screen test reads the same clock, colours and glyphs, whatever the developer's machine has."""

from __future__ import annotations

import asyncio
import time

import pytest
import textual.app
import textual.pilot

TURNS = 20
"""Rounds of the event loop in which what a message started (a task, a callback) has come to its next wait."""


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks on the screen read UTC, whatever the machine's zone; colours and glyphs are not the developer's."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("TIERKV_ASCII", raising=False)
    time.tzset()


@pytest.fixture(autouse=True)
def _settled_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pilot goes on once every widget has handled its messages. Textual's waits besides, several times a key, until
    the processor has been idle for 20 ms: a busy machine never is, and each wait then takes its whole second."""

    async def turns(_min_sleep: float = 0.0, _max_sleep: float = 0.0) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)

    for module in (textual.app, textual.pilot):
        monkeypatch.setattr(module, "wait_for_idle", turns)
