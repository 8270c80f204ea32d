"""State on its way from an engine: regions of shared memory become frames, frames become records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tierkv.agents.codec_loss import Losses, add_losses, loss_of
from tierkv.agents.decode import expected_arrays
from tierkv.agents.model_registry import Model
from tierkv.codec.frame import CodecId, FrameHeader
from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.codec.registry import Codec, encode_segment
from tierkv.errors import HandoffError
from tierkv.handoff.protocol import Segment, segment_view
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey, PromptChain
from tierkv.state.layout import Layout

Buffers = list[bytes | bytearray | memoryview]
Encoded = tuple[FrameHeader, Buffers]


@dataclass(slots=True, eq=False)
class RecordBuilder:
    """One record that the agent wants; complete when every array of its layers has come."""

    kind: RecordKind
    key: BlockKey
    start: int
    end: int
    missing: set[tuple[int, int]]
    frames: list[Encoded] = field(default_factory=list[Encoded])

    def add(self, encoded: Encoded) -> None:
        """Raises HandoffError for an array that came already."""
        place = (encoded[0].layer, encoded[0].array)
        if place not in self.missing:
            raise HandoffError("hook", "an array came twice")
        self.missing.remove(place)
        self.frames.append(encoded)


@dataclass(slots=True, eq=False)
class Incoming:
    """What an offer promised. ``taint``: the worst fidelity that this state inherits from what it was computed on."""

    id: int
    model: Model
    chain: PromptChain
    layout: Layout
    layout_digest: bytes
    position: int
    taint: int
    builders: dict[tuple[RecordKind, int], RecordBuilder] = field(
        default_factory=dict[tuple[RecordKind, int], RecordBuilder]
    )
    scalars: Mapping[str, object] = field(default_factory=dict[str, object])
    offered_s: float = field(default_factory=time.monotonic)
    begun: bool = False
    jobs: int = 0
    ended: bool = False
    failed: str = ""
    records: int = 0
    stored_bytes: int = 0
    raw_bytes: int = 0
    losses: Losses = field(default_factory=Losses)

    def want(self, kind: RecordKind, key: BlockKey, start: int, end: int) -> None:
        self.builders[kind, start] = RecordBuilder(kind, key, start, end, expected_arrays(self.layout, kind))

    def builder_of(self, segment: Segment) -> RecordBuilder | None:
        """The record that a segment belongs to, None if nobody asked for it. Raises HandoffError if it cannot be."""
        layer = self.layout.layers[segment.layer]
        if layer.kind != "rows":
            kind = RecordKind.WINDOW if layer.kind == "window" else RecordKind.STATE
            builder = self.builders.get((kind, self.position // BLOCK_TOKENS * BLOCK_TOKENS))
            if segment.position != self.position:
                raise HandoffError("hook", "a checkpoint that stands elsewhere than the offer")
            return builder
        builder = self.builders.get((RecordKind.BLOCK, segment.position))
        if builder is None:
            return None
        axis = layer.arrays[segment.array].token_axis
        if axis is None or segment.shape[axis] != builder.end - builder.start:
            raise HandoffError("hook", "rows that are not those of one block")
        return builder

    def header_of(self, builder: RecordBuilder) -> RecordHeader:
        """The header of a complete record; its epoch is set when it is sent."""
        headers = [header for header, _ in builder.frames]
        codecs = sorted({CodecId(header.codec).name.lower().replace("_", "-") for header in headers})
        return RecordHeader(
            builder.kind, builder.key, self.chain.parent_at(builder.start), self.chain.root,
            self.chain.tokens[builder.start : builder.end], builder.start, self.layout_digest, self.layout.to_json(),
            max([self.taint, *(header.fidelity for header in headers)]), 0, time.time(), len(headers),
            sum(header.frame_bytes for header in headers), sum(header.raw_length for header in headers),
            model=self.model.name, codec="+".join(codecs), scalars=self._scalars(builder.kind),
            media=tuple(each for each in self.chain.media if builder.start <= each.start < builder.end),
        )  # fmt: skip

    def _scalars(self, kind: RecordKind) -> str:
        if kind is RecordKind.BLOCK:
            return ""
        layers = self.layout.having("window" if kind is RecordKind.WINDOW else "state")
        values = {str(layer): self.scalars[str(layer)] for layer in layers if str(layer) in self.scalars}
        return json.dumps(values, separators=(",", ":"))


def encode_region(
    wanted: Sequence[tuple[RecordBuilder, Segment]],
    layout: Layout,
    region: memoryview,
    codec_of: Callable[[str, int], Codec],
    measured: Collection[int] = (),
) -> tuple[list[tuple[RecordBuilder, Encoded]], Losses]:
    """Frames of every wanted segment, owning their bytes: the region can be reused. Runs on a worker thread.

    ``codec_of``: the codec of a tier's layer. With what it costs the rows of the ``measured`` layers.
    """
    done: list[tuple[RecordBuilder, Encoded]] = []
    losses: Losses = {}
    for builder, segment in wanted:
        spec = layout.layers[segment.layer].arrays[segment.array]
        rows = builder.kind is RecordKind.BLOCK
        codec, array = codec_of(builder.kind.tier, segment.layer), segment_view(segment, layout, region)
        header, buffers = encode_segment(
            codec,
            array,
            spec.dtype,
            layer=segment.layer,
            index=segment.array,
            position=segment.position,
            token_axis=spec.token_axis if rows else None,
        )
        if rows and segment.layer in measured:
            add_losses(losses, loss_of(codec, array, header, buffers[1]))
        if header.codec == CodecId.RAW:
            buffers = [bytes(part) for part in buffers]
        done.append((builder, (header, list(buffers))))
    return done, losses
