"""Complete records on their way to the vaults. Reads see them; what has to go is dropped, children with parents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.identity.blocks import BlockKey, PromptChain
from tierkv.rpc.vault_port import Found, Missing, Piece

Buffers = list[bytes | bytearray | memoryview]
QUEUE_PEER = "queue"


@dataclass(slots=True, eq=False)
class PendingRecord:
    """``frames`` are the segment frames; the header frame is made when it is sent, with the vault's epoch.

    ``targets``: the vaults that have not answered for it yet; ``answered``: another has.
    """

    header: RecordHeader
    frames: Buffers
    chain: PromptChain
    queued_s: float
    targets: set[str] = field(default_factory=set[str])
    sending: bool = False
    answered: bool = False

    @property
    def size_bytes(self) -> int:
        return self.header.segment_bytes

    def buffers(self) -> Buffers:
        return [self.header.pack_frame(), *self.frames]


class PendingRecords:
    """A queue in the order of arrival. Owned by the event loop.

    Whoever is going to add records reserves room for them first, and may wait for it: that is what bounds the queue.
    """

    def __init__(self, cap_bytes: int, on_drop: Callable[[PendingRecord, str], None]) -> None:
        self.cap_bytes = cap_bytes
        self.size_bytes = 0
        self.reserved_bytes = 0
        self._on_drop = on_drop
        self._waiting: list[asyncio.Future[None]] = []
        self._records: dict[BlockKey, PendingRecord] = {}
        self._children: dict[BlockKey, dict[BlockKey, PendingRecord]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: object) -> bool:
        return key in self._records

    @property
    def is_full(self) -> bool:
        """Whether another prompt's state had better not be copied at all."""
        return self.size_bytes >= self.cap_bytes

    def get(self, key: BlockKey) -> PendingRecord | None:
        return self._records.get(key)

    def records(self) -> list[PendingRecord]:
        return list(self._records.values())

    def reserve(self, size_bytes: int) -> bool:
        """Room for so much until it is released; False while there is none. What finds nothing here always fits."""
        held = self.size_bytes + self.reserved_bytes
        if held and held + size_bytes > self.cap_bytes:
            return False
        self.reserved_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        self.reserved_bytes -= size_bytes
        self._shrank()

    async def shrank(self, timeout_s: float) -> bool:
        """Waits until something has left or was released; False if nothing did."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        done, _ = await asyncio.wait((waiting,), timeout=timeout_s)
        return bool(done)

    def give_up_oldest(self, may_go: Callable[[PendingRecord], bool], is_down: Callable[[str], bool]) -> bool:
        """For the oldest record that may go, and what stands on it, nobody waits for the vaults that are down.

        What no other vault is to get leaves unsent. False if there is no such record.
        """
        oldest = next((each for each in self._records.values() if not each.sending and may_go(each)), None)
        if oldest is None:
            return False
        for each in self._with_descendants(oldest):
            each.targets = {target for target in each.targets if not is_down(target)}
            if not each.targets:
                self._forget(each)
                self._on_drop(each, "queue_full")
        return True

    def add(self, record: PendingRecord) -> None:
        """The record is in the queue, in place of one of its key."""
        held = self._records.get(record.header.key)
        if held is not None:
            self._forget(held)
        self._records[record.header.key] = record
        self._children.setdefault(record.header.parent, {})[record.header.key] = record
        self.size_bytes += record.size_bytes

    def done(self, record: PendingRecord, peer: str) -> None:
        """This vault has answered for the record; with the last answer it leaves the queue."""
        record.targets.discard(peer)
        record.answered = True
        if not record.targets and self._records.get(record.header.key) is record:
            self._forget(record)

    def drop(self, record: PendingRecord, reason: str) -> None:
        """The record and everything that stands on it leave the queue unsent."""
        for each in self._with_descendants(record):
            self._forget(each)
            self._on_drop(each, reason)

    def _with_descendants(self, record: PendingRecord) -> list[PendingRecord]:
        found, left = list[PendingRecord](), [record]
        while left:
            each = left.pop()
            if self._records.get(each.header.key) is each:
                found.append(each)
                if each.header.is_full_block:
                    left += self._children.get(each.header.key, {}).values()
        return found

    def _forget(self, record: PendingRecord) -> None:
        del self._records[record.header.key]
        siblings = self._children[record.header.parent]
        del siblings[record.header.key]
        if not siblings:
            del self._children[record.header.parent]
        self.size_bytes -= record.size_bytes
        self._shrank()

    def _shrank(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    def children(self, parent: BlockKey, kind: RecordKind) -> Iterable[PendingRecord]:
        return (each for each in self._children.get(parent, {}).values() if each.header.kind is kind)


class PendingSource:
    """Records of the queue as a source of a restore, kept for it even if they leave the queue meanwhile."""

    peer = QUEUE_PEER

    def __init__(self) -> None:
        self._records: dict[BlockKey, PendingRecord] = {}

    def take(self, record: PendingRecord, agreeing: int) -> Found:
        """What a vault's probe would say of the record."""
        header = record.header
        self._records[header.key] = record
        return Found(
            header.key, header.kind, header.start, header.n_tokens, agreeing, record.size_bytes, header.raw_bytes,
            header.fidelity, header.layout_digest,
        )  # fmt: skip

    async def promote(
        self, keys: Sequence[BlockKey], *, timeout_s: float | None = None
    ) -> AsyncIterator[Piece | Missing]:
        del timeout_s  # nothing is waited for
        for index, key in enumerate(keys):
            whole = b"".join(self._records[key].buffers())
            yield Piece(index, len(whole), 0, memoryview(whole))
