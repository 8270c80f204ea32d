"""A link that is too slow for restores is measured again beside the requests that go without them.

Otherwise nothing would show that it has become faster before its rate is too old to be believed, and the request that
is tried then pays for a link that has not. What is brought for it is read by nobody and waited for by nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import cast

from tierkv.agents.lookup import Plan
from tierkv.errors import TierKVError
from tierkv.identity.blocks import BlockKey
from tierkv.rpc.client import VaultClient
from tierkv.rpc.vault_port import Missing, Piece

# So long after a link was measured it is measured again; each time it is still too slow, after twice as long.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
# What one measurement takes at most, of the link and of time.
MOST_BYTES, MOST_S = 4 << 20, 1.0


class Remeasurer:
    """Owned by the event loop."""

    def __init__(self) -> None:
        self._pauses: dict[VaultClient, float] = {}
        self._tasks: dict[VaultClient, asyncio.Task[None]] = {}

    def fast_enough(self, plan: Plan) -> None:
        """A restore of all of this plan is worth its while."""
        if not self._pauses:
            return  # every restore comes here
        for client in _keys_by_client(plan):
            self._pauses.pop(client, None)

    def too_slow(self, plan: Plan) -> None:
        """The links behind this plan are measured again if that was some time ago. Returns at once."""
        for client, keys in _keys_by_client(plan).items():
            pause_s = self._pauses.get(client, FIRST_PAUSE_S)
            if client in self._tasks or time.monotonic() - client.link.received_s < pause_s:
                continue
            self._pauses[client] = min(2 * pause_s, LONGEST_PAUSE_S)
            task = asyncio.create_task(_measure(client, keys), name=f"measure {client.peer}")
            self._tasks[client] = task
            task.add_done_callback(lambda _, client=client: self._tasks.pop(client, None))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _keys_by_client(plan: Plan) -> dict[VaultClient, list[BlockKey]]:
    found: dict[VaultClient, list[BlockKey]] = {}
    for each in (*plan.rows, *plan.checkpoints()):
        if isinstance(each.source, VaultClient):
            found.setdefault(each.source, []).append(each.found.key)
    return found


async def _measure(client: VaultClient, keys: Sequence[BlockKey]) -> None:
    """Brings a little; the client keeps what rate that was."""
    n_bytes = 0
    with contextlib.suppress(TierKVError, TimeoutError):
        async with asyncio.timeout(MOST_S):
            stream = cast("AsyncGenerator[Piece | Missing]", client.promote(keys, peek=True))
            async with contextlib.aclosing(stream) as items:
                async for item in items:
                    n_bytes += len(item.data) if isinstance(item, Piece) else 0
                    if n_bytes >= MOST_BYTES:
                        return
