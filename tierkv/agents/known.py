"""What the agent remembers without asking a vault: keys that are stored, prefixes that came back lossy, bad records."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tierkv.codec.record import RecordKind
from tierkv.identity.blocks import BlockKey, PromptChain, Tokens, common_prefix

# 250 to 950 bytes an entry (measured): at most 31 MB a tier, for 8 million tokens of full blocks.
MAX_KNOWN = 1 << 15
MAX_PREFIXES = 64
MAX_BAD = 4096
BAD_S = 600.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a short block or a checkpoint stands: after ``parent``, up to position ``end`` of its prompt."""

    parent: BlockKey
    kind: RecordKind
    end: int

    def key_in(self, chain: PromptChain) -> BlockKey | None:
        """What the prompt's own record at this place is called; None beyond its end."""
        if self.end > len(chain.tokens):
            return None
        if self.kind is RecordKind.BLOCK:
            return chain.tail_key(self.end)
        return chain.window_key(self.end) if self.kind is RecordKind.WINDOW else chain.state_key(self.end)


class KnownKeys:
    """Keys that a tier's vaults hold, with their fidelity; the least recently used is forgotten first.

    Full blocks are named by every prompt that has them. What else there is of a prompt is found by its parent.
    """

    def __init__(self, limit: int = MAX_KNOWN) -> None:
        self._limit = limit
        self._keys: OrderedDict[BlockKey, tuple[int, Place | None]] = OrderedDict()
        self._after: dict[BlockKey, dict[tuple[RecordKind, int], set[BlockKey]]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: BlockKey, fidelity: int, place: Place | None = None) -> None:
        """``place``: None for a full block."""
        held, _ = self._keys.get(key, (fidelity, None))
        self._keys[key] = min(fidelity, held), place
        self._keys.move_to_end(key)
        if place is not None:
            self._after.setdefault(place.parent, {}).setdefault((place.kind, place.end), set()).add(key)
        if len(self._keys) > self._limit:
            self.discard([next(iter(self._keys))])

    def learn(self, key: BlockKey, fidelity: int, place: Place | None = None) -> None:
        """A vault has just said so; what was known before may be older."""
        self.discard([key])
        self.add(key, fidelity, place)

    def holds(self, key: BlockKey, fidelity: int) -> bool:
        """Whether a record of at least this fidelity is stored, as far as is known."""
        held = self._keys.get(key)
        if held is None or held[0] > fidelity:
            return False
        self._keys.move_to_end(key)
        return True

    def after(self, parents: Iterable[BlockKey]) -> list[BlockKey]:
        """Short blocks and checkpoints that stand on these."""
        there = (keys for parent in parents for keys in self._after.get(parent, {}).values())
        return [key for keys in there for key in keys]

    def places_after(self, parents: Iterable[BlockKey]) -> list[Place]:
        """Where short blocks and checkpoints stand on these: at most 256 of a kind for each, however many prompts."""
        return [Place(parent, kind, end) for parent in parents for kind, end in self._after.get(parent, ())]

    def discard(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            _, place = self._keys.pop(key, (0, None))
            if place is not None:
                self._leave(key, place)

    def _leave(self, key: BlockKey, place: Place) -> None:
        places = self._after[place.parent]
        keys = places[place.kind, place.end]
        keys.discard(key)
        if not keys:
            del places[place.kind, place.end]
        if not places:
            del self._after[place.parent]

    def clear(self) -> None:
        self._keys.clear()
        self._after.clear()


class Taints:
    """Which of an engine's prefixes came from lossy records: rows computed after them are not those of a clean run.

    One for each engine process; it is forgotten with the process, whose memory is the only place where such rows live.
    """

    def __init__(self) -> None:
        self._prefixes: dict[BlockKey, deque[tuple[Tokens, int, int]]] = {}
        self._floor: dict[BlockKey, int] = {}

    def restored(self, root: BlockKey, tokens: Tokens, first_row: int, fidelity: int) -> None:
        """The engine got rows [first_row, len(tokens)) of this prompt with ``fidelity``."""
        if not fidelity:
            return
        prefixes = self._prefixes.setdefault(root, deque())
        prefixes.append((tokens.copy(), first_row, fidelity))
        if len(prefixes) > MAX_PREFIXES:
            self.at_least(root, prefixes.popleft()[2])

    def at_least(self, root: BlockKey, fidelity: int) -> None:
        """Whatever the engine offers of this model is at best this exact."""
        self._floor[root] = max(fidelity, self._floor.get(root, 0))

    def worst(self, root: BlockKey, tokens: Tokens) -> int:
        """The worst fidelity that state of this prompt may inherit: engines reuse whatever prefix two prompts share."""
        worst = self._floor.get(root, 0)
        for prefix, first_row, fidelity in self._prefixes.get(root, ()):
            if fidelity > worst and common_prefix(prefix, tokens) > first_row:
                worst = fidelity
        return worst


class BadRecords:
    """Records that failed at a restore: not asked for again until they are stored anew, or for ten minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: OrderedDict[tuple[str, BlockKey], float] = OrderedDict()

    def add(self, peer: str, key: BlockKey, seconds: float = BAD_S) -> None:
        self._until[peer, key] = self._clock() + seconds
        if len(self._until) > MAX_BAD:
            self._until.popitem(last=False)

    def stored_anew(self, peer: str, key: BlockKey) -> None:
        self._until.pop((peer, key), None)

    def holds(self, peer: str, key: BlockKey) -> bool:
        until = self._until.get((peer, key))
        if until is not None and until <= self._clock():
            del self._until[peer, key]
            return False
        return until is not None
