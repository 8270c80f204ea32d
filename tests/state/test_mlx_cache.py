"""Every cache class: out, as bytes, back, go on: bit for bit what a cache that never left gives.

Runs as part of the suite with the installed mlx-lm, and once more in a process with the older protocol (see
test_mlx_protocols).
"""

import copy
import json
import os

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_cache_module
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from tiny_mlx import prompt, tiny_model

from tierkv.errors import UnsupportedState
from tierkv.state import mlx_cache
from tierkv.state.layout import Layout
from tierkv.state.mlx_arrays import to_mx

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def test_this_is_the_mlx_lm_that_was_asked_for():
    assert mlx_lm.__version__.startswith(os.environ.get("TIERKV_TEST_MLX_LM", "0."))


# --- a trip through bytes -----------------------------------------------------------------------


def to_bytes(arrays):
    return {key: (a.tobytes(), a.dtype.str, a.shape) for key, a in arrays.items()}


def from_bytes(packed):
    return {key: np.frombuffer(data, dtype).reshape(shape) for key, (data, dtype, shape) in packed.items()}


def shipped(cache, first_row=0):
    """Everything of ``cache`` but rows before ``first_row``, as plain bytes and JSON."""
    layout = mlx_cache.describe(cache)
    at = mlx_cache.position(cache)
    rows = mlx_cache.rows(cache, layout, first_row, at or 0) if layout.having("rows") else {}
    whole, scalars = mlx_cache.checkpoint(cache, layout, ("window", "state"))
    return layout.to_json(), at, to_bytes(rows | whole), json.dumps(scalars)


def received(parcel, first_row=0, local=None):
    layout, at, packed, scalars = parcel
    arrays = from_bytes(packed)
    numbers = {int(layer): said for layer, said in json.loads(scalars).items()}
    return mlx_cache.build(Layout.from_json(layout), at or 0, arrays, numbers, first_row=first_row, local=local)


def continued(model, cache, more=17, steps=32):
    """Logits of a prefill of ``more`` tokens and of ``steps`` greedy steps after it, as float32."""
    seen = []
    tokens = prompt(more, seed=5)
    for _ in range(steps + 1):
        logits = model(tokens, cache=cache)[:, -1:, :]
        mx.eval(logits, [c.state for c in cache])
        seen.append(logits)
        tokens = mx.argmax(logits, axis=-1)
    return np.array(mx.concatenate(seen, axis=1).astype(mx.float32))


def filled(model, n, decoded=0, step=200):
    """A cache that has seen n tokens: prefilled in steps of ``step``, the last ``decoded`` ones one by one."""
    cache = make_prompt_cache(model)
    tokens = prompt(n)
    cuts = [*range(0, n - decoded, step), *range(n - decoded, n)]
    for start, stop in zip(cuts, [*cuts[1:], n], strict=True):
        model(tokens[:, start:stop], cache=cache)
        mx.eval([c.state for c in cache])
    return cache


def shapes(cache):
    """Of the buffers, the room behind the rows included."""
    return [array.shape for one in cache for array in (getattr(one, "keys", None),) if isinstance(array, mx.array)]


def assert_goes_on_alike(model, cache, **trip):
    stayed = copy.deepcopy(cache)
    back = received(shipped(cache, trip.get("first_row", 0)), **trip)
    if "local" not in trip:
        assert shipped(back, trip.get("first_row", 0)) == shipped(stayed, trip.get("first_row", 0))
    assert mlx_cache.position(back) == mlx_cache.position(stayed)
    # mlx-lm 0.31 leaves room behind rows by how it came to them, and a BLAS rounds the same rows differently where they
    # lie otherwise in memory.
    exact = not mlx_lm.__version__.startswith("0.31.") or shapes(back) == shapes(stayed)
    expected = continued(model, stayed)
    assert np.isfinite(expected).all()
    if exact:
        np.testing.assert_array_equal(continued(model, back).view(np.uint32), expected.view(np.uint32))
    else:
        np.testing.assert_allclose(continued(model, back), expected, rtol=0, atol=1e-5)


def every(*cases):
    """Each case in float32 and bfloat16, the last one in float16 too."""
    made = [(case, dtype) for case in cases for dtype in ("float32", "bfloat16")]
    return [*made, (cases[-1], "float16")]


@pytest.mark.parametrize(("n", "dtype"), every(1, 200, 255, 256, 257, 301, 700))
def test_plain_rows_go_on_bit_for_bit(n, dtype):
    model = tiny_model("llama", DTYPES[dtype])
    cache = filled(model, n)
    layout = mlx_cache.describe(cache)
    assert {s.dtype for layer in layout.layers for s in layer.arrays} == {dtype}
    assert layout.layers[0].arrays[0].shape == (1, 2, -1, 16)
    assert_goes_on_alike(model, cache)


