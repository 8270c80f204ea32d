"""Real vaults and inference agents in processes of their own, and engines made of numpy that talk to them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tierkv.demo.processes import free_port
from tierkv.handoff.client import HandoffClient, ModelAnnouncement, ModelHandle, NotRestored, Restored, model_files
from tierkv.handoff.mover import Mover
from tierkv.handoff.transfer import Transfer
from tierkv.rpc.auth import load_or_create_token
from tierkv.rpc.node_client import NodeClient
from tierkv.state.layout import ArraySpec, LayerLayout, Layout
from tierkv.telemetry.snapshot import NodeSnapshot

TOKEN = "a-token-for-tests-only"

RUNNER = """
import asyncio, dataclasses, json, pathlib, sys
kind, options = sys.argv[1], json.loads(sys.argv[2])
for name in ("ready_file", "socket", "token_file", "persist_path", "local_vault_path"):
    if options.get(name):
        options[name] = pathlib.Path(options[name])
for name in ("kv_cold", "ssm_cold"):
    if name in options:
        options[name] = tuple(options[name])
if kind == "vault":
    from tierkv.agents.vault import VaultOptions, run_vault
    asyncio.run(run_vault(VaultOptions(**options)))
else:
    from tierkv.agents.inference import InferenceOptions, run_inference
    asyncio.run(run_inference(InferenceOptions(**options)))
"""


class AgentProcess:
    """One agent in its own process; ``port`` is known once it serves."""

    def __init__(self, kind: str, home: Path, options: Mapping[str, object]) -> None:
        self.kind = kind
        self.home = home
        self.options = dict(options)
        home.mkdir(parents=True, exist_ok=True)
        ready = home / f"{options['name']}.port"
        ready.unlink(missing_ok=True)
        self.log = home / f"{options['name']}.log"
        command = [sys.executable, "-c", RUNNER, kind, json.dumps({**options, "ready_file": str(ready)})]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(home))
        # Importing takes a second on an idle machine and minutes on one with twenty processes in line.
        deadline = time.monotonic() + 240
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{kind} did not start:\n{self.log.read_text()}")
            time.sleep(0.01)
        self.port = int(ready.read_text())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.alive:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def snapshot(self) -> NodeSnapshot:
        """Taken now: an agent gives everybody the same one for 50 ms."""
        time.sleep(0.06)

        async def ask() -> NodeSnapshot:
            client = NodeClient(self.address, load_or_create_token(TOKEN, None))
            try:
                return (await client.get_node()).node
            finally:
                await client.close()

        return asyncio.run(ask())

    def event_kinds(self) -> list[str]:
        """Kind and message of every event so far."""

        async def ask() -> list[str]:
            client = NodeClient(self.address, load_or_create_token(TOKEN, None))
            try:
                async for batch in client.watch_events(0):
                    return [f"{event.kind} {event.message}" for event in batch.events]
                return []
            finally:
                await client.close()

        return asyncio.run(ask())

    def tier(self, name: str):
        return next(tier for tier in self.snapshot().tiers if tier.name == name)


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "TIERKV_HOME": str(home), "OMP_NUM_THREADS": "1"}


class Cluster:
    """Vaults and an agent that know each other; everything ends with ``close``."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.processes: list[AgentProcess] = []
        self.engines: list[Engine] = []

    def vault(self, role: str = "kv-vault", **options: object) -> AgentProcess:
        # A port that stays free while the vault is away, for one that comes back to it.
        name, port = f"{role}-{len(self.processes)}", free_port()
        defaults = {"name": name, "role": role, "port": port, "max_bytes": 256 << 20}
        return self._start("vault", {**defaults, "max_record_bytes": 64 << 20, "token": TOKEN, **options})

    def agent(self, kv: AgentProcess | None = None, ssm: AgentProcess | None = None, **options: object) -> AgentProcess:
        defaults: dict[str, object] = {
            "name": "agent", "port": 0, "socket": str(self.socket), "token": TOKEN,
            "kv_cold": [kv.address] if kv else [], "ssm_cold": [ssm.address] if ssm else [],
            "handoff_bytes": 32 << 20, "min_store_tokens": 1, "min_restore_tokens": 1, "kv_codec": "lossless",
            # Toy engines compute at once: what is tested elsewhere must not leave their restores alone.
            "break_even": False,
        }  # fmt: skip
        return self._start("inference", {**defaults, **options})

    @property
    def socket(self) -> Path:
        return self.home / "run" / "inference.sock"

    def _start(self, kind: str, options: Mapping[str, object]) -> AgentProcess:
        process = AgentProcess(kind, self.home, options)
        self.processes.append(process)
        return process

    def engine(self, *, socket: Path | None = None, **options) -> Engine:
        engine = Engine(socket or self.socket, self.home, **options)
        self.engines.append(engine)
        return engine

    def close_engines(self) -> None:
        for engine in self.engines:
            engine.close()
        self.engines.clear()

    def close(self) -> None:
        self.close_engines()
        for process in self.processes:
            if process.alive:
                process.thaw()
                process.stop()


def rows_layout(layers: int = 2, heads: int = 2, dim: int = 16, dtype: str = "float32") -> Layout:
    arrays = tuple(ArraySpec(name, dtype, (1, heads, -1, dim)) for name in ("keys", "values"))
    return Layout(tuple(LayerLayout("rows", "KVCache", arrays) for _ in range(layers)))


