"""``tierkv config``: what is in force and why, whether a file is right, what every key means, changing one."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv.cli.context import add_connect
from tierkv.cli.output import Style, document, say, warn, width
from tierkv.cli.parser import Commands
from tierkv.errors import EXIT_OK, EXIT_USAGE, ConfigError, ConfigFaults, Fault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tierkv.config.edit import Edit
    from tierkv.config.keys import Key
    from tierkv.config.load import Loaded
    from tierkv.config.rows import Row
    from tierkv.config.source import Source

_EXAMPLE = """\
  tierkv config show --origin                          every value, and where it came from
  tierkv config validate tierkv.toml                   all faults at once
  tierkv config schema inference                       what the keys of a section mean
  tierkv config set inference.memory_threshold 0.7     one line changes, comments stay
"""


def add(commands: Commands) -> None:
    group = commands.group("config", "show, check, explain and change tierkv.toml", example=_EXAMPLE)
    show = group.add(
        "show", _show, "every value in force", example="  TIERKV_VAULT__PORT=6000 tierkv config show --origin"
    )
    show.add_argument("--origin", action="store_true", help="say where each value came from")
    show.add_argument("--json", action="store_true", help="one JSON document")
    validate = group.add("validate", _validate, "every fault of a file at once; exit code 2 when there is one")
    validate.add_argument("file", nargs="?", metavar="FILE", help="default: the file that would be used")
    validate.add_argument("--json", action="store_true", help="one JSON document")
    path = group.add("path", _path, "which file is used, and where one was looked for")
    path.add_argument("--json", action="store_true", help="one JSON document")
    schema = group.add(
        "schema",
        _schema,
        "every key: meaning, default, what may stand there, live or restart",
        example="  tierkv config schema vault\n  tierkv config schema --json",
    )
    schema.add_argument("section", nargs="?", default="", metavar="SECTION|KEY", help="only this section or key")
    schema.add_argument("--json", action="store_true", help="one JSON document")
    change = group.add(
        "set",
        _set,
        "change one value in the file",
        description="Changes one value in the file that is used. Only its line changes; comments, order and spelling "
        "of all\nothers stay byte for byte. The old file is kept as tierkv.toml.bak. Agents read it\n"
        "when they start and on SIGHUP; with --apply every running agent is asked first, and then all\n"
        "take the value over, or none does.",
        example="  tierkv config set inference.memory_threshold 0.7 --apply --dry-run    what it would evict\n"
        "  tierkv config set inference.memory_threshold 0.7 --apply\n"
        "  tierkv config set vault.max_bytes 24GiB\n  tierkv config set cluster.kv_cold.host nas.local",
    )
    change.add_argument("key", metavar="KEY", help="for example inference.memory_threshold")
    change.add_argument("value", metavar="VALUE", help="as in the file; text needs no quotes")
    change.add_argument("--dry-run", action="store_true", help="show the difference, write nothing")
    change.add_argument("--apply", action="store_true", help="running agents take it over, all of them or none")
    add_connect(change)


# --- show -------------------------------------------------------------------------------------


def _show(arguments: argparse.Namespace) -> int:
    from tierkv.config.load import load
    from tierkv.config.rows import rows

    loaded = load(arguments.config)
    found = rows(loaded)
    if arguments.json:
        document(
            "config", path=str(loaded.path.absolute()) if loaded.path else None, values=[_row(row) for row in found]
        )
        return EXIT_OK
    style, section = Style(), ""
    widest = max(len(_assignment(row)) for row in found)
    for row in found:
        table = row.path.rpartition(".")[0]
        if table != section:
            say(("\n" if section else "") + style.bold(f"[{table}]"))
            section = table
        text = _assignment(row)
        say(f"{text.ljust(widest)}  {style.dim(f'# {row.origin}')}" if arguments.origin else text)
    if loaded.path is None:
        warn("no configuration file found: these are defaults ('tierkv config path' says where one is looked for)")
    return EXIT_OK


def _row(row: Row) -> dict[str, Any]:
    origin = {"kind": row.origin.kind, "name": row.origin.name, "line": row.origin.line or None}
    return {"key": row.path, "value": row.value, "origin": origin, "apply": row.key.apply}


def _assignment(row: Row) -> str:
    name, value = row.path.rpartition(".")[2], row.value
    if value is None:
        return f"# {name} is not set"
    # A JSON text, number, truth value or list of texts is a TOML one too.
    return f"{name} = {json.dumps(row.key.spelled(value), ensure_ascii=False)}"


# --- validate, path ---------------------------------------------------------------------------


def _validate(arguments: argparse.Namespace) -> int:
    path, faults, notes = _checked(arguments)
    shown = str(path) if path else None
    if arguments.json:
        document(
            "config-validate",
            path=shown,
            ok=not faults,
            faults=[_fault(fault) for fault in faults],
            warnings=[_fault(note) for note in notes],
        )
        return EXIT_USAGE if faults else EXIT_OK
    for note in notes:
        warn(f"warning: {note}")
    if faults:
        raise ConfigFaults(shown or "the environment", tuple(faults))
    if path is None:
        warn("no configuration file found ('tierkv config path' says where one is looked for)")
    say(f"{shown or 'the environment'}: ok")
    return EXIT_OK


def _checked(arguments: argparse.Namespace) -> tuple[Path | None, list[Fault], list[Fault]]:
    """The file, everything that is wrong with it and with the environment over it, and what is worth knowing.

    A file that was named is looked at by itself: it may be meant for another machine.
    """
    from tierkv.config.load import find, load_source, unknown_variables
    from tierkv.config.source import read

    named = arguments.file or arguments.config or os.environ.get("TIERKV_CONFIG")
    path, faults, source = (Path(named).expanduser() if named else None), list[Fault](), None
    try:
        path = Path(arguments.file) if arguments.file else find(arguments.config)
        source = read(path) if path else None
    except ConfigError as error:
        faults.append(Fault("", None, str(error).removeprefix(f"{path}: ")))
    environ = {} if arguments.file else os.environ
    notes = unknown_variables(environ)
    if absent := _absent_token_file(source, environ):
        (notes if arguments.file else faults).append(absent)
    try:
        settings = load_source(source, environ=environ)
        notes += [*settings.warnings, *_open_without_token(settings, environ)]
    except ConfigFaults as error:
        faults += error.faults
    return path, faults, notes


def _absent_token_file(source: Source | None, environ: Mapping[str, str]) -> Fault | None:
    variable, section = "TIERKV_SECURITY__TOKEN_FILE", source.values.get("security") if source else None
    named: object = environ.get(variable) or (section.get("token_file") if isinstance(section, dict) else None)
    if not isinstance(named, str) or not named or Path(named).expanduser().is_file():
        return None
    line = 0 if variable in environ or source is None else source.line_of(("security", "token_file"))
    hint = f"make it with 'tierkv token new --file {named}', or copy it from the machine that has it"
    where = f"line {line}" if line else variable
    return Fault("security.token_file", named, "there is no such file", hint, where, line)


def _open_without_token(settings: Loaded, environ: Mapping[str, str]) -> list[Fault]:
    """Where an agent would listen beyond this machine, which it refuses as long as no token was given to it."""
    from tierkv.rpc.auth import is_loopback

    security = settings.config.security
    if security.token_file or security.insecure or environ.get("TIERKV_TOKEN"):
        return []
    problem = "an agent does not listen there without a shared token"
    hint = "give security.token_file, --token-file or TIERKV_TOKEN; 'tierkv token new' makes one"
    hosts = {"inference.host": settings.config.inference.host, "vault.host": settings.config.vault.host}
    found: list[Fault] = []
    for key, host in hosts.items():
        if not is_loopback(host):
            origin = settings.origin(key)
            where = f"line {origin.line}" if origin.line else origin.name
            found.append(Fault(key, host, problem, hint, where, origin.line))
    return found


def _fault(fault: Fault) -> dict[str, Any]:
    value = fault.value if isinstance(fault.value, str | int | float | bool | None) else repr(fault.value)
    if isinstance(value, float) and value - value != 0:
        value = repr(value)
    return {
        "key": fault.key,
        "value": value,
        "problem": fault.problem,
        "suggestion": fault.suggestion,
        "where": fault.where,
        "line": fault.line or None,
    }


def _path(arguments: argparse.Namespace) -> int:
    from tierkv.config.load import find, search_path

    found = find(arguments.config)
    places = [str(place) for place in search_path(arguments.config)]
    if arguments.json:
        document("config-path", path=str(found.absolute()) if found else None, searched=places)
        return EXIT_OK
    if found is None:
        warn("no configuration file; looked for " + ", ".join(places))
        return EXIT_OK
    say(str(found.absolute()))
    return EXIT_OK


# --- schema -----------------------------------------------------------------------------------


def _schema(arguments: argparse.Namespace) -> int:
    from tierkv.config.faults import closest
    from tierkv.config.keys import keys

    wanted = arguments.section.strip("[]")
    chosen = [key for key in keys() if not wanted or _is_below(key.path.replace("[]", ""), wanted.replace("[]", ""))]
    if not chosen:
        sections = {part for key in keys() for part in (key.path.split(".")[0], key.path.replace("[]", ""))}
        near = closest(wanted, sections)
        raise ConfigFaults(
            "the command line", (Fault(wanted, None, "unknown", f"did you mean {near!r}?" if near else ""),)
        )
    if arguments.json:
        document("config-schema", keys=[_key(key) for key in chosen])
        return EXIT_OK
    style = Style()
    for key in chosen:
        say(style.bold(key.path) + style.dim(f"  [{key.apply}]"))
        for text in textwrap.wrap(key.doc, min(width(), 100) - 4):
            say(f"    {text}")
        default = key.shown(key.default)
        facts = [f"default {default}" if default not in ("", "[]") else "", key.allowed and f"allowed {key.allowed}"]
        if any(facts):
            say(style.dim("    " + "; ".join(fact for fact in facts if fact)))
    return EXIT_OK


def _is_below(path: str, wanted: str) -> bool:
    return path == wanted or path.startswith(f"{wanted}.")


def _key(key: Key) -> dict[str, Any]:
    return {
        "key": key.path,
        "kind": key.kind,
        "apply": key.apply,
        "doc": key.doc,
        "default": key.default,
        "choices": [choice for choice in key.choices if choice],
        "minimum": key.least,
        "maximum": key.most,
    }


# --- set --------------------------------------------------------------------------------------


def _set(arguments: argparse.Namespace) -> int:
    from tierkv.config.edit import plan, write
    from tierkv.config.load import find

    path = find(arguments.config)
    if path is None:
        raise ConfigError("there is no configuration file to change; make one, or name one with --config")
    edit = plan(path, arguments.key, arguments.value)
    if not edit.changes and not arguments.apply:
        warn(f"{edit.location} is that already; nothing to change")
        return EXIT_OK
    _print_diff(edit)
    if arguments.apply:
        from tierkv.cli.config_apply import apply

        return apply(arguments, edit)
    if arguments.dry_run:
        warn("dry run: nothing was written")
        return EXIT_OK
    backup = write(edit)
    warn(f"written to {path}, for agents that start from now on; the old file is {backup}")
    return EXIT_OK


def _print_diff(edit: Edit) -> None:
    style = Style(sys.stdout)
    for text in edit.diff().splitlines():
        paint = style.good if text.startswith("+") else style.bad if text.startswith("-") else style.dim
        say(paint(text))
