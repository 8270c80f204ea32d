"""What a restore gives back: fresh arrays, put together from the pieces that came through the arena."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import HandoffError
from tierkv.handoff.protocol import Message, layout_of, segment_dtype, segment_view, segments_of
from tierkv.state.layout import Layout

MAX_ROWS_BYTES = 1 << 40

Arrays = dict[tuple[int, int], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Restored:
    """State that stands at ``position``.

    ``arrays[layer, array]``: C-contiguous, freshly allocated, the layout's dtype (bfloat16 as uint16 bits). Layers of
    kind "rows" hold rows [first_row, position) on the array's token axis; "window" and "state" layers are whole.
    Arrays of dtype "none" are absent. ``scalars[layer]`` are the small values of a checkpoint. ``fidelity`` is 0 for
    bit-exact state, larger for lossier; ``bytes_moved`` counts what came from the vaults.
    """

    position: int
    first_row: int
    layout: Layout
    arrays: Arrays
    scalars: Mapping[int, Mapping[str, Any]]
    fidelity: int
    codec: str
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class NotRestored:
    """Nothing was restored; ``reason`` is a slug that statistics count, such as "never_stored" or "timed_out"."""

    reason: str


class Assembly:
    """Collects the pieces of one restore."""

    def __init__(self, plan: Message) -> None:
        """Raises HandoffError for an impossible plan."""
        self.layout = layout_of(plan.blob)
        self.position = plan.integer("position")
        self.first_row = plan.integer("first_row", high=self.position)
        self._rows = self._allocate_rows()
        self._arrays: Arrays = {}

    def add(self, piece: Message, region: memoryview) -> None:
        """Copies every segment of the piece out of its region. Raises HandoffError for what does not fit the plan."""
        for segment in segments_of(piece.fields.get("segments"), self.layout, len(region)):
            view = segment_view(segment, self.layout, region)
            key = (segment.layer, segment.array)
            axis = self.layout.layers[segment.layer].arrays[segment.array].token_axis
            if key in self._rows and axis is not None:
                self._put(key, view, segment.position, axis)
            else:
                self._arrays[key] = view.copy()

    def _put(self, key: tuple[int, int], view: NDArray[Any], position: int, axis: int) -> None:
        begin = max(position, self.first_row)
        end = min(position + view.shape[axis], self.position)
        if begin >= end:
            return
        target = self._rows[key]
        target[_along(axis, begin - self.first_row, end - self.first_row)] = view[
            _along(axis, begin - position, end - position)
        ]
        self._arrays[key] = target

    def _allocate_rows(self) -> Arrays:
        """Room for all rows in one piece: the system backs it with huge pages, which spares most page faults."""
        places: list[tuple[tuple[int, int], np.dtype[Any], tuple[int, ...], int]] = []
        size = 0
        for layer in self.layout.having("rows"):
            for number, spec in enumerate(self.layout.layers[layer].arrays):
                if spec.dtype == "none":
                    continue
                if spec.token_axis is None:
                    raise HandoffError("handoff", "rows without a token axis")
                dtype = segment_dtype(self.layout, layer, number)
                shape = tuple(self.position - self.first_row if n == -1 else n for n in spec.shape)
                places.append(((layer, number), dtype, shape, size))
                size += -(-math.prod(shape) * dtype.itemsize // 64) * 64
        if size > MAX_ROWS_BYTES:
            raise HandoffError("handoff", f"a restore of {size} bytes")
        block = np.empty(size, np.uint8)
        return {
            key: block[at : at + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for key, dtype, shape, at in places
        }

    def finish(self, done: Message) -> Restored:
        """Raises HandoffError unless everything that the layout names is there."""
        position = done.integer("position", high=self.position)
        for index, layer in enumerate(self.layout.layers):
            for number, spec in enumerate(layer.arrays):
                if spec.dtype != "none" and (index, number) not in self._arrays:
                    raise HandoffError("handoff", f"array {number} of layer {index} did not come")
        if position < self.position:
            self._cut(position)
        scalars = {int(layer): cast("dict[str, Any]", values) for layer, values in done.table("scalars").items()}
        return Restored(
            position, self.first_row, self.layout, self._arrays, scalars, done.integer("fidelity", high=255),
            done.text("codec"), done.integer("bytes"),
        )  # fmt: skip

    def _cut(self, position: int) -> None:
        """The agent got less than planned: the rows before it are whole all the same."""
        if position <= self.first_row:
            raise HandoffError("handoff", "a restore ends before its first row")
        for (layer, number), array in self._arrays.items():
            axis = self.layout.layers[layer].arrays[number].token_axis
            if self.layout.layers[layer].kind == "rows" and axis is not None:
                cut = array[_along(axis, 0, position - self.first_row)]
                self._arrays[layer, number] = np.ascontiguousarray(cut)


def _along(axis: int, begin: int, end: int) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(begin, end))
