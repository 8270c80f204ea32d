"""Complete records on their way to the vaults. Reads see them; what does not fit is dropped, children with parents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.identity.blocks import BlockKey, PromptChain
from tierkv.rpc.vault_port import Found, Missing, Piece

Buffers = list[bytes | bytearray | memoryview]


@dataclass(slots=True, eq=False)
class PendingRecord:
    """``frames`` are the segment frames; the header frame is made when it is sent, with the vault's epoch.

    ``targets``: the vaults that have not answered for it yet.
    """

    header: RecordHeader
    frames: Buffers
    chain: PromptChain
    queued_s: float
    targets: set[str] = field(default_factory=set[str])
    sending: bool = False

    @property
    def size_bytes(self) -> int:
        return self.header.segment_bytes

    def buffers(self) -> Buffers:
        return [self.header.pack_frame(), *self.frames]


class PendingRecords:
    """A queue bounded by bytes, in the order of arrival. Owned by the event loop."""

    def __init__(self, cap_bytes: int, on_drop: Callable[[PendingRecord, str], None]) -> None:
        self.cap_bytes = cap_bytes
        self.size_bytes = 0
        self._on_drop = on_drop
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

    def add(self, record: PendingRecord, *, replace_oldest: bool) -> bool:
        """The record is in the queue; False when it does not fit (it is then dropped and counted).

        ``replace_oldest``: older records that are not being sent make room, for a vault that is down.
        """
        size = record.size_bytes
        while replace_oldest and self.size_bytes + size > self.cap_bytes:
            oldest = next((each for each in self._records.values() if not each.sending), None)
            if oldest is None:
                break
            self.drop(oldest, "queue_full")
        if self.size_bytes + size > self.cap_bytes:
            self._on_drop(record, "queue_full")
            return False
        held = self._records.get(record.header.key)
        if held is not None:
            self._forget(held)
        self._records[record.header.key] = record
        self._children.setdefault(record.header.parent, {})[record.header.key] = record
        self.size_bytes += size
        return True

    def done(self, record: PendingRecord, peer: str) -> None:
        """This vault has answered for the record; with the last answer it leaves the queue."""
        record.targets.discard(peer)
        if not record.targets and self._records.get(record.header.key) is record:
            self._forget(record)

    def drop(self, record: PendingRecord, reason: str) -> None:
        """The record and everything that stands on it leave the queue unsent."""
        found = [record]
        while found:
            each = found.pop()
            if self._records.get(each.header.key) is each:
                self._forget(each)
                self._on_drop(each, reason)
                if each.header.is_full_block:
                    found += self._children.get(each.header.key, {}).values()

    def _forget(self, record: PendingRecord) -> None:
        del self._records[record.header.key]
        siblings = self._children[record.header.parent]
        del siblings[record.header.key]
        if not siblings:
            del self._children[record.header.parent]
        self.size_bytes -= record.size_bytes

    def children(self, parent: BlockKey, kind: RecordKind) -> Iterable[PendingRecord]:
        return (each for each in self._children.get(parent, {}).values() if each.header.kind is kind)


class PendingSource:
    """Records of the queue as a source of a restore, kept for it even if they leave the queue meanwhile."""

    peer = "queue"

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
