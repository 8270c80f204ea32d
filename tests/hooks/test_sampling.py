"""A sample of a restored prompt is compared in slices while the engine is idle, and never before or otherwise."""

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_mlx import CONFIGS, SINCE_0_32, tiny_model

from tierkv.handoff.restored import Restored
from tierkv.hooks import sampling
from tierkv.hooks.memory import MemoryReading
from tierkv.hooks.prompt_tokens import media_in
from tierkv.hooks.sampling import Sampler
from tierkv.state import mlx_cache
from tierkv.state.layout import Layout

OLDER = mlx_lm.__version__.startswith("0.31.")


class Client:
    def __init__(self, every=1):
        self.settings = {"quality_sample": every}
        self.reports = []

    def sampled(self, model, **values):
        self.reports.append((model, values))


class Rig:
    def __init__(self, name="llama", every=1, n=300, first_row=0):
        self.now = 0.0
        self.client = Client(every)
        self.model, self.handle = tiny_model(name), SimpleNamespace(id=0)
        self.free = 16 << 30
        self.sampler = Sampler(
            self.client,
            lambda handle: self.model if handle is self.handle else None,
            clock=lambda: self.now,
            memory=lambda: MemoryReading(0, self.free),
        )
        self.ids = np.random.default_rng(0).integers(0, 97, n)
        cache = make_prompt_cache(self.model)
        for begin in range(0, n - 1, 128):
            self.model(mx.array(self.ids[begin : min(begin + 128, n - 1)])[None], cache=cache)
        mx.eval(mlx_cache.live_arrays(cache))
        layout = mlx_cache.describe(cache)
        rows = mlx_cache.rows(cache, layout, first_row, n - 1)
        whole, scalars = mlx_cache.checkpoint(cache, layout, ("window", "state"))
        arrays = {key: np.array(each) for key, each in {**rows, **whole}.items()}
        self.answer = Restored(n - 1, first_row, layout, arrays, scalars, 0, "int8", 1)

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


def slow(rig, monkeypatch, steps):
    """The model takes 30 ms a call; its calls are counted in the last of ``steps``."""
    real = rig.model.__class__.__call__

    def called(self, tokens, *args, **named):
        steps[-1] += 1
        rig.now += 0.03
        return real(self, tokens, *args, **named)

    monkeypatch.setattr(rig.model.__class__, "__call__", called)


