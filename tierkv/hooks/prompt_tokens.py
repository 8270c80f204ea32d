"""Token ids as mlx-lm's prompt cache keys them: integers, with a negative content id for every token of an image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierkv.handoff.client import Media

Ids = NDArray[np.int64]


def as_ids(tokens: Sequence[int]) -> Ids:
    """[n] int64. Raises ValueError or OverflowError for what is no list of 64-bit integers."""
    return np.asarray(tokens, dtype=np.int64)


def media_in(ids: Ids) -> tuple[Media, ...]:
    """The images of a prompt: runs of one negative id, which is a hash of the image's content."""
    negative = np.flatnonzero(ids < 0)
    if not len(negative):
        return ()
    starts = negative[np.concatenate(([True], (np.diff(negative) > 1) | (np.diff(ids[negative]) != 0)))]
    found: list[Media] = []
    for start in starts.tolist():
        same = ids[start:] == ids[start]
        length = len(same) if same.all() else int(np.argmin(same))
        found.append(Media(start, length, int(ids[start]).to_bytes(8, "little", signed=True)))
    return tuple(found)


def inside_media(ids: Ids, position: int) -> bool:
    """Whether a cache that stands at ``position`` may hold only a part of an image: rows there depend on what follows.

    An image at the very end of the tokens counts: how long it is cannot be seen.
    """
    last = ids[position - 1] if position else 0
    return bool(last < 0 and (position == len(ids) or ids[position] == last))
