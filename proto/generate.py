"""Makes ``tierkv/v1`` from ``proto/tierkv/v1``; with ``--check`` changes nothing and fails when they disagree."""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PACKAGE = Path("tierkv/v1")


def generate(target: Path) -> None:
    """``target``/tierkv/v1 holds the modules, stubs and services of every .proto file."""
    sources = sorted(str(path.relative_to(PROTO)) for path in (PROTO / PACKAGE).glob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"--proto_path={PROTO}", *outputs, *sources]):
        raise SystemExit(1)


def differences() -> list[str]:
    """The generated files that are missing, differ, or have no .proto file any more."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, kept = Path(scratch) / PACKAGE, ROOT / PACKAGE
        names = {path.name for folder in (fresh, kept) for path in folder.glob("*_pb2*.py*")}
        same, *_ = filecmp.cmpfiles(fresh, kept, names, shallow=False)
        return sorted(names - set(same))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    differing = differences()
    if differing:
        sys.stderr.write(f"tierkv/v1 is not what proto/ generates (run 'make proto'): {', '.join(differing)}\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
