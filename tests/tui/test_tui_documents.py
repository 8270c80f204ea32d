"""The key table of the README is what the console of today has; a moment of a recording becomes the same pictures."""

from __future__ import annotations

import re
from pathlib import Path

from test_tui_replay import night
from test_tui_screenshot import text_of

from tierkv.telemetry.recording import Header, step_line, write_packed
from tierkv.tui import screenshot
from tierkv.tui.key_table import table

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_key_table_is_made_from_the_bindings() -> None:
    told = README.partition("tierkv.tui.key_table -->\n")[2].partition("<!-- end of keys")[0]
    assert told == table(), "put what 'python -m tierkv.tui.key_table' prints into the README"


def test_the_pictures_are_what_the_console_shows_of_that_evening_today(tmp_path: Path) -> None:
    """A recording of real agents, two engines, evictions and restores; the README says how the pictures are made."""
    command = re.search(
        r"<!-- TZ=UTC python -m (tierkv\.tui\.screenshot) docs --replay (\S+) --seconds (\S+) -->", README
    )
    assert command is not None
    paths = screenshot.write_pictures(tmp_path, recording=ROOT / command[2], seconds=float(command[3]))
    for path in paths:
        shown, told = (without_ids(one.read_text()) for one in (path, ROOT / "docs" / path.name))
        assert shown == told, f"{path.name} is stale; in the repository's root: {command[0][5:-4]}"
        assert "docs/" + path.name in README


def without_ids(svg: str) -> str:
    return re.sub(r"terminal-\d+(?=[-\s{\"])", "terminal", svg)


def test_pictures_of_a_moment_of_a_recording(tmp_path: Path) -> None:
    write_packed(tmp_path / "night.gz", Header("lab"), [step_line(step) for step in night()])
    dark, light = screenshot.write_pictures(tmp_path, recording=tmp_path / "night.gz", seconds=40.0)
    for path in (dark, light):
        text = text_of(path.read_text())
        assert "1/2 up" in text
        assert "event 40" in text
        assert "REPLAY" not in text
        assert "authenticated" in text
