"""One version of EXO in a process of its own: is it hooked, and does it give back what it evicted?

Prints one line of JSON. Run with the repository, tests/hooks and tests/state on PYTHONPATH.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from exo_engine import Rig, alone, real_module, same

from tierkv.cli.exo_place import shape_faults
from tierkv.hooks import exo


def forget(rig):
    assert rig.tiers.mover.drain(20)
    rig.prefixes.clear()


def close(one, other):
    return all(bool(mx.allclose(a, b, atol=1e-4)) for a, b in zip(one.logits, other.logits, strict=True))


socket, folder = sys.argv[1], Path(sys.argv[2])
try:
    module = real_module()
except (ImportError, AttributeError) as error:
    print(json.dumps({"unusable": f"{type(error).__name__}: {error}"}))
    sys.exit(0)
module.logger.add(sys.stderr, format="{message}")
said = {"faults": shape_faults(Path(module.__file__))}
before = dict(vars(module.KVPrefixCache))
if exo.hook_cache(module) is None:
    print(json.dumps({**said, "refused": True, "untouched": before == dict(vars(module.KVPrefixCache))}))
    sys.exit(0)
said |= {"refused": False, "models": {}}
for number, kind in enumerate(("llama", "gemma3_text", "qwen3_next")):
    # Other tokens for each: the agent in the test does not tell models apart.
    longer = np.random.default_rng(number).integers(0, 97, 460).tolist()
    tokens = longer[:400]
    rig = Rig("real", kind, socket, folder / kind, seed=7 + number, connect=False)
    assert rig.tiers.client.wait_available(20)
    own, afresh = alone("real", rig.model), alone("real", rig.model)
    cold, hot, further = own(tokens), own(tokens), own(longer)
    first = rig.serve(tokens)
    forget(rig)
    again, slots = rig.serve(tokens), {name: len(getattr(rig.prefixes, name)) for name in rig.hook.shape.lists}
    forget(rig)
    on = rig.serve(longer)
    said["models"][kind] = {
        "cached": [first.cached, again.cached, on.cached], "own": [cold.cached, hot.cached, further.cached],
        "same": [same(first, cold), same(again, hot), same(on, further)],
        "right": [close(again, cold), close(on, afresh(longer))], "slots": slots,
        "answers": len(rig.prefixes.get_kv_cache(rig.model, rig.prefixes.prompts[0])),
    }  # fmt: skip
    rig.close()
print(json.dumps(said))
