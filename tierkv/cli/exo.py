"""``tierkv install``, ``uninstall`` and ``exo``: TierKV's hook in EXO's environment, for good or for one run."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.cli import exo_hook, exo_place
from tierkv.cli.context import loaded, targets, token_of
from tierkv.cli.output import clean, document, say, warn
from tierkv.cli.parser import Commands
from tierkv.errors import EXIT_FAILED, EXIT_OK, EXIT_UNREACHABLE, StartupError, UsageError

if TYPE_CHECKING:
    from tierkv.cli.exo_place import ExoPlace
    from tierkv.config import Loaded

_INSTALL = """\
  tierkv install                        EXO's environment is that of the 'exo' on the PATH
  tierkv install --exo-path ~/exo       a checkout with its .venv, or an environment, or its Python
  tierkv install --check                is it there, is it up to date, does it run?

exit codes of --check: 0 the hook is active in a running EXO, 1 it is not installed or not up to date,
                       3 it is installed, and no running EXO has announced itself to the agent
"""
_EXO = """\
  tierkv exo -- exo
  tierkv exo -- uv run exo --no-api
"""


def add(commands: Commands) -> None:
    install = commands.add(
        "install",
        _install,
        "put the hook into EXO's environment",
        description="Puts one .pth line and a small hook package into EXO's environment; edits none of EXO's files.\n"
        "From EXO's next start on, its prefix cache is tiered. TIERKV_EXO=0 in EXO's environment turns it off.",
        example=_INSTALL,
    )
    _path_option(install)
    _ranks_option(install)
    install.add_argument("--check", action="store_true", help="change nothing; say whether the hook is active")
    install.add_argument("--json", action="store_true", help="one JSON document")
    uninstall = commands.add(
        "uninstall", _uninstall, "take the hook out of EXO's environment", example="  tierkv uninstall"
    )
    _path_option(uninstall)
    run = commands.add(
        "exo",
        _exo,
        "start EXO with the hook, for one run",
        description="Runs the command after -- with the hook in its environment; installs nothing there.\n"
        "Every process that it spawns has the hook too, except Pythons started with -I or -E.",
        example=_EXO,
        takes_rest=True,
    )
    _ranks_option(run)


def _path_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--exo-path", metavar="PATH", default="", help="where EXO is (default: [inference] exo_path)")


def _ranks_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all-ranks-hooked", action="store_true", help="every node of the cluster has the hook: restore on all at once"
    )


def _place(arguments: argparse.Namespace, configuration: Loaded) -> ExoPlace:
    return exo_place.find(arguments.exo_path or configuration.config.inference.exo_path)


def _settings(arguments: argparse.Namespace, configuration: Loaded) -> dict[str, str]:
    """The environment variables that the hook reads at its start."""
    section = configuration.config.inference
    settings = {"TIERKV_SOCKET": str(Path(section.socket).expanduser().resolve())} if section.socket else {}
    if arguments.all_ranks_hooked or section.all_ranks_hooked:
        settings["TIERKV_ALL_RANKS_HOOKED"] = "1"
    return settings


def _install(arguments: argparse.Namespace) -> int:
    configuration = loaded(arguments)
    place, settings = _place(arguments, configuration), _settings(arguments, configuration)
    if arguments.check:
        return _check(arguments, configuration, place, settings)
    problems = exo_place.faults(place)
    if problems:
        raise StartupError(f"the hook would not work with the EXO at {place.source}: {'; '.join(problems)}")
    if not place.writable:
        raise StartupError(
            f"no permission to write into {place.site}: run this as the user that owns it, or start EXO with "
            "'tierkv exo -- <command>', which installs nothing"
        )
    before = exo_hook.installed_in(place.site)
    up_to_date = before is not None and exo_hook.has_pth(place.site) and before.digest == exo_hook.current(settings)
    done = "already there"
    if not up_to_date or before is None or not exo_hook.intact(place.site, before):
        exo_hook.write(place.site, settings)
        exo_hook.write_pth(place.site)
        done = "updated" if before is not None else "installed"
    if arguments.json:
        document("install", done=done.replace(" ", "_"), site=str(place.site), exo=str(place.source),
                 versions=place.versions, settings=settings)  # fmt: skip
        return EXIT_OK
    _say_installed(done, place, settings)
    return EXIT_OK


def _say_installed(done: str, place: ExoPlace, settings: dict[str, str]) -> None:
    versions = place.versions
    say(f"{done}: {place.site / exo_hook.PTH} (one line) and {place.site / exo_hook.PACKAGE}{os.sep}")
    say(f"for EXO {versions['exo_version']} at {place.source}; none of its files was changed")
    say(f"found Python {versions['python']}, mlx {versions['mlx']}, mlx-lm {versions['mlx_lm']}")
    for name, value in settings.items():
        say(f"set {name}={value}")
    say("start EXO as always; 'tierkv install --check' tells whether the hook is active, TIERKV_EXO=0 turns it off,")
    say("'tierkv uninstall' takes it out again")
    if place.uv_checkout is not None:
        say("a new environment (uv venv, uv sync after the .venv was removed) needs 'tierkv install' again")


def _check(arguments: argparse.Namespace, configuration: Loaded, place: ExoPlace, settings: dict[str, str]) -> int:
    before = exo_hook.installed_in(place.site)
    there = before is not None and exo_hook.has_pth(place.site) and exo_hook.intact(place.site, before)
    fresh = there and before is not None and before.digest == exo_hook.current(settings)
    problems, engines, reason = exo_place.faults(place), *_running(configuration)
    if arguments.json:
        document("install-check", installed=there, up_to_date=fresh, active=bool(engines), engines=engines,
                 problems=problems, site=str(place.site), agent=reason or None)  # fmt: skip
    else:
        state = "installed" if there else "damaged" if before is not None else "not installed"
        if there:
            state += ", up to date" if fresh else ", not as this tierkv would install it"
        say(f"hook      {state} in {place.site}")
        for problem in problems:
            say(f"problem   {problem}")
        for engine in engines:
            say(f"active    {engine}")
        if not engines:
            say(f"active    no: {reason or 'no running EXO has announced itself to the agent'}")
    if not there or not fresh:
        return EXIT_FAILED
    return EXIT_OK if engines else EXIT_UNREACHABLE


def _running(configuration: Loaded) -> tuple[list[str], str]:
    """The EXO runners that have announced themselves to this machine's agent; why that is not known."""
    from tierkv.cli.ask import node_reports

    own = [target for target in targets(configuration) if target.role in ("inference", "")][:1]
    answers = asyncio.run(node_reports(own, token_of(configuration)))
    nodes = [answer.value.node for answer in answers if answer.value is not None]
    engines = [
        clean(f"{engine.build} serving {engine.model or 'no model yet'}")
        for node in nodes
        for engine in node.engines
        if engine.kind == "exo"
    ]
    reasons = [f"the agent at {answer.target.address}: {clean(answer.reason)}" for answer in answers if answer.error]
    return engines, "; ".join(reasons)


