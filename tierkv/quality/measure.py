"""One model, one text, several depths, every codec: prefilled once, compared at each depth with the cache as it was."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tierkv.codec.registry import CODEC_NAMES, codec_named, warm_up
from tierkv.errors import UsageError
from tierkv.quality.coded import ArrayQuality, Coded, through
from tierkv.state import mlx_cache
from tierkv.state.fidelity import Divergence, as_float32, to_bfloat16
from tierkv.state.layout import ArraySpec, Layout

PREFILL_STEP = 256
LOGITS_STEP = 64
EVALUATED_TOKENS = 256
# Of a text only as much is cut into tokens as is likely to be enough.
MOST_CHARS_A_TOKEN = 8

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DepthQuality:
    """One codec after ``depth`` tokens of context. ``layers``: attention state only."""

    depth: int
    in_bytes: int
    out_bytes: int
    divergence: Divergence
    layers: tuple[ArrayQuality, ...]

    @property
    def ratio(self) -> float:
        return self.in_bytes / self.out_bytes if self.out_bytes else 1.0

    @property
    def worst(self) -> ArrayQuality:
        return min(self.layers, key=lambda each: each.snr_db)


@dataclass(slots=True)
class CodecQuality:
    """One codec over all depths."""

    codec: str
    depths: list[DepthQuality] = field(default_factory=list[DepthQuality])

    @property
    def ratio(self) -> float:
        out_bytes = sum(each.out_bytes for each in self.depths)
        return sum(each.in_bytes for each in self.depths) / out_bytes if out_bytes else 1.0

    @property
    def divergence(self) -> Divergence:
        total = Divergence()
        for each in self.depths:
            total.merge(each.divergence)
        return total

    @property
    def snr_db_min(self) -> float:
        return min(each.worst.snr_db for each in self.depths)

    @property
    def snr_db_median(self) -> float:
        return float(np.median([layer.snr_db for each in self.depths for layer in each.layers]))


@dataclass(slots=True)
class Measured:
    """Everything ``tierkv quality`` found. ``input_dtype``: what the codecs were given, which ratios are against."""

    model: str
    input_dtype: str
    tokens: int
    evaluated: int
    codecs: list[CodecQuality]


def measure(
    model_path: Path,
    text: str,
    *,
    codecs: Sequence[str],
    depths: Sequence[int],
    evaluated: int = EVALUATED_TOKENS,
    as_bfloat16: bool = False,
    progress: Progress = lambda _: None,
) -> Measured:
    """Raises UsageError for a text that is too short, UnsupportedState for a cache class that is not carried.

    ``as_bfloat16``: attention state is rounded to bfloat16 first, as an engine that computes in bfloat16 keeps it, and
    that is what codecs are given and compared with.
    """
    progress("loading the model")
    load = importlib.import_module("mlx_lm").load
    model, tokenizer = load(str(model_path))[:2]
    deepest = max(depths)
    ids = _tokens(tokenizer, text, deepest + evaluated + 1)
    warm_up(codecs)
    run = _Run(model, ids, evaluated, as_bfloat16, progress)
    found = [CodecQuality(name) for name in codecs]
    for depth in sorted(set(depths)):
        run.prefill_to(depth)
        for each in found:
            progress(f"depth {depth:,}: {each.codec}")
            each.depths.append(run.compare(each.codec))
    return Measured(model_path.name, run.input_dtype, deepest, evaluated, found)


def _tokens(tokenizer: Any, text: str, needed: int) -> NDArray[np.int64]:
    """At least ``needed`` ids from the text's beginning. Raises UsageError when it has fewer."""
    for part in (text[: MOST_CHARS_A_TOKEN * needed], text):
        ids = np.asarray(tokenizer.encode(part), np.int64)
        if len(ids) >= needed:
            return ids
    raise UsageError(f"the text has {len(ids):,} tokens; {needed:,} are needed for this depth")


