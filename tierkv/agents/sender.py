"""One vault's outgoing records: asks what is missing, sends that on one stream, keeps the rest for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from tierkv.agents.known import BadRecords, Place
from tierkv.agents.pending import Buffers, PendingRecord, PendingRecords
from tierkv.agents.reasons import reason_of
from tierkv.agents.routing import TierRouter
from tierkv.agents.unstored import Unstored, refused_text
from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.errors import PeerError, TierKVError
from tierkv.identity.blocks import BlockKey
from tierkv.rpc.vault_port import ProbeResult, StoreOutcome, VaultPort
from tierkv.telemetry.node import NodeTelemetry

_log = logging.getLogger(__name__)

# A batch is one probe and one stream; a failed one is sent again whole.
BATCH_BYTES = 64 << 20
FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 2.0


class Sender:
    """Sends in the order of arrival, parents first, one batch of one prompt at a time. Owned by the event loop.

    While the vault is down, records wait for at most ``keep_s``; then they are dropped and counted.
    """

    def __init__(
        self,
        router: TierRouter,
        port: VaultPort,
        pending: PendingRecords,
        bad: BadRecords,
        telemetry: NodeTelemetry,
        unstored: Unstored,
        *,
        keep_s: float,
    ) -> None:
        self.target = f"{router.tier}:{port.peer}"
        self.is_down = False
        self._router = router
        self._port = port
        self._pending = pending
        self._bad = bad
        self._telemetry = telemetry
        self._unstored = unstored
        self._tier = telemetry.tier(router.tier)
        self._keep_s = keep_s
        self._queue: deque[PendingRecord] = deque()
        self._wake = asyncio.Event()

    def add(self, record: PendingRecord) -> None:
        self._queue.append(record)
        self._wake.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            batch = self._next_batch()
            if not batch:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                await self._send(batch)
                retry_s = FIRST_RETRY_S
                self._is_up()
            except TierKVError as error:
                self._went_wrong(error, batch)
                await asyncio.sleep(retry_s)
                retry_s = min(LONGEST_RETRY_S, retry_s * 2)
            except Exception:  # one batch that cannot be sent must not end all later ones
                _log.exception("records for %s cannot be sent", self.target)
                for record in batch:
                    self._pending.drop(record, "not_sendable")

    def _next_batch(self) -> list[PendingRecord]:
        """Records of one prompt, parents first; they stay in the queue until they are answered for."""
        self._forget_old()
        batch: list[PendingRecord] = []
        size = 0
        for record in self._queue:
            if batch and (record.chain is not batch[0].chain or size + record.size_bytes > BATCH_BYTES):
                break
            batch.append(record)
            size += record.size_bytes
        return sorted(batch, key=lambda each: (each.header.start, each.header.kind))

    def _forget_old(self) -> None:
        oldest_s = time.monotonic() - self._keep_s
        for record in list(self._queue) if self.is_down else ():
            if record.queued_s < oldest_s:
                self._pending.drop(record, "vault_down")
        self._queue = deque(each for each in self._queue if self._is_pending(each))

    def _is_pending(self, record: PendingRecord) -> bool:
        return self._pending.get(record.header.key) is record and self.target in record.targets

    async def _send(self, batch: Sequence[PendingRecord]) -> None:
        kv = self._router.tier == "kv"
        probe = await self._port.probe(batch[0].chain, blocks=kv, windows=kv, states=not kv, peek=True)
        held = _held(probe)
        missing: list[PendingRecord] = []
        for record in batch:
            fidelity = held.get(record.header.key)
            if self._bad.holds(self._port.peer, record.header.key):
                fidelity = None
            if fidelity is not None and fidelity <= record.header.fidelity:
                self._answered(record, fidelity)
            else:
                missing.append(record)
        if not missing:
            return
        began_s = time.monotonic()
        for record in missing:
            record.sending = True
        try:
            outcomes = await self._port.store(self._records(missing, probe.epoch))
        finally:
            for record in missing:
                record.sending = False
        self._tier.store_s.add(time.monotonic() - began_s)
        for record, outcome in zip(missing, outcomes, strict=False):
            self._settle(record, outcome)

    async def _records(
        self, missing: Sequence[PendingRecord], epoch: int
    ) -> AsyncIterator[tuple[RecordHeader, Buffers]]:
        for record in missing:
            header = replace(record.header, epoch=epoch)
            yield header, [header.pack_frame(), *record.frames]

    def _settle(self, record: PendingRecord, outcome: StoreOutcome) -> None:
        if outcome.accepted:
            self._bad.stored_anew(self._port.peer, record.header.key)
            if outcome.outcome in ("stored", "replaced"):
                self._tier.stored()
                self._tier.bytes_in(record.size_bytes)
            self._answered(record, record.header.fidelity)
            return
        self._tier.refused(outcome.outcome)
        self._telemetry.count(f"stores_refused_{outcome.outcome}")
        self._unstored.add_record(self.target, record, refused_text(outcome.outcome))
        self._pending.done(record, self.target)

    def _answered(self, record: PendingRecord, fidelity: int) -> None:
        header = record.header
        place = None if header.is_full_block else Place(header.parent, header.kind, header.end)
        self._router.known.add(header.key, fidelity, place)
        self._unstored.stored(self.target, record)
        self._pending.done(record, self.target)

    def _is_up(self) -> None:
        if self.is_down:
            self.is_down = False
            self._telemetry.emit("link", "info", f"{self.target} takes records again", peer=self._port.peer)

    def _went_wrong(self, error: TierKVError, batch: Sequence[PendingRecord]) -> None:
        """What the vault said it holds may be gone with it, so nothing counts as known any more."""
        reason = reason_of(error)
        self._telemetry.count(f"stores_failed_{reason}")
        self._router.known.clear()
        if not isinstance(error, PeerError):
            for record in batch:
                self._tier.refused(reason)
                self._unstored.add_record(self.target, record, reason)
                self._pending.done(record, self.target)
            return
        if not self.is_down:
            self.is_down = True
            self._telemetry.emit(
                "link", "warning", f"{self.target} does not take records: {error}", peer=self._port.peer, reason=reason
            )


def _held(probe: ProbeResult) -> dict[BlockKey, int]:
    """Keys that the vault has whole, with their fidelity."""
    found = [*probe.blocks.values(), *probe.windows, *probe.states]
    if probe.partial is not None and probe.partial.kind is RecordKind.BLOCK:
        found.append(probe.partial)
    return {each.key: each.fidelity for each in found}
