"""Cache classes beyond rows, windows and recurrent state through EXO's prefix cache, the hook and real vaults.

What comes back is what it was, and goes on with the same bits as EXO's own entry; or it is refused, counted, and EXO
does what it does without the hook. On the stand-in, and on EXO itself if there.
"""

import exo_engine
import mlx.core as mx
import numpy as np
import pytest
import tiny_deepseek
from exo_engine import QUANTISABLE, alone, assert_reuses_as_exo, prefill, same
from mlx_lm.models.cache import CacheList, KVCache
from tiny_mlx import CONFIGS

from tierkv.state import mlx_cache

# CacheLists that EXO can cut, and those that it cannot; rows of 8 bits (qwen3); DeepSeek V4's windows with pools.
KINDS = ["deepseek_v32", "falcon_h1", "baichuan_m1", "qwen3", "deepseek_v4"]


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, 97, n).tolist()


@pytest.fixture
def settings(monkeypatch):
    """Of EXO's cache module, each time that it is imported: settings(KV_CACHE_BITS=8)."""
    plain, set_to = exo_engine.module_named, {}

    def module_named(name):
        module = plain(name)
        vars(module).update(set_to)
        return module

    monkeypatch.setattr(exo_engine, "module_named", module_named)
    return lambda **named: set_to.update(named)


@pytest.fixture
def engine(rig, settings, monkeypatch):
    """EXO with the hook, and EXO without it, that serve a model of this kind."""
    tiny_deepseek.put_in_place(monkeypatch)
    monkeypatch.setitem(CONFIGS, "qwen3", QUANTISABLE)

    def make(kind):
        if kind == "qwen3":
            settings(KV_CACHE_BITS=8, CACHE_GROUP_SIZE=32)
        ours = rig(kind)
        return ours, alone(ours.module_name, ours.model)

    return make


