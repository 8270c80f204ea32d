"""Moves what the agent asked for into shared memory, off the engine's generation thread.

What waits may be small parts of large buffers of the engine's, which stay in memory for the little that is wanted of
them. While much waits, a second thread copies such parts and lets go of the buffers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tierkv.errors import HandoffError
from tierkv.handoff.channel import Channel
from tierkv.handoff.client import HandoffClient
from tierkv.handoff.transfer import Transfer, aligned, batches, copy_into, segments

# One message and one encoding job for about this much: small enough to overlap, large enough to cost nothing.
REGION_BYTES = 8 << 20
REPORT_INTERVAL_S = 1.0
# Entries come in bursts: their hand-over takes 0.7 to 1.0 of a memcpy when nothing is copied beside it, 1.8 otherwise.
QUIET_S = 0.02
# An agent that frees nothing for this long while it holds regions is taken for dead.
STALLED_S = 30.0


@dataclass(slots=True)
class _Waiting:
    """A transfer in the queue. ``wanted_bytes`` is what it would hold if it were compacted."""

    transfer: Transfer
    wanted_bytes: int
    held_bytes: int
    can_shrink: bool

    @classmethod
    def of(cls, transfer: Transfer) -> _Waiting:
        wanted, held = transfer.size_bytes, transfer.held_bytes
        return cls(transfer, wanted, held, held > 2 * wanted)

    @property
    def lasting_bytes(self) -> int:
        return self.wanted_bytes if self.can_shrink else self.held_bytes


@dataclass(slots=True)
class MoverStats:
    moved: int = 0
    moved_bytes: int = 0
    dropped: int = 0


class Mover:
    """A daemon thread with a queue bounded by bytes. ``submit``, ``cancel`` and ``drain`` from any thread.

    One transfer is always taken, however large: what is in the engine's cache anyway takes no more memory. As many
    others wait as hold ``pending_bytes_cap`` together, small parts of large buffers counted as what they take when
    they are compacted; that begins at a quarter of the cap.

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
        self._queue: deque[_Waiting] = deque()
        self._current: _Waiting | None = None
        self._cancelled: set[int] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name="tierkv-mover", daemon=True),
            threading.Thread(target=self._compact, name="tierkv-compact", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pending_bytes(self) -> int:
        """Bytes of live arrays that the queue holds on to."""
        with self._changed:
            return self._held_bytes()

    def submit(self, transfer: Transfer) -> bool:
        """The transfer is queued; False (and the agent is told) when the queue is full."""
        new = _Waiting.of(transfer)
        with self._changed:
            lasting = sum(each.lasting_bytes for each in self._pending())
            if not self._closed and (not lasting or lasting + new.lasting_bytes <= self._cap):
                self._queue.append(new)
                self._changed.notify_all()
                return True
            self.stats.dropped += 1
        self._client.dropped(transfer.offer.transfer_id, "mover_full")
        return False

    def cancel(self, transfer_id: int) -> bool:
        """What is left of the transfer is not moved; False if it was over already."""
        with self._changed:
            pending = any(each.transfer.offer.transfer_id == transfer_id for each in self._pending())
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
        """The threads end after the piece they are at; what is queued is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=2.0)

    def _held_bytes(self) -> int:
        return sum(each.held_bytes for each in self._pending())

    def _pending(self) -> Iterator[_Waiting]:
        if self._current is not None:
            yield self._current
        yield from self._queue

    # --- what waits is compacted ------------------------------------------------------------------

    def _compact(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wasteful() is not None)
                while self._held_bytes() <= self._cap // 2 and self._changed.wait(QUIET_S):
                    pass
                chosen = self._wasteful()
                if self._closed:
                    return
            if chosen is not None:
                self._shrink(chosen)
            # Nothing is to be kept by the name of what was shrunk last.
            del chosen

    def _wasteful(self) -> _Waiting | None:
        """The newest transfer that holds much more than is wanted, if much is held; the mover takes the oldest."""
        if self._held_bytes() <= self._cap // 4:
            return None
        return next((each for each in reversed(self._queue) if each.can_shrink), None)

    def _shrink(self, waiting: _Waiting) -> None:
        small: Transfer | None = None
        with contextlib.suppress(Exception):  # no memory: then it waits as it is
            small = waiting.transfer.compacted()
        with self._changed:
            waiting.can_shrink = False
            if small is not None and waiting is not self._current:
                waiting.transfer, waiting.held_bytes = small, small.held_bytes

    # --- the mover --------------------------------------------------------------------------------

    def _run(self) -> None:
        next_report = time.monotonic()
        while not self._closed:
            if self._next(max(0.0, next_report - time.monotonic())):
                self._handle()
                self._client.flush_outbox()
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + REPORT_INTERVAL_S
                self._send_report()

    def _next(self, wait_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._queue), wait_s)
            if self._closed or not self._queue:
                return False
            self._current = self._queue.popleft()
            return True

    def _handle(self) -> None:
        assert self._current is not None, "called with a transfer"
        transfer, size_bytes = self._current.transfer, self._current.wanted_bytes
        try:
            moved = self._move(transfer)
        except Exception:  # the engine's process: whatever is wrong with one transfer ends with that transfer
            moved = False
        with self._changed:
            self._current = None
            self._cancelled.discard(transfer.offer.transfer_id)
            self.stats.moved += moved
            self.stats.dropped += not moved
            self.stats.moved_bytes += size_bytes if moved else 0
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
        for batch in batches(segments(transfer), limit):
            if number in self._cancelled or self._closed:
                return "cancelled"
            total = sum(aligned(source.nbytes) for _, source in batch)
            if total > channel.regions.size_bytes:
                return "array_over_arena"
            offset = self._allocate(channel, total)
            region = channel.region(offset, total)
            placed = copy_into(region, batch, transfer.layout)
            body = {"transfer": number, "offset": offset, "bytes": total, "segments": placed}
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
