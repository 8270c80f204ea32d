"""Tiers for EXO: its ``KVPrefixCache``, with the vaults behind it.

``hook_cache`` and ``hook_loader`` are called by ``exo_boot`` right after EXO's own modules are imported, in whichever
process that happens. The methods of the class are wrapped and always call what was there; EXO's exceptions pass, the
hook's own never reach EXO. Threads and sockets exist only once a runner has made a prefix cache.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from tierkv import paths
from tierkv.errors import UnsupportedState
from tierkv.handoff.client import HandoffClient
from tierkv.hooks import exo_model
from tierkv.hooks.exo_entries import CLASS, Shape
from tierkv.hooks.exo_query import Query, Tiered
from tierkv.hooks.exo_ranks import CALLERS, Ranks
from tierkv.hooks.exo_tiers import ExoTiers
from tierkv.hooks.memory import MemoryRule

log = logging.getLogger("tierkv")

BOOTSTRAP = "exo.worker.runner.bootstrap"
ALL_RANKS_HOOKED = "TIERKV_ALL_RANKS_HOOKED"
ATTRIBUTE = "_tierkv"
# A runner is not asked for anything before its cache is made; an agent that is there answers within this.
START_S = 1.0
_WRAPPED = (
    "__init__", "clear", "add_kv_cache", "update_kv_cache", "get_kv_cache", "_evict_if_needed",
)  # fmt: skip


@dataclass(slots=True)
class Hook:
    """The wraps of one cache module; ``remove`` takes them off again."""

    module: Any
    shape: Shape
    make_tiers: Callable[[], ExoTiers]
    callers: frozenset[str] = CALLERS
    tiers: ExoTiers | None = None
    _replaced: dict[str, Any] | None = None
    _pressure: Callable[[], float] | None = None

    def started(self) -> ExoTiers:
        if self.tiers is None:
            self.tiers = self.make_tiers()
        return self.tiers

    def remove(self) -> None:
        """EXO's class and module are as they were; what is on its way to the agent still leaves."""
        for name, method in (self._replaced or {}).items():
            setattr(getattr(self.module, CLASS), name, method)
        if self._pressure is not None:
            self.module.get_memory_used_percentage = self._pressure
        if self.tiers is not None:
            self.tiers.give_back_threshold()
            self.tiers.close()


def hook_cache(
    module: ModuleType,
    *,
    client: Callable[[], HandoffClient] | None = None,
    all_ranks_hooked: bool | None = None,
    memory: MemoryRule | None = None,
    callers: frozenset[str] = CALLERS,
) -> Hook | None:
    """EXO's prefix caches have tiers from now on; None, said in one line, if this EXO's are not as the hook knows."""
    log_through_exo()
    try:
        shape = Shape.of(module)
    except Exception as error:
        reason = str(error) if isinstance(error, UnsupportedState) else f"{type(error).__name__}: {error}"
        log.warning("%s; EXO runs without tiers", reason)
        return None
    hooked = os.environ.get(ALL_RANKS_HOOKED) == "1" if all_ranks_hooked is None else all_ranks_hooked

    def make_tiers() -> ExoTiers:
        return ExoTiers(module, shape, (client or _connect)(), all_ranks_hooked=hooked, memory=memory)

    hook = Hook(module, shape, make_tiers, callers)
    _wrap(hook)
    return hook


def _connect() -> HandoffClient:
    return HandoffClient(paths.handoff_socket(), "exo", exo_model.engine_build())


def hook_loader(module: ModuleType, hook: Callable[[], Hook | None]) -> None:
    """The hook knows the model that EXO loads, and its files as they were then."""
    if not all(callable(getattr(module, name, None)) for name in ("load_mlx_items", "build_model_path")):
        log.warning("this EXO loads models in another way; it runs without tiers")
        return

    def loaded(shard: Any, folder: Path, files: Any) -> None:
        found = hook()
        if found is not None:
            _guarded(found, "model", lambda: found.started().loaded(shard, folder, files))

    target: Any = module
    target.load_mlx_items = exo_model.following(target.load_mlx_items, target.build_model_path, loaded)


def _guarded(hook: Hook, doing: str, call: Callable[[], Any]) -> Any:
    """What ``call`` gives; None when it fails."""
    try:
        return call()
    except Exception as error:
        if hook.tiers is not None:
            hook.tiers.failed(doing, error)
        else:
            log.warning("%s failed, EXO goes on: %s: %s", doing, type(error).__name__, error)
        return None


def _wrap(hook: Hook) -> None:
    target: Any = getattr(hook.module, CLASS)
    hook._replaced = {name: getattr(target, name) for name in _WRAPPED if hasattr(target, name)}
    makers = {
        "__init__": _init, "clear": _clear, "add_kv_cache": _add, "update_kv_cache": _update, "get_kv_cache": _get,
        "_evict_if_needed": _evict,
    }  # fmt: skip
    for name, original in hook._replaced.items():
        setattr(target, name, functools.wraps(original)(makers[name](hook, original)))
    original_pressure: Callable[[], float] = hook.module.get_memory_used_percentage
    hook._pressure = original_pressure

    @functools.wraps(original_pressure)
    def pressure() -> float:
        driven = hook.tiers.pressure if hook.tiers is not None else None
        said = _guarded(hook, "threshold", driven) if driven is not None else None
        return original_pressure() if said is None else said

    hook.module.get_memory_used_percentage = pressure


