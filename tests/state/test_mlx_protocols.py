"""The same cache tests with the older protocol of mlx-lm (state and meta_state, up to 0.31.3)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLDER = ROOT / ".venv" / "mlx-lm-0.31"


@pytest.mark.slow
@pytest.mark.skipif(not OLDER.is_dir(), reason=f"mlx-lm 0.31.3 is not in {OLDER} (make env puts it there)")
def test_every_cache_class_with_the_older_protocol():
    path = os.pathsep.join([str(OLDER), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not float16",
         "tests/state/test_mlx_cache.py", "tests/state/test_mlx_classes.py"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "TIERKV_TEST_MLX_LM": "0.31."}, timeout=220,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
