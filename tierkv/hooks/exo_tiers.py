"""What TierKV does around EXO's prefix cache: one of these a runner process. Everything runs on its main thread.

Nothing here re-implements EXO's own matching or eviction: EXO's answer is taken first and asked for again when there
is more to find, and what left the cache is seen by comparing it before and after.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from tierkv.errors import TierKVError, UnsupportedState
from tierkv.handoff.client import FileSeen, HandoffClient, Media, ModelHandle, Restored
from tierkv.handoff.mover import Mover
from tierkv.hooks import exo_model
from tierkv.hooks.counters import HotCounters
from tierkv.hooks.demote import HandOver
from tierkv.hooks.exo_entries import (
    Entry,
    Shape,
    entry_at,
    entry_bytes,
    ids_of,
    media_of,
    whole,
)
from tierkv.hooks.exo_lookup import Answer, Lookup
from tierkv.hooks.exo_pressure import Pressure
from tierkv.hooks.exo_query import Query, Tiered
from tierkv.hooks.exo_state import standings
from tierkv.hooks.memory import MemoryRule
from tierkv.hooks.promote import Fetch
from tierkv.hooks.prompt_tokens import Ids
from tierkv.hooks.sampling import Sampler
from tierkv.hooks.voice import Voice, reporter

log = logging.getLogger("tierkv")

# A prefill of fewer tokens says little about how fast a long one is.
TELLING_TOKENS = 64
# The agent has it, or it can never have it: nothing to ask again when the entry is evicted.
SETTLED = frozenset({"", "too_short"})

# Name of the entry, its bytes, and the entry itself where nobody else has it.
Leaving = tuple[int, int, Entry | None]


class ExoTiers:
    """``module`` is EXO's cache module, ``shape`` what its prefix cache looks like."""

    def __init__(
        self,
        module: ModuleType,
        shape: Shape,
        client: HandoffClient,
        *,
        all_ranks_hooked: bool = False,
        memory: MemoryRule | None = None,
    ) -> None:
        self.module: Any = module
        self.shape = shape
        self.client = client
        self.all_ranks_hooked = all_ranks_hooked
        self.counters = HotCounters()
        self.voice = Voice()
        self.mover = Mover(client, report=reporter(client, self.counters))
        self.memory = memory or MemoryRule()
        self.memory.kept = lambda: self.mover.pending_bytes
        self.pressure: Pressure | None = None
        self._own_threshold = float(self.module._MEMORY_THRESHOLD)
        self._driven = 0.0
        self.hand_over = HandOver(client, self.mover, self.counters)
        self.fetch = Fetch(client, self.counters, restored=self._restored)
        self.lookup = Lookup(self)
        self.model = exo_model.RunnerModel(client, module)
        self.sampler = Sampler(client, self.model.served, fresh=lambda model: self.module.make_kv_cache(model))
        self.several_ranks = False

    # --- the model --------------------------------------------------------------------------------

    def loaded(self, shard: Any, folder: Path, files: Sequence[FileSeen] | None) -> None:
        """This runner's model; nothing is stored or restored before it is known."""
        if files is None:
            self.voice.say("model", "the model's files changed while EXO loaded them; it is served without tiers")
            return
        self.model.loaded(exo_model.announcement(shard, folder, tuple(files)))

    def found(self, tiered: Tiered, query: Query, first: Answer, again: Callable[[], Answer]) -> Answer:
        """EXO's own answer ``first``, or what EXO answers ``again`` once the vaults' longer prefix is an entry."""
        return self.lookup.found(tiered, query, first, again)

    def _restored(self, handle: ModelHandle, ids: Ids, media: Sequence[Media], answer: Restored) -> None:
        """Several ranks would have to compute a sample together."""
        if not self.several_ranks:
            self.sampler.restored(handle, ids, media, answer)

    # --- storing ----------------------------------------------------------------------------------

    def stored(self, tiered: Tiered, index: int, prefill_tps: float) -> None:
        """EXO has a new state in slot ``index``: the agent gets what it wants of it."""
        tiered.forget_gone()
        if tiered.asked >= TELLING_TOKENS and prefill_tps > 0:
            end = max(tiered.asked, len(tiered.cache.prompts[index]))
            number = self.model.handle.id if self.model.handle is not None else None
            self.counters.prefilled(tiered.asked, tiered.asked / prefill_tps, start=end - tiered.asked, model=number)
        if tiered.follows_wrong:
            self._keep_to_itself(tiered, tiered.cache.caches[index])
        elif self.client.settings["demote"] == "ahead":
            self.demote(tiered, entry_at(tiered.cache, index))
        if self.client.settings["demote"] == "ahead":
            self._catch_up(tiered, index)
        self.note_size(tiered)

    def _keep_to_itself(self, tiered: Tiered, entry: Any) -> None:
        tiered.wrong.add(id(entry))
        tiered.settled.add(id(entry))
        self.counters.refused("wrong_state")
        self.voice.say("wrong", "EXO went on from state that it did not have: not stored, restored where possible")

    def _catch_up(self, tiered: Tiered, index: int) -> None:
        """The newest of the other entries that the agent could not take when they were made is offered again."""
        cache = tiered.cache
        missed = [
            number for number, caches in enumerate(cache.caches) if number != index and id(caches) not in tiered.settled
        ]
        if missed and self.client.available:
            self.demote(tiered, entry_at(cache, max(missed, key=lambda number: cache._last_used[number])))

    def before_update(self, tiered: Tiered, index: int) -> tuple[Any, Entry | None]:
        """The prompt of a slot that EXO is about to overwrite, and the entry if nobody else has it."""
        entry = entry_at(tiered.cache, index)
        return entry.prompt, None if id(entry.cache) in tiered.settled else entry

    def overwritten(self, tiered: Tiered, prompt: Any, entry: Entry | None, index: int) -> None:
        """The slot has another prompt now: an eviction, unless it goes on from the old one."""
        new, old = ids_of(tiered.cache.prompts[index]), ids_of(prompt)
        if len(new) >= len(old) and (new[: len(old)] == old).all():
            return
        self.counters.evicted("overwritten")
        if entry is not None:
            self.demote(tiered, entry)

    def demote(self, tiered: Tiered, entry: Entry) -> None:
        reasons = self._demoted(entry)
        for reason in reasons - {""}:
            self.counters.refused(reason)
        if reasons <= SETTLED:
            tiered.settled.add(id(entry.cache))

    def _demoted(self, entry: Entry) -> set[str]:
        try:
            handle, ids, reasons = self.model.of_cache(entry.cache), entry.ids, set[str]()
            least = int(self.client.settings["min_store_tokens"])
            for position, cache in standings(entry):
                if position < least:
                    reasons.add("too_short")
                    continue
                media = media_of(entry.regions, position)
                reasons.add(self.hand_over.hand_over(handle, ids[:position], media, position, cache))
        except UnsupportedState as error:
            self.voice.say("demote", f"not handed over: {error}", level=logging.INFO)
            self.counters.refused(error.reason)
            # A class that is not carried never will be; a model may become known.
            return {error.reason if self.model.handle is None else ""}
        except Exception as error:
            self.failed("demote", error)
            return {"hook_error"}
        return reasons

    # --- evicting ---------------------------------------------------------------------------------

    def evict(self, tiered: Tiered, loop: Callable[[], None], *, adding: bool) -> None:
        """Runs EXO's ``loop``; what it dropped is counted, and handed over where that was not done ahead.

        adding: the newest state is about to be added, so that every entry may go; else the newest entry stays.
        """
        # First, whatever fails afterwards: ranks that compare with different thresholds wait for each other.
        threshold = self._driven_threshold(tiered)
        before = self._before(tiered)
        if threshold:
            self.pressure = self._pressure(tiered, threshold, [size for _, size, _ in before], keep_newest=not adding)
        try:
            loop()
        finally:
            if self.pressure is not None:
                self.pressure.over()
                note = self.pressure.verdict.note if self.pressure.verdict is not None else ""
                self.pressure, self.counters.note = None, note
                self.voice.say("threshold", note)
        left = {id(each) for each in tiered.cache.caches}
        gone = [each for each in before if each[0] not in left]
        before.clear()
        for _, size, _ in gone:
            self.counters.evicted("over_threshold", size)
        if self._demote_all(tiered, gone):
            # EXO collected and cleared while these were still held.
            gone.clear()
            gc.collect()
            mx.clear_cache()
        tiered.forget_gone()

    def _demote_all(self, tiered: Tiered, gone: Sequence[Leaving]) -> bool:
        unsettled = [entry for _, _, entry in gone if entry is not None]
        for entry in unsettled:
            self.demote(tiered, entry)
        return bool(unsettled)

    def _before(self, tiered: Tiered) -> list[Leaving]:
        """Name, bytes and the entry itself if only an agent that is there lacks it: what is held is not freed."""
        cache, takes = tiered.cache, self.client.available
        return [
            (
                id(cache.caches[index]),
                entry_bytes(cache, index),
                entry_at(cache, index) if takes and id(cache.caches[index]) not in tiered.settled else None,
            )
            for index in range(len(cache.caches))
        ]

    def _driven_threshold(self, tiered: Tiered) -> float:
        """TierKV's own while an agent says one (on several ranks: while all agreed), which EXO then has; else 0."""
        threshold = self.wished_threshold() if tiered.ranks.alone else tiered.ranks.threshold
        if threshold:
            self.module._MEMORY_THRESHOLD = self._driven = threshold
        else:
            self.give_back_threshold()
        return threshold

    def _pressure(self, tiered: Tiered, threshold: float, sizes: Sequence[int], *, keep_newest: bool) -> Pressure:
        used = tiered.cache._last_used
        keep = sizes[used.index(max(used))] if keep_newest and used else 0
        return Pressure(self.memory, threshold, sizes, tiered.held_bytes, keep_bytes=keep)

    def give_back_threshold(self) -> None:
        """EXO's own threshold stands, unless somebody else has changed it."""
        if self._driven and self._driven == self.module._MEMORY_THRESHOLD:
            self.module._MEMORY_THRESHOLD = self._own_threshold
        self._driven = 0.0

    def wished_threshold(self) -> float:
        return float(self.client.settings["memory_threshold"]) if self.client.available else 0.0

    # --- saying -----------------------------------------------------------------------------------

    def usable(self, tiered: Tiered) -> bool:
        return whole(tiered.cache, self.shape)

    def note_size(self, tiered: Tiered) -> None:
        self.counters.entries = len(tiered.cache.caches)
        self.counters.tokens = sum(len(prompt) for prompt in tiered.cache.prompts)
        self.counters.size_bytes = tiered.held_bytes()
        self.counters.device_bytes = int(mx.get_active_memory())

    def failed(self, doing: str, error: Exception) -> None:
        self.voice.say(doing, f"{doing} failed, EXO goes on: {type(error).__name__}: {error}")
        log.debug("%s failed", doing, exc_info=None if isinstance(error, TierKVError) else error)

    def close(self, leave_s: float = 5.0) -> None:
        self.mover.drain(leave_s)
        self.mover.close()
        self.client.close()
