"""An engine's process gets nothing from the hook but the standard library, numpy, psutil, mlx and mlx_lm."""

import subprocess
import sys

import pytest

FOREIGN = ("grpc", "pydantic", "numba", "blake3", "xxhash", "zstandard", "google", "textual", "rich", "tomlkit")


@pytest.mark.parametrize(
    "module", ["tierkv.hooks.mlx_lm", "tierkv.hooks.exo", "tierkv.state.mlx_cache", "tierkv.handoff.mover"]
)
def test_the_hook_brings_nothing_foreign(module):
    """What mlx_lm itself imports does not count: it is imported first."""
    code = (
        "import importlib, sys, mlx_lm.server\n"
        "before = set(sys.modules)\n"
        f"importlib.import_module({module!r})\n"
        f"print(sorted(m for m in set(sys.modules) - before if m.split('.')[0] in {FOREIGN!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
