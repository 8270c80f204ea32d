"""A vault as the inference agent, the command line and the console call it. Every call has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any

import grpc

from tierkv.codec.record import RecordHeader
from tierkv.errors import DeadlineExceeded, PeerError, Refused, WrongService
from tierkv.identity.blocks import BlockKey, PromptChain
from tierkv.rpc import wire
from tierkv.rpc.admin_client import AdminCalls
from tierkv.rpc.auth import Token
from tierkv.rpc.breaker import UNCOUNTED, Attempt, Breaker
from tierkv.rpc.bulk import DEFAULT_MESSAGE_BYTES, MessageWriter
from tierkv.rpc.bulk_channels import BulkChannel
from tierkv.rpc.caller import parsed, within
from tierkv.rpc.channels import CONNECT_TIMEOUT_S, EOF, is_broken_write, peer_error
from tierkv.rpc.inflow import Inflow
from tierkv.rpc.node_client import EventBatch, NodeClient, NodeReport
from tierkv.rpc.operations_client import OperationCalls
from tierkv.rpc.probing import ALL_FIDELITIES, ProbeAnswer, ProbeQuery, judge, repeated_query, whole_query
from tierkv.rpc.steps import Steps
from tierkv.rpc.tracing import Traced, request_to_proto, traced_from_proto
from tierkv.rpc.vault_port import Missing, Piece, ProbeResult, StoreOutcome
from tierkv.telemetry.snapshot import LinkSnapshot
from tierkv.v1 import vault_service_pb2 as pb

__all__ = ["EventBatch", "NodeClient", "NodeReport", "VaultClient"]

PROBE_TIMEOUT_S = 0.5
FRAME_TIMEOUT_S = 1.0
# It may walk an index of a million records.
TRACE_TIMEOUT_S = 3.0
# A demotion is in no hurry: a vault may take this long for one message, and for its verdict after the last one, as long
# as it answers a question meanwhile. It is asked when it has taken nothing for a second.
STORE_GAP_S = 15.0
ASK_AFTER_S = 1.0
LOOK_EVERY_S = 0.2
STILL_THERE_S = 1.5
# Slower on average than any link that is worth using, for longer than the grace: given up. So a total deadline grows
# with the bytes, and a peer that trickles cannot hold a restore.
SLOWEST_BYTES_PER_S = 256 << 10
MESSAGE_S = 0.05
SMALLEST_MESSAGE_BYTES, FIRST_MESSAGE_BYTES = 64 << 10, 256 << 10
PACE_GRACE_S = 5.0
# When not even one message came, all that is known is that less did. A tenth keeps hands off until that is old.
PART_OF_MESSAGE = 0.1
# A vault that answers questions and stalls in restores would hold up every one of them.
STALLED_S, STALLED_BACKOFF_S = 0.25, 2.0


class VaultClient(AdminCalls, OperationCalls):
    """Implements ``VaultPort`` for a vault at ``peer`` (host:port), and what people ask of one. Owned by one loop."""

    def __init__(
        self,
        peer: str,
        token: Token | None,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
        frame_timeout_s: float = FRAME_TIMEOUT_S,
        max_record_bytes: int = 1 << 30,
        message_bytes: int = DEFAULT_MESSAGE_BYTES,
    ) -> None:
        super().__init__(peer, token, connect_timeout_s)
        self._probe_timeout_s = probe_timeout_s
        self._frame_timeout_s = frame_timeout_s
        self._max_record_bytes = max_record_bytes
        self._message_bytes = message_bytes
        self._outgoing = BulkChannel(peer)
        self._incoming = BulkChannel(peer)
        self._stalls = Breaker(peer, first_backoff_s=STALLED_BACKOFF_S, slow_calls_to_open=1)

    async def close(self) -> None:
        """As ``Caller.close``."""
        await super().close()
        await self._outgoing.close()
        await self._incoming.close()

    def set_timeouts(
        self, *, connect_s: float | None = None, probe_s: float | None = None, frame_s: float | None = None
    ) -> None:
        """What is given is in force for every call that begins, and every wait of one that runs, from now on."""
        self._link.connect_timeout_s = self._link.connect_timeout_s if connect_s is None else connect_s
        self._probe_timeout_s = self._probe_timeout_s if probe_s is None else probe_s
        self._frame_timeout_s = self._frame_timeout_s if frame_s is None else frame_s

    def link_snapshot(self, tier: str) -> LinkSnapshot:
        """The link as telemetry shows it, under the name of the tier that the vault holds."""
        return self._link.snapshot(tier)

    async def probe(
        self,
        chain: PromptChain,
        *,
        blocks: bool = False,
        windows: bool = False,
        states: bool = False,
        worst_fidelity: int = ALL_FIDELITIES,
        peek: bool = False,
        timeout_s: float | None = None,
    ) -> ProbeResult:
        """What the vault has of the prompt, as far as it can be true.

        One round trip; two for a prompt of more than 8,192 tokens that the vault's records leave early.
        ``timeout_s`` bounds everything, the connection too.
        """
        query = whole_query(
            chain, blocks=blocks, windows=windows, states=states, worst_fidelity=worst_fidelity, peek=peek,
            max_keys=wire.MAX_KEYS,
        )  # fmt: skip
        until = None if timeout_s is None else time.monotonic() + timeout_s
        answer = await self._ask(query, timeout_s)
        if not answer.is_complete:
            left_s = None if until is None else max(0.001, until - time.monotonic())
            answer = wire.joined(answer, await self._ask(repeated_query(chain, query, answer), left_s))
        return judge(chain, answer)

    async def _ask(self, query: ProbeQuery, total_s: float | None) -> ProbeAnswer:
        with self._only_peer_errors():
            limit_s = self._probe_timeout_s if total_s is None else total_s
            request = wire.query_to_proto(query)
            if not query.peek:
                self._incoming.prepare()  # what is found is wanted next
            message = await self._unary("Probe", request, pb.ProbeResponse, limit_s, total_s=total_s)
            return wire.answer_from_proto(message, self._max_record_bytes)

    async def touch(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of the keys are there; those are young again."""
        here: list[bool] = []
        with self._only_peer_errors():
            for start in range(0, len(keys), wire.MAX_KEYS):
                part = keys[start : start + wire.MAX_KEYS]
                request = pb.TouchRequest(keys=part)
                answer = await self._unary("Touch", request, pb.TouchResponse, self._probe_timeout_s)
                missing = set(answer.missing)
                here += [index not in missing for index in range(len(part))]
        return here

    async def trace(self, root: BlockKey, keys: Sequence[BlockKey], beginning: bytes) -> Traced:
        """What became of a prompt's records here, for people who ask why they did not come back."""
        with self._only_peer_errors():
            request = request_to_proto(root, keys, beginning)
            return traced_from_proto(await self._unary("Trace", request, pb.TraceResponse, TRACE_TIMEOUT_S))

    # --- bytes out ---------------------------------------------------------------------------------

    async def store(
        self, records: AsyncIterator[tuple[RecordHeader, Sequence[bytes | bytearray | memoryview]]]
    ) -> list[StoreOutcome]:
        """Sends whole records on one stream; outcomes in the order sent.

        A record's buffers may be used again as soon as the next record is asked for. What the iterator raises ends
        the call and is raised; records that were whole by then may have been stored.
        """
        with self._only_peer_errors(), Steps(self.peer) as steps:
            async with self._link.attempt(), self._outgoing.stream(self._link.connect_limit_s()) as channel:
                call = self._client_stream("Store", channel)
                watch = asyncio.create_task(self._watch(steps))
                try:
                    keys, n_bytes = await self._send(steps, call, records)
                    limit_s = STORE_GAP_S + n_bytes / SLOWEST_BYTES_PER_S
                    data = await steps.wait(call, limit_s, "no verdict")
                    return self._outcomes(keys, parsed(self.peer, pb.StoreResponse, data))
                finally:
                    watch.cancel()
                    call.cancel()

    async def _watch(self, steps: Steps) -> None:
        """Ends the wait for a vault that neither takes anything nor answers: it hangs, and is not just slow."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if steps.waiting_s < ASK_AFTER_S:
                continue
            wait = steps.number
            try:
                await self._ask_nothing(STILL_THERE_S)
            except grpc.RpcError as error:
                # A question may wait behind what fills a slow link, but then something was taken meanwhile.
                if steps.number == wait:
                    steps.fail(peer_error(self.peer, error))
            except grpc.aio.UsageError:
                return  # the client is closed, and the store with it

    def _outcomes(self, keys: list[BlockKey], response: pb.StoreResponse) -> list[StoreOutcome]:
        if len(response.results) != len(keys):
            raise WrongService(self.peer, f"gave {len(response.results)} outcomes for {len(keys)} records")
        return [
            StoreOutcome(key, result.accepted, wire.slug(result.outcome))
            for key, result in zip(keys, response.results, strict=True)
        ]

    async def _send(
        self,
        steps: Steps,
        call: Any,
        records: AsyncIterator[tuple[RecordHeader, Sequence[bytes | bytearray | memoryview]]],
    ) -> tuple[list[BlockKey], int]:
        writer = MessageWriter(self._message_bytes)
        keys: list[BlockKey] = []
        n_bytes, writing_s = 0, 0.0
        async for header, buffers in records:
            total = sum(memoryview(buffer).nbytes for buffer in buffers)
            for message in writer.add_record(len(keys), buffers, total):
                writing_s += await self._write(steps, call, message)
            if message := writer.settle():
                writing_s += await self._write(steps, call, message)
            keys.append(header.key)
            n_bytes += total
        writer.add_end(len(keys))
        if message := writer.flush():
            writing_s += await self._write(steps, call, message)
        await call.done_writing()
        self._link.measured_send(n_bytes, writing_s)
        return keys, n_bytes

    async def _write(self, steps: Steps, call: Any, message: bytes) -> float:
        """Seconds it took; flow control makes this wait for a vault that does not read."""
        began = time.perf_counter()
        try:
            await steps.wait(call.write(message), STORE_GAP_S, "takes no data")
        except asyncio.InvalidStateError:
            # The call has ended under us: waiting for it raises its status, unless the vault called it a success.
            await within(self.peer, call, STORE_GAP_S, "no end of a broken call")
            raise WrongService(self.peer, "ended a Store call before its end") from None
        except grpc.aio.AioRpcError as error:
            if is_broken_write(error):
                # What a small call meets now: gRPC forgets the status of a call whose write fails.
                await self._ask_nothing(self._probe_timeout_s)
            raise
        return time.perf_counter() - began

    async def _ask_nothing(self, timeout_s: float) -> None:
        """Raises grpc.RpcError if the vault does not answer the smallest question."""
        method = self._link.channel.unary_unary(self._path("Touch"))
        await method(pb.TouchRequest().SerializeToString(), timeout=timeout_s, metadata=self._metadata)

    # --- bytes in ----------------------------------------------------------------------------------

    async def promote(
        self, keys: Sequence[BlockKey], *, timeout_s: float | None = None, peek: bool = False
    ) -> AsyncIterator[Piece | Missing]:
        """The records in the order asked; use ``contextlib.aclosing`` to leave early.

        No message for ``frame_timeout_s``, a peer that trickles, or ``timeout_s`` over: DeadlineExceeded. Time that
        the caller spends between two items counts for ``timeout_s`` only. ``peek``: the records do not count as used.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for base in range(0, len(keys), wire.MAX_KEYS):
            part = self._promote_part(keys[base : base + wire.MAX_KEYS], base, until, peek)
            async with contextlib.aclosing(part) as items:
                async for item in items:
                    yield item

    async def _promote_part(
        self, keys: Sequence[BlockKey], base: int, until: float | None, peek: bool
    ) -> AsyncGenerator[Piece | Missing, None]:
        inflow = Inflow(self.peer, len(keys), base, self._max_record_bytes)
        message_bytes = self._fitting_message_bytes()
        request = pb.BatchPromoteRequest(keys=keys, message_bytes=message_bytes, peek=peek)
        waited_s, waits_since = 0.0, 0.0
        with self._only_peer_errors(), self._unstalled() as unstalled, Steps(self.peer) as steps:
            limit_s = self._left_s(until)
            connect_s = self._link.connect_limit_s(limit_s)
            async with self._link.attempt(limit_s) as attempt, self._incoming.stream(connect_s) as channel:
                call = self._server_stream("BatchPromote", request, channel)
                try:
                    while not inflow.ended:
                        gap_s, waits_since = self._gap_s(until), time.perf_counter()
                        message = await steps.wait(call.read(), gap_s, "no data")
                        waited_s, waits_since = waited_s + time.perf_counter() - waits_since, 0.0
                        if message is EOF:
                            raise WrongService(self.peer, "ended a stream before its end")
                        self._link.alive(attempt)
                        for item in inflow.take(message):
                            yield item
                        self._check_pace(inflow.received_bytes, waited_s)
                finally:
                    # Measured also when the reader leaves early, in mid-wait: it may do so because this was too slow.
                    last_wait_s = time.perf_counter() - waits_since if waits_since else 0.0
                    waited_s += last_wait_s
                    self._settle(unstalled, inflow, waited_s, last_wait_s)
                    received = inflow.received_bytes or int(message_bytes * PART_OF_MESSAGE)
                    self._link.measured_receive(received, waited_s, left=not inflow.ended)
                    call.cancel()
                    if not inflow.ended:
                        self._incoming.spoil(channel)

    @contextlib.contextmanager
    def _unstalled(self) -> Iterator[Attempt]:
        """Raises BreakerOpen for a while after a restore has stalled."""
        attempt = self._stalls.admit() if self.breaks else UNCOUNTED
        try:
            yield attempt
        finally:
            self._stalls.abandoned(attempt)  # unless it was settled

    def _settle(self, attempt: Attempt, inflow: Inflow, waited_s: float, last_wait_s: float) -> None:
        """Whether the stream stalled: nothing came for a while, or a trickle. Then no restore is begun for a while."""
        if inflow.ended:
            self._stalls.succeeded(attempt)
        elif last_wait_s >= STALLED_S:
            self._stalls.failed(attempt, DeadlineExceeded(self.peer, f"a restore stalled for {last_wait_s:.2g} s"))
        elif waited_s >= STALLED_S and inflow.received_bytes < waited_s * SLOWEST_BYTES_PER_S:
            pace = f"a restore got {inflow.received_bytes} bytes in {waited_s:.2g} s"
            self._stalls.failed(attempt, DeadlineExceeded(self.peer, pace))

    def _fitting_message_bytes(self) -> int:
        """What comes within a twentieth of a second: of a message nothing is seen before all of it is here.

        While the rate is not known, little enough for a slow link.
        """
        rate = self._link.receive_bytes_per_s
        fitting = int(rate * MESSAGE_S) if rate else FIRST_MESSAGE_BYTES
        return max(SMALLEST_MESSAGE_BYTES, min(fitting, self._message_bytes))

    def _left_s(self, until: float | None) -> float | None:
        if until is None:
            return None
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(self.peer, "the time for this restore is over")
        return left_s

    def _gap_s(self, until: float | None) -> float:
        left_s = self._left_s(until)
        return self._frame_timeout_s if left_s is None else min(self._frame_timeout_s, left_s)

    def _check_pace(self, n_bytes: int, waited_s: float) -> None:
        if waited_s > PACE_GRACE_S + n_bytes / SLOWEST_BYTES_PER_S:
            raise DeadlineExceeded(self.peer, f"only {n_bytes} bytes in {waited_s:.1f} s")

    @contextlib.contextmanager
    def _only_peer_errors(self) -> Iterator[None]:
        """A refusal where nothing can be refused politely is the peer's fault."""
        try:
            yield
        except Refused as error:
            raise PeerError(self.peer, str(error)) from None
        except grpc.aio.UsageError as error:
            raise PeerError(self.peer, str(error)) from None
