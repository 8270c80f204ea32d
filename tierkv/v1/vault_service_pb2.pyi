from tierkv.v1 import telemetry_pb2 as _telemetry_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProbeRequest(_message.Message):
    __slots__ = ("root", "block_keys", "tokens_start", "tokens", "want_blocks", "want_windows", "want_states", "worst_fidelity", "peek")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WANT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WANT_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    WANT_STATES_FIELD_NUMBER: _ClassVar[int]
    WORST_FIDELITY_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    root: bytes
    block_keys: _containers.RepeatedScalarFieldContainer[bytes]
    tokens_start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    want_blocks: bool
    want_windows: bool
    want_states: bool
    worst_fidelity: int
    peek: bool
    def __init__(self, root: _Optional[bytes] = ..., block_keys: _Optional[_Iterable[bytes]] = ..., tokens_start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., want_blocks: bool = ..., want_windows: bool = ..., want_states: bool = ..., worst_fidelity: _Optional[int] = ..., peek: bool = ...) -> None: ...

class ProbedRecord(_message.Message):
    __slots__ = ("key", "kind", "block_index", "n_tokens", "agreeing_tokens", "size_bytes", "fidelity", "layout_digest", "tail", "raw_bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGREEING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIDELITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    kind: int
    block_index: int
    n_tokens: int
    agreeing_tokens: int
    size_bytes: int
    fidelity: int
    layout_digest: bytes
    tail: _containers.RepeatedScalarFieldContainer[int]
    raw_bytes: int
    def __init__(self, key: _Optional[bytes] = ..., kind: _Optional[int] = ..., block_index: _Optional[int] = ..., n_tokens: _Optional[int] = ..., agreeing_tokens: _Optional[int] = ..., size_bytes: _Optional[int] = ..., fidelity: _Optional[int] = ..., layout_digest: _Optional[bytes] = ..., tail: _Optional[_Iterable[int]] = ..., raw_bytes: _Optional[int] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("records", "leading_blocks", "epoch", "missing_reason", "node", "missing_unix_s", "missing_why")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    LEADING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MISSING_REASON_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    MISSING_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MISSING_WHY_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[ProbedRecord]
    leading_blocks: int
    epoch: int
    missing_reason: str
    node: str
    missing_unix_s: float
    missing_why: str
    def __init__(self, records: _Optional[_Iterable[_Union[ProbedRecord, _Mapping]]] = ..., leading_blocks: _Optional[int] = ..., epoch: _Optional[int] = ..., missing_reason: _Optional[str] = ..., node: _Optional[str] = ..., missing_unix_s: _Optional[float] = ..., missing_why: _Optional[str] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: bytes
    def __init__(self, chunks: _Optional[bytes] = ...) -> None: ...

class StoreResult(_message.Message):
    __slots__ = ("key", "outcome", "accepted")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    outcome: str
    accepted: bool
    def __init__(self, key: _Optional[bytes] = ..., outcome: _Optional[str] = ..., accepted: bool = ...) -> None: ...

class StoreResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[StoreResult]
    def __init__(self, results: _Optional[_Iterable[_Union[StoreResult, _Mapping]]] = ...) -> None: ...

class BatchPromoteRequest(_message.Message):
    __slots__ = ("keys", "message_bytes", "peek")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    message_bytes: int
    peek: bool
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., message_bytes: _Optional[int] = ..., peek: bool = ...) -> None: ...

class BatchPromoteResponse(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: bytes
    def __init__(self, chunks: _Optional[bytes] = ...) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class TouchResponse(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, missing: _Optional[_Iterable[int]] = ...) -> None: ...

class Selector(_message.Message):
    __slots__ = ("root", "model", "prefixes", "older_than_s", "tier")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_S_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    root: bytes
    model: str
    prefixes: _containers.RepeatedScalarFieldContainer[bytes]
    older_than_s: float
    tier: str
    def __init__(self, root: _Optional[bytes] = ..., model: _Optional[str] = ..., prefixes: _Optional[_Iterable[bytes]] = ..., older_than_s: _Optional[float] = ..., tier: _Optional[str] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("root", "block_keys", "beginning")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    BEGINNING_FIELD_NUMBER: _ClassVar[int]
    root: bytes
    block_keys: _containers.RepeatedScalarFieldContainer[bytes]
    beginning: bytes
    def __init__(self, root: _Optional[bytes] = ..., block_keys: _Optional[_Iterable[bytes]] = ..., beginning: _Optional[bytes] = ...) -> None: ...

class RecordFate(_message.Message):
    __slots__ = ("reason", "time_unix_s", "why", "kind", "end")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIME_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    reason: str
    time_unix_s: float
    why: str
    kind: int
    end: int
    def __init__(self, reason: _Optional[str] = ..., time_unix_s: _Optional[float] = ..., why: _Optional[str] = ..., kind: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class OtherIdentity(_message.Message):
    __slots__ = ("root", "model", "records")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    root: bytes
    model: str
    records: int
    def __init__(self, root: _Optional[bytes] = ..., model: _Optional[str] = ..., records: _Optional[int] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("leading_blocks", "next_block", "others_follow", "lost_checkpoints", "other_identities", "remembers_since_unix_s", "node")
    LEADING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_BLOCK_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FOLLOW_FIELD_NUMBER: _ClassVar[int]
    LOST_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    OTHER_IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    REMEMBERS_SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    leading_blocks: int
    next_block: RecordFate
    others_follow: bool
    lost_checkpoints: _containers.RepeatedCompositeFieldContainer[RecordFate]
    other_identities: _containers.RepeatedCompositeFieldContainer[OtherIdentity]
    remembers_since_unix_s: float
    node: str
    def __init__(self, leading_blocks: _Optional[int] = ..., next_block: _Optional[_Union[RecordFate, _Mapping]] = ..., others_follow: bool = ..., lost_checkpoints: _Optional[_Iterable[_Union[RecordFate, _Mapping]]] = ..., other_identities: _Optional[_Iterable[_Union[OtherIdentity, _Mapping]]] = ..., remembers_since_unix_s: _Optional[float] = ..., node: _Optional[str] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("selector",)
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: int
    def __init__(self, records: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("selector",)
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: int
    def __init__(self, records: _Optional[int] = ...) -> None: ...

class ListPrefixesRequest(_message.Message):
    __slots__ = ("selector", "limit")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    limit: int
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ..., limit: _Optional[int] = ...) -> None: ...

class PrefixInfo(_message.Message):
    __slots__ = ("leaf_key", "root", "model", "tokens", "own_bytes", "total_bytes", "records", "created_unix_s", "last_hit_unix_s", "hits", "pinned", "fidelity", "codecs", "tier")
    LEAF_KEY_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    LAST_HIT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    FIDELITY_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    leaf_key: bytes
    root: bytes
    model: str
    tokens: int
    own_bytes: int
    total_bytes: int
    records: int
    created_unix_s: float
    last_hit_unix_s: float
    hits: int
    pinned: bool
    fidelity: int
    codecs: _containers.RepeatedScalarFieldContainer[str]
    tier: str
    def __init__(self, leaf_key: _Optional[bytes] = ..., root: _Optional[bytes] = ..., model: _Optional[str] = ..., tokens: _Optional[int] = ..., own_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., records: _Optional[int] = ..., created_unix_s: _Optional[float] = ..., last_hit_unix_s: _Optional[float] = ..., hits: _Optional[int] = ..., pinned: bool = ..., fidelity: _Optional[int] = ..., codecs: _Optional[_Iterable[str]] = ..., tier: _Optional[str] = ...) -> None: ...

class ListPrefixesResponse(_message.Message):
    __slots__ = ("prefixes", "total")
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[PrefixInfo]
    total: int
    def __init__(self, prefixes: _Optional[_Iterable[_Union[PrefixInfo, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class DescribePrefixRequest(_message.Message):
    __slots__ = ("leaf_key",)
    LEAF_KEY_FIELD_NUMBER: _ClassVar[int]
    leaf_key: bytes
    def __init__(self, leaf_key: _Optional[bytes] = ...) -> None: ...

class RecordInfo(_message.Message):
    __slots__ = ("key", "kind", "start", "end", "size_bytes", "fidelity", "codec", "stored_unix_s", "last_hit_unix_s", "hits", "pinned", "own")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIDELITY_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    STORED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    LAST_HIT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    kind: int
    start: int
    end: int
    size_bytes: int
    fidelity: int
    codec: str
    stored_unix_s: float
    last_hit_unix_s: float
    hits: int
    pinned: bool
    own: bool
    def __init__(self, key: _Optional[bytes] = ..., kind: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., size_bytes: _Optional[int] = ..., fidelity: _Optional[int] = ..., codec: _Optional[str] = ..., stored_unix_s: _Optional[float] = ..., last_hit_unix_s: _Optional[float] = ..., hits: _Optional[int] = ..., pinned: bool = ..., own: bool = ...) -> None: ...

class DescribePrefixResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[RecordInfo]
    def __init__(self, records: _Optional[_Iterable[_Union[RecordInfo, _Mapping]]] = ...) -> None: ...

class PreviewPurgeRequest(_message.Message):
    __slots__ = ("selector",)
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ...) -> None: ...

class PreviewPurgeResponse(_message.Message):
    __slots__ = ("token", "records", "bytes", "prefixes", "tokens", "pinned_records", "examples")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PINNED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    token: str
    records: int
    bytes: int
    prefixes: int
    tokens: int
    pinned_records: int
    examples: _containers.RepeatedCompositeFieldContainer[PrefixInfo]
    def __init__(self, token: _Optional[str] = ..., records: _Optional[int] = ..., bytes: _Optional[int] = ..., prefixes: _Optional[int] = ..., tokens: _Optional[int] = ..., pinned_records: _Optional[int] = ..., examples: _Optional[_Iterable[_Union[PrefixInfo, _Mapping]]] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("token", "actor")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    token: str
    actor: str
    def __init__(self, token: _Optional[str] = ..., actor: _Optional[str] = ...) -> None: ...

class PurgeResponse(_message.Message):
    __slots__ = ("records", "bytes", "undo_token", "undo_s", "epoch")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    UNDO_TOKEN_FIELD_NUMBER: _ClassVar[int]
    UNDO_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    records: int
    bytes: int
    undo_token: str
    undo_s: float
    epoch: int
    def __init__(self, records: _Optional[int] = ..., bytes: _Optional[int] = ..., undo_token: _Optional[str] = ..., undo_s: _Optional[float] = ..., epoch: _Optional[int] = ...) -> None: ...

class UndoPurgeRequest(_message.Message):
    __slots__ = ("undo_token", "actor")
    UNDO_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    undo_token: str
    actor: str
    def __init__(self, undo_token: _Optional[str] = ..., actor: _Optional[str] = ...) -> None: ...

class UndoPurgeResponse(_message.Message):
    __slots__ = ("records", "bytes")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    records: int
    bytes: int
    def __init__(self, records: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("tier", "epoch", "index_bytes", "leases", "policy", "loading", "disk", "refusals")
    class RefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TIER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    tier: _telemetry_pb2.TierSnapshot
    epoch: int
    index_bytes: int
    leases: int
    policy: str
    loading: bool
    disk: DiskStats
    refusals: _containers.ScalarMap[str, int]
    def __init__(self, tier: _Optional[_Union[_telemetry_pb2.TierSnapshot, _Mapping]] = ..., epoch: _Optional[int] = ..., index_bytes: _Optional[int] = ..., leases: _Optional[int] = ..., policy: _Optional[str] = ..., loading: bool = ..., disk: _Optional[_Union[DiskStats, _Mapping]] = ..., refusals: _Optional[_Mapping[str, int]] = ...) -> None: ...

class DiskStats(_message.Message):
    __slots__ = ("folder", "disk_bytes", "disk_cap_bytes", "ram_bytes", "ram_cap_bytes", "dead_bytes", "unsynced_bytes", "segments", "segments_loaded", "hot_records", "damaged", "torn", "durability", "problem")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    RAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    RAM_CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNSYNCED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_LOADED_FIELD_NUMBER: _ClassVar[int]
    HOT_RECORDS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    TORN_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    folder: str
    disk_bytes: int
    disk_cap_bytes: int
    ram_bytes: int
    ram_cap_bytes: int
    dead_bytes: int
    unsynced_bytes: int
    segments: int
    segments_loaded: int
    hot_records: int
    damaged: int
    torn: int
    durability: str
    problem: str
    def __init__(self, folder: _Optional[str] = ..., disk_bytes: _Optional[int] = ..., disk_cap_bytes: _Optional[int] = ..., ram_bytes: _Optional[int] = ..., ram_cap_bytes: _Optional[int] = ..., dead_bytes: _Optional[int] = ..., unsynced_bytes: _Optional[int] = ..., segments: _Optional[int] = ..., segments_loaded: _Optional[int] = ..., hot_records: _Optional[int] = ..., damaged: _Optional[int] = ..., torn: _Optional[int] = ..., durability: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class OperationProgress(_message.Message):
    __slots__ = ("done", "total", "done_bytes", "total_bytes", "finished")
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    done: int
    total: int
    done_bytes: int
    total_bytes: int
    finished: bool
    def __init__(self, done: _Optional[int] = ..., total: _Optional[int] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., finished: bool = ...) -> None: ...

class ListRecordsRequest(_message.Message):
    __slots__ = ("selector",)
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ...) -> None: ...

class ListRecordsResponse(_message.Message):
    __slots__ = ("keys", "sizes")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class FsckRequest(_message.Message):
    __slots__ = ("repair",)
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    repair: bool
    def __init__(self, repair: bool = ...) -> None: ...

class FsckFinding(_message.Message):
    __slots__ = ("file", "offset", "reason", "size_bytes", "key", "repaired")
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_FIELD_NUMBER: _ClassVar[int]
    file: str
    offset: int
    reason: str
    size_bytes: int
    key: bytes
    repaired: bool
    def __init__(self, file: _Optional[str] = ..., offset: _Optional[int] = ..., reason: _Optional[str] = ..., size_bytes: _Optional[int] = ..., key: _Optional[bytes] = ..., repaired: bool = ...) -> None: ...

class FsckResponse(_message.Message):
    __slots__ = ("progress", "findings")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    progress: OperationProgress
    findings: _containers.RepeatedCompositeFieldContainer[FsckFinding]
    def __init__(self, progress: _Optional[_Union[OperationProgress, _Mapping]] = ..., findings: _Optional[_Iterable[_Union[FsckFinding, _Mapping]]] = ...) -> None: ...

class CompactRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompactResponse(_message.Message):
    __slots__ = ("progress",)
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    progress: OperationProgress
    def __init__(self, progress: _Optional[_Union[OperationProgress, _Mapping]] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("selector",)
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("progress",)
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    progress: OperationProgress
    def __init__(self, progress: _Optional[_Union[OperationProgress, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("target", "selector")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    target: str
    selector: Selector
    def __init__(self, target: _Optional[str] = ..., selector: _Optional[_Union[Selector, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("progress", "refused", "target_free_bytes", "kept")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TARGET_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    progress: OperationProgress
    refused: _containers.ScalarMap[str, int]
    target_free_bytes: int
    kept: int
    def __init__(self, progress: _Optional[_Union[OperationProgress, _Mapping]] = ..., refused: _Optional[_Mapping[str, int]] = ..., target_free_bytes: _Optional[int] = ..., kept: _Optional[int] = ...) -> None: ...
