from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReasonCount(_message.Message):
    __slots__ = ("reason", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    count: int
    def __init__(self, reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bucket", "count", "sum_s")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SUM_S_FIELD_NUMBER: _ClassVar[int]
    bucket: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    sum_s: float
    def __init__(self, bucket: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., sum_s: _Optional[float] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("seconds", "hits", "misses", "bytes_in", "bytes_out", "evictions")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    hits: int
    misses: int
    bytes_in: int
    bytes_out: int
    evictions: int
    def __init__(self, seconds: _Optional[float] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., evictions: _Optional[int] = ...) -> None: ...

class TierSnapshot(_message.Message):
    __slots__ = ("name", "size_bytes", "cap_bytes", "records", "tokens", "hits", "misses", "miss_reasons", "evictions", "bytes_in", "bytes_out", "stores", "refusals", "promote_s", "store_s", "windows", "pinned_records", "quarantined_records", "hit_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    MISS_REASONS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    PROMOTE_S_FIELD_NUMBER: _ClassVar[int]
    STORE_S_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    PINNED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    cap_bytes: int
    records: int
    tokens: int
    hits: int
    misses: int
    miss_reasons: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    evictions: int
    bytes_in: int
    bytes_out: int
    stores: int
    refusals: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    promote_s: Histogram
    store_s: Histogram
    windows: _containers.RepeatedCompositeFieldContainer[Window]
    pinned_records: int
    quarantined_records: int
    hit_tokens: int
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., cap_bytes: _Optional[int] = ..., records: _Optional[int] = ..., tokens: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., miss_reasons: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., evictions: _Optional[int] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., stores: _Optional[int] = ..., refusals: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., promote_s: _Optional[_Union[Histogram, _Mapping]] = ..., store_s: _Optional[_Union[Histogram, _Mapping]] = ..., windows: _Optional[_Iterable[_Union[Window, _Mapping]]] = ..., pinned_records: _Optional[int] = ..., quarantined_records: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class MemorySnapshot(_message.Message):
    __slots__ = ("total_bytes", "used_bytes", "rss_bytes", "threshold_fraction", "device_bytes", "note")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FRACTION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    used_bytes: int
    rss_bytes: int
    threshold_fraction: float
    device_bytes: int
    note: str
    def __init__(self, total_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., threshold_fraction: _Optional[float] = ..., device_bytes: _Optional[int] = ..., note: _Optional[str] = ...) -> None: ...

class LinkSnapshot(_message.Message):
    __slots__ = ("peer", "tier", "state", "rtt_s", "receive_bytes_per_s", "send_bytes_per_s", "failures", "last_error")
    PEER_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SEND_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    peer: str
    tier: str
    state: str
    rtt_s: float
    receive_bytes_per_s: float
    send_bytes_per_s: float
    failures: int
    last_error: str
    def __init__(self, peer: _Optional[str] = ..., tier: _Optional[str] = ..., state: _Optional[str] = ..., rtt_s: _Optional[float] = ..., receive_bytes_per_s: _Optional[float] = ..., send_bytes_per_s: _Optional[float] = ..., failures: _Optional[int] = ..., last_error: _Optional[str] = ...) -> None: ...

class EngineSnapshot(_message.Message):
    __slots__ = ("kind", "build", "model", "identity", "attached", "prefill_tokens_saved", "prefill_s_saved", "note", "quality_codec", "quality_samples", "quality_kl_mean", "quality_top1_fraction", "quality_snr_db_min", "quality_raised_layers")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_SAVED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_SAVED_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    QUALITY_CODEC_FIELD_NUMBER: _ClassVar[int]
    QUALITY_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    QUALITY_KL_MEAN_FIELD_NUMBER: _ClassVar[int]
    QUALITY_TOP1_FRACTION_FIELD_NUMBER: _ClassVar[int]
    QUALITY_SNR_DB_MIN_FIELD_NUMBER: _ClassVar[int]
    QUALITY_RAISED_LAYERS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    build: str
    model: str
    identity: str
    attached: bool
    prefill_tokens_saved: int
    prefill_s_saved: float
    note: str
    quality_codec: str
    quality_samples: int
    quality_kl_mean: float
    quality_top1_fraction: float
    quality_snr_db_min: float
    quality_raised_layers: int
    def __init__(self, kind: _Optional[str] = ..., build: _Optional[str] = ..., model: _Optional[str] = ..., identity: _Optional[str] = ..., attached: bool = ..., prefill_tokens_saved: _Optional[int] = ..., prefill_s_saved: _Optional[float] = ..., note: _Optional[str] = ..., quality_codec: _Optional[str] = ..., quality_samples: _Optional[int] = ..., quality_kl_mean: _Optional[float] = ..., quality_top1_fraction: _Optional[float] = ..., quality_snr_db_min: _Optional[float] = ..., quality_raised_layers: _Optional[int] = ...) -> None: ...

class NodeSnapshot(_message.Message):
    __slots__ = ("node_id", "name", "role", "version", "address", "pid", "started_unix_s", "now_unix_s", "sequence", "memory", "tiers", "links", "engines", "activity", "counters", "last_event_id")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    LAST_EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    name: str
    role: str
    version: str
    address: str
    pid: int
    started_unix_s: float
    now_unix_s: float
    sequence: int
    memory: MemorySnapshot
    tiers: _containers.RepeatedCompositeFieldContainer[TierSnapshot]
    links: _containers.RepeatedCompositeFieldContainer[LinkSnapshot]
    engines: _containers.RepeatedCompositeFieldContainer[EngineSnapshot]
    activity: str
    counters: _containers.ScalarMap[str, int]
    last_event_id: int
    def __init__(self, node_id: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., version: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., started_unix_s: _Optional[float] = ..., now_unix_s: _Optional[float] = ..., sequence: _Optional[int] = ..., memory: _Optional[_Union[MemorySnapshot, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[TierSnapshot, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkSnapshot, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[EngineSnapshot, _Mapping]]] = ..., activity: _Optional[str] = ..., counters: _Optional[_Mapping[str, int]] = ..., last_event_id: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("id", "time_unix_s", "kind", "severity", "node", "message", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    TIME_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    time_unix_s: float
    kind: str
    severity: str
    node: str
    message: str
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, id: _Optional[int] = ..., time_unix_s: _Optional[float] = ..., kind: _Optional[str] = ..., severity: _Optional[str] = ..., node: _Optional[str] = ..., message: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...
