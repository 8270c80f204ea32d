"""Models of mlx-lm whose caches are lists of caches, chunks, mixtures of all kinds, or not there at all."""

import importlib
import inspect
import json
import re
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models import cache as classes
from mlx_lm.models.cache import make_prompt_cache
from test_mlx_cache import assert_goes_on_alike, continued, filled, received, refusal, shipped
from tiny_mlx import CONFIGS, SINCE_0_32, prompt, tiny_model

from tierkv.errors import UnsupportedState
from tierkv.state import mlx_cache, mlx_leaves
from tierkv.state.layout import ArraySpec, LayerLayout, Layout
from tierkv.state.mlx_layers import CACHE_MODULE, adapter_of

TABLE = Path(__file__).resolve().parents[2] / "docs" / "cache-classes.md"
OLDER = mlx_lm.__version__.startswith("0.31.")
NAMES = [name for name in CONFIGS if not (OLDER and name in SINCE_0_32)]
LISTS = ["deepseek_v32", "falcon_h1", "baichuan_m1", "longcat_flash_ngram", *([] if OLDER else ["minimax_m3_vl"])]
HYBRIDS = ["recurrent_gemma", *([] if OLDER else ["gear"])]


def kinds(cache):
    return {layer.kind for layer in mlx_cache.describe(cache).layers}


# --- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "n"), [*((name, n) for name in LISTS for n in (1, 257)), ("baichuan_m1", 600)])
def test_lists_of_caches_go_on_bit_for_bit(name, n):
    model = tiny_model(name)
    cache = filled(model, n, decoded=min(3, n - 1))
    assert mlx_cache.position(cache) == n
    assert any(layer.slot.endswith(".0") for layer in mlx_cache.describe(cache).layers)
    assert_goes_on_alike(model, cache)


@pytest.mark.parametrize("n", [1, 257, 600])
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_of_windows_and_states_go_on_bit_for_bit(name, n):
    model = tiny_model(name)
    cache = filled(model, n, decoded=min(3, n - 1))
    assert kinds(cache) == ({"window", "state", "rows"} if name == "gear" else {"window", "state"})
    assert_goes_on_alike(model, cache)


@pytest.mark.parametrize("name", ["mamba", "falcon_h1", "llama4"])
def test_bfloat16_keeps_its_bits_in_every_mixture(name):
    model = tiny_model(name, mx.bfloat16)
    assert_goes_on_alike(model, filled(model, 300))


@pytest.mark.parametrize(
    ("n", "step", "kind"),
    [(1, 200, "rows"), (256, 256, "rows"), (500, 512, "rows"), (301, 200, "rows"), (520, 200, "window"),
     (700, 64, "window")],
)  # fmt: skip
def test_chunks_are_rows_until_something_is_dropped_and_whole_from_then_on(n, step, kind):
    model = tiny_model("llama4")
    cache = filled(model, n, step=step)
    dropped = cache[0].start_position
    layout = mlx_cache.describe(cache)
    assert layout.layers[3].kind == "rows"
    assert layout.layers[0].kind == ("window" if dropped else "rows")
    if not OLDER:
        assert layout.layers[0].kind == kind
    assert_goes_on_alike(model, cache)


def test_a_chunk_in_a_long_answer_drops_rows_as_one_that_stayed():
    """Two more chunks are computed one token at a time after the trip."""
    model = tiny_model("llama4")
    cache = filled(model, 520)
    back = received(shipped(cache))
    np.testing.assert_array_equal(
        continued(model, back, steps=260).view(np.uint32), continued(model, cache, steps=260).view(np.uint32)
    )


def test_concatenated_rows_go_on_bit_for_bit():
    model = tiny_model("llama")
    cache = [classes.ConcatenateKVCache() for _ in model.layers]
    for start in (0, 200):
        model(prompt(300)[:, start : start + 200], cache=cache)
    assert mlx_cache.describe(cache).layers[0].class_name == "ConcatenateKVCache"
    assert_goes_on_alike(model, cache)


def test_concatenated_rows_that_were_trimmed_away_do_not_travel():
    """mlx-lm leaves them where they are and goes on behind them: what goes on right is the state that was never so."""
    model = tiny_model("llama")
    cache = [classes.ConcatenateKVCache() for _ in model.layers]
    model(prompt(300), cache=cache)
    for layer in cache:
        layer.trim(40)
    back = received(shipped(cache))
    short = make_prompt_cache(model)
    model(prompt(300)[:, :260], cache=short)
    np.testing.assert_allclose(continued(model, back), continued(model, short), atol=1e-5)


def test_a_list_of_one_and_an_empty_part_keep_their_places():
    model = tiny_model("deepseek_v32")
    cache = [*filled(model, 30), classes.CacheList(classes.KVCache()), classes.KVCache()]
    back = received(shipped(cache))
    assert [type(layer).__name__ for layer in back] == ["CacheList"] * 3 + ["KVCache"]
    assert [len(layer.caches) for layer in back[:3]] == [2, 2, 1]
    assert back[2][0].keys is None
    assert mlx_cache.describe(back) == mlx_cache.describe(cache)


