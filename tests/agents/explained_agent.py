"""An inference agent in this process, with real vaults behind real gRPC, whose insides a test can reach."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
from agent_processes import TOKEN, Engine, ready_engine

from tierkv.agents import control_channel
from tierkv.agents.inference import InferenceAgent, InferenceOptions
from tierkv.rpc.auth import load_or_create_token
from tierkv.rpc.node_client import NodeClient
from tierkv.state.layout import Layout
from tierkv.telemetry.explanation import Explanation, TierFinding

sys.path.append(str(Path(__file__).resolve().parents[1] / "rpc"))

from running_vaults import Vault, running_vault


@dataclass
class Rig:
    agent: InferenceAgent
    kv: Vault
    ssm: Vault
    home: Path
    client: NodeClient
    engines: list[Engine]

    async def engine(self, layout: Layout | None = None, **options) -> Engine:
        return await ready_engine(self.agent.server.path, self.home, self.engines, layout=layout, **options)

    async def explain(self, number: int = 0) -> Explanation:
        return await self.client.explain(number)

    async def prefilled(self, engine: Engine, *samples: tuple[int, int, float]) -> None:
        """The engine has reported these prefills, and the agent has read them."""
        rows = [[engine.model.id, *each] for each in samples]
        await asyncio.to_thread(engine.client.report_hot, {"prefills": rows})
        inside = self.agent.engines._engines.values()
        await until(lambda: any(model.prefill.seconds(0, 1000) for each in inside for model in each.models.values()))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


def finding(explained: Explanation, tier: str) -> TierFinding:
    return next(each for each in explained.tiers if each.tier == tier)


async def demote(engine: Engine, tokens: np.ndarray):
    return await asyncio.to_thread(engine.demote, tokens)


async def restore(engine: Engine, tokens: np.ndarray, **options):
    return await asyncio.to_thread(lambda: engine.restore(tokens, **options))


@contextlib.asynccontextmanager
async def explained_agent(
    *, vault: dict | None = None, kv_address: str = "", assumed_tokens_per_s: float = 10.0, **options
) -> AsyncIterator[Rig]:
    """``kv_address``: where the agent reaches the KV vault, if not at its own address (a proxy).

    ``assumed_tokens_per_s``: for how fast an engine that has not computed yet is taken; toys are in no hurry.
    """
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(patch.object(control_channel, "FASTEST_TOKENS_PER_S", assumed_tokens_per_s))
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierkv-")))
        kv = await stack.enter_async_context(running_vault(token=TOKEN, **(vault or {})))
        ssm = await stack.enter_async_context(running_vault(token=TOKEN, role="ssm-vault"))
        defaults = {
            "port": 0, "socket": home / "s", "token": TOKEN, "kv_codec": "lossless", "min_store_tokens": 1,
            "min_restore_tokens": 1, "handoff_bytes": 8 << 20, "ssm_cold": (ssm.runtime.address,),
            "kv_cold": (kv_address or kv.runtime.address,), "connect_timeout_s": 5.0, "probe_timeout_s": 5.0,
        }  # fmt: skip
        agent = InferenceAgent(InferenceOptions("test", **{**defaults, **options}))
        await agent.start()
        client = NodeClient(agent.runtime.address, load_or_create_token(TOKEN, None))
        rig = Rig(agent, kv, ssm, home, client, [])
        try:
            yield rig
        finally:
            await client.close()
            for engine in rig.engines:
                await asyncio.to_thread(engine.close)
            await agent.stop()
