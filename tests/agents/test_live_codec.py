"""A codec that is changed while an agent runs: its kernels may take a slow machine a minute to compile."""

from __future__ import annotations

import asyncio
import threading

import pytest
from agent_processes import assert_state, prompt
from explained_agent import demote, explained_agent, restore

from tierkv.agents import inference
from tierkv.handoff.client import Restored


async def test_state_is_stored_and_restored_while_a_codec_is_compiled(monkeypatch: pytest.MonkeyPatch):
    async with explained_agent() as rig:
        engine, first, second = await rig.engine(), prompt(450), prompt(350, 1)
        compiled = threading.Event()
        monkeypatch.setattr(inference, "warm_up", lambda _names: compiled.wait(60))
        # As many as could keep every thread busy that encodes.
        changes = [asyncio.create_task(rig.agent._set_codec("kv", "int8")) for _ in range(4)]
        try:
            await asyncio.sleep(0)
            await demote(engine, first[:400])
            assert_state(await restore(engine, first), engine.layout, first, 400)
            assert not any(change.done() for change in changes)
        finally:
            compiled.set()
            await asyncio.gather(*changes)
        await demote(engine, second[:300])
        restored = await restore(engine, second)
        assert isinstance(restored, Restored)
        assert (restored.position, restored.codec) == (300, "int8")