def is_as_exo_makes_it(ours, served):
    entry = ours.prefixes.caches[served.index]
    fresh = ours.module.make_kv_cache(ours.model)
    return mlx_cache.describe(entry).signature() == mlx_cache.expected_signature(fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_an_evicted_prompt_comes_back_as_what_it_was_and_a_longer_one_goes_on_from_it(engine, kind):
    ours, own = engine(kind)
    tokens, longer = prompt(400), [*prompt(400), *prompt(100, 1)]
    cold, hot, on = own(tokens), own(tokens), own(longer)
    assert (cold.cached, hot.cached, on.cached) == (0, 398, 398)
    assert same(ours.serve(tokens), cold)
    ours.forget()
    restored = ours.serve(tokens)
    assert (restored.cached, restored.exact) == (398, True)
    assert same(restored, hot)
    assert is_as_exo_makes_it(ours, restored)
    ours.forget()
    went_on = ours.serve(longer)
    assert went_on.cached == 398
    assert same(went_on, on)
    assert ours.tiers.counters.hits == {"none": 1, "restored": 2}
    assert (ours.tiers.counters.refusals, ours.tiers.counters.not_restored) == ({}, {"never_stored": 1})


CASES = {"shorter": prompt(300), "diverging": [*prompt(280), *prompt(150, 2)]}


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("case", CASES)
def test_other_prompts_reuse_what_exo_itself_would(engine, kind, case):
    ours, own = engine(kind)
    first, second = prompt(400), CASES[case]
    assert_reuses_as_exo(ours, own, first, second)


@pytest.mark.parametrize("evicted", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_deepseek_v4_is_restored_at_exactly_a_position_that_was_stored(engine, case, evicted):
    """EXO itself leaves these layers where they were when it cuts an entry, and computes from that."""
    ours, own = engine("deepseek_v4")
    first, second = prompt(400), CASES[case]
    # A prompt that ends where EXO has a snapshot of the longer one needs no cut.
    own(first[:258])
    right = own(second)
    assert right.cached == 256
    ours.serve(first)
    ours.stored()
    if evicted:
        ours.forget()
    restored = ours.serve(second)
    assert restored.cached == 256
    assert same(restored, right)
    assert ours.tiers.counters.refusals == {}


def test_what_exo_computes_from_a_deepseek_v4_that_it_did_not_cut_is_not_stored(engine):
    ours, own = engine("deepseek_v4")
    own(prompt(400))
    wrong = own(CASES["diverging"])
    ours.serve(prompt(400))
    ours.stored()
    offered = ours.tiers.counters.offered
    ours.tiers.client.forced["min_restore_tokens"] = 10_000
    assert same(ours.serve(CASES["diverging"]), wrong)
    assert ours.tiers.counters.refusals == {"wrong_state": 1}
    assert ours.tiers.counters.offered == offered


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next", "falcon_h1", "baichuan_m1", "deepseek_v4"])
@pytest.mark.parametrize("case", CASES)
def test_an_entry_that_agrees_longer_and_has_no_snapshot_there_is_not_in_the_way(engine, kind, case):
    """A restored entry has one snapshot, at its end; the vaults have the earlier ones, too."""
    ours, own = engine(kind)
    first, second = prompt(400), CASES[case]
    # A prompt that ends where EXO has a snapshot of the longer one needs no cut.
    own(first[:258])
    right = own(second)
    assert right.cached == 256
    ours.serve(first)
    ours.forget()
    assert ours.serve(first).cached == 398
    restored = ours.serve(second)
    assert restored.cached == 256
    assert same(restored, right)
    ours.forget()
    again = ours.serve(second)
    assert again.cached == len(second) - 2
    assert ours.tiers.counters.refusals == {}


@pytest.mark.parametrize("reached", [True, False])
@pytest.mark.parametrize("kind", ["falcon_h1", "baichuan_m1", "deepseek_v4"])
def test_a_prompt_of_which_exo_reuses_nothing_is_computed_from_nothing_and_stored(engine, kind, reached):
    """The first tokens of a chat template are those of every prompt; EXO has no snapshot so early."""
    ours, own = engine(kind)
    other = [*prompt(6), *prompt(300, 3)]
    cold, hot = own(other), own(other)
    if not reached:
        ours.tiers.client.close()
    ours.serve(prompt(400))
    served = ours.serve(other)
    assert served.cached == 0
    assert same(served, cold)
    again = ours.serve(other)
    assert again.cached == 304
    assert same(again, hot)
    if reached:
        ours.forget()
        restored = ours.serve(other)
        assert restored.cached == 304
        assert same(restored, hot)
        assert ours.tiers.counters.refusals == {}


@pytest.mark.parametrize("bits", [4, None])
def test_rows_of_another_number_of_bits_are_those_of_another_model(engine, settings, bits):
    ours, _ = engine("qwen3")
    tokens = prompt(400)
    eight = ours.serve(tokens)
    ours.stored()
    settings(KV_CACHE_BITS=bits)
    ours.restart()
    own = alone(ours.module_name, ours.model)
    cold, hot = own(tokens), own(tokens)
    served = ours.serve(tokens)
    assert served.cached == 0
    assert same(served, cold)
    assert not same(served, eight)
    assert ours.tiers.counters.not_restored == {"never_stored": 1}
    ours.forget()
    restored = ours.serve(tokens)
    assert restored.cached == 398
    assert same(restored, hot)
    settings(KV_CACHE_BITS=8)
    ours.restart()
    assert ours.serve(tokens).cached == 398


class Odd(KVCache):
    """Computes as a KVCache; nobody knows what else it keeps."""


def odd_rows(model):
    return [Odd() for _ in model.layers]


def odd_in_lists(model):
    return [CacheList(KVCache(), Odd()) for _ in model.layers]


@pytest.mark.parametrize(("kind", "made"), [("llama", odd_rows), ("deepseek_v32", odd_in_lists)])
def test_a_class_that_is_not_carried_is_refused_with_a_reason_and_left_to_exo(engine, settings, kind, made):
    settings(make_kv_cache=made)
    ours, own = engine(kind)
    for number, tokens in enumerate((prompt(300), prompt(300), [*prompt(300), *prompt(80, 1)], prompt(200, 2)), 1):
        hooked, plain = ours.serve(tokens), own(tokens)
        assert (hooked.cached, hooked.exact, hooked.index) == (plain.cached, plain.exact, plain.index)
        assert same(hooked, plain)
        assert ours.tiers.counters.refusals == {"unsupported_class": number}
    # The exact hit has nothing more to ask for.
    assert ours.tiers.counters.not_restored == {"unsupported_class": 3}
    assert ours.tiers.counters.offered == 0


def test_a_deepseek_v4_in_the_middle_of_a_batch_is_refused_and_kept_by_exo(engine):
    ours, _ = engine("deepseek_v4")
    tokens = mx.array(prompt(300), dtype=mx.int32)
    cache = ours.module.make_kv_cache(ours.model)
    snapshots = prefill(ours.module, ours.model, tokens[:-1], cache, 128)
    for snapshot in snapshots:
        for state in snapshot.states:
            state._pending_lengths = [7]
    ours.prefixes.add_kv_cache(tokens, cache, snapshots)
    assert ours.tiers.counters.refusals == {"mid_batch": 1}
    assert ours.tiers.counters.offered == 0
    assert len(ours.prefixes.caches) == 1
