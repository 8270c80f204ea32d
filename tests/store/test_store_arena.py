"""Pages are taken, given back and joined; none is ever handed out twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.store.arena import Arena

PAGE = 4096


def pages_of(runs) -> list[int]:
    return [page for first, count in runs for page in range(first, first + count)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_no_page_has_two_owners_and_none_is_lost(steps):
    arena = Arena(40 * PAGE, PAGE)
    owned = []
    for take, number in steps:
        if take and number <= arena.free_pages:
            owned.append(arena.take(number))
            assert len(pages_of(owned[-1])) == number
        elif owned:
            arena.give(owned.pop(number % len(owned)))
        held = [page for runs in owned for page in pages_of(runs)]
        assert len(held) == len(set(held)) == arena.pages - arena.free_pages
    for runs in owned:
        arena.give(runs)
    assert arena.take(40) == [(0, 40)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=7), st.integers(0, 20 * PAGE), st.integers(0, 20 * PAGE))
def test_bytes_written_across_scattered_runs_are_read_back(holes, offset, length):
    arena = Arena(60 * PAGE, PAGE)
    kept = []
    for hole in holes:
        kept.append(arena.take(hole))
        arena.take(1)
    for runs in kept:
        arena.give(runs)
    size = sum(holes) * PAGE - 5
    runs = arena.take(sum(holes))
    extents = arena.extents(runs, size)
    data = bytes(i * 7 % 251 for i in range(size))
    extents.copy_in(0, memoryview(data))
    assert b"".join(extents.pieces(offset, length)) == data[offset : offset + length]
    assert arena.chain(arena.link(runs)) == runs


def test_pages_freed_last_are_used_first():
    arena = Arena(10 * PAGE, PAGE)
    first, second = arena.take(2), arena.take(3)
    arena.take(1)
    arena.give(first)
    arena.give(second)
    assert arena.take(5) == [(0, 5)]


def test_the_cap_is_whole_pages():
    arena = Arena(10 * PAGE + 100, PAGE)
    assert (arena.pages, arena.cap_bytes, arena.used_bytes) == (10, 10 * PAGE, 0)
    assert [arena.pages_for(n) for n in (1, PAGE, PAGE + 1)] == [1, 1, 2]
    with pytest.raises(ValueError, match="no page"):
        Arena(PAGE - 1, PAGE)
