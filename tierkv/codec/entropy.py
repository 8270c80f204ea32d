"""zstd for byte planes, bounded on the way back."""

from __future__ import annotations

import threading

import numpy as np
import zstandard
from numpy.typing import NDArray

from tierkv.errors import BadFrame

# Level 1 but for two settings: byte planes have skewed bytes and no long repeats, so a search for short ones costs time
# and even bytes. SmolLM2-135M's exponents: 2.77 bits at 0.49 / 1.39 GB/s to pack / unpack, level 1 3.00 bits at
# 0.20 / 0.79; int8 codes: within 0.7 %.
_SETTINGS = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=7, write_content_size=1)

SAMPLE_BYTES = 16 << 10
WORTH = 31 / 32
"""A plane is compressed only where it shrinks at least this much: less costs more to decode than it saves to send."""

_local = threading.local()


def shrunk(plane: NDArray[np.uint8], *, sample: bool = False) -> bytes | None:
    """``plane`` as one zstd frame, or None where that saves too little.

    With ``sample`` a stretch from the middle of a long plane is tried first, so that noise costs little.
    """
    n = plane.size
    if sample and n > 4 * SAMPLE_BYTES:
        middle = plane[n // 2 : n // 2 + SAMPLE_BYTES]
        if len(_compressor().compress(middle.data)) > SAMPLE_BYTES * WORTH:
            return None
    packed = _compressor().compress(plane.data)
    return packed if len(packed) <= n * WORTH else None


def restored(packed: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """The ``size`` bytes that ``shrunk`` packed. Nothing larger is ever allocated. Raises BadFrame."""
    view = packed.data
    try:
        if zstandard.frame_content_size(view) != size:
            raise BadFrame("bad_payload", "a compressed plane does not hold what its segment needs")
        plane = _decompressor().decompress(view, max_output_size=size, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise BadFrame("bad_payload", "a compressed plane cannot be unpacked") from error
    if len(plane) != size:
        raise BadFrame("bad_payload", "a compressed plane does not hold what its segment needs")
    return np.frombuffer(plane, np.uint8)


def _compressor() -> zstandard.ZstdCompressor:
    try:
        return _local.compressor
    except AttributeError:
        _local.compressor = zstandard.ZstdCompressor(compression_params=_SETTINGS)
        return _local.compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    try:
        return _local.decompressor
    except AttributeError:
        _local.decompressor = zstandard.ZstdDecompressor()
        return _local.decompressor
