"""The engines' own caches as the agent's telemetry shows them: what each engine last said, added up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from tierkv.telemetry.node import NodeTelemetry, read_memory
from tierkv.telemetry.snapshot import MemorySnapshot
from tierkv.telemetry.tier import TierSizes
from tierkv.units import format_size

SIZES = ("entries", "tokens", "size_bytes", "cap_bytes", "device_bytes")
COUNTS = ("hits", "misses", "evictions")
MAX_STEP = 10_000
MAX_TOKENS_PER_S = 1e7
# What engines refuse to hand over, and why nothing was restored as far as they know: reasons, not numbers.
REASONS = ("refusals", "not_restored")
MAX_REASONS = 64
EVICTED_FOR = {
    "cache_full": "it was full",
    "over_threshold": "memory was over its mark",
    "overwritten": "another prompt took the place",
    "replaced": "what the vaults had took the place",
}
SLUG = re.compile(r"[a-z][a-z0-9_]{1,39}")


class HotTier:
    """Reports are numbers from another process: what is not a plausible one is left out."""

    def __init__(self, telemetry: NodeTelemetry) -> None:
        self._telemetry = telemetry
        self._tier = telemetry.tier("hot")
        self._reports: dict[str, dict[str, int]] = {}
        self._reasons: dict[tuple[str, str], dict[str, int]] = {}
        self._evicted: dict[str, tuple[dict[str, int], int]] = {}
        self._prefill_tokens_per_s: dict[str, float] = {}
        self._tier.sizes_from(self._sizes)
        telemetry.memory_from(self._memory)

    def report(self, engine_id: str, stats: Mapping[str, object]) -> None:
        """The engine's sizes replace its last ones; what its counters grew by is counted."""
        before = self._reports.get(engine_id, {})
        now = {name: _number(stats.get(name)) for name in (*SIZES, *COUNTS)}
        self._reports[engine_id] = now
        steps = {name: min(MAX_STEP, max(0, now[name] - before.get(name, 0))) for name in COUNTS}
        for _ in range(steps["hits"]):
            self._tier.hit()
        for _ in range(steps["misses"]):
            self._tier.miss("not_in_engine")
        self._tier.evicted(steps["evictions"])
        self._tell_evictions(engine_id, _number(stats.get("evicted_bytes")), stats.get("evicted_for"))
        for table in REASONS:
            self._count_reasons(engine_id, table, stats.get(table))
        rate = stats.get("prefill_tokens_per_s")
        if isinstance(rate, int | float) and 0 < rate <= MAX_TOKENS_PER_S:
            self._prefill_tokens_per_s[engine_id] = float(rate)
        note = stats.get("note")
        if isinstance(note, str):
            self._telemetry.set_memory_note(note[:200])

    def _tell_evictions(self, engine_id: str, n_bytes: int, said: object) -> None:
        """One event a report, and so at most about one a second, however many entries left the engine's cache.

        None for the first: an engine that is older than this agent speaks of all that ever left.
        """
        now = _reasons(said)
        before, before_bytes = self._evicted.get(engine_id, (now, n_bytes))
        self._evicted[engine_id] = now, n_bytes
        steps = _grown(before, now)
        if not steps:
            return
        count, size = sum(steps.values()), max(0, n_bytes - before_bytes)
        causes = ", ".join(EVICTED_FOR.get(reason, reason.replace("_", " ")) for reason in steps)
        told = "1 prefix has" if count == 1 else f"{count} prefixes have"
        room = f" ({format_size(size)})" if size else ""
        self._telemetry.emit(
            "evict", "info", f"{told} left the engine's cache{room}: {causes}",
            tier="hot", prefixes=str(count), bytes=str(size), reason=" ".join(steps),
        )  # fmt: skip

    def _count_reasons(self, engine_id: str, table: str, said: object) -> None:
        before = self._reasons.get((engine_id, table), {})
        now = _reasons(said)
        self._reasons[engine_id, table] = now
        for reason, step in _grown(before, now).items():
            if table == "not_restored":
                self._telemetry.count(f"engines_not_restored_{reason}", step)
            else:
                self._tier.refused(reason, step)

    def forget(self, engine_id: str) -> None:
        """The engine is gone, and its cache with it."""
        self._reports.pop(engine_id, None)
        self._evicted.pop(engine_id, None)
        for table in REASONS:
            self._reasons.pop((engine_id, table), None)
        self._prefill_tokens_per_s.pop(engine_id, None)
        if not self._reports:
            self._telemetry.set_memory_note("")

    def refusals(self, engine_id: str) -> dict[str, int]:
        """How many states the engine's hook did not hand over since the engine started, by reason."""
        return dict(self._reasons.get((engine_id, "refusals"), {}))

    def prefill_s(self, engine_id: str, tokens: int) -> float:
        """How long the engine would need to compute ``tokens`` at the rate it last reported; 0 while it has not."""
        rate = self._prefill_tokens_per_s.get(engine_id)
        return tokens / rate if rate else 0.0

    def _total(self, name: str) -> int:
        return sum(report[name] for report in self._reports.values())

    def _sizes(self) -> TierSizes:
        return TierSizes(
            self._total("size_bytes"), self._total("cap_bytes"), self._total("entries"), self._total("tokens")
        )

    def _memory(self) -> MemorySnapshot:
        return replace(read_memory(), device_bytes=self._total("device_bytes"))


def _grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """What each total of a table grew by, for those that did."""
    steps = {reason: min(MAX_STEP, total - before.get(reason, 0)) for reason, total in now.items()}
    return {reason: step for reason, step in steps.items() if step > 0}


def _reasons(said: object) -> dict[str, int]:
    """The plausible part of a table of reasons and totals."""
    if not isinstance(said, dict):
        return {}
    table = cast("dict[object, object]", said)
    named = [(name, _number(total)) for name, total in table.items() if isinstance(name, str) and SLUG.fullmatch(name)]
    return dict(named[:MAX_REASONS])


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60 else 0
