"""Text from other machines is harmless before it is shown; numbers keep their columns."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tierkv.tui.text import (
    age,
    ascii_only,
    clean,
    clock,
    fit,
    percent,
    short_count,
    short_duration,
    short_rate,
    short_size,
    wrap,
)


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2J\x1b[31mnas", "[2J[31mnas"),
        ("na\u202es", "nas"),
        ("\u2066a\u2069\u200bb\ufeff", "ab"),
        ("line\nbreak\ttab", "line break tab"),
        ("a" + "\u0301" * 50, "a\u0301\u0301"),
        ("\u0301nas", "nas"),
        ("\u3164\u115fx", "x"),
        ("[red]nas[/red]", "[red]nas[/red]"),
        ("\U000e0041\U000e0042nas", "nas"),
        ("\x9b31mnas", "31mnas"),
        ("büro-ノード", "büro-ノード"),
    ],
)
def test_what_could_move_hide_or_turn_text_is_removed(hostile: str, shown: str) -> None:
    assert clean(hostile) == shown


@given(st.text())
def test_cleaned_text_has_nothing_invisible_left(text: str) -> None:
    assert not {unicodedata.category(char) for char in clean(text)} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@given(st.text(), st.integers(0, 40))
def test_fit_fills_exactly_its_cells(text: str, width: int) -> None:
    assert cell_len(fit(text, width)) == width


def test_fit_cuts_wide_characters_at_whole_cells() -> None:
    assert fit("ノード", 6) == "ノード"
    assert fit("ノード", 5) == "ノー…"
    assert fit("ノード", 4) == "ノ …"


def test_a_terminal_without_unicode_sees_question_marks() -> None:
    assert ascii_only("büro") == "b?ro"


def test_wrap_keeps_words_and_cuts_the_last_line() -> None:
    assert wrap("one two three four", 8, 2) == ["one two", "three f…"]
    assert wrap("one two", 20, 2) == ["one two"]
    assert wrap("", 20, 2) == [""]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0, "0"), (1, "1B"), (1023, "1K"), (5 << 20, "5.0M"), (512 << 20, "512M"), (12 << 30, "12G")],
)
def test_sizes_take_four_columns(value, shown) -> None:
    assert short_size(value) == shown


@given(st.floats(0, 1e17))
def test_no_number_outgrows_its_column(value: float) -> None:
    assert len(short_size(value)) <= 4
    assert len(short_count(min(value, 9e14))) <= 5
    assert len(short_rate(min(value, 9e14))) <= 5
    assert len(short_duration(min(value, 1e8))) <= 5


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (0.00085, "850us"), (0.0012, "1.2ms"), (0.34, "340ms"), (4.1, "4.1s"), (720, "12m"), (10800, "3h")],
)
def test_durations(seconds, shown) -> None:
    assert short_duration(seconds) == shown


@pytest.mark.parametrize(
    ("fraction", "shown"),
    [(None, "-"), (0, "0%"), (0.001, "<1%"), (0.43, "43%"), (0.999, "99%"), (1, "100%"), (float("nan"), "-")],
)
def test_percent_never_rounds_to_certainty(fraction, shown) -> None:
    assert percent(fraction) == shown


def test_ages_and_clocks() -> None:
    assert (age(0.44), age(12), age(180), age(7200 * 2)) == ("0.4 s", "12 s", "3 min", "4 h")
    assert clock(1_777_793_000) == "07:23:20"
    assert clock(float("inf")) == clock(1e300) == clock(float("nan")) == "--:--:--"
