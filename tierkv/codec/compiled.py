"""Kernels as machine code, one for each combination of types, made at its first use and kept in numba's cache.

Nothing here imports numba before a kernel is asked for, so naming a codec stays cheap.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tierkv.errors import MissingExtra

Kernel = Callable[..., Any]

BITS = {"bfloat16": np.dtype(np.uint16), "float16": np.dtype(np.int16), "float32": np.dtype(np.uint32)}
"""The integer type that stands for each float type in a kernel's arguments."""

_made: dict[tuple[str, str, str], Kernel] = {}
_making = threading.Lock()


def quantise_kernel(dtype: str, scales: str) -> Kernel:
    """``kernels.quantise`` for values of ``dtype`` and scales of the float type ``scales``."""
    return _kernel("quantise", dtype, scales)


def dequantise_kernel(dtype: str, scales: str) -> Kernel:
    """``kernels.dequantise`` for values of ``dtype`` and scales of the float type ``scales``."""
    return _kernel("dequantise", dtype, scales)


def split_kernel(item_bytes: int) -> Kernel:
    """``kernels.split2`` or ``kernels.split4``."""
    return _kernel(f"split{item_bytes}", "", "")


def merge_kernel(item_bytes: int) -> Kernel:
    """``kernels.merge2`` or ``kernels.merge4``."""
    return _kernel(f"merge{item_bytes}", "", "")


def _kernel(name: str, dtype: str, scales: str) -> Kernel:
    key = (name, dtype, scales)
    kernel = _made.get(key)
    if kernel is None:
        with _making:
            kernel = _made.get(key) or _made.setdefault(key, _make(name, dtype, scales))
    return kernel


def _make(name: str, dtype: str, scales: str) -> Kernel:
    try:
        from numba import njit, types

        from tierkv.codec import kernels, lanes
    except ImportError as error:
        raise MissingExtra("numba", "agent") from error

    def read(item: Any) -> Any:
        return types.Array(item, 1, "C", readonly=True)

    def written(item: Any) -> Any:
        return types.Array(item, 1, "C")

    of = {"bfloat16": types.uint16, "float16": types.int16, "float32": types.uint32, "": None}
    x, s, byte, size = of[dtype], of[scales], types.uint8, types.intp
    signature = {
        "quantise": lambda: types.boolean(read(x), size, size, written(s), written(types.int8)),
        "dequantise": lambda: types.void(read(types.int8), read(s), size, size, written(x)),
        "split2": lambda: types.void(read(types.uint16), written(byte)),
        "split4": lambda: types.void(read(types.uint32), written(byte)),
        "merge2": lambda: types.void(read(byte), read(byte), written(types.uint16)),
        "merge4": lambda: types.void(read(byte), read(byte), read(byte), read(byte), written(types.uint32)),
    }[name]()
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    function = getattr(kernels, name)
    # Numba names a cache file after this, and takes it for fresh as long as the function's own file is unchanged.
    function.__qualname__ = f"{name}.{_digest(lanes.__file__, kernels.__file__)}"
    try:
        return njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):  # no place to keep a cache, or a full or broken one
        return njit(signature, **options)(function)


def _digest(*sources: str) -> str:
    hasher = hashlib.blake2b(digest_size=6)
    for source in sources:
        hasher.update(Path(source).read_bytes())
    return hasher.hexdigest()