class _Run:
    """A cache that grows from depth to depth; what is compared are copies of it."""

    def __init__(self, model: Any, ids: NDArray[np.int64], evaluated: int, as_bfloat16: bool, progress: Progress):
        cache_module = importlib.import_module("mlx_lm.models.cache")
        self._model, self._ids, self._evaluated = model, ids, evaluated
        self._rounds, self._progress = as_bfloat16, progress
        self._cache: list[Any] = cache_module.make_prompt_cache(model)
        self._depth = 0
        self._exact_logits: NDArray[np.float32] | None = None
        self._state: tuple[Layout, dict[tuple[int, int], NDArray[Any]], Any] | None = None
        self.input_dtype = ""

    def prefill_to(self, depth: int) -> None:
        """The cache stands at ``depth``, and what the model says after it is known."""
        while self._depth < depth:
            end = min(depth, self._depth + PREFILL_STEP)
            self._progress(f"prefilling {end:,} of {depth:,} tokens")
            self._model(mx.array(self._ids[self._depth : end])[None], cache=self._cache)
            mx.eval(mlx_cache.live_arrays(self._cache))
            self._depth = end
        layout = mlx_cache.describe(self._cache)
        rows = mlx_cache.rows(self._cache, layout, 0, depth)
        whole, scalars = mlx_cache.checkpoint(self._cache, layout, ("window", "state"))
        arrays = {key: np.array(array) for key, array in {**rows, **whole}.items()}
        given = _rounded(layout, arrays) if self._rounds else (layout, arrays)
        self._state = (*given, scalars)
        self.input_dtype = _dtype_of(given[0])
        self._progress(f"depth {depth:,}: what follows, exactly")
        self._exact_logits = self._logits(self._rebuilt(given[1]))

    def compare(self, codec_name: str) -> DepthQuality:
        assert self._state is not None
        assert self._exact_logits is not None
        layout, arrays, _ = self._state
        coded: Coded = through(codec_named(codec_name), arrays, layout, self._depth)
        following = self._ids[self._depth + 1 : self._depth + self._evaluated + 1]
        divergence = Divergence()
        exact = all(math.isinf(each.snr_db) for each in coded.quality)
        other = self._exact_logits if exact else self._logits(self._rebuilt(coded.arrays))
        divergence.add(self._exact_logits, other, following)
        return DepthQuality(self._depth, coded.in_bytes, coded.out_bytes, divergence, tuple(coded.quality))

    def _rebuilt(self, arrays: dict[tuple[int, int], NDArray[Any]]) -> list[Any]:
        assert self._state is not None
        given, _, scalars = self._state
        layout = mlx_cache.describe(self._cache)
        back = {
            key: as_float32(array, given.layers[key[0]].arrays[key[1]].dtype)
            if layout.layers[key[0]].arrays[key[1]] != given.layers[key[0]].arrays[key[1]]
            else array
            for key, array in arrays.items()
        }
        return mlx_cache.build(layout, self._depth, back, scalars)

    def _logits(self, cache: list[Any]) -> NDArray[np.float32]:
        """[evaluated, vocabulary] float32, for the tokens after the cache's position."""
        parts: list[NDArray[np.float32]] = []
        for begin in range(self._depth, self._depth + self._evaluated, LOGITS_STEP):
            end = min(begin + LOGITS_STEP, self._depth + self._evaluated)
            out = self._model(mx.array(self._ids[begin:end])[None], cache=cache)[0].astype(mx.float32)
            mx.eval(out)
            parts.append(np.array(out))
        return np.concatenate(parts)


def _rounded(
    layout: Layout, arrays: dict[tuple[int, int], NDArray[Any]]
) -> tuple[Layout, dict[tuple[int, int], NDArray[Any]]]:
    """Attention state of float32 as bfloat16 bits, and a layout that says so; all else as it is."""

    def changes(layer: int, spec: ArraySpec) -> bool:
        return spec.dtype == "float32" and layout.layers[layer].kind != "state"

    layers = tuple(
        replace(
            each,
            arrays=tuple(replace(spec, dtype="bfloat16") if changes(index, spec) else spec for spec in each.arrays),
        )
        for index, each in enumerate(layout.layers)
    )
    rounded = {
        key: to_bfloat16(array) if changes(key[0], layout.layers[key[0]].arrays[key[1]]) else array
        for key, array in arrays.items()
    }
    return Layout(layers), rounded


def _dtype_of(layout: Layout) -> str:
    kinds = {spec.dtype for each in layout.layers if each.kind != "state" for spec in each.arrays}
    return "+".join(sorted(kinds - {"none"}))


DEFAULT_CODECS: tuple[str, ...] = tuple(name for name in CODEC_NAMES if name != "raw")
