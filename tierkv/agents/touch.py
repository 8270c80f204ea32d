"""What is used in one place stays young in the others: hits in the engine's own cache, and restores from one vault."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tierkv.agents.lookup import Candidate
from tierkv.agents.routing import TierRouter
from tierkv.errors import TierKVError
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey, PromptChain
from tierkv.rpc.vault_port import VaultPort
from tierkv.telemetry.node import NodeTelemetry

MAX_WAITING = 64
MAX_REMEMBERED = 1024
# A chat hits the same prefix with every turn; once in a while is enough for an LRU of hours.
AGAIN_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class _Used:
    """Keys by tier, and which vault has noticed the use itself."""

    chain: PromptChain
    keys: Mapping[str, list[BlockKey]]
    read_from: Mapping[BlockKey, str]


class Toucher:
    """A bounded queue in front of the vaults' Touch; what does not fit is not worth waiting for."""

    def __init__(self, routers: Mapping[str, TierRouter], telemetry: NodeTelemetry) -> None:
        self._routers = routers
        self._telemetry = telemetry
        self._queue: asyncio.Queue[_Used] = asyncio.Queue(MAX_WAITING)
        self._recent: OrderedDict[BlockKey, float] = OrderedDict()

    def touch(self, chain: PromptChain) -> None:
        """The prompt's records are touched soon on every vault it goes to, unless they were a moment ago."""
        position = len(chain.tokens)
        rows = [*chain.keys, chain.tail_key(position), chain.window_key(position)]
        self._put(chain.tail_key(position), _Used(chain, {"kv": rows, "ssm": [chain.state_key(position)]}, {}))

    def restored(self, chain: PromptChain, position: int, used: Iterable[Candidate]) -> None:
        """The prompt was restored up to ``position`` with these records: wherever else they are, they were used too."""
        read_from: dict[BlockKey, str] = {}
        keys: dict[str, list[BlockKey]] = {"kv": list(chain.keys[: position // BLOCK_TOKENS]), "ssm": []}
        for each in used:
            read_from[each.found.key] = each.source.peer
            if each.found.key not in keys[each.found.kind.tier]:
                keys[each.found.kind.tier].append(each.found.key)
        self._put(chain.state_key(position), _Used(chain, keys, read_from))

    def _put(self, name: BlockKey, used: _Used) -> None:
        now_s = time.monotonic()
        if now_s - self._recent.get(name, float("-inf")) < AGAIN_AFTER_S or self._queue.full():
            return
        self._recent[name] = now_s
        if len(self._recent) > MAX_REMEMBERED:
            self._recent.popitem(last=False)
        self._queue.put_nowait(used)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            used = await self._queue.get()
            for tier, wanted in used.keys.items():
                router = self._routers[tier]
                for port in router.targets(used.chain):
                    keys = [key for key in wanted if used.read_from.get(key) != port.peer]
                    if keys:
                        await self._touch(router, port, keys)

    async def _touch(self, router: TierRouter, port: VaultPort, keys: list[BlockKey]) -> None:
        try:
            here = await port.touch(keys)
        except TierKVError:
            self._telemetry.count("touches_failed")
            return
        # What was evicted there has to be offered again.
        router.known.discard(key for key, is_here in zip(keys, here, strict=True) if not is_here)
