"""What the agent takes from engines: offers answered from memory, regions encoded, records queued.

A region waits while the queue is full and a vault takes records: the engine's mover thread, which holds state that the
engine still has in its cache, waits with it. With vaults that are down nobody waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from tierkv.agents.codec_loss import add_losses, enough
from tierkv.agents.layouts import Layouts
from tierkv.agents.model_registry import Model
from tierkv.agents.pending import PendingRecord, PendingRecords
from tierkv.agents.quality import QualityBook
from tierkv.agents.routing import TIER_KINDS, TierRouter
from tierkv.agents.sender import Sender
from tierkv.agents.transfer import Encoded, Incoming, RecordBuilder, encode_region
from tierkv.agents.unstored import Unstored
from tierkv.codec.record import RecordKind
from tierkv.codec.registry import Codec
from tierkv.handoff.protocol import Segment
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey, PromptChain
from tierkv.telemetry.node import NodeTelemetry

_log = logging.getLogger(__name__)
DROPS_SHOWN_EVERY_S = 1.0
# How long an offer that was accepted keeps others from being accepted for the same state before any of it comes.
CLAIM_S = 2.0
# So long a region waits for room while no record leaves the queue; the engine's mover waits a little longer.
PATIENCE_S = 20.0
# How often a region that waits looks whether its vaults have gone down.
LOOK_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Wanted:
    """The answer to an offer; see ``handoff.client.Offer``. ``held``: some of it is stored, as far as is known."""

    incoming: Incoming | None
    rows_from: int | None = None
    window: bool = False
    state: bool = False
    reason: str = ""
    held: bool = False


class Demoter:
    """Owned by the event loop; encoding runs in ``pool``."""

    def __init__(
        self,
        routers: Mapping[str, TierRouter],
        senders: Mapping[str, Sequence[Sender]],
        pending: PendingRecords,
        layouts: Layouts,
        telemetry: NodeTelemetry,
        pool: Executor,
        codecs: Mapping[str, Codec],
        quality: QualityBook,
        unstored: Unstored,
        *,
        min_store_tokens: Callable[[], int],
    ) -> None:
        self._routers = routers
        self._senders = {sender.target: sender for group in senders.values() for sender in group}
        self._pending = pending
        self._layouts = layouts
        self._telemetry = telemetry
        self._pool = pool
        self._codecs = codecs
        self._quality = quality
        self._unstored = unstored
        self._min_store_tokens = min_store_tokens
        self._claimed: dict[BlockKey, Incoming] = {}
        self._gate = asyncio.Lock()
        self._next_id = 0
        self._jobs = 0

    # --- offers -------------------------------------------------------------------------------------

    def offer(self, model: Model, chain: PromptChain, layout_json: bytes, taint: int) -> Wanted:
        """What is wanted of the state that stands at the chain's end. Raises HandoffError for an unreadable layout."""
        layout, digest = self._layouts.parse(layout_json)
        self._next_id += 1
        incoming = Incoming(self._next_id, model, chain, layout, digest, len(chain.tokens), taint)
        reason = self._objection(incoming)
        if reason:
            self._telemetry.count(f"offers_declined_{reason}")
            if reason == "queue_full":
                self._want(incoming)
                self._remember_unstored(incoming, reason)
            return Wanted(None, reason=reason)
        self._want(incoming)
        if not incoming.builders:
            self._telemetry.count("offers_known")
            return Wanted(None, reason="known", held=True)
        for builder in incoming.builders.values():
            self._claimed[builder.key] = incoming
        rows = [builder.start for builder in incoming.builders.values() if builder.kind is RecordKind.BLOCK]
        kinds = {builder.kind for builder in incoming.builders.values()}
        return Wanted(
            incoming,
            min(rows, default=None),
            RecordKind.WINDOW in kinds,
            RecordKind.STATE in kinds,
            held=rows[:1] != [0],
        )

    def _objection(self, incoming: Incoming) -> str:
        if incoming.position < max(1, self._min_store_tokens()):
            return "too_short"
        if incoming.chain.clamp(incoming.position) != incoming.position:
            return "inside_media"
        tiers = [tier for tier, kinds in TIER_KINDS.items() if incoming.layout.having(*kinds)]
        for tier in tiers:
            if not self._routers[tier].exists:
                return f"no_{tier}_vault"
        down = self._pending.is_full and all(self._is_down(tier, incoming) for tier in tiers)
        return "queue_full" if down else ""

    def _is_down(self, tier: str, incoming: Incoming) -> bool:
        """Whether no vault that the tier's records of this prompt go to takes any."""
        ports = self._routers[tier].targets(incoming.chain)
        return all(self._target_is_down(f"{tier}:{port.peer}") for port in ports)

    def _want(self, incoming: Incoming) -> None:
        self._want_rows(incoming)
        self._want_checkpoint(incoming, RecordKind.WINDOW)
        self._want_checkpoint(incoming, RecordKind.STATE)

    def _want_rows(self, incoming: Incoming) -> None:
        if not incoming.layout.having("rows"):
            return
        chain, position = incoming.chain, incoming.position
        for index, key in enumerate(chain.keys):
            if not self._held(key, "kv", incoming):
                start = index * BLOCK_TOKENS
                incoming.want(RecordKind.BLOCK, key, start, start + BLOCK_TOKENS)
        if position % BLOCK_TOKENS:
            key = chain.tail_key(position)
            if not self._held(key, "kv", incoming):
                incoming.want(RecordKind.BLOCK, key, position // BLOCK_TOKENS * BLOCK_TOKENS, position)

    def _want_checkpoint(self, incoming: Incoming, kind: RecordKind) -> None:
        if not incoming.layout.having("window" if kind is RecordKind.WINDOW else "state"):
            return
        position = incoming.position
        key_at = incoming.chain.window_key if kind is RecordKind.WINDOW else incoming.chain.state_key
        key = key_at(position)
        if not self._held(key, kind.tier, incoming):
            incoming.want(kind, key, position // BLOCK_TOKENS * BLOCK_TOKENS, position)

    def _held(self, key: BlockKey, tier: str, incoming: Incoming) -> bool:
        """Whether a record at least this good is stored, queued, or on its way from an engine."""
        fidelity = max(incoming.taint, self._codecs[tier].fidelity)
        if self._routers[tier].known.holds(key, fidelity):
            return True
        queued = self._pending.get(key)
        if queued is not None and queued.header.fidelity <= fidelity:
            return True
        claimed = self._claimed.get(key)
        if claimed is None or claimed.taint > incoming.taint:
            return False
        # A hook that did not get the answer in time will never send what it promised.
        return claimed.begun or claimed.offered_s > time.monotonic() - CLAIM_S

    # --- state that comes -----------------------------------------------------------------------------

    async def piece(self, incoming: Incoming, segments: Sequence[Segment], region: memoryview) -> None:
        """The region is encoded and can be reused; the caller has counted the job in ``incoming.jobs``.

        Raises HandoffError for what the offer does not allow.
        """
        self._jobs += 1
        reserved = 0
        try:
            placed = ((incoming.builder_of(segment), segment) for segment in segments)
            wanted = [(builder, segment) for builder, segment in placed if builder is not None]
            if wanted and await self._has_room(incoming, {builder.kind.tier for builder, _ in wanted}, len(region)):
                reserved = len(region)
            for builder, frame in await self._encode(incoming, wanted, region):
                builder.add(frame)
                if not builder.missing:
                    self._complete(incoming, builder)
        finally:
            self._pending.release(reserved)
            incoming.jobs -= 1
            self._jobs -= 1
            self._finish_if_over(incoming)

    async def _has_room(self, incoming: Incoming, tiers: Collection[str], size_bytes: int) -> bool:
        """Room for a region's records is reserved, waiting for it in the order in which regions came; else failed."""
        async with self._gate:
            until_s = time.monotonic() + PATIENCE_S
            while not incoming.failed and not self._pending.reserve(size_bytes):
                if self._pending.give_up_oldest(lambda each: self._is_stuck(each, incoming), self._target_is_down):
                    continue
                down = all(self._is_down(tier, incoming) for tier in tiers)
                if not down and await self._pending.shrank(LOOK_EVERY_S):
                    until_s = time.monotonic() + PATIENCE_S
                elif down or time.monotonic() > until_s:
                    self._telemetry.emit(
                        "drop", "warning",
                        f"{incoming.model.name}: not all of {incoming.position} tokens were stored: the vaults take no "
                        "more and the queue is full (inference.queue_bytes)",
                        model=incoming.model.name, tokens=str(incoming.position), reason="queue_full",
                    )  # fmt: skip
                    self._fail(incoming, "queue_full")
        return not incoming.failed

    def _is_stuck(self, record: PendingRecord, incoming: Incoming) -> bool:
        """Whether it waits for vaults that are down, and is not what the newest state stands on."""
        if not all(map(self._target_is_down, record.targets)):
            return False
        return record.answered or record.chain is not incoming.chain

    def _target_is_down(self, target: str) -> bool:
        return self._senders[target].is_down

    async def _encode(
        self, incoming: Incoming, wanted: Sequence[tuple[RecordBuilder, Segment]], region: memoryview
    ) -> list[tuple[RecordBuilder, Encoded]]:
        if incoming.failed or not wanted:
            return []
        loop, root = asyncio.get_running_loop(), incoming.chain.root
        codec_of = partial(self._quality.codec, root)
        measured = [layer for layer in self._quality.suspects(root) if not enough(incoming.losses, layer)]
        job = loop.run_in_executor(self._pool, encode_region, wanted, incoming.layout, region, codec_of, measured)
        try:
            frames, losses = await asyncio.shield(job)
            add_losses(incoming.losses, losses)
            return frames
        except ValueError as error:
            self._fail(incoming, "not_encodable")
            _log.warning("a segment of %s cannot be encoded: %s", incoming.model.name, error)
            return []

    def _complete(self, incoming: Incoming, builder: RecordBuilder) -> None:
        """The record is in the queue, and its vaults' senders know."""
        if incoming.builders.pop((builder.kind, builder.start), None) is None or incoming.failed:
            return
        header = incoming.header_of(builder)
        frames = [part for _, buffers in builder.frames for part in buffers]
        tier = builder.kind.tier
        targets = [f"{tier}:{port.peer}" for port in self._routers[tier].targets(incoming.chain)]
        record = PendingRecord(header, frames, incoming.chain, time.monotonic(), set(targets))
        self._claimed.pop(builder.key, None)
        self._pending.add(record)
        incoming.records += 1
        incoming.stored_bytes += record.size_bytes
        incoming.raw_bytes += header.raw_bytes
        for target in targets:
            self._senders[target].add(record)

    def _fail(self, incoming: Incoming, reason: str) -> None:
        if not incoming.failed:
            incoming.failed = reason
            self._telemetry.count(f"transfers_failed_{reason}")

    def end(self, incoming: Incoming, reason: str = "") -> None:
        """Nothing more comes of this transfer; with ``reason``, what is incomplete is given up for it."""
        incoming.ended = True
        if reason:
            self._fail(incoming, reason)
        self._finish_if_over(incoming)

    def _finish_if_over(self, incoming: Incoming) -> None:
        if not incoming.ended or incoming.jobs:
            return
        for builder in incoming.builders.values():
            if self._claimed.get(builder.key) is incoming:
                del self._claimed[builder.key]
        if incoming.builders:
            self._fail(incoming, "incomplete")
            self._remember_unstored(incoming, incoming.failed)
            incoming.builders.clear()
        self._quality.measured(incoming.model, incoming.losses)
        incoming.losses.clear()
        if incoming.records:
            self._telemetry.emit(
                "demote", "info",
                f"{incoming.model.name}: {incoming.position} tokens taken over, "
                f"{incoming.records} new {'record' if incoming.records == 1 else 'records'}",
                model=incoming.model.name, tokens=str(incoming.position), records=str(incoming.records),
                bytes=str(incoming.stored_bytes), raw_bytes=str(incoming.raw_bytes),
            )  # fmt: skip
            incoming.records = 0

    def _remember_unstored(self, incoming: Incoming, reason: str) -> None:
        for each in incoming.builders.values():
            self._unstored.add(f"{each.kind.tier}:", incoming.chain, each.kind, each.start, each.end, reason)

    async def flush(self, timeout_s: float) -> bool:
        """Whether everything that engines handed over has reached its vaults in time."""
        deadline = time.monotonic() + timeout_s
        while self._jobs or len(self._pending):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.005)
        return True


class DropLog:
    """Counts records that left the queue unsent and shows them, at most one event a second."""

    def __init__(self, telemetry: NodeTelemetry, unstored: Unstored) -> None:
        self._telemetry = telemetry
        self._unstored = unstored
        self._shown_s = float("-inf")
        self._unshown = 0

    def __call__(self, record: PendingRecord, reason: str) -> None:
        self._telemetry.count(f"records_dropped_{reason}")
        self._telemetry.tier(record.header.kind.tier).refused(reason)
        self._unstored.add_record(f"{record.header.kind.tier}:", record, reason)
        self._unshown += 1
        now_s = time.monotonic()
        if now_s - self._shown_s >= DROPS_SHOWN_EVERY_S:
            text = f"{self._unshown} records were not stored ({reason})"
            self._telemetry.emit("drop", "warning", text, reason=reason, records=str(self._unshown))
            self._shown_s, self._unshown = now_s, 0
