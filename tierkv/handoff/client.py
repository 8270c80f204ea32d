"""The engine's end of the hand-off: what a hook calls. Standard library and numpy only.

    client = HandoffClient(paths.handoff_socket(), "mlx-lm", "mlx-lm 0.32.2 mlx 0.32.4")
    model = client.announce(ModelAnnouncement("smollm2", model_files(folder), config_text))
    got = client.restore(model, tokens, have=0, limit=len(tokens) - 1, expected=layout_of_fresh_cache.signature())
    offer = client.offer(model, tokens, position, layout)
    if offer is not None and offer.wanted:
        mover.submit(Transfer(offer, layout, rows, checkpoint, scalars))

No call raises anything but HandoffError, and the request path does not even see that: an agent that is absent, slow
or broken gives None or NotRestored within the call's budget. A background thread connects and connects again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import HandoffError
from tierkv.handoff.channel import Channel
from tierkv.handoff.links import Health, Links
from tierkv.handoff.protocol import (
    BLOCK_TOKENS,
    FileSeen,
    Media,
    Message,
    ModelAnnouncement,
    Signature,
    media_to_json,
    model_files,
)
from tierkv.handoff.restored import Assembly, NotRestored, Restored
from tierkv.state.layout import Layout

__all__ = [
    "FileSeen",
    "HandoffClient",
    "Media",
    "ModelAnnouncement",
    "ModelHandle",
    "NotRestored",
    "Offer",
    "Restored",
    "model_files",
]

TELL_BUDGET_S = 1.0
# On the connecting thread, which nobody waits for.
GREET_BUDGET_S = 5.0
# Long prompts do not fit a socket's buffer: an agent that takes less than this is taken for hung.
SLOWEST_TAKE_BYTES_PER_S = 10e6
# A healthy agent speaks within its own deadlines (connect 1 s, probe 0.5 s, frame 1 s); a frozen one does not.
SILENT_S = 3.0
# No engine takes longer for a token.
MAX_TERM_S = 3600.0
DEFAULT_SETTINGS: Mapping[str, Any] = {
    "memory_threshold": 0.60,
    "demote": "ahead",
    "min_store_tokens": 64,
    "min_restore_tokens": 64,
    "restore_budget_s": 30.0,
    "offer_budget_s": 0.05,
    "quality_sample": 0,
}


@dataclass(slots=True, eq=False)
class ModelHandle:
    """A model that was announced. ``state``: "unknown", "hashing", "ready", or why it is refused.

    ``prefill_terms``: seconds a token and seconds a pair of tokens that computing costs, as the agent has it from this
    engine and earlier ones; 0 and 0 while nobody knows.
    """

    id: int
    announcement: ModelAnnouncement
    state: str = "unknown"
    fidelity: int = 0
    prefill_terms: tuple[float, float] = (0.0, 0.0)

    def computing_s(self, start: int, end: int) -> float:
        """How long positions [start, end) are expected to take; 0 while nobody knows."""
        a, b = self.prefill_terms
        return a * (end - start) + b * (end * end - start * start) / 2


@dataclass(frozen=True, slots=True)
class Offer:
    """What the agent wants of an entry that stands at ``position``.

    ``rows_from``: rows [rows_from, position) of the "rows" layers (a multiple of 256), None for no rows.
    ``window``, ``state``: the checkpoint of the layers of that kind. ``reason`` says why nothing is wanted.
    """

    transfer_id: int
    model: ModelHandle
    position: int
    rows_from: int | None
    window: bool
    state: bool
    reason: str = ""

    @property
    def wanted(self) -> bool:
        return self.rows_from is not None or self.window or self.state


class HandoffClient:
    """Threads: the control calls (announce, offer, restore) from one thread at a time, usually the generation
    thread; the mover's from its own."""

    def __init__(self, socket_path: Path, engine: str, build: str, *, connect_budget_s: float = 0.2) -> None:
        self.socket_path = Path(socket_path)
        self.engine = engine
        self.build = build
        self.connect_budget_s = connect_budget_s
        self.settings: dict[str, Any] = dict(DEFAULT_SETTINGS)
        self.node = ""
        self.links = Links(self.socket_path, engine, build, self._greet)
        self._models: list[ModelHandle] = []
        self._models_lock = threading.Lock()
        self._next_id = 0
        self._last_restore = 0
        self._not_restored = ""
        self.restores_asked = 0  # whether or not there was an agent to ask
        self._outbox: deque[tuple[str, Mapping[str, object], bytes]] = deque(maxlen=256)

    @property
    def available(self) -> bool:
        """Whether both connections are up as far as is known. Starts connecting if nobody has yet."""
        self.links.start()
        return self.links.up

    def wait_available(self, timeout_s: float) -> bool:
        """Starts connecting; True as soon as an agent answers."""
        return self.links.wait(timeout_s)

    @property
    def health(self) -> Health:
        """Since when both connections are up or not, and what is wrong."""
        return self.links.health

    @property
    def last_error(self) -> str:
        """Why there is no agent, as far as is known."""
        return self.links.last_error

    def close(self) -> None:
        """Both connections are closed and no thread connects again."""
        self.links.close()

    def _greet(self, kind: str, channel: Channel) -> None:
        """On the connecting thread: the agent's settings count, and it learns of every model again."""
        self.settings = {**self.settings, **channel.hello.table("settings")}
        self.node = str(channel.hello.fields.get("node", ""))
        if kind == "control":
            with self._models_lock:
                for model in self._models:
                    self._send_announcement(channel, model, GREET_BUDGET_S)
                self.links.control.channel = channel

    # --- the generation thread ------------------------------------------------------------------

    def announce(self, announcement: ModelAnnouncement) -> ModelHandle:
        """The agent knows the model, now or as soon as there is one, and hashes its weights in the background."""
        with self._models_lock:
            model = ModelHandle(len(self._models), announcement)
            self._models.append(model)
            channel = self.links.control.channel
        if channel is None:
            self.wait_available(self.connect_budget_s)
            return model
        with self.links.control.lock:
            try:
                self._send_announcement(channel, model, self.connect_budget_s)
            except HandoffError as error:
                self.links.drop(self.links.control, channel, error)
        return model

    def _send_announcement(self, channel: Channel, model: ModelHandle, budget_s: float) -> None:
        body = {"model": model.id, "announcement": model.announcement.to_json(), "fidelity": model.fidelity}
        channel.send("announce", body, deadline=time.monotonic() + budget_s)

    def restore(
        self,
        model: ModelHandle,
        tokens: Sequence[int] | NDArray[np.int64],
        *,
        have: int = 0,
        limit: int,
        expected: Signature | None = None,
        budget_s: float | None = None,
        rows_from: int | None = None,
        media: Sequence[Media] = (),
        above: int = 0,
        more: bool = False,
    ) -> Restored | NotRestored:
        """State of the longest prefix of ``tokens`` that the vaults have, at a position in (have, limit].

        ``have``: what the engine has already; a restore must give at least ``min_restore_tokens`` more. ``rows_from``
        (``have`` if not given): rows before it are not asked for. ``expected``: the signature of a fresh cache's
        layout, or None if it is not known. ``above``: positions up to it are of no use, whatever ``have`` is.
        ``more``: without a state here, the same prompt is asked for in another form next. Blocks until the state is
        there, the agent is silent for ``SILENT_S``, or ``budget_s`` is over.
        """
        budget = float(self.settings["restore_budget_s"] if budget_s is None else budget_s)
        first = have if rows_from is None else rows_from
        body = {**_wish(model, have, first, limit, expected, media, budget), "above": above, "more": more}
        self._last_restore, self._not_restored = 0, ""
        self.restores_asked += 1
        result = self._ask("restore", body, _as_blob(tokens), budget, self._receive_state)
        if not isinstance(result, Restored):
            result = result if isinstance(result, NotRestored) else NotRestored("no_agent")
            self._not_restored = result.reason
            return result
        model.fidelity = max(model.fidelity, result.fidelity)
        return result

    def possible(
        self,
        model: ModelHandle,
        tokens: Sequence[int] | NDArray[np.int64],
        *,
        have: int = 0,
        limit: int,
        expected: Signature | None = None,
        budget_s: float,
        media: Sequence[Media] = (),
    ) -> int:
        """The position that ``restore`` with these arguments would reach as far as is known now; 0 for none.

        Nothing is fetched. Several ranks ask so before they agree on one position.
        """
        body = _wish(model, have, have, limit, expected, media, budget_s)
        answer = self._ask("probe", body, _as_blob(tokens), budget_s, self._receive_possible)
        position = answer if isinstance(answer, int) else 0
        return position if have < position <= limit else 0

    def _receive_possible(self, channel: Channel, request: int, deadline: float) -> int | None:
        while (message := channel.receive(deadline)) is not None:
            if message.op == "possible" and message.fields.get("id") == request:
                return message.integer("position")
        return None

    def _receive_state(self, channel: Channel, request: int, deadline: float) -> Restored | NotRestored:
        assembly: Assembly | None = None
        while True:
            message = channel.receive(min(deadline, time.monotonic() + SILENT_S))
            if message is None:
                self.links.drop(self.links.control, channel)
                return NotRestored("timed_out" if time.monotonic() >= deadline else "agent_silent")
            if message.op == "piece" and assembly is not None:
                offset, length = message.integer("offset"), message.integer("bytes")
                assembly.add(message, channel.region(offset, length))
                channel.send("free", {"offset": offset}, deadline=deadline)
            elif message.fields.get("id") != request or message.op == "working":
                continue
            elif message.op == "plan":
                assembly = Assembly(message)
            elif message.op in ("none", "failed"):
                return NotRestored(message.text("reason"))
            elif message.op == "done" and assembly is not None:
                return assembly.finish(message)
            else:
                raise HandoffError(str(self.socket_path), f"unexpected answer {message.op!r}")

    def offer(
        self,
        model: ModelHandle,
        tokens: Sequence[int] | NDArray[np.int64],
        position: int,
        layout: Layout,
        *,
        budget_s: float | None = None,
        media: Sequence[Media] = (),
        leaving: str = "",
    ) -> Offer | None:
        """What the agent wants of the entry whose state stands at ``position`` after ``tokens[:position]``.

        ``leaving``: why the engine is about to evict the entry, "" if it is not.
        None when no agent answers in time. Every wanted offer must end in a ``Mover.submit`` or in ``dropped``.
        """
        budget = float(self.settings["offer_budget_s"] if budget_s is None else budget_s)
        ids = _as_blob(tokens[:position])
        body = {
            "model": model.id, "position": position, "media": media_to_json(media), "tokens_bytes": len(ids),
            "leaving": leaving,
        }  # fmt: skip

        def receive(channel: Channel, request: int, deadline: float) -> Offer | None:
            return self._receive_offer(channel, request, deadline, model, position)

        answer = self._ask("offer", body, ids + layout.to_json(), budget, receive)
        return answer if isinstance(answer, Offer) else None

    def _receive_offer(
        self, channel: Channel, request: int, deadline: float, model: ModelHandle, position: int
    ) -> Offer | None:
        while True:
            message = channel.receive(deadline)
            if message is None:
                return None
            if message.op == "offer" and message.fields.get("id") == request:
                return _offer_of(message, model, position)
            if message.op == "offer" and message.integer("transfer"):
                self.dropped(message.integer("transfer"), "answered_late")

    def _ask(
        self,
        op: str,
        body: Mapping[str, object],
        blob: bytes,
        budget_s: float,
        receive: Callable[[Channel, int, float], object],
    ) -> object:
        """One message, and what ``receive(channel, id, deadline)`` makes of the answer; None without an agent."""
        deadline = time.monotonic() + budget_s + len(blob) / SLOWEST_TAKE_BYTES_PER_S
        self.links.start()
        if not self.links.control.lock.acquire(timeout=budget_s):
            return None
        try:
            channel = self.links.control.channel
            if channel is None or channel.hung_up:
                self.links.poke()
                return None
            try:
                self._next_id += 1
                channel.send(op, {"id": self._next_id, **body}, blob, deadline=deadline)
                if op == "restore":
                    self._last_restore = self._next_id
                return receive(channel, self._next_id, deadline)
            except (HandoffError, ValueError, OSError) as error:
                self.links.drop(self.links.control, channel, HandoffError(str(self.socket_path), str(error)))
                return None
        finally:
            self.links.control.lock.release()

    # --- what nobody waits for: sent by the mover's thread ------------------------------------------

    def hit(
        self,
        model: ModelHandle,
        tokens: Sequence[int] | NDArray[np.int64],
        position: int,
        media: Sequence[Media] = (),
    ) -> None:
        """The copies in the vaults of what the engine just reused will be marked as used."""
        body = {"model": model.id, "position": position, "media": media_to_json(media)}
        self._outbox.append(("hit", body, _as_blob(tokens[:position])))

    def served(
        self, model: ModelHandle | None, tokens: int, *, have: int, position: int, reason: str = "", asked: bool
    ) -> None:
        """A request of ``tokens`` tokens goes on at ``position``; ``have`` of it were in the engine's own cache.

        ``asked``: the last ``restore`` was for this request. ``reason``: why no vault was asked, or why what it gave
        was not used. Told to whoever asks the agent to explain the request.
        """
        body = {
            "restore": self._last_restore if asked else 0, "model": model.id if model is not None else None,
            "tokens": tokens, "have": have, "position": position,
            "reason": reason or (self._not_restored if asked else ""),
        }  # fmt: skip
        self._outbox.append(("served", body, b""))

    def sampled(
        self,
        model: ModelHandle,
        *,
        codec: str,
        tokens: int,
        layers: Sequence[Sequence[object]],
        positions: int,
        kl_mean: float,
        top1_fraction: float,
    ) -> None:
        """A restored prompt was prefilled again: ``layers`` are [layer, array, decibels or None for equal].

        ``kl_mean`` and ``top1_fraction`` are over ``positions`` tokens that follow, 0 where none were compared.
        """
        body = {
            "model": model.id, "codec": codec, "tokens": tokens, "layers": list(layers), "positions": positions,
            "kl_mean": kl_mean, "top1_fraction": top1_fraction,
        }  # fmt: skip
        self._outbox.append(("sampled", body, b""))

    def dropped(self, transfer_id: int, reason: str) -> None:
        """A wanted offer will not be followed by its state; counted by ``reason``."""
        self._outbox.append(("dropped", {"transfer": transfer_id, "reason": reason}, b""))

    def report_hot(self, stats: Mapping[str, object]) -> None:
        """The agent's telemetry shows the engine's own cache; the mover calls it about once a second.

        ``stats``: integers entries, tokens, size_bytes, cap_bytes, hits, misses, evictions, used_bytes, total_bytes,
        evicted_bytes, device_bytes; text note; evicted_for, a table of reasons and totals. The answer
        refreshes ``settings`` and the states of the models.
        """
        self._outbox.append(("report", {"stats": dict(stats)}, b""))
        self.flush_outbox()

    def flush_outbox(self) -> None:
        """What waits is sent, unless a transfer is under way; without an agent it is forgotten."""
        self.links.start()
        if not self.links.demote.lock.acquire(blocking=False):
            return
        try:
            channel = self.links.demote.channel
            if channel is None:
                self._outbox.clear()
                return
            try:
                while self._outbox:
                    op, body, blob = self._outbox.popleft()
                    channel.send(op, body, blob, deadline=time.monotonic() + TELL_BUDGET_S)
                self.take_answers(channel)
            except HandoffError as error:
                self.links.drop(self.links.demote, channel, error)
        finally:
            self.links.demote.lock.release()

    def take_answers(self, channel: Channel) -> None:
        """Handles what has come on the demote connection. Raises HandoffError."""
        while self.next_answer(channel, time.monotonic()) is not None:
            pass

    def next_answer(self, channel: Channel, deadline: float) -> Message | None:
        """The next message of the demote connection, handled; None when the deadline comes first.

        Regions that the agent has read are free again, settings and model states are refreshed. Raises HandoffError.
        """
        message = channel.receive(deadline)
        if message is None:
            return None
        if message.op == "free":
            for offset in message.numbers("offsets"):
                channel.regions.release(offset)
        elif message.op == "settings":
            self.settings = {**self.settings, **message.table("settings")}
            states, costs = message.table("models"), message.fields.get("prefill")
            for model in list(self._models):
                state = states.get(str(model.id))
                model.state = state if isinstance(state, str) else model.state
                model.prefill_terms = _terms(costs, model.id) or model.prefill_terms
        return message


