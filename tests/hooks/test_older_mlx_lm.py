"""The hook with mlx-lm 0.31.3: the older cache protocol, and its server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLDER = ROOT / ".venv" / "mlx-lm-0.31"


@pytest.mark.slow
@pytest.mark.skipif(not OLDER.is_dir(), reason=f"mlx-lm 0.31.3 is not in {OLDER} (make env puts it there)")
def test_the_hook_works_with_the_older_mlx_lm():
    path = os.pathsep.join([str(OLDER), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not kv_bits and not hung",
         "tests/hooks/test_prompt_cache.py", "tests/hooks/test_cache_classes.py",
         "tests/hooks/test_mlx_lm_server.py::test_a_prompt_goes_cold_hot_evicted_and_restored_with_the_same_answer"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "TIERKV_TEST_MLX_LM": "0.31."}, timeout=220,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
