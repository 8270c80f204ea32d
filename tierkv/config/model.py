"""The model of tierkv.toml: every section, key, default, range and explanation.

The explanations are what ``tierkv config schema`` and the editor show. Adding a key here is all it takes to accept,
check, document and edit it.
"""

from __future__ import annotations

import socket
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from tierkv.config.fields import (
    Address,
    BindPort,
    Boolean,
    Duration,
    Fraction,
    Host,
    Listed,
    Name,
    OneOf,
    Port,
    Size,
    Text,
    Whole,
    fault,
    key,
)

ROLES = ("inference", "kv-vault", "ssm-vault", "recompute")
CODECS = ("raw", "lossless", "int8-g256", "int8", "int8z")
FIDELITIES = (*CODECS, "any")
INFERENCE_PORT, KV_PORT, SSM_PORT, RECOMPUTE_PORT = 50050, 50051, 50052, 50053
MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40

Codec = Annotated[Name, OneOf(CODECS)]


class Section(BaseModel):
    """A table of the file: unknown keys are faults, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=False)


class Peer(Section):
    """Another machine of the cluster."""

    host: Host = key("127.0.0.1", "Host name or address.", apply="restart", kind="host")
    port: Port


class KvPeer(Peer):
    """A machine that keeps attention state."""

    port: Port = key(KV_PORT, "TCP port of the vault.", apply="restart", kind="port")


class SsmPeer(Peer):
    """A machine that keeps recurrent checkpoints."""

    port: Port = key(SSM_PORT, "TCP port of the vault.", apply="restart", kind="port")


class RecomputePeer(Peer):
    """A machine that prefills on request."""

    port: Port = key(RECOMPUTE_PORT, "TCP port of the recompute agent.", apply="restart", kind="port")


Peers = tuple[Peer, ...] | None


def _as_list(value: object) -> object:
    if isinstance(value, dict | Section):
        return (value,)
    if isinstance(value, list | tuple):
        if len(value) > 64:
            raise fault("must have at most 64 entries")
        return tuple(value)
    raise fault("must be a table, or a list of tables", "write [cluster.kv_cold] with host and port below it")


OneOrMore = BeforeValidator(_as_list)


class Cluster(Section):
    """Who is in the cluster and where."""

    name: Name = key("tierkv", "Name of the cluster, shown by the console.", apply="live", kind="string")
    node_name: Name = key(
        "", "Name of this node; empty: the host name and the role, as in mini/kv-vault.", apply="restart", kind="string"
    )
    role: Annotated[Name, OneOf(("", *ROLES))] = key(
        "", "What 'tierkv agent' is on this machine when --role is not given.", apply="restart", kind="choice"
    )
    kv_cold: Annotated[tuple[KvPeer, ...] | None, OneOrMore] = key(
        None,
        "Vaults for attention state: a table, or a list of tables ([[cluster.kv_cold]]). Absent: the vaults of "
        "ssm_cold; when that is absent too and there is no local vault, 127.0.0.1:50051.",
        apply="restart",
        kind="peers",
    )
    ssm_cold: Annotated[tuple[SsmPeer, ...] | None, OneOrMore] = key(
        None,
        "Vaults for recurrent checkpoints, written as kv_cold. Absent: the vaults of kv_cold; when that is absent "
        "too and there is no local vault, 127.0.0.1:50052.",
        apply="restart",
        kind="peers",
    )
    recompute: RecomputePeer | None = key(
        None, "Machine that prefills on request; accepted, not used by this version.", apply="restart", kind="peer"
    )


class Inference(Section):
    """The agent beside an engine."""

    host: Host = key("127.0.0.1", "Address the agent listens on.", apply="restart", kind="host")
    port: BindPort = key(INFERENCE_PORT, "TCP port of the agent; 0 takes a free one.", apply="restart", kind="port")
    memory_threshold: Fraction = key(
        0.60,
        "Fraction of the machine's memory in use above which the engine's prefix cache evicts.",
        apply="live",
        kind="fraction",
    )
    demote: Annotated[Name, OneOf(("ahead", "on-evict"))] = key(
        "ahead",
        "When state leaves for the vaults: ahead (soon after it is made, so that evicting is free) or on-evict.",
        apply="live",
        kind="choice",
    )
    kv_codec: Codec = key(
        "int8", "Codec for attention state; lossless restores bit for bit.", apply="live", kind="choice"
    )
    ssm_codec: Codec = key("lossless", "Codec for recurrent checkpoints.", apply="live", kind="choice")
    worst_fidelity: Annotated[Name, OneOf(FIDELITIES)] = key(
        "any",
        "The lossiest codec a restore may use; lossless treats quantised records as misses.",
        apply="live",
        kind="choice",
    )
    min_store_tokens: Annotated[int, Whole(0, 1_000_000)] = key(
        64, "Prompts shorter than this are not stored.", apply="live", kind="integer"
    )
    min_restore_tokens: Annotated[int, Whole(0, 1_000_000)] = key(
        64, "A restore that saves fewer tokens than this is not made.", apply="live", kind="integer"
    )
    break_even: Boolean = key(
        True,
        "A restore that is expected to take longer than computing is not made, or only as far as it pays. Off: also "
        "where computing is quicker, and a restore that hangs is then waited for at least a second.",
        apply="live",
        kind="boolean",
    )
    quality_sample: Annotated[int, Whole(0, 1_000_000)] = key(
        0,
        "One restored prompt in so many is prefilled again while the engine is idle, and compared; 0: none.",
        apply="live",
        kind="integer",
    )
    handoff_bytes: Annotated[int, Size(4 * MIB, 64 * GIB)] = key(
        256 * MIB, "Shared memory of each connection between engine and agent.", apply="restart", kind="size"
    )
    queue_bytes: Annotated[int, Size(4 * MIB, 256 * GIB)] = key(
        512 * MIB,
        "State on its way to the vaults, in the agent's memory; more waits in the engine's.",
        apply="live",
        kind="size",
    )
    local_vault_bytes: Annotated[int, Size(0, 64 * TIB)] = key(
        0, "Memory of a vault inside the agent, asked first; 0: none.", apply="restart", kind="size"
    )
    local_vault_path: Text = key(
        "",
        "Folder where that vault's records outlive a restart; then local_vault_bytes is what the folder may take.",
        apply="restart",
        kind="path",
    )
    connect_timeout_s: Annotated[float, Duration(0.01, 60)] = key(
        1.0, "How long connecting to a vault may take.", apply="live", kind="duration"
    )
    probe_timeout_s: Annotated[float, Duration(0.01, 60)] = key(
        0.5, "How long asking a vault what it has may take.", apply="live", kind="duration"
    )
    frame_timeout_s: Annotated[float, Duration(0.01, 60)] = key(
        1.0, "How long the first frame, or the gap between two, may take.", apply="live", kind="duration"
    )
    restore_timeout_s: Annotated[float, Duration(0.05, 3600)] = key(
        30.0,
        "How long one whole restore may take, never longer than computing. The engine waits meanwhile, and what has "
        "come by then is used. For tens of gigabytes over a slow link: more.",
        apply="live",
        kind="duration",
    )
    socket: Text = key(
        "",
        "Unix socket between engine and agent; empty: inference.sock in the user's runtime directory.",
        apply="restart",
        kind="path",
    )
    tenant: Name = key("", "State is shared only within one tenant; part of every key.", apply="restart", kind="string")
    exo_path: Text = key("", "Where EXO is installed, for 'tierkv install'.", apply="restart", kind="path")
    all_ranks_hooked: Boolean = key(
        False,
        "Every node of the EXO cluster has the hook: several ranks restore together. Read by 'tierkv install'.",
        apply="restart",
        kind="boolean",
    )
    kv_dim: Annotated[int, Whole(0, 1_000_000_000)] = key(
        0, "Accepted and ignored: the sizes of a model are observed.", apply="live", kind="integer"
    )


class Vault(Section):
    """An agent that keeps state for others (roles kv-vault and ssm-vault)."""

    host: Host = key(
        "127.0.0.1", "Address the vault listens on; 0.0.0.0 needs a shared token.", apply="restart", kind="host"
    )
    port: BindPort | None = key(
        None,
        "TCP port of the vault; 0 takes a free one. Absent: the port that [cluster.kv_cold] or [cluster.ssm_cold] "
        "names for the role, else 50051 or 50052.",
        apply="restart",
        kind="port",
    )
    max_bytes: Annotated[int, Size(MIB, 64 * TIB)] = key(
        4 * GIB,
        "Memory for records; the least recently used leave first. More than at the vault's start needs a restart.",
        apply="live",
        kind="size",
    )
    max_record_bytes: Annotated[int, Size(64 << 10, 64 * GIB)] = key(
        GIB, "A larger record is refused before anything is allocated.", apply="restart", kind="size"
    )
    persist_path: Text = key(
        "",
        "Folder for records that outlive a restart; empty: records are kept in memory only (max_bytes).",
        apply="restart",
        kind="path",
    )
    disk_bytes: Annotated[int, Size(MIB, 1024 * TIB)] = key(
        64 * GIB, "What the folder may take on the disk, everything counted.", apply="live", kind="size"
    )
    ram_bytes: Annotated[int, Size(MIB, 64 * TIB)] = key(
        512 * MIB,
        "With persist_path: memory for the records written and read last; no record may be larger.",
        apply="restart",
        kind="size",
    )
    min_free_bytes: Annotated[int, Size(0, 64 * TIB)] = key(
        GIB, "So much of the folder's file system stays free, whoever fills it.", apply="restart", kind="size"
    )
    durability: Annotated[Name, OneOf(("batched", "always", "none"))] = key(
        "batched",
        "What a power failure may cost: batched (the last sync_bytes or sync_s), always (nothing; slow), none (what "
        "the system has not written yet). A crash of the vault alone costs nothing that was acknowledged; with none, "
        "which acknowledges from memory and writes behind, it costs the last moment, at most 64 MiB.",
        apply="restart",
        kind="choice",
    )
    sync_bytes: Annotated[int, Size(MIB, 64 * GIB)] = key(
        64 * MIB, "With durability batched: sync after so many bytes.", apply="restart", kind="size"
    )
    sync_s: Annotated[float, Duration(0.001, 3600)] = key(
        0.2, "With durability batched: sync after so long.", apply="restart", kind="duration"
    )
    policy: Annotated[Name, OneOf(("lru", "s3fifo"))] = key(
        "lru",
        "Which records leave first when the vault is full: lru (the least recently used) or s3fifo (what was used "
        "once leaves before what was used again).",
        apply="live",
        kind="choice",
    )
    dead_after_s: Annotated[float, Duration(0, 10 * 365 * 86400)] = key(
        30 * 86400.0,
        "Records of a model that nobody used for so long leave before any other; 0: never.",
        apply="live",
        kind="duration",
    )
    undo_s: Annotated[float, Duration(0, 86400)] = key(
        60.0, "How long a purge can be taken back; its bytes stay so long.", apply="live", kind="duration"
    )
    ttl_s: Annotated[float, Duration(0, 10 * 365 * 86400)] = key(
        0.0, "Records not used for so long leave; 0: never.", apply="live", kind="duration"
    )


class Security(Section):
    """Who may talk to the agents."""

    token_file: Text = key(
        "",
        "File with the shared token, the same on every machine. Empty: $TIERKV_TOKEN, else a token of this user, "
        "which serves one machine only.",
        apply="restart",
        kind="path",
    )
    insecure: Boolean = key(
        False,
        "Listen beyond loopback without a token: everyone who reaches the port may read prompts.",
        apply="restart",
        kind="boolean",
    )


class Console(Section):
    """tierkv tui."""

    refresh_hz: Annotated[int, Whole(1, 4)] = key(4, "Repaints a second.", apply="live", kind="integer")
    theme: Name = key("", "Name of a theme; empty: chosen for the terminal.", apply="live", kind="string")
    read_only: Boolean = key(False, "Actions that change something are off.", apply="live", kind="boolean")
    connect: Annotated[tuple[Address, ...], Listed] = key(
        (), "More agents to show, each host:port.", apply="restart", kind="list"
    )


class Telemetry(Section):
    """What agents keep of their own history."""

    events_kept: Annotated[int, Whole(10, 1_000_000)] = key(
        2000, "Events an agent keeps for those who connect later.", apply="restart", kind="integer"
    )


def _section(model: type[Section]) -> Any:
    return key(model(), (model.__doc__ or "").strip(), apply="live", kind="table")


class Config(Section):
    """A whole tierkv.toml."""

    cluster: Cluster = _section(Cluster)
    inference: Inference = _section(Inference)
    vault: Vault = _section(Vault)
    security: Security = _section(Security)
    console: Console = _section(Console)
    telemetry: Telemetry = _section(Telemetry)

    def node_name(self, role: str) -> str:
        """What the agent of that role is called here; several agents of one machine are told apart."""
        return self.cluster.node_name or f"{socket.gethostname().split('.')[0] or 'node'}/{role}"

    def kv_vaults(self) -> tuple[tuple[str, int], ...]:
        """Where attention state goes: its own vaults, else the one place there is, else this machine's default."""
        return self._vaults(self.cluster.kv_cold, self.cluster.ssm_cold, KV_PORT)

    def ssm_vaults(self) -> tuple[tuple[str, int], ...]:
        """Where recurrent checkpoints go, by the same rule as ``kv_vaults``."""
        return self._vaults(self.cluster.ssm_cold, self.cluster.kv_cold, SSM_PORT)

    def _vaults(self, own: Peers, other: Peers, port: int) -> tuple[tuple[str, int], ...]:
        if own is not None:
            return _addresses(own)
        if self.inference.local_vault_bytes:
            return ()
        return (("127.0.0.1", port),) if other is None else _addresses(other)

    def vault_port(self, role: str) -> int:
        """The port a vault of ``role`` listens on when no flag says otherwise."""
        if self.vault.port is not None:
            return self.vault.port
        peers, default = (self.cluster.ssm_cold, SSM_PORT) if role == "ssm-vault" else (self.cluster.kv_cold, KV_PORT)
        ports = {port for _, port in _addresses(peers or ())}
        return ports.pop() if len(ports) == 1 else default


def _addresses(peers: tuple[Peer, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((peer.host, peer.port) for peer in peers)