@pytest.mark.parametrize(
    ("case", "dtype"),
    every((1, 0), (200, 40), (255, 0), (256, 0), (256, 100), (257, 0), (301, 0), (301, 90), (700, 0), (700, 300)),
)
def test_rings_go_on_bit_for_bit_empty_full_and_wrapped(case, dtype):
    n, decoded = case
    model = tiny_model("gemma3_text", DTYPES[dtype])
    cache = filled(model, n, decoded)
    layout = mlx_cache.describe(cache)
    assert {layer.kind for layer in layout.layers} == {"window", "rows"}
    assert dict(layout.layers[0].params) == {"keep": 0, "max_size": 256}
    assert_goes_on_alike(model, cache)


@pytest.mark.parametrize(("n", "dtype"), every(1, 200, 257, 700))
def test_hybrids_go_on_bit_for_bit(n, dtype):
    model = tiny_model("qwen3_next", DTYPES[dtype])
    cache = filled(model, n, decoded=min(3, n - 1))
    layout = mlx_cache.describe(cache)
    assert [layer.kind for layer in layout.layers] == ["state", "state", "state", "rows"]
    assert_goes_on_alike(model, cache)


@pytest.mark.parametrize("n", [1, 301])
def test_pure_recurrent_state_goes_on_bit_for_bit(n):
    model = tiny_model("mamba2")
    cache = filled(model, n)
    assert mlx_cache.position(cache) is None
    assert_goes_on_alike(model, cache)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("n", "dtype"), every(1, 255, 256, 301))
def test_quantised_rows_go_on_bit_for_bit(n, dtype, bits):
    model = tiny_model("quantisable", DTYPES[dtype])
    cache = [layer.to_quantized(group_size=32, bits=bits) for layer in filled(model, n)]
    model(prompt(3, seed=2), cache=cache)
    layout = mlx_cache.describe(cache)
    assert dict(layout.layers[0].params) == {"group_size": 32, "bits": bits}
    assert [s.name for s in layout.layers[0].arrays][:3] == ["keys.w", "keys.scales", "keys.biases"]
    assert layout.layers[0].arrays[0].dtype == "uint32"
    assert layout.layers[0].arrays[1].dtype == dtype
    assert_goes_on_alike(model, cache)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_local_rows_and_fetched_rows_are_joined(name):
    model = tiny_model(name, mx.bfloat16)
    cache = filled(model, 320)
    local = make_prompt_cache(model)
    model(prompt(320)[:, :200], cache=local)
    assert_goes_on_alike(model, cache, first_row=200, local=local)


def test_rows_that_were_trimmed_away_do_not_travel():
    model = tiny_model("llama")
    cache = filled(model, 300)
    trim_prompt_cache(cache, 40)
    assert mlx_cache.position(cache) == 260
    assert shipped(cache)[2][0, 0][2] == (1, 2, 260, 16)
    assert_goes_on_alike(model, cache)


def test_a_trimmed_ring_that_never_wrapped_goes_on_alike():
    model = tiny_model("gemma3_text")
    cache = filled(model, 210)
    trim_prompt_cache(cache, 9)
    assert_goes_on_alike(model, cache)


def test_fewer_rows_than_came_can_be_taken():
    model = tiny_model("llama")
    layout, _, packed, _ = shipped(filled(model, 300))
    shorter = mlx_cache.build(Layout.from_json(layout), 123, from_bytes(packed), {})
    trimmed = filled(model, 300)
    trim_prompt_cache(trimmed, 177)
    np.testing.assert_array_equal(continued(model, shorter), continued(model, trimmed))


# --- what an empty cache says -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_an_empty_cache_already_shows_the_signature_of_a_full_one(name):
    model = tiny_model(name)
    signature = mlx_cache.expected_signature(make_prompt_cache(model))
    assert signature == mlx_cache.describe(filled(model, 300)).signature()
    assert mlx_cache.position(make_prompt_cache(model)) is None


def test_a_layer_that_holds_nothing_stays_empty():
    model = tiny_model("llama")
    cache = [*filled(model, 30), mlx_cache_module.KVCache()]
    layout, at, packed, scalars = shipped(cache)
    assert Layout.from_json(layout).layers[2].arrays[0].dtype == "none"
    back = received((layout, at, packed, scalars))
    assert back[2].keys is None
    assert back[2].offset == 0
    assert at == 30


