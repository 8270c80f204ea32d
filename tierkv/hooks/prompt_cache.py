"""mlx-lm's ``LRUPromptCache`` with the vaults behind it: the same interface, more hits, less memory.

All methods run on the server's generation thread. What mlx-lm itself answers stands whenever anything here fails.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from tierkv.errors import TierKVError, UnsupportedState
from tierkv.handoff.client import HandoffClient
from tierkv.hooks.counters import EvictionReason, HitKind, HotCounters
from tierkv.hooks.demote import Demoter
from tierkv.hooks.memory import MemoryRule
from tierkv.hooks.mlx_models import ModelBook, ModelKey
from tierkv.hooks.promote import Promoter
from tierkv.hooks.prompt_tokens import as_ids, media_in
from tierkv.hooks.voice import Voice
from tierkv.state import mlx_cache

log = logging.getLogger("tierkv")

Found = tuple[Any, Sequence[int], HitKind]
UNBOUNDED_BYTES = 1 << 62
UNSOUND = frozenset({"position_mismatch", "rows_dropped"})
# Why an entry leaves, for people.
WHY_EVICTED: dict[EvictionReason, str] = {
    "cache_full": "the engine's prompt cache was full",
    "over_threshold": "memory was over its threshold",
}
# Reasons that are over in a moment: the agent was slow, still hashed the weights, or took other state just then.
PASSING = frozenset({"no_agent", "identity_pending", "mover_full", "queue_full"})
# Offers made again with one insert: each may cost the offer's budget when the agent turns out slow again.
AGAIN_AT_ONCE = 4
# An engine that has nothing to do compares memory with the mark so often, and lets one entry go at a time: a request
# that comes meanwhile waits for no more than that.
IDLE_CHECK_S = 0.25
MAX_WAITING = 64


@dataclass(slots=True)
class Tiers:
    """What a tiered prompt cache works with."""

    client: HandoffClient
    book: ModelBook
    demoter: Demoter
    promoter: Promoter
    counters: HotCounters
    memory: MemoryRule = field(default_factory=MemoryRule)
    clock: Callable[[], float] = time.perf_counter
    voice: Voice = field(default_factory=Voice)

    def say(self, topic: str, text: str, *, level: int = logging.WARNING) -> None:
        self.voice.say(topic, text, level=level)

    def setting(self, name: str) -> Any:
        return self.client.settings[name]


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A prompt that the engine started to compute."""

    key: ModelKey
    n_tokens: int
    have: int
    started: float


