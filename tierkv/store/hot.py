"""Which records have their bytes in the arena as well: the hot part over a log. Called under its owner's lock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from tierkv.store.arena import Arena, Runs


class Hot:
    """Rows with pages, least recently read first. Dropping one loses nothing: its bytes are in the log."""

    def __init__(self, arena: Arena, is_open: Callable[[int], bool]) -> None:
        self._arena = arena
        self._is_open = is_open
        self._rows: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def pages(self, row: int) -> Runs | None:
        """The row's pages, which are now the most recently read; None if it is cold."""
        first = self._rows.get(row)
        if first is None:
            return None
        self._rows.move_to_end(row)
        return self._arena.chain(first)

    def put(self, row: int, pages: Runs) -> None:
        """The pages are the row's until it is dropped."""
        self._rows[row] = self._arena.link(pages)

    def drop(self, row: int) -> None:
        first = self._rows.pop(row, None)
        if first is not None:
            self._arena.give(self._arena.chain(first))

    def take(self, count: int) -> Runs | None:
        """Pages that are nobody's, dropping what was read longest ago; None if the rest is being read or written."""
        if count > self._arena.free_pages:
            for row in list(self._rows):
                if count <= self._arena.free_pages:
                    break
                if not self._is_open(row):
                    self.drop(row)
        return self._arena.take(count) if count <= self._arena.free_pages else None
