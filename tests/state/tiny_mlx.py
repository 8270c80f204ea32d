"""Small random-weight models of mlx-lm itself, one for each mix of cache classes."""

import importlib

import mlx.core as mx
from mlx.utils import tree_map

CONFIGS = {
    "llama": {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "vocab_size": 97,
    },
    "one_head": {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5, "vocab_size": 97,
    },
    "quantisable": {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-5, "vocab_size": 97,
    },
    "gemma3_text": {
        "model_type": "gemma3_text", "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97,
        "query_pre_attn_scalar": 16, "sliding_window": 256, "sliding_window_pattern": 2,
    },
    "qwen3_next": {
        "model_type": "qwen3_next", "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4, "num_experts": 0, "num_experts_per_tok": 0, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 0, "mlp_only_layers": [], "moe_intermediate_size": 0,
        "rms_norm_eps": 1e-6, "vocab_size": 97, "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096, "full_attention_interval": 4,
    },
    "mamba2": {
        "model_type": "mamba2", "num_heads": 4, "head_dim": 16, "vocab_size": 97, "hidden_size": 32,
        "intermediate_size": 64, "state_size": 16, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4, "n_groups": 1, "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True,
        "time_step_limit": [0.0, 1e9], "time_step_rank": "auto",
    },
    "mamba": {
        "model_type": "mamba", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "state_size": 8,
        "num_hidden_layers": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4,
    },
    # Recurrent layers and windows.
    "recurrent_gemma": {
        "model_type": "recurrent_gemma", "attention_bias": False, "conv1d_width": 4, "hidden_size": 32,
        "intermediate_size": 48, "logits_soft_cap": 30.0, "num_attention_heads": 2, "num_hidden_layers": 3,
        "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "attention_window_size": 256,
        "vocab_size": 97, "block_types": ["recurrent", "recurrent", "attention"],
    },
    # Attention, windows and recurrent layers. Since mlx-lm 0.32.
    "gear": {
        "model_type": "gear", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
        "sliding_window": 256,
        "layer_types": ["conv_mixer", "sliding_attention", "full_attention", "conv_mixer"],
    },
    # Every layer a CacheList of two KVCaches.
    "deepseek_v32": {
        "model_type": "deepseek_v32", "vocab_size": 97, "hidden_size": 32, "index_head_dim": 16, "index_n_heads": 2,
        "index_topk": 64, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "q_lora_rank": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16, "first_k_dense_replace": 2,
    },
    # CacheLists of one or two KVCaches, the second with values of no width. Since mlx-lm 0.32.
    "minimax_m3_vl": {
        "model_type": "minimax_m3_vl",
        "text_config": {
            "hidden_size": 32, "intermediate_size": 16, "dense_intermediate_size": 48, "shared_intermediate_size": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "num_local_experts": 2,
            "num_experts_per_tok": 1, "head_dim": 16, "vocab_size": 97,
            "mlp_layer_types": ["dense", "dense", "dense"],
            "layer_types": ["full_attention", "sparse", "sparse"], "index_n_heads": 2, "index_head_dim": 8,
            "index_block_size": 64, "index_topk_blocks": 2,
        },
    },
    # Every layer a CacheList of recurrent state and a KVCache.
    "falcon_h1": {
        "model_type": "falcon_h1", "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "mamba_d_ssm": 32,
        "mamba_d_head": 16, "mamba_n_heads": 2, "mamba_d_state": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 97,
    },
    # Every layer a CacheList of recurrent state and a window or a KVCache.
    "baichuan_m1": {
        "model_type": "baichuan_m1", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "rope_theta": 1e4,
        "sliding_window": 256, "sliding_window_layers": [0, 2], "conv_window": 2, "rms_norm_eps": 1e-6,
    },
    # Recurrent state of token ids, then CacheLists of two KVCaches.
    "longcat_flash_ngram": {
        "model_type": "longcat_flash_ngram", "hidden_size": 32, "ffn_hidden_size": 48, "moe_topk": 1,
        "expert_ffn_hidden_size": 16, "n_routed_experts": 2, "zero_expert_num": 1, "num_layers": 2, "vocab_size": 97,
        "max_position_embeddings": 4096, "num_attention_heads": 2, "kv_lora_rank": 16, "q_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 3,
    },
    # Chunks of 256, every fourth layer a KVCache.
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            "attention_bias": False, "attention_chunk_size": 256, "head_dim": 16, "hidden_size": 32,
            "interleave_moe_layer_step": 8, "intermediate_size": 16, "intermediate_size_mlp": 48,
            "max_position_embeddings": 4096, "model_type": "llama4_text", "num_attention_heads": 2,
            "num_experts_per_tok": 1, "num_hidden_layers": 4, "num_key_value_heads": 1, "num_local_experts": 2,
            "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e4, "use_qk_norm": True, "vocab_size": 97,
        },
    },
}  # fmt: skip
# Those that older versions do not have.
SINCE_0_32 = frozenset({"gear", "minimax_m3_vl"})


def changed(config, changes):
    """The configuration with ``changes``; where a model nests its own, they go there."""
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **changes}}
    return {**config, **changes}


def tiny_model(name, dtype=mx.float32, seed=7, **changes):
    """A model of CONFIGS[name] (with ``changes``) and random weights of ``dtype``."""
    config = changed(CONFIGS[name], changes)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))

    def cast(array):
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map(cast, model.parameters()))
    mx.eval(model.parameters())
    return model


def prompt(n, seed=1):
    """n token ids below 97, [1, n] int32."""
    return mx.random.randint(0, 97, (1, n), key=mx.random.key(seed))