def hybrid_layout(window: bool = False) -> Layout:
    rows = rows_layout(2).layers
    state = LayerLayout(
        "state",
        "ArraysCache",
        (ArraySpec("0", "float32", (1, 3, 32)), ArraySpec("1", "none", ()), ArraySpec("2", "bfloat16", (1, 4, 8))),
    )
    ring = LayerLayout("window", "RotatingKVCache", (ArraySpec("keys", "float32", (1, 2, -1, 8)),), (("max_size", 64),))
    return Layout((rows[0], state, rows[1], *((ring,) if window else ())))


def prompt(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 32000, n)


def row_values(tokens: np.ndarray, layer: int, array: int) -> np.ndarray:
    """[n] float64: row i depends on every token up to i, as in a real model."""
    weights = np.arange(1, len(tokens) + 1) * (31 + layer * 7 + array * 3)
    return np.cumsum((tokens % 1009) * weights % 997) % 1000 / 7.0


def state_of(layout: Layout, tokens: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
    """Every array of the state after ``tokens``, whole."""
    arrays: dict[tuple[int, int], np.ndarray] = {}
    for layer, description in enumerate(layout.layers):
        for number, spec in enumerate(description.arrays):
            if spec.dtype == "none":
                continue
            values = row_values(tokens, layer, number)
            kind = np.float32 if spec.dtype == "float32" else np.uint16
            if description.kind == "rows":
                shape = tuple(len(tokens) if n == -1 else n for n in spec.shape)
                spread = np.arange(shape[-1]) * 0.5 + np.arange(shape[1])[:, None, None]
                full = values[None, None, :, None] + spread[None]
            else:
                shape = tuple(min(64, len(tokens)) if n == -1 else n for n in spec.shape)
                full = values[-1] + np.arange(np.prod(shape)).reshape(shape)
            arrays[layer, number] = np.ascontiguousarray(full.astype(kind))
    return arrays


class Engine:
    """A hook without an engine: it stores and restores made-up state whose every row tells its prefix."""

    def __init__(
        self, socket: Path, home: Path, *, layout: Layout | None = None, weights: bytes = b"w" * 1000, name: str = "toy"
    ) -> None:
        self.layout = layout or rows_layout()
        folder = home / f"model-{name}-{hash(weights) & 0xFFFF:x}"
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "config.json").write_text('{"layers": 2}')
        self.folder = folder
        self.client = HandoffClient(socket, "toy", "toy 1.0", connect_budget_s=5.0)
        self.mover = Mover(self.client)
        self.model: ModelHandle = self.client.announce(ModelAnnouncement(name, model_files(folder), '{"layers": 2}'))

    def ready(self, timeout_s: float = 20.0) -> Engine:
        """Connected, and the model's identity known."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.client.wait_available(0.5):
                self.client.report_hot({})
                if self.model.state not in ("unknown", "hashing"):
                    return self
            time.sleep(0.02)
        raise AssertionError(f"no agent: {self.client.last_error}, {self.model.state}")

    def offer(self, tokens: np.ndarray):
        return self.client.offer(self.model, tokens, len(tokens), self.layout, budget_s=5.0)

    def transfer(self, tokens: np.ndarray, offer) -> Transfer:
        state = state_of(self.layout, tokens)
        rows: dict = {}
        checkpoint: dict = {}
        for (layer, number), array in state.items():
            kind = self.layout.layers[layer].kind
            if kind == "rows" and offer.rows_from is not None:
                rows[layer, number] = array[:, :, offer.rows_from :]
            elif (kind == "window" and offer.window) or (kind == "state" and offer.state):
                checkpoint[layer, number] = array
        scalars = {
            layer: {"offset": len(tokens), "_idx": 3}
            for layer, each in enumerate(self.layout.layers)
            if each.kind != "rows"
        }
        return Transfer(offer, self.layout, rows, checkpoint, scalars)

    def demote(self, tokens: np.ndarray, *, stored: bool = True):
        """Offers and hands over; waits until it is in the vaults."""
        offer = self.offer(tokens)
        assert offer is not None, self.client.last_error
        if offer.wanted:
            assert self.mover.submit(self.transfer(tokens, offer))
            assert self.mover.drain(20.0, stored=stored), self.client.last_error
        return offer

    def restore(self, tokens: np.ndarray, **options) -> Restored | NotRestored:
        options = {"limit": len(tokens) - 1, "expected": self.layout.signature(), "budget_s": 10.0, **options}
        return self.client.restore(self.model, tokens, **options)

    def close(self) -> None:
        self.mover.close()
        self.client.close()


def eventually(check, timeout_s: float = 30.0):
    """The first truthy answer of ``check``."""
    deadline = time.monotonic() + timeout_s
    while not (answer := check()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return answer


def assert_state(got: Restored | NotRestored, layout: Layout, tokens: np.ndarray, position: int) -> None:
    """What came back is bit for bit what the engine had at ``position`` of this very prompt."""
    assert isinstance(got, Restored), got
    assert got.position == position
    wanted = state_of(layout, np.asarray(tokens)[:position])
    assert got.arrays.keys() == wanted.keys()
    for key, array in wanted.items():
        part = array[:, :, got.first_row :] if layout.layers[key[0]].kind == "rows" else array
        assert got.arrays[key].dtype == part.dtype
        assert got.arrays[key].flags.c_contiguous
        np.testing.assert_array_equal(got.arrays[key], part)


async def ready_engine(socket: Path, home: Path, engines: list[Engine], **options) -> Engine:
    """An engine at the agent behind ``socket``, and the last of ``engines``."""
    engine = await asyncio.to_thread(lambda: Engine(socket, home, **options).ready())
    engines.append(engine)
    return engine
