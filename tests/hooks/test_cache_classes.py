"""Every mixture of cache classes through mlx-lm's prompt cache, a real agent and real vaults, and on from there.

Codec ``lossless``. The state that came back and the state that never left compute the same tokens in the same shapes
(a BLAS rounds the same rows differently in batches of another size), so every logit has the same bits.
"""

import functools
import itertools
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models import cache as classes
from mlx_lm.models.cache import make_prompt_cache
from test_prompt_cache import Engine, wait_for
from tiny_mlx import SINCE_0_32, prompt, tiny_model

from tierkv.hooks.demote import Demoter
from tierkv.state import mlx_cache

sys.path.append(str(Path(__file__).resolve().parents[1] / "agents"))

OLDER = mlx_lm.__version__.startswith("0.31.")
texts = itertools.count(100)


@pytest.fixture(scope="module")
def vaults():
    """In a short path: a Unix socket's name has at most 107 bytes."""
    from agent_processes import Cluster

    with tempfile.TemporaryDirectory(prefix="tierkv-") as home:
        running = Cluster(Path(home))
        running.agent(running.vault("kv-vault"), running.vault("ssm-vault"), min_store_tokens=16, min_restore_tokens=16)
        yield running
        running.close()


@pytest.fixture
def engine_of(vaults, model_folders):
    made = []

    def make(name, model=None, **named):
        engine = Engine(vaults.socket, model_folders(name), model or tiny_model(name), size=1, **named)
        engine.tiers.demoter = Demoter(engine.client, engine.mover, engine.book, engine.counters, keys_are_counted=True)
        # What counts here is what comes back: on a busy machine an answer may take longer than an engine waits for it.
        engine.client.offer = functools.partial(engine.client.offer, budget_s=10.0)
        made.append(engine)
        assert engine.client.wait_available(60)
        wait_for(lambda: known(engine))
        return engine

    yield make
    for engine in made:
        engine.close()


def known(engine):
    engine.client.report_hot({})
    return all(handle.state == "ready" for handle in engine.client._models)


def computed(model, tokens, step=200, after=lambda cache: None):
    """A cache of ``tokens``, computed in steps and the last three one by one."""
    cache, end = make_prompt_cache(model), max(0, len(tokens) - 3)
    cuts = [*range(0, end, step), *range(end, len(tokens) + 1)]
    for start, stop in itertools.pairwise(cuts):
        model(mx.array([tokens[start:stop]]), cache=cache)
        after(cache)
        mx.eval(mlx_cache.live_arrays(cache))
    return cache


VOCABULARY = 97
"""Of every tiny model; a pair's logits are those of both, one behind the other."""


def continued(model, cache, tokens, steps=32):
    """Bits of the logits of a prefill of ``tokens`` and of greedy steps after it."""
    seen, inputs = [], mx.array([list(tokens)])
    for _ in range(steps):
        logits = model(inputs, cache=cache)[:, -1:, :]
        mx.eval(logits, mlx_cache.live_arrays(cache))
        seen.append(logits)
        inputs = mx.argmax(logits[..., :VOCABULARY], axis=-1)
    return np.array(mx.concatenate(seen, axis=1).astype(mx.float32)).view(np.uint32)


def text(n):
    """n token ids that no other test has."""
    return prompt(n, next(texts)).tolist()[0]


def branch(tokens, position, more):
    """The first ``position`` tokens, and ``more`` of another text that goes on in another way."""
    other = text(more)
    if tokens[position : position + 1] == other[:1]:
        other[0] = (other[0] + 1) % VOCABULARY
    return [*tokens[:position], *other]


def stored(engine, tokens, cache, **named):
    """The entry is in the vaults and no longer in the engine."""
    engine.insert(tokens, cache, **named)
    other = text(40)
    engine.insert(other, computed(engine.model, other))
    assert len(engine.cache) == 1
    assert engine.mover.drain(60, stored=True)


def assert_comes_back(engine, tokens, position, more=17):
    asked = branch(tokens, position, more)
    cache, have = engine.cache.fetch_nearest_cache(engine.key, asked)
    assert len(asked) - len(have) == position, (engine.counters.not_restored, engine.counters.refusals)
    assert engine.counters.hits == {"restored": 1}
    kept = engine.kept[tuple(tokens)]
    assert mlx_cache.describe(cache) == mlx_cache.describe(kept)
    np.testing.assert_array_equal(
        continued(engine.model, cache, asked[position:]), continued(engine.model, kept, asked[position:])
    )


