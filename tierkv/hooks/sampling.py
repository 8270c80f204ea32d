"""A live sample of what restores are worth: one in so many is prefilled again while the engine has nothing to do.

Everything that touches MLX runs on the generation thread, in slices: the engine's loop asks for one when no request is
waiting and none is running, and a slice takes about ``SLICE_S``. So a request that comes meanwhile waits for one slice
at most, and nothing at all is done before the engine has been idle for ``IDLE_S``. The first ``SAMPLED_TOKENS`` rows
that came from the vaults are compared. Whatever stands before them is prefilled too, from the prompt's first token on:
the engine's own rows may have been restored themselves.
"""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tierkv.errors import UnsupportedState
from tierkv.handoff.client import HandoffClient, Media, ModelHandle, Restored
from tierkv.hooks.memory import MemoryReading, read_memory
from tierkv.hooks.prompt_tokens import Ids
from tierkv.state import mlx_cache
from tierkv.state.fidelity import Divergence, as_float32, snr_db
from tierkv.state.layout import LayerLayout, Layout
from tierkv.state.mlx_adapter import TOKEN_AXIS

log = logging.getLogger("tierkv")

IDLE_S = 1.0
SLICE_S = 0.05
FIRST_STEP = 8
LONGEST_STEP = 256
SAMPLED_TOKENS = 512
LEAST_TOKENS = 64
FOLLOWING_TOKENS = 32
# Of the memory that is free when a prompt is taken, its sample may use so much: two caches of what it prefills.
MOST_OF_FREE = 1 / 8
# A sample that requests have broken off so often makes room for another.
MOST_TRIES = 3
_FLOATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class _Sample:
    """``rows``: those of [first, tokens), as they were restored. ``layout``: of the state that they came with."""

    handle: ModelHandle
    ids: Ids
    layout: Layout
    codec: str
    rows: Mapping[tuple[int, int], NDArray[Any]]
    first: int
    tokens: int