def _tiered(hook: Hook, cache: Any) -> Tiered | None:
    """What is known of this cache; None if it was made before the hook, or is not whole."""
    tiered = getattr(cache, ATTRIBUTE, None)
    return tiered if tiered is not None and hook.started().usable(tiered) else None


def _init(hook: Hook, original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **named: Any) -> None:  # noqa: N807
        original(self, *args, **named)

        def attach() -> None:
            tiers = hook.started()
            ranks = Ranks(getattr(self, "_group", None), hooked=tiers.all_ranks_hooked, callers=hook.callers)
            setattr(self, ATTRIBUTE, Tiered(self, ranks))
            tiers.several_ranks = tiers.several_ranks or not ranks.alone
            if not ranks.alone and not tiers.all_ranks_hooked:
                tiers.voice.say("ranks", "several ranks, not known to be all hooked: nothing is restored")
            # The first prompt should find an agent that is there.
            tiers.client.wait_available(START_S if tiers.client.socket_path.exists() else 0.0)

        _guarded(hook, "attach", attach)

    return __init__


def _clear(_hook: Hook, original: Callable[..., None]) -> Callable[..., None]:
    def clear(self: Any) -> None:
        original(self)
        tiered = getattr(self, ATTRIBUTE, None)
        if tiered is not None:
            tiered.forget_gone()

    return clear


def _add(hook: Hook, original: Callable[..., Any]) -> Callable[..., Any]:
    def add_kv_cache(self: Any, *args: Any, **named: Any) -> Any:
        tiered = getattr(self, ATTRIBUTE, None)
        if tiered is None:
            return original(self, *args, **named)
        tiered.adding = True
        try:
            result = original(self, *args, **named)
        finally:
            tiered.adding = False
        _stored(hook, self, len(self.caches) - 1, named)
        return result

    return add_kv_cache


def _update(hook: Hook, original: Callable[..., Any]) -> Callable[..., Any]:
    def update_kv_cache(self: Any, index: int, *args: Any, **named: Any) -> Any:
        tiered = _guarded(hook, "update", lambda: _tiered(hook, self))
        old = _guarded(hook, "update", lambda: hook.started().before_update(tiered, index)) if tiered else None
        result = original(self, index, *args, **named)
        if tiered is not None and old is not None:
            _guarded(hook, "update", functools.partial(hook.started().overwritten, tiered, *old, index))
        old = None
        _stored(hook, self, index, named)
        return result

    return update_kv_cache


def _stored(hook: Hook, cache: Any, index: int, named: dict[str, Any]) -> None:
    def stored() -> None:
        tiered = _tiered(hook, cache)
        if tiered is not None:
            hook.started().stored(tiered, index, float(named.get("prefill_tps") or 0.0))

    _guarded(hook, "store", stored)


def _get(hook: Hook, original: Callable[..., Any]) -> Callable[..., Any]:
    def get_kv_cache(self: Any, model: Any, prompt_tokens: Any, *args: Any, **named: Any) -> Any:
        def ask() -> Any:
            return original(self, model, prompt_tokens, *args, **named)

        first = ask()

        def better() -> Any:
            tiered = _tiered(hook, self)
            if tiered is None:
                return None
            query = Query(model, prompt_tokens, _regions(hook, args, named))
            return hook.started().found(tiered, query, first, ask)

        found = _guarded(hook, "restore", better)
        return first if found is None else found

    return get_kv_cache


def _regions(hook: Hook, args: tuple[Any, ...], named: dict[str, Any]) -> Sequence[Any]:
    """The query's media regions, however they were passed."""
    given = dict(zip(hook.shape.get_parameters[2:], args, strict=False)) | named
    return cast("Sequence[Any]", given.get("media_regions") or ())


def _evict(hook: Hook, original: Callable[..., None]) -> Callable[..., None]:
    def _evict_if_needed(self: Any, *args: Any, **named: Any) -> None:
        ran = False

        def loop() -> None:
            nonlocal ran
            ran = True
            original(self, *args, **named)

        tiered = _guarded(hook, "evict", lambda: _tiered(hook, self))
        if tiered is not None and self.caches:
            _evict_guarded(hook, tiered, loop)
        if not ran:
            loop()

    return _evict_if_needed


def _evict_guarded(hook: Hook, tiered: Tiered, loop: Callable[[], None]) -> None:
    """EXO's own exceptions pass; the hook's do not."""
    failure: list[Exception] = []

    def watched() -> None:
        try:
            loop()
        except Exception as error:
            failure.append(error)

    _guarded(hook, "evict", lambda: hook.started().evict(tiered, watched, adding=tiered.adding))
    if failure:
        raise failure[0]


class _ThroughExo(logging.Handler):
    """TierKV's log lines go where EXO's runner logs; looked up for each line, since a runner replaces its logger."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = getattr(sys.modules.get(BOOTSTRAP), "logger", None)
        try:
            if logger is not None:
                logger.log(record.levelname, "TierKV: " + record.getMessage())
            else:
                sys.stderr.write(f"TierKV: {record.getMessage()}\n")
        except Exception:
            self.handleError(record)


def log_through_exo() -> None:
    """Once a process."""
    if not any(isinstance(each, _ThroughExo) for each in log.handlers):
        log.addHandler(_ThroughExo())
        log.setLevel(logging.INFO)
        log.propagate = False
