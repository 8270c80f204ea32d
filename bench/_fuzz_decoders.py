"""Fuzz targets that decode bytes in this process: records, segments, bundles, recordings, layouts, bulk streams."""

from __future__ import annotations

import io
import random
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import _fuzzing as fuzzing
import numpy as np

from tierkv.agents.decode import batches, decode_into, parse_record
from tierkv.agents.lookup import Candidate
from tierkv.codec.frame import DTYPES, HEADER_BYTES, FrameHeader, payload_hash
from tierkv.codec.record import RecordHeader, RecordKind, verify_record
from tierkv.codec.registry import codec_named, decode_segment, encode_segment
from tierkv.errors import BadFrame, CorruptionError, TierKVError
from tierkv.identity.blocks import BlockKey, PromptChain, block_key, state_key
from tierkv.rpc.bulk import MessageWriter
from tierkv.rpc.bundle import BundleWriter, read_bundle
from tierkv.rpc.inflow import Inflow
from tierkv.rpc.intake import Intake
from tierkv.rpc.vault_port import Found
from tierkv.state.layout import ArraySpec, LayerLayout, Layout
from tierkv.store.ram import RamStore
from tierkv.telemetry.recording import BadRecording, read_recording

SHAPE = (1, 2, 20, 8)
CODECS = ("raw", "lossless", "int8-g256", "int8", "int8z")
MAX_RECORD_BYTES = 1 << 20
ROOT = BlockKey(b"\x07" * 32)
LAYOUT = Layout(
    (
        LayerLayout(
            "rows", "KVCache", tuple(ArraySpec(n, "float32", (1, 2, -1, 8)) for n in ("keys", "values")), (), "0"
        ),
        LayerLayout(
            "state", "ArraysCache", (ArraySpec("0", "bfloat16", (1, 3, 8)), ArraySpec("1", "none", ())), (), "1"
        ),
    )
)  # fmt: skip


def a_record(kind: RecordKind = RecordKind.BLOCK, codec: str = "lossless", n: int = 20) -> bytes:
    """A sound record of LAYOUT."""
    tokens = np.arange(n, dtype=np.int64)
    rows = kind is RecordKind.BLOCK
    body: list[bytes] = []
    raw = 0
    for layer in LAYOUT.having("rows" if rows else "state"):
        for index, spec in enumerate(LAYOUT.layers[layer].arrays):
            if spec.dtype == "none":
                continue
            shape = tuple(n if size == -1 else size for size in spec.shape)
            kind_of = np.float32 if spec.dtype == "float32" else np.uint16
            array = np.random.default_rng(layer * 8 + index).integers(0, 60000, shape).astype(kind_of)
            header, buffers = encode_segment(
                codec_named(codec), array, spec.dtype, layer=layer, index=index, position=0 if rows else n,
                token_axis=spec.token_axis if rows else None,
            )  # fmt: skip
            body += [bytes(part) for part in buffers]
            raw += header.raw_length
    key = (block_key if rows else state_key)(ROOT, tokens, (), 0)
    segments = 2 if rows else 1
    head = RecordHeader(
        kind, key, ROOT, ROOT, tokens, 0, LAYOUT.digest(), LAYOUT.to_json(), 0, 0, 1.5, segments,
        sum(map(len, body)), raw, "m", codec, '{"1":{"offset":20}}' if not rows else "",
    )  # fmt: skip
    return head.pack_frame() + b"".join(body)


class Base:
    """What most decoders share."""

    def mutators(self) -> Sequence[fuzzing.Mutator]:
        return ()

    def close(self) -> None:
        pass