CASES = [
    ("llama", 300), ("gemma3_text", 200), ("gemma3_text", 256), ("gemma3_text", 600), ("qwen3_next", 300),
    ("mamba2", 300), ("mamba", 257), ("recurrent_gemma", 600), ("gear", 300), ("gear", 600), ("deepseek_v32", 300),
    ("minimax_m3_vl", 300), ("falcon_h1", 300), ("baichuan_m1", 200), ("baichuan_m1", 600),
    ("longcat_flash_ngram", 300), ("llama4", 250), ("llama4", 258), ("llama4", 301),
    *([] if OLDER else [("llama4", 700)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "n"), [case for case in CASES if not (OLDER and case[0] in SINCE_0_32)])
def test_every_mixture_comes_back_bit_for_bit(engine_of, name, n):
    engine = engine_of(name)
    tokens = text(n)
    cache = computed(engine.model, tokens)
    if name == "llama4":
        assert mlx_cache.describe(cache).layers[0].kind == ("rows" if n == 250 else "window")
    stored(engine, tokens, cache)
    assert_comes_back(engine, tokens, n)


def test_concatenated_rows_come_back_bit_for_bit(engine_of):
    model = tiny_model("llama")
    model.make_cache = lambda: [classes.ConcatenateKVCache() for _ in model.layers]
    engine = engine_of("llama", model)
    tokens = text(300)
    stored(engine, tokens, computed(model, tokens))
    assert_comes_back(engine, tokens, 300)


def test_rows_of_a_chunked_model_serve_other_prompts_until_something_is_dropped(engine_of):
    """A prompt that shares the first 230 tokens: below the chunk's size rows are cut as those of any other model."""
    engine = engine_of("llama4")
    tokens = text(250)
    stored(engine, tokens, computed(engine.model, tokens))
    cache, rest = engine.cache.fetch_nearest_cache(engine.key, branch(tokens, 230, 400))
    assert len(rest) == 400
    assert {layer.kind for layer in mlx_cache.describe(cache).layers} == {"rows"}


def quantising(start):
    return SimpleNamespace(kv_bits=8, kv_group_size=32, quantized_kv_start=start)


def switched(cache):
    maybe_quantize_kv_cache(cache, quantized_kv_start=200, kv_group_size=32, kv_bits=8)


@pytest.mark.parametrize(("n", "kind"), [(150, "KVCache"), (205, "QuantizedKVCache"), (450, "QuantizedKVCache")])
def test_a_cache_that_becomes_quantised_comes_back_in_the_form_it_had(engine_of, n, kind):
    engine = engine_of("quantisable", args=quantising(200))
    tokens = text(n)
    cache = computed(engine.model, tokens, after=switched)
    assert type(cache[0]).__name__ == kind
    stored(engine, tokens, cache)
    assert_comes_back(engine, tokens, n)


def test_quantised_rows_do_not_stand_in_for_plain_ones(engine_of):
    """A clean run of the second prompt has plain rows up to 200: what shares less with the first is not restored."""
    engine = engine_of("quantisable", args=quantising(200))
    tokens = text(450)
    stored(engine, tokens, computed(engine.model, tokens, after=switched))
    asked = branch(tokens, 150, 300)
    assert engine.cache.fetch_nearest_cache(engine.key, asked) == (None, asked)
    cache, rest = engine.cache.fetch_nearest_cache(engine.key, branch(tokens, 260, 100))
    assert (len(rest), type(cache[0]).__name__) == (100, "QuantizedKVCache")


def test_plain_rows_before_the_switch_serve_a_longer_prompt(engine_of):
    engine = engine_of("quantisable", args=quantising(200))
    tokens = text(150)
    stored(engine, tokens, computed(engine.model, tokens, after=switched))
    cache, rest = engine.cache.fetch_nearest_cache(engine.key, [*tokens, *text(300)])
    assert (len(rest), type(cache[0]).__name__) == (300, "KVCache")


class Pair:
    """A model with a draft model: one list of caches, as mlx-lm's server keeps them."""

    def __init__(self, main, draft):
        self.main, self.draft = main, draft

    def make_cache(self):
        return [*make_prompt_cache(self.main), *make_prompt_cache(self.draft)]

    def __call__(self, tokens, cache):
        n = len(self.main.layers)
        drafted = self.draft(tokens, cache=cache[n:])
        return mx.concatenate([self.main(tokens, cache=cache[:n]), drafted], axis=-1)


@pytest.fixture
def pair(engine_of, model_folders):
    folders = str(model_folders("llama")), None, str(model_folders("one_head"))
    return engine_of("llama", Pair(tiny_model("llama"), tiny_model("one_head")), key=folders)


def test_a_draft_models_cache_comes_back_with_the_models_own(pair):
    tokens = text(300)
    stored(pair, tokens, computed(pair.model, tokens))
    assert len(mlx_cache.describe(pair.kept[tuple(tokens)]).layers) == 4
    assert_comes_back(pair, tokens, 300)


def test_a_draft_model_that_is_a_token_behind_is_stored_where_both_are(pair):
    tokens = text(300)
    cache = computed(pair.model, tokens)
    for layer in cache[2:]:
        layer.trim(1)
    stored(pair, tokens, cache)
    pair.kept[tuple(tokens)] = computed(pair.model, tokens[:299])
    for layer in cache[:2]:
        layer.trim(1)
    pair.kept[tuple(tokens)] = cache
    assert_comes_back(pair, tokens, 299)


def test_another_draft_model_is_another_model(pair, engine_of, model_folders):
    tokens = text(300)
    stored(pair, tokens, computed(pair.model, tokens))
    folders = str(model_folders("llama")), None, str(model_folders("llama"))
    other = engine_of("llama", Pair(tiny_model("llama"), tiny_model("one_head")), key=folders)
    assert other.cache.fetch_nearest_cache(other.key, [*tokens, 1, 2]) == (None, [*tokens, 1, 2])


def test_a_draft_model_that_cannot_be_cut_is_refused_where_it_is_behind(engine_of, model_folders):
    key = str(model_folders("llama")), None, str(model_folders("gemma3_text"))
    engine = engine_of("llama", Pair(tiny_model("llama"), tiny_model("gemma3_text")), key=key)
    tokens = text(100)
    cache = computed(engine.model, tokens)
    for layer in cache[2:]:
        layer.trim(1)
    engine.insert(tokens, cache)
    assert engine.counters.refusals == {"bad_range": 1}


@pytest.mark.skipif(not OLDER, reason="mlx-lm 0.32 counts rows, not the buffer's length")
def test_a_chunk_whose_own_rows_older_versions_dropped_is_refused(engine_of):
    engine = engine_of("llama4")
    tokens = text(700)
    engine.insert(tokens, computed(engine.model, tokens))
    assert engine.counters.refusals == {"rows_dropped": 1}


# --- what mlx-lm itself gets wrong --------------------------------------------------------------


def test_a_chunk_that_mlx_lm_cut_too_far_is_computed_again(engine_of):
    """mlx-lm calls every chunk trimmable; the rows before it are gone, and it would answer without them."""
    engine = engine_of("llama4")
    tokens = text(700)
    engine.insert(tokens, computed(engine.model, tokens))
    asked = branch(tokens, 500, 5)
    assert engine.cache.fetch_nearest_cache(engine.key, asked)[0] is None
    assert any(reason.startswith("engine_") for reason in engine.counters.refusals)
    if OLDER:
        return
    assert engine.counters.refusals == {"engine_rows_dropped": 1}
    cache, rest = engine.cache.fetch_nearest_cache(engine.key, branch(tokens, 690, 5))
    assert (len(rest), mlx_cache.position(cache)) == (5, 690)


def test_a_state_that_does_not_stand_where_its_key_says_is_not_used(engine_of):
    """As mlx-lm leaves it where kv_bits and a draft model come together: the list holds the caches from before."""
    engine = engine_of("llama")
    tokens = text(300)
    engine.insert(tokens, computed(engine.model, tokens[:250]))
    assert engine.counters.refusals == {"position_mismatch": 1}
    assert engine.cache.fetch_nearest_cache(engine.key, [*tokens, 1, 2])[0] is None
    assert engine.counters.refusals == {"position_mismatch": 1, "engine_position_mismatch": 1}


# --- what is refused is counted where people look -------------------------------------------------


def test_refusals_are_counted_in_the_agents_status(vaults, engine_of):
    engine = engine_of("llama")
    tokens = text(300)
    engine.insert(tokens, [classes.BatchKVCache([0, 0])])
    assert engine.counters.refusals == {"batched_cache": 1}
    agent = next(process for process in vaults.processes if process.kind == "inference")
    before = agent.tier("hot").refusals.get("batched_cache", 0)
    for _ in range(2):
        engine.client.report_hot(engine.counters.report())
    engine.counters.refused("batched_cache")
    engine.client.report_hot(engine.counters.report())
    wait_for(lambda: agent.tier("hot").refusals.get("batched_cache", 0) == before + 2)
