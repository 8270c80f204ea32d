"""What live samples say of the codecs, and which layers get a better one because of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from tierkv.agents.model_registry import Model
from tierkv.agents.raised_layers import MAX_LAYERS, MAX_MODELS, RaisedLayers
from tierkv.codec.registry import Codec, floor_db, next_better
from tierkv.identity.blocks import BlockKey
from tierkv.telemetry.node import NodeTelemetry

_WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class Sample:
    """One restored prompt's beginning against the same computed again. ``layers``: (layer, decibels), inf for equal."""

    codecs: frozenset[str]
    tokens: int
    positions: int
    kl_mean: float
    top1_fraction: float
    layers: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class ModelQuality:
    """What the samples of one model came to. ``raised``: layers that have left the tier's codec, and for which."""

    samples: int = 0
    codec: str = ""
    kl_mean: float = 0.0
    top1_fraction: float = 1.0
    snr_db_min: float = math.inf
    raised: dict[int, Codec] = field(default_factory=dict[int, Codec])


class QualityBook:
    """``codecs``: the codec of each tier as it is now; ``kept``: where a restart finds which layers were raised.

    Owned by the event loop; any thread may ask for a ``codec``.
    """

    def __init__(self, telemetry: NodeTelemetry, codecs: Mapping[str, Codec], kept: RaisedLayers | None = None) -> None:
        self._telemetry = telemetry
        self._codecs = codecs
        self._kept = kept or RaisedLayers(None)
        self._models = {root: ModelQuality(raised=layers) for root, layers in self._kept.load().items()}

    def codec(self, root: BlockKey, tier: str, layer: int) -> Codec:
        """What this layer's arrays are encoded with."""
        default = self._codecs[tier]
        found = self._models.get(root)
        raised = found.raised.get(layer) if found is not None and tier == "kv" else None
        return raised if raised is not None and raised.fidelity < default.fidelity else default

    def of(self, root: BlockKey | None) -> ModelQuality:
        """What is known of a model, nothing at first."""
        return self._models.get(root, ModelQuality()) if root is not None else ModelQuality()

    def sampled(self, model: Model, sample: Sample) -> None:
        """The sample is counted; layers that break their codec's floor have the next better one from now on."""
        if model.root is None:
            return
        found = self._models.setdefault(model.root, ModelQuality())
        while len(self._models) > MAX_MODELS:
            del self._models[next(iter(self._models))]
        decibels = [db for _, db in sample.layers]
        first = not found.samples
        found.samples += 1
        found.codec = "+".join(sorted(sample.codecs))
        if sample.positions:
            weight = 1.0 if first else _WEIGHT
            found.kl_mean += weight * (sample.kl_mean - found.kl_mean)
            found.top1_fraction += weight * (sample.top1_fraction - found.top1_fraction)
        found.snr_db_min = min(decibels, default=math.inf)
        self._telemetry.count("quality_samples")
        self._raise(model, found, sample)

    def _raise(self, model: Model, found: ModelQuality, sample: Sample) -> None:
        assert model.root is not None
        worst: dict[int, float] = {}
        raised = dict(found.raised)
        for layer, db in sample.layers:
            worst[layer] = min(db, worst.get(layer, math.inf))
        for layer, db in worst.items():
            used = self.codec(model.root, "kv", layer)
            # A record from before the change, or from another agent, says nothing of the codec in use now.
            if used.name not in sample.codecs or db >= floor_db(used):
                continue
            better = next_better(used)
            found.raised[layer] = better
            self._telemetry.count("quality_layers_raised")
            self._telemetry.emit(
                "quality", "warning",
                f"{model.name}: layer {layer} came back at {db:.1f} dB with {used.name}, whose floor is "
                f"{floor_db(used):.0f} dB; it is stored as {better.name} from now on",
                model=model.name, layer=str(layer), snr_db=f"{db:.2f}", codec=better.name,
            )  # fmt: skip
        if raised != found.raised:
            self._kept.keep(model.root, found.raised)


def sample_of(values: Mapping[str, object]) -> Sample | None:
    """A sample as a hook reports it; None for anything that is not one."""
    layers = values.get("layers")
    if not isinstance(layers, list) or len(cast("list[object]", layers)) > MAX_LAYERS:
        return None
    found: list[tuple[int, float]] = []
    for each in cast("list[object]", layers):
        if not isinstance(each, list) or len(cast("list[object]", each)) != 3:
            return None
        layer, _, db = cast("list[object]", each)
        if not isinstance(layer, int) or not (db is None or isinstance(db, int | float)):
            return None
        found.append((layer, math.inf if db is None else float(db)))
    numbers = [values.get(name) for name in ("tokens", "positions", "kl_mean", "top1_fraction")]
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) and n >= 0 for n in numbers):
        return None
    tokens, positions, kl_mean, top1 = cast("list[float]", numbers)
    codecs = str(values.get("codec", ""))[:200].split("+")
    return Sample(frozenset(codecs), int(tokens), int(positions), kl_mean, min(1.0, top1), tuple(found))
