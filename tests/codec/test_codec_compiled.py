import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from segment_trips import Trip

import tierkv

TRIP = """
import numpy as np
from tierkv.codec.registry import codec_named, decode_segment, encode_segment
bits = np.arange(256, dtype=np.uint16).reshape(4, 64)
header, (_, payload) = encode_segment(
    codec_named("int8"), bits, "bfloat16", layer=0, index=0, position=256, token_axis=0)
out = np.zeros_like(bits)
decode_segment(header, payload, out)
print((out[:2] == bits[:2]).all())
"""


def run(code, *arguments, **environment):
    """What a fresh interpreter prints."""
    variables = {**os.environ, "PYTHONPATH": str(Path(tierkv.__file__).parents[1]), **environment}
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_a_package_that_cannot_be_written_to_caches_in_the_users_own_directory(tmp_path):
    package, cache = tmp_path / "site" / "tierkv", tmp_path / "cache"
    shutil.copytree(Path(tierkv.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "codec" / "__pycache__").write_text("a file, so nothing can be put below it")
    places = {"PYTHONPATH": str(package.parent), "XDG_CACHE_HOME": str(cache), "HOME": str(tmp_path)}
    assert run(TRIP, **places, PYTHONDONTWRITEBYTECODE="1", NUMBA_CACHE_DIR="") == "True"
    made = {path.name for path in cache.rglob("*.nbc")}
    assert made
    assert run(TRIP, **places, PYTHONDONTWRITEBYTECODE="1", NUMBA_CACHE_DIR="") == "True"
    assert {path.name for path in cache.rglob("*.nbc")} == made


@pytest.mark.slow
def test_kernels_work_where_nothing_can_be_cached():
    assert run("import numba.core.caching as caching; caching.CacheImpl._locator_classes = []\n" + TRIP) == "True"


@pytest.mark.slow
def test_float16_without_the_processors_conversions_gives_the_same_bits(tmp_path):
    code = """
import numpy as np, sys
from tierkv.codec import lanes
lanes.HARDWARE_HALF = False
from tierkv.codec.registry import codec_named, decode_segment, encode_segment
rows = np.load(sys.argv[1])
header, (_, payload) = encode_segment(
    codec_named("int8"), rows, "float16", layer=0, index=0, position=256, token_axis=None)
out = np.zeros_like(rows)
decode_segment(header, payload, out)
np.savez(sys.argv[2], payload=np.frombuffer(payload, np.uint8), out=out)
"""
    finite = np.arange(0x7C00, dtype=np.uint16)
    rows = np.concatenate((finite, finite | 0x8000)).reshape(-1, 32)
    rows = np.concatenate((rows, rows.T.reshape(-1, 32)))
    np.save(tmp_path / "rows.npy", rows)
    run(code, tmp_path / "rows.npy", tmp_path / "made.npz", NUMBA_CACHE_DIR=str(tmp_path))
    made, trip = np.load(tmp_path / "made.npz"), Trip("int8", rows, "float16")
    assert made["payload"].tobytes() == bytes(trip.payload)
    assert (made["out"] == trip.out).all()


def test_a_missing_numba_names_the_extra_to_install():
    code = """
import sys
sys.modules["numba"] = None
from tierkv.codec.registry import warm_up
from tierkv.errors import MissingExtra
warm_up(["raw"])
try:
    warm_up(["int8"])
except MissingExtra as error:
    print(error)
"""
    assert run(code) == "the package 'numba' is missing: pip install 'tierkv[agent]'"
