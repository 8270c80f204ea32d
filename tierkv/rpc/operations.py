"""What keeps a vault in order, over gRPC: list, fsck, compact, warm, drain. Each is a stream that says how far it is.

One of each kind runs at a time. A step is one record or one segment, in an executor thread; a reader that has gone ends
the operation after its step.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import grpc

from tierkv.codec.record import RecordHeader
from tierkv.errors import Refused, UsageError
from tierkv.identity.blocks import BlockKey
from tierkv.rpc import convert
from tierkv.rpc.auth import Token
from tierkv.rpc.client import VaultClient
from tierkv.rpc.operations_arrivals import Arrivals, readdressed
from tierkv.rpc.outgo import open_verified
from tierkv.rpc.serving import Context, server_stream, write_in_time
from tierkv.store.base import Finding, Store
from tierkv.telemetry.node import NodeTelemetry
from tierkv.v1 import vault_service_pb2 as pb

Run = Callable[..., Awaitable[Any]]
STALL_S = 30.0
# So often a stream says how far it is.
EVERY_S = 0.2
KEYS_A_MESSAGE = 4096
DRAIN_BATCH_BYTES = 64 << 20
MAX_TARGET_CHARS = 300


class Operations:
    """Registered beside the vault's other calls. ``run`` puts a function into the vault's executor; ``token`` is what a
    drain shows to its target."""

    def __init__(self, store: Store, run: Run, telemetry: NodeTelemetry, token: Token | None) -> None:
        self._store, self._run, self._telemetry, self._token = store, run, telemetry, token
        self._running: set[str] = set()

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            "ListRecords": server_stream(pb.ListRecordsRequest, self._list_records),
            "Fsck": server_stream(pb.FsckRequest, self._fsck),
            "Compact": server_stream(pb.CompactRequest, self._compact),
            "Warm": server_stream(pb.WarmRequest, self._warm),
            "Drain": server_stream(pb.DrainRequest, self._drain),
        }

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        if name in self._running:
            raise Refused(f"a {name} runs already")
        self._running.add(name)
        try:
            yield
        finally:
            self._running.discard(name)

    async def _list_records(self, request: pb.ListRecordsRequest, context: Context) -> None:
        found = await self._run(self._store.records, convert.selector_from_proto(request.selector))
        for at in range(0, len(found), KEYS_A_MESSAGE):
            part = found[at : at + KEYS_A_MESSAGE]
            answer = pb.ListRecordsResponse(keys=[key for key, _ in part], sizes=[size for _, size in part])
            await write_in_time(context, answer.SerializeToString(), STALL_S)

    async def _fsck(self, request: pb.FsckRequest, context: Context) -> None:
        pace, findings = _Pace(), list[pb.FsckFinding]()
        found, last = 0, None
        with self._alone("fsck"):
            async for last in self._steps(self._store.check(repair=request.repair)):
                if last.finding is not None:
                    found += 1
                    findings.append(_finding(last.finding))
                if pace.due():
                    progress = pb.OperationProgress(
                        done=last.records, done_bytes=last.done_bytes, total_bytes=last.total_bytes
                    )
                    answer = pb.FsckResponse(progress=progress, findings=findings)
                    await write_in_time(context, answer.SerializeToString(), STALL_S)
                    findings = []
        done = 0 if last is None else last.records
        total = 0 if last is None else last.total_bytes
        progress = pb.OperationProgress(
            done=done, total=done + found, done_bytes=total, total_bytes=total, finished=True
        )
        await write_in_time(context, pb.FsckResponse(progress=progress, findings=findings).SerializeToString(), STALL_S)
        self._telemetry.emit(
            "fsck", "warning" if found else "info", f"{done} records are sound, {found} places are not"
        )

    async def _compact(self, _: pb.CompactRequest, context: Context) -> None:
        pace, done, total = _Pace(), 0, 0
        with self._alone("compact"):
            async for done, total in self._steps(self._store.compact()):
                if pace.due():
                    progress = pb.OperationProgress(done=done, total=total)
                    await write_in_time(context, pb.CompactResponse(progress=progress).SerializeToString(), STALL_S)
        progress = pb.OperationProgress(done=done, total=total, finished=True)
        await write_in_time(context, pb.CompactResponse(progress=progress).SerializeToString(), STALL_S)

    async def _warm(self, request: pb.WarmRequest, context: Context) -> None:
        records = await self._run(self._store.records, convert.selector_from_proto(request.selector))
        progress = pb.OperationProgress(total=len(records), total_bytes=sum(size for _, size in records))
        pace = _Pace()
        with self._alone("warm"):
            for key, size in records:
                await self._run(self._read, key)
                progress.done += 1
                progress.done_bytes += size
                if pace.due():
                    await write_in_time(context, pb.WarmResponse(progress=progress).SerializeToString(), STALL_S)
        progress.finished = True
        await write_in_time(context, pb.WarmResponse(progress=progress).SerializeToString(), STALL_S)

    async def _drain(self, request: pb.DrainRequest, context: Context) -> None:
        if not 0 < len(request.target) <= MAX_TARGET_CHARS:
            raise UsageError("a drain needs the host:port of another vault")
        records = await self._run(self._store.records, convert.selector_from_proto(request.selector))
        progress = pb.OperationProgress(total=len(records), total_bytes=sum(size for _, size in records))
        target = VaultClient(request.target, self._token)
        try:
            with self._alone("drain"):
                arrivals = Arrivals(target, await target.stats())
                await self._say_drained(context, progress, arrivals)
                for batch in _batches(records):
                    arrivals.add(await target.store(self._readdressed([key for key, _ in batch], arrivals)))
                    progress.done += len(batch)
                    progress.done_bytes += sum(size for _, size in batch)
                    await self._say_drained(context, progress, arrivals)
                kept = await arrivals.settle()
        finally:
            await target.close()
        progress.finished = True
        await self._say_drained(context, progress, arrivals, kept)
        lost = progress.total - kept
        message = f"{target.peer} holds {kept} of the {progress.total} records it was given"
        self._telemetry.emit("drain", "warning" if lost else "info", message)

    async def _say_drained(
        self, context: Context, progress: pb.OperationProgress, arrivals: Arrivals, kept: int = 0
    ) -> None:
        answer = pb.DrainResponse(
            progress=progress, refused=+arrivals.refused, target_free_bytes=arrivals.free_bytes, kept=kept
        )
        await write_in_time(context, answer.SerializeToString(), STALL_S)

    async def _readdressed(
        self, keys: list[BlockKey], arrivals: Arrivals
    ) -> AsyncGenerator[tuple[RecordHeader, list[bytes]]]:
        for key in keys:
            data = await self._run(self._read, key)
            if isinstance(data, str):
                arrivals.refused[data] += 1
            else:
                yield readdressed(data, arrivals.epoch)

    def _read(self, key: BlockKey) -> bytes | str:
        """A sound record's bytes, or why there are none; it is in memory afterwards, and no younger."""
        reader = open_verified(self._store, key, lambda: self._telemetry.count("damaged_records"), count_hit=False)
        if isinstance(reader, str):
            return reader
        with reader:
            return reader.read(0, reader.size_bytes)

    async def _steps(self, steps: Iterator[Any]) -> AsyncGenerator[Any]:
        while (step := await self._run(next, steps, None)) is not None:
            yield step
            await asyncio.sleep(0)


class _Pace:
    def __init__(self) -> None:
        self._next_s = 0.0

    def due(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + EVERY_S
        return True


def _batches(records: list[tuple[BlockKey, int]]) -> Iterator[list[tuple[BlockKey, int]]]:
    batch, size_bytes = list[tuple[BlockKey, int]](), 0
    for key, size in records:
        batch.append((key, size))
        size_bytes += size
        if size_bytes >= DRAIN_BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _finding(finding: Finding) -> pb.FsckFinding:
    return pb.FsckFinding(
        file=finding.file,
        offset=finding.offset,
        reason=finding.reason,
        size_bytes=finding.size_bytes,
        key=finding.key,
        repaired=finding.repaired,
    )
