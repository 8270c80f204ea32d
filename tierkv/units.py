"""Sizes, durations and times as people write and read them; inside the program they are plain SI numbers."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_BINARY = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SHORT = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")

_EXACT_SIZES = (
    ("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10),
    ("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3),
)  # fmt: skip

_SECONDS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_size(text: str | int) -> int:
    """Bytes in ``"24GiB"``, ``"1.5 GB"``, ``"512M"`` (binary, as in Java and Docker) or ``4096``.

    Raises ValueError, with a suggestion, for anything else.
    """
    if isinstance(text, bool):
        raise ValueError("a size is a number with a unit, such as '24GiB'")
    if isinstance(text, int):
        if text < 0:
            raise ValueError("a size cannot be negative")
        return text
    match = _SIZE.match(text)
    factors = {**_BINARY, **_DECIMAL, **_SHORT}
    if match is None or match.group(2).lower() not in factors:
        raise ValueError(f"{text!r} is not a size; write for example '24GiB' or '512MiB'")
    return int(float(match.group(1)) * factors[match.group(2).lower()])


def parse_duration(text: str | float) -> float:
    """Seconds in ``"250ms"``, ``"10s"``, ``"5min"``, ``"2h"``, ``"7d"`` or ``1.5``.

    Raises ValueError, with a suggestion, for anything else.
    """
    if isinstance(text, bool):
        raise ValueError("a duration is a number with a unit, such as '30s'")
    if isinstance(text, int | float):
        if not 0 <= text < float("inf"):
            raise ValueError("a duration cannot be negative or infinite")
        return float(text)
    match = _SIZE.match(text)
    if match is None or match.group(2).lower() not in _SECONDS:
        raise ValueError(f"{text!r} is not a duration; write for example '30s' or '5min'")
    return float(match.group(1)) * _SECONDS[match.group(2).lower()]


def format_size(size_bytes: float) -> str:
    """A size in at most 8 columns: ``"   0 B"`` style without padding, ``"3.4 GiB"``, ``"512 MiB"``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def exact_size(size_bytes: int) -> int | str:
    """The size as one writes it, ``"24GiB"`` or ``"24GB"``, in the largest unit that loses nothing; the number itself
    where none fits. ``parse_size`` reads it back."""
    fitting = [(size_bytes // factor, unit) for unit, factor in _EXACT_SIZES if size_bytes % factor == 0]
    if size_bytes <= 0 or not fitting:
        return size_bytes
    count, unit = min(fitting, key=lambda one: one[0])
    return f"{count}{unit}"


def exact_duration(seconds: float) -> float | str:
    """The duration as one writes it, ``"30d"``, ``"90s"``, ``"250ms"``, in the largest unit that loses nothing; the
    number itself for 0 and where none fits. ``parse_duration`` reads it back."""
    if not 0 < seconds < float("inf"):
        return int(seconds) if seconds == 0 else seconds
    for unit in ("d", "h", "min", "s"):
        if seconds % _SECONDS[unit] == 0:
            return f"{int(seconds / _SECONDS[unit])}{unit}"
    text = f"{seconds:.15g}s" if seconds > 1 else f"{seconds * 1e3:.15g}ms"
    return text if _SIZE.match(text) and parse_duration(text) == seconds else seconds


def format_duration(seconds: float) -> str:
    """A duration in at most 7 columns: ``"850 us"``, ``"12.3 ms"``, ``"4.1 s"``, ``"3m 20s"``, ``"2d 4h"``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.0995 else f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = int(seconds)
    for big, small, big_name, small_name in (
        (86400, 3600, "d", "h"),
        (3600, 60, "h", "m"),
        (60, 1, "m", "s"),
    ):
        if whole >= big:
            return f"{whole // big}{big_name} {whole % big // small}{small_name}"
    return f"{whole} s"


def format_rate(bytes_per_s: float) -> str:
    """A rate, such as ``"118 MiB/s"``."""
    return f"{format_size(bytes_per_s)}/s"


def rfc3339(unix_s: float) -> str:
    """A wall-clock time in UTC with milliseconds, such as ``"2026-05-03T07:43:08.120Z"``."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
