"""The kinds of value a key can hold, and the one way to declare a key with its explanation.

A validator here raises ``PydanticCustomError`` of type "tierkv" with a problem and a suggestion;
``tierkv.config.faults`` turns it into a ``Fault``.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from tierkv import units

Apply = Literal["live", "restart"]
Kind = Literal[
    "string", "integer", "fraction", "boolean", "size", "duration", "choice", "path", "host", "port", "list",
    "peer", "peers", "table",
]  # fmt: skip

_HOST = re.compile(r"^(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?$")
_ADDRESS = re.compile(r"^(?P<host>\[[^\]]+\]|[^:\[\]]+):(?P<port>\d{1,5})$")


def fault(problem: str, suggestion: str = "") -> PydanticCustomError:
    # PydanticCustomError formats its template with the context, so braces of a value are safe here.
    return PydanticCustomError("tierkv", "{problem}", {"problem": problem, "suggestion": suggestion})


def key(default: Any, doc: str, *, apply: Apply, kind: Kind) -> Any:
    """A pydantic Field whose schema entry says what the key is for and when a change takes effect.

    ``apply``: "live" (a running agent takes it over) or "restart". ``kind`` names the editor's input.
    """
    return Field(default, description=doc, json_schema_extra={"apply": apply, "kind": kind})


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _negative(value: object) -> bool:
    """Whether it is a number below 0, with a unit or without."""
    if isinstance(value, str):
        return re.match(r"\s*-\s*\d", value) is not None
    return isinstance(value, int | float) and value < 0


class _Bounded:
    """Metadata of an annotation: a check before pydantic's own, and limits that the key table shows."""

    least: float
    most: float

    def check(self, value: object) -> object:
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))


@dataclass(frozen=True)
class Size(_Bounded):
    """An integer of bytes, written "24GiB" or as a plain number of bytes."""

    least: int
    most: int

    def check(self, value: object) -> int:
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise fault("is not a size", "write for example '4GiB' or '512MiB'")
        bounds = f"must be from {units.exact_size(self.least)} to {units.exact_size(self.most)}"
        if _negative(value):
            raise fault(bounds)
        try:
            size_bytes = units.parse_size(value)
        except (ValueError, OverflowError):
            raise fault("is not a size", "write for example '4GiB' or '512MiB'") from None
        if not self.least <= size_bytes <= self.most:
            hint = ""
            if isinstance(value, int) and 0 < value < min(self.least, 4096):
                hint = f"a number without a unit is bytes; did you mean '{value}GiB'?"
            raise fault(bounds, hint)
        return size_bytes


@dataclass(frozen=True)
class Duration(_Bounded):
    """A float of seconds, written "250ms", "5min" or as a plain number of seconds."""

    least: float
    most: float

    def check(self, value: object) -> float:
        if not isinstance(value, str) and not _number(value):
            raise fault("is not a duration", "write for example '30s', '250ms' or '5min'")
        bounds = f"must be from {units.exact_duration(self.least)} to {units.exact_duration(self.most)}"
        if _negative(value):
            raise fault(bounds)
        try:
            seconds = units.parse_duration(value)  # pyright: ignore[reportArgumentType]
        except (ValueError, OverflowError):
            raise fault("is not a duration", "write for example '30s', '250ms' or '5min'") from None
        if not self.least <= seconds <= self.most:
            hint = ""
            if _number(value) and self.least <= seconds / 1000 <= self.most:
                hint = f"the unit is seconds; did you mean '{value}ms'?"
            raise fault(bounds, hint)
        return seconds