def test_lists_in_lists_keep_their_places():
    inner = filled(tiny_model("deepseek_v32"), 30)
    cache = [classes.CacheList(classes.KVCache(), classes.CacheList(*inner), classes.KVCache())]
    layout = mlx_cache.describe(cache)
    assert [layer.slot for layer in layout.layers] == ["0.0", "0.1.0.0", "0.1.0.1", "0.1.1.0", "0.1.1.1", "0.2"]
    assert mlx_cache.describe(received(shipped(cache))) == layout


@pytest.mark.parametrize("name", ["llama", "mamba", "gemma3_text"])
def test_layers_without_a_cache_keep_their_places(name):
    cache = filled(tiny_model(name), 300)
    with_holes = [None, cache[0], None, *cache[1:], None]
    back = received(shipped(with_holes))
    assert [layer is None for layer in back] == [layer is None for layer in with_holes]
    assert mlx_cache.position(back) == mlx_cache.position(cache)
    assert kinds(back) == kinds(cache)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "mamba"])
def test_nothing_computed_is_nothing_carried(name):
    fresh = make_prompt_cache(tiny_model(name))
    assert mlx_cache.live_arrays(fresh) == []
    assert all(spec.dtype == "none" for layer in mlx_cache.describe(fresh).layers for spec in layer.arrays)
    assert received(shipped(fresh)) is not None


def test_a_ring_that_never_wrapped_carries_only_its_rows():
    model = tiny_model("gemma3_text")
    cache = filled(model, 100, decoded=30)
    assert cache[0].keys.shape[2] > 100
    assert shipped(cache)[2][0, 0][2] == (1, 2, 100, 16)


def test_a_plain_cache_becomes_a_quantised_one_in_mid_prompt():
    """mlx-lm's own switch: the rows before it were computed from plain rows, those after it from quantised ones."""
    from mlx_lm.generate import maybe_quantize_kv_cache

    model = tiny_model("quantisable")
    cache, seen = make_prompt_cache(model), []
    for start in range(0, 400, 100):
        model(prompt(400)[:, start : start + 100], cache=cache)
        maybe_quantize_kv_cache(cache, quantized_kv_start=200, kv_group_size=32, kv_bits=8)
        mx.eval([layer.state for layer in cache])
        seen.append(type(cache[0]).__name__)
        assert_goes_on_alike(model, cache)
    assert seen == ["KVCache", "QuantizedKVCache", "QuantizedKVCache", "QuantizedKVCache"]


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_cache_already_shows_the_signature_of_a_full_one(name):
    model = tiny_model(name)
    assert mlx_cache.expected_signature(make_prompt_cache(model)) == mlx_cache.describe(filled(model, 100)).signature()


# --- cuts ---------------------------------------------------------------------------------------


def test_a_cut_shares_the_rows_and_leaves_the_layer_alone():
    model = tiny_model("deepseek_v32")
    cache = filled(model, 300)
    parts = [mlx_leaves.cut(layer, 299) for layer in cache]
    assert mlx_cache.position(parts) == 299
    assert mlx_cache.position(cache) == 300
    assert parts[0][0].keys is cache[0][0].keys
    back = received(shipped(parts))
    np.testing.assert_array_equal(back[1][1].keys, cache[1][1].keys[:, :, :299])
    with pytest.raises(UnsupportedState):
        mlx_leaves.cut(cache[0], 301)


@pytest.mark.parametrize("name", ["mamba", "gemma3_text", "falcon_h1"])
def test_what_is_not_rows_is_not_cut(name):
    cache = filled(tiny_model(name), 300)
    assert refusal(mlx_leaves.cut, cache[0], 299) == "bad_range"


def test_what_mlx_lm_cut_is_checked_before_it_is_used():
    model = tiny_model("llama4")
    cache = filled(model, 700)
    for layer in cache:
        layer.trim(100)
    mlx_cache.settle(cache, 600)  # rows from 344 on are there, the third chunk begins at 512
    for layer in cache:
        layer.trim(100)
    assert refusal(mlx_cache.settle, cache, 500) == "rows_dropped"
    short = filled(model, 520)
    for layer in short:
        layer.trim(5)
    mlx_cache.settle(short, 515)
    assert refusal(mlx_cache.settle, short, 516) == "position_mismatch"
    mlx_cache.settle(short, 516, lag=1)
    assert refusal(mlx_cache.describe, cache) == "rows_dropped"


def test_rows_behind_the_offset_of_concatenated_rows_are_cut_off():
    model = tiny_model("llama")
    cache = [classes.ConcatenateKVCache() for _ in model.layers]
    model(prompt(300), cache=cache)
    for layer in cache:
        layer.trim(40)
    mlx_cache.settle(cache, 260)
    assert cache[0].keys.shape[2] == cache[0].values.shape[2] == 260


