"""Protobuf to domain values and back: selectors, prefixes, records, what a store on disk holds.

Whatever comes from the network is bounded here: numbers are what protobuf gives, texts and lists are cut or refused.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import Any

from tierkv.codec.record import RecordKind
from tierkv.errors import UsageError
from tierkv.identity.blocks import KEY_BYTES
from tierkv.rpc.admin import PrefixSummary, RecordLine
from tierkv.rpc.telemetry_wire import fields_of
from tierkv.store.base import DiskStats, IndexEntry, Prefix, Selector
from tierkv.v1 import vault_service_pb2 as vault_pb

MAX_SELECTOR_PREFIXES = 1024
MIN_PREFIX_BYTES = 4
MAX_NAME_CHARS = 512
TIERS = ("", "kv", "ssm")


# --- a store on disk ----------------------------------------------------------------------------


def disk_to_proto(disk: DiskStats | None) -> vault_pb.DiskStats | None:
    return None if disk is None else vault_pb.DiskStats(**asdict(disk))


def disk_from_proto(message: vault_pb.StatsResponse) -> DiskStats | None:
    if not message.HasField("disk"):
        return None
    values: dict[str, Any] = {}
    for each in fields(DiskStats):
        value = getattr(message.disk, each.name)
        values[each.name] = value[:MAX_NAME_CHARS] if isinstance(value, str) else value
    return DiskStats(**values)


# --- selectors and prefixes ---------------------------------------------------------------------


def selector_to_proto(selector: Selector) -> vault_pb.Selector:
    return vault_pb.Selector(
        root=selector.root,
        model=selector.model,
        prefixes=list(selector.prefixes),
        older_than_s=selector.older_than_s,
        tier=selector.tier,
    )


def selector_from_proto(message: vault_pb.Selector) -> Selector:
    """Raises UsageError, naming the field, for a selector that cannot be meant."""
    if len(message.root) not in (0, KEY_BYTES):
        raise UsageError(f"selector.root has {KEY_BYTES} bytes or none, not {len(message.root)}")
    if len(message.model) > MAX_NAME_CHARS:
        raise UsageError(f"selector.model is longer than {MAX_NAME_CHARS} characters")
    if len(message.prefixes) > MAX_SELECTOR_PREFIXES:
        raise UsageError(f"selector.prefixes names more than {MAX_SELECTOR_PREFIXES} prefixes")
    if any(not MIN_PREFIX_BYTES <= len(prefix) <= KEY_BYTES for prefix in message.prefixes):
        raise UsageError(f"selector.prefixes are keys of {MIN_PREFIX_BYTES} to {KEY_BYTES} bytes")
    if not (math.isfinite(message.older_than_s) and message.older_than_s >= 0):
        raise UsageError("selector.older_than_s is a number of seconds")
    if message.tier not in TIERS:
        raise UsageError("selector.tier is 'kv', 'ssm' or empty")
    return Selector(message.root, message.model, tuple(message.prefixes), message.older_than_s, message.tier)


def summary_of(prefix: Prefix) -> PrefixSummary:
    """What a list of prefixes says of one."""
    header = prefix.leaf.header
    return PrefixSummary(
        leaf_key=header.key,
        root=header.root,
        model=header.model[:MAX_NAME_CHARS],
        tokens=header.end,
        own_bytes=prefix.own_bytes,
        total_bytes=prefix.total_bytes,
        records=len(prefix.chain),
        created_unix_s=header.created_unix_s,
        last_hit_unix_s=prefix.last_hit_unix_s,
        hits=prefix.hits,
        pinned=prefix.leaf.pinned,
        fidelity=header.fidelity,
        codecs=tuple(codec[:MAX_NAME_CHARS] for codec in prefix.codecs[:16]),
        tier=RecordKind(header.kind).tier,
    )


_PREFIX = (
    "leaf_key", "root", "model", "tokens", "own_bytes", "total_bytes", "records", "created_unix_s", "last_hit_unix_s",
    "hits", "pinned", "fidelity", "tier",
)  # fmt: skip


def prefix_to_proto(prefix: PrefixSummary) -> vault_pb.PrefixInfo:
    return vault_pb.PrefixInfo(
        codecs=list(prefix.codecs),
        **fields_of(prefix, _PREFIX),  # pyright: ignore[reportArgumentType]
    )


def prefix_from_proto(message: vault_pb.PrefixInfo) -> PrefixSummary:
    return PrefixSummary(
        codecs=tuple(message.codecs),
        **fields_of(message, _PREFIX),  # pyright: ignore[reportArgumentType]
    )


_RECORD = (
    "key", "kind", "start", "end", "size_bytes", "fidelity", "codec", "stored_unix_s", "last_hit_unix_s", "hits",
    "pinned", "own",
)  # fmt: skip


def record_to_proto(entry: IndexEntry, own: bool) -> vault_pb.RecordInfo:
    header = entry.header
    return vault_pb.RecordInfo(
        key=header.key,
        kind=int(header.kind),
        start=header.start,
        end=header.end,
        size_bytes=entry.size_bytes,
        fidelity=header.fidelity,
        codec=header.codec[:MAX_NAME_CHARS],
        stored_unix_s=entry.stored_unix_s,
        last_hit_unix_s=entry.last_hit_unix_s,
        hits=entry.hits,
        pinned=entry.pinned,
        own=own,
    )


def record_from_proto(message: vault_pb.RecordInfo) -> RecordLine:
    return RecordLine(**fields_of(message, _RECORD))  # pyright: ignore[reportArgumentType]