def _uninstall(arguments: argparse.Namespace) -> int:
    place = _place(arguments, loaded(arguments))
    removed = exo_hook.remove(place.site)
    for each in removed:
        say(f"removed {each}")
    say("EXO's environment is as it was; a running EXO keeps the hook until it ends" if removed
        else f"nothing to remove in {place.site}")  # fmt: skip
    return EXIT_OK


def _exo(arguments: argparse.Namespace) -> int:
    if not arguments.rest:
        raise UsageError("give the command that starts EXO after --, for example: tierkv exo -- exo")
    from tierkv import paths

    settings = _settings(arguments, loaded(arguments))
    folder = (paths.cache_dir() / "exo-hook").resolve()
    before = exo_hook.installed_in(folder)
    if before is None or before.digest != exo_hook.current(settings) or not exo_hook.intact(folder, before):
        folder.mkdir(parents=True, exist_ok=True)
        exo_hook.write(folder, settings)
        (folder / "sitecustomize.py").write_text(exo_hook.SITECUSTOMIZE, encoding="utf-8")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.pop("TIERKV_EXO", None)
    sys.stdout.flush()
    try:
        os.execvp(arguments.rest[0], arguments.rest)  # noqa: S606
    except OSError as error:
        warn(f"tierkv: {arguments.rest[0]}: {error.strerror}")
        return 127
