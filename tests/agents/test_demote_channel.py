"""An agent that is behind with what a hook sends ahead: the hook waits, nobody is hung up on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tierkv.agents import demote_channel
from tierkv.agents.demote_channel import DemoteChannel
from tierkv.errors import HandoffError
from tierkv.handoff.protocol import Message


class Hook:
    """A connection on which pieces of 8 bytes come as fast as they are read."""

    def __init__(self, offsets: list[int]) -> None:
        self.offsets, self.freed, self.aborted = offsets, list[int](), False
        self.read = 0

    async def receive(self) -> Message | None:
        await asyncio.sleep(0)
        if self.read == len(self.offsets):
            return None
        self.read += 1
        fields = {"transfer": 1, "offset": self.offsets[self.read - 1], "bytes": 8, "segments": []}
        return Message("piece", fields, b"")

    def region(self, offset: int, length: int) -> memoryview:
        return memoryview(bytes(length))

    async def send(self, op: str, message: dict[str, list[int]]) -> None:
        assert op == "free"
        self.freed += message["offsets"]

    def abort(self) -> None:
        self.aborted = True


class Behind:
    """Takes each piece only when it is told to."""

    def __init__(self) -> None:
        self.waiting, self.go = 0, asyncio.Event()

    async def piece(self, *_: object) -> None:
        self.waiting += 1
        await self.go.wait()

    def end(self, *_: object) -> None: ...


def channel(hook: Hook, demoter: Behind) -> DemoteChannel:
    incoming = SimpleNamespace(layout=None, jobs=0)
    engine = SimpleNamespace(transfers={1: incoming}, kind="test")
    parts = SimpleNamespace(demoter=demoter)
    return DemoteChannel(cast(Any, parts), cast(Any, engine), cast(Any, hook))


def test_more_pieces_than_are_taken_at_once_wait_in_the_socket(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demote_channel, "MAX_PIECES", 4)

    async def run() -> None:
        hook, demoter = Hook(list(range(0, 800, 8))), Behind()
        running = asyncio.create_task(channel(hook, demoter).run())
        for _ in range(50):
            await asyncio.sleep(0)
        # Four are being taken, the fifth is read and waits; the rest is not read.
        assert (demoter.waiting, hook.read, running.done()) == (4, 5, False)
        demoter.go.set()
        for _ in range(1000):
            await asyncio.sleep(0)
            if len(hook.freed) == 100:
                break
        assert sorted(hook.freed) == hook.offsets
        await running
        assert not hook.aborted

    asyncio.run(run())


def test_a_region_that_is_still_read_may_not_be_sent_again():
    async def run() -> None:
        with pytest.raises(HandoffError, match="still being read"):
            await channel(Hook([0, 8, 0]), Behind()).run()

    asyncio.run(run())
