"""Records that were to be stored and were not: when and why, for people who ask why a prompt did not come back."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tierkv.codec.record import RecordKind
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey, PromptChain, beginning_of

if TYPE_CHECKING:
    from tierkv.agents.pending import PendingRecord

NOT_STORED = "not_stored"
# About 1 MB.
MAX_REMEMBERED = 4096
EVERY_VAULT = ""
_WORDS = {
    "vault_down": "its vault could not be reached for too long",
    "queue_full": "the vaults took no more and the queue was full",
    "incomplete": "not all of it came from the engine",
    "hook_gone": "the engine went away",
    "mover_full": "too much was already waiting in the engine",
    "cancelled": "the engine gave it up",
    "abandoned": "the engine gave it up",
    "array_over_arena": "one array is larger than inference.handoff_bytes",
    "hook_error": "a fault of the engine's hook; the engine's log says more",
    "not_encodable": "it could not be encoded; the agent's log says more",
    "not_sendable": "it could not be sent; the agent's log says more",
}


def refused_text(outcome: str) -> str:
    """A vault's own slug in words."""
    return f"the vault refused it: {outcome.replace('_', ' ')}"


class Unstored:
    """By vault ("kv:host:port") and place in a prompt. Owned by the event loop.

    A full block is known by its key. What is shorter is known by what comes before it and by its first 64 tokens, so
    that a longer prompt which begins like it is told the same; checkpoints by what comes before their last block.
    """

    def __init__(self) -> None:
        self._places: OrderedDict[tuple[str, bytes], tuple[float, str]] = OrderedDict()

    def add(self, target: str, chain: PromptChain, kind: RecordKind, start: int, end: int, why: str) -> None:
        """This record of ``chain`` was not stored by ``target`` ("tier:" and no peer: by none). The first why stays."""
        place = _place(chain, kind, start, end)
        if place is not None:
            self._places.setdefault((target, place), (time.time(), _WORDS.get(why, why.replace("_", " "))))
        while len(self._places) > MAX_REMEMBERED:
            self._places.popitem(last=False)

    def add_record(self, target: str, record: PendingRecord, why: str) -> None:
        header = record.header
        self.add(target, record.chain, header.kind, header.start, header.end, why)

    def stored(self, target: str, record: PendingRecord) -> None:
        """It was after all."""
        if not self._places:
            return
        header, (tier, _, _) = record.header, target.partition(":")
        place = _place(record.chain, header.kind, header.start, header.end)
        if place is not None:
            self._places.pop((target, place), None)
            self._places.pop((f"{tier}:{EVERY_VAULT}", place), None)

    def of(self, target: str, chain: PromptChain, reach: int) -> tuple[float, str] | None:
        """When and why what this prompt lacks there beyond ``reach`` tokens was not stored; None if it is not known."""
        if not self._places:
            return None
        tier, _, _ = target.partition(":")
        for place in _wanted(chain, tier, reach):
            for name in (target, f"{tier}:{EVERY_VAULT}"):
                if found := self._places.get((name, place)):
                    return found
        return None


def _place(chain: PromptChain, kind: RecordKind, start: int, end: int) -> bytes | None:
    if kind is RecordKind.BLOCK and end - start == BLOCK_TOKENS:
        return chain.keys[start // BLOCK_TOKENS]
    if kind is RecordKind.BLOCK:
        return _tail_place(chain, start)
    return _checkpoint_place(chain, start)


def _tail_place(chain: PromptChain, start: int) -> bytes | None:
    beginning = beginning_of(chain.tokens[start:])
    return b"tail" + chain.parent_at(start) + beginning if beginning else None


def _checkpoint_place(chain: PromptChain, start: int) -> bytes | None:
    beginning = beginning_of(chain.tokens)
    return b"mark" + chain.parent_at(start) + (b"" if start else beginning) if start or beginning else None


def _wanted(chain: PromptChain, tier: str, reach: int) -> Iterator[bytes]:
    """Places of what comes next after ``reach``; of checkpoints the last one that the prompt can use first."""
    first = reach // BLOCK_TOKENS
    if tier == "ssm":
        places = (_checkpoint_place(chain, index * BLOCK_TOKENS) for index in range(len(chain.keys), first - 1, -1))
        yield from (place for place in places if place is not None)
        return
    keys: tuple[BlockKey, ...] = chain.keys[first : first + 1]
    yield from keys
    tail = _tail_place(chain, first * BLOCK_TOKENS)
    if tail is not None:
        yield tail
