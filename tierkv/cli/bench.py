"""``tierkv bench``: runs a benchmark of the checkout; everything after its name goes to it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tierkv.cli.parser import Commands
from tierkv.errors import Terminated, UsageError, exit_code

_ROOT = Path(__file__).resolve().parents[2] / "bench"


def add(commands: Commands) -> None:
    parser = commands.add(
        "bench",
        _bench,
        "run a benchmark: kernels, store, transport, restores",
        description="Runs a benchmark of the checkout; what follows its name goes to it. Without a name it lists them.",
        example="  tierkv bench codec\n  tierkv bench codec -- --help\n  tierkv bench vault-kill --kills 1000 --json",
        takes_rest=True,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="for example codec")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="for the benchmark")


def _bench(arguments: argparse.Namespace) -> int:
    from tierkv.cli.output import say

    names = sorted(path.stem.replace("_", "-") for path in _ROOT.glob("*.py") if not path.stem.startswith("_"))
    if not names:
        raise UsageError(f"there are no benchmarks here ({_ROOT}): they come with the source, not with the package")
    if arguments.name is None:
        say("\n".join(names))
        return 0
    if arguments.name not in names:
        raise UsageError(f"there is no benchmark {arguments.name!r}; there are: {', '.join(names)}")
    script = _ROOT / f"{arguments.name.replace('-', '_')}.py"
    return _run([sys.executable, str(script), *arguments.words, *arguments.rest])


def _run(command: list[str]) -> int:
    """The benchmark's exit code; what interrupts this process interrupts the benchmark, which cleans up."""
    with subprocess.Popen(command) as running:
        try:
            return running.wait()
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Terminated):
                running.terminate()
            running.wait()
            return exit_code(interrupt)
