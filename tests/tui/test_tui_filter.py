"""The event filter: terms, fields, inverse."""

import pytest
from tui_cluster import event

from tierkv.tui.filter import parse_filter

EVICTION = event(
    1, "evicted 9 blocks of SmolLM2", kind="evict", node="nas", severity="warning", attributes={"key": "ab"}
)


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("blocks", True),
        ("BLOCKS smollm2", True),
        ("blocks timed", False),
        ("!blocks", False),
        ("!timed", True),
        ("node:nas", True),
        ("node:NA", True),
        ("node:mini", False),
        ("!node:mini", True),
        ("kind:evict !node:nas", False),
        ("severity:warn", True),
        ("sev:error", False),
        ("key=ab", True),
        ("nas:50051", False),
        ("!", True),
        ("node:", True),
        ("[red]", False),
    ],
)
def test_terms(text: str, matches: bool) -> None:
    assert parse_filter(text).matches(EVICTION) is matches


def test_an_empty_filter_is_falsy_and_keeps_what_was_typed() -> None:
    assert not parse_filter("  ")
    assert parse_filter(" node:nas   !evict ").text == "node:nas !evict"
