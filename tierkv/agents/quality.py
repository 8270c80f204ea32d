"""What live samples say of the codecs, and which layers get a better one because of it.

A layer that comes back below its codec's floor is a suspect only: prefilling the same tokens again in other steps, or
after a restore that lost something, gives other values where arithmetic rounds. In bfloat16 that alone takes deep
layers of SmolLM2 below 35 dB (tests/demo/test_rounding.py). So the codec is measured by itself on the next prompt that
is stored, and what that says decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from tierkv.agents.codec_loss import Losses
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
    """What the samples of one model came to. ``raised``: layers that have left the tier's codec, and for which.

    ``compared``: samples of which it is known what the model said next; their means, 0 and 0 where there is none.
    ``suspects``: layers that came back below their codec's floor, and at how many decibels. ``excused``: codecs of
    which it was said that such a layer was not their fault.
    """

    samples: int = 0
    compared: int = 0
    codec: str = ""
    kl_mean: float = 0.0
    top1_fraction: float = 0.0
    snr_db_min: float = math.inf
    raised: dict[int, Codec] = field(default_factory=dict[int, Codec])
    suspects: dict[int, float] = field(default_factory=dict[int, float])
    excused: set[str] = field(default_factory=set[str])


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
        """The sample is counted; layers that break their codec's floor are measured when a prompt is next stored."""
        if model.root is None:
            return
        found = self._models.setdefault(model.root, ModelQuality())
        while len(self._models) > MAX_MODELS:
            del self._models[next(iter(self._models))]
        decibels = [db for _, db in sample.layers]
        found.samples += 1
        found.codec = "+".join(sorted(sample.codecs))
        if sample.positions:
            weight = _WEIGHT if found.compared else 1.0
            found.compared += 1
            found.kl_mean += weight * (sample.kl_mean - found.kl_mean)
            found.top1_fraction += weight * (sample.top1_fraction - found.top1_fraction)
        found.snr_db_min = min(decibels, default=math.inf)
        self._telemetry.count("quality_samples")
        self._suspect(model.root, found, sample)

    def _suspect(self, root: BlockKey, found: ModelQuality, sample: Sample) -> None:
        worst: dict[int, float] = {}
        for layer, db in sample.layers:
            worst[layer] = min(db, worst.get(layer, math.inf))
        for layer, db in worst.items():
            used = self.codec(root, "kv", layer)
            # A record from before the change, or from another agent, says nothing of the codec in use now.
            if used.name in sample.codecs and db < floor_db(used):
                found.suspects[layer] = db

    def suspects(self, root: BlockKey) -> tuple[int, ...]:
        """Layers whose codec is to be measured on rows that are stored."""
        found = self._models.get(root)
        return tuple(found.suspects) if found is not None else ()

    def measured(self, model: Model, losses: Losses) -> None:
        """What codecs alone cost the rows of a prompt: who breaks a floor has the next better one from now on."""
        if model.root is None or not losses:
            return
        found = self.of(model.root)
        own: dict[int, float] = {}
        for (layer, _), loss in losses.items():
            if layer in found.suspects and loss.codec is self.codec(model.root, "kv", layer):
                own[layer] = min(loss.snr_db, own.get(layer, math.inf))
        broken = [layer for layer, db in own.items() if db < floor_db(self.codec(model.root, "kv", layer))]
        for layer in broken:
            self._raise(model, found, layer, own[layer])
        if broken:
            self._kept.keep(model.root, found.raised)
        self._excuse(model, found, {layer: db for layer, db in own.items() if layer not in broken})
        for layer in own:
            del found.suspects[layer]

    def _raise(self, model: Model, found: ModelQuality, layer: int, db: float) -> None:
        assert model.root is not None
        used = self.codec(model.root, "kv", layer)
        better = next_better(used)
        found.raised[layer] = better
        self._telemetry.count("quality_layers_raised")
        self._telemetry.emit(
            "quality", "warning",
            f"{model.name}: layer {layer} came back at {found.suspects[layer]:.1f} dB, and {used.name} by itself "
            f"leaves {db:.1f} dB, below its floor of {floor_db(used):g} dB; it is stored as {better.name} from now on",
            model=model.name, layer=str(layer), snr_db=f"{db:.2f}", codec=better.name,
        )  # fmt: skip

    def _excuse(self, model: Model, found: ModelQuality, own: dict[int, float]) -> None:
        """Said once for each codec: such layers are found again and again."""
        assert model.root is not None
        codecs = {layer: self.codec(model.root, "kv", layer) for layer in own}
        worst = min(own, key=lambda layer: found.suspects[layer], default=-1)
        if worst < 0 or codecs[worst].name in found.excused:
            return
        used = codecs[worst]
        found.excused.add(used.name)
        own = {layer: db for layer, db in own.items() if codecs[layer] is used}
        self._telemetry.emit(
            "quality", "info",
            f"{model.name}: {'a layer' if len(own) == 1 else f'{len(own)} layers'} came back below {used.name}'s floor "
            f"of {floor_db(used):g} dB (layer {worst} at {found.suspects[worst]:.1f} dB), but by itself it leaves "
            f"{min(own.values()):.1f} dB or more: the rest is the model's own rounding, or lossier state from before",
            model=model.name, layers=str(len(own)), snr_db=f"{min(own.values()):.2f}", codec=used.name,
        )  # fmt: skip


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
        if not (isinstance(layer, int) and 0 <= layer < MAX_LAYERS) or not (db is None or isinstance(db, int | float)):
            return None
        found.append((layer, math.inf if db is None else float(db)))
    numbers = [values.get(name) for name in ("tokens", "positions", "kl_mean", "top1_fraction")]
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) and n >= 0 for n in numbers):
        return None
    tokens, positions, kl_mean, top1 = cast("list[float]", numbers)
    codecs = str(values.get("codec", ""))[:200].split("+")
    return Sample(frozenset(codecs), int(tokens), int(positions), kl_mean, min(1.0, top1), tuple(found))
