"""Time to first token: restored from vaults in other processes against cold, beside what is wanted of it.

    python bench/ttft.py [--codec int8] [--json]

Runs ``tierkv demo`` (the real mlx_lm.server, float32, this machine's cores) at the lengths below; the 4,096 tokens of
SmolLM2 alone take minutes cold. Ratios are of one run; ``hot`` is the ceiling: the prefix was still in memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from _leaving import leave_with

# model -> prompt tokens -> how many times faster than cold a restore should be.
GOALS = {"hybrid": {2048: 20, 4096: 40, 8192: 60}, "smollm2": {1024: 12, 4096: 25}}


def measured(model: str, codec: str) -> dict:
    lengths = ",".join(map(str, GOALS[model]))
    command = [sys.executable, "-m", "tierkv.cli.main", "demo", "--json", "--keep-going", "--model", model]
    done = subprocess.run([*command, "--codec", codec, "--tokens", lengths], stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        raise SystemExit(done.returncode or 1)
    return json.loads(done.stdout)


def rows(document: dict, model: str) -> list[dict]:
    out = []
    for one in document["models"]:
        goal = next(goal for tokens, goal in GOALS[model].items() if abs(tokens - one["tokens"]) < 8)
        kept = ("model", "tokens", "codec", "speedup", "next_turn_speedup", "hot_speedup", "ratio", "same_text")
        out.append({**{name: one[name] for name in kept}, "max_logit_diff": one["max_logit_diff"], "goal": goal})
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args()
    documents = {model: measured(model, arguments.codec) for model in GOALS}
    found = [row for model, document in documents.items() for row in rows(document, model)]
    failures = [failure for document in documents.values() for failure in document["failures"]]
    if arguments.json:
        machine = documents["hybrid"]["machine"]
        print(json.dumps({"schema": "tierkv.bench.ttft/1", "machine": machine, "rows": found, "failures": failures}))
        return 1 if failures else 0
    print(f"{'model':9}{'tokens':>7}{'restored':>10}{'wanted':>8}{'next turn':>11}{'hot':>8}{'ratio':>7}  text")
    for row in found:
        print(
            f"{row['model']:9}{row['tokens']:>7,}{row['speedup']:>9.1f}x{row['goal']:>7}x"
            f"{row['next_turn_speedup']:>10.1f}x{row['hot_speedup']:>7.1f}x{row['ratio']:>7.2f}"
            f"  {'same' if row['same_text'] else 'DIFFERS'}"
        )
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    leave_with(main)
