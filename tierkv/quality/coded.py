"""A cache's arrays through a codec and back, in the pieces in which records carry them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.codec.frame import HEADER_BYTES
from tierkv.codec.registry import Codec, decode_segment, encode_segment
from tierkv.identity.blocks import BLOCK_TOKENS
from tierkv.state.fidelity import as_float32, snr_db
from tierkv.state.layout import Layout

Arrays = Mapping[tuple[int, int], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ArrayQuality:
    """One array of one layer after the codec; ``snr_db`` is infinite where every bit came back."""

    layer: int
    array: str
    snr_db: float


@dataclass(slots=True)
class Coded:
    """Arrays as they came back, what they took, and how exact they are. Sizes in bytes, frame headers included."""

    arrays: dict[tuple[int, int], NDArray[Any]] = field(default_factory=dict[tuple[int, int], NDArray[Any]])
    in_bytes: int = 0
    out_bytes: int = 0
    quality: list[ArrayQuality] = field(default_factory=list[ArrayQuality])


def through(codec: Codec, arrays: Arrays, layout: Layout, position: int) -> Coded:
    """Every array of a cache at ``position`` encoded and decoded; recurrent state passes untouched and uncounted.

    ``arrays`` as ``state.mlx_cache`` gives them: bfloat16 as uint16 bits.
    """
    coded = Coded()
    for (layer, number), array in arrays.items():
        description = layout.layers[layer]
        spec = description.arrays[number]
        if description.kind == "state":
            coded.arrays[layer, number] = array
            continue
        rows = description.kind == "rows"
        out = np.empty_like(array, order="C")
        axis = spec.token_axis if rows else None
        for begin in range(0, position if rows else 1, BLOCK_TOKENS):
            part = (*(slice(None),) * axis, slice(begin, begin + BLOCK_TOKENS)) if axis is not None else (Ellipsis,)
            piece = np.ascontiguousarray(array[part])
            place = begin if rows else position
            header, buffers = encode_segment(
                codec, piece, spec.dtype, layer=layer, index=number, position=place, token_axis=axis
            )
            back = np.empty_like(piece)
            decode_segment(header, bytes(buffers[1]), back)
            out[part] = back
            coded.in_bytes += piece.nbytes
            coded.out_bytes += HEADER_BYTES + header.payload_length
        coded.arrays[layer, number] = out
        exact, other = as_float32(array, spec.dtype), as_float32(out, spec.dtype)
        coded.quality.append(ArrayQuality(layer, spec.name, snr_db(exact, other)))
    return coded
