"""mlx arrays as bytes and back: dtype names, evaluated copies, numpy views of bit patterns.

Every mlx call here belongs to the engine's generation thread. The views that ``held`` makes may go to another thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tierkv.errors import UnsupportedState

Key = TypeVar("Key", bound=Hashable)

_DTYPE_OF = {
    mx.bfloat16: "bfloat16",
    mx.float16: "float16",
    mx.float32: "float32",
    mx.uint8: "uint8",
    mx.uint16: "uint16",
    mx.uint32: "uint32",
    mx.uint64: "uint64",
    mx.int8: "int8",
    mx.int16: "int16",
    mx.int32: "int32",
    mx.int64: "int64",
    mx.bool_: "bool",
}


def dtype_name(array: mx.array | None) -> str:
    """The layout's name of an array's dtype, "none" for an empty slot.

    Raises UnsupportedState for a dtype that no record can carry.
    """
    if array is None:
        return "none"
    name = _DTYPE_OF.get(array.dtype)
    if name is None:
        raise UnsupportedState("dtype", f"arrays of {array.dtype} are not carried")
    return name


def held(arrays: Mapping[Key, mx.array]) -> dict[Key, NDArray[Any]]:
    """The same bits as numpy views that no later slice assignment of the engine changes.

    They keep the engine's buffer alive and may be strided: each is on an array object of its own, so mlx copies the
    buffer before it writes to it (a view on the engine's own object would change). bfloat16 becomes uint16 bit
    patterns, since numpy has no such dtype. One evaluation for all of them: on the CPU that costs as much as holding
    60 arrays, so nothing is cut here that numpy can cut afterwards.
    """
    own = [_bits(array[...]) for array in arrays.values()]
    mx.eval(own)
    return {key: np.array(array, copy=False) for key, array in zip(arrays, own, strict=True)}


def _bits(array: mx.array) -> mx.array:
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


def to_mx(array: np.ndarray[Any, Any], dtype: str) -> mx.array:
    """An mlx array of the named dtype with the bits of ``array``; for "bfloat16" these are uint16 patterns.

    Raises UnsupportedState if the bits are not of that dtype.
    """
    stored = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    if array.dtype != stored:
        raise UnsupportedState("dtype", f"{array.dtype} bits where {dtype} is expected")
    made = mx.array(np.ascontiguousarray(array))
    return made.view(mx.bfloat16) if dtype == "bfloat16" else made
