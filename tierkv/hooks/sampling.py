"""A live sample of what restores are worth: one in so many is prefilled again while the engine has nothing to do.

Everything that touches MLX runs on the generation thread, in slices: the engine's loop asks for one when no request is
waiting and none is running, and a slice takes about ``SLICE_S``. So a request that comes meanwhile waits for one slice
at most, and nothing at all is done before the engine has been idle for ``IDLE_S``. Only the beginning of a prompt is
prefilled (rows depend on nothing behind them), which bounds time and memory.
"""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from tierkv.errors import UnsupportedState
from tierkv.handoff.client import HandoffClient, Media, ModelHandle, Restored
from tierkv.hooks.prompt_tokens import Ids
from tierkv.state import mlx_cache
from tierkv.state.fidelity import Divergence, as_float32, snr_db

log = logging.getLogger("tierkv")

IDLE_S = 1.0
SLICE_S = 0.05
FIRST_STEP = 8
LONGEST_STEP = 256
SAMPLED_TOKENS = 512
LEAST_TOKENS = 64
FOLLOWING_TOKENS = 32
# What a sample may hold back until the engine is idle: the restored arrays themselves, not a copy.
MOST_HELD_BYTES = 512 << 20
_FLOATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class _Sample:
    handle: ModelHandle
    ids: Ids
    restored: Restored
    tokens: int
    following: int


class Sampler:
    """``model`` gives what the engine serves now, and the handle of its plain form; ``fresh`` an empty cache of it
    (mlx-lm's unless given). Owned by the generation thread."""

    def __init__(
        self,
        client: HandoffClient,
        model: Callable[[], tuple[Any, ModelHandle] | None],
        *,
        fresh: Callable[[Any], Sequence[Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._model = model
        self._fresh = fresh or (lambda model: importlib.import_module("mlx_lm.models.cache").make_prompt_cache(model))
        self._clock = clock
        self._seen = 0
        self._sample: _Sample | None = None
        self._work: Iterator[None] | None = None
        self._idle_since: float | None = None

    def restored(self, handle: ModelHandle, ids: Ids, media: Sequence[Media], answer: Restored) -> None:
        """A prompt came back; every so many-th is kept to be compared when there is time. Costs nothing now."""
        every = int(self._client.settings.get("quality_sample", 0))
        if not every:
            self._sample = self._work = None
            return
        self._seen += 1
        if self._seen % every == 0 and self._sample is None and answer.first_row == 0:
            self._sample = _taken(handle, ids, media, answer)

    @property
    def wanted(self) -> bool:
        """Whether there is something to compare."""
        return self._sample is not None

    def busy(self) -> None:
        """A request is there or running."""
        self._idle_since = None

    def idle(self) -> None:
        """The engine has nothing to do: one slice of the comparison, if one is wanted. Never raises."""
        if self._sample is None:
            return
        now = self._clock()
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since < IDLE_S:
            return
        try:
            self._one_slice()
        except Exception as error:
            log.debug("a sample cannot be compared: %s", error, exc_info=True)
            self._sample = self._work = None

    def _one_slice(self) -> None:
        assert self._sample is not None
        serving = self._model()
        if serving is None or serving[1] is not self._sample.handle:
            self._sample = self._work = None
            return
        if self._work is None:
            self._work = self._compared(serving[0], self._sample)
        until = self._clock() + SLICE_S
        while self._clock() < until:
            if next(self._work, self) is self:
                self._sample = self._work = None
                return

    # --- the comparison, a step at a time ---------------------------------------------------------

    def _compared(self, model: Any, sample: _Sample) -> Iterator[None]:
        fresh = list(self._fresh(model))
        yield from self._prefilled(model, fresh, sample)
        layout = mlx_cache.describe(fresh)
        if layout.signature() != sample.restored.layout.signature():
            raise UnsupportedState("foreign_layout", "the model's cache is another than the restored one")
        exact = mlx_cache.rows(fresh, layout, 0, sample.tokens)
        yield
        layers: list[list[object]] = []
        for (layer, number), array in sorted(exact.items()):
            dtype = layout.layers[layer].arrays[number].dtype
            here = as_float32(array, dtype)
            there = as_float32(sample.restored.arrays[layer, number][:, :, : sample.tokens], dtype)
            decibels = snr_db(here, there)
            layers.append([layer, number, round(decibels, 2) if math.isfinite(decibels) else None])
            yield
        divergence = Divergence()
        if all(each.kind == "rows" for each in layout.layers):
            yield from self._followed(model, fresh, sample, divergence)
        self._client.sampled(
            sample.handle, codec=sample.restored.codec, tokens=sample.tokens, layers=layers,
            positions=divergence.positions, kl_mean=divergence.kl_mean, top1_fraction=divergence.top1_fraction,
        )  # fmt: skip

    def _prefilled(self, model: Any, fresh: list[Any], sample: _Sample) -> Iterator[None]:
        begin, step = 0, FIRST_STEP
        while begin < sample.tokens:
            end = min(begin + step, sample.tokens)
            began = self._clock()
            model(mx.array(sample.ids[begin:end])[None], cache=fresh)
            mx.eval(mlx_cache.live_arrays(fresh))
            took = max(1e-6, self._clock() - began)
            begin, step = end, max(1, min(LONGEST_STEP, int((end - begin) * SLICE_S / took), 2 * step))
            yield

    def _followed(self, model: Any, fresh: list[Any], sample: _Sample, into: Divergence) -> Iterator[None]:
        """What the model says next, after the rows as computed and as restored."""
        layout, n = sample.restored.layout, sample.tokens
        arrays = {key: np.ascontiguousarray(array[:, :, :n]) for key, array in sample.restored.arrays.items()}
        back = mlx_cache.build(layout, n, arrays, {})
        mx.eval(mlx_cache.live_arrays(back))
        yield
        for place in range(n, n + sample.following):
            token = mx.array(sample.ids[place : place + 1])[None]
            said = [model(token, cache=cache)[0].astype(mx.float32) for cache in (fresh, back)]
            mx.eval(said)
            into.add(np.array(said[0]), np.array(said[1]), sample.ids[place + 1 : place + 2])
            yield


def _taken(handle: ModelHandle, ids: Ids, media: Sequence[Media], answer: Restored) -> _Sample | None:
    """The sample, None for a prompt that is too short, too large, begins with media, or has nothing to compare."""
    rows = answer.layout.having("rows")
    specs = [spec for layer in rows for spec in answer.layout.layers[layer].arrays]
    tokens = min(answer.position, SAMPLED_TOKENS, len(ids) - FOLLOWING_TOKENS - 1)
    held = sum(array.nbytes for array in answer.arrays.values())
    if not specs or any(spec.dtype not in _FLOATS for spec in specs) or tokens < LEAST_TOKENS or held > MOST_HELD_BYTES:
        return None
    if any(each.start <= tokens + FOLLOWING_TOKENS for each in media):
        return None
    return _Sample(handle, ids, answer, tokens, FOLLOWING_TOKENS)
