"""Codecs by name, and the two functions that everything else calls: a segment to its frame and back."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tierkv.codec.compiled import BITS
from tierkv.codec.frame import MAX_PAYLOAD_BYTES, FrameHeader, FrameType, payload_hash
from tierkv.codec.int8 import INT8, INT8_G256, INT8Z
from tierkv.codec.lossless import Lossless
from tierkv.codec.raw import Raw
from tierkv.codec.segment import MAX_DIMS, Codec, Flat, Segment
from tierkv.errors import BadFrame

RAW: Codec = Raw()
LOSSLESS: Codec = Lossless()
_ALL: tuple[Codec, ...] = (RAW, LOSSLESS, INT8_G256, INT8, INT8Z)
_BY_NAME = {codec.name: codec for codec in _ALL}
_BY_ID = {int(codec.id): codec for codec in _ALL}
CODEC_NAMES: tuple[str, ...] = tuple(_BY_NAME)
"""From exact to smallest."""

# Below this a layer is better off with another codec: 2.5 dB under the worst layer of SmolLM2 (37.5 dB for int8, about
# 35 for int8-g256, whose groups mix a prompt's first tokens with others).
_FLOOR_DB = {"int8": 35.0, "int8z": 35.0, "int8-g256": 32.5}

_DTYPES = {**{name: kind.itemsize for name, kind in BITS.items()}, "bool": 1} | {
    f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def codec_named(name: str) -> Codec:
    """The codec of that name. Raises ValueError, with a suggestion, for any other."""
    codec = _BY_NAME.get(name)
    if codec is None:
        near = difflib.get_close_matches(name, CODEC_NAMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(CODEC_NAMES)}"
        raise ValueError(f"unknown codec {name!r}; {hint}")
    return codec


def floor_db(codec: Codec) -> float:
    """The least signal-to-noise ratio that a layer may come back with; 0 for codecs that lose nothing."""
    return _FLOOR_DB.get(codec.name, 0.0)


def next_better(codec: Codec) -> Codec:
    """The smallest of the codecs that lose less than this one; ``lossless`` where none does."""
    better = [each for each in _ALL if 0 < each.fidelity < codec.fidelity and each.name != "int8z"]
    return max(better, key=lambda each: each.fidelity, default=LOSSLESS)


def encode_segment(
    codec: Codec,
    array: NDArray[np.generic],
    dtype: str,
    *,
    layer: int,
    index: int,
    position: int,
    token_axis: int | None,
) -> tuple[FrameHeader, list[bytes | memoryview]]:
    """A header, and a frame as two buffers: the header's bytes and the payload.

    ``array``: any shape of up to 6 axes, its elements the bits of ``dtype`` (bfloat16 comes as uint16); copied only
    where it is not C-contiguous. ``position``: absolute position of its first row along ``token_axis``.

    ``header.codec`` is the codec that was used: arrays that are empty or not of floats go ``raw``, those with NaN or
    infinities ``lossless``, and what does not shrink there ``raw``. A raw payload is a view of ``array``: it is valid
    while nobody writes to that. Safe to call from several threads at once; kernels run without the interpreter lock.

    Raises ValueError if array and dtype do not fit, or the array has no header: over 1 GiB, over 6 axes, a token axis
    that it does not have.
    """
    if not (array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative):
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    bits = _bits_of(array, dtype)
    if array.ndim > MAX_DIMS or not (token_axis is None or 0 <= token_axis < array.ndim):
        raise ValueError(f"an array of {array.ndim} axes with token axis {token_axis} has no header")
    if bits.nbytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a segment of {bits.nbytes} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
    segment = Segment(dtype, array.shape, position, token_axis)
    used = codec if dtype in BITS and bits.size else RAW
    payload = used.encode(bits, segment)
    while payload is None:
        used = _BY_ID[used.fallback]
        payload = used.encode(bits, segment)
    data = payload.data
    header = FrameHeader(
        FrameType.SEGMENT, used.id, dtype, array.shape, position, bits.nbytes, payload.size, payload_hash(data), layer,
        index, used.group, 0, token_axis, used.fidelity,
    )  # fmt: skip
    return header, [header.pack(), data]


def decode_segment(header: FrameHeader, payload: bytes | bytearray | memoryview, out: NDArray[np.generic]) -> None:
    """``out`` holds the segment's values.

    ``out``: writable, C-contiguous, of the header's shape, its elements as wide as the header's dtype; it may be a
    view of shared memory but must not overlap ``payload``. Nothing else is written, whatever the payload says. The
    payload's checksum is not looked at: ``frame.verify_payload`` does that once, when a frame arrives.

    Raises BadFrame, and then ``out`` is undefined, if header, payload and ``out`` do not fit together.
    """
    codec = _BY_ID.get(header.codec)
    if codec is None:
        raise BadFrame("unknown_codec", f"codec {header.codec} is not one that this build decodes")
    if header.type is not FrameType.SEGMENT or header.flags or header.group != codec.group:
        raise BadFrame("impossible_header", f"group or flags do not go with {codec.name}")
    if not (header.token_axis is None or header.token_axis < len(header.shape)):
        raise BadFrame("impossible_header", "the token axis is not an axis")
    if header.shape != out.shape or _DTYPES.get(header.dtype) != out.itemsize:
        raise BadFrame("wrong_shape", f"{header.dtype} {header.shape} does not go into {out.dtype} {out.shape}")
    if codec is not RAW and header.dtype not in BITS:
        raise BadFrame("impossible_header", f"{codec.name} does not take {header.dtype}")
    if len(payload) != header.payload_length:
        raise BadFrame("bad_length", f"payload of {len(payload)} bytes, {header.payload_length} announced")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("decoding needs a writable, C-contiguous array")
    if not out.size:
        if len(payload):
            raise BadFrame("bad_length", "an empty array has an empty payload")
        return
    aligned = out if out.flags.aligned else np.empty(out.shape, out.dtype)
    codec.decode(np.frombuffer(payload, np.uint8), header, _bits_of(aligned, header.dtype))
    if aligned is not out:
        out[...] = aligned


def warm_up(names: Iterable[str], dtypes: Iterable[str] = tuple(BITS)) -> None:
    """Kernels of these codecs, and of those they fall back to, are compiled for these float types.

    Takes some seconds the first time on a machine, milliseconds with numba's cache.
    """
    codecs: dict[str, Codec] = {}
    for name in names:
        codec = codec_named(name)
        while codec.name not in codecs:
            codecs[codec.name] = codec
            codec = _BY_ID[codec.fallback]
    for codec in codecs.values():
        for dtype in dtypes:
            codec.warm_up(dtype)


def _bits_of(array: NDArray[np.generic], dtype: str) -> Flat:
    """[n] integers over the same memory. ``array`` is C-contiguous and aligned."""
    if _DTYPES.get(dtype) != array.itemsize:
        raise ValueError(f"an array of {array.dtype} does not hold {dtype}")
    return array.reshape(-1).view(BITS.get(dtype, np.uint8 if dtype == "bool" else array.dtype))


__all__ = [
    "CODEC_NAMES", "LOSSLESS", "RAW", "Codec", "codec_named", "decode_segment", "encode_segment", "floor_db",
    "next_better", "warm_up",
]  # fmt: skip
