"""Runners and agents that end and begin again; EXO's own generators with the hook."""

import signal
import sys
import tempfile
from pathlib import Path

import pytest
from exo_engine import SOURCE, Rig, real_module, seeds
from test_exo_ranks import Process

PATIENT = {"min_store_tokens": 16, "min_restore_tokens": 16, "probe_timeout_s": 5.0}
needs_exo = pytest.mark.skipif(not SOURCE, reason="TIERKV_EXO_SRC is not set")


@pytest.fixture
def cluster():
    from agent_processes import Cluster

    with tempfile.TemporaryDirectory(prefix="tierkv-") as home:
        running = Cluster(Path(home))
        yield running
        running.close()


@pytest.fixture
def runner(tmp_path):
    running = []
    seed = next(seeds)

    def make(cluster, **options):
        place = {"socket": str(cluster.socket), "folder": str(tmp_path / "model"), "rank": len(running)}
        fixed = {"module": "stand-in", "model": "llama", "seed": seed, "connect": True}
        running.append(Process({**place, **fixed, **options}, script="exo_runner.py"))
        running[-1].answer()
        return running[-1]

    yield make
    for each in running:
        each.end()


def ask(process, *step):
    process.tell(*step)
    return process.answer()


def test_a_runner_killed_in_mid_demotion_leaves_what_had_arrived_and_nothing_wrong(agents, runner):
    first = runner(agents, slow_mover=True)
    assert ask(first, "serve", 300, 1) == 0
    ask(first, "stored")
    assert ask(first, "serve", 2000, 2) == 0
    assert ask(first, "moved") > 0
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(10) == -signal.SIGTERM
    second = runner(agents)
    assert ask(second, "serve", 300, 1) == 298
    cached = ask(second, "serve", 2000, 2)
    assert cached < 1998
    assert all(each.alive for each in agents.processes)


def test_an_agent_killed_and_started_between_two_requests_costs_no_request(cluster, runner):
    kv = cluster.vault("kv-vault")
    agent = cluster.agent(kv, **PATIENT)
    exo = runner(cluster)
    assert ask(exo, "serve", 300, 1) == 0
    ask(exo, "stored")
    agent.kill()
    # Without an agent EXO serves from its own cache.
    assert ask(exo, "serve", 300, 1) == 298
    cluster.agent(kv, **PATIENT)
    ask(exo, "ready")
    ask(exo, "forget")
    assert ask(exo, "serve", 300, 1) == 298


@needs_exo
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_exos_own_generators_restore_and_say_the_same(agents, tmp_path, kind):
    real_module()
    from exo.shared.types.common import ModelId
    from exo.shared.types.text_generation import InputMessage, InputMessageContent, TextGenerationTaskParams

    text = "The tier of a cache is not its worth. " * 30
    task = TextGenerationTaskParams(
        model=ModelId("tiny"), input=[InputMessage(role="user", content=InputMessageContent(text))],
        max_output_tokens=8, temperature=0.0,
    )  # fmt: skip
    rig = Rig("real", kind, agents.socket, tmp_path / "model", vocab=260)
    for name in [name for name in sys.modules if name.startswith("exo.worker.engines.mlx.generator")]:
        del sys.modules[name]
    from exo.worker.engines.mlx.generator.batch_generate import ExoBatchGenerator
    from exo.worker.engines.mlx.generator.generate import mlx_generate

    tokenizer = tokenizer_in(tmp_path / "model")

    def alone(prefixes):
        parts = list(mlx_generate(rig.model, tokenizer, task, text, prefixes, None))
        return [each.text for each in parts], parts[-1].usage.prompt_tokens_details.cached_tokens

    def batched():
        batch, parts = ExoBatchGenerator(rig.model, tokenizer, None, rig.prefixes), []
        batch.submit(task, text)
        while batch.has_work and len(parts) < 8:
            parts += [response for _, response in batch.step()]
        return parts[-1].usage.prompt_tokens_details.cached_tokens

    said, _ = alone(None)
    assert alone(rig.prefixes) == (said, 0)
    assert alone(rig.prefixes) == (said, 1138)
    rig.forget()
    assert alone(rig.prefixes) == (said, 1138)
    rig.forget()
    assert batched() == 1138
    assert rig.tiers.counters.hits == {"none": 1, "exact": 1, "restored": 2}
    rig.close()


def tokenizer_in(folder):
    from conftest import write_tokenizer
    from mlx_lm.tokenizer_utils import load

    write_tokenizer(folder)
    return load(folder)
