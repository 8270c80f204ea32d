"""Pictures load nothing from the network and show the same text as the screen."""

import html
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tui_cluster import event, inference, vault

from tierkv.tui import screenshot


def text_of(svg: str) -> str:
    return html.unescape(" ".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))).replace("\u00a0", " ")


def test_two_pictures_from_snapshots(tmp_path: Path) -> None:
    snapshots = [make(t) for t in (0.0, 1.0) for make in (inference, vault)]
    paths = screenshot.write_pictures(
        tmp_path, snapshots=snapshots, events=[event(1, "stored <12> blocks")], name="lab"
    )
    assert [path.name for path in paths] == ["console-dark.svg", "console-light.svg"]
    dark, light = (path.read_text() for path in paths)
    for svg in (dark, light):
        ET.fromstring(svg)
        outside = re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)
        assert "http" not in outside.replace("https://www.textualize.io", "")
        assert "font-face" not in svg
        assert "2/2 up" in text_of(svg)
        assert "stored <12> blocks" in text_of(svg)
        assert "10M" in text_of(svg)
    assert "#11141a" in dark
    assert "#fbfbf9" in light


@pytest.mark.parametrize(
    ("text", "x", "length", "shown"),
    [
        ("&#160;&#160;ab&#160;", 24.4, 24.4, "ab"),
        ("ab", 0, 24.4, "ab"),
        ("&#160;&lt;&#160;b", 12.2, 36.6, "&lt;&#160;b"),
    ],
)
def test_outer_blanks_become_position(text: str, x: float, length: float, shown: str) -> None:
    count = len(html.unescape(text))
    given = f'<text class="a" x="0" y="20" textLength="{count * 12.2:g}" clip-path="b">{text}</text>'
    assert screenshot.self_contained(given) == (
        f'<text class="a" x="{x:g}" y="20" textLength="{length:g}" clip-path="b">{shown}</text>'
    )
