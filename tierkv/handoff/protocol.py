"""The messages on the Unix socket between a hook and the agent, and how they are framed and checked.

A message is ``<4sII`` (magic ``TKH1``, JSON length, blob length), a JSON object with an ``op``, and a blob: token ids
as little-endian int64, or a layout's JSON. Nothing is ever unpickled. Anything malformed raises HandoffError, and
whoever reads it closes the connection.

An engine opens two connections that carry the same ``engine_id``. On "control" the generation thread asks and the
agent answers; the agent allocates regions of that connection's arena and the hook frees them. On "demote" the mover
thread sends state; the hook allocates and the agent frees. A region is named by its offset.

===========  =========  =========================================================================
connection   direction  op (fields; blob)
===========  =========  =========================================================================
both         to agent   hello (version, channel, engine, build, pid, engine_id)
both         to hook    hello (version, arena_bytes, settings, node) + descriptor | refused (reason)
control      to agent   announce (model, announcement, fidelity)
control      to agent   offer (id, model, position, media, tokens_bytes, leaving; tokens + layout)
control      to hook    offer (id, transfer, rows_from, window, state, reason)
control      to agent   restore (id, model, have, rows_from, limit, expected, media, budget_s; tokens)
control      to agent   probe (as restore); answered by possible (id, position, reason)
control      to hook    none (id, reason) | plan (id, position, first_row; layout)
control      to hook    piece (id, offset, bytes, segments)
control      to hook    working (id), once a second | done (id, position, scalars, fidelity, codec, bytes)
control      to hook    failed (id, reason)
control      to agent   free (offset)
demote       to agent   begin (transfer, scalars) | piece (transfer, offset, bytes, segments)
demote       to agent   end (transfer) | dropped (transfer, reason) | report (stats) | flush (timeout_s)
demote       to agent   hit (model, position, media; tokens)
demote       to agent   served (restore, model, tokens, have, position, reason)
demote       to agent   sampled (model, codec, tokens, layers, positions, kl_mean, top1_fraction)
demote       to hook    free (offsets) | settings (settings, models, prefill) | flushed (complete)
===========  =========  =========================================================================

A segment is ``[layer, array, position, offset in the region, shape]``; its dtype is the layout's.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import HandoffError
from tierkv.state.layout import Layout

VERSION = 1
MAGIC = b"TKH1"
HEADER = struct.Struct("<4sII")
MAX_JSON_BYTES = 1 << 20
MAX_BLOB_BYTES = 64 << 20
MAX_TOKENS = MAX_BLOB_BYTES // 16
MAX_COUNT = 1 << 48
BLOCK_TOKENS = 256
# Where computing is quicker than that, a restore may still take so long: a round trip, and a busy machine's delays.
SHORTEST_WORTH_S = 0.2
WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".npz")

NUMPY_DTYPE = {
    "bfloat16": "uint16",
    "float16": "float16",
    "float32": "float32",
    "uint8": "uint8",
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "bool": "bool",
}

Signature = Sequence[tuple[str, str, str, tuple[tuple[str, int], ...]]]


class FileSeen(NamedTuple):
    """A file of a model as the hook saw it when it was loaded."""

    path: str
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int


def model_files(path: str | Path) -> tuple[FileSeen, ...]:
    """The files that make a model what it is, by name: weights, config.json and model code.

    ``path`` is a model's folder or one weight file. Raises HandoffError if there are no weights.
    """
    root = Path(path)
    try:
        found = [root] if root.is_file() else sorted(each for each in root.iterdir() if each.is_file())
        seen = tuple(see_file(each) for each in found if _matters(each))
    except OSError as error:
        raise HandoffError(str(path), f"the model's files cannot be listed: {error}") from error
    if not any(each.path.endswith(WEIGHT_SUFFIXES) for each in seen):
        raise HandoffError(str(path), f"no weights ({', '.join(WEIGHT_SUFFIXES)}) in this folder")
    return seen


def see_file(path: Path) -> FileSeen:
    """The file behind a link, under the link's name: model hubs keep weights as links to files without a suffix."""
    stat = path.stat()
    return FileSeen(str(path.absolute()), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _matters(path: Path) -> bool:
    return path.suffix in (*WEIGHT_SUFFIXES, ".py") or path.name in ("config.json", "adapter_config.json")


@dataclass(frozen=True, slots=True)
class ModelAnnouncement:
    """What a hook knows of a loaded model. Files as ``model_files`` gave them **when the model was loaded**.

    ``config`` is the model's configuration as JSON text. 0 and "" mean "not set"; see
    ``tierkv.identity.model.ModelIdentity`` for the rest.
    """

    name: str
    weights: tuple[FileSeen, ...]
    config: str = ""
    adapter: tuple[FileSeen, ...] = ()
    draft: tuple[FileSeen, ...] = ()
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> ModelAnnouncement:
        """Raises HandoffError for anything that ``to_json`` did not give."""
        if not isinstance(data, dict):
            raise HandoffError("hook", "a model announcement is an object")
        raw = cast("dict[str, object]", data)
        values: dict[str, Any] = {}
        for spec in fields(cls):
            value = raw.get(spec.name)
            if spec.name in ("weights", "adapter", "draft"):
                values[spec.name] = _files(value)
            elif spec.type == "int":
                values[spec.name] = int_of(value, spec.name)
            elif isinstance(value, str):
                values[spec.name] = value
            else:
                raise HandoffError("hook", f"{spec.name} of a model announcement is not text")
        return cls(**values)


def _files(value: object) -> tuple[FileSeen, ...]:
    if not isinstance(value, list) or len(cast("list[object]", value)) > 4096:
        raise HandoffError("hook", "files of a model announcement are a list")
    seen: list[FileSeen] = []
    for item in cast("list[object]", value):
        if not isinstance(item, list) or len(cast("list[object]", item)) != 5:
            raise HandoffError("hook", "a file is [path, device, inode, size, mtime]")
        path, *numbers = cast("list[object]", item)
        if not isinstance(path, str):
            raise HandoffError("hook", "a file's path is text")
        seen.append(FileSeen(path, *(int_of(each, "file", high=1 << 64) for each in numbers)))
    return tuple(seen)


@dataclass(frozen=True, slots=True)
class Media:
    """An image or sound in the prompt: it covers tokens [start, start + length)."""

    start: int
    length: int
    content_hash: bytes


def media_to_json(media: Sequence[Media]) -> list[list[object]]:
    return [[each.start, each.length, each.content_hash.hex()] for each in media]


def media_from_json(value: object) -> tuple[Media, ...]:
    if not isinstance(value, list) or len(cast("list[object]", value)) > 1024:
        raise HandoffError("hook", "media are a list")
    found: list[Media] = []
    for item in cast("list[object]", value):
        if not isinstance(item, list) or len(cast("list[object]", item)) != 3:
            raise HandoffError("hook", "a medium is [start, length, hash]")
        start, length, digest = cast("list[object]", item)
        if not isinstance(digest, str) or len(digest) > 128:
            raise HandoffError("hook", "a medium's hash is at most 64 bytes in hex")
        try:
            content = bytes.fromhex(digest)
        except ValueError as error:
            raise HandoffError("hook", "a medium's hash is hex") from error
        found.append(Media(int_of(start, "start"), int_of(length, "length", high=1 << 31), content))
    return tuple(found)


class Segment(NamedTuple):
    """One array, or rows of one, inside a region. C-contiguous, dtype as the layout says."""

    layer: int
    array: int
    position: int
    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    op: str
    fields: Mapping[str, object] = field(default_factory=dict[str, object])
    blob: bytes | bytearray = b""

    def integer(self, name: str, high: int = MAX_COUNT) -> int:
        return int_of(self.fields.get(name), name, high=high)

    def text(self, name: str, limit: int = 4096) -> str:
        value = self.fields.get(name)
        if not isinstance(value, str) or len(value) > limit:
            raise HandoffError("handoff", f"{name} is not a text of at most {limit} characters")
        return value

    def number(self, name: str) -> float:
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise HandoffError("handoff", f"{name} is not a number")
        return float(value)

    def table(self, name: str) -> dict[str, object]:
        value = self.fields.get(name)
        if not isinstance(value, dict):
            raise HandoffError("handoff", f"{name} is not an object")
        return cast("dict[str, object]", value)

    def numbers(self, name: str) -> list[int]:
        value = self.fields.get(name)
        if not isinstance(value, list):
            raise HandoffError("handoff", f"{name} is not a list")
        return [int_of(each, name) for each in cast("list[object]", value)]

    def tokens(self) -> NDArray[np.int64]:
        return tokens_of(self.blob)


def int_of(value: object, name: str, *, high: int = MAX_COUNT) -> int:
    """``value`` if it is an integer in [0, high]; raises HandoffError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
        raise HandoffError("handoff", f"{name} is not an integer between 0 and {high}")
    return value


def tokens_of(blob: bytes | bytearray | memoryview) -> NDArray[np.int64]:
    """[n] int64. Raises HandoffError."""
    if len(blob) % 8 or len(blob) // 8 > MAX_TOKENS:
        raise HandoffError("handoff", "the blob is not a list of token ids")
    return np.frombuffer(blob, "<i8")


def layout_of(blob: bytes | bytearray | memoryview) -> Layout:
    try:
        return Layout.from_json(bytes(blob))
    except ValueError as error:
        raise HandoffError("handoff", f"not a layout: {error}") from error


def segments_of(value: object, layout: Layout, room: int) -> list[Segment]:
    """The segments of a piece; each lies inside a region of ``room`` bytes and has its layout's dtype and rank.

    Raises HandoffError.
    """
    if not isinstance(value, list):
        raise HandoffError("handoff", "segments are a list")
    found: list[Segment] = []
    for item in cast("list[object]", value):
        if not isinstance(item, list) or len(cast("list[object]", item)) != 5:
            raise HandoffError("handoff", "a segment is [layer, array, position, offset, shape]")
        layer, array, position, offset, dims = cast("list[object]", item)
        if not isinstance(dims, list):
            raise HandoffError("handoff", "a segment's shape is a list")
        shape = tuple(int_of(each, "shape", high=1 << 31) for each in cast("list[object]", dims))
        segment = Segment(
            int_of(layer, "layer", high=len(layout.layers) - 1), int_of(array, "array", high=63),
            int_of(position, "position"), int_of(offset, "offset"), shape,
        )  # fmt: skip
        _check_segment(segment, layout, room)
        found.append(segment)
    return found


def _check_segment(segment: Segment, layout: Layout, room: int) -> None:
    arrays = layout.layers[segment.layer].arrays
    if segment.array >= len(arrays) or arrays[segment.array].dtype == "none":
        raise HandoffError("handoff", "a segment names an array that the layout does not have")
    wanted = arrays[segment.array].shape
    if len(wanted) != len(segment.shape) or any(a not in (-1, b) for a, b in zip(wanted, segment.shape, strict=True)):
        raise HandoffError("handoff", "a segment's shape is not the layout's")
    if segment.offset + segment_bytes(segment, layout) > room:
        raise HandoffError("handoff", "a segment ends behind its region")


def segment_dtype(layout: Layout, layer: int, array: int) -> np.dtype[Any]:
    """The numpy dtype that carries an array's bits: bfloat16 travels as uint16."""
    return np.dtype(NUMPY_DTYPE[layout.layers[layer].arrays[array].dtype])


def segment_bytes(segment: Segment, layout: Layout) -> int:
    return math.prod(segment.shape) * segment_dtype(layout, segment.layer, segment.array).itemsize


def segment_view(segment: Segment, layout: Layout, region: memoryview) -> NDArray[Any]:
    """The segment's array as a view of its region."""
    dtype = segment_dtype(layout, segment.layer, segment.array)
    count = math.prod(segment.shape)
    return np.frombuffer(region, dtype, count=count, offset=segment.offset).reshape(segment.shape)


def pack(op: str, message: Mapping[str, object] | None = None, blob_bytes: int = 0) -> bytes:
    """Header and JSON of a message whose blob of ``blob_bytes`` follows. Raises HandoffError if it is too large."""
    text = json.dumps({"op": op, **(message or {})}, separators=(",", ":"), ensure_ascii=True).encode()
    if len(text) > MAX_JSON_BYTES or blob_bytes > MAX_BLOB_BYTES:
        raise HandoffError("handoff", f"a message of {len(text)} + {blob_bytes} bytes is over the limit")
    return HEADER.pack(MAGIC, len(text), blob_bytes) + text


def unpack_header(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """(JSON bytes, blob bytes) of the message that starts so. Raises HandoffError."""
    magic, json_bytes, blob_bytes = HEADER.unpack(data)
    if magic != MAGIC or not 2 <= json_bytes <= MAX_JSON_BYTES or blob_bytes > MAX_BLOB_BYTES:
        raise HandoffError("handoff", "this is not a hand-off message")
    return json_bytes, blob_bytes


def unpack_body(text: bytes | bytearray, blob: bytes | bytearray = b"") -> Message:
    """Raises HandoffError unless the text is a JSON object with an op."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HandoffError("handoff", "a message is not JSON") from error
    if not isinstance(data, dict):
        raise HandoffError("handoff", "a message is a JSON object")
    values = cast("dict[str, object]", data)
    op = values.get("op")
    if not isinstance(op, str):
        raise HandoffError("handoff", "a message has an op")
    return Message(op, values, blob)
