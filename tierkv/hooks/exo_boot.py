"""Waits in every Python process of EXO's environment until EXO's own modules are imported, then hooks them.

Standard library only, and nothing of TierKV is imported before EXO is: this file is read at every start of that
Python. ``tierkv install`` puts a copy of it, with the engine-side modules of TierKV in ``vendor`` beside it, into
EXO's environment; a ``.pth`` line or ``sitecustomize`` imports it, so that spawned runner processes have it too.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

OFF_VALUES = ("0", "off", "false", "no")
SWITCH = "TIERKV_EXO"
MARK = "_tierkv_exo_finder"
CACHE_MODULE = "exo.worker.engines.mlx.cache"
LOADER_MODULE = "exo.worker.engines.mlx.utils_mlx"
RUNNER_MODULE = "exo.worker.runner.runner"
HERE = Path(__file__).resolve().parent

_hook: list[Any] = []


def install() -> None:
    """EXO's modules will be hooked as soon as they are imported. Once a process, never if ``TIERKV_EXO=0``."""
    if os.environ.get(SWITCH, "").lower() in OFF_VALUES or any(hasattr(each, MARK) for each in sys.meta_path):
        return
    sys.meta_path.insert(0, Finder())


class Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: it lets the others find EXO's modules and looks at them once they are there."""

    def __init__(self) -> None:
        setattr(self, MARK, True)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        after = _AFTER.get(fullname)
        if after is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Then(spec.loader, after)
                return spec
        return None


class _Then(importlib.abc.Loader):
    """A module's own loader, and something to do when it is done."""

    def __init__(self, loader: Any, after: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._after = after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            self._after(module)
        except Exception as error:
            sys.stderr.write(f"TierKV: EXO runs without tiers: {type(error).__name__}: {error}\n")


def _tierkv(name: str = "tierkv.hooks.exo") -> Any:
    """A module of TierKV: the copy beside this file, else the one that is installed."""
    vendor = HERE / "vendor"
    if name in sys.modules or not vendor.is_dir():
        return importlib.import_module(name)
    sys.path.insert(0, str(vendor))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(vendor))


def _settings() -> None:
    """What ``tierkv install`` wrote down holds unless the environment says otherwise."""
    place = HERE / "settings.json"
    if place.is_file():
        for name, value in json.loads(place.read_text(encoding="utf-8")).items():
            os.environ.setdefault(str(name), str(value))


def _cache_imported(module: ModuleType) -> None:
    _settings()
    hook = _tierkv().hook_cache(module)
    if hook is not None:
        _hook.append(hook)


def _loader_imported(module: ModuleType) -> None:
    _tierkv().hook_loader(module, lambda: _hook[-1] if _hook else None)


def _runner_imported(module: ModuleType) -> None:
    """A runner has a use for the time in which it waits; one of another make has none."""
    runner: Any = getattr(module, "Runner", None)
    main = getattr(runner, "main", None)
    if not callable(main):
        return

    @functools.wraps(main)
    def watched(self: Any, *args: Any, **named: Any) -> Any:
        try:
            _tierkv("tierkv.hooks.exo_idle").watch(self, _idler)
        except Exception as error:
            sys.stderr.write(f"TierKV: EXO runs without live samples: {type(error).__name__}: {error}\n")
        return main(self, *args, **named)

    runner.main = watched


def _idler() -> Any:
    tiers = _hook[-1].tiers if _hook else None
    return tiers.sampler if tiers is not None else None


_AFTER: dict[str, Callable[[ModuleType], None]] = {
    CACHE_MODULE: _cache_imported,
    LOADER_MODULE: _loader_imported,
    RUNNER_MODULE: _runner_imported,
}

if __name__ != "tierkv.hooks.exo_boot":
    install()
