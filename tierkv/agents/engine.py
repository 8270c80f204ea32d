"""Engines at the hand-off socket: who is attached, and what is given back when one is gone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tierkv.agents.control_channel import ControlChannel
from tierkv.agents.demote import Demoter
from tierkv.agents.demote_channel import DemoteChannel
from tierkv.agents.engine_parts import Engine, EngineParts
from tierkv.agents.hot_tier import HotTier
from tierkv.agents.model_registry import Model, ModelRegistry
from tierkv.agents.promote import Promoter
from tierkv.agents.quality import QualityBook
from tierkv.agents.touch import Toucher
from tierkv.agents.trace import TraceBook
from tierkv.handoff.server import Connection
from tierkv.telemetry.node import NodeTelemetry
from tierkv.telemetry.snapshot import EngineSnapshot


class Engines:
    """The HandoffService of the inference agent. Owned by the event loop."""

    def __init__(
        self,
        registry: ModelRegistry,
        promoter: Promoter,
        demoter: Demoter,
        toucher: Toucher,
        hot: HotTier,
        telemetry: NodeTelemetry,
        traces: TraceBook,
        quality: QualityBook,
        *,
        settings: Callable[[], Mapping[str, object]],
        restore_timeout_s: Callable[[], float],
    ) -> None:
        self._demoter = demoter
        self._quality = quality
        self._hot = hot
        self._telemetry = telemetry
        self._parts = EngineParts(
            registry,
            promoter,
            demoter,
            toucher,
            hot,
            telemetry,
            traces,
            quality,
            settings,
            restore_timeout_s,
            self._show,
        )
        self._engines: dict[str, Engine] = {}

    def models_named(self, name: str) -> tuple[Engine, list[Model]] | None:
        """The forms of the model of that name, and their engine; for "" of the one that was announced last."""
        for engine in reversed(self._engines.values()):
            for model in reversed(engine.models.values()):
                if name in ("", model.name):
                    return engine, [each for each in engine.models.values() if each.name == model.name]
        return None

    async def serve(self, connection: Connection) -> None:
        """Returns when the connection has ended. Raises HandoffError when the hook says something malformed."""
        engine = self._engines.get(connection.engine_id)
        if engine is None:
            engine = Engine(connection.engine_id, connection.engine, connection.build)
            self._engines[engine.id] = engine
            self._telemetry.emit("engine", "info", f"{engine.build or engine.kind} is attached", engine=engine.kind)
        engine.connections.add(connection)
        self._show(engine)
        try:
            if connection.channel == "control":
                await ControlChannel(self._parts, engine, connection).run()
            else:
                await DemoteChannel(self._parts, engine, connection).run()
        finally:
            engine.connections.discard(connection)
            if not engine.connections:
                self._gone(engine)

    def _gone(self, engine: Engine) -> None:
        """Its memory is gone, and with it what was tainted, promised and hot."""
        for incoming in list(engine.transfers.values()):
            self._demoter.end(incoming, "engine_gone")
        engine.transfers.clear()
        if self._engines.get(engine.id) is engine:
            del self._engines[engine.id]
        self._hot.forget(engine.id)
        self._telemetry.remove_engine(engine.id)
        self._telemetry.emit("engine", "info", f"{engine.build or engine.kind} is detached", engine=engine.kind)

    def _show(self, engine: Engine) -> None:
        model = next(reversed(engine.models.values()), None)
        root = model.root.hex()[:12] if model is not None and model.root is not None else ""
        note = model.unusable_reason if model is not None else ""
        quality = self._quality.of(model.root if model is not None else None)
        shown = EngineSnapshot(
            engine.kind,
            engine.build,
            model.name if model is not None else "",
            root,
            True,
            engine.tokens_saved,
            self._hot.prefill_s(engine.id, engine.tokens_saved),
            note,
            quality.codec,
            quality.samples,
            quality.kl_mean,
            quality.top1_fraction,
            quality.snr_db_min if math.isfinite(quality.snr_db_min) else 0.0,
            len(quality.raised),
        )
        self._telemetry.set_engine(shown, engine.id)
