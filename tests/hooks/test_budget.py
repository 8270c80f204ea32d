"""How long a hook waits for a restore: no longer than computing takes, where that is known."""

from types import SimpleNamespace

import pytest

from tierkv.handoff.client import ModelAnnouncement, ModelHandle
from tierkv.hooks.counters import HotCounters
from tierkv.hooks.promote import Fetch

UNKNOWN, TOLD = (0.0, 0.0), (1e-3, 2e-6)


def budget(have, limit, *, terms=UNKNOWN, rate=0.0, spent_s=0.0, **settings):
    counters = HotCounters()
    if rate:
        counters.prefilled(1000, 1000 / rate, model=0)
    client = SimpleNamespace(settings={"restore_budget_s": 30.0, **settings})
    handle = ModelHandle(0, ModelAnnouncement("m", ()), prefill_terms=terms)
    return Fetch(client, counters).budget_s(handle, have, limit, spent_s)


def test_while_the_hook_does_not_know_it_is_what_the_agent_allows():
    assert budget(0, 4000) == 30.0
    assert budget(0, 4000, restore_budget_s=7.0, break_even=True) == 7.0


@pytest.mark.parametrize(
    ("have", "limit", "wanted"),
    [(0, 1000, 1 + 1), (1000, 2000, 1 + 3), (0, 2000, 2 + 4), (0, 100_000, 30.0)],
)
def test_what_the_agent_knows_of_computing_counts_first(have, limit, wanted):
    """1 ms a token, 2 us a pair; a rate of short prompts alone would say 0.25 s for 1,000 tokens."""
    assert budget(have, limit, terms=TOLD, rate=4000, break_even=True) == pytest.approx(wanted)


def test_before_the_agent_says_so_the_rate_of_this_engine_counts():
    assert budget(1000, 3000, rate=1000, break_even=True) == pytest.approx(2.0)


def test_a_quick_engine_waits_a_moment():
    assert budget(0, 100, rate=10_000, break_even=True) == pytest.approx(0.2)
    assert budget(0, 4000, rate=10_000, break_even=True) == pytest.approx(0.4)


def test_where_restores_are_wanted_in_any_case_there_is_time_to_connect():
    for said in ({"break_even": False}, {}):  # an older agent does not say
        assert budget(0, 4000, rate=10_000, **said) == pytest.approx(1.0)
        assert budget(0, 4000, rate=1000, **said) == pytest.approx(4.0)


def test_all_forms_of_a_cache_wait_no_longer_than_one():
    assert budget(0, 4000, rate=1000, spent_s=1.5, break_even=True) == pytest.approx(2.5)
    assert budget(0, 4000, rate=1000, spent_s=3.9, break_even=True) == pytest.approx(0.2)
