"""How much of an array, and of what a model says, is left after a codec. Pure numpy, so that a hook can use it too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_ROWS_AT_ONCE = 32


def as_float32(array: Array, dtype: str) -> NDArray[np.float32]:
    """The values of an array that carries the bits of ``dtype`` (bfloat16 as uint16), exactly where float32 can."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(array).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def to_bfloat16(array: Array) -> NDArray[np.uint16]:
    """Float values as the bits of the nearest bfloat16, ties to even. Finite values only."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def snr_db(exact: Array, other: Array) -> float:
    """10 log10 of the energy of ``exact`` over that of the difference; infinite for equal arrays, nan for no signal."""
    signal = np.square(exact, dtype=np.float64).sum()
    noise = np.square(exact.astype(np.float64) - other).sum()
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else math.nan


@dataclass(slots=True)
class Divergence:
    """Sums over positions of what two runs of a model said; means and fractions from them."""

    positions: int = 0
    kl: float = 0.0
    same_top: int = 0
    exact_nll: float = 0.0
    other_nll: float = 0.0

    def add(self, exact: Array, other: Array, following: Array) -> None:
        """``exact``, ``other``: logits [n, vocabulary]; ``following``: the token ids [n] that really came next."""
        for start in range(0, len(exact), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            p, q = _log_softmax(exact[part]), _log_softmax(other[part])
            rows = np.arange(len(p))
            self.positions += len(p)
            self.kl += float((np.exp(p) * (p - q)).sum())
            self.same_top += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
            self.exact_nll -= float(p[rows, following[part]].sum())
            self.other_nll -= float(q[rows, following[part]].sum())

    def merge(self, other: Divergence) -> None:
        for name in ("positions", "kl", "same_top", "exact_nll", "other_nll"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def kl_mean(self) -> float:
        """Nats a position."""
        return max(0.0, self.kl / self.positions) if self.positions else 0.0

    @property
    def top1_fraction(self) -> float:
        """Of the positions, those with the same likeliest next token."""
        return self.same_top / self.positions if self.positions else 1.0

    @property
    def perplexity(self) -> float:
        """Of the text, as the run with the codec sees it."""
        return math.exp(self.other_nll / self.positions) if self.positions else 1.0

    @property
    def perplexity_change_fraction(self) -> float:
        """How much more, relative to the exact run, the text surprises; 0.01 is one per cent more."""
        return math.expm1((self.other_nll - self.exact_nll) / self.positions) if self.positions else 0.0


def _log_softmax(logits: Array) -> NDArray[np.float64]:
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    return values - np.log(np.exp(values).sum(axis=1, keepdims=True))