@dataclass(frozen=True)
class Whole(_Bounded):
    """A whole number."""

    least: int
    most: int

    def check(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise fault("must be a whole number", _unquoted(value) or f"from {self.least} to {self.most}")
        if not self.least <= value <= self.most:
            raise fault(f"must be from {self.least} to {self.most}")
        return value


def _unquoted(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}(\.\d{1,18})?", value.strip()):
        return f"write it without quotes: {value.strip()}"
    return ""


@dataclass(frozen=True)
class Share(_Bounded):
    """A fraction above 0 and up to 1; per cent gets a suggestion."""

    least: float = 0.0
    most: float = 1.0

    def check(self, value: object) -> float:
        if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value)):
            raise fault("must be a fraction", f"write {float(match.group(1)) / 100:.2f} for {match.group(1)} %")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise fault("must be a fraction above 0 and up to 1", _unquoted(value) or "write for example 0.60")
        if not 0 < value <= 1:
            per_cent = 5 <= value <= 100
            hint = f"a fraction, not per cent: write {value / 100:.2f}" if per_cent else "for example 0.60"
            raise fault("must be above 0 and up to 1", hint)
        return float(value)


def split_address(text: str) -> tuple[str, int]:
    """Host and port of "nas.local:50051" or "[::1]:50051"; ValueError with a suggestion for anything else."""
    match = _ADDRESS.match(text.strip())
    if match is None or not 1 <= int(match.group("port")) <= 65535:
        raise ValueError(f"{text!r} is not an address; write host:port, for example nas.local:50051")
    host = match.group("host").strip("[]")
    _check_host(host)
    return host, int(match.group("port"))


def _check_host(host: str) -> None:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        if len(host) > 253 or not _HOST.match(host) or re.fullmatch(r"[\d.]+", host):
            raise ValueError(f"{host!r} is not a host name or an IP address") from None


def _host(value: object) -> str:
    if not isinstance(value, str):
        raise fault("must be a host name or an IP address in quotes", "for example '127.0.0.1' or 'nas.local'")
    if match := _ADDRESS.match(value.strip()):
        raise fault("holds a port as well", f"write host = '{match['host']}' and port = {match['port']}")
    if "://" in value:
        raise fault("must be a host, not a URL", f"write '{value.split('://', 1)[1].split('/')[0].split(':')[0]}'")
    host = value.strip().strip("[]")
    try:
        _check_host(host)
    except ValueError:
        raise fault("is not a host name or an IP address", "for example '127.0.0.1' or 'nas.local'") from None
    return host


def _address(value: object) -> str:
    if not isinstance(value, str):
        raise fault("must be host:port in quotes", "for example 'nas.local:50051'")
    try:
        split_address(value)
    except ValueError:
        raise fault("is not an address", "write host:port, for example 'nas.local:50051'") from None
    return value.strip()


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise fault("must be true or false", "without quotes" if isinstance(value, str) else "")
    return value


def _text(most: int) -> Callable[[object], str]:
    def check(value: object) -> str:
        if not isinstance(value, str):
            raise fault("must be text", f"put it in quotes: {str(value)!r}" if _number(value) else "put it in quotes")
        if len(value) > most:
            raise fault(f"must be at most {most} characters")
        if not value.isprintable():
            raise fault("holds control characters")
        return value

    return check


Fraction = Annotated[float, Share()]
Host = Annotated[str, BeforeValidator(_host)]
Port = Annotated[int, Whole(1, 65535)]
BindPort = Annotated[int, Whole(0, 65535)]
Address = Annotated[str, BeforeValidator(_address)]
Boolean = Annotated[bool, BeforeValidator(_boolean)]
Name = Annotated[str, BeforeValidator(_text(64))]
Text = Annotated[str, BeforeValidator(_text(4096))]


def _listed(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise fault("must be a list", f"write [{value!r}]" if isinstance(value, str) else "in square brackets")
    if len(value) > 256:
        raise fault("must have at most 256 entries")
    return tuple(value)


Listed = BeforeValidator(_listed)


@dataclass(frozen=True)
class OneOf:
    """Metadata of a text that is one of ``names``; a near miss gets a suggestion."""

    names: tuple[str, ...]

    def check(self, value: object) -> object:
        if value not in self.names:
            shown = ", ".join(name for name in self.names if name)
            context = {"problem": f"must be one of {shown}", "suggestion": "", "choices": list(self.names)}
            raise PydanticCustomError("tierkv", "{problem}", context)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))
