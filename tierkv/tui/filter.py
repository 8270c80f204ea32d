"""The filter that `/` takes: ``node:nas !kind:evict timed``. Terms are joined by "and"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierkv.telemetry.snapshot import Event

FIELDS = ("node", "kind", "severity")
ALIASES = {"sev": "severity", "level": "severity"}


@dataclass(frozen=True, slots=True)
class Term:
    """``needle`` (lower case) in one field, or anywhere when ``field`` is empty; ``inverse``: must not be there."""

    needle: str
    field: str = ""
    inverse: bool = False

    def matches(self, event: Event) -> bool:
        return (self.needle in self._hay(event).lower()) is not self.inverse

    def matches_row(self, fields: Mapping[str, str]) -> bool:
        """As ``matches``, for a row of a table with named texts."""
        hay = fields.get(self.field, "") if self.field else " ".join(fields.values())
        return (self.needle in hay.lower()) is not self.inverse

    def _hay(self, event: Event) -> str:
        match self.field:
            case "node":
                return event.node
            case "kind":
                return event.kind
            case "severity":
                return event.severity
            case _:
                extra = " ".join(f"{key}={value}" for key, value in event.attributes.items())
                return f"{event.node} {event.kind} {event.severity} {event.message} {extra}"


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Matches every event when it has no terms."""

    terms: tuple[Term, ...] = ()
    text: str = ""

    def __bool__(self) -> bool:
        return bool(self.terms)

    def matches(self, event: Event) -> bool:
        return all(term.matches(event) for term in self.terms)

    def matches_row(self, fields: Mapping[str, str]) -> bool:
        return all(term.matches_row(fields) for term in self.terms)


def parse_filter(text: str, fields: Sequence[str] = FIELDS) -> EventFilter:
    """The filter that ``text`` names; nothing a person types is an error (an unknown ``field:`` is plain text)."""
    terms: list[Term] = []
    for word in text.split():
        inverse = word.startswith("!")
        body = word[1:] if inverse else word
        name, colon, rest = body.partition(":")
        name = ALIASES.get(name.lower(), name.lower())
        term = Term(rest.lower(), name, inverse) if colon and name in fields else Term(body.lower(), "", inverse)
        if term.needle:
            terms.append(term)
    return EventFilter(tuple(terms), " ".join(text.split()))
