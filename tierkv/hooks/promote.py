"""Gets a longer prefix from the vaults than the engine has itself, and makes a cache of it.

Runs on the generation thread, which waits: the wait is bounded by the agent's budget and by what computing the same
tokens would take.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from tierkv.errors import UnsupportedState
from tierkv.handoff.client import HandoffClient, Media, ModelHandle, NotRestored, Restored
from tierkv.handoff.protocol import SHORTEST_WORTH_S
from tierkv.hooks.counters import HotCounters
from tierkv.hooks.mlx_models import LoadedModel, ModelBook, ModelKey
from tierkv.hooks.prompt_tokens import Ids, as_ids, inside_media, media_in
from tierkv.state import mlx_cache

log = logging.getLogger("tierkv")

# With break_even off a restore is wanted where computing is quicker too, and may have connections to open.
SHORTEST_BUDGET_S = 1.0


Told = Callable[[ModelHandle, Ids, Sequence[Media], Restored], None]


class Fetch:
    """Caches of any engine, made of what the vaults have."""

    def __init__(
        self,
        client: HandoffClient,
        counters: HotCounters,
        *,
        clock: Callable[[], float] = time.perf_counter,
        restored: Told | None = None,
    ) -> None:
        """``restored`` hears of every restore: which model, which prompt and its media, what came."""
        self._client = client
        self._counters = counters
        self._clock = clock
        self._restored = restored

    def fetch(
        self,
        model: LoadedModel,
        ids: Ids,
        media: Sequence[Media],
        *,
        have: int,
        limit: int,
        local: Sequence[Any] | None = None,
        more: bool = False,
        spent_s: float = 0.0,
    ) -> tuple[list[Any], int] | None:
        """An evaluated cache and its position in (have, limit] and the form's range; None where the vaults give none.

        ``local`` is a cache of the same model that stands at ``have`` and gives the rows before it. ``more``: another
        form is asked for next; ``spent_s``: what was waited for those before. Raises UnsupportedState if what came does
        not fit.
        """
        started = self._clock()
        floor, limit = max(have, model.first - 1), min(limit, model.last)
        answer = self._client.restore(
            model.handle, ids, have=have, limit=limit, expected=model.signature,
            budget_s=self.budget_s(model.handle, have, limit, spent_s), above=floor, more=more,
            rows_from=have if local is not None else 0, media=media,
        )  # fmt: skip
        if isinstance(answer, NotRestored):
            if not more:
                self._counters.missed(answer.reason)
            return None
        if not floor < answer.position <= limit:
            raise UnsupportedState("bad_position", f"a restore at {answer.position}, not between {floor} and {limit}")
        cache = self._built(model, answer, local if have else None)
        self._count(answer, started, len(ids))
        if self._restored is not None:
            self._restored(model.handle, ids, media, answer)
        return cache, answer.position

    def _built(self, model: LoadedModel, answer: Restored, local: Sequence[Any] | None) -> list[Any]:
        if answer.layout.signature() != model.signature:
            raise UnsupportedState("foreign_layout", "the stored state is of another cache layout")
        began = self._clock()
        cache = mlx_cache.build(
            answer.layout, answer.position, answer.arrays, answer.scalars, first_row=answer.first_row, local=local
        )
        mx.eval(mlx_cache.live_arrays(cache))
        self._counters.built(sum(array.nbytes for array in answer.arrays.values()), self._clock() - began)
        return cache

    def budget_s(self, model: ModelHandle, have: int, limit: int, spent_s: float = 0.0) -> float:
        """How long a restore of positions [have, limit) may take: no longer than computing them, where that is known.

        Just after an engine's start the agent may know it and the hook not yet. ``spent_s`` was waited for the same
        prompt already.
        """
        allowed_s = float(self._client.settings["restore_budget_s"])
        rate = self._counters.prefill_tokens_per_s
        computing_s = model.computing_s(have, limit) or ((limit - have) / rate if rate else 0.0)
        if not computing_s:
            return allowed_s
        shortest_s = SHORTEST_WORTH_S if self._client.settings.get("break_even") else SHORTEST_BUDGET_S
        return min(allowed_s, max(shortest_s, computing_s - spent_s))

    def _count(self, answer: Restored, started: float, n_tokens: int) -> None:
        self._counters.restored_tokens += answer.position - answer.first_row
        self._counters.restored_bytes += answer.bytes_moved
        log.info(
            "restored %d of %d tokens in %.3f s (%s)", answer.position, n_tokens, self._clock() - started, answer.codec
        )


class Promoter(Fetch):
    """For an mlx-lm server, by the server's own model key and tokens."""

    def __init__(
        self,
        client: HandoffClient,
        book: ModelBook,
        counters: HotCounters,
        *,
        clock: Callable[[], float] = time.perf_counter,
        restored: Told | None = None,
    ) -> None:
        super().__init__(client, counters, clock=clock, restored=restored)
        self._book = book

    def promote(
        self, key: ModelKey, tokens: Sequence[int], local: Sequence[Any] | None, have: int
    ) -> tuple[list[Any], int] | None:
        """A cache and its position, beyond ``have`` and before the last token; None where the vaults give no more.

        ``local`` is the engine's own cache at ``have``, or None. Raises UnsupportedState if what came does not fit.
        """
        limit = len(tokens) - 1
        least = max(1, int(self._client.settings["min_restore_tokens"]))
        if limit - have < least:
            return None
        ids = as_ids(tokens)
        forms = [form for form in self._book.of_prompt(key, limit) if min(limit, form.last) - have >= least]
        began_s = self._clock()
        for form in forms:
            joined = local if local is not None and _joins(local, have, form) else None
            more = form is not forms[-1]
            got = self.fetch(
                form, ids, media_in(ids), have=have, limit=limit, local=joined, more=more,
                spent_s=self._clock() - began_s,
            )  # fmt: skip
            if got is not None and inside_media(ids, got[1]):
                raise UnsupportedState("bad_position", f"a restore at {got[1]}, inside an image")
            if got is not None:
                return got
        return None


def _joins(local: Sequence[Any], have: int, model: LoadedModel) -> bool:
    """Whether the engine's own cache gives the rows before ``have``: it may be of another form, or a token behind."""
    return mlx_cache.positions(local) == {have} and mlx_cache.expected_signature(local) == model.signature