class TieredPromptCache:
    """Put in front of ``LRUPromptCache`` by ``tiered_cache_class``; not complete without it."""

    tiers: Tiers
    _trie: Any
    _lru: Any
    max_bytes: int
    _prefill: _Prefill | None = None
    _newest: tuple[ModelKey, list[int]] | None = None
    _checked_s: float = float("-inf")
    _evicting: EvictionReason = "cache_full"

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._trie = _watched(type(self._trie), self._leaving)
        self._waiting: deque[tuple[ModelKey, list[int]]] = deque(maxlen=MAX_WAITING)

    # --- looking up -----------------------------------------------------------------------------

    def fetch_nearest_cache(self, model: ModelKey, tokens: list[int]) -> tuple[Any, Sequence[int]]:
        """The longest reusable state and the tokens after it, of which there is always at least one."""
        cache, rest, kind = self._own(model, tokens)
        own = have = len(tokens) - len(rest)
        asked = self.tiers.client.restores_asked
        better, reason = self._promoted(model, tokens, cache, have)
        if better is not None:
            cache, have = better
            rest, kind = tokens[have:], "restored"
        elif have:
            self._touch(model, tokens, cache, have)
        self.tiers.counters.hit(kind)
        self._tell(model, tokens, own, have, reason, asked != self.tiers.client.restores_asked)
        self._prefill = _Prefill(model, len(tokens), have, self.tiers.clock())
        return cache, rest

    def _own(self, model: ModelKey, tokens: list[int]) -> Found:
        try:
            cache, rest = cast("Any", super()).fetch_nearest_cache(model, tokens)
            if not rest and tokens:
                return self._uncovered(model, tokens, cache)
        except Exception as error:  # mlx-lm's own lookup: an unlucky lookup must not end the generation thread
            self.tiers.say("lookup", f"mlx-lm's own lookup failed: {type(error).__name__}: {error}")
            return None, tokens, "none"
        if cache is None or not self._sound(model, cache, len(tokens) - len(rest)):
            return None, tokens, "none"
        return cache, rest, "shorter" if self._stored(model, tokens[: len(tokens) - len(rest)]) else "longer"

    def _sound(self, model: ModelKey, cache: Any, have: int) -> bool:
        """Whether mlx-lm's own answer is state after ``have`` tokens: it cuts every class alike, some cannot be."""
        try:
            mlx_cache.settle(cache, have, lag=int(self.tiers.book.drafts(model)))
        except UnsupportedState as error:
            if error.reason not in UNSOUND:
                return True  # a class that is not carried
            self.tiers.counters.refused(f"engine_{error.reason}")
            self.tiers.say("lookup", f"mlx-lm's own cache is not used: {error}")
            return False
        return True

    def _uncovered(self, model: ModelKey, tokens: list[int], cache: Any) -> Found:
        """A cache before the last token: asked to go on from a fully covered prompt, mlx-lm's server dies."""
        wanted = len(tokens) - 1
        nothing: Found = (None, tokens, "none")
        if wanted and can_trim_prompt_cache(cache):
            extra = _position(cache, len(tokens)) - wanted
            if extra == 0 or (extra == 1 and trim_prompt_cache(cache, 1) == 1):
                return (cache, tokens[wanted:], "exact") if self._sound(model, cache, wanted) else nothing
        cache, rest = cast("Any", super()).fetch_nearest_cache(model, tokens[:wanted])
        have = wanted - len(rest)
        if cache is None or not have or not self._sound(model, cache, have):
            return nothing
        return cache, tokens[have:], "shorter"

    def _stored(self, model: ModelKey, tokens: list[int]) -> bool:
        try:
            self._trie.get(model, tokens)
        except KeyError:
            return False
        return True

    def _promoted(
        self, model: ModelKey, tokens: list[int], cache: Any, have: int
    ) -> tuple[tuple[Any, int] | None, str]:
        """What the vaults have beyond ``have``, and why it could not be used."""
        try:
            return self.tiers.promoter.promote(model, tokens, cache, have), ""
        except UnsupportedState as error:
            reason = error.reason
            self.tiers.say("promote", f"not restored: {error}", level=logging.INFO)
        except Exception as error:
            reason = "hook_error"
            self._failed("promote", error)
        self.tiers.counters.missed(reason)
        return None, reason

    def _tell(self, model: ModelKey, tokens: list[int], own: int, have: int, reason: str, asked: bool) -> None:
        """The agent can explain this request."""
        try:
            handle = self.tiers.book.handle_of(model, len(tokens) - 1)
            told = reason or ("" if asked else "covered" if own == len(tokens) - 1 else "too_short")
            self.tiers.client.served(handle, len(tokens), have=own, position=have, reason=told, asked=asked)
        except Exception as error:
            self._failed("tell", error)

    def _touch(self, model: ModelKey, tokens: list[int], cache: Any, have: int) -> None:
        try:
            if have >= int(self.tiers.setting("min_store_tokens")):
                ids = as_ids(tokens)
                self.tiers.client.hit(self.tiers.book.of_cache(model, cache).handle, ids, have, media_in(ids))
        except UnsupportedState:
            pass  # its entries were not stored either
        except Exception as error:
            self._failed("touch", error)

    # --- storing --------------------------------------------------------------------------------

    def insert_cache(self, model: ModelKey, tokens: list[int], prompt_cache: list[Any], **named: Any) -> None:
        """As mlx-lm's; then the agent gets what it wants of the entry, and memory is kept below the threshold."""
        self._note_prefill(model, tokens)
        cast("Any", super()).insert_cache(model, tokens, prompt_cache, **named)
        try:
            if self.tiers.setting("demote") == "ahead":
                self._demote_ahead(model, tokens, prompt_cache)
            self._newest = model, tokens
            self._relieve_memory()
            self._note_size()
        except Exception as error:
            self._failed("insert", error)

    def idle(self) -> None:
        """The engine has nothing to do: memory is kept below a mark that was lowered since. Never raises."""
        now = self.tiers.clock()
        if now - self._checked_s < IDLE_CHECK_S:
            return
        try:
            self._relieve_memory(most=1)
            self._note_size()
        except Exception as error:
            self._failed("idle", error)

    def _leaving(self, model: ModelKey, tokens: list[int], entry: Any) -> None:
        """mlx-lm evicts ``entry``: the last moment at which its state can be had.

        Asked again also when it was handed over ahead: only the agent knows whether it arrived and was stored. Where
        it was, that costs one question.
        """
        self.tiers.counters.evicted(self._evicting, int(entry.nbytes))
        self._demote(model, tokens, entry.prompt_cache, WHY_EVICTED[self._evicting])

    def _demote_ahead(self, model: ModelKey, tokens: list[int], cache: Any) -> None:
        """The entry is offered; and when the agent answers, so are those that it did not answer for before."""
        if self._demote(model, tokens, cache) in PASSING:
            self._waiting.append((model, tokens))
            return
        for _ in range(min(AGAIN_AT_ONCE, len(self._waiting))):
            earlier = self._waiting[0]
            if self._stored(*earlier) and self._demote(*earlier, self._trie.get(*earlier).prompt_cache) in PASSING:
                return
            self._waiting.popleft()

    def _demote(self, model: ModelKey, tokens: list[int], cache: Any, leaving: str = "") -> str:
        try:
            reason = self.tiers.demoter.demote(model, tokens, cache, leaving)
        except UnsupportedState as error:
            reason = error.reason
            self.tiers.say("demote", f"not handed over: {error}", level=logging.INFO)
        except Exception as error:
            self._failed("demote", error)
            reason = "hook_error"
        if reason:
            self.tiers.counters.refused(reason)
        return reason

    def _relieve_memory(self, most: int = sys.maxsize) -> None:
        """Older entries go, ``most`` of them, while that can bring memory below the threshold; the newest stays."""
        self._checked_s = self.tiers.clock()
        if self._newest is None or not self._stored(*self._newest):
            return
        model, tokens = self._newest
        newest, held = self._trie.get(model, tokens), self._held_bytes()
        verdict = self.tiers.memory.check(
            float(self.tiers.setting("memory_threshold")), cache_bytes=held, evictable_bytes=held - newest.nbytes
        )
        self.tiers.counters.note = verdict.note
        self.tiers.say("threshold", verdict.note)
        if not verdict.evict_bytes:
            return
        self._lru.remove(model, tokens)
        self._evicting = "over_threshold"
        try:
            while held - self._held_bytes() < verdict.evict_bytes and len(self._lru) and most:
                cast("Any", self).trim_to(n_sequences=len(self._lru) - 1)
                most -= 1
        finally:
            self._evicting = "cache_full"
            self._lru.push(model, tokens, newest.cache_type)
        mx.clear_cache()
        self.tiers.memory.evicted(held - self._held_bytes())

    # --- numbers --------------------------------------------------------------------------------

    def _held_bytes(self) -> int:
        return int(cast("Any", self).nbytes)

    def _note_size(self) -> None:
        counters = self.tiers.counters
        orders = getattr(self._lru, "_lrus", {})
        counters.entries = len(self._lru)
        counters.tokens = sum(len(tokens) for order in orders.values() for _, tokens in order)
        counters.size_bytes = self._held_bytes()
        counters.cap_bytes = self.max_bytes if self.max_bytes < UNBOUNDED_BYTES else 0
        counters.device_bytes = int(mx.get_active_memory())

    def _note_prefill(self, model: ModelKey, tokens: list[int]) -> None:
        """mlx-lm stores a prompt without its last token as soon as it is computed: a measured prefill."""
        started, self._prefill = self._prefill, None
        if started is not None and started.key == model and len(tokens) == started.n_tokens - 1 > started.have:
            seconds = self.tiers.clock() - started.started
            handle = self.tiers.book.handle_of(model, len(tokens))
            number = handle.id if handle is not None else None
            self.tiers.counters.prefilled(len(tokens) - started.have, seconds, start=started.have, model=number)

    def _failed(self, doing: str, error: Exception) -> None:
        known = isinstance(error, TierKVError)
        self.tiers.say(doing, f"{doing} failed, the engine goes on: {type(error).__name__}: {error}")
        log.debug("%s failed", doing, exc_info=None if known else error)


