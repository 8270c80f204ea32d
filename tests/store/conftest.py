"""Stores on a clock that only the test moves."""

from __future__ import annotations

import pytest
from store_records import PAGE, FakeClock

from tierkv.store.ram import RamStore


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_store(clock: FakeClock):
    """A store of so many pages of 4 KiB on the test's clock."""

    def make(pages: int = 64, **options) -> RamStore:
        options.setdefault("clock", clock)
        return RamStore(pages * PAGE, page_bytes=PAGE, **options)

    return make
