"""What ``tierkv quality`` runs in a process of its own, where a fast BLAS can be preloaded."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from tierkv.demo.models import model_folder
from tierkv.demo.text import library_text
from tierkv.errors import TierKVError, UsageError, exit_code
from tierkv.quality.measure import DEFAULT_CODECS, measure
from tierkv.quality.report import document, lines

_DEMO_MODEL = "smollm2"
_SHOWN_EVERY_S = 2.0


class _Progress:
    """Steps on stderr: over one another on a terminal, else one every two seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown_s = float("-inf")

    def __call__(self, text: str) -> None:
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{text}")
        elif time.monotonic() - self._shown_s >= _SHOWN_EVERY_S:
            sys.stderr.write(f"{text}\n")
            self._shown_s = time.monotonic()
        sys.stderr.flush()

    def done(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _text(path: str) -> str:
    if not path:
        return library_text()
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def main() -> int:
    parser = argparse.ArgumentParser(prog="tierkv quality")
    parser.add_argument("--model", default="")
    parser.add_argument("--text", default="")
    parser.add_argument("--codec", action="append", default=[])
    parser.add_argument("--depth", action="append", type=int, default=[])
    parser.add_argument("--evaluate", type=int, default=256)
    parser.add_argument("--dtype", choices=("auto", "bfloat16"), default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    progress = _Progress()
    try:
        path = Path(options.model).expanduser() if options.model else model_folder(_DEMO_MODEL, progress)
        # The demonstration's model is float32 only because a CPU multiplies that fast.
        rounds = options.dtype == "bfloat16" or (not options.model and options.dtype == "auto")
        found = measure(
            path, _text(options.text), codecs=options.codec or DEFAULT_CODECS, depths=options.depth or (512, 2048),
            evaluated=options.evaluate, as_bfloat16=rounds, progress=progress,
        )  # fmt: skip
    except TierKVError as error:
        progress.done()
        sys.stderr.write(f"tierkv: {error}\n")
        return exit_code(error)
    progress.done()
    sys.stdout.write((json.dumps(document(found), indent=2) if options.json else "\n".join(lines(found))) + "\n")
    return 0


def entry() -> None:
    """Ends without C++ destructors: MLX's worker threads make them abort (mlx 0.32.4)."""
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
