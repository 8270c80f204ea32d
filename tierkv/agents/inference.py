"""The inference agent: one process beside the engines of a node, between their hooks and the vaults."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tierkv import paths
from tierkv.agents.demote import Demoter, DropLog
from tierkv.agents.engine import Engines
from tierkv.agents.explain import Explainer
from tierkv.agents.hot_tier import HotTier
from tierkv.agents.identities import Identities
from tierkv.agents.known import BadRecords
from tierkv.agents.layouts import Layouts
from tierkv.agents.live_keys import LiveKey, lower_threshold, store_keys
from tierkv.agents.model_registry import Model, ModelRegistry
from tierkv.agents.pending import PendingRecords
from tierkv.agents.prefill_costs import PrefillCosts
from tierkv.agents.promote import Promoter
from tierkv.agents.quality import QualityBook
from tierkv.agents.raised_layers import RaisedLayers
from tierkv.agents.routing import TIERS, TierRouter
from tierkv.agents.runtime import AgentRuntime, announce_port
from tierkv.agents.sender import Sender
from tierkv.agents.touch import Toucher
from tierkv.agents.trace import TraceBook
from tierkv.agents.unstored import Unstored
from tierkv.agents.vault import SWEEP_S, StoreKeeper
from tierkv.codec.registry import codec_named, next_better, warm_up
from tierkv.errors import StartupError
from tierkv.handoff.server import HandoffServer
from tierkv.identity.weights import DigestCache
from tierkv.rpc.auth import Token, load_or_create_token
from tierkv.rpc.client import VaultClient
from tierkv.rpc.local import LocalVault
from tierkv.rpc.vault_port import VaultPort
from tierkv.rpc.vault_service import SERVICE as VAULT_SERVICE
from tierkv.rpc.vault_service import VaultServicer
from tierkv.store.disk import DiskStore
from tierkv.store.disk_options import DiskOptions
from tierkv.store.ram import RamStore
from tierkv.telemetry.node import NodeTelemetry, Severity
from tierkv.units import format_size

LINKS_EVERY_S = 0.5
COSTS_EVERY_S = 5.0
# How long records wait for a vault that is down before they are dropped.
KEEP_S = 30.0
# The engine comes first: encoding runs at a lower priority where the system lets a thread have one.
ENCODER_NICE = 10
# The hot part of a local vault with a folder.
MOST_LOCAL_RAM_BYTES = 512 << 20
# Requests that can still be explained: at most 8 MB, about 100 KB with prompts of a few thousand tokens.
REQUESTS_KEPT = 200


@dataclass(frozen=True, slots=True)
class InferenceOptions:
    """Everything an inference agent needs to know, as plain values.

    ``kv_cold``, ``ssm_cold``: "host:port" of the vaults of each tier; empty, and without ``local_vault_bytes``, the
    tier does not exist. ``raised_layers``: the file that keeps which layers live samples put on a better codec.
    ``ready_file``, ``ready_fd``, ``on_ready``: see ``VaultOptions``.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 50050
    socket: Path | None = None
    kv_cold: tuple[str, ...] = ()
    ssm_cold: tuple[str, ...] = ()
    memory_threshold: float = 0.60
    demote: Literal["ahead", "on-evict"] = "ahead"
    kv_codec: str = "int8"
    ssm_codec: str = "lossless"
    min_store_tokens: int = 64
    min_restore_tokens: int = 64
    break_even: bool = True
    quality_sample: int = 0
    raised_layers: Path | None = None
    handoff_bytes: int = 256 << 20
    queue_bytes: int = 512 << 20
    local_vault_bytes: int = 0
    local_vault_path: Path | None = None
    worst_fidelity: str = "any"
    connect_timeout_s: float = 1.0
    probe_timeout_s: float = 0.5
    frame_timeout_s: float = 1.0
    restore_timeout_s: float = 30.0
    max_record_bytes: int = 1 << 30
    tenant: str = ""
    token: str | None = None
    token_file: Path | None = None
    insecure: bool = False
    reflection: bool = False
    events_kept: int = 2000
    ready_file: Path | None = None
    ready_fd: int | None = None
    on_ready: Callable[[int], None] | None = None


