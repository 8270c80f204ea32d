"""Why a request was answered the way it was, as ``tierkv explain`` and the console show it.

Lengths, positions and the beginnings of keys; never prompt text, token ids or KV. Times are seconds since the Unix
epoch, durations seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request. ``outcome``: "restored", "hot" (the engine's own cache), "computed", or "asked" (not answered yet).

    ``position`` is where the state stood that the engine went on from, ``hot_tokens`` what its own cache had of it.
    """

    id: int
    time_unix_s: float
    model: str
    prompt_tokens: int
    hot_tokens: int
    position: int
    outcome: str
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TierFinding:
    """What one tier was asked, had, gave, and why it gave no more (``reason`` a slug, ``detail`` for people).

    ``differs_at``: the first token that differs from the nearest stored prompt; ``gone_unix_s``: when what is missing
    left. Both 0 where that is not why.
    """

    tier: str
    peer: str = ""
    asked: bool = False
    asked_tokens: int = 0
    found_tokens: int = 0
    used_tokens: int = 0
    used_bytes: int = 0
    checkpoints: tuple[int, ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    seconds: float = 0.0
    reason: str = ""
    detail: str = ""
    differs_at: int = 0
    gone_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """One sentence, then tier by tier. ``expected_..._s`` are 0 where nothing was known to expect anything from."""

    request: RequestLine
    sentence: str
    tiers: tuple[TierFinding, ...] = ()
    identity: str = ""
    key: str = ""
    codec: str = ""
    fidelity: int = 0
    restored_bytes: int = 0
    expected_restore_s: float = 0.0
    expected_prefill_s: float = 0.0
    differing_parts: tuple[str, ...] = ()
    engine: str = ""
