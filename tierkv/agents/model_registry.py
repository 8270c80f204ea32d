"""From what a hook announces to the root of every key: weights are hashed in the background, once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tierkv.agents.break_even import PrefillCost
from tierkv.agents.prefill_costs import PrefillCosts
from tierkv.handoff.protocol import FileSeen, ModelAnnouncement
from tierkv.identity.blocks import BlockKey
from tierkv.identity.model import ModelIdentity
from tierkv.identity.weights import DigestCache, WeightsUnusable, content_digest, text_digest
from tierkv.telemetry.node import Severity

_log = logging.getLogger(__name__)
MAX_MODELS = 256
HASHING = "hashing"
READY = "ready"


@dataclass(slots=True, eq=False)
class Model:
    """A model as announced. ``state``: "hashing", "ready" (then ``root`` is set), or the reason it is refused.

    ``prefill``: what computing with it costs, shared by all forms of its cache.
    """

    announcement: ModelAnnouncement
    engine: str
    build: str
    prefill: PrefillCost
    state: str = HASHING
    identity: ModelIdentity | None = None
    root: BlockKey | None = None

    @property
    def name(self) -> str:
        return self.announcement.name

    @property
    def unusable_reason(self) -> str:
        """Why nothing of it is stored or restored, "" when it is ready."""
        if self.state == READY:
            return ""
        return "identity_pending" if self.state == HASHING else self.state


class ModelRegistry:
    """Equal announcements of equal engines are one model. Owned by the event loop."""

    def __init__(
        self,
        cache: DigestCache,
        tenant: str,
        costs: PrefillCosts,
        spawn: Callable[[Coroutine[Any, Any, object], str], None],
        emit: Callable[[Severity, str, Model], None],
    ) -> None:
        self._cache = cache
        self._tenant = tenant
        self._costs = costs
        self._spawn = spawn
        self._emit = emit
        self._models: dict[tuple[ModelAnnouncement, str, str], Model] = {}
        self._hashing = asyncio.Lock()

    def announce(self, announcement: ModelAnnouncement, engine: str, build: str) -> Model:
        """The model, whose identity is known soon."""
        key = (announcement, engine, build)
        model = self._models.get(key)
        if model is None or model.state == "weights_unreadable":
            model = Model(announcement, engine, build, self._costs.of(announcement, engine, build))
            while len(self._models) >= MAX_MODELS:
                del self._models[next(iter(self._models))]
            self._models[key] = model
            self._spawn(self._identify(model), f"identity of {announcement.name}")
        return model

    async def _identify(self, model: Model) -> None:
        try:
            async with self._hashing:
                identity = await asyncio.to_thread(self._identity, model)
        except WeightsUnusable as error:
            model.state = error.reason
            self._emit("warning", f"{model.name} is not cached: {error}", model)
            return
        except Exception as error:
            model.state = "identity_failed"
            _log.exception("the identity of %s", model.name)
            self._emit("error", f"{model.name} is not cached: {error}", model)
            return
        model.identity = identity
        model.root = identity.digest()
        model.state = READY
        self._emit("info", f"{model.name} is known as {model.root.hex()[:12]}", model)

    def _identity(self, model: Model) -> ModelIdentity:
        said = model.announcement
        return ModelIdentity(
            weights=content_digest(said.weights, self._cache),
            config=text_digest(said.config),
            engine=model.engine,
            engine_build=model.build,
            adapter=self._optional(said.adapter),
            draft=self._optional(said.draft),
            dtype=said.dtype,
            kv_bits=said.kv_bits,
            kv_group_size=said.kv_group_size,
            quantized_kv_start=said.quantized_kv_start,
            max_kv_size=said.max_kv_size,
            shard_kind=said.shard_kind,
            shard_rank=said.shard_rank,
            shard_world=said.shard_world,
            layer_start=said.layer_start,
            layer_end=said.layer_end,
            tenant=self._tenant,
            name=said.name,
        )

    def _optional(self, files: tuple[FileSeen, ...]) -> str:
        return content_digest(files, self._cache) if files else ""
