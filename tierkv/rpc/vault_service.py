"""``VaultService`` over a store. Work on bytes and walks of the index run in a bounded executor."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc

from tierkv.errors import Refused, StaleToken
from tierkv.identity.blocks import KEY_BYTES, BlockKey
from tierkv.rpc import convert, telemetry_wire, wire
from tierkv.rpc.auth import Token
from tierkv.rpc.bulk import bounded_message_bytes
from tierkv.rpc.channels import EOF, printable
from tierkv.rpc.intake import Intake
from tierkv.rpc.operations import Operations
from tierkv.rpc.outgo import FoundDamage, Outgo, Outgoing, check
from tierkv.rpc.probing import look_up
from tierkv.rpc.serving import Context, client_stream, server_stream, unary
from tierkv.rpc.steps import Steps
from tierkv.rpc.tracing import request_from_proto, trace, traced_to_proto
from tierkv.store.base import Selector, Store
from tierkv.telemetry.node import NodeTelemetry
from tierkv.units import format_size
from tierkv.v1 import vault_service_pb2 as pb

SERVICE = "tierkv.v1.VaultService"
WORKERS = 4
MAX_BULK_STREAMS = 64
# A client that sends or takes nothing for this long holds room, or a record, that others need.
STALL_S = 30.0
DEFAULT_PREFIXES, MAX_PREFIXES = 1000, 10_000
MAX_RECORDS_SHOWN = 10_000
MAX_TOKEN_CHARS = 128
MAX_ACTOR_CHARS = 64

T = TypeVar("T")


class VaultServicer:
    """Owned by the agent's event loop; the store stays the caller's. ``tier_name`` is what telemetry calls the tier.

    ``token`` is what this vault shows to another when it is drained.
    """

    def __init__(
        self,
        store: Store,
        telemetry: NodeTelemetry,
        tier_name: str,
        *,
        max_record_bytes: int = 1 << 30,
        token: Token | None = None,
    ) -> None:
        self._store = store
        self._telemetry = telemetry
        self._tier = telemetry.tier(tier_name)
        self._max_record_bytes = max_record_bytes
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="vault")
        self._bulk_streams = 0
        self._suspects: dict[BlockKey, None] = {}
        self._checking: asyncio.Task[None] | None = None
        self._operations = Operations(store, self._run, telemetry, token)

    def register(self, server: grpc.aio.Server) -> None:
        handlers = {
            "Probe": unary(pb.ProbeRequest, self._probe),
            "Store": client_stream(self._take),
            "BatchPromote": server_stream(pb.BatchPromoteRequest, self._promote),
            "Touch": unary(pb.TouchRequest, self._touch),
            "Trace": unary(pb.TraceRequest, self._trace),
            "Pin": unary(pb.PinRequest, self._pin),
            "Unpin": unary(pb.UnpinRequest, self._unpin),
            "ListPrefixes": unary(pb.ListPrefixesRequest, self._list_prefixes),
            "DescribePrefix": unary(pb.DescribePrefixRequest, self._describe_prefix),
            "PreviewPurge": unary(pb.PreviewPurgeRequest, self._preview_purge),
            "Purge": unary(pb.PurgeRequest, self._purge),
            "UndoPurge": unary(pb.UndoPurgeRequest, self._undo_purge),
            "Stats": unary(pb.StatsRequest, self._stats),
            **self._operations.handlers(),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def close(self) -> None:
        """No call runs any more; the workers are done."""
        if self._checking is not None:
            self._checking.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        """In a worker. A cancelled caller waits for the worker first: what it works on is still in use."""
        future = self._start(function, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    def _start(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    @contextlib.contextmanager
    def _bulk_stream(self) -> Iterator[None]:
        if self._bulk_streams >= MAX_BULK_STREAMS:
            self._telemetry.count("bulk_streams_refused")
            raise Refused(f"{MAX_BULK_STREAMS} bulk streams run already")
        self._bulk_streams += 1
        try:
            yield
        finally:
            self._bulk_streams -= 1

    # --- the data plane ------------------------------------------------------------------------

    async def _probe(self, request: pb.ProbeRequest, _: Context) -> pb.ProbeResponse:
        query = wire.query_from_proto(request)
        answer = await self._run(look_up, self._store, query, self._tier)
        return wire.answer_to_proto(answer, self._telemetry.name)

    async def _take(self, context: Context) -> pb.StoreResponse:
        intake = Intake(self._store, self._tier, self._max_record_bytes)
        with self._bulk_stream(), Steps(context.peer()) as steps:
            try:
                while (message := await steps.wait(context.read(), STALL_S, "sent nothing")) is not EOF:
                    await self._run(intake.feed, message)
                outcomes = intake.finish()
            finally:
                await self._run(intake.abort)
        return pb.StoreResponse(
            results=[pb.StoreResult(key=o.key, outcome=o.outcome, accepted=o.accepted) for o in outcomes]
        )

    async def _promote(self, request: pb.BatchPromoteRequest, context: Context) -> None:
        keys = wire.checked_keys(request.keys)
        outgo = Outgo(
            self._store, keys, bounded_message_bytes(request.message_bytes), self._damaged, self._count_missing,
            peek=request.peek,
        )  # fmt: skip
        began, sent_bytes = time.perf_counter(), 0
        with self._bulk_stream(), Steps(context.peer()) as steps:
            try:
                following = self._start(outgo.next_messages)
                try:
                    while messages := await asyncio.shield(following):
                        # The next are read while these leave: no more are held, whatever the reader does.
                        following = self._start(outgo.next_messages)
                        for message in messages:
                            if damage := await _damage_in(message):
                                await asyncio.gather(following, return_exceptions=True)
                                following = self._start(outgo.without, damage)
                                break
                            sent_bytes += message.data_bytes
                            await steps.wait(context.write(message.encoded()), STALL_S, "took nothing")
                except BaseException:
                    await asyncio.gather(following, return_exceptions=True)
                    raise
            finally:
                # Counted first: a reader that leaves with its last byte cancels what is awaited here.
                self._tier.bytes_out(sent_bytes)
                await self._run(outgo.close)
                self._suspect(outgo.suspects)
        if not request.peek:
            self._tier.promote_s.add(time.perf_counter() - began)

    def _suspect(self, keys: Sequence[BlockKey]) -> None:
        """Damage seldom comes alone: what follows is read too, so that all of a prompt is stored anew at once."""
        self._suspects.update(dict.fromkeys(keys))
        if self._suspects and (self._checking is None or self._checking.done()):
            self._checking = asyncio.create_task(self._check_suspects(), name="check what follows damage")

    async def _check_suspects(self) -> None:
        while self._suspects:
            key = next(iter(self._suspects))
            del self._suspects[key]
            await self._run(check, self._store, key, self._damaged)

    def _damaged(self) -> None:
        self._telemetry.count("damaged_records")

    def _count_missing(self, reason: str) -> None:
        self._telemetry.count(f"promote_missing_{reason}")

    async def _touch(self, request: pb.TouchRequest, _: Context) -> pb.TouchResponse:
        here = await self._run(self._store.touch, wire.checked_keys(request.keys))
        return pb.TouchResponse(missing=[index for index, is_here in enumerate(here) if not is_here])

    # --- what people ask -----------------------------------------------------------------------

    async def _trace(self, request: pb.TraceRequest, _: Context) -> pb.TraceResponse:
        traced = await self._run(trace, self._store, *request_from_proto(request))
        return traced_to_proto(traced, self._telemetry.name)

    async def _pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        records = await self._run(self._store.pin, convert.selector_from_proto(request.selector))
        self._telemetry.emit("pin", "info", f"{records} records pinned", peer=context.peer())
        return pb.PinResponse(records=records)

    async def _unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        records = await self._run(self._store.unpin, convert.selector_from_proto(request.selector))
        self._telemetry.emit("pin", "info", f"{records} records unpinned", peer=context.peer())
        return pb.UnpinResponse(records=records)

    async def _list_prefixes(self, request: pb.ListPrefixesRequest, _: Context) -> pb.ListPrefixesResponse:
        limit = min(request.limit or DEFAULT_PREFIXES, MAX_PREFIXES)
        prefixes = await self._run(self._store.prefixes, convert.selector_from_proto(request.selector))
        shown = [convert.prefix_to_proto(convert.summary_of(prefix)) for prefix in prefixes[:limit]]
        return pb.ListPrefixesResponse(prefixes=shown, total=len(prefixes))

    async def _describe_prefix(self, request: pb.DescribePrefixRequest, _: Context) -> pb.DescribePrefixResponse:
        selector = convert.selector_from_proto(pb.Selector(prefixes=[request.leaf_key]))
        return await self._run(self._describe, selector)

    def _describe(self, selector: Selector) -> pb.DescribePrefixResponse:
        records: list[pb.RecordInfo] = []
        for prefix in self._store.prefixes(selector)[:1]:
            own = set(prefix.own_keys)
            entries = self._store.lookup(prefix.chain[:MAX_RECORDS_SHOWN])
            records += [convert.record_to_proto(entry, entry.header.key in own) for entry in entries if entry]
        if not records and len(selector.prefixes[0]) == KEY_BYTES:
            (entry,) = self._store.lookup([BlockKey(selector.prefixes[0])])
            records += [convert.record_to_proto(entry, False)] if entry else []
        return pb.DescribePrefixResponse(records=records)

    async def _preview_purge(self, request: pb.PreviewPurgeRequest, _: Context) -> pb.PreviewPurgeResponse:
        preview = await self._run(self._store.preview_purge, convert.selector_from_proto(request.selector))
        return pb.PreviewPurgeResponse(
            token=preview.token,
            records=preview.records,
            bytes=preview.bytes,
            prefixes=preview.prefixes,
            tokens=preview.tokens,
            pinned_records=preview.pinned_records,
            examples=[convert.prefix_to_proto(convert.summary_of(prefix)) for prefix in preview.examples],
        )

    async def _purge(self, request: pb.PurgeRequest, context: Context) -> pb.PurgeResponse:
        result = await self._run(self._store.purge, _token(request.token))
        self._say_who("purged", result.records, result.bytes, request.actor, context)
        return pb.PurgeResponse(
            records=result.records,
            bytes=result.bytes,
            undo_token=result.undo_token,
            undo_s=result.undo_s,
            epoch=result.epoch,
        )

    async def _undo_purge(self, request: pb.UndoPurgeRequest, context: Context) -> pb.UndoPurgeResponse:
        records, n_bytes = await self._run(self._store.undo_purge, _token(request.undo_token))
        self._say_who("brought back", records, n_bytes, request.actor, context)
        return pb.UndoPurgeResponse(records=records, bytes=n_bytes)

    def _say_who(self, done: str, records: int, n_bytes: int, actor: str, context: Context) -> None:
        actor = printable(actor[:MAX_ACTOR_CHARS]) or "somebody"
        message = f"{actor} {done} {records} records ({format_size(n_bytes)})"
        self._telemetry.emit("purge", "warning", message, actor=actor, peer=context.peer(), records=str(records))

    async def _stats(self, _: pb.StatsRequest, __: Context) -> pb.StatsResponse:
        stats = await self._run(self._store.stats)
        return pb.StatsResponse(
            tier=telemetry_wire.tier_to_proto(self._tier.snapshot()),
            epoch=stats.epoch,
            index_bytes=stats.index_bytes,
            leases=stats.leases,
            policy=stats.policy,
            loading=stats.loading,
            disk=convert.disk_to_proto(stats.disk),
            refusals=stats.refusals,
        )


async def _damage_in(message: Outgoing) -> FoundDamage | None:
    """Checks the whole message; others have their turn meanwhile."""
    try:
        for _ in message.checks():
            await asyncio.sleep(0)
    except FoundDamage as damage:
        return damage
    return None


def _token(token: str) -> str:
    if not 0 < len(token) <= MAX_TOKEN_CHARS:
        raise StaleToken("this is not a purge token: preview the purge first")
    return token
