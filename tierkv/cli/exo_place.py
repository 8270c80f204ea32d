"""Where EXO is installed, and whether the hook can work there. Only looks: nothing of EXO is imported or run."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tierkv.errors import StartupError

OLDEST = {"python": (3, 11), "mlx": (0, 30), "mlx_lm": (0, 30), "numpy": (1, 26), "psutil": (5, 9)}
CACHE_FILE = Path("worker") / "engines" / "mlx" / "cache.py"
PROBE = """
import json, sys, sysconfig, importlib.util as u
from importlib import metadata
def version(name):
    try: return metadata.version(name)
    except Exception: return ""
spec = u.find_spec("exo")
print(json.dumps({
    "site": sysconfig.get_paths()["purelib"], "prefix": sys.prefix, "venv": sys.prefix != sys.base_prefix,
    "python": "%d.%d.%d" % sys.version_info[:3],
    "exo": list(spec.submodule_search_locations or [])[:1] if spec else [],
    "exo_version": version("exo"), "mlx": version("mlx"), "mlx_lm": version("mlx-lm"), "numpy": version("numpy"),
    "psutil": version("psutil"),
}))
"""
PROBE_S = 60
FROZEN = (
    "{place} is a frozen application: it has no site-packages, and no hook can be put into it. Run EXO from its "
    "source (git clone, uv sync) and give that folder: tierkv install --exo-path ~/exo"
)


@dataclass(frozen=True, slots=True)
class ExoPlace:
    """A Python environment that has EXO. ``source``: the folder of the package ``exo``; versions as text."""

    python: Path
    site: Path
    source: Path
    versions: dict[str, str]
    uv_checkout: Path | None = None

    @property
    def writable(self) -> bool:
        return os.access(self.site, os.W_OK)


def find(named: str) -> ExoPlace:
    """The environment at ``named`` (a checkout, a virtual environment or its Python), or that of ``exo`` on the PATH.

    Raises StartupError that says what is there instead and what to do.
    """
    if named:
        place = Path(named).expanduser()
        if not place.exists():
            raise StartupError(f"--exo-path {place}: there is nothing there")
        python = _python_at(place)
        checkout = place if (place / "pyproject.toml").is_file() else None
    else:
        python, checkout = _python_of_command(), None
    return _probed(python, checkout)


def _python_at(place: Path) -> Path:
    if place.suffix == ".app" or any(part.endswith(".app") for part in place.parts):
        raise StartupError(FROZEN.format(place=place))
    if place.is_file():
        return _python_of_file(place)
    for candidate in (place / ".venv" / "bin" / "python", place / "bin" / "python"):
        if candidate.exists():
            return candidate
    if (place / "pyproject.toml").is_file():
        raise StartupError(f"{place} has no environment yet (.venv): run 'uv sync' there first, then this again")
    raise StartupError(
        f"{place} is neither EXO's checkout with a .venv in it, nor a virtual environment, nor a Python of one"
    )


def _python_of_command() -> Path:
    found = shutil.which("exo")
    if found is None:
        raise StartupError(
            "EXO was not found: there is no 'exo' on the PATH. Say where it is: tierkv install --exo-path ~/exo "
            '(or exo_path = "~/exo" in [inference] of tierkv.toml)'
        )
    return _python_of_file(Path(found))


def _python_of_file(place: Path) -> Path:
    """The interpreter that a script names, or the file itself if it is a Python."""
    if re.fullmatch(r"python(\d(\.\d+)?)?", place.name):
        return place
    with place.open("rb") as file:
        first = file.readline(4096)
    if not first.startswith(b"#!"):
        raise StartupError(FROZEN.format(place=place))
    words = first[2:].decode(errors="replace").split()
    beside = place.parent / "python"
    python = Path(words[0]) if words else beside
    if python.name in ("sh", "bash", "env"):
        python = beside
    if not python.exists():
        raise StartupError(f"{place} names the Python {python}, which is not there")
    return python


def _probed(python: Path, checkout: Path | None) -> ExoPlace:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", PROBE], capture_output=True, text=True, timeout=PROBE_S, check=False,
            env={**environment, "TIERKV_EXO": "0"},
        )  # fmt: skip
        said = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise StartupError(f"{python} does not run: {error}") from None
    if not said["exo"]:
        raise StartupError(f"{python} has no package 'exo': this is not EXO's environment")
    versions = {name: str(said[name]) for name in ("python", "exo_version", "mlx", "mlx_lm", "numpy", "psutil")}
    return ExoPlace(python, Path(said["site"]), Path(said["exo"][0]), versions, checkout)


def faults(place: ExoPlace) -> list[str]:
    """Why the hook would not work in this environment; empty if it will."""
    found: list[str] = []
    for name, oldest in OLDEST.items():
        text = place.versions[name]
        wanted = ".".join(map(str, oldest))
        if not text:
            found.append(f"{name.replace('_', '-')} is not installed there (needed: {wanted} or newer)")
        elif tuple(int(part) for part in re.findall(r"\d+", text)[:2]) < oldest:
            found.append(f"{name.replace('_', '-')} {text} is older than {wanted}")
    return found + shape_faults(place.source / CACHE_FILE)


def shape_faults(cache_file: Path) -> list[str]:
    """What of EXO's prefix cache is not as the hook knows it, read from the source without running it."""
    from tierkv.hooks.exo_entries import CLASS, MODULE_NAMES, PARAMETERS

    try:
        tree = ast.parse(cache_file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        return [f"{cache_file} cannot be read: {error}"]
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if CLASS not in classes:
        return [f"{cache_file} has no class {CLASS}"]
    methods = {node.name: node for node in classes[CLASS].body if isinstance(node, ast.FunctionDef)}
    found: list[str] = []
    for name, wanted in PARAMETERS.items():
        method = methods.get(name)
        said = tuple(argument.arg for argument in method.args.args)[1:] if method is not None else ()
        if method is None or said[: len(wanted)] != wanted:
            found.append(f"{CLASS}.{name} takes {', '.join(said) or 'nothing'}, not {', '.join(wanted) or 'nothing'}")
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    names |= {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
              if isinstance(target, ast.Name)}  # fmt: skip
    missing = [name for name in MODULE_NAMES if name not in names]
    return found + ([f"{cache_file.name} has no {', '.join(missing)}"] if missing else [])
