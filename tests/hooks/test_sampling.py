"""A sample of a restored prompt is compared in slices while the engine is idle, and never before or otherwise."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_mlx import tiny_model

from tierkv.handoff.restored import Restored
from tierkv.hooks import sampling
from tierkv.hooks.prompt_tokens import media_in
from tierkv.hooks.sampling import Sampler
from tierkv.state import mlx_cache


class Client:
    def __init__(self, every=1):
        self.settings = {"quality_sample": every}
        self.reports = []

    def sampled(self, model, **values):
        self.reports.append((model, values))


class Rig:
    def __init__(self, name="llama", every=1, n=300):
        self.now = 0.0
        self.client = Client(every)
        self.model, self.handle = tiny_model(name), SimpleNamespace(id=0)
        self.sampler = Sampler(self.client, lambda: (self.model, self.handle), clock=lambda: self.now)
        self.ids = np.random.default_rng(0).integers(0, 97, n)
        cache = make_prompt_cache(self.model)
        self.model(mx.array(self.ids[: n - 1])[None], cache=cache)
        mx.eval(mlx_cache.live_arrays(cache))
        layout = mlx_cache.describe(cache)
        rows = mlx_cache.rows(cache, layout, 0, n - 1)
        whole, scalars = mlx_cache.checkpoint(cache, layout, ("window", "state"))
        arrays = {key: np.array(each) for key, each in {**rows, **whole}.items()}
        self.answer = Restored(n - 1, 0, layout, arrays, scalars, 0, "int8", 1)

    def restored(self):
        self.sampler.restored(self.handle, self.ids, media_in(self.ids), self.answer)

    def idle(self, seconds=0.1):
        self.now += seconds
        self.sampler.idle()

    def until_reported(self):
        for _ in range(2000):
            if self.client.reports:
                return self.client.reports[0][1]
            self.idle()
        raise AssertionError("no report")


def test_equal_state_is_as_good_as_exact():
    rig = Rig()
    rig.restored()
    said = rig.until_reported()
    assert (said["codec"], said["tokens"]) == ("int8", 300 - sampling.FOLLOWING_TOKENS - 1)
    assert all(db is None or db > 80 for _, _, db in said["layers"])
    assert [each[:2] for each in said["layers"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert (said["positions"], said["top1_fraction"]) == (sampling.FOLLOWING_TOKENS, 1.0)
    assert said["kl_mean"] < 1e-6


def test_noise_in_one_array_is_found_there():
    rig = Rig()
    array = rig.answer.arrays[1, 0]
    noise = np.random.default_rng(1).standard_normal(array.shape).astype(np.float32)
    n = 300 - sampling.FOLLOWING_TOKENS - 1
    part = (slice(None), slice(None), slice(0, n))
    scale = np.linalg.norm(array[part]) / np.linalg.norm(noise[part]) / 10
    rig.answer.arrays[1, 0] = array + noise * np.float32(scale)
    rig.restored()
    said = rig.until_reported()
    found = {(layer, number): db for layer, number, db in said["layers"]}
    assert found[1, 0] == pytest.approx(20.0, abs=0.05)
    assert all(db is None or db > 80 for key, db in found.items() if key != (1, 0))
    assert said["kl_mean"] > 1e-6


def test_a_hybrids_rows_are_compared_and_nothing_that_follows():
    rig = Rig("qwen3_next")
    rig.restored()
    said = rig.until_reported()
    assert said["positions"] == 0
    kinds = {rig.answer.layout.layers[layer].kind for layer, _, _ in said["layers"]}
    assert kinds == {"rows"}


def test_nothing_happens_before_the_engine_has_been_idle_for_a_while(monkeypatch):
    rig = Rig()
    rig.restored()
    began = []
    monkeypatch.setattr(rig.sampler, "_one_slice", lambda: began.append(rig.now))
    for _ in range(30):
        rig.idle(0.9)
        rig.sampler.busy()
    assert not began
    rig.idle(0.1)
    rig.idle(sampling.IDLE_S + 0.01)
    assert len(began) == 1


def test_a_slice_is_a_slice(monkeypatch):
    """Whatever the model takes, at most one step runs past the slice's end."""
    rig = Rig()
    rig.restored()
    steps = []
    real = rig.model.__class__.__call__

    def slow(self, tokens, *args, **named):
        steps[-1] += 1
        rig.now += 0.03
        return real(self, tokens, *args, **named)

    monkeypatch.setattr(rig.model.__class__, "__call__", slow)
    rig.idle(0.1)
    rig.now += sampling.IDLE_S
    for _ in range(3):
        steps.append(0)
        rig.sampler.idle()
    assert steps == [2, 2, 2]


@pytest.mark.parametrize(("every", "restores", "taken"), [(0, 5, 0), (1, 1, 1), (3, 2, 0), (3, 3, 1)])
def test_one_in_so_many(every, restores, taken):
    rig = Rig(every=every)
    for _ in range(restores):
        rig.restored()
    assert (rig.sampler._sample is not None) == bool(taken)


def test_switching_it_off_drops_what_was_kept():
    rig = Rig()
    rig.restored()
    rig.client.settings["quality_sample"] = 0
    rig.restored()
    assert rig.sampler._sample is None


def test_another_model_and_a_fault_end_the_sample_quietly():
    rig = Rig()
    rig.restored()
    rig.handle = SimpleNamespace(id=1)
    rig.idle(0.1)
    rig.idle(2)
    assert rig.sampler._sample is None
    rig.restored()
    rig.model = None
    rig.idle(0.1)
    rig.idle(2)
    assert rig.sampler._sample is None
    assert rig.client.reports == []


def test_short_prompts_images_and_quantised_rows_are_not_sampled():
    short = Rig(n=90)
    short.restored()
    assert short.sampler._sample is None
    image = Rig()
    image.ids[5] = -7
    image.restored()
    assert image.sampler._sample is None
    partial = Rig()
    partial.answer = Restored(299, 100, partial.answer.layout, partial.answer.arrays, {}, 0, "int8", 1)
    partial.restored()
    assert partial.sampler._sample is None