def _wish(
    model: ModelHandle,
    have: int,
    rows_from: int,
    limit: int,
    expected: Signature | None,
    media: Sequence[Media],
    budget_s: float,
) -> dict[str, object]:
    return {
        "model": model.id, "have": have, "rows_from": rows_from, "limit": limit,
        "expected": expected, "media": media_to_json(media), "budget_s": budget_s,
    }  # fmt: skip


def _terms(costs: object, number: int) -> tuple[float, float] | None:
    """The two terms of this model's cost, if they can be true."""
    value = cast("dict[str, object]", costs).get(str(number)) if isinstance(costs, dict) else None
    if not isinstance(value, list) or len(cast("list[object]", value)) != 2:
        return None
    a, b = cast("list[object]", value)
    if not isinstance(a, int | float) or not isinstance(b, int | float):
        return None
    return (float(a), float(b)) if 0 <= a < MAX_TERM_S and 0 <= b < MAX_TERM_S else None


def _as_blob(tokens: Sequence[int] | NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i8").tobytes()


def _offer_of(message: Message, model: ModelHandle, position: int) -> Offer:
    """Raises HandoffError for what no agent answers to an offer at ``position``."""
    rows = None if message.fields.get("rows_from") is None else message.integer("rows_from", high=position)
    if rows is not None and rows % BLOCK_TOKENS:
        raise HandoffError("handoff", "rows that do not begin with a block")
    return Offer(
        message.integer("transfer"), model, position, rows, message.fields.get("window") is True,
        message.fields.get("state") is True, message.text("reason"),
    )  # fmt: skip
