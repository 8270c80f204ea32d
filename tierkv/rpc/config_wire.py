"""Configuration between protobuf and the values of ``config_port``; what comes from the network is bounded here."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tierkv.errors import Fault, UsageError
from tierkv.rpc.config_port import Changes, ConfigApplied, ConfigCheck, ConfigEffect, ConfigState, ConfigValue
from tierkv.v1 import node_service_pb2 as pb

MAX_CHANGES = 256
MAX_KEY_CHARS = 256
MAX_VALUE_CHARS = 16_384
EFFECTS = ("live", "restart", "unchanged", "not_used")


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def from_json(text: str) -> object:
    """None for what is empty or no JSON: an answer's value is only shown."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None


def changes_to_proto(changes: Changes) -> list[pb.ConfigChange]:
    return [pb.ConfigChange(key=key, value_json=to_json(value)) for key, value in changes.items()]


def changes_from_proto(messages: Iterable[pb.ConfigChange]) -> dict[str, object]:
    """Raises UsageError for what cannot be meant."""
    found: dict[str, object] = {}
    for message in messages:
        if len(found) >= MAX_CHANGES:
            raise UsageError(f"more than {MAX_CHANGES} changes at once")
        if not 0 < len(message.key) <= MAX_KEY_CHARS or len(message.value_json) > MAX_VALUE_CHARS:
            raise UsageError("a change with a key or a value that is too long, or without a key")
        try:
            value = json.loads(message.value_json)
        except (ValueError, RecursionError):
            raise UsageError(f"the value of {message.key[:80]!r} is not JSON") from None
        if not _plain(value):
            raise UsageError(f"the value of {message.key[:80]!r} is not text, a number, true, false or a list of these")
        found[message.key] = value
    return found


def _plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(part, str | int | float | bool) for part in value)
    return isinstance(value, str | int | float | bool)


def state_to_proto(state: ConfigState) -> pb.ConfigState:
    values = [
        pb.ConfigValue(
            key=one.key,
            value_json=to_json(one.value),
            origin=one.origin,
            live=one.live,
            pending_json="" if one.pending == one.value else to_json(one.pending),
        )
        for one in state.values
    ]
    return pb.ConfigState(revision=state.revision, path=state.path, values=values, last_fault=state.last_fault)


def state_from_proto(message: pb.ConfigState) -> ConfigState:
    values = tuple(
        ConfigValue(one.key, value, one.origin, one.live, from_json(one.pending_json) if one.pending_json else value)
        for one in message.values
        for value in (from_json(one.value_json),)
    )
    return ConfigState(message.revision, message.path, values, message.last_fault)


def effects_to_proto(effects: Iterable[ConfigEffect]) -> list[pb.ConfigEffect]:
    return [
        pb.ConfigEffect(
            key=one.key,
            before_json=to_json(one.before),
            after_json=to_json(one.after),
            effect=one.effect,
            note=one.note,
            evict_bytes=one.evict_bytes,
            evict_prefixes=one.evict_prefixes,
            unsaved=one.unsaved,
        )
        for one in effects
    ]


def effects_from_proto(messages: Iterable[pb.ConfigEffect]) -> tuple[ConfigEffect, ...]:
    return tuple(
        ConfigEffect(
            one.key,
            from_json(one.before_json),
            from_json(one.after_json),
            one.effect if one.effect in EFFECTS else "not_used",
            one.note,
            one.evict_bytes,
            one.evict_prefixes,
            one.unsaved,
        )
        for one in messages
    )


def check_to_proto(check: ConfigCheck) -> pb.ValidateConfigResponse:
    faults = [pb.ConfigFault(key=one.key, problem=one.problem, suggestion=one.suggestion) for one in check.faults]
    return pb.ValidateConfigResponse(revision=check.revision, faults=faults, effects=effects_to_proto(check.effects))


def check_from_proto(message: pb.ValidateConfigResponse) -> ConfigCheck:
    faults = tuple(Fault(one.key, None, one.problem, one.suggestion) for one in message.faults)
    return ConfigCheck(message.revision, effects_from_proto(message.effects), faults)


def applied_to_proto(applied: ConfigApplied) -> pb.ApplyConfigResponse:
    return pb.ApplyConfigResponse(
        revision=applied.revision, effects=effects_to_proto(applied.effects), undo_token=applied.undo_token
    )


def applied_from_proto(message: pb.ApplyConfigResponse) -> ConfigApplied:
    return ConfigApplied(message.revision, effects_from_proto(message.effects), message.undo_token)
