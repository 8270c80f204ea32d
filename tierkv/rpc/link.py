"""One connection to one peer: its channel, its breaker, and what was measured on it.

The breaker's back-off says when a failed peer is asked again; a watcher ends the back-off early when the channel,
which reconnects every second by itself, comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator

import grpc

from tierkv.errors import BreakerOpen, PeerError, Refused, TierKVError, Unreachable
from tierkv.rpc.breaker import UNCOUNTED, Attempt, Breaker
from tierkv.rpc.channels import CONNECT_TIMEOUT_S, open_channel, peer_error, wait_connected
from tierkv.telemetry.snapshot import LinkSnapshot

_log = logging.getLogger(__name__)

# Less than this measures latency and not a rate, unless it is what came of a stream that was left after so long.
MIN_MEASURED_BYTES = 256 << 10
MIN_MEASURED_S = 0.1
_KEEP_RTTS = 16
_WEIGHT = 0.3
_READY = grpc.ChannelConnectivity.READY


class Link:
    """Owned by one event loop. ``attempt`` is the only way to call the peer."""

    def __init__(self, peer: str, connect_timeout_s: float = CONNECT_TIMEOUT_S, *, breaks: bool = True) -> None:
        """``breaks`` False: every call is tried, for people who want to know why it fails now."""
        self.peer = peer
        self.breaker = Breaker(peer)
        self.channel = open_channel(peer)
        self.connect_timeout_s = connect_timeout_s
        self._breaks = breaks
        self._watcher: asyncio.Task[None] | None = None
        self._rtts: deque[float] = deque(maxlen=_KEEP_RTTS)
        self._receive_bytes_per_s = 0.0
        self._received_s = float("-inf")
        self._was_left = False
        self._send_bytes_per_s = 0.0
        self._answered = False
        self._failures = 0
        self._last_error = ""
        self._gone = False
        self._back = False
        self._closed = False

    @contextlib.asynccontextmanager
    async def attempt(self, budget_s: float | None = None) -> AsyncIterator[Attempt]:
        """The body runs one call on a connected channel; its failure is counted and raised as a PeerError or Refused.

        Raises BreakerOpen at once while the peer is left alone. ``budget_s`` may shorten the wait for a connection.
        """
        if self._closed:
            raise Unreachable(self.peer, "the client is closed")
        attempt = self.breaker.admit() if self._breaks else UNCOUNTED
        try:
            await wait_connected(self.channel, self.peer, self.connect_limit_s(budget_s))
            yield attempt
        except grpc.RpcError as error:
            failure = peer_error(self.peer, error)
            self._settle(attempt, failure)
            raise failure from None
        except TierKVError as error:
            self._settle(attempt, error)
            raise
        except BaseException:
            self.breaker.abandoned(attempt)
            raise
        else:
            self.alive(attempt)

    def connect_limit_s(self, budget_s: float | None = None) -> float:
        """How long a connection is waited for by a call that may take ``budget_s``."""
        return self.connect_timeout_s if budget_s is None else min(self.connect_timeout_s, budget_s)

    def alive(self, attempt: Attempt) -> None:
        """The peer has answered this call, whatever becomes of the rest of it."""
        self._answered = True
        self._gone = self._back = False
        self.breaker.succeeded(attempt)

    def measured_rtt(self, seconds: float) -> None:
        self._rtts.append(seconds)

    def measured_receive(self, n_bytes: int, seconds: float, *, left: bool = False) -> None:
        """So many bytes of one stream came in so many seconds of waiting.

        ``left``: the reader did not wait for the rest; then none in a long time is a rate too. What follows such a
        one is not averaged with it: a fault may be over.
        """
        before = 0.0 if self._was_left else self._receive_bytes_per_s
        enough = n_bytes >= MIN_MEASURED_BYTES or (left and seconds >= MIN_MEASURED_S)
        if enough or (self._was_left and n_bytes > self._receive_bytes_per_s * seconds):
            self._receive_bytes_per_s = _blend(before, max(1, n_bytes), seconds)
            self._received_s, self._was_left = time.monotonic(), left

    def receive_rate(self, max_age_s: float) -> float:
        """Bytes a second of one stream, 0 when it was not measured within ``max_age_s``."""
        return self._receive_bytes_per_s if time.monotonic() - self._received_s <= max_age_s else 0.0

    def measured_send(self, n_bytes: int, seconds: float) -> None:
        if n_bytes >= MIN_MEASURED_BYTES:
            self._send_bytes_per_s = _blend(self._send_bytes_per_s, n_bytes, seconds)

    @property
    def rtt_s(self) -> float:
        """The shortest of the last few small calls: longer ones waited for the vault, not for the wire."""
        return min(self._rtts, default=0.0)

    @property
    def received_s(self) -> float:
        """When that rate was measured last, on the monotonic clock; -inf if never."""
        return self._received_s

    @property
    def receive_bytes_per_s(self) -> float:
        return self._receive_bytes_per_s

    @property
    def send_bytes_per_s(self) -> float:
        return self._send_bytes_per_s

    def snapshot(self, tier: str) -> LinkSnapshot:
        return LinkSnapshot(
            self.peer,
            tier,
            self._state(),
            self.rtt_s,
            self._receive_bytes_per_s,
            self._send_bytes_per_s,
            self._failures,
            self._last_error,
        )

    async def close(self) -> None:
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self.channel.close()

    def _state(self) -> str:
        if self.breaker.state != "closed" and not self._back:
            return "down" if self._gone else "backoff"
        return "up" if self._answered and not self._back else "unknown"

    def _settle(self, attempt: Attempt, error: TierKVError) -> None:
        if isinstance(error, Refused):
            self.alive(attempt)
            return
        if not isinstance(error, PeerError) or isinstance(error, BreakerOpen):
            self.breaker.abandoned(attempt)
            return
        self._failures += 1
        self._last_error = str(error)
        self._gone, self._back = isinstance(error, Unreachable), False
        if self.breaker.failed(attempt, error) and (self._watcher is None or self._watcher.done()):
            self._watcher = asyncio.create_task(self._watch(), name=f"reconnect {self.peer}")

    async def _watch(self) -> None:
        """Ends the back-off when a channel that was lost is connected again."""
        try:
            lost = False
            while self.breaker.state != "closed":
                state = self.channel.get_state(try_to_connect=True)
                if state is grpc.ChannelConnectivity.SHUTDOWN:
                    return
                lost = lost or state is not _READY
                self._back = self._back and state is _READY
                if lost and state is _READY:
                    self.breaker.retry_now()
                    lost, self._back = False, True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(5.0):  # wait_for can lose a cancellation, and ``close`` would hang
                        await self.channel.wait_for_state_change(state)
        except grpc.aio.UsageError:
            return
        except Exception:
            _log.exception("watching the connection to %s failed; its back-off still ends by itself", self.peer)


def _blend(rate: float, n_bytes: int, seconds: float) -> float:
    """A moving average of rates."""
    if seconds <= 0:
        return rate
    return n_bytes / seconds if not rate else rate + _WEIGHT * (n_bytes / seconds - rate)
