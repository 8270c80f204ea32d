"""Two whole EXO nodes and one instance over both, asked through EXO's own API: they restore together or compute."""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import pytest
from agent_processes import TOKEN, Cluster
from exo_engine import SOURCE
from exo_nodes import BINDINGS, Nodes, missing
from test_exo_real_ranks import LAYERS, exo_models

from tierkv.rpc.auth import load_or_create_token
from tierkv.rpc.client import VaultClient

pytestmark = [pytest.mark.skipif(not SOURCE, reason="TIERKV_EXO_SRC is not set"), pytest.mark.timeout(1200)]
exo_models = exo_models
ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"min_store_tokens": 16, "min_restore_tokens": 16, "probe_timeout_s": 5.0}
TEXT = "The tier of a cache is not its worth. " * 20
ROWS, HYBRID = {"kv"}, {"kv", "ssm"}


class Beside:
    """The agent beside one node, and the vault that keeps what it stores."""

    def __init__(self, home, **options):
        self.cluster, self.options = Cluster(home), {**OPTIONS, **options}
        self.vault = self.cluster.vault("kv-vault")
        self.start()

    def start(self):
        self.agent = self.cluster.agent(self.vault, self.vault, **self.options)

    def lose(self):
        """The vault ends, and an empty one takes its place."""
        self.vault.kill()
        self.vault = self.cluster.vault("kv-vault", port=self.vault.port)

    def tiers(self, position):
        """Of which kinds of state the vault has all of a prompt up to ``position``."""

        async def ask():
            client = VaultClient(self.vault.address, load_or_create_token(TOKEN, None))
            try:
                return (await client.list_prefixes()).prefixes
            finally:
                await client.close()

        return {each.tier for each in asyncio.run(ask()) if each.tokens == position}


@pytest.fixture(scope="module")
def beside():
    with tempfile.TemporaryDirectory(prefix="tierkv-") as one, tempfile.TemporaryDirectory(prefix="tierkv-") as other:
        both = [Beside(Path(one)), Beside(Path(other))]
        yield both
        for each in both:
            each.cluster.close()


@pytest.fixture(scope="module")
def nodes(beside, exo_models, tmp_path_factory):
    running = started(beside, exo_models, tmp_path_factory.mktemp("nodes"))
    yield running
    running.end()


def started(beside, exo_models, folder):
    """A node for each agent, all in one cluster."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    cards = {exo_models(name): {"layers": LAYERS[name]} for name in ("llama", "step3p5", "qwen3_next_in_halves")}
    # As an operator starts EXO for one run with the hook.
    command = sys.executable, "-m", "tierkv", "exo", "--all-ranks-hooked", "--", sys.executable, "-m", "exo"
    environments = [
        {
            "TIERKV_SOCKET": str(each.cluster.socket), "TIERKV_HOME": str(each.cluster.home), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (BINDINGS, SOURCE, ROOT))),
            # Else mlx has every new runner's parts compiled by the C++ compiler.
            "MLX_DISABLE_COMPILE": "1",
        }
        for each in beside
    ]  # fmt: skip
    return Nodes(folder, exo_models.root, cards, environments, command)


@pytest.mark.parametrize(
    ("model", "sharding", "tiers"),
    [
        ("llama", "Pipeline", ROWS),
        ("llama", "Tensor", ROWS),
        ("step3p5", "Pipeline", ROWS),
        ("qwen3_next_in_halves", "Pipeline", HYBRID),
    ],
)
def test_two_nodes_restore_the_same_or_compute_together(nodes, beside, exo_models, model, sharding, tiers):
    text = f"{sharding}. {TEXT}"

    def ask_new_runners():
        """What an instance says whose runners have just started: only vaults know the prompt."""
        nodes.remove()
        nodes.place(exo_models(model), sharding)
        said = nodes.ask(text)
        for each in beside:
            nodes.wait(lambda each=each: each.tiers(tokens - 2) >= tiers or not each.agent.alive)
        return said

    nodes.place(exo_models(model), sharding)
    said, tokens, cached, _ = nodes.ask(text)
    assert cached < 16
    whole, nothing = (said, tokens, tokens - 2, [tokens - 2] * 2), (said, tokens, 0)
    for each in beside:
        nodes.wait(lambda each=each: each.tiers(tokens - 2) >= tiers)
    assert ask_new_runners() == whole
    for each in beside:
        each.lose()
        assert ask_new_runners()[:3] == nothing
        # What was computed is stored again, to its end.
        assert ask_new_runners() == whole
    beside[1].agent.kill()
    assert ask_new_runners()[:3] == nothing
    beside[1].start()
    assert ask_new_runners() == whole
    nodes.remove()


def test_one_node_compares_a_restored_prompt_while_it_waits_and_answers_meanwhile(exo_models, tmp_path):
    with tempfile.TemporaryDirectory(prefix="tierkv-") as home:
        beside = Beside(Path(home), quality_sample=1)
        node = started([beside], exo_models, tmp_path)
        try:
            node.place(exo_models("llama"))
            said, tokens, cached, _ = node.ask(TEXT)
            assert cached < 16
            node.wait(lambda: beside.tiers(tokens - 2) >= ROWS)
            node.remove()
            node.place(exo_models("llama"))
            assert node.ask(TEXT) == (said, tokens, tokens - 2, [tokens - 2])
            node.wait(lambda: sampled(beside.agent))
            (engine,) = sampled(beside.agent)
            assert (engine.kind, engine.quality_codec, engine.quality_top1_fraction) == ("exo", "lossless", 1.0)
            assert node.ask(TEXT)[:3] == (said, tokens, tokens - 2)
        finally:
            node.end()
            beside.cluster.close()


def sampled(agent):
    return [engine for engine in agent.snapshot().engines if engine.quality_samples]