def _position(cache: Any, otherwise: int) -> int:
    try:
        said = mlx_cache.position(cache)
    except UnsupportedState:  # a class that is not carried can still be trimmed
        said = None
    return otherwise if said is None else said


def _watched(trie_class: type, leaving: Callable[[ModelKey, list[int], Any], None]) -> Any:
    """An empty trie of mlx-lm's class that tells of every ``pop``; only evictions pop."""

    class WatchedTrie(trie_class):
        def pop(self, model: ModelKey, tokens: list[int]) -> Any:
            entry = super().pop(model, tokens)
            try:
                leaving(model, tokens, entry)
            except Exception:
                log.debug("an eviction could not be followed", exc_info=True)
            return entry

    return WatchedTrie()


def tiered_cache_class(base: type, tiers: Tiers) -> type:
    """A subclass of mlx-lm's ``LRUPromptCache`` that uses ``tiers``.

    Raises UnsupportedState if ``base`` is not built as 0.31.1 to 0.32 build it.
    """
    probe: Any = base()
    missing = [
        path
        for path in ("_trie.pop", "_trie.get", "_lru.remove", "_lru.push", "trim_to", "nbytes", "max_bytes",
                     "fetch_nearest_cache", "insert_cache")
        if not _has(probe, path)
    ]  # fmt: skip
    if missing:
        raise UnsupportedState("engine_version", f"this mlx-lm's prompt cache has no {', '.join(missing)}")
    return type("TieredPromptCache", (TieredPromptCache, base), {"tiers": tiers})


def _has(target: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(target, name):
            return False
        target = getattr(target, name)
    return True
