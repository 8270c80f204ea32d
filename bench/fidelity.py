"""int8 on SmolLM2's real weights against what is wanted of it: ``tierkv bench fidelity [--depth 512 --depth 2048]``.

Runs ``tierkv quality``: state rounded to bfloat16, 256 tokens evaluated at each depth; takes minutes on two cores.
Targets: KL <= 3e-4, the same likeliest token in >= 99 % of the positions, every layer's keys and values >= 37.5 dB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from _leaving import leave_with

TARGETS = (("kl_mean", 3e-4, "<="), ("top1_fraction", 0.99, ">="), ("snr_db_min", 37.5, ">="))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--depth", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    words = [word for depth in options.depth for word in ("--depth", depth)]
    command = [sys.executable, "-m", "tierkv", "quality", "--codec", options.codec, *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return done.returncode
    document = json.loads(done.stdout)
    if options.json:
        print(json.dumps({**document, "schema": "tierkv.bench.fidelity/1"}))
        return 0
    (codec,) = document["codecs"]
    print(f"{codec['codec']}, {document['input_dtype']}, ratio {codec['ratio']:.2f}")
    for name, wanted, sign in TARGETS:
        print(f"  {name:<14} {codec[name]:>10.3g}  wanted {sign} {wanted:g}")
    return 0


if __name__ == "__main__":
    leave_with(main)
