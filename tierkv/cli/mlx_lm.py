"""``tierkv mlx-lm -- ...``: the real mlx_lm.server with its prompt cache tiered, and an inference agent beside it."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from tierkv import paths
from tierkv.cli.beside import answers
from tierkv.cli.context import loaded, token_of
from tierkv.cli.output import clean, warn
from tierkv.cli.parser import Commands
from tierkv.errors import MissingExtra, PortInUse, StartupError, UsageError

_EXAMPLE = """\
  tierkv mlx-lm -- --model mlx-community/Qwen3-8B-4bit --port 8080
  tierkv mlx-lm --python ~/mlx/.venv/bin/python -- --model ./model
"""
# An agent that is started for the first time compiles its kernels, and what ends it is said by whoever keeps it.
_GRACE_S = 60.0
# Run by the engine's Python: names what is not there. mlx is imported, since a part of it may be missing.
_CHECK = """
import importlib.util, sys
absent = [name for name in ("mlx_lm", "tierkv") if importlib.util.find_spec(name) is None]
try:
    import mlx.core
except ImportError:
    absent.insert(0, "mlx")
print(" and ".join(absent))
sys.exit(bool(absent))
"""


def add(commands: Commands) -> None:
    parser = commands.add(
        "mlx-lm",
        _mlx_lm,
        "run the real mlx_lm.server with its prompt cache tiered",
        description="Runs mlx_lm.server with the arguments after --. What its prompt cache evicts goes to the vaults;\n"
        "a prompt that comes again is restored from there. When no inference agent answers, one is started\n"
        "beside it, started again if it dies, and ended with the server. The server goes on if the agent does not.\n"
        "The exit code is the server's own; 130 after ctrl-c, 0 after SIGTERM.",
        example=_EXAMPLE,
        takes_rest=True,
    )
    parser.add_argument(
        "--python", metavar="PATH", help="the Python that has mlx-lm and tierkv (default: the one that runs this)"
    )
    parser.add_argument("--no-agent", action="store_true", help="start no inference agent")
    parser.add_argument(
        "--no-blas",
        action="store_true",
        help="Linux without a GPU: leave the engine the slow BLAS that its mlx wheel brings",
    )


def _mlx_lm(arguments: argparse.Namespace) -> int:
    if not arguments.rest:
        raise UsageError("give mlx_lm.server's arguments after --, for example: tierkv mlx-lm -- --model MODEL")
    python = _python(arguments.python)
    _check_server_arguments(arguments.rest)
    configuration = loaded(arguments)
    named = configuration.config.inference.socket
    place = Path(named).expanduser() if named else paths.handoff_socket()
    environment = dict(os.environ) if arguments.no_blas else _with_blas(python)
    hook = ["-m", "tierkv.hooks.mlx_lm", "--tierkv-socket", str(place)]
    if not arguments.no_agent and not answers(place):
        token_of(configuration)  # the agent would end at once where this raises
        _start_agent(place, configuration.path)
        hook += ["--tierkv-grace", f"{_GRACE_S:g}"]
    sys.stdout.flush()
    sys.stderr.flush()
    # The server takes this process's place: signals and its exit code need no passing on.
    os.execve(python, [python, *hook, "--", *arguments.rest], environment)  # noqa: S606
    raise AssertionError("execve returned")


def _check_server_arguments(words: list[str]) -> None:
    """Raises UsageError or PortInUse for what mlx_lm.server would only find out in a traceback, after it has loaded.

    Only what is plain is looked at; everything else is the server's to judge.
    """
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    known.add_argument("--model", default="")
    known.add_argument("--host", default="127.0.0.1")
    known.add_argument("--port", type=int, default=8080)
    try:
        given, _ = known.parse_known_args(words)
    except argparse.ArgumentError:
        return
    if given.model.startswith(("/", "./", "../", "~")) and not Path(given.model).expanduser().exists():
        raise UsageError(f"--model {given.model}: no such folder")
    if 0 < given.port < 65536 and _is_in_use(given.host, given.port):
        raise PortInUse(given.host, given.port)


def _is_in_use(host: str, port: int) -> bool:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _with_blas(python: str) -> dict[str, str]:
    """The engine's environment: with a fast BLAS where that makes it faster."""
    from tierkv.demo import blas

    if blas.is_preloaded():
        return dict(os.environ)
    prepared = blas.preload(python)
    if prepared.environment:
        warn("tierkv: the engine multiplies float32 with OpenBLAS (--no-blas leaves it its own)")
    elif prepared.wanted:
        warn(f"tierkv: the engine multiplies with the slow BLAS of its mlx wheel: {prepared.reason}")
    return {**os.environ, **prepared.environment}


def _python(named: str | None) -> str:
    if named is None:
        # mlx-lm installs without mlx on Linux, and a package that only carries its libraries makes an empty "mlx".
        for module, package in (("mlx_lm", "mlx-lm"), ("mlx", "mlx"), ("mlx.core", "mlx")):
            if importlib.util.find_spec(module) is None:
                raise MissingExtra(package, "mlx")
        return sys.executable
    found = shutil.which(Path(named).expanduser())
    if found is None:
        raise UsageError(f"--python {named}: no such program")
    try:
        checked = subprocess.run([found, "-c", _CHECK], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(f"{found} does not run: {error}") from None
    if checked.returncode:
        absent = clean(checked.stdout.decode(errors="replace").strip()) or "mlx, mlx_lm and tierkv"
        raise StartupError(f"{found} cannot import {absent}: install it there (pip install 'tierkv[mlx]')")
    return os.path.abspath(found)  # noqa: PTH100 - resolving a symlink would leave the virtual environment


def _start_agent(place: Path, config: Path | None) -> None:
    """An inference agent runs and is kept running by a process whose standard input this one holds open.

    The write end is inherited by the server that takes this process's place: whatever ends the server ends the agent.
    A session of its own keeps ctrl-c from ending the agent before the server has handed over its last state.
    """
    theirs, ours = os.pipe()
    os.set_inheritable(ours, True)
    agent = [sys.executable, "-m", "tierkv", "agent", "--role", "inference", "--until-stdin-closes"]
    if config is not None:
        agent += ["--config", str(config)]
    command = [sys.executable, "-m", "tierkv.cli.beside", str(place), *agent]
    try:
        subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise StartupError(f"the inference agent does not start: {error}") from None
    finally:
        os.close(theirs)
    warn("tierkv: started an inference agent beside the server; it ends with it")
