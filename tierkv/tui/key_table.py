"""Every key of the console as a table for the README, made from the bindings: ``python -m tierkv.tui.key_table``."""

from __future__ import annotations

import sys

from textual.binding import Binding
from textual.dom import DOMNode
from textual.keys import format_key

from tierkv.tui.app import Console
from tierkv.tui.screens.config import ConfigView
from tierkv.tui.screens.events import Events
from tierkv.tui.screens.nodes import Nodes
from tierkv.tui.screens.overview import Overview
from tierkv.tui.screens.prefixes import Prefixes
from tierkv.tui.screens.work import WorkScreen

VIEWS: tuple[tuple[str, type[DOMNode]], ...] = (
    ("everywhere", Console),
    ("overview", Overview),
    ("2 to 5", WorkScreen),
    ("nodes", Nodes),
    ("prefixes", Prefixes),
    ("events", Events),
    ("config", ConfigView),
)


def rows() -> list[tuple[str, str, str]]:
    """View, keys, what they do; one row an action."""
    found: list[tuple[str, str, str]] = []
    for view, kind in VIEWS:
        by_action: dict[str, tuple[str, str]] = {}
        for binding in vars(kind).get("BINDINGS", ()):
            if isinstance(binding, Binding) and binding.description:
                keys = binding.key_display or " ".join(format_key(key) for key in binding.key.split(","))
                known = by_action.get(binding.action)
                by_action[binding.action] = (f"{known[0]} {keys}" if known else keys, binding.description)
        found += [(view, keys, text) for keys, text in by_action.values()]
    return found


def table() -> str:
    """The rows as Markdown."""
    lines = ["| where | keys | what |", "|---|---|---|"]
    lines += [f"| {view} | {' '.join(f'`{key}`' for key in keys.split())} | {text} |" for view, keys, text in rows()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
