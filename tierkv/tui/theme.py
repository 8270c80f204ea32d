"""Colours and glyphs. A role names what a piece of text means; the palette says how that looks in the theme in force.

The two themes keep ok, warn and bad (blue, yellow, red) far apart under the common kinds of colour blindness, and every
state is also a word and a shape: the screen reads the same without colour.
"""

from __future__ import annotations

import locale
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rich.style import Style
from textual.color import Color
from textual.theme import Theme

Role = Literal[
    "text",
    "strong",
    "dim",
    "faint",
    "head",
    "ok",
    "warn",
    "bad",
    "wait",
    "accent",
    "mark",
    "badge",
    "alert",
    "key",
    "select",
]

DARK = Theme(
    name="tierkv-dark",
    dark=True,
    foreground="#d6dae1",
    background="#11141a",
    surface="#171b22",
    panel="#1f242d",
    primary="#6cb6ff",
    secondary="#9aa7b8",
    accent="#7fd1e0",
    success="#559ef6",
    warning="#ffd43b",
    error="#f8626f",
)

LIGHT = Theme(
    name="tierkv-light",
    dark=False,
    foreground="#1f2630",
    background="#fbfbf9",
    surface="#f1f2f0",
    panel="#e6e8e6",
    primary="#0b5cad",
    secondary="#56616f",
    accent="#0a6b7c",
    success="#0a5dc2",
    warning="#806200",
    error="#b31966",
)

THEMES = {"dark": DARK, "light": LIGHT}


def palette(variables: Mapping[str, str]) -> dict[Role, Style]:
    """The style of every role, from a Textual theme's generated variables (so that any theme works)."""
    foreground, background = Color.parse(variables["foreground"]), Color.parse(variables["background"])

    def named(name: str) -> str:
        return Color.parse(variables[name]).hex6

    def faded(factor: float) -> str:
        return foreground.blend(background, factor).hex6

    def on(name: str) -> Style:
        return Style(color=background.hex6, bgcolor=named(name), bold=True)

    return {
        "text": Style(color=foreground.hex6),
        "strong": Style(color=foreground.hex6, bold=True),
        "dim": Style(color=faded(0.36)),
        "faint": Style(color=faded(0.72)),
        "head": Style(color=named("primary"), bold=True),
        "ok": Style(color=named("success")),
        "warn": Style(color=named("warning"), bold=True),
        "bad": Style(color=named("error"), bold=True),
        "wait": Style(color=named("secondary")),
        "accent": Style(color=named("accent")),
        "mark": Style(color=foreground.hex6, bold=True),
        "badge": Style(color=faded(0.1), bgcolor=named("panel")),
        "alert": on("warning"),
        "key": Style(color=named("primary"), bold=True),
        "select": Style(
            color=foreground.hex6, bgcolor=background.blend(Color.parse(variables["primary"]), 0.3).hex6, bold=True
        ),
    }


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The shapes that the screen is made of, all one cell wide."""

    live: str = "●"
    over: str = "▲"
    silent: str = "◐"
    lost: str = "○"
    waiting: str = "◌"
    refused: str = "×"
    absent: str = "·"
    rule: str = "─"
    divider: str = "│"
    full: str = "━"
    half: str = "╸"
    track: str = "─"
    mark: str = "┃"
    spark: str = "▁▂▃▄▅▆▇"
    nothing: str = " "
    zero: str = "▁"
    ellipsis: str = "…"
    down: str = "▼"
    dot: str = "·"
    unknown: str = "–"
    cursor: str = "›"
    up: str = "▲"
    changed: str = "✎"
    rose: str = "▴"
    fell: str = "▾"
    other: str = "•"
    ascii: bool = False


UNICODE = Glyphs()
ASCII = Glyphs(
    live="*",
    over="^",
    silent="?",
    lost="o",
    waiting=".",
    refused="x",
    absent="-",
    rule="-",
    divider="|",
    full="=",
    half="=",
    track="-",
    mark="|",
    spark=".:-=+*#@",
    nothing=" ",
    zero="_",
    ellipsis="~",
    down="v",
    dot="-",
    unknown="-",
    cursor=">",
    up="^",
    changed="+",
    rose="^",
    fell="v",
    other="*",
    ascii=True,
)


def glyphs_for(environment: Mapping[str, str] | None = None) -> Glyphs:
    """ASCII where the terminal or the locale cannot show more, or where ``TIERKV_ASCII`` is set; else Unicode."""
    env = os.environ if environment is None else environment
    if env.get("TIERKV_ASCII") or env.get("TERM") in ("dumb", "linux", "vt100"):
        return ASCII
    named = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or ""
    if named:
        return UNICODE if "utf-8" in named.lower() or "utf8" in named.lower() else ASCII
    return UNICODE if "utf" in locale.getpreferredencoding(False).lower() else ASCII
