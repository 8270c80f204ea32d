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


def every_float16(width):
    """[rows, width] finite patterns: neighbours in size together, and then far apart."""
    finite = np.arange(0x7C00, dtype=np.uint16)
    rows = np.concatenate((finite, finite | 0x8000)).reshape(-1, width)
    return np.concatenate((rows, rows.T.reshape(-1, width)))


def float32_near_ties(width):
    """[rows, width] patterns; in each row a peak of 127, so that the scale is 1, and values half way between codes or
    next to that."""
    rng = np.random.default_rng(5)
    values = (rng.integers(-126, 126, (64, width)) + 0.5).astype(np.float32)
    bits = values.view(np.uint32) + rng.integers(-1, 2, values.shape).astype(np.uint32)
    bits[:, 0] = np.float32(127).view(np.uint32)
    bits[32:] += np.uint32(3 << 23)
    return bits


@pytest.mark.slow
@pytest.mark.parametrize("without", ["lanes.HARDWARE_HALF = False", "lanes.HARDWARE_FMA = False", "generic"])
def test_a_processor_that_lacks_an_instruction_gives_the_same_bits(tmp_path, without):
    code = """
import numpy as np, sys
from tierkv.codec import lanes
WITHOUT
from tierkv.codec.registry import codec_named, decode_segment, encode_segment
made = {}
for name, rows in np.load(sys.argv[1]).items():
    for codec in ("int8", "int8-g256"):
        dtype = name.split("_")[0]
        header, (_, payload) = encode_segment(
            codec_named(codec), rows, dtype, layer=0, index=0, position=256, token_axis=None)
        out = np.zeros_like(rows)
        decode_segment(header, payload, out)
        made |= {f"{name} {codec} payload": np.frombuffer(payload, np.uint8), f"{name} {codec} out": out}
np.savez(sys.argv[2], **made)
"""
    arrays = {
        f"{dtype}_{width}": make(width)
        for dtype, make in (("float16", every_float16), ("float32", float32_near_ties))
        for width in (32, 64)
    }
    np.savez(tmp_path / "rows.npz", **arrays)
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""} if without == "generic" else {}
    code = code.replace("WITHOUT", "" if generic else without)
    run(code, tmp_path / "rows.npz", tmp_path / "made.npz", NUMBA_CACHE_DIR=str(tmp_path), **generic)
    made = np.load(tmp_path / "made.npz")
    for name, rows in arrays.items():
        for codec in ("int8", "int8-g256"):
            trip = Trip(codec, rows, name.split("_")[0])
            assert made[f"{name} {codec} payload"].tobytes() == bytes(trip.payload)
            assert (made[f"{name} {codec} out"] == trip.out).all()


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
