"""What a person is told of the agent: nothing in a good start, else what is wrong, once, and that it is back."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tierkv.handoff.links import Health
from tierkv.hooks.voice import AgentWatch

START = Health(up=False, times_up=0, down_s=0.0, outage_s=0.0, trouble="absent")
UP = Health(up=True, times_up=1, down_s=0.0, outage_s=1.5, trouble="silent")
DOWN = Health(up=False, times_up=1, down_s=0.2, outage_s=1.5, trouble="absent")


class Client:
    """What a watch needs of a HandoffClient."""

    socket_path = Path("/run/s.sock")
    node = "spark"
    last_error = "/run/s.sock: too_many_engines"
    health = START


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture):
    """Shows a watch the given states, a second apart, and returns what it says of each."""
    client = Client()
    watch = AgentWatch(client, grace_s=10.0)
    caplog.set_level(logging.INFO, "tierkv")

    def after(*states: Health) -> list[str]:
        caplog.clear()
        for state in states:
            client.health = state
            watch.look()
        return [record.getMessage() for record in caplog.records]

    return after


def down(state: Health, *seconds: float) -> list[Health]:
    return [replace(state, down_s=each) for each in seconds]


def test_a_good_start_says_that_it_is_connected_and_nothing_else(said):
    assert said(*down(START, 0, 1, 2), replace(START, trouble="silent", down_s=3), UP, UP) == [
        "connected to the inference agent spark"
    ]


def test_a_slow_agent_is_not_called_absent(said):
    silent = replace(START, trouble="silent")
    assert said(*down(silent, 1, 9, 10, 11, 40)) == [
        "the inference agent at /run/s.sock does not answer yet (for 10 s), trying again"
    ]


def test_an_absent_agent_is_spoken_of_now_and_then(said):
    seconds = [float(n) for n in range(4000)]
    lines = said(*down(START, *seconds))
    assert [line.split(";")[0] for line in lines] == [
        f"no inference agent at /run/s.sock for {n} s" for n in (10, 70, 310, 1270)
    ]


def test_another_trouble_is_said_at_once(said):
    states = [*down(START, 10, 11), *down(replace(START, trouble="silent"), 12, 13)]
    states += down(replace(START, trouble="refused"), 14, 15)
    assert [line.split(";")[0] for line in said(*states)] == [
        "no inference agent at /run/s.sock for 10 s",
        "the inference agent at /run/s.sock does not answer yet (for 12 s), trying again",
        "the inference agent at /run/s.sock refuses this engine (for 14 s): /run/s.sock: too_many_engines",
    ]


def test_lost_and_back_are_one_line_each(said):
    said(UP)
    back = replace(UP, times_up=2, outage_s=3.14)
    assert said(*down(DOWN, 0.2, 1.2, 2.2), back, back) == [
        "lost the inference agent at /run/s.sock; the engine goes on without tiers, trying again",
        "connected again to the inference agent spark after 3.1 s",
    ]
    assert said(replace(back, up=False, times_up=2, down_s=0.5)) == [
        "lost the inference agent at /run/s.sock; the engine goes on without tiers, trying again"
    ]


def test_a_restart_between_two_looks_is_said(said):
    said(UP)
    assert said(replace(UP, times_up=2, outage_s=0.4)) == ["connected again to the inference agent spark after 0.4 s"]
