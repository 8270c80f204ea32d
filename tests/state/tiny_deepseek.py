"""DeepSeek V4 in small: EXO's own model where its build of mlx-lm is, a class of the same fields elsewhere."""

import importlib
import importlib.machinery
import sys
import types

import mlx.core as mx
import mlx_lm.models
from mlx_lm.models import llama
from mlx_lm.models.cache import RotatingKVCache
from tiny_mlx import CONFIGS

from tierkv.state.mlx_deepseek import BRANCH_ARRAYS, BRANCH_LENGTHS, DEEPSEEK_MODULE

TINY = {
    "model_type": "deepseek_v4", "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 2, "head_dim": 32, "qk_rope_head_dim": 16, "sliding_window": 64,
    "compress_ratios": [0, 4, 16], "index_n_heads": 2, "index_head_dim": 32, "index_topk": 16,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hash_layers": 1, "hc_mult": 2,
    "hc_sinkhorn_iters": 2, "max_position_embeddings": 4096,
}  # fmt: skip
RATIO = 4


def own():
    """The module of the installed mlx-lm; None if it has none, whatever stands in its place."""
    spec = importlib.machinery.PathFinder.find_spec(DEEPSEEK_MODULE, mlx_lm.models.__path__)
    return None if spec is None else importlib.import_module(DEEPSEEK_MODULE)


class Branch:
    __slots__ = (*BRANCH_ARRAYS, *BRANCH_LENGTHS, "buffer_count")

    def __init__(self):
        for name in self.__slots__:
            setattr(self, name, None)
        self.buffer_count = 0

    def feed(self, rows):
        """Rows [1, n, width] go into the pool in means of RATIO; what is not enough for one waits."""
        waiting = rows if self.buffer_kv is None else mx.concatenate([self.buffer_kv, rows], axis=1)
        whole = waiting.shape[1] // RATIO * RATIO
        self.buffer_kv = waiting[:, whole:] if whole < waiting.shape[1] else None
        self.buffer_count = waiting.shape[1] - whole
        if whole:
            means = waiting[:, :whole].reshape(1, -1, RATIO, waiting.shape[2]).mean(axis=2)
            self.pool = means if self.pool is None else mx.concatenate([self.pool, means], axis=1)


class DeepseekV4Cache:
    """A window, and pools of compressed rows that a model reads together with it."""

    def __init__(self, sliding_window):
        self.local = RotatingKVCache(max_size=sliding_window)
        self._branches = {"compressor": Branch(), "indexer": Branch()}
        self._pending_lengths = None

    @property
    def offset(self):
        return self.local.offset

    def update_and_fetch(self, keys, values):
        """As of the window; the values with something of the whole pool and of what waits for it."""
        for branch, rows in zip(self._branches.values(), (keys, values), strict=True):
            branch.feed(rows.swapaxes(1, 2).flatten(2))
        keys, values = self.local.update_and_fetch(keys, values)
        for branch in self._branches.values():
            for rows in (branch.pool, branch.buffer_kv):
                if rows is not None:
                    values = values + rows.mean()
        return keys, values

    def make_mask(self, *args, **named):
        return self.local.make_mask(*args, **named)

    def is_trimmable(self):
        return False

    def trim(self, n):
        return 0


DeepseekV4Cache.__module__ = DEEPSEEK_MODULE


def stand_in():
    """A module as EXO and TierKV look at it, with a small Llama that has such caches for its model."""

    class Model(llama.Model):
        def make_cache(self):
            return [DeepseekV4Cache(64) for _ in self.layers]

    class ModelArgs:
        @staticmethod
        def from_dict(config):
            return llama.ModelArgs.from_dict({**CONFIGS["llama"], "vocab_size": config["vocab_size"]})

    module = types.ModuleType(DEEPSEEK_MODULE)
    module.DeepseekV4Cache, module._CompressorBranch = DeepseekV4Cache, Branch
    module.Model, module.ModelArgs = Model, ModelArgs
    return module


def put_in_place(monkeypatch):
    """``tiny_model("deepseek_v4")`` works: with the installed module, or else with the stand-in."""
    module = own() or stand_in()
    monkeypatch.setitem(sys.modules, DEEPSEEK_MODULE, module)
    monkeypatch.setattr(mlx_lm.models, "deepseek_v4", module, raising=False)
    monkeypatch.setitem(CONFIGS, "deepseek_v4", TINY)
    return module
