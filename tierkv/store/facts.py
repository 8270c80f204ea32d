"""What many records of one prompt say alike, kept once: a layout alone is 10 KB or so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierkv.codec.record import RecordHeader
from tierkv.identity.blocks import BlockKey


@dataclass(frozen=True, slots=True)
class Facts:
    root: BlockKey
    layout_digest: bytes
    layout: bytes
    model: str
    codec: str


_NONE = Facts(BlockKey(b""), b"", b"", "", "")


class FactsPool:
    """Facts by small numbers, counted by their users."""

    def __init__(self) -> None:
        self._facts: list[Facts] = []
        self._users: list[int] = []
        self._free: list[int] = []
        self._known: dict[tuple[BlockKey, bytes, str, str], int] = {}

    def __getitem__(self, number: int) -> Facts:
        return self._facts[number]

    def share(self, facts: Facts | RecordHeader, users: int = 1) -> int:
        """The number of these facts, or of this header's, with so many users more."""
        name = (facts.root, facts.layout_digest, facts.model, facts.codec)
        number = self._known.get(name)
        # The layout is compared and not hashed, which takes a tenth of the time.
        if number is None or self._facts[number].layout != facts.layout:
            number = self._add(Facts(facts.root, facts.layout_digest, facts.layout, facts.model, facts.codec))
            self._known.setdefault(name, number)
        self._users[number] += users
        return number

    def unshare(self, number: int) -> None:
        """One user less; facts without users are forgotten."""
        self._users[number] -= 1
        if self._users[number]:
            return
        facts = self._facts[number]
        name = (facts.root, facts.layout_digest, facts.model, facts.codec)
        if self._known.get(name) == number:
            del self._known[name]
        self._facts[number] = _NONE
        self._free.append(number)

    def where(self, good: Callable[[Facts], bool]) -> list[int]:
        """Numbers of the facts that pass."""
        return [number for number, facts in enumerate(self._facts) if good(facts)]

    def snapshot(self) -> FactsPool:
        """A copy to read from."""
        other = FactsPool()
        other._facts = self._facts[:]
        return other

    @property
    def memory_bytes(self) -> int:
        """An estimate."""
        return sum(len(facts.layout) + 300 for facts in self._facts)

    def _add(self, facts: Facts) -> int:
        if self._free:
            number = self._free.pop()
            self._facts[number] = facts
            return number
        self._facts.append(facts)
        self._users.append(0)
        return len(self._facts) - 1
