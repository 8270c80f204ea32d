"""Channel and server options, and gRPC's errors as ours.

The numbers come from measurements of what a client sees: without ``ping_timeout_ms`` a frozen peer is noticed after
60 s, with it after 1.5 s; a returned server is found after 0.9 s instead of 3.2 s with a back-off of 0.1 to 1 s; a
server that does not allow pings every second closes a channel that keeps itself alive every 2 s.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import grpc

from tierkv.errors import (
    DeadlineExceeded,
    NotAuthenticated,
    PeerError,
    Refused,
    StaleEpoch,
    StaleToken,
    StoreFull,
    StoreUnwritable,
    TierKVError,
    Unreachable,
    WrongService,
)

MAX_MESSAGE_BYTES = 8 << 20
MAX_METADATA_BYTES = 16 << 10
MAX_STREAMS_PER_CONNECTION = 256
CONNECT_TIMEOUT_S = 1.0
ERROR_KEY = "tierkv-error"
EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue] - the stubs do not know it
MAX_DETAIL_CHARS = 200

_COMMON = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    # A ping waits behind what the system has taken for a slow link already, which can be seconds of it: at 1.5 s every
    # transfer below 3 MB/s was cut off. Who waits for something has a limit of its own.
    ("grpc.http2.ping_timeout_ms", 60_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_CLIENT = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)
_ASKING = (("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_timeout_ms", 1500))
_SENDING = (("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 20_000))
_SERVER = (
    *_SENDING,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
)
_distinct = count()


def server_options() -> list[tuple[str, int]]:
    return [*_COMMON, *_SERVER]


def open_channel(peer: str, *, sends: bool = False) -> grpc.aio.Channel:
    """A channel of its own (no connection is shared with another) to ``host:port``; it connects when first used.

    ``sends``: for large streams to the peer, whose pings are answered late where the link is slow.
    """
    own = _SENDING if sends else _ASKING
    return grpc.aio.insecure_channel(peer, options=[*_COMMON, *_CLIENT, *own, ("tierkv.channel", next(_distinct))])


async def wait_connected(channel: grpc.aio.Channel, peer: str, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Returns when the channel is connected or knows that it cannot be; the call then says why.

    Raises DeadlineExceeded when neither is known in time: nobody answers, or something that never speaks HTTP/2.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                state = channel.get_state(try_to_connect=True)
                if state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
                    return
                if state is grpc.ChannelConnectivity.SHUTDOWN:
                    raise Unreachable(peer, "the channel is closed")
                await channel.wait_for_state_change(state)
    except TimeoutError:
        raise DeadlineExceeded(
            peer, f"no connection within {timeout_s:g} s: nobody answers, or what listens there is not TierKV"
        ) from None


_OTHER_PROTOCOL = (
    "http1.x server",
    "HTTP2",
    "http2 preface",
    "Expected SETTINGS",
    "ALPN",
    "Illegal header",
    "bad frame",
)


def peer_error(peer: str, error: grpc.RpcError) -> TierKVError:
    """What a failed call means for the user."""
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else grpc.StatusCode.UNKNOWN
    details = printable(error.details() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else str(error))
    if refusal := _refusal(error, details):
        return refusal
    if code is grpc.StatusCode.UNAVAILABLE:
        if any(sign in details for sign in _OTHER_PROTOCOL):
            return WrongService(peer, "what listens there does not speak gRPC")
        return Unreachable(peer, _what_happened(details))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        # gRPC's own words are "Deadline Exceeded", or "Stream removed" where it has just given up the connection.
        return DeadlineExceeded(peer, "no answer in time")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return NotAuthenticated(peer, details or "wrong or no token")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return WrongService(peer, "answers, but does not offer this service (another role, or another version)")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return WrongService(peer, "sent a larger message than any may be")
    if code is grpc.StatusCode.CANCELLED or is_broken_write(error):
        return Unreachable(peer, "the call was cut off")
    return PeerError(peer, f"{code.name}: {details}")


_SIGNS = (
    ("Connection refused", "nothing listens there (connection refused)"),
    ("ping timeout", "has stopped answering"),
    ("keepalive", "has stopped answering"),
    ("Socket closed", "the connection was closed"),
    ("Connection reset", "the connection was closed"),
    ("Broken pipe", "the connection was closed"),
    ("DNS resolution failed", "the host's name is not known"),
    ("No route to host", "there is no route to this host"),
    ("Network is unreachable", "there is no route to this host"),
    ("imed out", "does not answer"),
)


def _what_happened(details: str) -> str:
    """gRPC's own words say the same in a hundred characters."""
    return next((text for sign, text in _SIGNS if sign in details), details or "not reachable")


def is_broken_write(error: grpc.RpcError) -> bool:
    """Whether gRPC only says that a message could not be sent: its stopgap replaces the status that the peer gave."""
    return (
        isinstance(error, grpc.aio.AioRpcError)
        and error.code() is grpc.StatusCode.INTERNAL
        and error.details() == "Internal error from Core"
    )


def _refusal(error: grpc.RpcError, details: str) -> TierKVError | None:
    """The refusal that the peer named in its trailing metadata, if it did."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return None
    slug = next((value for key, value in error.trailing_metadata() or () if key == ERROR_KEY), "")
    if slug == StaleToken.__name__:
        return StaleToken(details)
    refusals = (Refused, StoreFull, StoreUnwritable, StaleEpoch)
    return Refused(details) if slug in {each.__name__ for each in refusals} else None


def printable(text: str | None, most_chars: int = MAX_DETAIL_CHARS) -> str:
    """Text from the network, cut and without control characters."""
    cut = (text or "")[:most_chars]
    return "".join(char if char.isprintable() else "?" for char in cut)
