"""The four configuration methods of ``NodeService``, over a ``ConfigPort``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc

from tierkv.errors import Refused
from tierkv.rpc import config_wire as wire
from tierkv.rpc.channels import printable
from tierkv.rpc.config_port import ConfigPort
from tierkv.rpc.serving import Context, server_stream, unary, write_in_time
from tierkv.v1 import node_service_pb2 as pb

WRITE_TIMEOUT_S = 30.0
MAX_ACTOR_CHARS = 64

Wait = Callable[[asyncio.Event], Awaitable[None]]


class ConfigMethods:
    """``wait`` returns when its event is set or the agent stops; ``stopping`` says which."""

    def __init__(self, port: ConfigPort | None, wait: Wait, stopping: Callable[[], bool]) -> None:
        self._given = port
        self._wait = wait
        self._stopping = stopping

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            "GetConfig": unary(pb.GetConfigRequest, self._get),
            "ValidateConfig": unary(pb.ValidateConfigRequest, self._validate),
            "ApplyConfig": unary(pb.ApplyConfigRequest, self._apply),
            "WatchConfig": server_stream(pb.WatchConfigRequest, self._watch),
        }

    @property
    def _port(self) -> ConfigPort:
        if self._given is None:
            raise Refused("this agent was started by a program, not from a configuration; it cannot be changed")
        return self._given

    async def _get(self, _: pb.GetConfigRequest, __: Context) -> pb.GetConfigResponse:
        return pb.GetConfigResponse(config=wire.state_to_proto(self._port.state()))

    async def _validate(self, request: pb.ValidateConfigRequest, _: Context) -> pb.ValidateConfigResponse:
        return wire.check_to_proto(self._port.check(wire.changes_from_proto(request.changes)))

    async def _apply(self, request: pb.ApplyConfigRequest, context: Context) -> pb.ApplyConfigResponse:
        who = f"{printable(request.actor[:MAX_ACTOR_CHARS]) or 'somebody'} at {printable(context.peer())}"
        if request.undo_token:
            return wire.applied_to_proto(await self._port.undo(request.undo_token, who=who))
        changes = wire.changes_from_proto(request.changes)
        return wire.applied_to_proto(await self._port.apply(changes, revision=request.revision, who=who))

    async def _watch(self, _: pb.WatchConfigRequest, context: Context) -> None:
        port, fresh = self._port, asyncio.Event()
        unsubscribe = port.subscribe(fresh.set)
        try:
            while not self._stopping():
                fresh.clear()
                message = pb.WatchConfigResponse(config=wire.state_to_proto(port.state()))
                await write_in_time(context, message.SerializeToString(), WRITE_TIMEOUT_S)
                await self._wait(fresh)
        finally:
            unsubscribe()
