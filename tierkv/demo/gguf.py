"""A Llama in a GGUF file becomes what mlx-lm loads: float32 weights, a config and a tokenizer.

GGUF stores Llama's query and key rows in the order that rotates neighbouring pairs; mlx-lm rotates halves. The rows are
put back (llama.cpp, ``convert_hf_to_gguf.py``, ``LlamaModel.permute`` is the other direction).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
# Blocks of 32 weights: 4 bits each in Q4_0 and Q4_1, 8 in Q8_0.
_GROUP = 32
_CONTROL_TOKEN = 3


class Gguf:
    """One GGUF file of a Llama: its tensors and its metadata, read by MLX."""

    def __init__(self, path: Path) -> None:
        tensors, metadata = mx.load(str(path), return_metadata=True)  # pyright: ignore[reportAssignmentType]
        self._tensors: dict[str, mx.array] = tensors  # pyright: ignore[reportAttributeAccessIssue]
        self._metadata: Mapping[str, Any] = metadata  # pyright: ignore[reportAttributeAccessIssue]
        if self._metadata.get("general.architecture") != "llama":
            raise ValueError(f"{path.name} holds a {self._metadata.get('general.architecture')!r}, not a llama")

    def _number(self, key: str) -> float:
        return self._metadata[key].item()

    def config(self) -> dict[str, object]:
        """``config.json`` of the model, as transformers and mlx-lm read it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": int(self._number("llama.embedding_length")),
            "intermediate_size": int(self._number("llama.feed_forward_length")),
            "num_hidden_layers": int(self._number("llama.block_count")),
            "num_attention_heads": int(self._number("llama.attention.head_count")),
            "num_key_value_heads": int(self._number("llama.attention.head_count_kv")),
            "max_position_embeddings": int(self._number("llama.context_length")),
            "vocab_size": len(self._metadata["tokenizer.ggml.tokens"]),
            # The file keeps float32: 9.999999747378752e-06 is 1e-05.
            "rms_norm_eps": float(f"{self._number('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": float(self._number("llama.rope.freq_base")),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "torch_dtype": "float32",
            "bos_token_id": int(self._number("tokenizer.ggml.bos_token_id")),
            "eos_token_id": int(self._number("tokenizer.ggml.eos_token_id")),
            "pad_token_id": int(self._number("tokenizer.ggml.padding_token_id")),
        }

    def weights(self) -> dict[str, mx.array]:
        """Every weight in float32 under its mlx-lm name, evaluated."""
        heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
        out: dict[str, mx.array] = {}
        for name in self._tensors:
            base = name.removesuffix(".weight")
            if base == name:
                continue
            value = self._dequantised(base)
            match = _BLOCK.fullmatch(name)
            if match is None:
                out[f"{_TOP[base]}.weight"] = value
                continue
            layer, kind = match.groups()
            if kind in heads:
                value = _halves_from_pairs(value, int(self._number(heads[kind])))
            out[f"model.layers.{layer}.{_NAMES[kind]}.weight"] = value
        mx.eval(out)
        return out

    def _dequantised(self, base: str) -> mx.array:
        weight = self._tensors[f"{base}.weight"]
        scales = self._tensors.get(f"{base}.scales")
        if scales is None:
            return weight.astype(mx.float32)
        biases = self._tensors[f"{base}.biases"].astype(mx.float32)
        bits = 32 * weight.shape[-1] // (_GROUP * scales.shape[-1])
        return mx.dequantize(weight, scales.astype(mx.float32), biases, group_size=_GROUP, bits=bits)

    def save_tokenizer(self, folder: Path) -> None:
        """``tokenizer.json`` and ``tokenizer_config.json`` stand in ``folder``, for transformers' fast tokenizer."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        if (model := self._metadata["tokenizer.ggml.model"]) != "gpt2":
            raise ValueError(f"a tokenizer of kind {model!r} is not handled, only 'gpt2'")
        tokens: list[str] = self._metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in self._metadata["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])  # pyright: ignore[reportAttributeAccessIssue]
        tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        kinds = self._metadata["tokenizer.ggml.token_type"].tolist()
        control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        tokenizer.save(str(folder / "tokenizer.json"))

        def named(key: str) -> str:
            return tokens[int(self._number(f"tokenizer.ggml.{key}_token_id"))]

        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": named("bos"),
            "eos_token": named("eos"),
            "pad_token": named("padding"),
            "unk_token": named("unknown"),
            "model_max_length": int(self._number("llama.context_length")),
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "chat_template": self._metadata["tokenizer.chat_template"],
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _halves_from_pairs(rows: mx.array, heads: int) -> mx.array:
    """``rows``: [heads * dim, in] with each head's rotary pairs side by side; out: first halves, then second halves."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