@dataclass(slots=True)
class LiveSettings:
    """What can change while the agent runs; hooks learn of it with the answer to their next report."""

    memory_threshold: float
    demote: str
    min_store_tokens: int
    min_restore_tokens: int
    restore_budget_s: float
    offer_budget_s: float = 0.05
    break_even: bool = True
    quality_sample: int = 0

    def to_json(self) -> dict[str, object]:
        return {
            "memory_threshold": self.memory_threshold,
            "demote": self.demote,
            "min_store_tokens": self.min_store_tokens,
            "min_restore_tokens": self.min_restore_tokens,
            "restore_budget_s": self.restore_budget_s,
            "offer_budget_s": self.offer_budget_s,
            "quality_sample": self.quality_sample,
            "break_even": self.break_even,
        }


class InferenceAgent:
    """The parts of one inference agent, wired. Built inside a running event loop; ``runtime`` serves it.

    ``vaults`` replaces, tier by tier, the remote vaults that ``options`` name; they stay the caller's.
    Raises StartupError (also PortInUse, UnsafeBind) and ValueError for an unknown codec.
    """

    def __init__(self, options: InferenceOptions, vaults: Mapping[str, Sequence[VaultPort]] | None = None) -> None:
        self.options = options
        token = load_or_create_token(options.token, options.token_file)
        self.telemetry = NodeTelemetry("inference", options.name, events_kept=options.events_kept)
        self.runtime = AgentRuntime(
            role="inference", name=options.name, host=options.host, port=options.port, token=token,
            insecure=options.insecure, telemetry=self.telemetry, reflection=options.reflection,
        )  # fmt: skip
        self.settings = LiveSettings(
            options.memory_threshold, options.demote, options.min_store_tokens, options.min_restore_tokens,
            options.restore_timeout_s, break_even=options.break_even, quality_sample=options.quality_sample,
        )  # fmt: skip
        self.telemetry.set_memory_threshold(options.memory_threshold)
        self._codecs = {"kv": codec_named(options.kv_codec), "ssm": codec_named(options.ssm_codec)}
        self.quality = QualityBook(self.telemetry, self._codecs, RaisedLayers(options.raised_layers))
        cores = os.cpu_count() or 1
        self._decoders = ThreadPoolExecutor(max(2, cores - 1), "tierkv-decode")
        self._encoders = ThreadPoolExecutor(max(1, min(4, cores // 2)), "tierkv-encode", _be_nice)
        self._clients: list[tuple[str, VaultClient]] = []
        self._routers = self._make_routers(token, vaults or {})
        self._unstored = Unstored()
        self.pending = PendingRecords(options.queue_bytes, DropLog(self.telemetry, self._unstored))
        self._layouts = Layouts()
        self._bad = BadRecords()
        self.promoter = self._make_promoter(max(2, cores - 1))
        self.demoter = self._make_demoter()
        self.traces = TraceBook(REQUESTS_KEPT)
        self.identities = Identities(paths.cache_dir() / "identities.json")
        self.costs = PrefillCosts(paths.cache_dir() / "prefill-costs.json")
        self.hot = HotTier(self.telemetry)
        self.engines = self._make_engines()
        self.server = self._make_server()
        self.runtime.explainer = Explainer(
            self.traces, self._routers, self.promoter, self.identities, self.engines,
            lambda: self.settings.min_restore_tokens, self.hot.refusals,
        )  # fmt: skip
        self._schedule()
        self.runtime.live_keys.update(self._live_keys())

    def _make_routers(self, token: Token, vaults: Mapping[str, Sequence[VaultPort]]) -> dict[str, TierRouter]:
        local = self._local_vault() if self.options.local_vault_bytes else None
        routers: dict[str, TierRouter] = {}
        for tier, peers in zip(TIERS, (self.options.kv_cold, self.options.ssm_cold), strict=True):
            clients = [
                VaultClient(
                    peer, token, connect_timeout_s=self.options.connect_timeout_s,
                    probe_timeout_s=self.options.probe_timeout_s, frame_timeout_s=self.options.frame_timeout_s,
                    max_record_bytes=self.options.max_record_bytes,
                )
                for peer in (() if tier in vaults else peers)
            ]  # fmt: skip
            self._clients += [(tier, client) for client in clients]
            routers[tier] = TierRouter(tier, local, vaults.get(tier, clients))
        return routers

    def _local_vault(self) -> LocalVault:
        """A vault in this process, also served over gRPC so that it can be listed and purged like any other."""
        cap, largest = self.options.local_vault_bytes, self.options.max_record_bytes
        try:
            store = self._local_store(cap, largest)
        except (OSError, MemoryError, ValueError) as error:
            raise StartupError(f"cannot set aside {format_size(cap)} for the local vault: {error}") from error
        servicer = VaultServicer(store, self.telemetry, "local", max_record_bytes=largest)
        self.runtime.add_service(servicer.register, VAULT_SERVICE)
        self.runtime.every(SWEEP_S, StoreKeeper(store, self.telemetry, "local").sweep, "sweep")
        own = store_keys(store)
        for name in own.keys() & {"vault.max_bytes", "vault.disk_bytes"}:
            self.runtime.live_keys["inference.local_vault_bytes"] = own[name]
        self.runtime.on_stop(store.close)
        self.runtime.on_stop(servicer.close)
        return LocalVault(store, telemetry=self.telemetry, max_record_bytes=largest)

    def _local_store(self, cap: int, largest: int) -> RamStore | DiskStore:
        if self.options.local_vault_path is None:
            return RamStore(cap, min(largest, cap))
        ram_bytes = min(cap, MOST_LOCAL_RAM_BYTES)
        return DiskStore(self.options.local_vault_path, DiskOptions(cap, ram_bytes, max_record_bytes=largest))

    def _make_promoter(self, workers: int) -> Promoter:
        return Promoter(
            self._routers, self.pending, self._layouts, self._bad, self.telemetry, self._decoders, self._unstored,
            workers=workers,
            worst_fidelity=_fidelity_limit(self.options.worst_fidelity),
            probe_timeout_s=self.options.probe_timeout_s, max_record_bytes=self.options.max_record_bytes,
            min_restore_tokens=lambda: self.settings.min_restore_tokens, weighs=lambda: self.settings.break_even,
        )  # fmt: skip

    def _make_demoter(self) -> Demoter:
        senders = {
            tier: [
                Sender(router, port, self.pending, self._bad, self.telemetry, self._unstored, keep_s=KEEP_S)
                for port in router.ports
            ]
            for tier, router in self._routers.items()
        }
        for sender in (each for group in senders.values() for each in group):
            self.runtime.background(sender.run(), f"sender to {sender.target}")
        return Demoter(
            self._routers, senders, self.pending, self._layouts, self.telemetry, self._encoders, self._codecs,
            self.quality, self._unstored, min_store_tokens=lambda: self.settings.min_store_tokens,
        )  # fmt: skip

    def _make_engines(self) -> Engines:
        toucher = Toucher(self._routers, self.telemetry)
        self.runtime.background(toucher.run(), "touch")
        registry = ModelRegistry(
            DigestCache(paths.cache_dir() / "weights.json"), self.options.tenant, self.costs,
            self.runtime.background, self._tell_of_model,
        )  # fmt: skip
        return Engines(
            registry, self.promoter, self.demoter, toucher, self.hot, self.telemetry, self.traces,
            self.quality, settings=self.settings.to_json, restore_timeout_s=lambda: self.settings.restore_budget_s,
        )  # fmt: skip

    def _make_server(self) -> HandoffServer:
        return HandoffServer(
            self.options.socket or paths.handoff_socket(), self.engines, arena_bytes=self.options.handoff_bytes,
            settings=self.settings.to_json, node=self.options.name, count=self.telemetry.count,
            tell=self._tell_of_refused_engine,
        )  # fmt: skip

    def _tell_of_refused_engine(self, text: str) -> None:
        self.telemetry.emit("fault", "error", text)

    def _schedule(self) -> None:
        self.runtime.every(LINKS_EVERY_S, self._show_links, "links")
        self.runtime.every(COSTS_EVERY_S, self.costs.keep, "prefill costs")
        self.runtime.on_stop(self._close_pools)
        for _, client in self._clients:
            self.runtime.on_stop(client.close)
        self.runtime.on_stop(self.promoter.remeasurer.close)
        self.runtime.on_stop(self.server.stop)
        self.runtime.on_stop(self.costs.keep)

    def _close_pools(self) -> None:
        self._decoders.shutdown(wait=False, cancel_futures=True)
        self._encoders.shutdown(wait=False, cancel_futures=True)

    def _show_links(self) -> None:
        for tier, client in self._clients:
            self.telemetry.set_link(client.link_snapshot(tier))
        pending = self.pending
        waiting = f"{len(pending)} records ({format_size(pending.size_bytes)}) wait" if len(pending) else ""
        self.telemetry.set_activity(waiting)

    def _tell_of_model(self, severity: Severity, message: str, model: Model) -> None:
        if model.root is not None and model.identity is not None:
            self.identities.learn(model.root, model.identity)
        self.telemetry.emit("identity", severity, message, model=model.name, state=model.state)

    def set_memory_threshold(self, fraction: float) -> None:
        """Engines evict down to this share of memory from their next report on. Raises ValueError outside 0 to 1."""
        if not 0.0 < fraction <= 1.0:
            raise ValueError("a memory threshold is a fraction above 0 and at most 1")
        self.settings.memory_threshold = fraction
        self.telemetry.set_memory_threshold(fraction)

    def _live_keys(self) -> dict[str, LiveKey]:
        def setting(name: str) -> Callable[[object], None]:
            return lambda value: setattr(self.settings, name, value)

        return {
            "inference.memory_threshold": LiveKey(
                self.set_memory_threshold, lambda value: lower_threshold(self.telemetry.snapshot(), value)
            ),
            "inference.demote": LiveKey(setting("demote")),
            "inference.min_store_tokens": LiveKey(setting("min_store_tokens")),
            "inference.min_restore_tokens": LiveKey(setting("min_restore_tokens")),
            "inference.break_even": LiveKey(setting("break_even")),
            "inference.quality_sample": LiveKey(setting("quality_sample")),
            "inference.restore_timeout_s": LiveKey(setting("restore_budget_s")),
            "inference.connect_timeout_s": LiveKey(lambda seconds: self._set_timeouts(connect_s=seconds)),
            "inference.probe_timeout_s": LiveKey(self._set_probe_timeout),
            "inference.frame_timeout_s": LiveKey(lambda seconds: self._set_timeouts(frame_s=seconds)),
            "inference.queue_bytes": LiveKey(lambda cap_bytes: setattr(self.pending, "cap_bytes", cap_bytes)),
            "inference.kv_codec": LiveKey(lambda name: self._set_codec("kv", name)),
            "inference.ssm_codec": LiveKey(lambda name: self._set_codec("ssm", name)),
            "inference.worst_fidelity": LiveKey(lambda name: self.promoter.set_worst_fidelity(_fidelity_limit(name))),
        }

    def _set_timeouts(self, **seconds: float) -> None:
        for _, client in self._clients:
            client.set_timeouts(**seconds)

    def _set_probe_timeout(self, seconds: float) -> None:
        self._set_timeouts(probe_s=seconds)
        self.promoter.set_probe_timeout(seconds)

    async def _set_codec(self, tier: str, name: str) -> None:
        """Records encoded from now on use the codec; its kernels are compiled first, which nothing waits for."""
        compiling = ThreadPoolExecutor(1, "tierkv-compile", _be_nice)
        try:
            await asyncio.get_running_loop().run_in_executor(compiling, warm_up, [name])
        finally:
            compiling.shutdown(wait=False)
        self._codecs[tier] = codec_named(name)

    async def start(self) -> int:
        """Serves gRPC and the hand-off socket, with kernels compiled. The bound port."""
        warming = asyncio.get_running_loop().run_in_executor(self._encoders, self._warm_up)
        port = await self.runtime.start()
        await warming
        await self.server.start()
        return port

    def _warm_up(self) -> None:
        better = [next_better(codec) for codec in self._codecs.values()]
        warm_up([codec.name for codec in (*self._codecs.values(), *better)])

    async def stop(self) -> None:
        await self.runtime.stop()


def build_inference_agent(
    options: InferenceOptions, vaults: Mapping[str, Sequence[VaultPort]] | None = None
) -> InferenceAgent:
    """An agent that has not started yet; call it inside the event loop that will run it."""
    return InferenceAgent(options, vaults)


async def run_inference(options: InferenceOptions, configure: Callable[[AgentRuntime], None] | None = None) -> None:
    """Serves until SIGTERM or SIGINT; ``configure`` sees the agent before it starts. Raises StartupError."""
    agent = build_inference_agent(options)
    if configure is not None:
        configure(agent.runtime)
    try:
        with agent.runtime.stopped_by_signals():
            port = await agent.start()
            if agent.runtime.stop_asked:
                sys.stderr.write(f"inference {options.name!r} was asked to stop while it started\n")
                return
            tiers = ", ".join(f"{tier} at {peer}" for tier, client in agent._clients for peer in (client.peer,))
            line = f"inference {options.name!r} listening on {agent.runtime.address} and {agent.server.path}"
            sys.stderr.write(f"{line} ({tiers or 'no vaults'})\n")
            sys.stderr.flush()
            announce_port(port, options.ready_file, options.ready_fd, options.on_ready)
            await agent.runtime.run()
    finally:
        await agent.stop()


def _fidelity_limit(name: str) -> int:
    """255 for "any", else the fidelity of that codec. Raises ValueError for an unknown one."""
    return 255 if name == "any" else codec_named(name).fidelity


def _be_nice() -> None:
    if sys.platform == "linux":
        import threading

        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), ENCODER_NICE)