def test_equal_state_is_as_good_as_exact():
    rig = Rig()
    rig.restored()
    said = rig.until_reported()
    assert (said["codec"], said["tokens"]) == ("int8", 300 - sampling.FOLLOWING_TOKENS - 1)
    assert all(db is None or db > 80 for _, _, db in said["layers"])
    assert [each[:2] for each in said["layers"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert (said["positions"], said["top1_fraction"]) == (sampling.FOLLOWING_TOKENS, 1.0)
    assert said["kl_mean"] < 1e-6


@pytest.mark.parametrize("first_row", [0, 1, 100])
def test_noise_in_one_array_is_found_there(first_row):
    rig = Rig(first_row=first_row)
    array = rig.answer.arrays[1, 0]
    noise = np.random.default_rng(1).standard_normal(array.shape).astype(np.float32)
    n = 300 - sampling.FOLLOWING_TOKENS - 1 - first_row
    part = (slice(None), slice(None), slice(0, n))
    scale = np.linalg.norm(array[part]) / np.linalg.norm(noise[part]) / 10
    rig.answer.arrays[1, 0] = array + noise * np.float32(scale)
    rig.restored()
    said = rig.until_reported()
    found = {(layer, number): db for layer, number, db in said["layers"]}
    assert found[1, 0] == pytest.approx(20.0, abs=0.05)
    assert all(db is None or db > 80 for key, db in found.items() if key != (1, 0))
    assert said["kl_mean"] > 1e-6


@pytest.mark.parametrize("first_row", [1, 64, 203])
def test_a_prompt_whose_beginning_the_engine_had_itself(first_row):
    """Any chat template gives two prompts some tokens in common."""
    rig = Rig(first_row=first_row)
    rig.restored()
    said = rig.until_reported()
    assert said["tokens"] == 300 - sampling.FOLLOWING_TOKENS - 1 - first_row
    assert all(db is None or db > 80 for _, _, db in said["layers"])
    assert (said["positions"], said["top1_fraction"]) == (sampling.FOLLOWING_TOKENS, 1.0)
    assert said["kl_mean"] < 1e-6


@pytest.mark.parametrize("n", [200, 300, 700])
@pytest.mark.parametrize("name", [each for each in CONFIGS if each not in SINCE_0_32 or not OLDER])
def test_every_cache_class_that_holds_rows(name, n):
    """Windows, chunks and recurrent state beside them change as they grow; the rows are compared all the same."""
    rig = Rig(name, n=n, first_row=30)
    rig.restored()
    rows = {key for key in rig.answer.arrays if rig.answer.layout.layers[key[0]].kind == "rows"}
    assert rig.sampler.wanted == bool(rows)
    if not rows:
        return
    said = rig.until_reported()
    compared = {(layer, number): db for layer, number, db in said["layers"]}
    assert compared.keys() == rows
    assert all(db is None or db > 60 for db in compared.values())
    whole = all(each.kind == "rows" for each in rig.answer.layout.layers)
    assert said["positions"] == (sampling.FOLLOWING_TOKENS if whole else 0)


def test_the_models_own_rows_where_a_draft_model_has_its_own():
    rig = Rig(first_row=30)
    draft = rig.answer.layout.layers[:1]
    layout = Layout((*rig.answer.layout.layers, *draft))
    arrays = {**rig.answer.arrays, (2, 0): rig.answer.arrays[0, 0] + 1, (2, 1): rig.answer.arrays[0, 1] + 1}
    rig.answer = replace(rig.answer, layout=layout, arrays=arrays)
    rig.restored()
    said = rig.until_reported()
    assert [each[:2] for each in said["layers"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert all(db is None or db > 80 for _, _, db in said["layers"])
    assert said["positions"] == 0


def test_no_more_than_the_first_rows_that_came_are_compared(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLED_TOKENS", 70)
    rig = Rig(first_row=100)
    rig.answer.arrays[0, 1][:, :, 70:] += 1
    rig.restored()
    said = rig.until_reported()
    assert said["tokens"] == 70
    assert all(db is None or db > 80 for _, _, db in said["layers"])
    assert said["kl_mean"] < 1e-6


def test_a_sample_keeps_the_compared_rows_alone(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLED_TOKENS", 70)
    rig = Rig(first_row=100)
    rig.restored()
    taken = rig.sampler._sample
    assert {array.shape[2] for array in taken.rows.values()} == {70}
    assert all(not np.shares_memory(array, rig.answer.arrays[key]) for key, array in taken.rows.items())


@pytest.mark.parametrize(
    ("name", "spare", "taken"), [("llama", 0, True), ("llama", -8, False), ("qwen3_next", 0, True)]
)
def test_what_would_take_more_than_an_eighth_of_the_free_memory_is_not_sampled(name, spare, taken):
    rig = Rig(name, first_row=100)
    layers = rig.answer.layout.layers
    n = 300 - sampling.FOLLOWING_TOKENS - 1
    needed = 0
    for (layer, _), array in rig.answer.arrays.items():
        needed += array.nbytes * n // 199 if layers[layer].kind == "rows" else array.nbytes
    rig.free = 8 * 2 * needed + spare
    rig.restored()
    assert rig.sampler.wanted == taken


def test_the_next_prompt_that_can_be_sampled_is_taken():
    """The one whose turn it was could not."""
    rig = Rig(every=3)
    rig.free = 0
    for _ in range(4):
        rig.restored()
    assert not rig.sampler.wanted
    rig.free = 16 << 30
    rig.restored()
    assert rig.sampler.wanted
    rig.until_reported()
    for _ in range(2):
        rig.restored()
        assert not rig.sampler.wanted
    rig.restored()
    assert rig.sampler.wanted


def test_a_request_takes_back_the_memory_of_a_comparison_and_the_third_ends_it(monkeypatch):
    rig = Rig()
    monkeypatch.setattr(sampling, "SLICE_S", 0.0)
    monkeypatch.setattr(rig.sampler, "_compared", lambda model, sample: iter([None] * 9))
    rig.restored()
    for left in (2, 1, 0):
        rig.idle()
        rig.idle(sampling.IDLE_S)
        assert rig.sampler._work is not None
        for _ in range(5):
            rig.sampler.busy()
        assert rig.sampler._work is None
        assert rig.sampler.wanted == (left > 0)


def test_what_was_broken_off_is_compared_later(monkeypatch):
    rig = Rig(first_row=20)
    rig.restored()
    slow(rig, monkeypatch, [0])
    for _ in range(2):
        rig.idle()
        rig.idle(sampling.IDLE_S)
        rig.idle()
        assert rig.sampler._work is not None
        rig.sampler.busy()
    assert not rig.client.reports
    assert rig.until_reported()["kl_mean"] < 1e-6


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
    slow(rig, monkeypatch, steps)
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
    little = Rig(first_row=204)
    little.restored()
    assert little.sampler._sample is None
