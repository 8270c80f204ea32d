"""The first lines: who the cluster is, and why it is as it is."""

from __future__ import annotations

from tierkv.tui.model import ClusterView
from tierkv.tui.text import age, clean, clock, fit, wrap
from tierkv.tui.theme import Glyphs, Role
from tierkv.tui.why import Severity, why
from tierkv.tui.widgets.lines import Line, Span, span_width, spread

WHY_ROLES: dict[Severity, Role] = {"ok": "ok", "warn": "warn", "bad": "bad", "wait": "wait"}
WHY_WORDS: dict[Severity, str] = {"ok": "fine", "warn": "attention", "bad": "trouble", "wait": "waiting"}


def cluster_line(view: ClusterView, width: int, glyphs: Glyphs, *, paused: bool = False) -> list[Line]:
    """Name, nodes up of all, model, age of the data; on the right the badges and the time."""
    total, up = len(view.counted), view.up
    shape, role = (glyphs.live, "ok") if up and up == total else (glyphs.over, "warn") if up else (glyphs.lost, "bad")
    end: list[Span] = []
    if paused:
        end.extend(((" PAUSED ", "alert"), (" ", "text")))
    if view.replay:
        end.append((f" {view.replay} ", "alert"))
    else:
        end.append((" read-only ", "badge") if view.read_only else ("authenticated", "dim"))
    end.append((f" {clock(view.now_unix_s)} ", "dim"))
    start: list[Span] = [(" TierKV", "head"), ("  ", "text")]
    state: list[Span] = [(f"{shape} {up}/{total} up", role), ("  ", "text")]
    data: list[Span] = [(f"{age(view.age_s)} old" if view.age_s is not None else "no data yet", "dim"), (" ", "text")]
    room = width - span_width(start) - span_width(state) - span_width(data) - span_width(end)
    for text, span_role in ((view.name, "strong"), (model_name(view), "text")):
        text = clean(text)
        if text and room > 6:
            shown = fit(text, min(len(text), room - 2), glyphs.ellipsis)
            part: list[Span] = [(shown, span_role), ("  ", "text")]  # type: ignore[list-item]
            room -= span_width(part)
            if span_role == "strong":
                start += part
            else:
                state += part
    return [spread([*start, *state, *data], end, width)]


def model_name(view: ClusterView) -> str:
    """The model's last path component; "2 models" when the engines run several."""
    if len(view.models) > 1:
        return f"{len(view.models)} models"
    return view.models[0].rstrip("/").rsplit("/", 1)[-1] if view.models else ""


def why_lines(view: ClusterView, width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """The sentence, led by a word and a shape for its severity."""
    told = why(view)
    role = WHY_ROLES[told.severity]
    shape = {"ok": glyphs.live, "warn": glyphs.over, "bad": glyphs.refused, "wait": glyphs.waiting}[told.severity]
    lead = f" {shape} {WHY_WORDS[told.severity]}  "
    lines = wrap(told.text, width - len(lead) - 1, rows, glyphs.ellipsis)
    first: Line = ((lead, role), (lines[0], "text"))
    return [first, *(((" " * len(lead) + line, "text"),) for line in lines[1:])]
