"""The vault agent: a store behind ``VaultService``."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tierkv.agents.live_keys import store_keys
from tierkv.agents.runtime import AgentRuntime, announce_port
from tierkv.codec.frame import CodecId, FrameHeader, FrameType, payload_hash
from tierkv.codec.record import RecordHeader, RecordKind, verify_record
from tierkv.errors import StartupError, StoreFull, StoreUnwritable
from tierkv.identity.blocks import BlockKey, block_key
from tierkv.rpc.auth import load_or_create_token
from tierkv.rpc.vault_service import SERVICE, VaultServicer
from tierkv.store.base import Store
from tierkv.store.disk import DiskStore
from tierkv.store.disk_options import DiskOptions, Durability
from tierkv.store.ram import RamStore
from tierkv.telemetry.node import NodeTelemetry, Severity
from tierkv.telemetry.tier import TierSizes
from tierkv.units import format_size

_log = logging.getLogger(__name__)

SWEEP_S = 1.0
_TIERS = {"kv-vault": "kv", "ssm-vault": "ssm"}
_SEVERITIES: dict[str, Severity] = {"quarantine": "error", "purge": "warning", "refuse": "warning", "disk": "error"}


@dataclass(frozen=True, slots=True)
class VaultOptions:
    """Everything a vault needs to know, as plain values.

    ``persist_path``: where records outlive a restart (then ``disk_bytes`` and ``ram_bytes`` are its limits); None:
    records are kept in memory only, at most ``max_bytes``.
    ``ready_file`` (a path) or ``ready_fd`` (a descriptor) gets the bound port and a newline once calls are served;
    ``on_ready`` gets the port.
    """

    name: str
    role: Literal["kv-vault", "ssm-vault"] = "kv-vault"
    host: str = "127.0.0.1"
    port: int = 50051
    max_bytes: int = 4 << 30
    max_record_bytes: int = 1 << 30
    persist_path: Path | None = None
    disk_bytes: int = 64 << 30
    ram_bytes: int = 512 << 20
    min_free_bytes: int = 1 << 30
    durability: Durability = "batched"
    sync_bytes: int = 64 << 20
    sync_s: float = 0.2
    dead_after_s: float = 30 * 86400.0
    policy: str = "lru"
    undo_s: float = 60.0
    ttl_s: float = 0.0
    token: str | None = None
    token_file: Path | None = None
    insecure: bool = False
    reflection: bool = False
    events_kept: int = 2000
    ready_file: Path | None = None
    ready_fd: int | None = None
    on_ready: Callable[[int], None] | None = None


def build_vault_agent(options: VaultOptions, store: Store | None = None) -> AgentRuntime:
    """A vault that has not started yet; ``store`` replaces the one that ``options`` ask for and is closed at the end.

    Raises StartupError when the token, the memory or the folder cannot be had.
    """
    token = load_or_create_token(options.token, options.token_file)
    telemetry = NodeTelemetry(options.role, options.name, events_kept=options.events_kept)
    held = store if store is not None else _store(options)
    try:
        self_test(held)
    except BaseException:
        held.close()
        raise
    runtime = AgentRuntime(
        role=options.role,
        name=options.name,
        host=options.host,
        port=options.port,
        token=token,
        insecure=options.insecure,
        telemetry=telemetry,
        reflection=options.reflection,
    )
    tier_name = _TIERS[options.role]
    servicer = VaultServicer(
        held, telemetry, tier_name, max_record_bytes=options.max_record_bytes, token=runtime.gate.token
    )
    runtime.add_service(servicer.register, SERVICE)
    runtime.live_keys.update(store_keys(held))
    keeper = StoreKeeper(held, telemetry, tier_name)
    runtime.every(SWEEP_S, keeper.sweep, "sweep")
    runtime.on_stop(held.close)
    runtime.on_stop(servicer.close)
    return runtime


async def run_vault(options: VaultOptions, configure: Callable[[AgentRuntime], None] | None = None) -> None:
    """Serves until SIGTERM or SIGINT; ``configure`` sees the agent before it starts. Raises StartupError."""
    runtime = build_vault_agent(options)
    if configure is not None:
        configure(runtime)
    try:
        with runtime.stopped_by_signals():
            port = await runtime.start()
            if runtime.stop_asked:
                sys.stderr.write(f"{options.role} {options.name!r} was asked to stop while it started\n")
                return
            source = "none needed (insecure)" if options.insecure else runtime.gate.token.source
            what = f"{_room(options)}, token from {source}"
            sys.stderr.write(f"{options.role} {options.name!r} listening on {runtime.address} ({what})\n")
            sys.stderr.flush()
            announce_port(port, options.ready_file, options.ready_fd, options.on_ready)
            await runtime.run()
    finally:
        await runtime.stop()


class StoreKeeper:
    """Keeps a store tidy and tells telemetry what happens in it."""

    def __init__(self, store: Store, telemetry: NodeTelemetry, tier_name: str) -> None:
        self._store = store
        self._telemetry = telemetry
        self._tier = telemetry.tier(tier_name)
        self._evictions = 0
        self._lock = threading.Lock()
        self._tier.sizes_from(self._sizes)

    def sweep(self) -> None:
        """Leases, undo windows and aged records have expired; what happened since the last sweep is in the feed."""
        self._store.sweep()
        self._count_evictions(self._store.stats().evictions)
        for kind, message, attributes in self._store.events():
            # Purges are told by the servicer, which knows who asked.
            if kind != "purge":
                self._telemetry.emit(kind, _SEVERITIES.get(kind, "info"), message, **attributes)

    def _sizes(self) -> TierSizes:
        stats = self._store.stats()
        self._count_evictions(stats.evictions)
        return TierSizes(
            stats.size_bytes,
            stats.cap_bytes,
            stats.records,
            stats.tokens,
            stats.pinned_records,
            stats.quarantined_records,
        )

    def _count_evictions(self, evictions: int) -> None:
        """Both the sweep and a snapshot, which another thread may take, bring the count up to date."""
        with self._lock:
            self._tier.evicted(max(0, evictions - self._evictions))
            self._evictions = max(self._evictions, evictions)


def self_test(store: Store) -> None:
    """A small record went in, came back byte for byte, and is gone again. Raises StartupError.

    A store that takes nothing just now (a full disk, one that is read-only) still serves what it has.
    """
    record = _probe_record(store.epoch)
    header = verify_record(record)
    try:
        writer = store.begin(len(record), header.epoch)
        writer.write(record)
        outcome = writer.commit()
    except (StoreFull, StoreUnwritable) as error:
        _log.warning("nothing can be stored just now: %s", error)
        return
    reader = store.open(header.key, count_hit=False)
    if reader is None:
        raise StartupError(f"the store does not give back what it took (it said {outcome!r}): start-up self-test")
    with reader:
        if reader.read(0, len(record)) != record:
            raise StartupError("the store gives back other bytes than it took: start-up self-test")
    store.discard(header.key)


def _probe_record(epoch: int) -> bytes:
    """A block of one token under a root of its own."""
    root = BlockKey(os.urandom(32))
    tokens = np.arange(1, dtype=np.int64)
    payload = os.urandom(64)
    segment = FrameHeader(
        FrameType.SEGMENT, CodecId.RAW, "uint8", (64,), 0, 64, 64, payload_hash(payload)
    ).pack() + payload  # fmt: skip
    header = RecordHeader(
        RecordKind.BLOCK, block_key(root, tokens), root, root, tokens, 0, bytes(16), b"{}", 0, epoch, time.time(),
        1, len(segment), 64, model="self-test", codec="raw",
    )  # fmt: skip
    return header.pack_frame() + segment


def _store(options: VaultOptions) -> Store:
    try:
        return _disk_store(options, options.persist_path) if options.persist_path else _ram_store(options)
    except (OSError, MemoryError, ValueError) as error:
        raise StartupError(f"cannot set aside {_room(options)} for the vault: {error}") from error


def _ram_store(options: VaultOptions) -> RamStore:
    store = RamStore(
        options.max_bytes,
        options.max_record_bytes,
        undo_s=options.undo_s,
        ttl_s=options.ttl_s,
        policy=options.policy,
    )
    store.adjust(dead_after_s=options.dead_after_s)
    return store


def _disk_store(options: VaultOptions, folder: Path) -> DiskStore:
    return DiskStore(
        folder,
        DiskOptions(
            disk_bytes=options.disk_bytes,
            ram_bytes=options.ram_bytes,
            max_record_bytes=options.max_record_bytes,
            durability=options.durability,
            sync_bytes=options.sync_bytes,
            sync_s=options.sync_s,
            min_free_bytes=options.min_free_bytes,
            dead_after_s=options.dead_after_s,
            undo_s=options.undo_s,
            ttl_s=options.ttl_s,
            policy=options.policy,
        ),
    )


def _room(options: VaultOptions) -> str:
    """What the vault may take, for people."""
    if options.persist_path is None:
        return f"cap {format_size(options.max_bytes)}"
    return f"{format_size(options.disk_bytes)} in {options.persist_path}, {format_size(options.ram_bytes)} of memory"
