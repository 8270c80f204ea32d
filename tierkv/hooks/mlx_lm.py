"""Tiers for mlx-lm's own server: its prompt cache, with the vaults behind it.

    python -m tierkv.hooks.mlx_lm [--tierkv-socket PATH] -- --model MODEL [other arguments of mlx_lm.server]

``install`` puts a subclass of mlx-lm's ``LRUPromptCache`` (0.31.1 to 0.32) and one of its ``ModelProvider`` into
``mlx_lm.server``; nothing of mlx-lm is edited. Everything but the mover's thread runs on the server's generation
thread. Nothing here raises into the engine: whatever goes wrong is counted and logged, and the engine computes.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import mlx.core as mx

from tierkv import paths
from tierkv.errors import TierKVError, UnsupportedState
from tierkv.handoff.client import HandoffClient, ModelHandle
from tierkv.handoff.mover import Mover
from tierkv.hooks.counters import HotCounters
from tierkv.hooks.demote import Demoter
from tierkv.hooks.memory import MemoryRule
from tierkv.hooks.mlx_models import ModelBook, SeenFiles, seen_files
from tierkv.hooks.promote import Promoter
from tierkv.hooks.prompt_cache import TieredPromptCache, Tiers, tiered_cache_class
from tierkv.hooks.sampling import Sampler
from tierkv.hooks.voice import GRACE_S, reporter

log = logging.getLogger("tierkv")

# How long a server that ends waits for state that is on its way to the agent.
LEAVE_S = 5.0


@dataclass(slots=True)
class Installation:
    """Tiers in ``mlx_lm.server``; ``remove`` takes them out again."""

    server: ModuleType
    tiers: Tiers
    mover: Mover
    _replaced: dict[str, Any]

    def remove(self, leave_s: float = LEAVE_S) -> None:
        """What is on its way to the agent is given ``leave_s``; then mlx-lm is as it was."""
        for name, value in self._replaced.items():
            setattr(self.server, name, value)
        self.mover.drain(leave_s)
        self.mover.close()
        self.tiers.client.close()


def install(
    socket_path: Path | None = None,
    *,
    client: HandoffClient | None = None,
    memory: MemoryRule | None = None,
    server: ModuleType | None = None,
    grace_s: float = GRACE_S,
) -> Installation:
    """``mlx_lm.server`` makes tiered prompt caches from now on; for ``grace_s`` an absent agent is not spoken of.

    Raises UnsupportedState if this mlx-lm is built in another way, or runs on several ranks: each rank would decide
    by itself what to restore and to evict, and they must agree.
    """
    target = server if server is not None else importlib.import_module("mlx_lm.server")
    if mx.distributed.init().size() > 1:
        raise UnsupportedState("ranks", "mlx_lm.server runs on several ranks")
    agent = client or HandoffClient(socket_path or paths.handoff_socket(), "mlx-lm", engine_build())
    counters = HotCounters()
    mover = Mover(agent, report=lambda: report())
    book = ModelBook(agent)
    served = _Served(book)
    sampler = Sampler(agent, served.model)
    tiers = Tiers(
        agent,
        book,
        Demoter(agent, mover, book, counters, keys_are_counted=_keys_are_counted()),
        Promoter(agent, book, counters, restored=sampler.restored),
        counters,
        memory or MemoryRule(),
    )
    tiers.memory.kept = lambda: mover.pending_bytes
    report = reporter(agent, counters, grace_s=grace_s)
    names = [name for name in ("LRUPromptCache", "ModelProvider", "ResponseGenerator") if hasattr(target, name)]
    replaced = {name: getattr(target, name) for name in names}
    try:
        cache_class = tiered_cache_class(replaced["LRUPromptCache"], tiers)
    except UnsupportedState:
        mover.close()
        raise
    vars(target)["LRUPromptCache"] = cache_class
    vars(target)["ModelProvider"] = _provider_class(replaced["ModelProvider"], book, served)
    if hasattr(replaced.get("ResponseGenerator"), "_next_request"):
        vars(target)["ResponseGenerator"] = _idling_class(replaced["ResponseGenerator"], sampler)
    return Installation(target, tiers, mover, replaced)


def engine_build() -> str:
    """Versions that decide how state is computed, for the model's identity."""
    from mlx_lm import __version__

    return f"mlx-lm {__version__} mlx {metadata.version('mlx')}"


