"""Looking up a prompt in EXO's prefix cache: what EXO has itself, or what the vaults have beyond it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tierkv.errors import UnsupportedState
from tierkv.hooks.counters import HitKind
from tierkv.hooks.exo_entries import Entry, entry_at, insert, inside_region, remove
from tierkv.hooks.exo_query import Query, Tiered
from tierkv.hooks.exo_ranks import Local, Ranks
from tierkv.hooks.exo_state import stands_elsewhere
from tierkv.state import mlx_cache

if TYPE_CHECKING:
    from tierkv.hooks.exo_tiers import ExoTiers

# EXO prefills a prompt but for its last two tokens and decodes from them: what it reuses never reaches further.
TAIL_TOKENS = 2

Answer = tuple[Any, ...]


class Lookup:
    """EXO's own answer is taken first and asked for again when there is more to find."""

    def __init__(self, tiers: ExoTiers) -> None:
        self._tiers = tiers

    def found(self, tiered: Tiered, query: Query, first: Answer, again: Callable[[], Answer]) -> Answer:
        """EXO's own answer ``first``, or what EXO answers ``again`` once the vaults' longer prefix is an entry."""
        have = query.length - len(first[1])
        if not have:
            first = self._from_nothing(query, first)
        better, asked = None, self._tiers.client.restores_asked
        tiered.follows_wrong = self._follows_wrong(tiered, first, have)
        wrong = tiered.cache.caches[first[2]] if tiered.follows_wrong else None
        if tiered.ranks.alone or (tiered.ranks.together and tiered.ranks.called_together()):
            got = self._restored(tiered.ranks, query, first, have if wrong is None else 0)
            better = self._injected(tiered, query, got, again, wrong) if got is not None else None
        if better is None:
            self._reused(tiered, first, query, have)
        else:
            self._tiers.counters.hit("restored")
            tiered.follows_wrong = False
        tiered.asked = len((better or first)[1])
        self._tell(query, have, query.length - tiered.asked, asked != self._tiers.client.restores_asked)
        return better or first

    def _from_nothing(self, query: Query, first: Answer) -> Answer:
        """EXO's answer for a prompt of which it reuses nothing, with a cache that has seen nothing.

        EXO gives out the layers of the entry that it found; those of class DeepseekV4Cache it leaves where they were.
        """
        if first[2] is None or not stands_elsewhere(first[0], 0):
            return first
        try:
            fresh = self._tiers.module.make_kv_cache(query.model)
        except Exception as error:
            self._tiers.failed("empty", error)
            return first
        self._tiers.voice.say(
            "empty", "EXO reuses nothing of a prompt and gave it another one's state: it is computed from the start"
        )
        return (fresh, *first[1:])

    def _tell(self, query: Query, have: int, position: int, asked: bool) -> None:
        """The agent can explain this request."""
        covered = have >= query.length - TAIL_TOKENS
        reason = "" if asked else "covered" if covered else "too_short"
        self._tiers.client.served(
            self._tiers.model.handle, query.length, have=have, position=position, reason=reason, asked=asked
        )

    def _follows_wrong(self, tiered: Tiered, first: Answer, have: int) -> bool:
        if not have or first[2] is None:
            return False
        return id(tiered.cache.caches[first[2]]) in tiered.wrong or stands_elsewhere(first[0], have)

    def _restored(self, ranks: Ranks, query: Query, first: Answer, have: int) -> tuple[Any, int] | None:
        """A cache that reaches further than ``have``, on every rank or on none."""
        limit = query.length - TAIL_TOKENS

        def fetch(reach: int) -> tuple[Any, int] | None:
            if reach - have < self._least_gain():
                return None
            local = first[0] if have and mlx_cache.position(first[0]) == have else None
            known, media = self._tiers.model.of_model(query.model), query.media(reach)
            got = self._tiers.fetch.fetch(known, query.ids, media, have=have, limit=reach, local=local)
            if got is not None and inside_region(query.regions, got[1]):
                raise UnsupportedState("bad_position", f"a restore at {got[1]}, inside an image")
            return got

        def possible(reach: int) -> int:
            if reach - have < self._least_gain():
                return 0
            known = self._tiers.model.of_model(query.model)
            return self._tiers.client.possible(
                known.handle, query.ids, have=have, limit=reach, media=query.media(reach), expected=known.signature,
                budget_s=self._tiers.fetch.budget_s(known.handle, have, reach),
            )  # fmt: skip

        if ranks.alone:
            return self._quietly(fetch, limit)
        return ranks.restore(
            Local(
                query.length, have, limit, self._tiers.wished_threshold(),
                lambda reach: self._quietly(possible, reach) or 0, lambda reach: self._quietly(fetch, reach),
            )
        )  # fmt: skip

    def _least_gain(self) -> int:
        return max(1, int(self._tiers.client.settings["min_restore_tokens"]))

    def _quietly(self, call: Callable[[int], Any], reach: int) -> Any:
        """What the call gives, None when it fails: counted, said once, never raised."""
        try:
            return call(reach)
        except UnsupportedState as error:
            self._tiers.counters.missed(error.reason)
            self._tiers.voice.say("promote", f"not restored: {error}", level=logging.INFO)
        except Exception as error:
            self._tiers.counters.missed("hook_error")
            self._tiers.failed("promote", error)
        return None

    def _injected(
        self, tiered: Tiered, query: Query, got: tuple[Any, int], again: Callable[[], Answer], wrong: Any
    ) -> Answer | None:
        """EXO's answer with the restored state as its first entry; None, with nothing changed, if EXO does not use it.

        First, because EXO takes the first entry that covers a prompt, even one without a usable snapshot. The entry
        ``wrong``, that EXO cannot use rightly and would prefer, leaves the cache.
        """
        self._drop(tiered, wrong)
        if tiered.cache.caches:
            tiered.adding = True
            try:
                tiered.cache._evict_if_needed()
            finally:
                tiered.adding = False
        used, counter = list(tiered.cache._last_used), tiered.cache._access_counter
        answer: Answer | None = None
        try:
            answer = self._tried(tiered, query, got, again)
        except Exception as error:
            self._tiers.failed("inject", error)
        agreed = answer is not None if tiered.ranks.alone else tiered.ranks.all_say(answer is not None)
        if not agreed:
            if len(tiered.cache.caches) > len(used):
                remove(tiered.cache, self._tiers.shape, 0)
            tiered.cache._last_used[:], tiered.cache._access_counter = used, counter
            return None
        tiered.settled.add(id(got[0]))
        return answer

    def _drop(self, tiered: Tiered, entry: Any) -> None:
        if entry is None:
            return
        at = next(number for number, each in enumerate(tiered.cache.caches) if each is entry)
        if id(entry) not in tiered.settled:
            self._tiers.demote(tiered, entry_at(tiered.cache, at))
        remove(tiered.cache, self._tiers.shape, at)
        self._tiers.counters.evicted("replaced")

    def _tried(self, tiered: Tiered, query: Query, got: tuple[Any, int], again: Callable[[], Answer]) -> Answer | None:
        """What EXO makes of the new entry, if that is right: with it as long as the prompt, or as the state.

        An entry as long as the prompt is an exact hit to EXO; some versions then skip the tokens that it lacks. Where
        EXO goes by snapshots it prefers whatever agrees longer, usable or not: only an entry that is longer than its
        state is found before another one whose snapshots lie behind the place where the prompts part.
        """
        cache, position = got
        by_snapshots = self._tiers.module.has_non_kv_caches(cache)
        snapshots = [self._tiers.module.snapshot_ssm_states(cache)] if by_snapshots else []
        if position >= query.length - TAIL_TOKENS:
            lengths = query.length, position
        else:
            lengths = (position, query.length - TAIL_TOKENS, query.length) if by_snapshots else (position,)
        for length in lengths:
            kept = [region for region in query.regions if region.start_pos < length]
            entry = Entry(query.prompt[:length], cache, snapshots, kept)
            insert(tiered.cache, self._tiers.shape, 0, entry, self._tiers.counters.prefill_tokens_per_s)
            answer = again()
            if query.length - len(answer[1]) == position == mlx_cache.position(answer[0]):
                return answer
            remove(tiered.cache, self._tiers.shape, 0)
        return None

    def _reused(self, tiered: Tiered, first: Answer, query: Query, have: int) -> None:
        kind: HitKind = "none"
        if have >= query.length - TAIL_TOKENS:
            kind = "exact"
        elif have >= self._least_gain():
            kind = "longer" if len(tiered.cache.prompts[first[2]]) > have + TAIL_TOKENS else "shorter"
        self._tiers.counters.hit(kind)
        if kind != "none" and self._tiers.model.handle is not None:
            self._tiers.client.hit(self._tiers.model.handle, query.ids, have, query.media(have))
