"""A runner in a process of its own, with a model folder that outlives it; steps come in as lines of JSON.

Run with the repository, tests/hooks and tests/state on PYTHONPATH.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
from exo_engine import Rig, only_models_of_mlx_lm

options = json.loads(sys.argv[1])
only_models_of_mlx_lm()
rig = Rig(
    options["module"], options["model"], options["socket"], Path(options["folder"]), seed=options["seed"],
    connect=options["connect"],
)  # fmt: skip
if options.get("slow_mover"):
    # Every piece takes its time: what is killed meanwhile is killed in mid-demotion.
    from tierkv.handoff import mover

    copy, mover.REGION_BYTES = mover.copy_into, 1 << 14

    def slowly(region, batch, layout):
        import time

        time.sleep(0.05)
        return copy(region, batch, layout)

    mover.copy_into = slowly
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    result = None
    if name == "serve":
        n, seed = arguments
        served = rig.serve(np.random.default_rng(seed).integers(0, 97, n).tolist())
        result = served.cached
    elif name == "moved":
        result = rig.tiers.mover.pending_bytes
    else:
        getattr(rig, name)()
    print(json.dumps({"result": result}), flush=True)
os._exit(0)