def _keys_are_counted() -> bool:
    """Whether this mlx-lm keys every entry by the tokens that its state has seen, as 0.31 and 0.32 do.

    Recurrent state says nothing of its position: only there the key's length stands for it.
    """
    from mlx_lm import __version__

    return __version__.startswith(("0.31.", "0.32."))


class _Served:
    """The model that the server has loaded last."""

    def __init__(self, book: ModelBook) -> None:
        self._book = book
        self.provider: Any = None

    def model(self, handle: ModelHandle) -> Any:
        """What the server serves now, where ``handle`` names a form of its caches; None otherwise."""
        if self.provider is None or not self._book.names(self.provider.model_key, handle):
            return None
        return self.provider.model


def _idling_class(base: type, sampler: Sampler) -> type:
    class IdlingResponseGenerator(base):
        """mlx-lm's ``ResponseGenerator``, whose generation thread gives cache and sampler the time it has left."""

        def _next_request(self, timeout: float | None = None) -> Any:
            request = super()._next_request(timeout)
            # Only without a batch under way does the server wait for a request at all.
            if request is None and timeout is not None:
                cache = getattr(self, "prompt_cache", None)  # gone while the server ends
                if isinstance(cache, TieredPromptCache):
                    cache.idle()
                sampler.idle()
            else:
                sampler.busy()
            return request

    return IdlingResponseGenerator


def _provider_class(base: type, book: ModelBook, served: _Served) -> type:
    class TieredModelProvider(base):
        """mlx-lm's ``ModelProvider``, which also tells the agent what it loaded."""

        def _load(self, model_path: str, adapter_path: Any = None, draft_model_path: Any = None) -> None:
            before = _seen_quietly((model_path, adapter_path, draft_model_path))
            super()._load(model_path, adapter_path, draft_model_path)
            try:
                from mlx_lm.models.cache import make_prompt_cache

                provider: Any = self
                fresh = make_prompt_cache(provider.model)
                if getattr(provider, "draft_model", None) is not None:
                    fresh = [*fresh, *make_prompt_cache(provider.draft_model)]
                book.loaded(provider.model_key, before, provider, fresh)
                served.provider = provider
            except Exception as error:
                log.warning("the model is served without tiers: %s: %s", type(error).__name__, error)

    return TieredModelProvider


def _seen_quietly(key: tuple[Any, ...]) -> SeenFiles | None:
    try:
        return seen_files(key)
    except (TierKVError, OSError):
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``mlx_lm.server`` with tiers until it ends. Returns the exit code: 0 after SIGTERM, 130 after ctrl-c.

    What ``mlx_lm.server`` raises passes through, also SystemExit.
    """
    options, server_arguments = _arguments(sys.argv[1:] if argv is None else argv)
    server = importlib.import_module("mlx_lm.server")
    sys.argv = ["mlx_lm.server", *server_arguments]
    installation = None
    try:
        socket_path = Path(options.tierkv_socket) if options.tierkv_socket else None
        installation = install(socket_path, grace_s=options.tierkv_grace)
    except UnsupportedState as error:
        log.warning("%s; the server runs without tiers", error)
    interrupted = False

    def interrupt(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal handler's signature
        """Asked to end, a server does so in order: what is on its way still arrives."""
        nonlocal interrupted
        interrupted = interrupted or signum == signal.SIGINT
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        server.main()
    except KeyboardInterrupt:
        pass
    finally:
        if installation is not None:
            installation.remove()
    return 130 if interrupted else 0


def _arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m tierkv.hooks.mlx_lm", description="mlx_lm.server with TierKV behind its prompt cache."
    )
    parser.add_argument("--tierkv-socket", metavar="PATH", help="the inference agent's socket")
    parser.add_argument(
        "--tierkv-grace", metavar="S", type=float, default=GRACE_S, help="say nothing of an absent agent for so long"
    )
    parser.add_argument("server", nargs=argparse.REMAINDER, help="-- and the arguments of mlx_lm.server")
    options = parser.parse_args(list(argv))
    rest = options.server[1:] if options.server[:1] == ["--"] else options.server
    return options, rest


def entry() -> None:
    """Runs ``main`` and ends the process without C++ destructors: MLX's worker threads make them abort (mlx 0.32.4).

    The exit code is the server's own, 1 after an exception.
    """
    try:
        code = main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            sys.stderr.write(left.code + "\n")
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
