"""What the hook takes for EXO, when it keeps its hands off, and what it tells the agent; no vaults needed."""

import logging
import sys
import types

import mlx.core as mx
import numpy as np
import pytest
from exo_engine import GIB, SOURCE, Memory, Rig, Shard, module_named, prefill, saved_model, serve
from fake_agent import FakeAgent

from tierkv.handoff.client import model_files
from tierkv.hooks import exo, exo_model
from tierkv.hooks.exo_entries import Shape

needs_exo = pytest.mark.skipif(not SOURCE, reason="TIERKV_EXO_SRC is not set")


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, 97, n).tolist()


# --- the stand-in is like the real thing ------------------------------------------------------------


def steps(module, model, requests):
    """What a caller sees of every request, and what the cache holds after it."""
    prefixes = module.KVPrefixCache(None)
    for n, (tokens, regions) in enumerate(requests):
        if n == len(requests) - 2:
            prefixes._evict_if_needed()
        served = serve(module, prefixes, model, tokens, regions, decode=2)
        yield (
            served.cached, served.exact, served.index, [len(each) for each in prefixes.prompts], prefixes._last_used,
            [[each.token_count for each in kept or []] for kept in prefixes._snapshots],
            [module.cache_length(each) for each in prefixes.caches], prefixes._access_counter,
            [np.array(each) for each in served.logits],
        )  # fmt: skip


@needs_exo
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_the_stand_in_and_exo_do_the_same(kind, tmp_path):
    from exo_engine import Region

    model = saved_model(kind, tmp_path, 3)
    cat, dog = [Region("ca" * 32, 60, 90)], [Region("d0" * 32, 60, 90)]
    requests = [
        (prompt(200), None), (prompt(200), None), (prompt(150), None), ([*prompt(200), *prompt(60, 1)], None),
        ([*prompt(120), *prompt(80, 2)], None), (prompt(180, 3), cat), (prompt(180, 3), dog), (prompt(180, 3), cat),
        (prompt(90, 4), None), (prompt(200), None),
    ]  # fmt: skip
    pairs = zip(
        steps(module_named("stand-in"), model, requests), steps(module_named("real"), model, requests), strict=True
    )
    for number, (ours, exos) in enumerate(pairs):
        assert ours[:-1] == exos[:-1], f"request {number}"
        assert all((a == b).all() for a, b in zip(ours[-1], exos[-1], strict=True)), f"request {number}"


@needs_exo
def test_the_stand_in_and_exo_evict_the_same():
    seen = []
    for module in (module_named("stand-in"), module_named("real")):
        prefixes = module.KVPrefixCache(None)
        readings = iter([0.1, 0.1, 0.1, 0.9, 0.9, 0.1])
        module.get_memory_used_percentage = lambda readings=readings: next(readings)
        for n in range(4):
            prefixes.add_kv_cache(mx.array(prompt(20 + n)), [])
        prefixes._evict_if_needed()
        seen.append(([len(each) for each in prefixes.prompts], prefixes._last_used))
    # One reading before each pop: the first loop ends at once three times; the second drops two.
    assert seen == [([22, 23], [3, 4])] * 2


# --- what is EXO ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["stand-in", pytest.param("real", marks=needs_exo)])
def test_the_shape_of_todays_exo_is_known(which):
    shape = Shape.of(module_named(which))
    assert shape.get_parameters == ("model", "prompt_tokens", "media_regions")
    assert len(shape.lists) == 6


def strange_list(module):
    class Strange(module.KVPrefixCache):
        def __init__(self, group):
            super().__init__(group)
            self._pages = []

    module.KVPrefixCache = Strange


def strange_method(module):
    module.KVPrefixCache.update_kv_cache = lambda self, prompt_tokens, cache, where: None


def strange_module(module):
    del module.snapshot_ssm_states


@pytest.mark.parametrize("change", [strange_list, strange_method, strange_module])
def test_an_exo_of_another_shape_is_left_alone_with_one_line(change, capfd, monkeypatch):
    monkeypatch.delitem(sys.modules, exo.BOOTSTRAP, raising=False)
    module = module_named("stand-in")
    change(module)
    before = dict(vars(module.KVPrefixCache)), dict(vars(module))
    assert exo.hook_cache(module) is None
    assert (dict(vars(module.KVPrefixCache)), dict(vars(module))) == before
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "EXO runs without tiers" in said[0]


def test_log_lines_go_where_exos_runner_logs_even_when_it_changes_its_logger(monkeypatch):
    lines = []
    bootstrap = types.ModuleType(exo.BOOTSTRAP)
    monkeypatch.setitem(sys.modules, exo.BOOTSTRAP, bootstrap)
    exo.log_through_exo()
    for name in ("first", "second"):
        bootstrap.logger = types.SimpleNamespace(log=lambda level, text, name=name: lines.append((name, level, text)))
        logging.getLogger("tierkv").warning("a line of {%s}", name)
    assert lines == [
        ("first", "WARNING", "TierKV: a line of {first}"), ("second", "WARNING", "TierKV: a line of {second}"),
    ]  # fmt: skip


