"""From the configuration to the plain options of the agents, which know nothing of pydantic or TOML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.paths import cache_dir

if TYPE_CHECKING:
    from tierkv.agents.inference import InferenceOptions
    from tierkv.agents.vault import VaultOptions
    from tierkv.config import Config
    from tierkv.store.disk_options import Durability


def vault(config: Config, role: str, *, reflection: bool, ready_file: Path | None) -> VaultOptions:
    """What a vault agent of ``role`` needs to know."""
    from tierkv.agents.vault import VaultOptions

    section = config.vault
    return VaultOptions(
        name=config.node_name("ssm-vault" if role == "ssm-vault" else "kv-vault"),
        role="ssm-vault" if role == "ssm-vault" else "kv-vault",
        host=section.host,
        port=config.vault_port(role),
        max_bytes=section.max_bytes,
        max_record_bytes=min(
            section.max_record_bytes, section.ram_bytes if section.persist_path else section.max_bytes
        ),
        persist_path=_path(section.persist_path),
        disk_bytes=section.disk_bytes,
        ram_bytes=section.ram_bytes,
        min_free_bytes=section.min_free_bytes,
        durability=_durability(section.durability),
        sync_bytes=section.sync_bytes,
        sync_s=section.sync_s,
        dead_after_s=section.dead_after_s,
        policy=section.policy,
        undo_s=section.undo_s,
        ttl_s=section.ttl_s,
        token_file=_path(config.security.token_file),
        insecure=config.security.insecure,
        reflection=reflection,
        events_kept=config.telemetry.events_kept,
        ready_file=ready_file,
    )


def _durability(name: str) -> Durability:
    return "always" if name == "always" else "none" if name == "none" else "batched"


def inference(config: Config, *, reflection: bool, ready_file: Path | None) -> InferenceOptions:
    """What an inference agent needs to know."""
    from tierkv.agents.inference import InferenceOptions

    section = config.inference
    return InferenceOptions(
        name=config.node_name("inference"),
        host=section.host,
        port=section.port,
        socket=_path(section.socket),
        kv_cold=tuple(address(*place) for place in config.kv_vaults()),
        ssm_cold=tuple(address(*place) for place in config.ssm_vaults()),
        memory_threshold=section.memory_threshold,
        demote="on-evict" if section.demote == "on-evict" else "ahead",
        kv_codec=section.kv_codec,
        ssm_codec=section.ssm_codec,
        min_store_tokens=section.min_store_tokens,
        min_restore_tokens=section.min_restore_tokens,
        break_even=section.break_even,
        quality_sample=section.quality_sample,
        raised_layers=cache_dir() / "raised-layers.json",
        handoff_bytes=section.handoff_bytes,
        queue_bytes=section.queue_bytes,
        local_vault_bytes=section.local_vault_bytes,
        local_vault_path=_path(section.local_vault_path),
        worst_fidelity=section.worst_fidelity,
        connect_timeout_s=section.connect_timeout_s,
        probe_timeout_s=section.probe_timeout_s,
        frame_timeout_s=section.frame_timeout_s,
        restore_timeout_s=section.restore_timeout_s,
        max_record_bytes=config.vault.max_record_bytes,
        tenant=section.tenant,
        token_file=_path(config.security.token_file),
        insecure=config.security.insecure,
        reflection=reflection,
        events_kept=config.telemetry.events_kept,
        ready_file=ready_file,
    )


def address(host: str, port: int) -> str:
    """``host:port`` as gRPC dials it, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _path(text: str) -> Path | None:
    return Path(text).expanduser() if text else None
