"""The breaker's states, on a clock that only the test moves."""

from __future__ import annotations

import pytest

from tierkv.errors import BreakerOpen, DeadlineExceeded, Unreachable
from tierkv.rpc.breaker import Breaker

GONE = Unreachable("p", "gone")
SLOW = DeadlineExceeded("p", "slow")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker("p", clock)


def test_a_peer_that_is_gone_opens_it_at_once(breaker: Breaker):
    assert breaker.failed(breaker.admit(), GONE)
    assert breaker.state == "open"
    with pytest.raises(BreakerOpen, match=r"^p: not asked, it failed a moment ago \(gone\)$"):
        breaker.admit()


def test_a_slow_peer_opens_it_the_second_time_in_a_row(breaker: Breaker):
    assert not breaker.failed(breaker.admit(), SLOW)
    breaker.succeeded(breaker.admit())
    assert not breaker.failed(breaker.admit(), SLOW)
    assert breaker.failed(breaker.admit(), SLOW)


def test_the_back_off_doubles_up_to_ten_seconds(breaker: Breaker, clock: Clock):
    waits = []
    breaker.failed(breaker.admit(), GONE)
    for _ in range(7):
        began = clock.now_s
        while breaker.state == "open":
            clock.now_s += 0.25
        waits.append(clock.now_s - began)
        breaker.failed(breaker.admit(), GONE)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_one_trial_at_a_time_decides(breaker: Breaker, clock: Clock):
    breaker.failed(breaker.admit(), GONE)
    clock.now_s = 0.5
    trial = breaker.admit()
    with pytest.raises(BreakerOpen):
        breaker.admit()
    breaker.succeeded(trial)
    assert breaker.state == "closed"
    breaker.failed(breaker.admit(), GONE)
    clock.now_s += 0.5
    assert breaker.state == "half-open"


def test_an_abandoned_trial_leaves_room_for_the_next(breaker: Breaker, clock: Clock):
    breaker.failed(breaker.admit(), GONE)
    clock.now_s = 0.5
    breaker.abandoned(breaker.admit())
    assert breaker.admit().trial


def test_calls_that_began_before_it_opened_do_not_lengthen_the_back_off(breaker: Breaker, clock: Clock):
    several = [breaker.admit() for _ in range(5)]
    assert [breaker.failed(attempt, GONE) for attempt in several] == [True, False, False, False, False]
    clock.now_s = 0.5
    assert breaker.state == "half-open"


def test_a_late_success_from_before_does_not_close_it(breaker: Breaker):
    early = breaker.admit()
    breaker.failed(breaker.admit(), GONE)
    breaker.succeeded(early)
    assert breaker.state == "open"


def test_a_sign_of_life_ends_the_back_off(breaker: Breaker):
    breaker.failed(breaker.admit(), GONE)
    breaker.retry_now()
    assert breaker.admit().trial
