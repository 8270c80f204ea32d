"""``tierkv demo``: a real model's prompt goes cold, hot, evicted and restored, on this machine alone."""

from __future__ import annotations

import argparse

from tierkv import paths
from tierkv.cli.parser import Commands

_EXAMPLE = """\
  tierkv demo                                      both models, a table at the end
  tierkv demo --model hybrid --tokens 2048,4096 --codec lossless
  tierkv demo --json > demo.json
"""


def add(commands: Commands) -> None:
    from tierkv.demo.main import add_arguments

    parser = commands.add(
        "demo",
        _demo,
        "a real model, evicted and restored: cold, hot and restored times side by side",
        description="Starts a KV vault, an SSM vault, an inference agent and the real mlx_lm.server on this machine,\n"
        "sends real text, evicts it, asks again, and prints what it cost and whether the text was the same.\n"
        "Reads no configuration. Its processes and its folder of temporary files go with it, also when it is\n"
        "killed; for the next time the two models (0.9 GB) and, on Linux, a BLAS library (25 MB) are kept in\n"
        f"{paths.cache_dir()}.",
        example=_EXAMPLE,
    )
    add_arguments(parser)


def _demo(arguments: argparse.Namespace) -> int:
    from tierkv.demo.main import run

    return run(arguments)
