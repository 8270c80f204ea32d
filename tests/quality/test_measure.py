"""``tierkv quality`` on small models of every kind of cache: exact is exact, and losses are those that numpy finds."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tiny_mlx import CONFIGS, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tierkv.codec.registry import codec_named
from tierkv.errors import UsageError
from tierkv.quality.coded import through
from tierkv.quality.measure import measure
from tierkv.quality.report import document, lines
from tierkv.state import mlx_cache

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 12


def byte_tokenizer(folder: Path) -> None:
    """One token a byte, <eos> is 256."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)} | {"<eos>": 256}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "model_max_length": 100_000}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def program(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TIERKV_NO_BLAS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tierkv", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("models") / name
        folder.mkdir()
        model = tiny_model(name, vocab_size=260)
        mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
        (folder / "config.json").write_text(json.dumps({**CONFIGS[name], "vocab_size": 260}))
        byte_tokenizer(folder)
        return folder

    return make


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_exact_is_exact_and_the_lossier_the_smaller(folder_of, name: str):
    found = measure(folder_of(name), TEXT, codecs=("lossless", "int8", "int8z"), depths=(300, 64), evaluated=32)
    assert found.input_dtype == "float32"
    lossless, int8, int8z = found.codecs
    assert [each.depth for each in int8.depths] == [64, 300]
    assert (lossless.divergence.kl_mean, lossless.divergence.top1_fraction) == (0.0, 1.0)
    assert lossless.snr_db_min == math.inf
    assert 0 < int8.divergence.kl_mean < 0.05
    assert 30 < int8.snr_db_min < 60
    assert int8.snr_db_min == int8z.snr_db_min
    assert 1.0 < lossless.ratio < int8.ratio < 4.0


def test_of_bfloat16_int8_keeps_about_half(folder_of):
    found = measure(folder_of("llama"), TEXT, codecs=("int8",), depths=(512,), evaluated=8, as_bfloat16=True)
    assert found.input_dtype == "bfloat16"
    assert 1.5 < found.codecs[0].ratio < 2.0


def test_decibels_are_those_of_the_arrays(folder_of):
    """Encoded and decoded here once more, and compared by another formula."""
    model = tiny_model("llama", vocab_size=260)
    cache = make_prompt_cache(model)
    model(mx.array([list(range(5, 255))]), cache=cache)
    mx.eval([each.state for each in cache])
    layout = mlx_cache.describe(cache)
    arrays = {key: np.array(each) for key, each in mlx_cache.rows(cache, layout, 0, 250).items()}
    coded = through(codec_named("int8"), arrays, layout, 250)
    for one, (key, array) in zip(coded.quality, arrays.items(), strict=True):
        error = coded.arrays[key] - array
        assert one.snr_db == pytest.approx(20 * np.log10(np.linalg.norm(array) / np.linalg.norm(error)), abs=1e-3)
    assert coded.in_bytes == sum(array.nbytes for array in arrays.values())


def test_a_text_that_is_too_short_is_refused(folder_of):
    with pytest.raises(UsageError, match="3,000"):
        measure(folder_of("llama"), TEXT, codecs=("int8",), depths=(2990,), evaluated=9)


def test_the_document_and_the_table(folder_of):
    found = measure(folder_of("llama"), TEXT, codecs=("lossless", "int8"), depths=(64,), evaluated=8)
    told = document(found)
    assert told["schema"] == "tierkv.quality/1"
    assert [each["codec"] for each in told["codecs"]] == ["lossless", "int8"]
    assert told["codecs"][0]["snr_db_min"] is None
    assert {"codec", "ratio", "kl_mean", "top1_fraction", "snr_db_min"} <= told["codecs"][1].keys()
    assert len(told["codecs"][1]["depths"][0]["layers"]) == 4
    json.dumps(told, allow_nan=False)
    assert all(len(line) <= 80 for line in lines(found))
    assert "exact" in "\n".join(lines(found))


def test_the_command_on_a_model_and_a_text_of_ones_own(folder_of, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    ran = program(
        "quality", "--model", str(folder_of("llama")), "--text", str(text), "--codec", "int8", "--depth", "64",
        "--evaluate", "8", "--json",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["codecs"][0]["depths"][0]["depth"] == 64
    assert "depth 64" in ran.stderr or "loading the model" in ran.stderr
    assert program("quality", "--model", str(tmp_path / "nothing")).returncode == 2
    assert program("quality", "--depth", "3").returncode == 2
    assert program("quality", "--codec", "int9").returncode == 2
