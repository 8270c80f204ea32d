"""``tierkv quality``: what each codec does to one's own model and text."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from tierkv.cli.parser import Commands
from tierkv.errors import EXIT_INTERRUPTED, MissingExtra, UsageError

CODECS = ("raw", "lossless", "int8-g256", "int8", "int8z")
_NEEDED = {"mlx_lm": "mlx-lm", "numba": "numba", "zstandard": "zstandard"}
_EXAMPLE = """\
  tierkv quality                                       the demonstration's SmolLM2, all codecs, depths 512 and 2,048
  tierkv quality --model ./Qwen3-8B-4bit --text notes.txt --depth 4096 --depth 16384
  tierkv quality --codec int8 --codec int8z --json
"""


def add(commands: Commands) -> None:
    parser = commands.add(
        "quality",
        _quality,
        "what each codec loses and saves, on your model and text",
        description="Prefills a text once, sends the cache through each codec and back, and compares what the model\n"
        "then says with what it says after the cache as it was: KL, the same likeliest token, perplexity; how exact\n"
        "each layer is; and the ratio to the bytes that came in. Nothing is stored, no agent is needed.",
        example=_EXAMPLE,
    )
    parser.add_argument("--model", metavar="PATH", default="", help="a folder that mlx-lm loads (the demonstration's)")
    parser.add_argument("--text", metavar="FILE", default="", help="the text (Python's own documentation)")
    parser.add_argument(
        "--codec", metavar="NAME", action="append", default=[], choices=CODECS, help="only this one; several times"
    )
    parser.add_argument(
        "--depth", metavar="N", action="append", type=int, default=[], help="after N tokens of context; several times"
    )
    parser.add_argument("--evaluate", metavar="N", type=int, default=256, help="tokens compared at each depth (256)")
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16"), default="auto",
        help="bfloat16: round the state first, as an engine that computes in bfloat16 keeps it (auto: as it is)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _quality(arguments: argparse.Namespace) -> int:
    for module, package in _NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(package, "demo")
    if any(not 16 <= depth <= 1 << 20 for depth in arguments.depth) or not 1 <= arguments.evaluate <= 65536:
        raise UsageError("--depth is from 16 to 1048576 tokens, --evaluate from 1 to 65536")
    if arguments.model and not Path(arguments.model).expanduser().is_dir():
        raise UsageError(f"{arguments.model} is not a folder; a model of a hub is downloaded with mlx-lm first")
    from tierkv.demo.blas import preload_environment

    words = ["--evaluate", str(arguments.evaluate), "--dtype", arguments.dtype]
    for name in ("model", "text"):
        words += [f"--{name}", getattr(arguments, name)] if getattr(arguments, name) else []
    for name in ("codec", "depth"):
        words += [word for value in getattr(arguments, name) for word in (f"--{name}", str(value))]
    words += ["--json"] if arguments.json else []
    environment = {**os.environ, **preload_environment(), "MLX_DISABLE_COMPILE": "1", "HF_HUB_OFFLINE": "1"}
    try:
        return subprocess.run([sys.executable, "-m", "tierkv.quality", *words], env=environment, check=False).returncode
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
