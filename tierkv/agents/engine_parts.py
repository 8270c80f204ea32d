"""One engine process as the agent knows it, and what serving its connections takes."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tierkv.agents.demote import Demoter
from tierkv.agents.hot_tier import HotTier
from tierkv.agents.known import Taints
from tierkv.agents.model_registry import Model, ModelRegistry
from tierkv.agents.promote import Promoter
from tierkv.agents.quality import QualityBook
from tierkv.agents.touch import Toucher
from tierkv.agents.trace import Evicted, TraceBook
from tierkv.agents.transfer import Incoming
from tierkv.errors import HandoffError
from tierkv.handoff.protocol import Message, media_from_json
from tierkv.handoff.server import Connection
from tierkv.identity.blocks import Media
from tierkv.telemetry.node import NodeTelemetry


@dataclass(slots=True, eq=False)
class Engine:
    """One engine process, over both of its connections."""

    id: str
    kind: str
    build: str
    models: dict[int, Model] = field(default_factory=dict[int, Model])
    floors: dict[int, int] = field(default_factory=dict[int, int])
    taints: Taints = field(default_factory=Taints)
    transfers: OrderedDict[int, Incoming] = field(default_factory=OrderedDict[int, Incoming])
    connections: set[Connection] = field(default_factory=set[Connection])
    evicted: Evicted = field(default_factory=Evicted)
    tokens_saved: int = 0

    def model(self, message: Message) -> Model:
        """Raises HandoffError for a model that was not announced."""
        model = self.models.get(message.integer("model"))
        if model is None:
            raise HandoffError("hook", "a model that was not announced")
        return model


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What every connection uses. ``show`` brings an engine's line in the telemetry up to date; ``restore_timeout_s``
    is asked for at every restore."""

    registry: ModelRegistry
    promoter: Promoter
    demoter: Demoter
    toucher: Toucher
    hot: HotTier
    telemetry: NodeTelemetry
    traces: TraceBook
    quality: QualityBook
    settings: Callable[[], Mapping[str, object]]
    restore_timeout_s: Callable[[], float]
    show: Callable[[Engine], None]


def media_of(message: Message) -> tuple[Media, ...]:
    return tuple(
        Media(each.start, each.length, each.content_hash) for each in media_from_json(message.fields.get("media", []))
    )


def expected_of(value: object) -> str:
    """A signature as canonical text; raises HandoffError if it is not one."""
    if value is None:
        return ""
    if not isinstance(value, list) or not all(
        isinstance(row, list) and len(row) == 4 and row[0] in ("rows", "window", "state")  # pyright: ignore
        for row in value  # pyright: ignore[reportUnknownVariableType]
    ):
        raise HandoffError("hook", "not a signature of a layout")
    return json.dumps(value, separators=(",", ":"))