# --- copies are copies --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("taken", [(0, 256), (0, 250), (0, 20), (200, 256)])
@pytest.mark.parametrize("name", ["llama", "one_head", "gemma3_text", "qwen3_next"])
def test_what_was_taken_does_not_change_under_the_engines_next_step(name, taken, dtype):
    """Whole buffers, most of one (shared, strided) and a small part (copied)."""
    model = tiny_model(name, dtype)
    cache = filled(model, 256)
    layout = mlx_cache.describe(cache)
    rows = mlx_cache.rows(cache, layout, *taken)
    whole, _ = mlx_cache.checkpoint(cache, layout, ("window", "state"))
    views = [*rows.values(), *whole.values()]
    before = [view.copy() for view in views]
    trim_prompt_cache(cache, 20)
    continued(model, cache, steps=3)
    for layer in cache:
        if hasattr(layer, "keys"):
            layer.keys[..., :, :] = 0
            layer.values[..., 3:200, :] = 0
        else:
            for slot in layer.cache:
                slot[:] = 0
        mx.eval(layer.state)
    for view, old in zip(views, before, strict=True):
        np.testing.assert_array_equal(view, old)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_survives(dtype):
    stored = np.uint32 if dtype == "float32" else np.uint16
    bits = np.arange(1 << 16, dtype=np.uint32).astype(stored).reshape(1, 1, -1, 64)
    array = to_mx(bits if dtype == "bfloat16" else bits.view(dtype), dtype)
    cache = mlx_cache_module.KVCache()
    cache.keys, cache.values, cache.offset = array, array, 1024
    rows = mlx_cache.rows([cache], mlx_cache.describe([cache]), 0, 1024)
    np.testing.assert_array_equal(rows[0, 0].view(stored), bits)


# --- what is refused ----------------------------------------------------------------------------


def refusal(call, *args, **named):
    with pytest.raises(UnsupportedState) as caught:
        call(*args, **named)
    return caught.value.reason


def test_unknown_classes_are_refused_by_name():
    class KVCache(mlx_cache_module.KVCache):
        pass

    class ArraysCache:
        cache = ()

    assert refusal(mlx_cache.describe, [KVCache()]) == "unsupported_class"
    assert refusal(mlx_cache.describe, [ArraysCache()]) == "unsupported_class"
    assert refusal(mlx_cache.describe, [mlx_cache_module.BatchKVCache([0, 1])]) == "batched_cache"


def test_more_than_one_sequence_is_refused():
    model = tiny_model("llama")
    cache = make_prompt_cache(model)
    model(mx.zeros((2, 5), mx.int32), cache=cache)
    assert refusal(mlx_cache.describe, cache) == "batch"


def test_recurrent_state_in_mid_batch_is_refused():
    model = tiny_model("qwen3_next")
    cache = filled(model, 5)
    cache[0].lengths = mx.array([3])
    assert refusal(mlx_cache.describe, cache) == "mid_batch"
    cache[0].lengths, cache[0].left_padding = None, mx.array([1])
    assert refusal(mlx_cache.describe, cache) == "mid_batch"


def test_layers_at_different_positions_are_refused():
    model = tiny_model("llama")
    cache = filled(model, 9)
    cache[1].trim(1)
    assert refusal(mlx_cache.position, cache) == "positions_differ"


def test_an_offset_that_is_no_plain_integer_is_refused():
    cache = filled(tiny_model("llama"), 9)
    cache[0].offset = mx.array(9)
    assert refusal(mlx_cache.position, cache) == "bad_scalars"


def test_what_does_not_fit_the_layout_is_not_built():
    model = tiny_model("gemma3_text")
    layout_json, at, packed, scalars = shipped(filled(model, 300))
    layout, arrays = Layout.from_json(layout_json), from_bytes(packed)
    numbers = {int(layer): said for layer, said in json.loads(scalars).items()}
    missing = {key: array for key, array in arrays.items() if key != (1, 1)}
    assert refusal(mlx_cache.build, layout, at, missing, numbers) == "missing_array"
    assert refusal(mlx_cache.build, layout, at + 1, arrays, numbers) == "shape_mismatch"
    assert refusal(mlx_cache.build, layout, at, arrays, {}) == "bad_scalars"
    assert refusal(mlx_cache.build, layout, at, arrays, numbers | {0: {"offset": 3, "_idx": 9}}) == "bad_scalars"
    other = {key: array.astype(np.float16) for key, array in arrays.items()}
    assert refusal(mlx_cache.build, layout, at, other, numbers) == "dtype"
    narrow = arrays | {(0, 0): arrays[0, 0][..., :8]}
    assert refusal(mlx_cache.build, layout, at, narrow, numbers) == "foreign_layout"
    assert refusal(mlx_cache.build, layout, at - 1, arrays, numbers) == "positions_differ"
    assert refusal(mlx_cache.build, layout, at, arrays, numbers, first_row=5) == "missing_array"


def test_rows_that_are_not_there_are_refused():
    cache = filled(tiny_model("llama"), 20)
    layout = mlx_cache.describe(cache)
    assert refusal(mlx_cache.rows, cache, layout, 0, 21) == "bad_range"
    assert refusal(mlx_cache.rows, cache, layout, 5, 4) == "bad_range"
    assert refusal(mlx_cache.rows, cache[:1], layout, 0, 4) == "foreign_layout"
