"""One rank of EXO instances in a process of its own: does what its standard input says, one line of JSON a step.

``start`` makes another instance with the same ring; the one before is over.

Run with the repository, tests/hooks and tests/state on PYTHONPATH.
"""

import json
import os
import sys
from pathlib import Path

import exo_engine
import mlx.core as mx
import numpy as np
from exo_engine import Memory, Rig, Shard, only_models_of_mlx_lm

from tierkv.handoff.client import model_files

options = json.loads(sys.argv[1])
only_models_of_mlx_lm()
os.environ["MLX_HOSTFILE"], os.environ["MLX_RANK"] = options["hostfile"], str(options["rank"])


GROUP = mx.distributed.init(backend="ring", strict=True)


class Rank(Rig):
    """``options``: socket, folder, seed, module, model, hooked, connect."""

    def __init__(self, options):
        super().__init__(
            options["module"], options["model"], options["socket"], Path(options["folder"]), seed=options["seed"],
            memory=Memory(), all_ranks_hooked=options["hooked"], callers=frozenset({exo_engine.__name__}),
            connect=options["connect"],
        )  # fmt: skip

    def start(self, connect=True):
        super().start(connect=False)
        self.prefixes = self.module.KVPrefixCache(GROUP)
        number = GROUP.rank()
        shard = Shard("tiny", number, GROUP.size(), number * 4, number * 4 + 4)
        self.tiers.loaded(shard, self.folder, model_files(self.folder))
        if connect:
            self.ready()

    def do_serve(self, parts):
        tokens = [token for n, seed in parts for token in np.random.default_rng(seed).integers(0, 97, n).tolist()]
        served = self.serve(tokens)
        return {"cached": served.cached, "top": [int(mx.argmax(each)) for each in served.logits]}

    def do_outside(self, parts):
        """A look-up as EXO's prefill server makes it: on this rank alone."""
        tokens = [token for n, seed in parts for token in np.random.default_rng(seed).integers(0, 97, n).tolist()]
        call = {"look": lambda get: get(self.model, mx.array(tokens))}
        exec("def look(get, model, tokens): return get(model, tokens)", call)
        call["__name__"] = "exo.worker.engines.mlx.disaggregated.serve"
        return len(tokens) - len(call["look"](self.prefixes.get_kv_cache, self.model, mx.array(tokens))[1])

    def do_ready(self):
        self.ready()

    def do_clear(self):
        self.prefixes.clear()

    def do_stored(self):
        self.stored()

    def do_setting(self, name, value):
        self.tiers.client.forced[name] = value

    def do_memory(self, used):
        self.memory.used = used

    def do_evict(self):
        self.prefixes._evict_if_needed()
        return [len(each) for each in self.prefixes.prompts]

    def do_sizes(self):
        return self.prefixes._tierkv.sizes()

    def do_threshold(self):
        return round(self.module._MEMORY_THRESHOLD, 6)

    def do_lose_fetches(self):
        def lost(*args, **named):
            raise ConnectionError("lost on the way")

        self.tiers.fetch.fetch = lost


rank = None
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    if name == "start":
        if rank is not None:
            rank.close()
        rank, result = Rank(*arguments), None
    else:
        result = getattr(rank, f"do_{name}")(*arguments)
    print(json.dumps({"result": result}), flush=True)
os._exit(0)
