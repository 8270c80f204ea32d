"""Everything one agent counts and says; ``snapshot`` freezes it for the console, ``tierkv status`` and recordings."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import psutil

from tierkv import __version__
from tierkv.telemetry.events import EventRing
from tierkv.telemetry.snapshot import EngineSnapshot, Event, LinkSnapshot, MemorySnapshot, NodeSnapshot
from tierkv.telemetry.tier import TierTelemetry

MAX_COUNTERS = 512
OTHER_COUNTERS = "other"

Severity = Literal["debug", "info", "warning", "error"]


class NodeTelemetry:
    """One agent's counters, tiers, links, engines and events. Any thread may count, emit or take a snapshot.

    ``address`` is what others dial; the runtime sets it once the port is known. Clocks can be injected.
    """

    def __init__(
        self,
        role: str,
        name: str,
        address: str = "",
        *,
        events_kept: int = 2000,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.role, self.name, self.address = role, name, address
        self.node_id = secrets.token_hex(8)
        self.events = EventRing(events_kept)
        self._clock, self._monotonic = clock, monotonic
        self._started_unix_s = clock()
        self._lock = threading.Lock()
        self._sequence = 0
        self._counters: dict[str, int] = {}
        self._tiers: dict[str, TierTelemetry] = {}
        self._links: dict[tuple[str, str], LinkSnapshot] = {}
        self._engines: dict[str, EngineSnapshot] = {}
        self._probes: list[Callable[[], None]] = []
        self._memory: Callable[[], MemorySnapshot] = read_memory
        self._memory_threshold = 0.0
        self._memory_note = ""
        self._activity = ""

    # --- counting --------------------------------------------------------------------------------

    def count(self, name: str, n: int = 1) -> None:
        with self._lock:
            if name not in self._counters and len(self._counters) >= MAX_COUNTERS:
                name = OTHER_COUNTERS
            self._counters[name] = self._counters.get(name, 0) + n

    def tier(self, name: str) -> TierTelemetry:
        """The tier of that name, made at its first use; snapshots list tiers in that order."""
        with self._lock:
            if name not in self._tiers:
                self._tiers[name] = TierTelemetry(name, self._monotonic)
            return self._tiers[name]

    def emit(self, kind: str, severity: Severity, message: str, **attributes: str) -> Event:
        """The event is in the ring and its watchers are woken. Never pass prompt text, token ids or KV."""
        return self.events.add(self._clock(), kind, severity, self.name, message, attributes)

    # --- state -----------------------------------------------------------------------------------

    def set_link(self, link: LinkSnapshot) -> None:
        """The link replaces the one to the same peer and tier."""
        with self._lock:
            self._links[link.peer, link.tier] = link

    def set_engine(self, engine: EngineSnapshot, key: str = "") -> None:
        """The engine replaces the one under ``key`` (its kind by default)."""
        with self._lock:
            self._engines[key or engine.kind] = engine

    def remove_engine(self, key: str) -> None:
        with self._lock:
            self._engines.pop(key, None)

    def set_memory_threshold(self, fraction: float) -> None:
        """0: no threshold applies to this agent."""
        self._memory_threshold = fraction

    def set_memory_note(self, note: str) -> None:
        self._memory_note = note

    def set_activity(self, activity: str) -> None:
        self._activity = activity

    def memory_from(self, probe: Callable[[], MemorySnapshot]) -> None:
        """``probe`` replaces the reading of system memory; threshold and note are filled in afterwards."""
        self._memory = probe

    def on_snapshot(self, probe: Callable[[], None]) -> None:
        """``probe`` is called before every snapshot, to set what is cheaper read than kept up to date."""
        self._probes.append(probe)

    def snapshot(self) -> NodeSnapshot:
        """A frozen copy of everything, numbered; probes run first, on the caller's thread."""
        for probe in self._probes:
            probe()
        with self._lock:
            tiers = tuple(self._tiers.values())
        read = tuple(tier.snapshot() for tier in tiers)
        memory = self._memory()
        memory = replace(memory, threshold_fraction=self._memory_threshold, note=self._memory_note or memory.note)
        with self._lock:
            self._sequence += 1
            return NodeSnapshot(
                node_id=self.node_id,
                name=self.name,
                role=self.role,
                version=__version__,
                address=self.address,
                pid=os.getpid(),
                started_unix_s=self._started_unix_s,
                now_unix_s=self._clock(),
                sequence=self._sequence,
                memory=memory,
                tiers=read,
                links=tuple(self._links.values()),
                engines=tuple(self._engines.values()),
                activity=self._activity,
                counters=dict(self._counters),
                last_event_id=self.events.last_id,
            )


def read_memory() -> MemorySnapshot:
    """System memory and this process's share. Used is what is not available, as EXO counts it."""
    system = psutil.virtual_memory()
    return MemorySnapshot(
        total_bytes=system.total,
        used_bytes=system.total - system.available,
        rss_bytes=psutil.Process().memory_info().rss,
    )
