"""The generation thread's connection: one question at a time, regions freed meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from tierkv.agents.engine_parts import Engine, EngineParts, expected_of, media_of
from tierkv.agents.model_registry import Model
from tierkv.agents.restore_run import HookGone, RestoreRequest
from tierkv.agents.trace import RequestTrace, scratch_trace
from tierkv.agents.transfer import Incoming
from tierkv.errors import HandoffError
from tierkv.handoff.protocol import MAX_TOKENS, SHORTEST_WORTH_S, Message, ModelAnnouncement, int_of, tokens_of
from tierkv.handoff.server import Connection
from tierkv.identity.blocks import PromptChain, Tokens

_log = logging.getLogger(__name__)

MAX_MODELS = 64
# Offers whose state has not begun to come; an older one is taken for forgotten.
MAX_OPEN_TRANSFERS = 256
# A hook gives up on an agent that says nothing for 3 s.
HEARTBEAT_S = 1.0
MAX_WHY_CHARS = 100
# Taken for how fast an engine computes where none on this machine has computed with the model yet: what has come of a
# restore by then is used, the rest is computed, and then it is known.
FASTEST_TOKENS_PER_S = 10_000.0


class ControlChannel:
    """``run`` returns when the connection has ended."""

    def __init__(self, parts: EngineParts, engine: Engine, connection: Connection) -> None:
        self._parts = parts
        self._engine = engine
        self._connection = connection
        self._restoring: asyncio.Task[None] | None = None
        self._earlier: RequestTrace | None = None

    async def run(self) -> None:
        try:
            while (message := await self._connection.receive()) is not None:
                await self._handle(message)
        finally:
            if self._restoring is not None:
                self._restoring.cancel()
                await asyncio.gather(self._restoring, return_exceptions=True)

    async def _handle(self, message: Message) -> None:
        if message.op == "free":
            self._connection.release(message.integer("offset"))
        elif message.op == "offer":
            await self._offer(message)
        elif message.op == "restore":
            await self._last_has_ended()
            request, model = self._request(message)
            trace = self._trace(message, request, model)
            self._restoring = asyncio.create_task(self._restore(message.integer("id"), request, model, trace))
        elif message.op == "probe":
            await self._probe(message)
        elif message.op == "announce":
            self._announce(message)
        else:
            raise HandoffError("hook", "an unknown op")

    async def _last_has_ended(self) -> None:
        """The last restore's answer may be on its way to a quick hook; one that does not wait for it is hung up on."""
        if self._restoring is not None and not self._restoring.done():
            await asyncio.wait([self._restoring], timeout=0.2)
            if not self._restoring.done():
                raise HandoffError("hook", "a second restore before the first was answered")

    def _announce(self, message: Message) -> None:
        number = message.integer("model", high=1 << 31)
        if number not in self._engine.models and len(self._engine.models) >= MAX_MODELS:
            raise HandoffError("hook", "too many models")
        announcement = ModelAnnouncement.from_json(message.fields.get("announcement"))
        self._engine.models[number] = self._parts.registry.announce(announcement, self._engine.kind, self._engine.build)
        self._engine.floors[number] = message.integer("fidelity", high=255)
        self._parts.show(self._engine)

    async def _offer(self, message: Message) -> None:
        model = self._engine.model(message)
        split = message.integer("tokens_bytes", high=len(message.blob))
        tokens = tokens_of(memoryview(message.blob)[:split])
        if message.integer("position") != len(tokens):
            raise HandoffError("hook", "an offer stands at the end of its tokens")
        reply = {"id": message.integer("id"), "transfer": 0, "rows_from": None, "window": False, "state": False}
        if model.root is None or model.unusable_reason:
            self._parts.telemetry.count(f"offers_declined_{model.unusable_reason}")
            await self._connection.send("offer", {**reply, "reason": model.unusable_reason})
            return
        chain = PromptChain.of(model.root, tokens, media_of(message))
        if leaving := message.fields.get("leaving"):
            self._engine.evicted.add(chain, str(leaving)[:MAX_WHY_CHARS])
        layout = bytes(memoryview(message.blob)[split:])
        wanted = self._parts.demoter.offer(model, chain, layout, self._taint(message, model, tokens))
        if wanted.held:
            self._parts.toucher.touch(chain)
        reply |= {"rows_from": wanted.rows_from, "window": wanted.window, "state": wanted.state}
        if wanted.incoming is not None:
            reply["transfer"] = wanted.incoming.id
            self._remember(wanted.incoming)
        await self._connection.send("offer", {**reply, "reason": wanted.reason})

    def _taint(self, message: Message, model: Model, tokens: Tokens) -> int:
        assert model.root is not None
        floor = self._engine.floors.get(message.integer("model"), 0)
        return max(floor, self._engine.taints.worst(model.root, tokens))

    def _remember(self, incoming: Incoming) -> None:
        transfers = self._engine.transfers
        transfers[incoming.id] = incoming
        while len(transfers) > MAX_OPEN_TRANSFERS:
            _, oldest = transfers.popitem(last=False)
            self._parts.demoter.end(oldest, "abandoned")

    def _request(self, message: Message) -> tuple[RestoreRequest | str, Model]:
        """The request, or the reason why it cannot be served yet."""
        model = self._engine.model(message)
        tokens = message.tokens()
        limit = message.integer("limit", high=len(tokens))
        have = message.integer("have", high=MAX_TOKENS)
        rows_from = message.integer("rows_from", high=have)
        expected = expected_of(message.fields.get("expected"))
        media = media_of(message)
        if model.root is None or model.unusable_reason:
            return model.unusable_reason, model
        chain = PromptChain.of(model.root, tokens[:limit], media)
        computing_s = model.prefill.seconds(have, limit) or (limit - have) / FASTEST_TOKENS_PER_S
        budget_s = self._budget_s(message.number("budget_s"), computing_s)
        number, prefill = message.integer("id"), model.prefill.seconds
        above = int_of(message.fields.get("above", 0), "above", high=MAX_TOKENS)
        more = message.fields.get("more") is True
        return RestoreRequest(
            number, model.name, chain, have, rows_from, limit, expected, budget_s, prefill, above, more
        ), model

    def _budget_s(self, asked_s: float, computing_s: float) -> float:
        """The hook of an engine that has not computed yet does not know how long that takes; here it is remembered."""
        allowed_s = min(self._parts.restore_timeout_s(), asked_s)
        if not self._parts.settings().get("break_even"):
            return allowed_s
        return min(allowed_s, max(SHORTEST_WORTH_S, computing_s))

    def _trace(self, message: Message, request: RestoreRequest | str, model: Model) -> RequestTrace:
        """A new request in the book, with what the engine's own cache had of it."""
        build = self._engine.build or self._engine.kind
        trace = self._parts.traces.begin(self._engine.id, build, model.name, len(message.tokens()))
        trace.restore_id, trace.limit = message.integer("id"), message.integer("limit")
        trace.have = message.integer("have")
        trace.more = message.fields.get("more") is True
        if isinstance(request, str):
            trace.reason, trace.outcome = request, "hot" if trace.have else "computed"
            trace.position = trace.have
            return trace
        trace.prompt(request.chain)
        gone = self._engine.evicted.of(request.chain, request.have)
        trace.hot_reason = "evicted" if gone else "not_in_engine"
        trace.hot_gone_unix_s, trace.hot_why = gone or (0.0, "")
        return trace

    async def _probe(self, message: Message) -> None:
        """How far a restore would reach; nothing is fetched."""
        request, _ = self._request(message)
        position, reason = 0, request if isinstance(request, str) else ""
        if not isinstance(request, str):
            scratch = scratch_trace(request.model, len(request.chain.tokens))
            _, plan = await self._parts.promoter.look_up(request, scratch)
            position = plan.position if plan is not None else 0
        await self._connection.send("possible", {"id": message.integer("id"), "position": position, "reason": reason})

    async def _restore(self, number: int, request: RestoreRequest | str, model: Model, trace: RequestTrace) -> None:
        """The answer is the last thing that happens: whatever the hook says next finds everything counted."""
        try:
            answer = await self._answer(number, request, model, trace)
            earlier, self._earlier = self._earlier, trace if trace.more and answer[0] != "done" else None
            if earlier is not None and earlier.is_of_same_prompt(trace):
                self._parts.traces.joined(earlier, trace)
        except Exception:  # a hook that is not answered waits until it takes the agent for dead
            _log.exception("a restore of %s came and could not be accounted for", model.name)
            self._parts.telemetry.count("restores_crashed")
            answer = "failed", {"id": number, "reason": "agent_error"}
        with contextlib.suppress(HandoffError):
            await self._connection.send(*answer)

    async def _answer(
        self, number: int, request: RestoreRequest | str, model: Model, trace: RequestTrace
    ) -> tuple[str, dict[str, object]]:
        parts = self._parts
        if isinstance(request, str):
            parts.telemetry.count(f"restores_declined_{request}")
            parts.telemetry.tier("kv").miss(request)
            return "none", {"id": number, "reason": request}
        try:
            async with self._heartbeat(number):
                outcome = await parts.promoter.restore(request, self._connection, trace)
        except (HookGone, HandoffError):
            trace.outcome, trace.reason = "computed", "cancelled"
            parts.telemetry.count("restores_cancelled")
            return "failed", {"id": number, "reason": "cancelled"}
        except Exception:
            trace.outcome, trace.reason = "computed", "agent_error"
            _log.exception("a restore of %s failed", model.name)
            parts.telemetry.count("restores_crashed")
            return "failed", {"id": number, "reason": "agent_error"}
        if not outcome.position:
            return "failed", {"id": number, "reason": outcome.reason}
        self._restored(request, outcome.position, outcome.fidelity)
        parts.toucher.restored(request.chain, outcome.position, [each for each, _ in outcome.used])
        return "done", {
            "id": number, "position": outcome.position, "scalars": outcome.scalars,
            "fidelity": outcome.fidelity, "codec": outcome.codec, "bytes": outcome.bytes,
        }  # fmt: skip

    @contextlib.asynccontextmanager
    async def _heartbeat(self, number: int) -> AsyncIterator[None]:
        """Meanwhile the hook hears that the agent is alive, however slow a vault is."""

        async def beat() -> None:
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                await self._connection.send("working", {"id": number})

        task = asyncio.create_task(beat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _restored(self, request: RestoreRequest, position: int, fidelity: int) -> None:
        tokens = request.chain.tokens[:position]
        self._engine.taints.restored(request.chain.root, tokens, request.rows_from, fidelity)
        self._engine.tokens_saved += position - request.have
        self._parts.show(self._engine)
