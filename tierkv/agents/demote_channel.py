"""The mover thread's connection: state comes in regions that go back as soon as they are encoded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import cast

from tierkv.agents.break_even import prefill_sample
from tierkv.agents.engine_parts import Engine, EngineParts, media_of
from tierkv.agents.quality import sample_of
from tierkv.agents.transfer import Incoming
from tierkv.errors import HandoffError
from tierkv.handoff.protocol import Message, Segment, segments_of
from tierkv.handoff.server import Connection
from tierkv.identity.blocks import PromptChain

_log = logging.getLogger(__name__)

MAX_PIECES = 256
MAX_PREFILLS = 64


class DemoteChannel:
    """``run`` returns when the connection has ended."""

    def __init__(self, parts: EngineParts, engine: Engine, connection: Connection) -> None:
        self._parts = parts
        self._engine = engine
        self._connection = connection
        self._begun: set[Incoming] = set()
        self._pieces: set[asyncio.Task[None]] = set()
        self._in_use: set[int] = set()
        self._error: HandoffError | None = None

    async def run(self) -> None:
        try:
            while (message := await self._connection.receive()) is not None:
                await self._handle(message)
            if self._error is not None:
                raise self._error
        finally:
            for task in list(self._pieces):
                task.cancel()
            await asyncio.gather(*self._pieces, return_exceptions=True)
            for incoming in self._begun:
                incoming.jobs = 0
                self._engine.transfers.pop(incoming.id, None)
                self._parts.demoter.end(incoming, "hook_gone")

    async def _handle(self, message: Message) -> None:
        if message.op == "piece":
            # What an engine sends ahead waits in the socket while this agent is behind.
            while len(self._pieces) >= MAX_PIECES:
                await asyncio.wait(self._pieces, return_when=asyncio.FIRST_COMPLETED)
            self._piece(message)
        elif message.op == "begin":
            incoming = self._incoming(message)
            if incoming is not None:
                incoming.scalars = message.table("scalars")
                incoming.begun = True
                self._begun.add(incoming)
        elif message.op in ("end", "dropped"):
            await self._end(message)
        elif message.op == "report":
            await self._report(message)
        elif message.op == "hit":
            self._hit(message)
        elif message.op == "served":
            self._served(message)
        elif message.op == "sampled":
            self._sampled(message)
        elif message.op == "flush":
            complete = await self._flush(message.number("timeout_s"))
            await self._connection.send("flushed", {"complete": complete})
        else:
            raise HandoffError("hook", "an unknown op")

    def _incoming(self, message: Message) -> Incoming | None:
        """The transfer, None if the agent has given it up meanwhile."""
        return self._engine.transfers.get(message.integer("transfer"))

    def _piece(self, message: Message) -> None:
        offset, length = message.integer("offset"), message.integer("bytes")
        region = self._connection.region(offset, length)
        if offset in self._in_use:
            raise HandoffError("hook", "a region that is still being read")
        incoming = self._incoming(message)
        segments = segments_of(message.fields.get("segments"), incoming.layout, len(region)) if incoming else []
        self._in_use.add(offset)
        if incoming is not None:
            incoming.jobs += 1  # now, not when the task first runs: "end" may be read before that
        task = asyncio.create_task(self._take(incoming, segments, offset, length))
        self._pieces.add(task)
        task.add_done_callback(self._pieces.discard)

    async def _take(self, incoming: Incoming | None, segments: list[Segment], offset: int, length: int) -> None:
        try:
            if incoming is not None:
                await self._parts.demoter.piece(incoming, segments, self._connection.region(offset, length))
            self._in_use.discard(offset)
            await self._connection.send("free", {"offsets": [offset]})
        except HandoffError as error:
            self._error = error
            self._connection.abort()
        except Exception:
            _log.exception("state of %s cannot be taken", self._engine.kind)
            self._parts.telemetry.count("pieces_crashed")

    async def _end(self, message: Message) -> None:
        incoming = self._engine.transfers.pop(message.integer("transfer"), None)
        if incoming is not None:
            self._begun.discard(incoming)
            self._parts.demoter.end(incoming, message.text("reason", 64) if message.op == "dropped" else "")

    async def _report(self, message: Message) -> None:
        stats = message.table("stats")
        self._parts.hot.report(self._engine.id, stats)
        self._prefills(stats)
        self._parts.show(self._engine)
        models = {str(number): model.state for number, model in self._engine.models.items()}
        costs = {str(number): model.prefill.terms for number, model in self._engine.models.items()}
        settings = dict(self._parts.settings())
        await self._connection.send("settings", {"settings": settings, "models": models, "prefill": costs})

    def _prefills(self, stats: Mapping[str, object]) -> None:
        """With which model the engine computed which positions, how fast; what is not plausible is left out."""
        found = stats.get("prefills")
        for each in cast("list[object]", found)[:MAX_PREFILLS] if isinstance(found, list) else ():
            if not isinstance(each, list) or len(cast("list[object]", each)) != 4:
                continue
            number, *row = cast("list[object]", each)
            model = self._engine.models.get(number) if isinstance(number, int) else None
            sample = prefill_sample(row)
            if model is not None and sample is not None:
                model.prefill.measured(*sample)
        built_bytes, built_s = stats.get("built_bytes"), stats.get("built_s")
        if isinstance(built_bytes, int) and isinstance(built_s, int | float) and built_bytes > 0 < built_s:
            self._parts.promoter.rates.built(built_bytes, float(built_s))

    def _hit(self, message: Message) -> None:
        model = self._engine.models.get(message.integer("model"))
        tokens = message.tokens()[: message.integer("position")]
        media = media_of(message)
        if model is not None and model.root is not None:
            self._parts.toucher.touch(PromptChain.of(model.root, tokens, media))

    def _served(self, message: Message) -> None:
        """How a request went on in the engine: one that was restored, or one that no vault was asked about."""
        traces, engine = self._parts.traces, self._engine
        number, have, position = message.integer("restore"), message.integer("have"), message.integer("position")
        trace = traces.of_restore(engine.id, number) if number else None
        if trace is None:
            model = engine.models.get(message.integer("model")) if message.fields.get("model") is not None else None
            trace = traces.begin(
                engine.id, engine.build or engine.kind, model.name if model else "", message.integer("tokens")
            )
            trace.limit = max(0, trace.prompt_tokens - 1)
        trace.have = have
        refused = trace.outcome == "restored" and position < trace.position
        if refused or not trace.reason:
            trace.reason = message.text("reason", 64) or trace.reason
        trace.position = position
        trace.outcome = "computed" if not position else "hot" if position <= have else "restored"

    def _sampled(self, message: Message) -> None:
        sample = sample_of(message.fields)
        if sample is None:
            raise HandoffError("hook", "not a sample of a restore")
        self._parts.quality.sampled(self._engine.model(message), sample)
        self._parts.show(self._engine)

    async def _flush(self, timeout_s: float) -> bool:
        if self._pieces:
            await asyncio.wait(list(self._pieces), timeout=timeout_s)
        return await self._parts.demoter.flush(min(timeout_s, 600.0))