# --- what is refused ----------------------------------------------------------------------------


def test_lists_of_what_is_not_carried_are_refused_with_its_reason():
    batch = classes.BatchKVCache([0, 1])
    assert refusal(mlx_cache.describe, [classes.CacheList(classes.KVCache(), batch)]) == "batched_cache"
    assert refusal(mlx_cache.describe, [classes.CacheList()]) == "bad_cache_list"
    deep = classes.KVCache()
    for _ in range(5):
        deep = classes.CacheList(deep)
    assert refusal(mlx_cache.describe, [deep]) == "bad_cache_list"
    assert refusal(mlx_cache.describe, []) == "no_state"
    assert refusal(mlx_cache.describe, [None, None]) == "no_state"

    class CacheList(classes.CacheList):
        pass

    assert refusal(mlx_cache.describe, [CacheList(classes.KVCache())]) == "unsupported_class"


SPEC = (ArraySpec("keys", "none", ()), ArraySpec("values", "none", ()))


@pytest.mark.parametrize(
    "slots",
    [("1",), ("0", "0"), ("0", "0.1"), ("0.0", "0"), ("0.1",), ("0.0", "1.1"), ("0.0", "0.0"), ("",), ("x",),
     ("0..1",), ("-1",), ("0.0.0.0.0",), ("0", "2")],
)  # fmt: skip
def test_places_that_no_cache_has_are_not_built(slots):
    layout = Layout(tuple(LayerLayout("rows", "KVCache", SPEC, (), slot) for slot in slots))
    assert refusal(mlx_cache.build, layout, 0, {}, {}) == "foreign_layout"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("window", "KVCache"), ("rows", "ArraysCache"), ("state", "RotatingKVCache"), ("state", "ChunkedKVCache"),
     ("rows", "BatchKVCache"), ("rows", "CacheList"), ("rows", "LRUPromptCache"), ("rows", "Any")],
)  # fmt: skip
def test_a_class_in_the_wrong_part_is_not_built(kind, name):
    layout = Layout((LayerLayout(kind, name, (), (), "0"),))
    assert refusal(mlx_cache.build, layout, 0, {}, {}) == "unsupported_class"


@pytest.mark.parametrize(
    "change",
    [{"start_position": 0}, {"start_position": 701}, {"offset": 699}, {"room": 3}, {"room": 1 << 40}, {"room": 1.0},
     {"offset": True}],
)  # fmt: skip
def test_a_chunk_that_cannot_stand_there_is_not_built(change):
    layout, at, packed, scalars = shipped(filled(tiny_model("llama4"), 700))
    numbers = json.loads(scalars)
    numbers["0"] |= change
    with pytest.raises(UnsupportedState):
        received((layout, at, packed, json.dumps(numbers)))


# --- the table in the docs ----------------------------------------------------------------------


def cache_classes():
    """Every class of the installed mlx_lm.models.cache that can stand in a cache's list."""
    found = [cls for _, cls in inspect.getmembers(classes, inspect.isclass) if cls.__module__ == CACHE_MODULE]
    return {cls.__name__ for cls in found if issubclass(cls, classes._BaseCache) and cls is not classes._BaseCache}


def documented():
    """Class -> (how it is carried, reason) of the table."""
    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([^|]+)\|.*\| ([^|]*)\|$", TABLE.read_text(), re.MULTILINE)
    return {name: (how.strip(), reason.strip().strip("`")) for name, how, reason in rows}


def test_every_cache_class_of_the_installed_mlx_lm_is_in_the_table():
    assert cache_classes() <= documented().keys()


FRESH = {
    "RotatingKVCache": {"max_size": 8}, "ChunkedKVCache": {"chunk_size": 8}, "ArraysCache": {"size": 2},
    "BatchKVCache": {"left_padding": [0]}, "BatchRotatingKVCache": {"max_size": 8, "left_padding": [0]},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(cache_classes() - {"CacheList"}))
def test_the_table_says_what_is_done(name):
    how, reason = documented()[name]
    cache = getattr(classes, name)(**FRESH.get(name, {}))
    if how.startswith("refused"):
        assert refusal(adapter_of, cache) == reason
    else:
        assert how.split()[0].rstrip(",;") == adapter_of(cache).kind


def test_classes_that_models_bring_themselves_are_in_the_table_too():
    folder = Path(classes.__file__).parent
    own = {
        f"{path.stem}.{name}"
        for path in folder.glob("*.py")
        if path.stem != "cache"
        for name in re.findall(r"^class (\w*Cache)\b", path.read_text(), re.MULTILINE)
    }
    text = TABLE.read_text()
    assert [name for name in own if name not in text] == []
    for name in own - {"deepseek_v4.DeepseekV4Cache"}:
        module, cls = name.split(".")
        made = getattr(importlib.import_module(f"mlx_lm.models.{module}"), cls)
        assert refusal(adapter_of, object.__new__(made)) == "unsupported_class"
