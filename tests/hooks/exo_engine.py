"""A runner around EXO's prefix cache, real or stand-in: what EXO does between a prompt and its first token."""

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import itertools
import json
import os
import sys
import time
import types
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from tiny_mlx import CONFIGS, changed, tiny_model

from tierkv.handoff.client import HandoffClient, model_files
from tierkv.hooks import exo, exo_model
from tierkv.hooks.memory import MemoryReading, MemoryRule

SOURCE = os.environ.get("TIERKV_EXO_SRC", "")
CACHE_MODULE = "exo.worker.engines.mlx.cache"
GIB = 1 << 30
seeds = itertools.count(1000)
# A model that leaves it to EXO which caches it gets: with KV_CACHE_BITS, quantised ones.
QUANTISABLE = {
    "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "rms_norm_eps": 1e-6,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 97, "rope_theta": 1e4,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes empty modules of ``names``, which EXO imports and no test uses."""

    def __init__(self, *names):
        self.names = names

    def find_spec(self, fullname, path, target=None):
        if fullname in self.names or fullname.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)

        def any_class(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return vars(module).setdefault(name, type(name, (), {}))

        module.__getattr__ = any_class
        return module

    def exec_module(self, module):
        pass


def without_the_rest():
    """EXO's cache can be imported without its fork of mlx-lm, its images, its own Rust part, and torch."""
    if not any(isinstance(each, Absent) for each in sys.meta_path):
        sys.meta_path.append(Absent("mlx_lm.models.deepseek_v4", "mlx_vlm", "mflux", "exo_rs"))
        # There, but it needs torch; EXO names one class of it for its types.
        sys.meta_path.insert(0, Absent("transformers.models.qwen3.modeling_qwen3"))


def only_models_of_mlx_lm():
    """mlx-lm's models and caches can be imported without what it imports itself, which takes seconds; not for EXO."""
    if not SOURCE and "mlx_lm" not in sys.modules:
        spec = importlib.machinery.PathFinder.find_spec("mlx_lm")
        sys.modules["mlx_lm"] = package = types.ModuleType("mlx_lm")
        package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec


def real_module():
    """EXO's own cache module, freshly imported; ImportError where it cannot be had."""
    if not SOURCE:
        raise ImportError("TIERKV_EXO_SRC is not set")
    if SOURCE not in sys.path:
        sys.path.insert(0, SOURCE)
    without_the_rest()
    sys.modules.pop(CACHE_MODULE, None)
    module = importlib.import_module(CACHE_MODULE)
    module.logger.remove()
    return module


def module_named(name):
    if name == "real":
        return real_module()
    import exo_stand_in

    return exo_stand_in.module()


@dataclasses.dataclass
class Region:
    content_hash: str
    start_pos: int
    end_pos: int


@dataclasses.dataclass
class Shard:
    """As EXO's shard metadata, as far as the hook reads it."""

    name: str = "tiny"
    device_rank: int = 0
    world_size: int = 1
    start_layer: int = 0
    end_layer: int = 0

    @property
    def model_card(self):
        return types.SimpleNamespace(model_id=self.name)


@dataclasses.dataclass
class Served:
    """``cached`` tokens were reused; ``logits`` of the first token and of greedy steps after it."""

    cached: int
    exact: bool
    logits: list
    index: int | None


def prefill(module, model, tokens, cache, step):
    """As EXO's: the state but for the last token, a snapshot at the start and after each step."""
    if not len(tokens):
        return []
    whole = module.has_non_kv_caches(cache)
    snapshots = [module.snapshot_ssm_states(cache)] if whole else []
    left = tokens[:-1]
    while len(left):
        mx.eval(model(left[:step][None], cache=cache))
        left = left[step:]
        if whole:
            snapshots.append(module.snapshot_ssm_states(cache))
    return snapshots


def serve(module, prefixes, model, tokens, regions=None, *, step=128, decode=3, least=100):
    """One request. ``least``: EXO updates the entry that it found only from 1,000 reused tokens on."""
    tokens = mx.array(tokens, dtype=mx.int32)
    given = {"media_regions": regions} if regions else {}
    cache, rest, index, *exact = prefixes.get_kv_cache(model, tokens, **given)
    cached = len(tokens) - len(rest)
    snapshots = prefill(module, model, rest[:-1], cache, step)
    if index is not None and cached >= least and cached >= len(tokens) / 2:
        prefixes.update_kv_cache(index, tokens, list(cache), snapshots, cached, **given)
    else:
        prefixes.add_kv_cache(tokens, list(cache), snapshots or None, **given)
    logits, last = [], rest[-2:]
    for _ in range(decode):
        out = model(last[None], cache=cache)[:, -1]
        mx.eval(out)
        logits.append(out)
        last = mx.argmax(out, axis=-1)
    return Served(cached, bool(exact and exact[0]), logits, index)


def same(one, other):
    return all(bool(mx.array_equal(a, b)) for a, b in zip(one.logits, other.logits, strict=True))


class Memory:
    """A machine whose memory a test sets: ``used`` and ``total`` in bytes."""

    def __init__(self, used=0, total=100 * GIB):
        self.used, self.total = used, total

    def read(self):
        return MemoryReading(self.used, self.total)


# One layer of each kind: recurrent ones take a CPU long.
SMALLER = {
    "gemma3_text": {"num_hidden_layers": 2},
    "qwen3_next": {"num_hidden_layers": 2, "full_attention_interval": 2},
}


def saved_model(name, folder, seed, vocab=97):
    """A tiny model with weights that no other test has; its folder is written unless it is there already."""
    changes = {"vocab_size": vocab, **SMALLER.get(name, {})}
    model = tiny_model(name, seed=seed, **changes)
    if folder.exists() and (folder / "config.json").exists():
        return model
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(changed(CONFIGS[name], changes)))
    return model


