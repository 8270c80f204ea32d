"""``tierkv token``: the shared secret that agents and tools of one cluster show each other."""

from __future__ import annotations

import argparse
from pathlib import Path

from tierkv import paths
from tierkv.cli.context import loaded, token_of
from tierkv.cli.output import document, say, warn
from tierkv.cli.parser import Commands
from tierkv.errors import EXIT_OK, Refused, StartupError

_EXAMPLE = """\
  tierkv token new --file /etc/tierkv/token     on one machine; then copy the file to the others
  tierkv token path                             where this user's token is
  TIERKV_TOKEN=$(tierkv token show) ...         give it to a process by its environment
"""


def add(commands: Commands) -> None:
    group = commands.group("token", "make and find the cluster's shared token", example=_EXAMPLE)
    new = group.add(
        "new",
        _new,
        "make a new token in a file that only its owner can read",
        description="Makes a new token (256 random bits) in a file with mode 0600. A file that was made on purpose is\n"
        "named in tierkv.toml ([security] token_file) on every machine; agents may then listen beyond\n"
        "this machine. Without --file it is this user's own token, which serves one machine.",
        example="  tierkv token new --file /etc/tierkv/token",
    )
    new.add_argument("--file", metavar="FILE", help=f"default: {paths.token_path()}")
    new.add_argument("--replace", action="store_true", help="replace a token that is there; agents need a restart")
    path = group.add("path", _path, "where the token that is used comes from")
    path.add_argument("--json", action="store_true", help="one JSON document")
    group.add("show", _show, "print the token (a secret)")


def _new(arguments: argparse.Namespace) -> int:
    from tierkv.rpc.auth import new_token

    path = (Path(arguments.file).expanduser() if arguments.file else paths.token_path()).absolute()
    if path.exists() and not arguments.replace:
        raise Refused(f"{path} exists; --replace makes a new token there (every agent and tool then needs the new one)")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_name(f".{path.name}.new")
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600, exist_ok=False)
        draft.write_text(new_token() + "\n")
        draft.replace(path)
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from None
    warn(f"a new token is in {path}")
    if arguments.file:
        warn(f'copy it to every machine and write there, in tierkv.toml: [security] token_file = "{path}"')
    say(str(path))
    return EXIT_OK


def _path(arguments: argparse.Namespace) -> int:
    token = token_of(loaded(arguments))
    source = token.source if token else str(paths.token_path())
    if arguments.json:
        document("token", source=source, exists=token is not None, explicit=bool(token and token.explicit))
        return EXIT_OK
    say(source)
    if token is None:
        warn("there is no token yet: an agent makes it at its first start, or 'tierkv token new' now")
    return EXIT_OK


def _show(arguments: argparse.Namespace) -> int:
    token = token_of(loaded(arguments))
    if token is None:
        raise StartupError(f"there is no token yet ({paths.token_path()}): start an agent, or 'tierkv token new'")
    say(token.value)
    return EXIT_OK
