"""Snapshots and events, protobuf to domain values and back; numbers are what protobuf gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tierkv.telemetry.histogram import LAST_BUCKET, HistogramSnapshot
from tierkv.telemetry.snapshot import (
    EngineSnapshot,
    Event,
    LinkSnapshot,
    MemorySnapshot,
    NodeSnapshot,
    TierSnapshot,
    Window,
)
from tierkv.v1 import telemetry_pb2 as pb


def _reasons_to_proto(reasons: Mapping[str, int]) -> list[pb.ReasonCount]:
    return [pb.ReasonCount(reason=reason, count=count) for reason, count in reasons.items()]


def _reasons_from_proto(reasons: Iterable[pb.ReasonCount]) -> dict[str, int]:
    return {item.reason: item.count for item in reasons}


def histogram_to_proto(histogram: HistogramSnapshot) -> pb.Histogram:
    return pb.Histogram(
        bucket=list(histogram.counts.keys()), count=list(histogram.counts.values()), sum_s=histogram.sum_s
    )


def histogram_from_proto(message: pb.Histogram) -> HistogramSnapshot:
    counts = {
        bucket: count for bucket, count in zip(message.bucket, message.count, strict=False) if bucket <= LAST_BUCKET
    }
    return HistogramSnapshot(counts, message.sum_s)


def window_to_proto(window: Window) -> pb.Window:
    return pb.Window(
        seconds=window.seconds,
        hits=window.hits,
        misses=window.misses,
        bytes_in=window.bytes_in,
        bytes_out=window.bytes_out,
        evictions=window.evictions,
    )


def window_from_proto(message: pb.Window) -> Window:
    return Window(message.seconds, message.hits, message.misses, message.bytes_in, message.bytes_out, message.evictions)


_TIER_NUMBERS = (
    "size_bytes", "cap_bytes", "records", "tokens", "hits", "misses", "evictions", "bytes_in", "bytes_out", "stores",
    "pinned_records", "quarantined_records", "hit_tokens",
)  # fmt: skip


def tier_to_proto(tier: TierSnapshot) -> pb.TierSnapshot:
    return pb.TierSnapshot(
        name=tier.name,
        miss_reasons=_reasons_to_proto(tier.miss_reasons),
        refusals=_reasons_to_proto(tier.refusals),
        promote_s=histogram_to_proto(tier.promote_s),
        store_s=histogram_to_proto(tier.store_s),
        windows=[window_to_proto(window) for window in tier.windows],
        **{name: getattr(tier, name) for name in _TIER_NUMBERS},
    )


def tier_from_proto(message: pb.TierSnapshot) -> TierSnapshot:
    return TierSnapshot(
        name=message.name,
        miss_reasons=_reasons_from_proto(message.miss_reasons),
        refusals=_reasons_from_proto(message.refusals),
        promote_s=histogram_from_proto(message.promote_s),
        store_s=histogram_from_proto(message.store_s),
        windows=tuple(window_from_proto(window) for window in message.windows),
        **{name: getattr(message, name) for name in _TIER_NUMBERS},
    )


_MEMORY = ("total_bytes", "used_bytes", "rss_bytes", "threshold_fraction", "device_bytes", "note")
_LINK = (
    "peer", "tier", "state", "rtt_s", "receive_bytes_per_s", "send_bytes_per_s", "failures", "last_error",
)  # fmt: skip
_ENGINE = (
    "kind", "build", "model", "identity", "attached", "prefill_tokens_saved", "prefill_s_saved", "note",
    "quality_codec", "quality_samples", "quality_kl_mean", "quality_top1_fraction", "quality_snr_db_min",
    "quality_raised_layers",
)  # fmt: skip
_NODE = (
    "node_id", "name", "role", "version", "address", "pid", "started_unix_s", "now_unix_s", "sequence", "activity",
    "last_event_id",
)  # fmt: skip


def fields_of(source: object, names: tuple[str, ...]) -> dict[str, object]:
    return {name: getattr(source, name) for name in names}


def node_to_proto(node: NodeSnapshot) -> pb.NodeSnapshot:
    message = pb.NodeSnapshot(
        memory=pb.MemorySnapshot(**fields_of(node.memory, _MEMORY)),  # pyright: ignore[reportArgumentType]
        tiers=[tier_to_proto(tier) for tier in node.tiers],
        links=[pb.LinkSnapshot(**fields_of(link, _LINK)) for link in node.links],  # pyright: ignore[reportArgumentType]
        engines=[
            pb.EngineSnapshot(**fields_of(engine, _ENGINE))  # pyright: ignore[reportArgumentType]
            for engine in node.engines
        ],
        **fields_of(node, _NODE),  # pyright: ignore[reportArgumentType]
    )
    message.counters.update(node.counters)
    return message


def node_from_proto(message: pb.NodeSnapshot) -> NodeSnapshot:
    return NodeSnapshot(
        memory=MemorySnapshot(**fields_of(message.memory, _MEMORY)),  # pyright: ignore[reportArgumentType]
        tiers=tuple(tier_from_proto(tier) for tier in message.tiers),
        links=tuple(
            LinkSnapshot(**fields_of(link, _LINK))  # pyright: ignore[reportArgumentType]
            for link in message.links
        ),
        engines=tuple(
            EngineSnapshot(**fields_of(engine, _ENGINE))  # pyright: ignore[reportArgumentType]
            for engine in message.engines
        ),
        counters=dict(message.counters),
        **fields_of(message, _NODE),  # pyright: ignore[reportArgumentType]
    )


def event_to_proto(event: Event) -> pb.Event:
    return pb.Event(
        id=event.id,
        time_unix_s=event.time_unix_s,
        kind=event.kind,
        severity=event.severity,
        node=event.node,
        message=event.message,
        attributes=dict(event.attributes),
    )


def event_from_proto(message: pb.Event) -> Event:
    return Event(
        message.id,
        message.time_unix_s,
        message.kind,
        message.severity,
        message.node,
        message.message,
        dict(message.attributes),
    )
