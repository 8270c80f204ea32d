"""The edge of every servicer: requests are parsed and errors become statuses here, and nowhere else.

Handlers take and give bytes, so that a malformed request is INVALID_ARGUMENT and not gRPC's own INTERNAL, and bulk
messages pass without protobuf's copy.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from tierkv.errors import BadFrame, DeadlineExceeded, TierKVError, UsageError, grpc_status
from tierkv.rpc.channels import ERROR_KEY

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext
R = TypeVar("R", bound=Message)
Handler = Callable[[Any, Context], Awaitable[bytes | None]]


def unary(request_type: type[R], method: Callable[[R, Context], Awaitable[Message]]) -> grpc.RpcMethodHandler:
    """One message in, one out."""

    async def call(data: bytes, context: Context) -> bytes:
        return (await method(_parse(request_type, data), context)).SerializeToString()

    return grpc.unary_unary_rpc_method_handler(guarded(call))


def server_stream(request_type: type[R], method: Callable[[R, Context], Awaitable[None]]) -> grpc.RpcMethodHandler:
    """One message in; the method writes bytes to the context."""

    async def call(data: bytes, context: Context) -> None:
        await method(_parse(request_type, data), context)

    return grpc.unary_stream_rpc_method_handler(guarded(call))


def client_stream(method: Callable[[Context], Awaitable[Message]]) -> grpc.RpcMethodHandler:
    """The method reads bytes from the context; one message out."""

    async def call(_: object, context: Context) -> bytes:
        return (await method(context)).SerializeToString()

    return grpc.stream_unary_rpc_method_handler(guarded(call))


def guarded(call: Handler) -> Handler:
    """Errors of ours end the call with their status; any other with INTERNAL and an id that the log explains."""

    async def guard(request: Any, context: Context) -> bytes | None:
        try:
            return await call(request, context)
        except TierKVError as error:
            await _abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            reference = secrets.token_hex(4)
            _log.exception("an unexpected error in a call (%s)", reference)
            await context.abort(
                grpc.StatusCode.INTERNAL,
                f"unexpected {type(error).__name__}; the agent's log explains it under {reference}",
            )
        return None

    return guard


async def _abort(context: Context, error: TierKVError) -> None:
    # A malformed request is the caller's fault; DATA_LOSS would say that something kept here was lost.
    status = "INVALID_ARGUMENT" if isinstance(error, BadFrame) else grpc_status(error)
    context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
    await context.abort(grpc.StatusCode[status], str(error))


def _parse(request_type: type[R], data: bytes) -> R:
    try:
        return request_type.FromString(data)
    except DecodeError:
        raise UsageError(f"the request is not a {request_type.DESCRIPTOR.name}") from None


async def write_in_time(context: Context, data: bytes, seconds: float) -> None:
    """The message is on its way. Raises DeadlineExceeded when the reader takes nothing for ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await context.write(data)
    except TimeoutError:
        raise DeadlineExceeded(context.peer(), f"took nothing for {seconds:g} s") from None
