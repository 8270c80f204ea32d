"""The state behind one offer, and the pieces in which it travels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.handoff.client import Offer
from tierkv.handoff.protocol import BLOCK_TOKENS, Segment, segment_view
from tierkv.state.layout import Layout

MAX_SEGMENTS = 4096


@dataclass(frozen=True, slots=True)
class Transfer:
    """The state behind one offer, as evaluated arrays that nobody writes to any more.

    ``rows[layer, array]``: rows [offer.rows_from, offer.position) on the token axis, any strides. ``checkpoint``:
    whole arrays of the window and state layers that the offer wants. bfloat16 as uint16 bits. ``scalars``: small
    JSON values of checkpoint layers. ``shared_bytes``: what the buffers take that the arrays are parts of, where they
    are the engine's own.
    """

    offer: Offer
    layout: Layout
    rows: Mapping[tuple[int, int], NDArray[Any]] = field(default_factory=dict[tuple[int, int], NDArray[Any]])
    checkpoint: Mapping[tuple[int, int], NDArray[Any]] = field(default_factory=dict[tuple[int, int], NDArray[Any]])
    scalars: Mapping[int, Mapping[str, object]] = field(default_factory=dict[int, Mapping[str, object]])
    shared_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for part in (self.rows, self.checkpoint) for array in part.values())

    @property
    def held_bytes(self) -> int:
        """Memory that stays in use because of this transfer."""
        return max(self.size_bytes, self.shared_bytes)

    def compacted(self) -> Transfer:
        """The same with rows in memory of their own, in one piece: the system backs that with huge pages."""
        block, at = np.empty(sum(aligned(array.nbytes) for array in self.rows.values()), np.uint8), 0
        copies: dict[tuple[int, int], NDArray[Any]] = {}
        for key, array in self.rows.items():
            copies[key] = block[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(copies[key], array)
            at += aligned(array.nbytes)
        return replace(self, rows=copies, shared_bytes=0)


Source = tuple[Segment, NDArray[Any]]


def segments(transfer: Transfer) -> Iterator[Source]:
    """Block by block, so that the agent can encode and send the first while the last is still here."""
    offer, layers = transfer.offer, transfer.layout.layers
    first = offer.rows_from
    if first is not None:
        for begin in range(first, offer.position, BLOCK_TOKENS):
            end = min(begin + BLOCK_TOKENS, offer.position)
            for (layer, number), array in transfer.rows.items():
                axis = layers[layer].arrays[number].token_axis
                assert axis is not None, "rows have a token axis"
                part = array[(*(slice(None),) * axis, slice(begin - first, end - first))]
                yield Segment(layer, number, begin, 0, part.shape), part
    for (layer, number), array in transfer.checkpoint.items():
        yield Segment(layer, number, offer.position, 0, array.shape), array


def batches(sources: Iterator[Source], limit_bytes: int) -> Iterator[list[Source]]:
    batch: list[Source] = []
    size = 0
    for source in sources:
        if batch and (size + source[1].nbytes > limit_bytes or len(batch) == MAX_SEGMENTS):
            yield batch
            batch, size = [], 0
        batch.append(source)
        size += aligned(source[1].nbytes)
    if batch:
        yield batch


def copy_into(region: memoryview, batch: list[Source], layout: Layout) -> list[Segment]:
    """Where each array lies in the region now, one behind the other."""
    offset = 0
    placed: list[Segment] = []
    for segment, source in batch:
        segment = segment._replace(offset=offset)
        np.copyto(segment_view(segment, layout, region), source, casting="no")
        placed.append(segment)
        offset += aligned(source.nbytes)
    return placed


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // 64) * 64
