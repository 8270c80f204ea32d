import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("state", "agents")]

VOCAB = 260


def write_tokenizer(folder):
    """A byte-level tokenizer without merges: one token a byte, <eos> is 256."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)} | {"<eos>": 256}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "model_max_length": 100_000,
        "chat_template": "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] ",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory):
    """Makes (once) and returns the folder of a tiny random model: model_folders("llama")."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from tiny_mlx import CONFIGS, changed, tiny_model

    made = {}

    def folder_of(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("models") / name
            folder.mkdir()
            model = tiny_model(name, vocab_size=VOCAB)
            mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
            (folder / "config.json").write_text(json.dumps(changed(CONFIGS[name], {"vocab_size": VOCAB})))
            write_tokenizer(folder)
            made[name] = folder
        return made[name]

    return folder_of


@pytest.fixture
def agent(tmp_path):
    """A running FakeAgent with an own socket."""
    from fake_agent import FakeAgent

    running = FakeAgent(tmp_path / "agent.sock").start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def agents():
    """A real agent and real vaults that EXO's caches share."""
    from agent_processes import Cluster

    with tempfile.TemporaryDirectory(prefix="tierkv-") as home:
        running = Cluster(Path(home))
        vaults = running.vault("kv-vault"), running.vault("ssm-vault")
        running.agent(*vaults, min_store_tokens=16, min_restore_tokens=16, probe_timeout_s=5.0)
        yield running
        running.close()


@pytest.fixture(scope="session")
def clusters(agents):
    """An agent for each of two ranks; the second has one vault for everything."""
    from agent_processes import Cluster

    with tempfile.TemporaryDirectory(prefix="tierkv-") as home:
        second = Cluster(Path(home))
        vault = second.vault("kv-vault")
        second.agent(vault, vault, min_store_tokens=16, min_restore_tokens=16, probe_timeout_s=5.0)
        yield [agents, second]
        second.close()


@pytest.fixture(
    params=[
        "stand-in",
        pytest.param(
            "real",
            marks=pytest.mark.skipif(not os.environ.get("TIERKV_EXO_SRC"), reason="TIERKV_EXO_SRC is not set"),
        ),
    ]
)
def which(request):
    """Which EXO: the stand-in always, EXO itself where it is."""
    return request.param


@pytest.fixture
def rig(which, agents, tmp_path):
    """A hooked EXO cache with a tiny model, a real agent and real vaults behind it: rig("llama")."""
    from exo_engine import Rig

    rigs = []

    def make(model_name="llama", **named):
        rigs.append(Rig(which, model_name, agents.socket, tmp_path / f"model-{len(rigs)}", **named))
        return rigs[-1]

    yield make
    for each in rigs:
        each.close()
