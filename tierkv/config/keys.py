"""One table of every key: where it stands, what it is for, what it may hold, when a change takes effect."""

from __future__ import annotations

import json
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tierkv import units
from tierkv.config.fields import Duration, OneOf, Share, Size, Whole
from tierkv.config.model import Config, Section

_AS_TEXT = ("string", "choice", "path", "host")


@dataclass(frozen=True, slots=True)
class Key:
    """``path`` is dotted; an entry of a list of tables is written ``cluster.kv_cold[].host``.

    ``kind`` is one of ``fields.Kind``; ``apply`` is "live" or "restart"; ``default`` is a plain value.
    """

    path: str
    kind: str
    apply: str
    doc: str
    default: object
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None

    @property
    def allowed(self) -> str:
        """What may stand there, for people: "4MiB to 64GiB", "ahead, on-evict", "0 to 65535"."""
        if self.choices:
            return ", ".join(choice for choice in self.choices if choice)
        if self.least is None or self.most is None:
            return {"boolean": "true, false", "fraction": "above 0, up to 1"}.get(self.kind, "")
        return f"{self.shown(self.least)} to {self.shown(self.most)}"

    def spelled(self, value: object) -> object:
        """The value as a person writes it into tierkv.toml: "24GiB", "30d"; the number where no unit is exact."""
        if self.kind == "size" and isinstance(value, int):
            return units.exact_size(value)
        if self.kind == "duration" and isinstance(value, int | float):
            return units.exact_duration(value)
        return value

    def shown(self, value: object) -> str:
        """The value as a person types it: as ``spelled``, text without quotes; empty for None."""
        if value is None:
            return ""
        if isinstance(value, bool | list):
            return json.dumps(value, ensure_ascii=False, default=str)
        return str(self.spelled(value))


@cache
def keys() -> tuple[Key, ...]:
    """Every key in the order of the model."""
    return tuple(_walk(Config, ""))


@cache
def by_path() -> Mapping[str, Key]:
    return {key.path: key for key in keys()}


def value_from_text(key: Key, text: str) -> object:
    """What a person typed, as TOML would hold it; a text that fits no other kind stays text and fails the check."""
    if key.kind in _AS_TEXT:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _walk(model: type[Section], prefix: str) -> Iterator[Key]:
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = _inner_section(info.annotation)
        extra: dict[str, Any] = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        if inner is None:
            yield _leaf(path, info, extra)
        elif extra["kind"] == "table":
            yield from _walk(inner, f"{path}.")
        else:
            yield _leaf(path, info, extra)
            yield from _walk(inner, f"{path}[]." if extra["kind"] == "peers" else f"{path}.")


def _leaf(path: str, info: FieldInfo, extra: Mapping[str, Any]) -> Key:
    limits = [part for part in _metadata(info) if isinstance(part, Size | Duration | Whole | Share)]
    choices = [part.names for part in _metadata(info) if isinstance(part, OneOf)]
    shown = [part for part in limits if not isinstance(part, Share)]
    return Key(
        path=path,
        kind=extra["kind"],
        apply=extra["apply"],
        doc=info.description or "",
        default=list(info.default) if isinstance(info.default, tuple) else info.default,
        choices=choices[0] if choices else (),
        least=shown[0].least if shown else None,
        most=shown[0].most if shown else None,
    )


def _metadata(info: FieldInfo) -> Iterator[object]:
    """The field's own metadata and that of an optional's inner type."""
    yield from info.metadata
    for argument in get_args(info.annotation):
        yield from getattr(argument, "__metadata__", ())


def _inner_section(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        for argument in get_args(annotation):
            if (found := _inner_section(argument)) is not None:
                return found
    return None
