"""What every adapter of a cache class has in common: the interface, and checks of what comes back."""

# ruff: noqa: ARG002, B027 - a small class takes from the shared interface what it needs and leaves the rest

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx

from tierkv.errors import UnsupportedState
from tierkv.state.layout import LayerKind, LayerLayout

Slots = Sequence[tuple[str, mx.array | None]]
Scalars = Mapping[str, int]
TOKEN_AXIS = 2


class CacheAdapter(ABC):
    """Turns caches of one class into named arrays and back; ``kind`` says how they travel (see ``layout``)."""

    kind: ClassVar[LayerKind]
    token_axis: ClassVar[int | None] = None

    def axis(self, name: str) -> int | None:
        """The axis of the array of this name whose length follows the tokens; None where none does."""
        return self.token_axis

    @abstractmethod
    def arrays(self, cache: Any) -> Slots:
        """Names and arrays in a fixed order, only tokens that count; None where nothing is stored."""

    def buffers(self, cache: Any) -> Slots:
        """What ``arrays`` are parts of, in the same order and with the same axes: rows that do not count may follow."""
        return self.arrays(cache)

    @abstractmethod
    def build(self, cls: type, layer: LayerLayout, arrays: Sequence[mx.array | None], scalars: Scalars) -> Any:
        """A new cache of class ``cls`` that holds ``arrays``, in the order of ``layer.arrays``."""

    def params(self, cache: Any) -> tuple[tuple[str, int], ...]:
        """Constants that an empty cache already has and that must be equal at a restore."""
        return ()

    def offset(self, cache: Any) -> int | None:
        """Tokens that the cache has seen; None where it does not say."""
        return None

    def room(self, cache: Any) -> int:
        """Tokens that the buffers behind the arrays have room for; 0 where they do not grow with tokens."""
        return 0

    def scalars(self, cache: Any) -> dict[str, int]:
        """Small integers that a checkpoint needs besides its arrays."""
        return {}

    def check(self, cache: Any) -> None:
        """Raises UnsupportedState if this cache holds something that ``arrays`` and ``scalars`` do not say."""


class AttentionAdapter(CacheAdapter):
    """Arrays with their tokens on one axis, of which the first ``length`` count."""

    token_axis = TOKEN_AXIS

    def buffers(self, cache: Any) -> Slots:
        return [("keys", cache.keys), ("values", cache.values)]

    def length(self, cache: Any) -> int | None:
        """Rows that count, from the first on; None for all of them."""
        return cache.offset

    def arrays(self, cache: Any) -> Slots:
        length = self.length(cache)
        return [(name, head(array, length)) for name, array in self.buffers(cache)]

    def offset(self, cache: Any) -> int | None:
        return None if cache.keys is None else plain_int(cache.offset, "offset")

    def room(self, cache: Any) -> int:
        buffer = cache.keys[0] if isinstance(cache.keys, list | tuple) else cache.keys
        return 0 if buffer is None else buffer.shape[TOKEN_AXIS]


def plain_int(value: Any, name: str) -> int:
    """``value`` if it is a Python integer: mlx-lm slices with it. Raises UnsupportedState otherwise."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedState("bad_scalars", f"{name} is {type(value).__name__}, not an integer")
    return value


def scalar(scalars: Scalars, name: str) -> int:
    if name not in scalars:
        raise UnsupportedState("bad_scalars", f"the checkpoint does not say {name}")
    return plain_int(scalars[name], name)


def head(array: mx.array | None, rows: int | None) -> mx.array | None:
    if array is None or rows is None or rows >= array.shape[TOKEN_AXIS]:
        return array
    return array[..., :rows, :]


def padded(array: mx.array | None, rows: int) -> mx.array | None:
    """The array in a buffer with room for ``rows`` rows."""
    if array is None or array.shape[TOKEN_AXIS] >= rows:
        return array
    return mx.pad(array, [(0, 0), (0, 0), (0, rows - array.shape[TOKEN_AXIS]), (0, 0)])
