"""Hands an entry of the engine's cache to the agent: ask what it wants, hold that, let the mover thread carry it.

Runs on the generation thread. What the thread pays is counted in two parts: evaluating the engine's own lazy arrays
(which the engine would do later anyway), and holding on to the wanted rows. These are shared with the engine (see
``mlx_cache.rows``), so that all copying is the mover's.

An entry may be evicted while its transfer is on its way: the transfer goes on, since what it holds is not the
engine's to change. What is held meanwhile is bounded by the mover's cap, beside one transfer of any size; what does not
fit is dropped and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from tierkv.errors import UnsupportedState
from tierkv.handoff.client import HandoffClient, Media, ModelHandle, Offer
from tierkv.handoff.mover import Mover
from tierkv.handoff.transfer import Transfer
from tierkv.hooks.counters import HotCounters
from tierkv.hooks.mlx_models import ModelBook, ModelKey
from tierkv.hooks.prompt_tokens import Ids, as_ids, inside_media, media_in
from tierkv.state import mlx_cache
from tierkv.state.layout import LayerKind, Layout
from tierkv.state.mlx_leaves import cut

# The agent has it all, or gets it just now.
NOTHING_MISSING = frozenset({"", "known"})


class HandOver:
    """State of any engine on its way to the agent. Waits no longer than the offer's budget and the copy take."""

    def __init__(
        self,
        client: HandoffClient,
        mover: Mover,
        counters: HotCounters,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._client = client
        self._mover = mover
        self._counters = counters
        self._clock = clock

    def hand_over(
        self,
        handle: ModelHandle,
        ids: Ids,
        media: Sequence[Media],
        stands_at: int,
        cache: Sequence[Any],
        leaving: str = "",
    ) -> str:
        """The agent has, or gets, what it wants of a cache at ``stands_at``. "" or why nothing could be handed over.

        Raises UnsupportedState for a state that cannot be carried.
        """
        layout = mlx_cache.describe(cache)
        offer = self._client.offer(handle, ids, stands_at, layout, media=media, leaving=leaving)
        if offer is None:
            return "no_agent"
        if not offer.wanted:
            return "" if offer.reason in NOTHING_MISSING else offer.reason
        self._counters.offered += 1
        return self._submit(offer, layout, cache)

    def _submit(self, offer: Offer, layout: Layout, cache: Sequence[Any]) -> str:
        try:
            transfer = self._held(offer, layout, cache)
        except BaseException:
            self._client.dropped(offer.transfer_id, "hook_error")
            raise
        if not self._mover.submit(transfer):
            return "mover_full"
        self._counters.handed_over_bytes += transfer.size_bytes
        return ""

    def _held(self, offer: Offer, layout: Layout, cache: Sequence[Any]) -> Transfer:
        started = self._clock()
        mx.eval(mlx_cache.live_arrays(cache))
        evaluated = self._clock()
        rows: mlx_cache.Views = {}
        if offer.rows_from is not None:
            rows = mlx_cache.rows(cache, layout, offer.rows_from, offer.position)
        asked: tuple[tuple[LayerKind, bool], ...] = (("window", offer.window), ("state", offer.state))
        kinds: list[LayerKind] = [kind for kind, wanted in asked if wanted]
        checkpoint, scalars = mlx_cache.checkpoint(cache, layout, kinds) if kinds else ({}, {})
        self._counters.evaluate_s += evaluated - started
        self._counters.copy_s += self._clock() - evaluated
        wanted = offer.position - (offer.rows_from or 0)
        buffers_bytes = sum(view.nbytes for view in rows.values()) * offer.position // max(wanted, 1)
        shared_bytes = buffers_bytes + sum(array.nbytes for array in checkpoint.values())
        return Transfer(offer, layout, rows, checkpoint, scalars, shared_bytes)


class Demoter(HandOver):
    """An mlx-lm server's entry, by the server's own model key and tokens."""

    def __init__(
        self,
        client: HandoffClient,
        mover: Mover,
        book: ModelBook,
        counters: HotCounters,
        *,
        clock: Callable[[], float] = time.perf_counter,
        keys_are_counted: bool = False,
    ) -> None:
        """``keys_are_counted``: an entry's key is known to have exactly the tokens that its state has seen."""
        super().__init__(client, mover, counters, clock=clock)
        self._book = book
        self._keys_are_counted = keys_are_counted

    def demote(self, key: ModelKey, tokens: Sequence[int], cache: Sequence[Any], leaving: str = "") -> str:
        """The agent has, or gets, what it wants of this entry. "" or the reason why nothing could be handed over.

        ``leaving``: why the engine is about to evict it, "" if it is not.

        Raises UnsupportedState for a state that cannot be carried.
        """
        stands_at, cache = self._standing(key, tokens, cache)
        if stands_at < int(self._client.settings["min_store_tokens"]):
            return "too_short"
        model = self._book.of_cache(key, cache)
        ids = as_ids(tokens)
        if inside_media(ids, stands_at):
            raise UnsupportedState("inside_media", "the entry ends inside an image")
        return self.hand_over(model.handle, ids, media_in(ids), stands_at, cache, leaving)

    def _standing(self, key: ModelKey, tokens: Sequence[int], cache: Sequence[Any]) -> tuple[int, Sequence[Any]]:
        """Where the state stands, and the cache there. A draft model may be a token behind: both are cut to it."""
        found = mlx_cache.positions(cache)
        if self._keys_are_counted and mlx_cache.only(cache, "state") and mlx_cache.live_arrays(cache):
            return len(tokens), cache
        if self._book.drafts(key) and len(found) == 2 and max(found) - min(found) == 1:
            cache = [cut(layer, min(found)) for layer in cache]
            return standing_at(tokens, cache, behind=2), cache
        return standing_at(tokens, cache), cache


def standing_at(tokens: Sequence[int], cache: Sequence[Any], *, behind: int = 1) -> int:
    """How many of ``tokens`` the cache has really seen: all but at most ``behind``, which were only sampled.

    Raises UnsupportedState if the cache does not say, or says something that does not fit the tokens.
    """
    position = mlx_cache.position(cache)
    if position is None:
        raise UnsupportedState("position_unknown", "no layer says how many tokens it has seen")
    if not 0 <= len(tokens) - position <= behind:
        raise UnsupportedState("position_mismatch", f"a cache at {position} under a key of {len(tokens)} tokens")
    return position
