"""A whole cluster on this machine's loopback: two vaults, an inference agent and the real engine, in a private home."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tierkv.demo import blas
from tierkv.demo.engine import Engine
from tierkv.demo.processes import Child, Children, DemoFailed, free_port, uninterrupted
from tierkv.demo.scratch import Scratch
from tierkv.demo.watcher import Watcher
from tierkv.rpc.node_client import NodeClient
from tierkv.telemetry.snapshot import NodeSnapshot, TierSnapshot

# In the system's folder for temporary files; the token is inside.
HOME_PREFIX = "tierkv-demo-"
# Only a process that is alive and gets nowhere is given up: the first start compiles kernels, on a busy machine too.
_AGENT_READY_S = 600.0
_ENGINE_READY_S = 600.0
# Entries of the engine's own prompt cache: a prompt of a hybrid takes two, so it holds one prompt and the one before.
PROMPT_CACHE_ENTRIES = 4
_QUIET_S = 1.0
_NAMES = {"kv-vault": "kv", "ssm-vault": "ssm", "inference": "engine"}

_CONFIG = """\
[cluster]
name = "demo"
{vaults}
[inference]
port = {port}
kv_codec = {codec}
# The demonstration evicts by count; what else this machine's memory holds must not decide.
memory_threshold = 0.95
[vault]
port = 0
max_bytes = "2GiB"
"""
_VAULTS = {"kv-vault": "kv_cold", "ssm-vault": "ssm_cold"}


@dataclass(frozen=True, slots=True)
class Shipped:
    """What has gone over the wire to and from both vaults, and what they hold."""

    bytes_to_vaults: int
    bytes_from_vaults: int
    promotions: int
    records: int
    stores: int


class Cluster:
    """Agents from entering to leaving the ``with`` block, an engine from ``start_engine`` to ``stop_engine``.

    Nothing of the user's is read or written: configuration, token, socket and logs are in a folder that vanishes,
    also when this process is killed.
    Raises ChildFailed, with the process's last lines, as soon as one of them does not do its part.
    """

    def __init__(self, codec: str) -> None:
        self._codec = codec
        self._port = free_port()  # told in advance: the console goes by the configuration
        self._scratch = Scratch(HOME_PREFIX)
        self._home = self._scratch.path
        self.watcher = Watcher(self._home)
        self._children = Children(self.watcher)
        self._runner = asyncio.Runner()
        self._clients: dict[str, NodeClient] = {}
        self._engine_child: Child | None = None
        self.addresses: dict[str, str] = {}
        self.blas = blas.preload()

    def __enter__(self) -> Cluster:
        try:
            self._start_agents()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        with uninterrupted():
            try:
                for client in self._clients.values():
                    self._runner.run(client.close())
            finally:
                self._children.stop()
                self._runner.close()
                self._scratch.remove()
                self.watcher.close()

    def _start_agents(self) -> None:
        self._configure()
        for role in _VAULTS:
            self._start_agent(role)
        self._configure()
        self._start_agent("inference")

    def _configure(self) -> None:
        """``tierkv.toml`` names the vaults that run by now."""
        ports = {_VAULTS[role]: address.rpartition(":")[2] for role, address in self.addresses.items()}
        vaults = "".join(f"[cluster.{table}]\nport = {port}\n" for table, port in ports.items())
        text = _CONFIG.format(vaults=vaults, port=self._port, codec=json.dumps(self._codec))
        (self._home / "tierkv.toml").write_text(text, encoding="utf-8")

    def _start_agent(self, role: str) -> None:
        name = role if role in _VAULTS else "inference agent"
        ready = self._home / f"{role}.port"
        command = [sys.executable, "-m", "tierkv.cli.main", "agent", "--role", role, "--name", _NAMES[role]]
        command += ["--ready-file", str(ready)]
        child = self._children.start(lambda: Child(name, command, self.environment(), self._home))
        self._children.wait_until(lambda: ready.exists() and ready.read_text().strip() != "", child, _AGENT_READY_S)
        self.addresses[role] = f"127.0.0.1:{ready.read_text().strip()}"
        self._clients[role] = self._runner.run(_client(self.addresses[role]))

    def environment(self) -> dict[str, str]:
        """What a process of this cluster sees: the user's environment without the user's TierKV settings."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("TIERKV_")}
        return {**own, "TIERKV_HOME": str(self._home), "TIERKV_CONFIG": str(self._home / "tierkv.toml")}

    def start_engine(self, model: Path) -> Engine:
        """The real ``mlx_lm.server`` with its prompt cache tiered, ready to answer."""
        port = free_port()
        arguments = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--log-level", "WARNING"]
        arguments += ["--prompt-cache-size", str(PROMPT_CACHE_ENTRIES)]
        command = [sys.executable, "-m", "tierkv.cli.main", "mlx-lm", "--no-blas", "--", *arguments]
        environment = {
            **self.environment(),
            **self.blas.environment,
            # No model hub is asked for anything.
            "HF_HUB_OFFLINE": "1",
            # On the CPU MLX runs g++ the first time it meets a function: that is no inference, and not everybody has
            # a compiler. Without it 1,024 tokens take 0 to 10 % longer.
            "MLX_DISABLE_COMPILE": "1",
        }
        engine = Engine(port)
        self._engine_child = self._children.start(lambda: Child("engine", command, environment, self._home))
        self._children.wait_until(engine.is_healthy, self._engine_child, _ENGINE_READY_S)
        return engine

    def stop_engine(self) -> None:
        if self._engine_child is not None:
            self._children.stop(self._engine_child)
            self._engine_child = None

    def check(self) -> None:
        """Raises ChildFailed when a process has ended."""
        self._children.check()

    def snapshot(self, role: str) -> NodeSnapshot:
        return self._runner.run(self._clients[role].get_node()).node

    def knows_the_weights(self) -> bool:
        """The agent has hashed the engine's weights: from now on it stores."""
        return any(engine.attached and engine.identity for engine in self.snapshot("inference").engines)

    def hot_evictions(self) -> int:
        """How many entries the engine has evicted, as its hook reports about once a second."""
        return _tier(self.snapshot("inference"), "hot").evictions

    def shipped(self) -> Shipped:
        tiers = [tier for role in ("kv-vault", "ssm-vault") for tier in self.snapshot(role).tiers]
        return Shipped(
            bytes_to_vaults=sum(tier.bytes_in for tier in tiers),
            bytes_from_vaults=sum(tier.bytes_out for tier in tiers),
            promotions=sum(tier.hits for tier in tiers),
            records=sum(tier.records for tier in tiers),
            stores=sum(tier.stores for tier in tiers),
        )

    def wait_until(self, ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Returns once ``ready``; raises DemoFailed, saying ``what`` did not happen, when it takes too long."""
        until = time.monotonic() + timeout_s
        while not ready():
            self.check()
            if time.monotonic() > until:
                raise DemoFailed(f"{what} within {timeout_s:.0f} s")
            time.sleep(0.1)

    def wait_quiet(self, timeout_s: float = 60.0) -> Shipped:
        """What was shipped, once nothing more arrives at the vaults for a second."""
        last, since = self.shipped(), time.monotonic()

        def quiet() -> bool:
            nonlocal last, since
            now = self.shipped()
            if now != last:
                last, since = now, time.monotonic()
            return time.monotonic() - since >= _QUIET_S

        self.wait_until(quiet, timeout_s, "the vaults did not come to rest")
        return last


async def _client(address: str) -> NodeClient:
    """Made on the loop that will own it."""
    return NodeClient(address)


def _tier(node: NodeSnapshot, name: str) -> TierSnapshot:
    return next((tier for tier in node.tiers if tier.name == name), TierSnapshot(name))
