"""Good, attention and trouble stay apart for colour-blind eyes, on light and dark; glyphs are one cell wide."""

import itertools
from dataclasses import fields

import pytest
from rich.cells import cell_len
from textual.color import Color

from tierkv.tui.theme import ASCII, DARK, LIGHT, UNICODE, glyphs_for

# Machado, Oliveira and Fernandes (2009), severity 1.0, applied to linear RGB.
BLINDNESS = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
}


def linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def lab(rgb: tuple[float, ...]) -> tuple[float, float, float]:
    """CIE L*a*b* (D65) of linear RGB."""
    r, g, b = (min(1.0, max(0.0, value)) for value in rgb)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def seen(colour: str, blindness: str) -> tuple[float, float, float]:
    rgb = [linear(value) for value in Color.parse(colour).normalized]
    matrix = BLINDNESS[blindness]
    return lab(tuple(sum(m * v for m, v in zip(row, rgb, strict=True)) for row in matrix))


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_ok_warning_and_error_are_far_apart(theme, blindness: str) -> None:
    """A distance of 30 (CIE76) is clear at a glance; 2.3 is just noticeable."""
    colours = [theme.success, theme.warning, theme.error]
    for one, other in itertools.combinations(colours, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen(one, blindness), seen(other, blindness), strict=True)) ** 0.5
        assert distance >= 30, (one, other)


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
def test_every_colour_can_be_read_on_its_background(theme) -> None:
    """WCAG AA: a contrast of 4.5."""

    def luminance(colour: str) -> float:
        r, g, b = (linear(value) for value in Color.parse(colour).normalized)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for behind in (theme.background, theme.panel):
        for colour in (theme.foreground, theme.success, theme.warning, theme.error, theme.accent, theme.primary):
            dark, light = sorted((luminance(colour), luminance(behind)))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (colour, behind)


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_glyphs_take_one_cell(glyphs) -> None:
    for field in fields(glyphs):
        value = getattr(glyphs, field.name)
        if isinstance(value, str):
            assert cell_len(value) == len(value)
            assert glyphs is UNICODE or value.isascii()


def test_states_have_shapes_of_their_own() -> None:
    for glyphs in (UNICODE, ASCII):
        shapes = [glyphs.live, glyphs.over, glyphs.silent, glyphs.lost, glyphs.waiting, glyphs.refused, glyphs.absent]
        assert len(set(shapes)) == len(shapes)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LANG": "en_US.UTF-8"}, UNICODE),
        ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, ASCII),
        ({"LANG": "de_DE.utf8", "TERM": "linux"}, ASCII),
        ({"LANG": "C.UTF-8", "TIERKV_ASCII": "1"}, ASCII),
        ({"LANG": "de_DE.ISO-8859-1"}, ASCII),
    ],
)
def test_the_terminal_decides_the_glyphs(environment, expected) -> None:
    assert glyphs_for(environment) is expected
