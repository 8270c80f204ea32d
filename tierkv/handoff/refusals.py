"""Why an agent does not take an engine, in words for the logs of both."""

from __future__ import annotations

_TEXTS = {
    "other_version": "engine and agent have different versions of TierKV; update the older one and restart both",
    "no_shared_memory": "there is not enough shared memory for both; free some, or lower inference.handoff_bytes",
    "too_many_engines": "too many engines are connected already",
}


def refusal_text(reason: str) -> str:
    """The words, and the slug that statistics count."""
    words = _TEXTS.get(reason)
    return f"{words} ({reason})" if words else reason
