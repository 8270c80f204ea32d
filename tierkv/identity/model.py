"""The root of every chain: what is known of a model before a forward pass."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from blake3 import blake3

from tierkv.identity.blocks import BlockKey

KEY_SCHEMA = 1
_MODEL = "tierkv 2026 v1 model identity"


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Everything that changes a model's state for the same tokens; any change gives another root.

    Digests are hex BLAKE3 of contents, never of names, sizes or dates: two fine-tunes have equal headers. ``name`` is
    for people and is not part of the digest. 0 and "" mean "not set".
    """

    weights: str
    config: str
    engine: str
    engine_build: str
    adapter: str = ""
    draft: str = ""
    dtype: str = ""
    kv_bits: int = 0
    kv_group_size: int = 0
    quantized_kv_start: int = 0
    max_kv_size: int = 0
    shard_kind: str = ""
    shard_rank: int = 0
    shard_world: int = 1
    layer_start: int = 0
    layer_end: int = 0
    tenant: str = ""
    name: str = ""

    def digest(self) -> BlockKey:
        """32 bytes: BLAKE3 over the canonical JSON of every field but the name."""
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"}
        parts["key_schema"] = KEY_SCHEMA
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return BlockKey(blake3(text.encode(), derive_key_context=_MODEL).digest())

    def differing_parts(self, other: ModelIdentity) -> tuple[str, ...]:
        """Names of the parts that differ, for ``tierkv explain``."""
        return tuple(
            field.name
            for field in fields(self)
            if field.name != "name" and getattr(self, field.name) != getattr(other, field.name)
        )
