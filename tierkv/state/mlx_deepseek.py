"""DeepSeek V4's cache, which EXO's build of mlx-lm has: a window of the last rows, and pools of compressed ones.

A pool is fed in steps of several tokens, and what is not full yet waits in a buffer: no earlier state can be cut out
of a later one. So it travels whole and is used at exactly its position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from tierkv.errors import UnsupportedState
from tierkv.state.layout import LayerLayout
from tierkv.state.mlx_adapter import TOKEN_AXIS, CacheAdapter, Scalars, Slots, plain_int, scalar

DEEPSEEK_MODULE = "mlx_lm.models.deepseek_v4"
WINDOW = "local"
# Of each branch, [1, tokens, width]; a buffer that is filled in place has room for a step and ``buffer_count`` tokens.
BRANCH_ARRAYS = ("buffer_kv", "buffer_gate", "prev_kv", "prev_gate", "pool")
BRANCH_LENGTHS = ("buffer_lengths", "pool_lengths", "_new_pool_lengths")


class DeepseekV4CacheAdapter(CacheAdapter):
    """keys, values: [1, heads, n, width] of the window; five arrays for each branch of compressed rows."""

    kind = "window"

    def axis(self, name: str) -> int:
        return TOKEN_AXIS if name.startswith(WINDOW) else 1

    def arrays(self, cache: Any) -> Slots:
        window = [(f"{WINDOW}.{name}", getattr(cache.local, name)) for name in ("keys", "values")]
        return window + [
            (f"{key}.{name}", getattr(branch, name)) for key, branch in _branches(cache) for name in BRANCH_ARRAYS
        ]

    def params(self, cache: Any) -> tuple[tuple[str, int], ...]:
        return (
            ("keep", plain_int(cache.local.keep, "keep")),
            ("max_size", plain_int(cache.local.max_size, "max_size")),
        )

    def offset(self, cache: Any) -> int | None:
        return None if cache.local.keys is None else plain_int(cache.local.offset, "offset")

    def scalars(self, cache: Any) -> dict[str, int]:
        said = {name: plain_int(getattr(cache.local, name), name) for name in ("offset", "_idx")}
        counts = {f"{key}.buffer_count": branch.buffer_count for key, branch in _branches(cache)}
        return said | {name: plain_int(count, name) for name, count in counts.items()}

    def check(self, cache: Any) -> None:
        lengths = [getattr(branch, name) for _, branch in _branches(cache) for name in BRANCH_LENGTHS]
        if type(cache.local).__name__ != "RotatingKVCache" or any(
            n is not None for n in (*lengths, cache._pending_lengths)
        ):
            raise UnsupportedState("mid_batch", "a DeepSeek cache in the middle of a padded batch")

    def build(self, cls: type, layer: LayerLayout, arrays: Sequence[mx.array | None], scalars: Scalars) -> Any:
        params = dict(layer.params)
        cache: Any = cls(params["max_size"])
        cache.local.keep = params["keep"]
        given = dict(zip((spec.name for spec in layer.arrays), arrays, strict=True))
        cache.local.keys, cache.local.values = given.pop(f"{WINDOW}.keys"), given.pop(f"{WINDOW}.values")
        cache.local.offset, cache.local._idx = scalar(scalars, "offset"), scalar(scalars, "_idx")
        rows = 0 if cache.local.keys is None else cache.local.keys.shape[TOKEN_AXIS]
        if not 0 <= cache.local._idx <= rows or cache.local.offset < cache.local._idx:
            raise UnsupportedState("bad_scalars", f"a ring of {rows} rows cannot stand at {dict(scalars)}")
        for key, branch in _branches(cache):
            for name in BRANCH_ARRAYS:
                setattr(branch, name, given.pop(f"{key}.{name}", None))
            branch.buffer_count = scalar(scalars, f"{key}.buffer_count")
        if given:
            raise UnsupportedState("foreign_layout", f"this mlx-lm has no {', '.join(given)}")
        return cache


def _branches(cache: Any) -> Iterator[tuple[str, Any]]:
    for key in sorted(cache._branches):
        yield str(key), cache._branches[key]
