"""What most commands begin with: the configuration, the agents it names, this user's token."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.cli.options import address
from tierkv.errors import UsageError

if TYPE_CHECKING:
    from tierkv.config import Loaded
    from tierkv.config.load import Flag
    from tierkv.rpc.auth import Token

_VAULTS = ("kv-vault", "ssm-vault")
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


@dataclass(frozen=True, slots=True)
class Target:
    """An agent to ask: ``role`` is what the configuration expects there, "" when unknown."""

    host: str
    port: int
    role: str = ""

    @property
    def address(self) -> str:
        return address(self.host, self.port)


def loaded(arguments: argparse.Namespace, flags: Mapping[str, tuple[str, str]] | None = None) -> Loaded:
    """The configuration in force; ``flags``: key path -> (flag as typed, text)."""
    from tierkv.config.load import load

    return load(arguments.config, flags=typed(flags or {}))


def typed(flags: Mapping[str, tuple[str, str]]) -> dict[str, Flag]:
    """Flags as TOML would hold their values."""
    from tierkv.config.keys import by_path, value_from_text
    from tierkv.config.load import Flag

    return {key: Flag(name, value_from_text(by_path()[key], text)) for key, (name, text) in flags.items()}


def targets(configuration: Loaded, connect: Sequence[str] = ()) -> list[Target]:
    """Every agent that ``connect`` names, each once; without it, every agent that the configuration names.

    Without a configuration file too, the three default ports of this machine. A vault's file that names no other
    machine means that vault alone. Raises UsageError for a malformed address.
    """
    config = configuration.config
    found = [address_of(text) for text in connect]
    if not connect:
        found.append(_own(configuration))
        if config.cluster.role not in _VAULTS or config.cluster.kv_cold or config.cluster.ssm_cold:
            found += [Target(host, port, "kv-vault") for host, port in config.kv_vaults()]
            found += [Target(host, port, "ssm-vault") for host, port in config.ssm_vaults()]
        found += [address_of(text) for text in config.console.connect]
    once: dict[tuple[str, int], Target] = {}
    for target in found:
        once.setdefault((target.host, target.port), target)
    return list(once.values())


def _own(configuration: Loaded) -> Target:
    """The agent of this machine."""
    config = configuration.config
    role = config.cluster.role
    if role in _VAULTS:
        return Target(_WILDCARDS.get(config.vault.host, config.vault.host), config.vault_port(role), role)
    return Target(_WILDCARDS.get(config.inference.host, config.inference.host), config.inference.port, "inference")


def address_of(text: str, option: str = "--connect") -> Target:
    """Raises UsageError, naming the option, for a malformed address."""
    from tierkv.config.fields import split_address

    try:
        return Target(*split_address(text))
    except ValueError as error:
        raise UsageError(f"{option} {error}") from None


def is_same(one: Target, other: Target) -> bool:
    """Whether both are one place: the same address, or the same port of this machine."""
    return one.port == other.port and (one.host == other.host or {one.host, other.host} <= _LOOPBACK)


def token_of(configuration: Loaded) -> Token | None:
    """The token this user's tools show; None when there is none."""
    from tierkv.rpc.auth import load_token

    named = configuration.config.security.token_file
    return load_token(None, Path(named) if named else None)


def add_connect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--connect",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="ask this agent, and not those that tierkv.toml names; may be given several times",
    )
