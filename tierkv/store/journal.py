"""What a store has to tell: events for the feed, counters, and why a key is not here."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection
from typing import NamedTuple

from tierkv.codec.record import RecordKind
from tierkv.identity.blocks import BlockKey

StoreEvent = tuple[str, str, dict[str, str]]

# What became of so many keys is remembered: about 4 MB.
REMEMBERED_KEYS = 16_384
KEPT_EVENTS = 1_024
# An event of many records names the last few, whole, so that one can ask where they are now.
TOLD_KEYS = 3


class Fate(NamedTuple):
    """What became of a key that is not in sight. ``why`` adds to the reason, for people; ``unix_s`` is 0 if unknown.

    ``kind``, ``end`` and ``parent`` are the record's, where it was in sight before.
    """

    reason: str
    unix_s: float = 0.0
    why: str = ""
    kind: RecordKind | None = None
    end: int = 0
    parent: BlockKey | None = None


NEVER_STORED = Fate("never_stored")
NOTHING_MISSING = Fate("")


def _told_keys() -> deque[BlockKey]:
    return deque(maxlen=TOLD_KEYS)


class Journal:
    """Bounded memory of what happened. No lock of its own.

    ``since_unix_s``: whatever left after that is remembered; 0 until the owner says when it began.
    """

    def __init__(self) -> None:
        self.since_unix_s = 0.0
        self.evictions = 0
        self.quarantined = 0
        self.refusals: Counter[str] = Counter()
        self._fates: OrderedDict[BlockKey, Fate] = OrderedDict()
        self._events: deque[StoreEvent] = deque(maxlen=KEPT_EVENTS)
        self._gone: Counter[str] = Counter()
        self._gone_bytes: Counter[str] = Counter()
        self._gone_keys: defaultdict[str, deque[BlockKey]] = defaultdict(_told_keys)
        self._refused: Counter[str] = Counter()

    def reason(self, key: BlockKey) -> str:
        """Why a key that is not in sight is not."""
        return self.fate(key).reason

    def fate(self, key: BlockKey) -> Fate:
        """What became of a key that is not in sight."""
        return self._fates.get(key, NEVER_STORED)

    def lost_under(self, parents: Collection[BlockKey], kinds: Collection[RecordKind]) -> list[tuple[BlockKey, Fate]]:
        """What is remembered of records of these kinds that stood on one of ``parents``, the latest last."""
        return [(key, fate) for key, fate in self._fates.items() if fate.parent in parents and fate.kind in kinds]

    def remember(self, key: BlockKey, fate: Fate) -> None:
        """The latest keys are remembered, up to a bound."""
        self._fates.pop(key, None)
        self._fates[key] = fate
        if len(self._fates) > REMEMBERED_KEYS:
            _, oldest = self._fates.popitem(last=False)
            self.since_unix_s = max(self.since_unix_s, oldest.unix_s)

    def gone(self, key: BlockKey, fate: Fate, size_bytes: int) -> None:
        """A record is out of sight."""
        self.remember(key, fate)
        reason = fate.reason
        self._gone[reason] += 1
        self._gone_bytes[reason] += size_bytes
        self._gone_keys[reason].append(key)
        self.evictions += reason == "evicted"

    def refused(self, reason: str) -> None:
        """A record was not taken."""
        self.refusals[reason] += 1
        self._refused[reason] += 1

    def damaged(self, key: BlockKey | None, reason: str) -> None:
        """A damaged or foreign record was met."""
        self.quarantined += 1
        name = key.hex()[:8] if key else "unknown"
        self.note("quarantine", f"record {name} is damaged: {reason}", key=name, reason=reason)

    def note(self, kind: str, message: str, **attributes: str) -> None:
        self._events.append((kind, message, attributes))

    def drain(self) -> list[StoreEvent]:
        """What happened since the last call; evictions and refusals summed up, so that a storm is one line."""
        found = list(self._events)
        for reason, kind in (("evicted", "evict"), ("expired", "expire")):
            if count := self._gone[reason]:
                attributes = {"records": str(count), "bytes": str(self._gone_bytes[reason]), "reason": reason}
                attributes["keys"] = " ".join(key.hex() for key in self._gone_keys.get(reason, ()))
                found.append((kind, f"{count} records {reason}", attributes))
        for reason, count in self._refused.items():
            attributes = {"records": str(count), "reason": reason}
            found.append(("refuse", f"{count} records refused: {reason}", attributes))
        for each in (self._events, self._gone, self._gone_bytes, self._gone_keys, self._refused):
            each.clear()
        return found
