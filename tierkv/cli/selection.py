"""Which records and which vaults: the options that purge, prefixes, pin and unpin share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tierkv.cli.context import Target, add_connect, targets
from tierkv.errors import UsageError
from tierkv.units import parse_duration

if TYPE_CHECKING:
    from tierkv.config import Loaded
    from tierkv.store.base import Selector

_LEAST_KEY_BYTES, _MOST_KEY_BYTES = 4, 32


def add_options(parser: argparse.ArgumentParser, *, everything: bool) -> None:
    parser.add_argument("--model", metavar="NAME", default="", help="only of this model, as 'tierkv prefixes' names it")
    parser.add_argument(
        "--prefix",
        metavar="KEY",
        action="append",
        default=[],
        help="only this prefix: its key or the first 8 hex digits or more; several times",
    )
    parser.add_argument("--older-than", metavar="AGE", default="", help="only what was not used for so long: 2h, 7d")
    parser.add_argument("--tier", choices=("kv", "ssm"), default="", help="only attention state, or only checkpoints")
    if everything:
        parser.add_argument("--all", action="store_true", help="everything")
    add_connect(parser)


def selector(arguments: argparse.Namespace) -> Selector:
    """Raises UsageError for a malformed value."""
    from tierkv.store.base import Selector

    try:
        older_than_s = parse_duration(arguments.older_than) if arguments.older_than else 0.0
    except ValueError as error:
        raise UsageError(f"--older-than: {error}") from None
    return Selector(
        model=arguments.model,
        prefixes=tuple(_key(text) for text in arguments.prefix),
        older_than_s=older_than_s,
        tier=arguments.tier,
    )


def chosen(arguments: argparse.Namespace) -> Selector:
    """As ``selector``, but everything must be asked for in so many words."""
    wanted = selector(arguments)
    narrow = wanted.model or wanted.prefixes or arguments.older_than or wanted.tier
    if narrow and arguments.all:
        raise UsageError("--all goes alone: leave it out, or leave out what narrows the choice")
    if not narrow and not arguments.all:
        raise UsageError("say what: --model, --prefix, --older-than, --tier, or --all")
    return wanted


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise UsageError(f"--prefix: {text!r} is not a key; 'tierkv prefixes' lists them in hex") from None
    if not _LEAST_KEY_BYTES <= len(key) <= _MOST_KEY_BYTES:
        raise UsageError(f"--prefix: {text!r} has {2 * len(key)} hex digits; a key has 64, its start at least 8")
    return key


def vaults(configuration: Loaded, connect: list[str]) -> list[Target]:
    """The targets that keep records: vaults, agents named by hand, and an inference agent with a local vault."""
    local = bool(configuration.config.inference.local_vault_bytes)
    return [target for target in targets(configuration, connect) if target.role != "inference" or local]
