"""From a record's bytes to arrays in shared memory: everything is checked before anything is used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierkv.agents.lookup import Candidate
from tierkv.codec.frame import HEADER_BYTES, FrameHeader, FrameType, verify_payload
from tierkv.codec.record import RecordHeader, RecordKind, check_belongs
from tierkv.codec.registry import decode_segment
from tierkv.errors import BadFrame, ForeignRecord
from tierkv.handoff.protocol import Segment, segment_view
from tierkv.identity.blocks import PromptChain
from tierkv.state.layout import Layout

Frame = tuple[FrameHeader, memoryview]
_LAYER_KIND = {RecordKind.BLOCK: "rows", RecordKind.WINDOW: "window", RecordKind.STATE: "state"}
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ParsedRecord:
    """A record that belongs to the prompt; its payloads are not verified yet."""

    header: RecordHeader
    layout: Layout
    frames: tuple[Frame, ...]


def parse_record(data: memoryview, candidate: Candidate, chain: PromptChain, layout: Layout | None) -> ParsedRecord:
    """The record that ``candidate`` promised. ``layout``: the one of its digest, where it is known already.

    Raises BadFrame for what is damaged and ForeignRecord for what belongs to another prompt, model or layout.
    """
    found = candidate.found
    header, offset = RecordHeader.unpack_frame(data)
    if header.kind is not found.kind or header.start != found.start or header.n_tokens != found.n_tokens:
        raise ForeignRecord("foreign_record", "the record is not the one that the probe found")
    # Of a block the rows before the first other token serve; a checkpoint serves only with all of its tokens.
    used = found.agreeing if header.kind is RecordKind.BLOCK else header.n_tokens
    tokens = chain.tokens[found.start : found.start + used]
    if len(tokens) != used:
        raise ForeignRecord("foreign_tokens", "the record stands behind the prompt's end")
    check_belongs(header, key=found.key, root=chain.root, tokens=tokens, layout_digest=found.layout_digest)
    if layout is None:
        layout = _layout_of(header)
    return ParsedRecord(header, layout, tuple(_frames(data, offset, header, layout)))


def _layout_of(header: RecordHeader) -> Layout:
    try:
        layout = Layout.from_json(header.layout)
    except ValueError as error:
        raise BadFrame("bad_layout", "the record's layout cannot be read") from error
    if layout.digest() != header.layout_digest:
        raise ForeignRecord("foreign_layout", "the record's layout is not the one its digest names")
    return layout


def _frames(data: memoryview, offset: int, header: RecordHeader, layout: Layout) -> Iterator[Frame]:
    if len(data) - offset != header.segment_bytes:
        raise BadFrame("bad_length", "the record does not have the bytes that its header announces")
    position = header.start if header.kind is RecordKind.BLOCK else header.end
    wanted = _wanted(layout, header)
    while offset < len(data):
        frame = FrameHeader.unpack(data[offset : offset + HEADER_BYTES])
        end = offset + frame.frame_bytes
        if frame.type is not FrameType.SEGMENT or end > len(data):
            raise BadFrame("truncated", "a segment frame is not whole")
        spec = wanted.pop((frame.layer, frame.array), None)
        if spec is None or spec[0] != frame.dtype or frame.position != position or not _fits(spec[1], frame.shape):
            raise BadFrame("wrong_segment", "a segment is not what the layout says")
        yield frame, data[offset + HEADER_BYTES : end]
        offset = end
    if wanted:
        raise BadFrame("incomplete", "the record does not hold every array of its layers")


def _wanted(layout: Layout, header: RecordHeader) -> dict[tuple[int, int], tuple[str, tuple[int, ...]]]:
    """dtype and shape of every array that the record must hold; the token axis of rows has the record's length."""
    wanted: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
    for layer, number in expected_arrays(layout, header.kind):
        spec = layout.layers[layer].arrays[number]
        shape = spec.shape
        if header.kind is RecordKind.BLOCK:
            shape = tuple(header.n_tokens if n == -1 else n for n in shape)
        wanted[layer, number] = (spec.dtype, shape)
    return wanted


def _fits(wanted: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if wanted == shape or -1 not in wanted:
        return wanted == shape
    return len(wanted) == len(shape) and all(a in (-1, b) for a, b in zip(wanted, shape, strict=True))


def expected_arrays(layout: Layout, kind: RecordKind) -> set[tuple[int, int]]:
    """(layer, array) of every array that a record of this kind holds."""
    return {
        (layer, number)
        for layer in layout.having(_LAYER_KIND[kind])  # pyright: ignore[reportArgumentType]
        for number, spec in enumerate(layout.layers[layer].arrays)
        if spec.dtype != "none"
    }


def batches(frames: Sequence[Frame], limit_bytes: int) -> Iterator[tuple[list[Frame], int]]:
    """Runs of frames whose decoded arrays fit regions of about ``limit_bytes``, with the bytes each run needs."""
    batch: list[Frame] = []
    size = 0
    for frame in frames:
        more = aligned(frame[0].raw_length)
        if batch and size + more > limit_bytes:
            yield batch, size
            batch, size = [], 0
        batch.append(frame)
        size += more
    if batch:
        yield batch, size


def decode_into(frames: Sequence[Frame], region: memoryview, layout: Layout) -> list[Segment]:
    """Where each array now lies in the region. Runs on a worker thread; kernels release the interpreter lock.

    Raises BadFrame if a payload is not what was written.
    """
    segments: list[Segment] = []
    offset = 0
    for header, payload in frames:
        verify_payload(header, payload)
        segment = Segment(header.layer, header.array, header.position, offset, header.shape)
        if math.prod(header.shape):
            decode_segment(header, payload, segment_view(segment, layout, region))
        segments.append(segment)
        offset += aligned(header.raw_length)
    return segments


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
