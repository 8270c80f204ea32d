"""DeepSeek V4's cache: with EXO's build of mlx-lm its own model, elsewhere a class of the same fields."""

import copy
import sys

import mlx.core as mx
import pytest
from tiny_deepseek import TINY, own, stand_in

from tierkv.errors import UnsupportedState
from tierkv.state import mlx_cache
from tierkv.state.mlx_deepseek import BRANCH_ARRAYS, DEEPSEEK_MODULE


@pytest.fixture
def deepseek(monkeypatch):
    module = stand_in()
    monkeypatch.setitem(sys.modules, DEEPSEEK_MODULE, module)
    return module


def filled(deepseek, n):
    """A cache at ``n`` with a buffer of three tokens and a pool of five rows; the indexer's has none."""
    keys = mx.random.split(mx.random.key(n), 8)
    cache = deepseek.DeepseekV4Cache(64)
    cache.local.update_and_fetch(*(mx.random.normal((1, 1, n, 16), key=key) for key in keys[:2]))
    branch = cache._branches["compressor"]
    branch.buffer_kv, branch.buffer_gate = (mx.random.normal((1, 3, 32), key=key) for key in keys[2:4])
    branch.pool, branch.buffer_count = mx.random.normal((1, 5, 16), key=keys[4]), 3
    return cache


def rebuilt(cache, **changes):
    layout = mlx_cache.describe(cache)
    arrays, scalars = mlx_cache.checkpoint(cache, layout, ("window",))
    views = {key: array.copy() for key, array in arrays.items()}
    scalars = {index: {**values, **changes} for index, values in scalars.items()}
    return mlx_cache.build(layout, mlx_cache.position(cache), views, scalars)


def reason(call):
    with pytest.raises(UnsupportedState) as refused:
        call()
    return refused.value.reason


def test_every_field_comes_back_with_its_bits(deepseek):
    cache = [filled(deepseek, 100), deepseek.DeepseekV4Cache(64)]
    cache[1].local.update_and_fetch(mx.ones((1, 1, 100, 16)), mx.ones((1, 1, 100, 16)))
    back = rebuilt(cache)
    assert type(back[0]) is deepseek.DeepseekV4Cache
    for one, other in zip(cache, back, strict=True):
        assert (one.local.offset, one.local._idx) == (other.local.offset, other.local._idx)
        assert mx.array_equal(one.local.keys, other.local.keys)
        for key, branch in one._branches.items():
            again = other._branches[key]
            assert branch.buffer_count == again.buffer_count
            for name in BRANCH_ARRAYS:
                mine, theirs = getattr(branch, name), getattr(again, name)
                assert (mine is None and theirs is None) or mx.array_equal(mine, theirs), name
    fresh = [deepseek.DeepseekV4Cache(64)] * 2
    assert mlx_cache.expected_signature(fresh) == mlx_cache.describe(cache).signature()
    assert mlx_cache.expected_signature([deepseek.DeepseekV4Cache(32)] * 2) != mlx_cache.describe(cache).signature()


def test_what_cannot_be_told_is_refused(deepseek):
    cache = filled(deepseek, 100)
    cache._branches["indexer"].pool_lengths = [2]
    assert reason(lambda: mlx_cache.describe([cache])) == "mid_batch"
    assert reason(lambda: rebuilt([filled(deepseek, 100)], _idx=101)) == "bad_scalars"
    two = [filled(deepseek, 100), filled(deepseek, 90)]
    assert reason(lambda: mlx_cache.position(two)) == "positions_differ"


def test_without_the_class_nothing_is_built(deepseek, monkeypatch):
    cache = [filled(deepseek, 100)]
    del deepseek.DeepseekV4Cache
    assert reason(lambda: rebuilt(cache)) == "unsupported_class"


def test_exos_own_deepseek_goes_on_bit_for_bit():
    deepseek = own()
    if deepseek is None:
        pytest.skip("this mlx-lm has no DeepSeek V4")
    mx.random.seed(3)
    model = deepseek.Model(deepseek.ModelArgs.from_dict(TINY))
    mx.eval(model.parameters())
    cache = model.make_cache()
    mx.eval(model(mx.random.randint(0, 97, (1, 198), key=mx.random.key(1)), cache=cache))
    back, kept = rebuilt(cache), copy.deepcopy(cache)
    token = mx.array([[5]])
    for step in range(10):
        if step == 5:
            back = rebuilt(back)
        ours, theirs = model(token, cache=back), model(token, cache=kept)
        assert bool(mx.array_equal(ours, theirs)), step
        token = mx.argmax(ours[:, -1:], axis=-1)
