"""``tierkv agent`` and ``tierkv vault``: the processes that do the work; configuration becomes their plain options."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.cli import operations
from tierkv.cli.context import loaded, typed
from tierkv.cli.output import warn
from tierkv.cli.parser import CommandParser, Commands
from tierkv.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from tierkv.agents.runtime import AgentRuntime
    from tierkv.config import Loaded

ROLES = ("inference", "kv-vault", "ssm-vault")

_AGENT = """\
  tierkv agent --role kv-vault                     keeps attention state, port 50051
  tierkv agent --role ssm-vault                    keeps recurrent checkpoints, port 50052
  tierkv agent --role inference                    beside the engine, port 50050
  tierkv agent --role kv-vault --host 0.0.0.0 --token-file /etc/tierkv/token --max-bytes 24GiB
"""
_VAULT = """\
  tierkv vault --port 50051
  tierkv vault --host 0.0.0.0 --token-file /etc/tierkv/token --max-bytes 24GiB
  tierkv vault stats
  tierkv vault fsck /var/lib/tierkv --repair
"""


def add(commands: Commands) -> None:
    agent = commands.add(
        "agent",
        _agent,
        "run an agent: beside an engine (inference), or keeping state (kv-vault, ssm-vault)",
        description="Runs an agent until ctrl-c or SIGTERM. What is not given here comes from tierkv.toml.\n"
        "Without a shared token given on purpose an agent listens on this machine only.",
        example=_AGENT,
    )
    agent.add_argument(
        "--role", metavar="ROLE", default="", help=f"{', '.join(ROLES)} (default: cluster.role of tierkv.toml)"
    )
    _options(agent)
    agent.add_argument("--socket", metavar="PATH", help="inference: the Unix socket for engines")
    agent.add_argument("--local-vault-bytes", metavar="SIZE", help="inference: memory of a vault inside the agent")
    vault = commands.add("vault", _agent, "run a KV vault, or look after one that runs", example=_VAULT)
    vault.set_defaults(role="kv-vault", socket=None, local_vault_bytes=None)
    _options(vault)
    operations.add(Commands(vault.add_subparsers(title="look after a vault", metavar="OPERATION", dest="operation")))


def _options(parser: CommandParser) -> None:
    parser.add_argument("--host", metavar="HOST", help="address to listen on; beyond this machine needs a token")
    parser.add_argument("--port", metavar="PORT", help="TCP port; 0 takes a free one")
    parser.add_argument("--name", metavar="NAME", help="this node's name in status and console (default: host/role)")
    parser.add_argument("--max-bytes", metavar="SIZE", help="vaults: memory for records, for example 24GiB")
    parser.add_argument("--token-file", metavar="FILE", help="the cluster's shared token ('tierkv token new --file')")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="listen without a token: everyone who reaches the port may read prompts",
    )
    parser.add_argument("--ready-file", metavar="FILE", help="write the bound port here once calls are served")
    parser.add_argument("--reflection", action="store_true", help="offer gRPC reflection (for grpcurl)")
    parser.add_argument("--until-stdin-closes", action="store_true", help=argparse.SUPPRESS)


def _agent(arguments: argparse.Namespace) -> int:
    role = _role(arguments.role or loaded(arguments).config.cluster.role)
    configuration = loaded(arguments, _flags(arguments, role))
    for note in configuration.warnings:
        warn(f"warning: {note}")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if arguments.until_stdin_closes:
        _end_with_stdin()
    asyncio.run(_run(configuration, role, arguments))
    return EXIT_OK


async def _run(configuration: Loaded, role: str, arguments: argparse.Namespace) -> None:
    """An agent of the role, until a signal ends it."""
    from tierkv.cli import options
    from tierkv.config.running import Base

    config = configuration.config
    base = Base(configuration.path, typed(_flags(arguments, role)))

    def configure(runtime: AgentRuntime) -> None:
        runtime.configured_by(base, configuration)

    ready_file = Path(arguments.ready_file) if arguments.ready_file else None
    if role == "inference":
        from tierkv.agents.inference import run_inference

        await run_inference(
            options.inference(config, reflection=arguments.reflection, ready_file=ready_file), configure
        )
        return
    from tierkv.agents.vault import run_vault

    await run_vault(options.vault(config, role, reflection=arguments.reflection, ready_file=ready_file), configure)


def _role(role: str) -> str:
    if role in ROLES:
        return role
    if role == "recompute":
        raise UsageError("the recompute role is not part of this version; there are: " + ", ".join(ROLES))
    if not role:
        raise UsageError(f"which role? --role {', '.join(ROLES)} (or [cluster] role in tierkv.toml)")
    near = difflib.get_close_matches(role, [*ROLES, "vault"], n=1)
    hint = (
        f"; did you mean {near[0].replace('vault', 'kv-vault') if near[0] == 'vault' else near[0]!r}?" if near else ""
    )
    raise UsageError(f"there is no role {role!r}; there are: {', '.join(ROLES)}{hint}")


def _flags(arguments: argparse.Namespace, role: str) -> dict[str, tuple[str, str]]:
    """The flags that were given, as key path -> (flag, text)."""
    section = "inference" if role == "inference" else "vault"
    places = {
        "--host": (f"{section}.host", arguments.host),
        "--port": (f"{section}.port", arguments.port),
        "--name": ("cluster.node_name", arguments.name),
        "--max-bytes": ("vault.max_bytes", arguments.max_bytes),
        "--token-file": ("security.token_file", arguments.token_file),
        "--socket": ("inference.socket", arguments.socket),
        "--local-vault-bytes": ("inference.local_vault_bytes", arguments.local_vault_bytes),
        "--insecure": ("security.insecure", "true" if arguments.insecure else None),
    }
    if role == "inference" and arguments.max_bytes is not None:
        raise UsageError("--max-bytes is for vaults; an inference agent's own vault is --local-vault-bytes")
    if role != "inference" and (arguments.socket or arguments.local_vault_bytes):
        raise UsageError("--socket and --local-vault-bytes are for --role inference")
    return {key: (flag, text) for flag, (key, text) in places.items() if text is not None}


def _end_with_stdin() -> None:
    """The agent is asked to stop when the other end of its standard input is gone, however that happened."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stdin", daemon=True).start()