class Sampler:
    """``model`` gives what the engine serves now where a handle names its caches, None where it does not; ``fresh`` an
    empty cache of it (mlx-lm's unless given). Owned by the generation thread."""

    def __init__(
        self,
        client: HandoffClient,
        model: Callable[[ModelHandle], Any],
        *,
        fresh: Callable[[Any], Sequence[Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        memory: Callable[[], MemoryReading] = read_memory,
    ) -> None:
        self._client = client
        self._model = model
        self._fresh = fresh or (lambda model: importlib.import_module("mlx_lm.models.cache").make_prompt_cache(model))
        self._clock = clock
        self._memory = memory
        self._seen = 0
        self._tries = 0
        self._sample: _Sample | None = None
        self._work: Iterator[None] | None = None
        self._idle_since: float | None = None

    def restored(self, handle: ModelHandle, ids: Ids, media: Sequence[Media], answer: Restored) -> None:
        """A prompt came back: after every so many, one is kept to be compared when there is time.

        Costs nothing now, and of the one that is kept a copy of the rows to be compared.
        """
        every = int(self._client.settings.get("quality_sample", 0))
        if not every:
            self._drop()
            return
        self._seen += 1
        if self._seen < every or self._sample is not None:
            return
        self._sample = self._taken(handle, ids, media, answer)
        if self._sample is not None:
            self._seen = self._tries = 0

    @property
    def wanted(self) -> bool:
        """Whether there is something to compare."""
        return self._sample is not None

    def busy(self) -> None:
        """A request is there or running: the memory of a comparison under way is the engine's again."""
        self._idle_since = None
        if self._work is not None:
            self._work = None
            self._tries += 1
            if self._tries >= MOST_TRIES:
                self._drop()

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
            log.info("a restored prompt cannot be compared: %s", error)
            log.debug("where it failed", exc_info=True)
            self._drop()
            mx.clear_cache()

    def _drop(self) -> None:
        self._sample = self._work = None

    def _one_slice(self) -> None:
        assert self._sample is not None
        model = self._model(self._sample.handle)
        if model is None:
            self._drop()
            return
        if self._work is None:
            self._work = self._compared(model, self._sample)
        until = self._clock() + SLICE_S
        while self._clock() < until:
            if next(self._work, self) is self:
                self._drop()
                mx.clear_cache()
                return

    def _taken(self, handle: ModelHandle, ids: Ids, media: Sequence[Media], answer: Restored) -> _Sample | None:
        """The sample, None for a prompt that is too short, too large, begins with media, or has nothing to compare."""
        layout, first = answer.layout, answer.first_row
        specs = [spec for layer in layout.having("rows") for spec in layout.layers[layer].arrays]
        tokens = min(answer.position, first + SAMPLED_TOKENS, len(ids) - FOLLOWING_TOKENS - 1)
        if not specs or any(spec.dtype not in _FLOATS for spec in specs) or tokens - first < LEAST_TOKENS:
            return None
        if any(each.start <= tokens + FOLLOWING_TOKENS for each in media):
            return None
        rows = {key: array for key, array in answer.arrays.items() if layout.layers[key[0]].kind == "rows"}
        whole_bytes = sum(array.nbytes for key, array in answer.arrays.items() if key not in rows)
        row_bytes = sum(array.nbytes // array.shape[TOKEN_AXIS] for array in rows.values())
        if 2 * (tokens * row_bytes + whole_bytes) > MOST_OF_FREE * self._memory().free_bytes:
            return None
        kept = {key: np.ascontiguousarray(array[..., : tokens - first, :]) for key, array in rows.items()}
        return _Sample(handle, ids, layout, answer.codec, kept, first, tokens)

    # --- the comparison, a step at a time ---------------------------------------------------------

    def _compared(self, model: Any, sample: _Sample) -> Iterator[None]:
        fresh = list(self._fresh(model))
        yield from self._prefilled(model, fresh, sample)
        layout = mlx_cache.describe(fresh)
        n = len(layout.layers)  # those of a draft model follow
        if [_constants(each) for each in layout.layers] != [_constants(each) for each in sample.layout.layers[:n]]:
            raise UnsupportedState("foreign_layout", "the model's cache is another than the restored one")
        exact = mlx_cache.rows(fresh, layout, sample.first, sample.tokens)
        yield
        layers: list[list[object]] = []
        for key in sorted(exact.keys() & sample.rows.keys()):
            dtype = layout.layers[key[0]].arrays[key[1]].dtype
            decibels = snr_db(as_float32(exact[key], dtype), as_float32(sample.rows[key], dtype))
            layers.append([*key, round(decibels, 2) if math.isfinite(decibels) else None])
            yield
        del exact  # what it shares would be copied when the cache grows
        divergence = Divergence()
        if layout == sample.layout and all(each.kind == "rows" for each in layout.layers):
            yield from self._followed(model, fresh, sample, divergence)
        self._client.sampled(
            sample.handle, codec=sample.codec, tokens=sample.tokens - sample.first, layers=layers,
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
        back = mlx_cache.build(sample.layout, sample.tokens, sample.rows, {}, first_row=sample.first, local=fresh)
        for array in mlx_cache.live_arrays(back):
            mx.eval(array)
            yield
        for place in range(sample.tokens, sample.tokens + FOLLOWING_TOKENS):
            token = mx.array(sample.ids[place : place + 1])[None]
            said = [model(token, cache=cache)[0].astype(mx.float32) for cache in (fresh, back)]
            mx.eval(said)
            into.add(np.array(said[0]), np.array(said[1]), sample.ids[place + 1 : place + 2])
            yield


def _constants(layer: LayerLayout) -> tuple[object, ...]:
    """What does not change as a cache grows: a chunk's rows become a window once it has dropped some."""
    return layer.class_name, layer.slot, layer.params