class Records(Base):
    """A whole record as an agent takes it from a vault: verified, compared with the prompt, decoded."""

    name = "record"

    def __init__(self) -> None:
        self._chain = PromptChain.of(ROOT, np.arange(600, dtype=np.int64))
        self._region = memoryview(bytearray(MAX_RECORD_BYTES))

    def examples(self) -> Sequence[bytes]:
        return [*(a_record(codec=codec) for codec in CODECS), a_record(RecordKind.STATE, "lossless")]

    def mutators(self) -> Sequence[fuzzing.Mutator]:
        return (_resealed,)

    def feed(self, data: bytes) -> str:
        with suppress(CorruptionError):
            verify_record(data)
        try:
            header, _ = RecordHeader.unpack_frame(memoryview(data))
            found = Found(
                header.key, header.kind, header.start, header.n_tokens, header.n_tokens, len(data), 0, 0,
                header.layout_digest,
            )  # fmt: skip
            candidate = Candidate(found, SimpleNamespace(peer="fuzz"))  # pyright: ignore[reportArgumentType]
            parsed = parse_record(memoryview(data), candidate, self._chain, None)
            for frames, size in batches(parsed.frames, len(self._region)):
                if size <= len(self._region):
                    decode_into(frames, self._region[:size], parsed.layout)
        except CorruptionError as error:
            return getattr(error, "reason", type(error).__name__)
        return "ok"


def _resealed(rng: random.Random, data: bytes) -> bytes:
    """One frame's header or payload changed, and its checks made right again: what gets past them is looked at."""
    place, frames = 0, list[tuple[int, FrameHeader]]()
    with suppress(BadFrame):
        while place < len(data):
            header = FrameHeader.unpack(memoryview(data)[place:])
            frames.append((place, header))
            place += header.frame_bytes
    if not frames:
        return data
    place, header = rng.choice(frames)
    start = place + HEADER_BYTES
    payload = bytes(data[start : start + header.payload_length])
    if rng.random() < 0.7 and payload:
        payload = rng.choice(fuzzing.RAW)(rng, payload)[: 1 << 16]
    changes = {
        "layer": rng.choice((0, 1, 2, 65535)), "array": rng.choice((0, 1, 63)),
        "position": rng.choice((0, 20, 1 << 40)), "dtype": rng.choice(DTYPES), "codec": rng.randrange(8),
        "raw_length": rng.choice((0, 1, 1280, 1 << 40)),
        "flags": rng.randrange(4), "group": rng.choice((0, 1, 64, 256, 65535)),
        "token_axis": rng.choice((None, 0, 2, 5)),
        "shape": rng.choice(((), (1,), (1, 2, 20, 8), (0, 0), (1 << 31, 1 << 31), (1, 2, 3, 4, 5, 6))),
    }  # fmt: skip
    names = rng.sample(list(changes), rng.choice((0, 0, 1, 2)))
    made = replace(
        header, payload_length=len(payload), payload_hash=payload_hash(payload), **{n: changes[n] for n in names}
    )
    with suppress(Exception):  # a header that cannot be packed is no message
        return bytes(data[:place]) + made.pack() + payload + bytes(data[start + header.payload_length :])
    return data


class Segments(Base):
    """One segment's payload under a header that fits: every codec, with bytes that nobody wrote."""

    name = "segment"

    def examples(self) -> Sequence[bytes]:
        values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
        made: list[bytes] = []
        for number, codec in enumerate(CODECS):
            _, buffers = encode_segment(
                codec_named(codec), values, "float32", layer=0, index=0, position=0, token_axis=2
            )
            made.append(bytes([number]) + b"".join(bytes(part) for part in buffers)[HEADER_BYTES:])
        return made

    def feed(self, data: bytes) -> str:
        if not data:
            return "ok"
        values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
        codec = codec_named(CODECS[data[0] % len(CODECS)])
        header, _ = encode_segment(codec, values, "float32", layer=0, index=0, position=0, token_axis=2)
        guarded = np.full(int(np.prod(SHAPE)) + 512, 7.5, np.float32)
        payload = memoryview(data)[1:]
        try:
            decode_segment(replace(header, payload_length=len(payload)), payload, guarded[256:-256].reshape(SHAPE))
            outcome = "ok"
        except BadFrame as error:
            outcome = error.reason
        if not ((guarded[:256] == 7.5).all() and (guarded[-256:] == 7.5).all()):
            raise AssertionError("bytes beside the array were written")
        return outcome


class Bundles(Base):
    """A file for ``tierkv import``."""

    name = "bundle"

    def examples(self) -> Sequence[bytes]:
        file = io.BytesIO()
        writer = BundleWriter(file)
        for record in (a_record(), a_record(RecordKind.STATE)):
            writer.add(record)
        writer.finish()
        return [file.getvalue()]

    def feed(self, data: bytes) -> str:
        try:
            for _ in read_bundle(io.BytesIO(data), MAX_RECORD_BYTES):
                pass
        except BadFrame as error:
            return error.reason
        return "ok"


