"""What the words over a view's numbers mean, for the help; each stands where its column is made, so that none is
missing and none is stale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tierkv.tui.text import wrap
from tierkv.tui.theme import Glyphs
from tierkv.tui.widgets.lines import Line, left

WORD = 12


class Titled(Protocol):
    """A column of any table: ``told`` says what its values are."""

    @property
    def title(self) -> str: ...

    @property
    def told(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Words:
    """The words of one table or panel and what each means."""

    heading: str
    told: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, heading: str, columns: Iterable[Titled]) -> Words:
        return cls(heading, tuple((column.title, column.told) for column in columns))

    @classmethod
    def named(cls, heading: str, told: Mapping[str, str]) -> Words:
        return cls(heading, tuple(told.items()))


def word_lines(words: Iterable[Words], width: int, glyphs: Glyphs) -> list[Line]:
    """Every word with its meaning beside it, wrapped."""
    lines: list[Line] = []
    for group in words:
        lines += [(), (left(f" {group.heading}", width, "head", glyphs),)]
        for word, told in group.told:
            texts = wrap(told, width - WORD, 6, glyphs.ellipsis)
            for number, text in enumerate(texts):
                name = f"  {word}" if number == 0 else ""
                lines.append((left(name, WORD, "key", glyphs), left(text, width - WORD, "text", glyphs)))
    return lines
