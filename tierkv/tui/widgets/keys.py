"""The line of keys at the bottom and the help, both made from the bindings so that they cannot lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from textual.app import App
from textual.binding import ActiveBinding, Binding
from textual.dom import DOMNode

from tierkv.tui.theme import Glyphs, Role
from tierkv.tui.widgets.lines import Line, Span, left, span_width, spread

ASCII_NAMES = {"↑": "up", "↓": "down", "←": "left", "→": "right", "⏎": "enter"}
OURS = "tierkv."


@dataclass(frozen=True, slots=True)
class Key:
    """One action of ``node``: all keys that start it, what it does, whether the bottom line names it, whether it
    belongs to the whole console rather than to one screen, and whether it is possible now."""

    action: str
    node: DOMNode
    keys: str
    description: str
    shown: bool
    everywhere: bool
    enabled: bool = True


def keys_of(app: App[int], bindings: Iterable[ActiveBinding], glyphs: Glyphs) -> list[Key]:
    """The console's own bindings in the order they were declared, one entry an action; Textual's are left out."""
    by_action: dict[str, Key] = {}
    for active in bindings:
        binding = active.binding
        if not binding.description or binding.action not in declared(type(active.node)):
            continue
        display = app.get_key_display(binding)
        display = ASCII_NAMES.get(display, display) if glyphs.ascii else display
        known = by_action.get(binding.action)
        keys = f"{known.keys} {display}" if known else display
        shown = binding.show or (known is not None and known.shown)
        by_action[binding.action] = Key(
            binding.action, active.node, keys, binding.description, shown, isinstance(active.node, App), active.enabled
        )
    return sorted(by_action.values(), key=lambda key: key.everywhere)


def declared(node: type) -> set[str]:
    """The actions that the console's own classes bind, without those inherited from Textual."""
    ours = [cls for cls in node.__mro__ if cls.__module__.startswith(OURS)]
    bindings = [binding for cls in ours for binding in vars(cls).get("BINDINGS", ())]
    return {binding.action for binding in bindings if isinstance(binding, Binding)}


def key_line(keys: Sequence[Key], width: int) -> list[Line]:
    """The screen's keys as far as they fit on the left, the console's own (quit, help) always on the right."""
    end = [span for key in keys if key.shown and key.everywhere for span in _named(key)]
    while end and span_width(end) > width - 20:
        end = end[2:]
    start: list[Span] = [(" ", "text")]
    for key in keys:
        part = _named(key)
        if key.shown and not key.everywhere and span_width(start) + span_width(part) + span_width(end) <= width:
            start += part
    return [spread(start, end, width)]


def _named(key: Key) -> list[Span]:
    role: Role = "key" if key.enabled else "faint"
    return [(key.keys.split(" ")[0], role), (f" {key.description.lower()}  ", "dim" if key.enabled else "faint")]


def _help_role(key: Key) -> Role:
    return "text" if key.enabled else "faint"


def help_lines(keys: Iterable[Key], width: int, glyphs: Glyphs, across: int = 1) -> list[Line]:
    """One key a cell, in ``across`` columns of ``width``, read downwards."""
    column = 12
    cells: list[Line] = [
        (
            left(f"  {key.keys}", column, "key" if key.enabled else "faint", glyphs),
            left(key.description + ("" if key.enabled else " (read-only)"), width - column, _help_role(key), glyphs),
        )
        for key in keys
    ]
    height = -(-len(cells) // across)
    return [tuple(span for cell in cells[y::height] for span in cell) for y in range(height)]
