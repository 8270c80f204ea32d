"""Two ranks of a real EXO instance: its builder, its pipeline, its generators and its ring, each with an own agent."""

import json

import pytest
from exo_engine import QUANTISABLE, SOURCE
from test_exo_ranks import Process

from tierkv.demo.processes import free_port

pytestmark = pytest.mark.skipif(not SOURCE, reason="TIERKV_EXO_SRC is not set")
TEXT = "The tier of a cache is not its worth. " * 8
OTHER = "Nobody reads twice what somebody keeps. " * 6
LAYERS = {"llama": 2, "gemma3_text": 4, "step3p5": 4, "qwen3_next_in_halves": 4, "falcon_h1": 2, "qwen3": 2}
# EXO does not split Gemma 3 over ranks; this model with a sliding window it does.
STEP = {
    "model_type": "step3p5", "num_hidden_layers": 4, "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 16, "sliding_window": 64,
    "layer_types": ["full_attention", "sliding_attention"] * 2, "partial_rotary_factors": [0.5, 1.0] * 2,
    "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 32, "share_expert_dim": 32, "moe_layers_enum": "1,2",
    "attention_other_setting": {
        "num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 16, "attention_type": "sliding_attention",
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def exo_models(model_folders, tmp_path_factory):
    """A folder of models as EXO downloads them, and the id of one of them: exo_models("llama")."""
    root = tmp_path_factory.mktemp("exo-models")

    def model_id(name):
        place = root / f"tierkv--{name}"
        if not place.exists():
            import mlx.core as mx
            from tiny_mlx import CONFIGS

            CONFIGS.setdefault("step3p5", STEP)
            CONFIGS.setdefault("qwen3", QUANTISABLE)
            # EXO wants a layer of full attention on every rank.
            CONFIGS.setdefault("qwen3_next_in_halves", {**CONFIGS["qwen3_next"], "full_attention_interval": 2})
            place.symlink_to(model_folders(name))
            held = mx.load(str(place / "model.safetensors"))
            index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(held, "model.safetensors")}
            (place / "model.safetensors.index.json").write_text(json.dumps(index))
        return f"tierkv/{name}"

    model_id.root = root
    return model_id


@pytest.fixture
def instance(exo_models, tmp_path):
    made = []

    def start(sockets, model, *, hook=True, world=2, batch=True, kv_bits=0):
        ports = [free_port() for _ in range(world)]
        ranks = []
        for rank in range(world):
            options = {
                "rank": rank, "ports": ports, "model": exo_models(model), "layers": LAYERS[model], "hook": hook,
                "kv_bits": kv_bits, "folder": str(tmp_path / "ranks"),
            }  # fmt: skip
            environment = {
                "EXO_DEFAULT_MODELS_DIR": str(exo_models.root), "TIERKV_SOCKET": str(sockets[rank]),
                "EXO_HOME": str(tmp_path / "exo-home"), **({} if batch else {"EXO_NO_BATCH": "1"}),
            }  # fmt: skip
            ranks.append(Process(options, "exo_real_rank.py", environment))
        made.extend(ranks)
        for rank in ranks:
            rank.answer()
        return Instance(ranks)

    yield start
    for each in made:
        each.end()


class Instance:
    def __init__(self, ranks):
        self.ranks = ranks
        self.asked = 0

    def all(self, *step):
        for rank in self.ranks:
            rank.tell(*step)
        return [rank.answer() for rank in self.ranks]

    def one(self, rank, *step):
        self.ranks[rank].tell(*step)
        return self.ranks[rank].answer()

    def ask(self, text):
        """The text, and what each rank had in its cache."""
        self.asked += 1
        said = self.all("ask", text, self.asked)
        assert not any("error" in each for each in said), (said, self.ranks[0].log.read_text()[-3000:])
        return said[0]["text"], [each["cached"] for each in said], said[0]["tokens"]

    def end(self):
        for rank in self.ranks:
            rank.end()

    def evict(self):
        assert self.all("stored") == [True] * len(self.ranks)
        self.all("clear")


@pytest.mark.parametrize(
    ("model", "batch"),
    [("llama", True), ("step3p5", True), ("qwen3_next_in_halves", True), ("qwen3_next_in_halves", False)],
)
def test_two_ranks_of_exo_restore_the_same_or_compute_together(instance, clusters, model, batch):
    sockets = [cluster.socket for cluster in clusters]
    # Both ways of EXO share the vaults, and the model's identity: each has prompts of its own.
    text = f"{'Together' if batch else 'One by one'}. {TEXT}"
    plain = instance(sockets, model, hook=False, batch=batch)
    wanted, _, tokens = plain.ask(text)
    plain.end()
    exo = instance(sockets, model, batch=batch)
    assert exo.all("ready") == [True, True]
    assert exo.ask(text) == (wanted, [0, 0], tokens)
    exo.evict()
    assert exo.ask(text) == (wanted, [tokens - 2] * 2, tokens)
    longer, cached, _ = exo.ask(text + OTHER)
    # The prompts part before the end of the first: windows and states are known there only every 4,096 tokens.
    assert cached[0] == cached[1]
    assert (cached[0] > 0) == (model == "llama")
    # What rank 1 was promised does not come: both compute, and say the same.
    exo.one(1, "lose_fetches")
    exo.evict()
    assert exo.ask(text + OTHER)[:2] == (longer, [0, 0])
    exo.end()


@pytest.mark.parametrize(
    ("model", "kv_bits", "classes"),
    [
        ("llama", 0, ["KVCache"]), ("gemma3_text", 0, ["KVCache", "RotatingKVCache"]), ("falcon_h1", 0, ["CacheList"]),
        ("qwen3", 8, ["QuantizedKVCache"]),
    ],
)  # fmt: skip
def test_exo_that_answers_one_by_one_restores_as_well(instance, clusters, model, kv_bits, classes):
    """EXO_NO_BATCH: the only way in which EXO itself serves quantised rows. Both ways share what is stored."""
    sockets = [clusters[0].socket]
    plain = instance(sockets, model, hook=False, world=1, batch=False, kv_bits=kv_bits)
    wanted, _, tokens = plain.ask(TEXT)
    further, _, _ = plain.ask(TEXT + OTHER)
    plain.end()
    exo = instance(sockets, model, world=1, batch=False, kv_bits=kv_bits)
    assert exo.all("ready") == [True]
    assert exo.ask(TEXT) == (wanted, [0], tokens)
    exo.evict()
    assert exo.ask(TEXT) == (wanted, [tokens - 2], tokens)
    assert exo.all("classes") == [classes]
    # Killed, and started again the other way, if that can serve such rows: nothing but the vaults knows the prompt.
    exo.end()
    exo = instance(sockets, model, world=1, batch=not kv_bits, kv_bits=kv_bits)
    assert exo.all("ready") == [True]
    assert exo.ask(TEXT) == (wanted, [tokens - 2], tokens)
    assert exo.ask(TEXT + OTHER)[0] == further
    exo.end()


def test_a_rank_of_exo_without_an_agent_and_a_threshold_of_both(instance, clusters, tmp_path):
    exo = instance([clusters[0].socket, tmp_path / "nobody.sock"], "qwen3_next_in_halves")
    assert exo.one(0, "ready")
    own = exo.all("threshold")
    said, cached, _ = exo.ask(TEXT)
    assert cached == [0, 0]
    assert exo.one(0, "stored")
    exo.all("clear")
    assert exo.ask(TEXT)[:2] == (said, [0, 0])
    # Only rank 0 has been told one; both compare with it as soon as there is something to evict.
    exo.ask(OTHER)
    assert exo.all("threshold") == [0.6, 0.6] != own
    exo.end()
