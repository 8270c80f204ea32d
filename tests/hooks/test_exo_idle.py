"""EXO's runner compares a live sample while it waits for a task, and is otherwise the runner that it was."""

import queue
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from exo_engine import Region, Rig

from tierkv.hooks import exo_boot
from tierkv.hooks.exo_idle import IdleQueue, watch


class Idler:
    """Has something to do ``times`` times; then puts what it was given into the queue."""

    def __init__(self, times=0, then=None):
        self.left, self.then, self.said = times, then, []

    @property
    def wanted(self):
        return self.left > 0

    def idle(self):
        self.said.append("idle")
        self.left -= 1
        if not self.left and self.then is not None:
            self.then()

    def busy(self):
        self.said.append("busy")


@pytest.mark.parametrize("make", [lambda: None, Idler])
def test_with_nothing_to_do_it_is_a_queue(make):
    idler = make()
    waiting = IdleQueue(lambda: idler)
    waiting.put(1)
    assert waiting.get() == 1
    with pytest.raises(queue.Empty):
        waiting.get_nowait()
    with pytest.raises(queue.Empty):
        waiting.get(timeout=0.01)
    threading.Timer(0.05, waiting.put, [2]).start()
    assert waiting.get() == 2
    assert idler is None or idler.said == ["busy", "busy"]


def test_the_idle_time_is_used_until_there_is_work_or_nothing_more_to_do():
    idler = Idler(times=3, then=lambda: waiting.put("work"))
    waiting = IdleQueue(lambda: idler)
    assert waiting.get() == "work"
    assert idler.said == ["idle"] * 3 + ["busy"]
    idler.left = 5
    waiting.put("at once")
    assert waiting.get() == "at once"
    assert waiting.empty()
    assert idler.said[4:] == ["busy"]
    # Between two steps of a generation EXO looks without waiting: that is no idle time.
    with pytest.raises(queue.Empty):
        waiting.get_nowait()
    assert idler.said[5:] == []


def test_what_a_runner_had_in_its_queue_stays_in_order():
    runner = types.SimpleNamespace(_work_queue=queue.Queue())
    for n in range(3):
        runner._work_queue.put(n)
    assert watch(runner, lambda: None)
    assert [runner._work_queue.get() for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("runner", [types.SimpleNamespace(), types.SimpleNamespace(_work_queue=queue.LifoQueue())])
def test_a_runner_of_another_make_is_left_alone(runner):
    before = dict(vars(runner))
    assert not watch(runner, lambda: None)
    assert vars(runner) == before


class Runner:
    def __init__(self):
        self._work_queue = queue.Queue()

    def main(self, *given):
        return type(self._work_queue), given


def module_of(runner):
    module = types.ModuleType(exo_boot.RUNNER_MODULE)
    module.Runner = type("Runner", (runner,), {"main": runner.main})
    return module


def test_a_runner_is_watched_from_its_main_loop_on():
    module = module_of(Runner)
    exo_boot._runner_imported(module)
    assert module.Runner().main(1, 2) == (IdleQueue, (1, 2))


def test_a_fault_of_ours_does_not_keep_a_runner_from_running(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tierkv.hooks.exo_idle", None)
    module = module_of(Runner)
    exo_boot._runner_imported(module)
    assert module.Runner().main() == (queue.Queue, ())
    assert "without live samples" in capsys.readouterr().err


def test_a_module_without_a_runner_is_left_alone():
    module = types.ModuleType(exo_boot.RUNNER_MODULE)
    exo_boot._runner_imported(module)
    assert not hasattr(module, "Runner")


# --- a restored prompt ------------------------------------------------------------------------------


@pytest.fixture
def sampling_agent():
    from agent_processes import Cluster

    with tempfile.TemporaryDirectory(prefix="tierkv-") as home:
        cluster = Cluster(Path(home))
        vaults = cluster.vault("kv-vault"), cluster.vault("ssm-vault")
        options = {"min_store_tokens": 16, "min_restore_tokens": 16, "probe_timeout_s": 5.0, "quality_sample": 1}
        yield cluster, cluster.agent(*vaults, **options)
        cluster.close()


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, 97, n).tolist()


def samples(agent):
    return [engine for engine in agent.snapshot().engines if engine.quality_samples]


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_a_restored_prompt_is_compared_while_exo_waits(sampling_agent, which, kind, tmp_path):
    cluster, agent = sampling_agent
    rig = Rig(which, kind, cluster.socket, tmp_path / "model")
    rig.serve(prompt(300))
    assert not rig.tiers.sampler.wanted
    rig.forget()
    assert rig.serve(prompt(300)).cached == 298
    assert rig.tiers.sampler.wanted
    waiting, deadline = IdleQueue(lambda: rig.tiers.sampler), time.monotonic() + 60

    def until_said():
        while not samples(agent) and time.monotonic() < deadline:
            time.sleep(0.05)
        waiting.put("work")

    threading.Thread(target=until_said, daemon=True).start()
    assert waiting.get() == "work"
    (engine,) = samples(agent)
    assert engine.kind == "exo"
    assert engine.quality_codec == "lossless"
    assert engine.quality_snr_db_min == 0.0 or engine.quality_snr_db_min > 80
    assert (engine.quality_kl_mean < 1e-6, engine.quality_raised_layers) == (True, 0)
    assert not rig.tiers.sampler.wanted
    rig.close()


def test_several_ranks_are_not_sampled_and_neither_are_images(sampling_agent, which, tmp_path):
    cluster, _ = sampling_agent
    rig = Rig(which, "llama", cluster.socket, tmp_path / "model")
    cat = [Region("ca" * 32, 60, 90)]
    rig.serve(prompt(300), cat)
    rig.forget()
    assert rig.serve(prompt(300), cat).cached == 298
    assert not rig.tiers.sampler.wanted
    rig.serve(prompt(300, 1))
    rig.forget()
    rig.tiers.several_ranks = True
    assert rig.serve(prompt(300, 1)).cached == 298
    assert not rig.tiers.sampler.wanted
    rig.close()
