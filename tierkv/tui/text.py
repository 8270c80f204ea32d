"""Text from the network made harmless, and numbers in few columns.

Names, errors and messages come from other machines and are hostile until cleaned: nothing here or above is ever parsed
as markup, and what could move the cursor, hide text or turn its direction is removed.
"""

from __future__ import annotations

import math
import unicodedata
from datetime import datetime

from rich.cells import cell_len, set_cell_size

UNKNOWN = "-"
MAX_MARKS = 2
"""Combining marks kept on one character; more of them only pile up over other lines."""

_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_BLANKS = frozenset("\u115f\u1160\u3164\uffa0")  # letters without ink
_LONGEST = 4096


def clean(text: str) -> str:
    """``text`` on one line, without control, format (bidi, zero-width, tags), private and unassigned characters."""
    text = text[:_LONGEST]
    if text.isascii() and text.isprintable():
        return text
    kept: list[str] = []
    marks = 0
    for char in text:
        if char in "\t\n\r\v\f":
            kept.append(" ")
            continue
        category = unicodedata.category(char)
        if category in _INVISIBLE or char in _BLANKS or "\ufe00" <= char <= "\ufe0f":
            continue
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if marks > MAX_MARKS or (marks and not kept):
            continue
        kept.append(" " if category == "Zs" else char)
    return "".join(kept)


def ascii_only(text: str) -> str:
    """``text`` for a terminal that shows ASCII only; what it cannot show becomes ``?``."""
    return text if text.isascii() else "".join(char if char.isascii() else "?" for char in text)


def fit(text: str, width: int, ellipsis: str = "…") -> str:
    """Cleaned ``text`` in exactly ``width`` terminal cells, cut with an ellipsis or padded on the right."""
    text = clean(text)
    if width <= 0:
        return ""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    kept = width - cell_len(ellipsis)
    return set_cell_size(text, kept) + ellipsis if kept > 0 else set_cell_size(text, width)


def wrap(text: str, width: int, lines: int, ellipsis: str = "…") -> list[str]:
    """Cleaned ``text`` broken at spaces into at most ``lines`` lines of at most ``width`` cells; the last is cut."""
    rows: list[str] = []
    rest = clean(text).split()
    while rest and len(rows) < lines - 1:
        row = rest.pop(0)
        while rest and cell_len(row) + 1 + cell_len(rest[0]) <= width:
            row += " " + rest.pop(0)
        rows.append(row if cell_len(row) <= width else fit(row, width, ellipsis))
    if rest:
        last = " ".join(rest)
        rows.append(last if cell_len(last) <= width else fit(last, width, ellipsis))
    return rows or [""]


def short_size(size_bytes: float | None) -> str:
    """A size in at most 4 columns with binary units: ``"512M"``, ``"3.4G"``, ``"12G"``, ``"0"``."""
    if size_bytes is None:
        return UNKNOWN
    value = float(size_bytes)
    if value < 1:
        return "0"
    for unit in ("B", "K", "M", "G", "T"):
        if value < 9.95 and unit not in ("B", "K"):
            return f"{value:.1f}{unit}"
        if value < 999.5:
            return f"{value:.0f}{unit}"
        value /= 1024
    return f"{value:.0f}P"


def short_rate(per_s: float | None) -> str:
    """Things a second in at most 5 columns: ``"0"``, ``"0.3"``, ``"12"``, ``"1.2k"``."""
    if per_s is None:
        return UNKNOWN
    if per_s < 0.005:
        return "0"
    if per_s < 9.95:
        return f"{per_s:.1f}" if per_s >= 0.095 else f"{per_s:.2f}"
    return f"{per_s:.0f}" if per_s < 999.5 else short_count(per_s)


def short_count(count: float | None) -> str:
    """A count in at most 5 columns: ``"940"``, ``"12.3k"``, ``"940k"``, ``"1.2M"``."""
    if count is None:
        return UNKNOWN
    value = float(count)
    if value < 999.5:
        return f"{value:.0f}"
    for unit in ("k", "M", "G", "T"):
        value /= 1000
        if value < 99.95:
            return f"{value:.1f}{unit}"
        if value < 999.5:
            return f"{value:.0f}{unit}"
    return f"{value:.0f}T"


def short_duration(seconds: float | None) -> str:
    """A duration in at most 6 columns: ``"850us"``, ``"1.2ms"``, ``"340ms"``, ``"4.1s"``, ``"12m"``, ``"3h"``."""
    if seconds is None:
        return UNKNOWN
    for limit, factor, unit in ((0.9995e-3, 1e6, "us"), (0.9995, 1e3, "ms"), (99.95, 1.0, "s")):
        if seconds < limit:
            value = seconds * factor
            return f"{value:.1f}{unit}" if value < 9.95 and unit != "us" else f"{value:.0f}{unit}"
    for limit, factor, unit in ((5970.0, 60.0, "m"), (172800.0, 3600.0, "h")):
        if seconds < limit:
            return f"{seconds / factor:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def percent(fraction: float | None) -> str:
    """A fraction as at most 4 columns: ``"43%"``; only 1 itself is ``"100%"``, only 0 is ``"0%"``."""
    if fraction is None or not math.isfinite(fraction):
        return UNKNOWN
    whole = round(fraction * 100)
    if whole == 100 and fraction < 1:
        whole = 99
    if whole == 0 and fraction > 0:
        return "<1%"
    return f"{whole}%"


def age(seconds: float) -> str:
    """An age as people say it: ``"0.4 s"``, ``"12 s"``, ``"3 min"``, ``"5 h"``, ``"2 d"``."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 5970:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172800 else f"{seconds / 86400:.0f} d"


def clock(unix_s: float, seconds: bool = True) -> str:
    """Local wall-clock time, ``"14:20:07"`` or ``"14:20"``; blank where ``unix_s`` is no time at all."""
    try:
        return datetime.fromtimestamp(unix_s).strftime("%H:%M:%S" if seconds else "%H:%M")
    except (ValueError, OverflowError, OSError):
        return "--:--:--" if seconds else "--:--"


def counted(count: int, noun: str, plural: str = "") -> str:
    """``"1 node"``, ``"3 nodes"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"
