"""Bytes as they are."""

from __future__ import annotations

import numpy as np

from tierkv.codec.frame import CodecId, Fidelity
from tierkv.codec.segment import Bytes, Flat, SegmentFacts
from tierkv.errors import BadFrame


class Raw:
    """The payload is the array's little-endian bytes in C order, of any dtype."""

    name: str = "raw"
    id: CodecId = CodecId.RAW
    fidelity: int = Fidelity.EXACT
    group: int = 0
    fallback: CodecId = CodecId.RAW

    def encode(self, bits: Flat, _segment: SegmentFacts, /) -> Bytes:
        """A view: it changes when the array does."""
        return bits.view(np.uint8)

    def decode(self, payload: Bytes, _segment: SegmentFacts, out: Flat, /) -> None:
        if payload.size != out.nbytes:
            raise BadFrame("bad_length", f"{payload.size} bytes for an array of {out.nbytes}")
        out.view(np.uint8)[:] = payload

    def warm_up(self, _dtype: str, /) -> None:
        """There is nothing to compile."""
