"""Why a restored layer below its codec's floor is a suspect only: what bfloat16 does to SmolLM2 without any codec."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tierkv.codec.registry import codec_named, floor_db
from tierkv.quality.coded import through
from tierkv.state import mlx_cache
from tierkv.state.fidelity import as_float32, snr_db

N, HEAD = 96, 48


@pytest.fixture(scope="module")
def bfloat16_model(smollm2_folder):
    from mlx_lm.utils import load

    model, tokenizer = load(str(smollm2_folder))[:2]
    model.set_dtype(mx.bfloat16)
    text = "The keys and values of a prompt depend on every token before them, and on the order of every sum. "
    return model, tokenizer.encode(text * 40)[:N]


def prefilled(model, ids, cache=None, begin=0):
    cache = cache or make_prompt_cache(model)
    for at in range(begin, len(ids), HEAD):
        model(mx.array(ids[at : at + HEAD])[None], cache=cache)
        mx.eval(mlx_cache.live_arrays(cache))
    return cache


def worst_db(one, other, begin=0):
    layout = mlx_cache.describe(one)
    a, b = (mlx_cache.rows(cache, layout, begin, N) for cache in (one, other))
    return min(snr_db(as_float32(a[key], "bfloat16"), as_float32(b[key], "bfloat16")) for key in a)


def test_sums_in_another_order_alone_take_deep_layers_below_the_floor(bfloat16_model, monkeypatch):
    """A relative 1e-7 is what the order of a float32 sum changes; a device's kernels for other sizes do that."""
    model, ids = bfloat16_model
    plain = prefilled(model, ids)

    def call(self, x):
        y = x.astype(mx.float32) @ self.weight.astype(mx.float32).T
        return (y * (1 + 1e-7 * mx.random.normal(y.shape))).astype(x.dtype)

    monkeypatch.setattr(nn.Linear, "__call__", call)
    mx.random.seed(0)
    assert worst_db(plain, prefilled(model, ids)) < floor_db(codec_named("int8"))


def test_what_is_computed_on_lossy_state_is_below_the_floor_though_the_codec_is_not(bfloat16_model):
    model, ids = bfloat16_model
    int8 = codec_named("int8")
    plain = prefilled(model, ids[:HEAD])
    layout = mlx_cache.describe(plain)
    coded = through(int8, mlx_cache.rows(plain, layout, 0, HEAD), layout, HEAD)
    lossy = mlx_cache.build(layout, HEAD, {k: np.ascontiguousarray(v) for k, v in coded.arrays.items()}, {})
    prefilled(model, ids, plain, HEAD)
    prefilled(model, ids, lossy, HEAD)
    rows = {key: np.ascontiguousarray(array) for key, array in mlx_cache.rows(lossy, layout, HEAD, N).items()}
    assert min(each.snr_db for each in through(int8, rows, layout, N - HEAD).quality) > floor_db(int8)
    assert worst_db(plain, lossy, HEAD) < floor_db(int8)
