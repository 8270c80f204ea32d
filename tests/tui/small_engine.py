"""The real mlx_lm.server with tiers and the real agent beside it, on a machine so small that the cache is most of it.

    SMALL_MACHINE=FILE python small_engine.py MODEL_FOLDER PORT SOCKET
    SMALL_MACHINE=FILE python small_engine.py agent --role inference ...

Memory in use is what MLX holds in the engine's process, which FILE passes on to the agent. The first run makes the
folder: a tiny llama with random weights, one token a byte.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "hooks"), str(TESTS / "state")]

MACHINE_BYTES = 16 << 20
OTHERS_BYTES = 1 << 20


def make_model(folder: Path) -> None:
    import mlx.core as mx
    from conftest import VOCAB, write_tokenizer
    from mlx.utils import tree_flatten
    from tiny_mlx import CONFIGS, tiny_model

    folder.mkdir(parents=True)
    model = tiny_model("llama", vocab_size=VOCAB)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps({**CONFIGS["llama"], "vocab_size": VOCAB}))
    write_tokenizer(folder)


def small_machine(held: Callable[[], int]) -> None:
    """psutil tells of a machine of ``MACHINE_BYTES``, of which others take ``OTHERS_BYTES`` and MLX what it holds."""

    def memory() -> SimpleNamespace:
        used = min(MACHINE_BYTES, OTHERS_BYTES + held())
        return SimpleNamespace(total=MACHINE_BYTES, available=MACHINE_BYTES - used, used=used)

    psutil.virtual_memory = memory


def told() -> int:
    """What the engine holds, in its own process or by what it said last."""
    place = Path(os.environ["SMALL_MACHINE"])
    if "mlx.core" in sys.modules:
        size = int(sys.modules["mlx.core"].get_active_memory())
        draft = place.with_name(f"{place.name}.{threading.get_ident()}")
        draft.write_text(str(size))
        draft.replace(place)
        return size
    return int(place.read_text()) if place.exists() else 0


def main() -> int:
    small_machine(told)
    if sys.argv[1] == "agent":
        from tierkv.cli.main import main as program

        return program(sys.argv[1:])
    folder, port, socket = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if not folder.is_dir():
        make_model(folder)
    from tierkv.hooks import mlx_lm

    return mlx_lm.main(["--tierkv-socket", socket, "--", "--model", str(folder), "--port", port])


if __name__ == "__main__":
    sys.exit(main())
