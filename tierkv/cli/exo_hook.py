"""The files that put TierKV's hook into another Python environment, and take it out again.

    site-packages/tierkv_exo_hook.pth         one line, gated by an environment variable
    site-packages/tierkv_exo_hook/__init__.py waits for EXO's modules
                                 /vendor/tierkv/...  the engine-side modules: standard library, numpy, psutil, mlx
                                 /settings.json      what the hook has to know at its start
                                 /installed.json     a digest of all that, to see what is there

None of EXO's own files is touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tierkv
from tierkv import __version__
from tierkv.errors import StartupError

PACKAGE = "tierkv_exo_hook"
PTH = f"{PACKAGE}.pth"
# Quiet where the folder is gone: a .pth that fails would be heard of at every start of that Python.
LINE = (
    "import os; os.environ.get('TIERKV_EXO') in ('0', 'off', 'false', 'no') or "
    f"exec('try:\\n import {PACKAGE}\\nexcept ImportError:\\n pass')\n"
)
SITECUSTOMIZE = f'''"""Starts TierKV's hook, then whatever sitecustomize this one stands in front of."""
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
if here not in sys.path:
    sys.path.insert(0, here)
if os.environ.get("TIERKV_EXO") not in ("0", "off", "false", "no"):
    import {PACKAGE}
rest = [place for place in sys.path if os.path.abspath(place or ".") != here]
import importlib.machinery, importlib.util
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
if spec is not None and spec.loader is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
'''
# In an engine's process: errors, units, paths and these packages.
MODULES = ("__init__.py", "py.typed", "errors.py", "units.py", "paths.py")
PACKAGES = ("state", "handoff", "hooks")


@dataclass(frozen=True, slots=True)
class Installed:
    """What lies in an environment. ``digest``: of the files as they were written."""

    version: str
    digest: str
    settings: Mapping[str, str]


def files(settings: Mapping[str, str]) -> dict[str, bytes]:
    """Every file of the hook package, by its path in it, but ``installed.json``."""
    root = Path(tierkv.__file__).parent
    sources = [root / name for name in MODULES if (root / name).is_file()]
    sources += [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    found = {f"vendor/tierkv/{path.relative_to(root).as_posix()}": path.read_bytes() for path in sources}
    found["__init__.py"] = (root / "hooks" / "exo_boot.py").read_bytes()
    found["settings.json"] = json.dumps(dict(settings), indent=1, sort_keys=True).encode()
    return found


def digest(content: Mapping[str, bytes]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(content):
        total.update(f"{name}\0{len(content[name])}\0".encode())
        total.update(content[name])
    return total.hexdigest()


def write(folder: Path, settings: Mapping[str, str]) -> Installed:
    """The hook package is in ``folder``, whole or, when this raises, as it was.

    Raises StartupError if it cannot be written.
    """
    content = files(settings)
    installed = Installed(__version__, digest(content), settings)
    said = {"version": installed.version, "digest": installed.digest, "settings": dict(settings)}
    content["installed.json"] = json.dumps(said, indent=1, sort_keys=True).encode()
    target, fresh = folder / PACKAGE, folder / f".{PACKAGE}.new-{os.getpid()}"
    try:
        for name, data in content.items():
            place = fresh / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise StartupError(f"{folder} cannot be written: {error}") from error
    return installed


def write_pth(folder: Path) -> None:
    try:
        (folder / PTH).write_text(LINE, encoding="utf-8")
    except OSError as error:
        raise StartupError(f"{folder / PTH} cannot be written: {error}") from error


def installed_in(folder: Path) -> Installed | None:
    """What ``write`` left in ``folder``, None if that is not there or not readable."""
    try:
        said = json.loads((folder / PACKAGE / "installed.json").read_text(encoding="utf-8"))
        return Installed(
            str(said["version"]), str(said["digest"]), {str(k): str(v) for k, v in said["settings"].items()}
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def has_pth(folder: Path) -> bool:
    try:
        return (folder / PTH).read_text(encoding="utf-8") == LINE
    except (OSError, ValueError):
        return False


def intact(folder: Path, installed: Installed) -> bool:
    """Whether the package's files are still what was written."""
    root = folder / PACKAGE
    try:
        content = {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in root.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and path.name != "installed.json"
        }
    except OSError:
        return False
    return digest(content) == installed.digest


def current(settings: Mapping[str, str]) -> str:
    """The digest that this TierKV would install."""
    return digest(files(settings))


def remove(folder: Path) -> list[Path]:
    """Nothing of the hook is in ``folder`` any more; what was removed. Raises StartupError if it cannot be."""
    removed = [place for place in (folder / PTH, folder / PACKAGE) if place.exists()]
    try:
        for place in removed:
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        for place in (folder / "__pycache__").glob(f"{PACKAGE}.*"):
            place.unlink()
    except OSError as error:
        raise StartupError(f"{error.filename or folder} cannot be removed: {error.strerror}") from error
    return removed
