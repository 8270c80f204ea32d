"""What the engine's own cache did, counted on the generation thread and read by the mover thread once a second."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

# exact: the same prompt again. longer, shorter: a stored prompt that goes on or ends before. restored: from the
# vaults. none: prefilled from the start.
HitKind = Literal["exact", "longer", "shorter", "restored", "none"]
# overwritten: another prompt took the entry's place. replaced: what the vaults had took it.
EvictionReason = Literal["cache_full", "over_threshold", "overwritten", "replaced"]

_SMOOTHING = 0.3
# Between two reports, a second apart.
MAX_PREFILLS = 32


@dataclass(slots=True)
class HotCounters:
    """Counters since the start of the engine; sizes in bytes, times in seconds."""

    hits: dict[str, int] = field(default_factory=dict[str, int])
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    not_restored: dict[str, int] = field(default_factory=dict[str, int])
    evictions: int = 0
    evicted_bytes: int = 0
    evicted_for: dict[str, int] = field(default_factory=dict[str, int])
    restored_tokens: int = 0
    restored_bytes: int = 0
    offered: int = 0
    handed_over_bytes: int = 0
    evaluate_s: float = 0.0
    copy_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    entries: int = 0
    tokens: int = 0
    size_bytes: int = 0
    cap_bytes: int = 0
    device_bytes: int = 0
    note: str = ""
    prefills: deque[tuple[int, int, int, float]] = field(default_factory=lambda: deque(maxlen=MAX_PREFILLS))
    built_bytes: int = 0
    built_s: float = 0.0

    def hit(self, kind: HitKind) -> None:
        _count(self.hits, kind)

    def evicted(self, reason: EvictionReason, n_bytes: int = 0) -> None:
        """An entry has left the engine's cache; ``n_bytes`` of memory with it, 0 where something took its place."""
        self.evictions += 1
        self.evicted_bytes += n_bytes
        _count(self.evicted_for, reason)

    def refused(self, reason: str) -> None:
        """An entry was not handed over, for this reason."""
        _count(self.refusals, reason)

    def missed(self, reason: str) -> None:
        """Nothing was restored, for this reason."""
        _count(self.not_restored, reason)

    def prefilled(self, tokens: int, seconds: float, *, start: int = 0, model: int | None = None) -> None:
        """The engine computed ``tokens`` tokens of one prompt, from position ``start`` on, in ``seconds``.

        ``model``: the id of its handle, None where nothing is carried of it.
        """
        if seconds <= 0:
            return
        rate, before = tokens / seconds, self.prefill_tokens_per_s
        self.prefill_tokens_per_s = rate if before == 0 else before + _SMOOTHING * (rate - before)
        if model is not None:
            self.prefills.append((model, start, start + tokens, round(seconds, 6)))

    def built(self, n_bytes: int, seconds: float) -> None:
        """A cache of ``n_bytes`` was made of what came from the vaults."""
        self.built_bytes, self.built_s = n_bytes, round(seconds, 6)

    def report(self) -> dict[str, object]:
        """Plain JSON values for ``HandoffClient.report_hot``."""
        kinds = dict(self.hits)
        misses = kinds.get("none", 0)
        return {
            "entries": self.entries, "tokens": self.tokens, "size_bytes": self.size_bytes,
            "cap_bytes": self.cap_bytes, "hits": sum(kinds.values()) - misses, "misses": misses,
            "hits_by_kind": kinds, "refusals": dict(self.refusals), "not_restored": dict(self.not_restored),
            "evictions": self.evictions, "evicted_bytes": self.evicted_bytes,
            "evicted_for": dict(self.evicted_for),
            "restored_tokens": self.restored_tokens, "restored_bytes": self.restored_bytes,
            "offered": self.offered, "handed_over_bytes": self.handed_over_bytes,
            "evaluate_s": round(self.evaluate_s, 6), "copy_s": round(self.copy_s, 6),
            "prefill_tokens_per_s": round(self.prefill_tokens_per_s, 3),
            "device_bytes": self.device_bytes, "note": self.note, "prefills": self._taken(),
            "built_bytes": self.built_bytes, "built_s": self.built_s,
        }  # fmt: skip

    def _taken(self) -> list[tuple[int, int, int, float]]:
        """The prefills since the last report; the generation thread may add to them meanwhile."""
        taken: list[tuple[int, int, int, float]] = []
        while self.prefills:
            taken.append(self.prefills.popleft())
        return taken


def _count(table: dict[str, int], name: str) -> None:
    table[name] = table.get(name, 0) + 1
