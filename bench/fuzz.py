"""Mutated messages at everything that reads what others wrote, guided by the lines of code that they reach.

    tierkv bench fuzz --messages 10000 --json
    tierkv bench fuzz --messages 2000 --only handoff --seed 7

Targets: every gRPC method of a vault and of an inference agent, the hand-off socket at both ends (a hostile hook, a
hostile agent), and the readers of records, segments, bulk streams, layouts, import files and recordings. A message may
be answered or refused; an exception of another kind, a logged error, an answer that does not come and memory that
grows are faults, printed with the message, and make the exit code 1. Seeds lie in tests/fuzz/seeds, a folder for each
target; ``--save DIR`` writes there what reached new lines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _scratch import scratch_folder

SEEDS = Path(__file__).resolve().parents[1] / "tests" / "fuzz" / "seeds"
MAX_SEED_BYTES = 4096


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000, help="how many in all (10000)")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (1)")
    parser.add_argument("--only", default="", metavar="TEXT", help="targets whose name has TEXT in it")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write messages that reached new lines, as seeds")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    options = parser.parse_args(argv)
    with scratch_folder() as folder:
        tempfile.tempdir = str(folder)  # whatever is made below goes with it
        report = run(options.messages, seed=options.seed, only=options.only, save=options.save, quiet=options.json)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    return 1 if any(each["faults"] for each in report["targets"]) else 0


def run(
    messages: int, *, seed: int = 1, only: str = "", save: Path | None = None, quiet: bool = False
) -> dict[str, Any]:
    """The report of a run as ``--json`` prints it. The servers' home is a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="tierkv-fuzz-home-") as home:
        before = os.environ.get("TIERKV_HOME")
        os.environ["TIERKV_HOME"] = home
        try:
            return _run(messages, seed, only, save, quiet)
        finally:
            os.environ.pop("TIERKV_HOME")
            if before is not None:
                os.environ["TIERKV_HOME"] = before


def _run(messages: int, seed: int, only: str, save: Path | None, quiet: bool) -> dict[str, Any]:
    import _fuzz_decoders as decoders
    import _fuzz_servers as servers
    import _fuzzing as fuzzing

    from tierkv.codec.registry import CODEC_NAMES, warm_up

    began = time.monotonic()
    # Compiling under a tracer takes a minute.
    warm_up(list(CODEC_NAMES))
    with fuzzing.Coverage() as coverage:
        peers = servers.Servers()
        targets: list[fuzzing.Target] = [
            *(made() for made in decoders.DECODERS), *servers.methods(peers), servers.AgentSocket(peers),
            servers.HookSocket(),
        ]  # fmt: skip
        chosen = [target for target in targets if only in target.name]
        say = (lambda _: None) if quiet else lambda text: print(text, file=sys.stderr)
        try:
            found = fuzzing.fuzz(chosen, messages, seed=seed, coverage=coverage, seeds=_seeds, say=say)
        finally:
            for target in targets:
                target.close()
            peers.close()
    if save is not None:
        for name, state in found.items():
            _save(save / name, state.corpus)
    return {
        "schema": "tierkv.bench-fuzz/1", "seed": seed, "seconds": round(time.monotonic() - began, 1),
        "messages": sum(state.messages for state in found.values()), "lines": len(coverage.lines),
        "faults": sum(len(state.faults) for state in found.values()),
        "targets": [
            {
                "name": name, "messages": state.messages, "new_lines": state.new_lines,
                "slowest_s": round(state.slowest_s, 3), "corpus": len(state.corpus),
                "outcomes": dict(state.outcomes.most_common(12)), "faults": state.faults[:20],
            }
            for name, state in found.items()
        ],
    }  # fmt: skip


def _seeds(name: str) -> Iterable[bytes]:
    folder = SEEDS / name
    return [path.read_bytes() for path in sorted(folder.iterdir())] if folder.is_dir() else []


def _save(folder: Path, corpus: Sequence[bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for data in corpus:
        if len(data) <= MAX_SEED_BYTES:
            (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def _show(report: dict[str, Any]) -> None:
    print(f"{'target':44} {'messages':>8} {'lines':>6} {'slowest':>8} {'faults':>6}  outcomes")
    for each in report["targets"]:
        outcomes = ", ".join(f"{name} {count}" for name, count in list(each["outcomes"].items())[:4])
        print(
            f"{each['name']:44} {each['messages']:8} {each['new_lines']:6} {each['slowest_s']:7.2f}s "
            f"{len(each['faults']):6}  {outcomes}"
        )
        for fault in each["faults"][:3]:
            print(f"    {fault[:500]}")
    print(
        f"{report['messages']} messages in {report['seconds']} s, {report['lines']} lines reached, "
        f"{report['faults']} faults"
    )


if __name__ == "__main__":
    raise SystemExit(main())
