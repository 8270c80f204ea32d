"""An agent's background work: every task is known, every failure is counted, logged and shown."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tierkv.telemetry.node import NodeTelemetry

_log = logging.getLogger(__name__)

Job = Callable[[], Awaitable[None] | None]


class Supervisor:
    """Owned by the agent's event loop. What is given before ``start`` begins then."""

    def __init__(self, telemetry: NodeTelemetry) -> None:
        self._telemetry = telemetry
        self._waiting: list[tuple[Callable[[], Coroutine[Any, Any, object]], str]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = False

    def start(self) -> None:
        self._running = True
        for make, name in self._waiting:
            self._spawn(make(), name)
        self._waiting.clear()

    def background(self, coroutine: Coroutine[Any, Any, object], name: str) -> None:
        """Runs until it ends or the agent stops; an exception ends it and is shown."""
        self._begin(lambda: coroutine, name)

    def every(self, seconds: float, job: Job, name: str = "") -> None:
        """``job`` (plain or async) runs every ``seconds`` from now on; a failing run is shown, the next one comes."""
        name = name or getattr(job, "__qualname__", repr(job))
        self._begin(lambda: self._repeat(seconds, job, name), name)

    async def stop(self) -> None:
        """Everything has ended."""
        self._running = False
        for make, _ in self._waiting:
            make().close()
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, make: Callable[[], Coroutine[Any, Any, object]], name: str) -> None:
        if self._running:
            self._spawn(make(), name)
        else:
            self._waiting.append((make, name))

    def _spawn(self, coroutine: Coroutine[Any, Any, object], name: str) -> None:
        task = asyncio.create_task(self._guard(coroutine, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, coroutine: Coroutine[Any, Any, object], name: str) -> None:
        try:
            await coroutine
        except Exception as error:
            self._report(name, error)

    async def _repeat(self, seconds: float, job: Job, name: str) -> None:
        while True:
            try:
                outcome = job()
                if inspect.isawaitable(outcome):
                    await outcome
            except Exception as error:
                self._report(name, error)
            await asyncio.sleep(seconds)

    def _report(self, name: str, error: Exception) -> None:
        _log.error("%s failed", name, exc_info=error)
        self._telemetry.count("background_failures")
        self._telemetry.emit("fault", "error", f"{name} failed: {type(error).__name__}: {error}", task=name)
