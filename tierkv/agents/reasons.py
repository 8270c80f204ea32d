"""Short slugs for what went wrong, as statistics count them."""

from __future__ import annotations

from tierkv.errors import (
    BadFrame,
    BreakerOpen,
    CorruptionError,
    DeadlineExceeded,
    ForeignRecord,
    NotAuthenticated,
    Refused,
    Unreachable,
    WrongService,
)


class RecordMissing(Exception):
    """A vault does not have a record that it had a moment ago; ``reason`` as the vault says it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


_SLUGS: tuple[tuple[type[BaseException], str], ...] = (
    (BreakerOpen, "breaker_open"),
    (Unreachable, "unreachable"),
    (DeadlineExceeded, "timed_out"),
    (NotAuthenticated, "not_authenticated"),
    (WrongService, "wrong_service"),
    (Refused, "refused"),
    (TimeoutError, "timed_out"),
)


def reason_of(error: BaseException) -> str:
    """The slug of a failure."""
    if isinstance(error, BadFrame | ForeignRecord | RecordMissing):
        return error.reason
    return next((slug for kind, slug in _SLUGS if isinstance(error, kind)), "failed")


def is_damage(error: BaseException) -> bool:
    """Whether bytes came that are not what was written (rather than none, or too late)."""
    return isinstance(error, CorruptionError)
