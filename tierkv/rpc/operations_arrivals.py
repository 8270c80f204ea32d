"""What another vault is given, by a drain or an import, and what of it is there in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from tierkv.codec.record import RecordHeader
from tierkv.identity.blocks import BlockKey
from tierkv.rpc.vault_port import StoreOutcome

if TYPE_CHECKING:
    from tierkv.rpc.admin import VaultStats
    from tierkv.rpc.client import VaultClient

# A vault took the record and had given it up again by the end: for want of room, or for another reason.
NO_ROOM, GONE = "no_room", "gone"


class Arrivals:
    """``refused`` counts by reason what is not there; complete after ``settle``."""

    def __init__(self, vault: VaultClient, stats: VaultStats) -> None:
        self._vault = vault
        self._evictions = stats.tier.evictions
        self._accepted: set[BlockKey] = set()
        self.epoch = stats.epoch
        self.free_bytes = max(0, stats.tier.cap_bytes - stats.tier.size_bytes)
        self.refused: Counter[str] = Counter()

    def add(self, outcomes: Iterable[StoreOutcome]) -> None:
        for outcome in outcomes:
            if outcome.accepted:
                self._accepted.add(outcome.key)
            else:
                self.refused[outcome.outcome] += 1

    async def settle(self) -> int:
        """How many of the records that the vault took it still holds. Raises PeerError."""
        if not self._accepted:
            return 0
        held = {key for key, _ in await self._vault.list_records()}
        kept = len(self._accepted & held)
        if lost := len(self._accepted) - kept:
            full = (await self._vault.stats()).tier.evictions > self._evictions
            self.refused[NO_ROOM if full else GONE] += lost
        return kept


def readdressed(data: bytes, epoch: int) -> tuple[RecordHeader, list[bytes]]:
    """The record as a vault at ``epoch`` takes it in; only its header is written anew. Raises BadFrame."""
    header, size = RecordHeader.unpack_frame(data)
    header = replace(header, epoch=epoch)
    return header, [header.pack_frame(), data[size:]]
