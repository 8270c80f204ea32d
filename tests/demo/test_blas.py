import os
import platform
import subprocess
import sys

import pytest

from tierkv.demo import blas

linux = pytest.mark.skipif(platform.system() != "Linux", reason="only Linux wheels of MLX link the reference BLAS")

# The count of threads is asked of the process itself: the reference BLAS has no such name.
ASK = """
import ctypes, mlx.core as mx, numpy as np
assert ctypes.CDLL(None).openblas_get_num_threads() == 1
a = np.arange(64 * 48, dtype=np.float32).reshape(64, 48) / 4096
with mx.stream(mx.cpu):
    got = np.array(mx.array(a) @ mx.array(a.T))
assert np.abs(got - a.astype(np.float64) @ a.T.astype(np.float64)).max() < 1e-5
"""


@linux
def test_child_with_the_environment_multiplies_with_openblas(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    environment = blas.preload_environment()
    assert environment["LD_PRELOAD"].split(":")[0].endswith("libtierkv_openblas.so")
    done = subprocess.run([sys.executable, "-c", ASK], env={**os.environ, **environment}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@linux
def test_renamed_library_needs_only_what_every_linux_has():
    library = blas.preload_environment()["LD_PRELOAD"].split(":")[0]
    listed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    assert "not found" not in listed
    assert "gfortran" not in listed


def test_switched_off_by_an_environment_variable(monkeypatch):
    monkeypatch.setenv("TIERKV_NO_BLAS", "1")
    assert blas.preload() == blas.Preload({}, "TIERKV_NO_BLAS is set", wanted=False)


def test_elsewhere_than_linux_nothing_is_preloaded(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    prepared = blas.preload()
    assert prepared.environment == {}
    assert "Darwin" in prepared.reason
    assert not prepared.wanted


@linux
def test_missing_wheel_is_a_reason_and_not_an_error(monkeypatch):
    find = blas.importlib.metadata.version

    def find_less(name):
        if name == "scipy-openblas32":
            raise blas.importlib.metadata.PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(blas.importlib.metadata, "version", find_less)
    prepared = blas.preload()
    assert prepared.environment == {}
    assert "scipy-openblas32" in prepared.reason
    assert prepared.wanted


@linux
def test_an_engine_that_links_no_reference_blas_is_left_alone(tmp_path):
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    prepared = blas.preload(str(other))
    assert (prepared.environment, prepared.wanted) == ({}, False)
    assert "mlx-cpu" in prepared.reason


@linux
def test_the_check_is_run_by_the_python_that_runs_the_engine(tmp_path, monkeypatch):
    library = blas.preload_environment()["LD_PRELOAD"].split(":")[0]
    monkeypatch.setattr(blas, "_rename_symbols", lambda source, target: target.symlink_to(library))
    monkeypatch.setenv("TIERKV_HOME", str(tmp_path))
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\ncase $2 in *version*) echo 0.1;; *) echo no such instruction >&2; exit 132;; esac\n")
    other.chmod(0o755)
    prepared = blas.preload(str(other))
    assert prepared.environment == {}
    assert "no such instruction" in prepared.reason
    assert blas.preload().environment, "this Python has passed its own check"


@linux
def test_library_that_fails_its_check_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("TIERKV_HOME", str(tmp_path))
    monkeypatch.setattr(blas, "_SELF_CHECK", "raise SystemExit('wrong product')")
    prepared = blas.preload()
    assert prepared.environment == {}
    assert "wrong product" in prepared.reason


@linux
def test_path_that_the_loader_cannot_name_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("TIERKV_HOME", str(tmp_path / "with space"))
    assert "space" in blas.preload().reason


@linux
def test_preload_that_is_already_there_stays(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    (alone,) = blas.preload_environment()["LD_PRELOAD"].split(":")
    monkeypatch.setenv("LD_PRELOAD", "/lib/libother.so")
    assert blas.preload_environment()["LD_PRELOAD"] == f"{alone}:/lib/libother.so"
    monkeypatch.setenv("LD_PRELOAD", alone)
    assert blas.preload_environment()["LD_PRELOAD"] == alone
