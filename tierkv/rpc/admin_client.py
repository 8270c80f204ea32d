"""What people ask of a vault: statistics, prefixes, pins and purges."""

from __future__ import annotations

from tierkv.rpc import convert, telemetry_wire, wire
from tierkv.rpc.admin import PrefixPage, PurgePlan, RecordLine, VaultStats
from tierkv.rpc.caller import Caller, current_actor
from tierkv.store.base import PurgeResult, Selector
from tierkv.v1 import vault_service_pb2 as pb

# Listing and purging walk a whole index: a million records take a second or two.
CONTROL_TIMEOUT_S = 10.0
STATS_TIMEOUT_S = 2.0


class AdminCalls(Caller):
    """Raises PeerError, and Refused (StaleToken) where the vault declines."""

    service = "tierkv.v1.VaultService"

    async def stats(self) -> VaultStats:
        answer = await self._unary("Stats", pb.StatsRequest(), pb.StatsResponse, STATS_TIMEOUT_S)
        tier = telemetry_wire.tier_from_proto(answer.tier)
        refusals = {wire.slug(name): count for name, count in answer.refusals.items()}
        return VaultStats(
            tier, answer.epoch, answer.index_bytes, answer.leases, answer.policy, answer.loading, refusals,
            convert.disk_from_proto(answer),
        )  # fmt: skip

    async def list_prefixes(self, selector: Selector | None = None, limit: int = 0) -> PrefixPage:
        """Most recently used first; ``limit`` 0 means the vault's default of 1,000."""
        request = pb.ListPrefixesRequest(selector=_selector(selector), limit=limit)
        answer = await self._unary("ListPrefixes", request, pb.ListPrefixesResponse, CONTROL_TIMEOUT_S)
        return PrefixPage(tuple(convert.prefix_from_proto(item) for item in answer.prefixes), answer.total)

    async def describe_prefix(self, leaf_key: bytes) -> tuple[RecordLine, ...]:
        """The records of one prefix, from its root on; empty when it is not here."""
        request = pb.DescribePrefixRequest(leaf_key=leaf_key)
        answer = await self._unary("DescribePrefix", request, pb.DescribePrefixResponse, CONTROL_TIMEOUT_S)
        return tuple(convert.record_from_proto(item) for item in answer.records)

    async def pin(self, selector: Selector) -> int:
        """Records that are not evicted until they are unpinned."""
        request = pb.PinRequest(selector=_selector(selector))
        return (await self._unary("Pin", request, pb.PinResponse, CONTROL_TIMEOUT_S)).records

    async def unpin(self, selector: Selector) -> int:
        request = pb.UnpinRequest(selector=_selector(selector))
        return (await self._unary("Unpin", request, pb.UnpinResponse, CONTROL_TIMEOUT_S)).records

    async def preview_purge(self, selector: Selector | None = None) -> PurgePlan:
        """What a purge would remove now; nothing is removed."""
        request = pb.PreviewPurgeRequest(selector=_selector(selector))
        answer = await self._unary("PreviewPurge", request, pb.PreviewPurgeResponse, CONTROL_TIMEOUT_S)
        return PurgePlan(
            answer.token,
            answer.records,
            answer.bytes,
            answer.prefixes,
            answer.tokens,
            answer.pinned_records,
            tuple(convert.prefix_from_proto(item) for item in answer.examples),
        )

    async def purge(self, token: str, actor: str = "") -> PurgeResult:
        """What the preview showed is gone. Raises StaleToken."""
        request = pb.PurgeRequest(token=token, actor=actor or current_actor())
        answer = await self._unary("Purge", request, pb.PurgeResponse, CONTROL_TIMEOUT_S)
        return PurgeResult(answer.records, answer.bytes, answer.undo_token, answer.undo_s, answer.epoch)

    async def undo_purge(self, undo_token: str, actor: str = "") -> tuple[int, int]:
        """Records and bytes that came back. Raises StaleToken when the window is over."""
        request = pb.UndoPurgeRequest(undo_token=undo_token, actor=actor or current_actor())
        answer = await self._unary("UndoPurge", request, pb.UndoPurgeResponse, CONTROL_TIMEOUT_S)
        return answer.records, answer.bytes


def _selector(selector: Selector | None) -> pb.Selector:
    return convert.selector_to_proto(selector or Selector())
