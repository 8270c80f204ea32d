"""What a codec alone costs: rows that were just encoded are decoded again, and no arithmetic of the model comes in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.codec.frame import FrameHeader
from tierkv.codec.registry import Codec, decode_segment
from tierkv.state.fidelity import as_float32

# Of each array that is measured: 256 tokens of eight heads of 128. The mean square of so many uniform errors has a
# standard deviation of sqrt(4/5 / 2**18), 0.2 %.
ENOUGH_VALUES = 1 << 18


@dataclass(slots=True)
class CodecLoss:
    """Sums of squares: of the values that came for one array of one layer, and of what ``codec`` did not keep."""

    codec: Codec
    values: int = 0
    signal: float = 0.0
    noise: float = 0.0

    @property
    def snr_db(self) -> float:
        """As ``state.fidelity.snr_db``, infinite where nothing was lost."""
        return 10 * math.log10(self.signal / self.noise) if self.noise else math.inf


Losses = dict[tuple[int, int], CodecLoss]


def loss_of(codec: Codec, array: NDArray[Any], header: FrameHeader, payload: bytes | bytearray | memoryview) -> Losses:
    """What ``codec`` did to ``array``: it, or what it falls back to, has encoded that as ``header`` and ``payload``."""
    loss = CodecLoss(codec, array.size)
    if header.fidelity:
        back = np.empty_like(array, order="C")
        decode_segment(header, payload, back)
        exact = as_float32(array, header.dtype)
        loss.signal = float(np.square(exact, dtype=np.float64).sum())
        loss.noise = float(np.square(exact - as_float32(back, header.dtype), dtype=np.float64).sum())
    return {(header.layer, header.array): loss}


def add_losses(into: Losses, more: Losses) -> None:
    """What another part of the same arrays lost. A codec that has changed meanwhile begins anew."""
    for key, loss in more.items():
        so_far = into.get(key)
        if so_far is None or so_far.codec is not loss.codec:
            into[key] = loss
            continue
        so_far.values += loss.values
        so_far.signal += loss.signal
        so_far.noise += loss.noise


def enough(losses: Losses, layer: int) -> bool:
    """Whether every array of the layer that was measured at all has ``ENOUGH_VALUES``."""
    found = [loss.values for (measured, _), loss in losses.items() if measured == layer]
    return bool(found) and min(found) >= ENOUGH_VALUES