class PatientClient(HandoffClient):
    """As on an idle machine: answers may take long. ``forced`` settings stand whatever the agent says."""

    def __init__(self, *args, **named):
        self.forced, self._settings = {}, {}
        super().__init__(*args, **named)

    @property
    def settings(self):
        return {**self._settings, **self.forced}

    @settings.setter
    def settings(self, value):
        self._settings = value

    def offer(self, *args, **named):
        return super().offer(*args, **{**named, "budget_s": 5.0})

    def possible(self, *args, **named):
        return super().possible(*args, **{**named, "budget_s": 30.0})

    def restore(self, *args, **named):
        return super().restore(*args, **{**named, "budget_s": 30.0})


class Rig:
    """A hooked EXO cache with a model, connected to the agent at ``socket``. ``restart`` is a new runner."""

    def __init__(
        self, module_name, model_name, socket, folder, *, seed=None, vocab=97, memory=None, connect=True, **hook
    ):
        self.module_name, self.socket, self.memory, self._named = module_name, Path(socket), memory, hook
        self.folder = folder
        self.model = saved_model(model_name, folder, next(seeds) if seed is None else seed, vocab)
        self.start(connect=connect)

    def start(self, connect=True):
        self.module = module_named(self.module_name)
        rule = MemoryRule(self.memory.read) if self.memory is not None else None
        self.hook = exo.hook_cache(self.module, client=self.client, memory=rule, **self._named)
        self.prefixes = self.module.KVPrefixCache(None)
        shard = Shard()
        self.tiers = self.hook.started()
        self.tiers.loaded(shard, self.folder, model_files(self.folder))
        if connect:
            self.ready()

    def client(self):
        return PatientClient(self.socket, "exo", exo_model.engine_build())

    def ready(self, timeout_s=60.0):
        deadline = time.monotonic() + timeout_s
        client, handle = self.tiers.client, self.tiers.model.handle
        while time.monotonic() < deadline:
            if client.wait_available(0.5):
                client.report_hot({})
                if handle.state not in ("unknown", "hashing"):
                    return
            time.sleep(0.02)
        raise AssertionError(f"no agent: {client.last_error}, {handle.state}")

    def serve(self, tokens, regions=None, **named):
        return serve(self.module, self.prefixes, self.model, tokens, regions, **named)

    def stored(self):
        """Everything that was handed over is in the vaults."""
        assert self.tiers.mover.drain(60.0, stored=True), self.tiers.client.last_error

    def forget(self):
        """EXO's own cache is empty."""
        self.stored()
        self.prefixes.clear()

    def restart(self):
        self.close()
        self.start()

    def close(self):
        self.hook.remove()


def alone(module_name, model):
    """``serve`` of an EXO without the hook, with a cache of its own."""
    module = module_named(module_name)
    prefixes = module.KVPrefixCache(None)
    return lambda tokens, regions=None, **named: serve(module, prefixes, model, tokens, regions, **named)


def assert_reuses_as_exo(ours, own, first, second):
    """After ``first`` has left EXO's memory, ``second`` reuses what EXO reuses of its own entry, and goes on so."""
    own(first)
    local = own(second)
    assert local.cached > 0
    ours.serve(first)
    ours.forget()
    restored = ours.serve(second)
    # EXO takes one token more of an entry that is longer than the prompt; as after its own prefill, two are left here.
    assert restored.cached == min(local.cached, len(second) - 2)
    if restored.cached == local.cached:
        assert same(restored, local)
    else:
        assert mx.allclose(restored.logits[-1], local.logits[-1], atol=1e-4)
