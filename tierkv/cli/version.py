"""``tierkv version``: TierKV's version and those of what it works with, read from metadata, nothing imported."""

from __future__ import annotations

import argparse
import platform
import sys
from importlib import metadata

from tierkv import __version__
from tierkv.cli.output import document, say
from tierkv.cli.parser import Commands
from tierkv.errors import EXIT_OK

PACKAGES = ("numpy", "psutil", "grpcio", "protobuf", "pydantic", "numba", "zstandard", "textual", "mlx", "mlx-lm")


def add(commands: Commands) -> None:
    parser = commands.add("version", _version, "versions of TierKV, Python and the packages it works with")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _version(arguments: argparse.Namespace) -> int:
    found = {name: _installed(name) for name in PACKAGES}
    python, system = platform.python_version(), f"{platform.system()} {platform.release()} {platform.machine()}"
    if arguments.json:
        document("version", tierkv=__version__, python=python, platform=system, packages=found)
        return EXIT_OK
    say(f"tierkv    {__version__}")
    say(f"python    {python} ({sys.executable})")
    say(f"system    {system}")
    for name, version in found.items():
        say(f"{name:<9} {version or 'not installed'}")
    return EXIT_OK


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
