"""Moves what the agent asked for into shared memory, off the engine's generation thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import HandoffError
from tierkv.handoff.channel import Channel
from tierkv.handoff.client import HandoffClient, Offer
from tierkv.handoff.protocol import BLOCK_TOKENS, Segment, segment_view
from tierkv.state.layout import Layout

# One message and one encoding job for about this much: small enough to overlap, large enough to cost nothing.
REGION_BYTES = 8 << 20
MAX_SEGMENTS = 4096
REPORT_INTERVAL_S = 1.0
# An agent that frees nothing for this long while it holds regions is taken for dead.
STALLED_S = 30.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """The state behind one offer, as evaluated arrays that nobody writes to any more.

    ``rows[layer, array]``: rows [offer.rows_from, offer.position) on the token axis, any strides. ``checkpoint``:
    whole arrays of the window and state layers that the offer wants. bfloat16 as uint16 bits. ``scalars``: small
    JSON values of checkpoint layers. ``shared_bytes``: what the buffers take that the arrays are parts of, where they
    are the engine's own.
    """

    offer: Offer
    layout: Layout
    rows: Mapping[tuple[int, int], NDArray[Any]] = field(default_factory=dict[tuple[int, int], NDArray[Any]])
    checkpoint: Mapping[tuple[int, int], NDArray[Any]] = field(default_factory=dict[tuple[int, int], NDArray[Any]])
    scalars: Mapping[int, Mapping[str, object]] = field(default_factory=dict[int, Mapping[str, object]])
    shared_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for part in (self.rows, self.checkpoint) for array in part.values())

    @property
    def held_bytes(self) -> int:
        """Memory that stays in use because of this transfer."""
        return max(self.size_bytes, self.shared_bytes)


@dataclass(slots=True)
class MoverStats:
    moved: int = 0
    moved_bytes: int = 0
    dropped: int = 0


class Mover:
    """A daemon thread with a queue bounded by bytes. ``submit``, ``cancel`` and ``drain`` from any thread.

    One transfer is always taken, however large: what is in the engine's cache anyway takes no more memory. As many
    others wait as hold ``pending_bytes_cap`` together.

    ``report``, if given, is called about once a second on the mover's thread; what it returns goes to
    ``HandoffClient.report_hot``.
    """

    def __init__(
        self,
        client: HandoffClient,
        *,
        pending_bytes_cap: int = 1 << 30,
        report: Callable[[], Mapping[str, object]] | None = None,
    ) -> None:
        self.stats = MoverStats()
        self._client = client
        self._cap = pending_bytes_cap
        self._report = report
        self._queue: deque[Transfer] = deque()
        self._pending_bytes = 0
        self._current: int | None = None
        self._cancelled: set[int] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tierkv-mover", daemon=True)
        self._thread.start()

    @property
    def pending_bytes(self) -> int:
        """Bytes of live arrays that the queue holds on to."""
        return self._pending_bytes

    def is_behind(self, more_bytes: int) -> bool:
        """Whether it would be long before ``more_bytes`` are let go of."""
        return self._pending_bytes + more_bytes > self._cap // 4

    def submit(self, transfer: Transfer) -> bool:
        """The transfer is queued; False (and the agent is told) when the queue is full."""
        with self._changed:
            pending = self._pending_bytes
            if not self._closed and (not pending or pending + transfer.held_bytes <= self._cap):
                self._queue.append(transfer)
                self._pending_bytes += transfer.held_bytes
                self._changed.notify_all()
                return True
            self.stats.dropped += 1
        self._client.dropped(transfer.offer.transfer_id, "mover_full")
        return False

    def cancel(self, transfer_id: int) -> bool:
        """What is left of the transfer is not moved; False if it was over already."""
        with self._changed:
            pending = transfer_id == self._current or any(t.offer.transfer_id == transfer_id for t in self._queue)
            if pending:
                self._cancelled.add(transfer_id)
            return pending

    def drain(self, timeout_s: float, *, stored: bool = False) -> bool:
        """Waits until everything submitted has left the engine, and with ``stored`` until it is in the vaults."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            idle = self._changed.wait_for(lambda: not self._queue and self._current is None, timeout_s)
        return idle and (not stored or self._flushed(deadline))

    def close(self) -> None:
        """The thread ends after the piece it is at; what is queued is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=2.0)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        next_report = time.monotonic()
        while not self._closed:
            transfer = self._next(max(0.0, next_report - time.monotonic()))
            if transfer is not None:
                self._handle(transfer)
                self._client.flush_outbox()
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + REPORT_INTERVAL_S
                self._send_report()

    def _next(self, wait_s: float) -> Transfer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._queue), wait_s)
            if self._closed or not self._queue:
                return None
            transfer = self._queue.popleft()
            self._current = transfer.offer.transfer_id
            return transfer

    def _handle(self, transfer: Transfer) -> None:
        try:
            moved = self._move(transfer)
        except Exception:  # the engine's process: whatever is wrong with one transfer ends with that transfer
            moved = False
        with self._changed:
            self._pending_bytes -= transfer.held_bytes
            self._current = None
            self._cancelled.discard(transfer.offer.transfer_id)
            self.stats.moved += moved
            self.stats.dropped += not moved
            self.stats.moved_bytes += transfer.size_bytes if moved else 0
            self._changed.notify_all()

    def _send_report(self) -> None:
        with contextlib.suppress(Exception):  # a report is never worth more than the engine
            self._client.report_hot(self._report() if self._report is not None else {})

    def _move(self, transfer: Transfer) -> bool:
        link = self._client.links.demote
        reason = ""
        with link.lock:
            channel = link.channel
            if channel is None:
                return False
            try:
                reason = self._send(channel, transfer)
            except HandoffError as error:
                self._client.links.drop(link, channel, error)
                return False
        if reason:
            self._client.dropped(transfer.offer.transfer_id, reason)
        return not reason

    def _send(self, channel: Channel, transfer: Transfer) -> str:
        """Everything is in the arena and announced; or the reason why the rest is not."""
        number = transfer.offer.transfer_id
        scalars = {str(layer): dict(values) for layer, values in transfer.scalars.items()}
        channel.send("begin", {"transfer": number, "scalars": scalars}, deadline=time.monotonic() + STALLED_S)
        limit = min(REGION_BYTES, channel.regions.size_bytes // 4)
        for batch in _batches(_segments(transfer), limit):
            if number in self._cancelled or self._closed:
                return "cancelled"
            total = sum(_aligned(source.nbytes) for _, source in batch)
            if total > channel.regions.size_bytes:
                return "array_over_arena"
            offset = self._allocate(channel, total)
            region = channel.region(offset, total)
            segments = _copy(batch, transfer.layout, region)
            body = {"transfer": number, "offset": offset, "bytes": total, "segments": segments}
            channel.send("piece", body, deadline=time.monotonic() + STALLED_S)
        channel.send("end", {"transfer": number}, deadline=time.monotonic() + STALLED_S)
        return ""

    def _allocate(self, channel: Channel, total: int) -> int:
        """A region, waiting for the agent to free some. Raises HandoffError if it frees none for a long time."""
        self._client.take_answers(channel)
        while (offset := channel.regions.allocate(total)) is None:
            if self._client.next_answer(channel, time.monotonic() + STALLED_S) is None:
                raise HandoffError(str(self._client.socket_path), "the agent frees no regions")
        return offset

    def _flushed(self, deadline: float) -> bool:
        link = self._client.links.demote
        with link.lock:
            channel = link.channel
            if channel is None:
                return False
            try:
                left = max(0.0, deadline - time.monotonic())
                channel.send("flush", {"timeout_s": left}, deadline=deadline)
                while (message := self._client.next_answer(channel, deadline)) is not None:
                    if message.op == "flushed":
                        return message.fields.get("complete") is True
            except HandoffError as error:
                self._client.links.drop(link, channel, error)
            return False


Source = tuple[Segment, NDArray[Any]]


def _segments(transfer: Transfer) -> Iterator[Source]:
    """Block by block, so that the agent can encode and send the first while the last is still here."""
    offer, layers = transfer.offer, transfer.layout.layers
    first = offer.rows_from
    if first is not None:
        for begin in range(first, offer.position, BLOCK_TOKENS):
            end = min(begin + BLOCK_TOKENS, offer.position)
            for (layer, number), array in transfer.rows.items():
                axis = layers[layer].arrays[number].token_axis
                assert axis is not None, "rows have a token axis"
                part = array[(*(slice(None),) * axis, slice(begin - first, end - first))]
                yield Segment(layer, number, begin, 0, part.shape), part
    for (layer, number), array in transfer.checkpoint.items():
        yield Segment(layer, number, offer.position, 0, array.shape), array


def _batches(sources: Iterator[Source], limit_bytes: int) -> Iterator[list[Source]]:
    batch: list[Source] = []
    size = 0
    for source in sources:
        if batch and (size + source[1].nbytes > limit_bytes or len(batch) == MAX_SEGMENTS):
            yield batch
            batch, size = [], 0
        batch.append(source)
        size += _aligned(source[1].nbytes)
    if batch:
        yield batch


def _copy(batch: list[Source], layout: Layout, region: memoryview) -> list[Segment]:
    offset = 0
    placed: list[Segment] = []
    for segment, source in batch:
        segment = segment._replace(offset=offset)
        np.copyto(segment_view(segment, layout, region), source, casting="no")
        placed.append(segment)
        offset += _aligned(source.nbytes)
    return placed


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // 64) * 64
