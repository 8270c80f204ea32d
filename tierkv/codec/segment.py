"""What a codec is told of one array: its type, shape and place in the prompt. No numba."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.codec.frame import CodecId

Flat = NDArray[Any]
"""[n] integers that hold the bits of a segment's values in C order."""

Bytes = NDArray[np.uint8]

MAX_DIMS = 6

SINK_TOKENS = 4
"""The first tokens of a prompt, which attention leans on: kept exact, they cost 0.03 bit a value and take the KL of a
lossy cache from 4e-3 to 7e-4 (SmolLM2-135M at 30 dB)."""


class SegmentFacts(Protocol):
    """What ``FrameHeader`` and ``Segment`` have in common."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def position(self) -> int: ...
    @property
    def token_axis(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """An array before it has a header. ``position`` is the absolute position of row 0 of ``token_axis``."""

    dtype: str
    shape: tuple[int, ...]
    position: int
    token_axis: int | None


class Codec(Protocol):
    """A way to write a segment's bits. Stateless, safe to use from several threads at once.

    ``group``: values that share a scale, 0 where there are none. ``fallback``: who takes what this codec declines.
    """

    @property
    def name(self) -> str: ...
    @property
    def id(self) -> CodecId: ...
    @property
    def fidelity(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def fallback(self) -> CodecId: ...

    def encode(self, bits: Flat, segment: SegmentFacts, /) -> Bytes | None:
        """The payload, [bytes] uint8, or None to decline. ``raw`` never declines."""
        ...

    def decode(self, payload: Bytes, segment: SegmentFacts, out: Flat, /) -> None:
        """Fills all of ``out``. Raises BadFrame, and then ``out`` is undefined, if the payload cannot be right."""
        ...

    def warm_up(self, dtype: str, /) -> None:
        """Kernels for this float type are compiled."""
        ...


def row_length(shape: tuple[int, ...]) -> int:
    """Values in a row: the length of the last axis, 1 for a scalar."""
    return shape[-1] if shape else 1


def sink_shape(segment: SegmentFacts, sink_tokens: int) -> tuple[int, int, int, int] | None:
    """(outer, tokens, inner, sinks): the segment as [outer, tokens, inner], whose first ``sinks`` tokens stand before
    the absolute position ``sink_tokens``; None where it has no such token."""
    axis = segment.token_axis
    if axis is None or segment.position >= sink_tokens:
        return None
    shape = segment.shape
    tokens = shape[axis]
    return math.prod(shape[:axis]), tokens, math.prod(shape[axis + 1 :]), min(sink_tokens - segment.position, tokens)


def sink_view(bits: Flat, shape: tuple[int, int, int, int]) -> Flat:
    """[outer, sinks, inner]: the exact tokens, as a view."""
    outer, tokens, inner, sinks = shape
    return bits.reshape(outer, tokens, inner)[:, :sinks, :]