class Recordings(Base):
    """A file for ``tierkv tui --replay``, plain or packed."""

    name = "recording"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tierkv-fuzz-")
        self._path = Path(self._folder.name) / "recording.ndjson"

    def examples(self) -> Sequence[bytes]:
        import gzip

        from tierkv.telemetry.node import NodeTelemetry
        from tierkv.telemetry.recording import Header, Step, header_line, step_line
        from tierkv.telemetry.snapshot import Event

        telemetry = NodeTelemetry("kv-vault", "v", "127.0.0.1:1")
        telemetry.tier("kv").miss("never_stored")
        telemetry.emit("purge", "warning", "somebody purged 3 records", records="3")
        header = header_line(Header("home", 1.5, {"tierkv": "0"}, {"a.b": 1}))
        steps = [
            step_line(Step(2.5, "127.0.0.1:1", telemetry.snapshot())),
            step_line(Step(3.5, "127.0.0.1:1", events=(Event(1, 1.5, "purge", "warning", "3 records", {"n": "3"}),))),
            step_line(Step(4.5, "127.0.0.1:1", ended="closed")),
        ]
        plain = "\n".join([header, *steps, ""]).encode()
        return [plain, gzip.compress(plain)]

    def mutators(self) -> Sequence[fuzzing.Mutator]:
        return (fuzzing.json_junk,)

    def feed(self, data: bytes) -> str:
        self._path.write_bytes(data)
        try:
            read_recording(self._path)
        except BadRecording:
            return "bad_recording"
        except OSError as error:
            return f"os_error_{type(error).__name__}"
        return "ok"

    def close(self) -> None:
        self._folder.cleanup()


class Layouts(Base):
    """A layout as records and hooks carry it."""

    name = "layout"

    def examples(self) -> Sequence[bytes]:
        return [LAYOUT.to_json(), b"[]"]

    def mutators(self) -> Sequence[fuzzing.Mutator]:
        return (fuzzing.json_junk,)

    def feed(self, data: bytes) -> str:
        try:
            layout = Layout.from_json(data)
        except ValueError:
            return "not_a_layout"
        if Layout.from_json(layout.to_json()) != layout:
            raise AssertionError("a layout that reads as another")
        layout.digest()
        return "ok"


class Streams(Base):
    """The messages of a Store and of a BatchPromote, 4 bytes of length before each."""

    name = "stream"

    def __init__(self) -> None:
        self._store = RamStore(8 << 20, MAX_RECORD_BYTES)

    def examples(self) -> Sequence[bytes]:
        writer = MessageWriter(1 << 16)
        records = [a_record(), a_record(RecordKind.STATE)]
        messages = [each for n, record in enumerate(records) for each in writer.add_record(n, [record], len(record))]
        writer.add_end(2)
        messages.append(writer.flush() or b"")
        return [b"".join(len(each).to_bytes(4, "little") + each for each in messages)]

    def mutators(self) -> Sequence[fuzzing.Mutator]:
        return ()

    def feed(self, data: bytes) -> str:
        messages: list[bytes] = []
        while len(data) >= 4 and len(messages) < 64:
            length = int.from_bytes(data[:4], "little")
            messages.append(data[4 : 4 + length])
            data = data[4 + length :]
        intake, outcome = Intake(self._store, None, MAX_RECORD_BYTES), "ok"
        try:
            for message in messages:
                intake.feed(message)
            intake.finish()
        except TierKVError as error:
            outcome = getattr(error, "reason", type(error).__name__)
        finally:
            intake.abort()
        inflow = Inflow("fuzz", 2, 0, MAX_RECORD_BYTES)
        with suppress(TierKVError):
            for message in messages:
                for _ in inflow.take(message):
                    pass
        self._store.sweep()
        return outcome

    def close(self) -> None:
        self._store.close()


DECODERS = (Records, Segments, Bundles, Recordings, Layouts, Streams)
