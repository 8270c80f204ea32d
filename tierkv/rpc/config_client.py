"""Reading and changing the configuration of running agents, one or all at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from tierkv.errors import DeadlineExceeded, TierKVError, Unreachable
from tierkv.rpc import config_wire as wire
from tierkv.rpc.auth import Token
from tierkv.rpc.caller import Caller, current_actor, next_message, parsed
from tierkv.rpc.channels import CONNECT_TIMEOUT_S
from tierkv.rpc.config_port import Acknowledged, Changes, Checked, ConfigApplied, ConfigCheck, ConfigState
from tierkv.v1 import node_service_pb2 as pb

__all__ = ["Acknowledged", "Checked", "ConfigClient", "apply_everywhere", "check_everywhere", "undo_everywhere"]

T = TypeVar("T")

CONFIG_TIMEOUT_S = 10.0
"""A codec's kernels are compiled before the change is answered."""

ALL_BOUND_S = 15.0


class ConfigClient(Caller):
    """One agent's configuration. Owned by one event loop. Raises PeerError, and Refused where the agent declines."""

    service = "tierkv.v1.NodeService"
    breaks = False

    def __init__(self, peer: str, token: Token | None = None, *, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        super().__init__(peer, token, connect_timeout_s)

    async def get(self) -> ConfigState:
        answer = await self._unary("GetConfig", pb.GetConfigRequest(), pb.GetConfigResponse, CONFIG_TIMEOUT_S)
        return wire.state_from_proto(answer.config)

    async def check(self, changes: Changes) -> ConfigCheck:
        """What the change would do; nothing is changed."""
        request = pb.ValidateConfigRequest(changes=wire.changes_to_proto(changes))
        answer = await self._unary("ValidateConfig", request, pb.ValidateConfigResponse, CONFIG_TIMEOUT_S)
        return wire.check_from_proto(answer)

    async def apply(self, changes: Changes, *, revision: int = 0, actor: str = "") -> ConfigApplied:
        """The change is in force; raises StaleToken when another came after ``revision``."""
        request = pb.ApplyConfigRequest(
            changes=wire.changes_to_proto(changes), revision=revision, actor=actor or current_actor()
        )
        return await self._applied(request)

    async def undo(self, undo_token: str, *, actor: str = "") -> ConfigApplied:
        return await self._applied(pb.ApplyConfigRequest(undo_token=undo_token, actor=actor or current_actor()))

    async def _applied(self, request: pb.ApplyConfigRequest) -> ConfigApplied:
        answer = await self._unary("ApplyConfig", request, pb.ApplyConfigResponse, CONFIG_TIMEOUT_S)
        return wire.applied_from_proto(answer)

    async def watch(self) -> AsyncIterator[ConfigState]:
        """What is in force at once and after every change, until the agent goes (PeerError)."""
        async with self._link.attempt() as attempt:
            call = self._server_stream("WatchConfig", pb.WatchConfigRequest())
            try:
                while data := await next_message(call, self.peer, None, "no configuration"):
                    self._link.alive(attempt)
                    yield wire.state_from_proto(parsed(self.peer, pb.WatchConfigResponse, data).config)
                raise Unreachable(self.peer, "the agent has stopped")
            finally:
                call.cancel()


# --- all agents at once ---------------------------------------------------------------------------


async def check_everywhere(peers: Sequence[str], token: Token | None, changes: Changes) -> list[Checked]:
    """One answer a peer, in order; nothing is changed anywhere."""

    async def one(peer: str) -> Checked:
        try:
            return Checked(peer, await _with_client(peer, token, lambda client: client.check(changes)))
        except TierKVError as error:
            return Checked(peer, error=error)

    return list(await asyncio.gather(*(one(peer) for peer in peers)))


async def apply_everywhere(checked: Sequence[Checked], token: Token | None, changes: Changes) -> list[Acknowledged]:
    """In force at every peer that was ``ready``, or nowhere: when one refuses, the others take the change back."""

    async def one(asked: Checked) -> Acknowledged:
        assert asked.check is not None
        revision = asked.check.revision
        try:
            applied = await _with_client(asked.peer, token, lambda client: client.apply(changes, revision=revision))
        except TierKVError as error:
            return Acknowledged(asked.peer, error=error)
        return Acknowledged(asked.peer, applied)

    done = list(await asyncio.gather(*(one(asked) for asked in checked if asked.ready)))
    return done if all(one.applied for one in done) else await undo_everywhere(done, token)


async def undo_everywhere(done: Sequence[Acknowledged], token: Token | None) -> list[Acknowledged]:
    """Taken back wherever it was in force; where that fails the acknowledgement carries the error."""

    async def back(ack: Acknowledged) -> Acknowledged:
        if ack.applied is None or ack.taken_back:
            return ack
        undo_token = ack.applied.undo_token
        try:
            await _with_client(ack.peer, token, lambda client: client.undo(undo_token))
        except TierKVError as error:
            return Acknowledged(ack.peer, ack.applied, error)
        return Acknowledged(ack.peer, ack.applied, taken_back=True)

    return list(await asyncio.gather(*(back(ack) for ack in done)))


async def _with_client(peer: str, token: Token | None, ask: Callable[[ConfigClient], Awaitable[T]]) -> T:
    client = ConfigClient(peer, token)
    try:
        async with asyncio.timeout(ALL_BOUND_S):
            return await ask(client)
    except TimeoutError:
        raise DeadlineExceeded(peer, f"no answer within {ALL_BOUND_S:g} s") from None
    finally:
        await client.close()