# --- which model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stepwise", [False, True])
def test_the_model_is_known_from_exos_own_loader(agent, tmp_path, stepwise):
    model = saved_model("llama", tmp_path / "model", 5)
    module, loader = module_named("stand-in"), types.ModuleType("utils_mlx")

    def plain(bound_instance, group):
        return model, "tokenizer"

    def in_steps(bound_instance, group):
        yield "a layer"
        return model, "tokenizer"

    loader.load_mlx_items = in_steps if stepwise else plain
    loader.build_model_path = lambda model_id: tmp_path / model_id
    from tierkv.handoff.client import HandoffClient

    hook = exo.hook_cache(module, client=lambda: HandoffClient(agent.path, "exo", "exo 1"))
    exo.hook_loader(loader, lambda: hook)
    shard = Shard("model", device_rank=1, world_size=2, start_layer=1, end_layer=2)
    result = loader.load_mlx_items(types.SimpleNamespace(bound_shard=shard), None)
    if stepwise:
        assert next(result) == "a layer"
        with pytest.raises(StopIteration) as end:
            next(result)
        result = end.value.value
    assert result == (model, "tokenizer")
    said = hook.tiers.model.handle.announcement
    assert (said.name, said.shard_kind, said.shard_rank, said.shard_world) == ("model", "Shard", 1, 2)
    assert (said.layer_start, said.layer_end) == (1, 2)
    assert said.weights == model_files(tmp_path / "model")
    hook.remove()


def test_a_model_that_is_not_split_is_the_same_on_every_node(tmp_path):
    saved_model("llama", tmp_path, 5)
    files = model_files(tmp_path)
    one = exo_model.announcement(Shard(device_rank=0, end_layer=2), tmp_path, files)
    assert one == exo_model.announcement(Shard(), tmp_path, files)
    assert one != exo_model.announcement(Shard(world_size=2), tmp_path, files)


# --- live threshold, numbers ------------------------------------------------------------------------


def test_the_threshold_follows_the_agents_settings_live(agent, tmp_path):
    memory = Memory(50 * GIB)
    rig = Rig("stand-in", "llama", agent.path, tmp_path / "model", connect=False, memory=memory)
    assert rig.tiers.client.wait_available(10)
    own = rig.module._MEMORY_THRESHOLD
    for seed in range(3):
        rig.serve(prompt(100, seed))
    assert rig.module._MEMORY_THRESHOLD == 0.6
    assert len(rig.prefixes.caches) == 3
    one = rig.prefixes._tierkv.sizes()[0]
    agent.settings["memory_threshold"] = 0.5 - one / (100 * GIB)
    rig.tiers.client.report_hot({})
    wait_for(lambda: rig.tiers.client.report_hot({}) or rig.tiers.client.settings["memory_threshold"] < 0.6)
    rig.prefixes._evict_if_needed()
    assert len(rig.prefixes.caches) == 2
    agent.stop()
    wait_for(lambda: not rig.tiers.client.available)
    memory.used = 99 * GIB
    rig.prefixes._evict_if_needed()
    assert len(rig.prefixes.caches) == 2
    assert own == rig.module._MEMORY_THRESHOLD
    rig.close()


@pytest.fixture
def agent(tmp_path):
    running = FakeAgent(tmp_path / "agent.sock").start()
    stop = running.stop
    running.stop = lambda: (setattr(running, "stop", lambda: None), stop())
    yield running
    running.stop()


def wait_for(happens, timeout_s=20.0):
    import time

    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_agent_hears_of_the_hot_tier(agent, tmp_path):
    rig = Rig("stand-in", "llama", agent.path, tmp_path / "model", connect=False)
    assert rig.tiers.client.wait_available(10)
    rig.serve(prompt(100))
    rig.serve(prompt(100))
    assert rig.tiers.mover.drain(10, stored=True)
    wait_for(lambda: agent.reports and agent.reports[-1].get("hits") == 1)
    said = agent.reports[-1]
    assert said["hits_by_kind"] == {"none": 1, "exact": 1}
    assert (said["entries"], said["tokens"]) == (len(rig.prefixes.caches), 100 * len(rig.prefixes.caches))
    assert said["size_bytes"] == sum(rig.prefixes._tierkv.sizes()) > 0
    rig.close()


def test_every_snapshot_becomes_one_checkpoint(agent, tmp_path):
    rig = Rig("stand-in", "qwen3_next", agent.path, tmp_path / "model", connect=False)
    assert rig.tiers.client.wait_available(10)
    tokens = mx.array(prompt(300))
    cache = rig.module.make_kv_cache(rig.model)
    snapshots = prefill(rig.module, rig.model, tokens[:-1], cache, 128)
    rig.prefixes.add_kv_cache(tokens, cache, [*snapshots, *snapshots])
    assert rig.tiers.mover.drain(10, stored=True)
    assert [each["position"] for each in agent.ops("offer")] == [128, 256, 298]
    rig.close()
