"""The operations of a vault as the command line and the console call them: streams of how far each is."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from tierkv.errors import BadFrame
from tierkv.identity.blocks import KEY_BYTES, BlockKey
from tierkv.rpc import convert, wire
from tierkv.rpc.admin import OperationStep
from tierkv.rpc.caller import Caller, next_message, parsed
from tierkv.store.base import Finding, Selector
from tierkv.v1 import vault_service_pb2 as pb

# One step of an operation: a segment compacted, a record of 1 GiB read from a slow disk, a batch sent on.
STEP_TIMEOUT_S = 120.0
_MAX_TEXT = 300


class OperationCalls(Caller):
    """Raises PeerError, and Refused where the vault declines. Leaving a stream early ends the operation."""

    service = "tierkv.v1.VaultService"

    async def list_records(self, selector: Selector | None = None) -> list[tuple[BlockKey, int]]:
        """Keys and sizes of the records, heads before tails."""
        found: list[tuple[BlockKey, int]] = []
        request = pb.ListRecordsRequest(selector=_selector(selector))
        async for data in self._stream("ListRecords", request):
            answer = parsed(self.peer, pb.ListRecordsResponse, data)
            if len(answer.keys) != len(answer.sizes) or any(len(key) != KEY_BYTES for key in answer.keys):
                raise BadFrame("bad_message", "a list of records is not one")
            found += zip(map(BlockKey, answer.keys), answer.sizes, strict=True)
        return found

    async def fsck(self, *, repair: bool) -> AsyncGenerator[OperationStep]:
        async for data in self._stream("Fsck", pb.FsckRequest(repair=repair)):
            answer = parsed(self.peer, pb.FsckResponse, data)
            yield _step(answer.progress, findings=tuple(map(_finding, answer.findings)))

    async def compact(self) -> AsyncGenerator[OperationStep]:
        async for data in self._stream("Compact", pb.CompactRequest()):
            yield _step(parsed(self.peer, pb.CompactResponse, data).progress)

    async def warm(self, selector: Selector | None = None) -> AsyncGenerator[OperationStep]:
        async for data in self._stream("Warm", pb.WarmRequest(selector=_selector(selector))):
            yield _step(parsed(self.peer, pb.WarmResponse, data).progress)

    async def drain(self, target: str, selector: Selector | None = None) -> AsyncGenerator[OperationStep]:
        """The vault copies its records to the vault at ``target``."""
        async for data in self._stream("Drain", pb.DrainRequest(target=target, selector=_selector(selector))):
            answer = parsed(self.peer, pb.DrainResponse, data)
            yield _step(
                answer.progress,
                refused={wire.slug(name): n for name, n in answer.refused.items()},
                free_bytes=answer.target_free_bytes,
                kept=answer.kept if answer.progress.finished else None,
            )

    async def _stream(self, name: str, request: Any) -> AsyncGenerator[bytes]:
        async with self._link.attempt():
            call = self._server_stream(name, request)
            try:
                while (data := await next_message(call, self.peer, STEP_TIMEOUT_S, "no progress")) is not None:
                    yield data
            finally:
                call.cancel()


def _selector(selector: Selector | None) -> pb.Selector:
    return convert.selector_to_proto(selector or Selector())


def _step(progress: pb.OperationProgress, **more: Any) -> OperationStep:
    return OperationStep(
        progress.done, progress.total, progress.done_bytes, progress.total_bytes, progress.finished, **more
    )


def _finding(finding: pb.FsckFinding) -> Finding:
    return Finding(
        finding.file[:_MAX_TEXT], finding.offset, wire.slug(finding.reason), finding.size_bytes,
        finding.key[:KEY_BYTES], finding.repaired,
    )  # fmt: skip
