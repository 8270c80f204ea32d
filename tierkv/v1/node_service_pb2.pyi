from tierkv.v1 import telemetry_pb2 as _telemetry_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetNodeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetNodeResponse(_message.Message):
    __slots__ = ("node", "authenticated")
    NODE_FIELD_NUMBER: _ClassVar[int]
    AUTHENTICATED_FIELD_NUMBER: _ClassVar[int]
    node: _telemetry_pb2.NodeSnapshot
    authenticated: bool
    def __init__(self, node: _Optional[_Union[_telemetry_pb2.NodeSnapshot, _Mapping]] = ..., authenticated: bool = ...) -> None: ...

class WatchSnapshotsRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class WatchSnapshotsResponse(_message.Message):
    __slots__ = ("node", "authenticated")
    NODE_FIELD_NUMBER: _ClassVar[int]
    AUTHENTICATED_FIELD_NUMBER: _ClassVar[int]
    node: _telemetry_pb2.NodeSnapshot
    authenticated: bool
    def __init__(self, node: _Optional[_Union[_telemetry_pb2.NodeSnapshot, _Mapping]] = ..., authenticated: bool = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("after_id", "no_follow")
    AFTER_ID_FIELD_NUMBER: _ClassVar[int]
    NO_FOLLOW_FIELD_NUMBER: _ClassVar[int]
    after_id: int
    no_follow: bool
    def __init__(self, after_id: _Optional[int] = ..., no_follow: bool = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("events", "dropped")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[_telemetry_pb2.Event]
    dropped: int
    def __init__(self, events: _Optional[_Iterable[_Union[_telemetry_pb2.Event, _Mapping]]] = ..., dropped: _Optional[int] = ...) -> None: ...

class ConfigValue(_message.Message):
    __slots__ = ("key", "value_json", "origin", "live", "pending_json")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_JSON_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    PENDING_JSON_FIELD_NUMBER: _ClassVar[int]
    key: str
    value_json: str
    origin: str
    live: bool
    pending_json: str
    def __init__(self, key: _Optional[str] = ..., value_json: _Optional[str] = ..., origin: _Optional[str] = ..., live: bool = ..., pending_json: _Optional[str] = ...) -> None: ...

class ConfigState(_message.Message):
    __slots__ = ("revision", "path", "values", "last_fault")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LAST_FAULT_FIELD_NUMBER: _ClassVar[int]
    revision: int
    path: str
    values: _containers.RepeatedCompositeFieldContainer[ConfigValue]
    last_fault: str
    def __init__(self, revision: _Optional[int] = ..., path: _Optional[str] = ..., values: _Optional[_Iterable[_Union[ConfigValue, _Mapping]]] = ..., last_fault: _Optional[str] = ...) -> None: ...

class ConfigChange(_message.Message):
    __slots__ = ("key", "value_json")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_JSON_FIELD_NUMBER: _ClassVar[int]
    key: str
    value_json: str
    def __init__(self, key: _Optional[str] = ..., value_json: _Optional[str] = ...) -> None: ...

class ConfigFault(_message.Message):
    __slots__ = ("key", "problem", "suggestion")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SUGGESTION_FIELD_NUMBER: _ClassVar[int]
    key: str
    problem: str
    suggestion: str
    def __init__(self, key: _Optional[str] = ..., problem: _Optional[str] = ..., suggestion: _Optional[str] = ...) -> None: ...

class ConfigEffect(_message.Message):
    __slots__ = ("key", "before_json", "after_json", "effect", "note", "evict_bytes", "evict_prefixes", "unsaved")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BEFORE_JSON_FIELD_NUMBER: _ClassVar[int]
    AFTER_JSON_FIELD_NUMBER: _ClassVar[int]
    EFFECT_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    EVICT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICT_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    UNSAVED_FIELD_NUMBER: _ClassVar[int]
    key: str
    before_json: str
    after_json: str
    effect: str
    note: str
    evict_bytes: int
    evict_prefixes: int
    unsaved: str
    def __init__(self, key: _Optional[str] = ..., before_json: _Optional[str] = ..., after_json: _Optional[str] = ..., effect: _Optional[str] = ..., note: _Optional[str] = ..., evict_bytes: _Optional[int] = ..., evict_prefixes: _Optional[int] = ..., unsaved: _Optional[str] = ...) -> None: ...

class GetConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetConfigResponse(_message.Message):
    __slots__ = ("config",)
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    config: ConfigState
    def __init__(self, config: _Optional[_Union[ConfigState, _Mapping]] = ...) -> None: ...

class ValidateConfigRequest(_message.Message):
    __slots__ = ("changes",)
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[ConfigChange]
    def __init__(self, changes: _Optional[_Iterable[_Union[ConfigChange, _Mapping]]] = ...) -> None: ...

class ValidateConfigResponse(_message.Message):
    __slots__ = ("revision", "faults", "effects")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    EFFECTS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    faults: _containers.RepeatedCompositeFieldContainer[ConfigFault]
    effects: _containers.RepeatedCompositeFieldContainer[ConfigEffect]
    def __init__(self, revision: _Optional[int] = ..., faults: _Optional[_Iterable[_Union[ConfigFault, _Mapping]]] = ..., effects: _Optional[_Iterable[_Union[ConfigEffect, _Mapping]]] = ...) -> None: ...

class ApplyConfigRequest(_message.Message):
    __slots__ = ("changes", "revision", "actor", "undo_token")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    UNDO_TOKEN_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[ConfigChange]
    revision: int
    actor: str
    undo_token: str
    def __init__(self, changes: _Optional[_Iterable[_Union[ConfigChange, _Mapping]]] = ..., revision: _Optional[int] = ..., actor: _Optional[str] = ..., undo_token: _Optional[str] = ...) -> None: ...

class ApplyConfigResponse(_message.Message):
    __slots__ = ("revision", "effects", "undo_token")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EFFECTS_FIELD_NUMBER: _ClassVar[int]
    UNDO_TOKEN_FIELD_NUMBER: _ClassVar[int]
    revision: int
    effects: _containers.RepeatedCompositeFieldContainer[ConfigEffect]
    undo_token: str
    def __init__(self, revision: _Optional[int] = ..., effects: _Optional[_Iterable[_Union[ConfigEffect, _Mapping]]] = ..., undo_token: _Optional[str] = ...) -> None: ...

class WatchConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchConfigResponse(_message.Message):
    __slots__ = ("config",)
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    config: ConfigState
    def __init__(self, config: _Optional[_Union[ConfigState, _Mapping]] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class RequestLine(_message.Message):
    __slots__ = ("id", "time_unix_s", "model", "prompt_tokens", "hot_tokens", "position", "outcome", "reason", "seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIME_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: int
    time_unix_s: float
    model: str
    prompt_tokens: int
    hot_tokens: int
    position: int
    outcome: str
    reason: str
    seconds: float
    def __init__(self, id: _Optional[int] = ..., time_unix_s: _Optional[float] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., hot_tokens: _Optional[int] = ..., position: _Optional[int] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestLine]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestLine, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("id", "tokens", "model")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    id: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    model: str
    def __init__(self, id: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., model: _Optional[str] = ...) -> None: ...

class TierFinding(_message.Message):
    __slots__ = ("tier", "peer", "asked", "asked_tokens", "found_tokens", "used_tokens", "used_bytes", "checkpoints", "refused", "seconds", "reason", "detail", "differs_at", "gone_unix_s")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TIER_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_AT_FIELD_NUMBER: _ClassVar[int]
    GONE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    tier: str
    peer: str
    asked: bool
    asked_tokens: int
    found_tokens: int
    used_tokens: int
    used_bytes: int
    checkpoints: _containers.RepeatedScalarFieldContainer[int]
    refused: _containers.ScalarMap[str, int]
    seconds: float
    reason: str
    detail: str
    differs_at: int
    gone_unix_s: float
    def __init__(self, tier: _Optional[str] = ..., peer: _Optional[str] = ..., asked: bool = ..., asked_tokens: _Optional[int] = ..., found_tokens: _Optional[int] = ..., used_tokens: _Optional[int] = ..., used_bytes: _Optional[int] = ..., checkpoints: _Optional[_Iterable[int]] = ..., refused: _Optional[_Mapping[str, int]] = ..., seconds: _Optional[float] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., differs_at: _Optional[int] = ..., gone_unix_s: _Optional[float] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request", "sentence", "tiers", "identity", "key", "codec", "fidelity", "restored_bytes", "expected_restore_s", "expected_prefill_s", "differing_parts", "engine")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    FIDELITY_FIELD_NUMBER: _ClassVar[int]
    RESTORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_RESTORE_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_PARTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    request: RequestLine
    sentence: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierFinding]
    identity: str
    key: str
    codec: str
    fidelity: int
    restored_bytes: int
    expected_restore_s: float
    expected_prefill_s: float
    differing_parts: _containers.RepeatedScalarFieldContainer[str]
    engine: str
    def __init__(self, request: _Optional[_Union[RequestLine, _Mapping]] = ..., sentence: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierFinding, _Mapping]]] = ..., identity: _Optional[str] = ..., key: _Optional[str] = ..., codec: _Optional[str] = ..., fidelity: _Optional[int] = ..., restored_bytes: _Optional[int] = ..., expected_restore_s: _Optional[float] = ..., expected_prefill_s: _Optional[float] = ..., differing_parts: _Optional[_Iterable[str]] = ..., engine: _Optional[str] = ...) -> None: ...
