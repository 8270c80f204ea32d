"""A restore as the agent answers it: look everywhere at once, choose a position, bring it, count what came of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

from tierkv.agents.break_even import Rates, decide
from tierkv.agents.fetch import Fetcher
from tierkv.agents.known import BAD_S, BadRecords
from tierkv.agents.layouts import Layouts, signature_json
from tierkv.agents.lookup import Candidate, Needs, Plan, View, best_plan, pending_result
from tierkv.agents.pending import PendingRecords, PendingSource
from tierkv.agents.reasons import is_damage, reason_of
from tierkv.agents.remeasure import Remeasurer
from tierkv.agents.restore_run import (
    NOT_WORTH_IT,
    LayoutSurprise,
    RestoreOutcome,
    RestoreParts,
    RestoreRequest,
    RestoreRun,
)
from tierkv.agents.routing import TierRouter
from tierkv.agents.trace import RequestTrace, VaultTrace
from tierkv.agents.unstored import NOT_STORED, Unstored
from tierkv.errors import PeerError
from tierkv.handoff.server import Connection
from tierkv.identity.blocks import BLOCK_TOKENS, PromptChain
from tierkv.rpc.vault_port import ProbeResult, VaultPort
from tierkv.state.layout import Layout
from tierkv.store.journal import Fate
from tierkv.telemetry.node import NodeTelemetry

# A source that was too slow is asked again sooner than one that sent damaged bytes.
SLOW_S = 10.0
# Each look teaches at least one layout, and a prompt has few.
MAX_LOOKS = 4
ROWS_ONLY = Needs(rows=True, window=False, state=False)


class Promoter:
    """Owned by the event loop; decoding runs in ``pool``."""

    def __init__(
        self,
        routers: Mapping[str, TierRouter],
        pending: PendingRecords,
        layouts: Layouts,
        bad: BadRecords,
        telemetry: NodeTelemetry,
        pool: Executor,
        unstored: Unstored,
        *,
        workers: int,
        worst_fidelity: int,
        probe_timeout_s: float,
        max_record_bytes: int,
        min_restore_tokens: Callable[[], int],
        weighs: Callable[[], bool],
    ) -> None:
        self._routers = routers
        self._pending = pending
        self._layouts = layouts
        self._bad = bad
        self._telemetry = telemetry
        self._unstored = unstored
        self._worst_fidelity = worst_fidelity
        self._probe_timeout_s = probe_timeout_s
        self._min_restore_tokens = min_restore_tokens
        self.fetcher = Fetcher(max_record_bytes)
        self.rates = Rates()
        self.remeasurer = Remeasurer()
        self._workers = workers
        self._weighs = weighs
        self._parts = RestoreParts(self.fetcher, layouts, pool, workers, self._record_failed, self.rates, weighs)

    def set_worst_fidelity(self, limit: int) -> None:
        """Restores from now on take records of at most this fidelity number; 255: any."""
        self._worst_fidelity = limit

    def set_probe_timeout(self, seconds: float) -> None:
        """Looking up what vaults have takes at most so long from now on."""
        self._probe_timeout_s = seconds

    async def restore(self, request: RestoreRequest, connection: Connection, trace: RequestTrace) -> RestoreOutcome:
        """The state is in the hook's hands, except for the answer that closes it, or there is a reason why not.

        ``trace`` tells it afterwards. Raises HandoffError or HookGone when the hook is gone.
        """
        began_s = time.monotonic()
        for _ in range(MAX_LOOKS):
            view, plan = await self.look_up(request, trace)
            if plan is None:
                outcome = self._none(view, request)
                break
            try:
                outcome = await RestoreRun(self._parts, request, connection, plan, began_s).run()
            except LayoutSurprise:
                continue
            self._count(request, outcome, time.monotonic() - began_s)
            break
        else:
            outcome = self._none(View(reasons={"kv": "foreign_layout"}), request)
        outcome.seconds = time.monotonic() - began_s
        trace.ended(request, outcome)
        self._doubt(request.chain, trace)
        return outcome

    def _doubt(self, chain: PromptChain, trace: RequestTrace) -> None:
        """Damage seldom comes alone: what stands behind a damaged record is not known to be stored any more."""
        for part in trace.vaults:
            if part.failed["damaged"]:
                known, behind = self._routers[part.kind].known, chain.keys[(part.failed_at - 1) // BLOCK_TOKENS :]
                known.discard([*behind, *known.after(behind)])

    async def look_up(
        self, request: RestoreRequest, trace: RequestTrace, *, peek: bool = False
    ) -> tuple[View, Plan | None]:
        """What there is of the prompt, and the best restore of it; None where there is none or computing is quicker.

        ``peek``: nothing is leased or counted by the vaults.
        """
        view = View()
        trace.begin_look()
        source = PendingSource()
        queued = pending_result(self._pending, request.chain, source)
        view.add(source, queued, self._usable)
        if queued.blocks or queued.partial or queued.states or queued.windows:
            trace.vault("kv", source.peer).answered(queued)
        expects = _needs_of_signature(request.expected)
        tiers = ("kv", "ssm") if expects is None else _tiers(expects)
        timeout_s = min(self._probe_timeout_s, request.budget_s)
        answers = await asyncio.gather(
            *(
                self._routers[tier].probe(
                    request.chain, worst_fidelity=self._worst_fidelity, timeout_s=timeout_s, peek=peek
                )
                for tier in tiers
            )
        )
        for tier, results in zip(tiers, answers, strict=True):
            view.reasons[tier] = "" if results else "no_vault"
            for port, result, seconds in results:
                part = trace.vault(tier, port.peer)
                part.seconds = seconds
                if isinstance(result, PeerError):
                    part.error, part.problem = reason_of(result), str(result)
                    view.reasons[tier] = part.error
                    self._routers[tier].known.clear()
                    continue
                result = self._with_unstored(tier, port, request, result)
                part.answered(result)
                view.add(port, result, partial(self._usable, part=part))
                self._routers[tier].learn(request.chain, result, partial(self._bad.holds, port.peer))
                view.reasons[tier] = view.reasons[tier] or result.missing.reason or "never_stored"
        plan = best_plan(
            view,
            request.chain,
            limit=request.limit,
            at_least=max(request.have + max(1, self._min_restore_tokens()), request.above + 1),
            rows_from=request.rows_from,
            needs_of=lambda digest: self._needs(digest, view, request.expected, expects),
        )
        if plan is None:
            self._note_layouts(view, request, trace)
            return view, None
        chosen = self._worth_it(plan, request, view, trace)
        if chosen is plan:
            self.remeasurer.fast_enough(plan)
        elif not peek:
            self.remeasurer.too_slow(plan)
        return view, chosen

    def _with_unstored(self, tier: str, port: VaultPort, request: RestoreRequest, result: ProbeResult) -> ProbeResult:
        """A vault only knows that it never had a record; that it was refused or given up is known here."""
        if result.missing.reason not in ("", "never_stored"):
            return result
        marks = [each.end for each in result.states]
        reach = max(marks, default=0) if tier == "ssm" else result.reach
        found = self._unstored.of(f"{tier}:{port.peer}", request.chain, reach) if reach < request.limit else None
        if found is None:
            return result
        return replace(result, missing=Fate(NOT_STORED, *found))

    def _worth_it(self, plan: Plan, request: RestoreRequest, view: View, trace: RequestTrace) -> Plan | None:
        """All of the plan, as much of it as is quicker than computing, or None."""
        if not self._weighs():
            return plan
        decision = decide(plan, request.have, request.prefill, self.rates, self._workers, above=request.above)
        trace.expected_restore_s, trace.expected_prefill_s = decision.restore_s, decision.prefill_s
        if decision.plan is None:
            view.reasons = dict.fromkeys(view.reasons, NOT_WORTH_IT)
        return decision.plan

    def _note_layouts(self, view: View, request: RestoreRequest, trace: RequestTrace) -> None:
        known = [layout for digest in view.digests() if (layout := self._layouts.get(digest)) is not None]
        if request.expected and known:
            trace.layout_note = next((note for each in known if (note := _difference(each, request.expected))), "")

    def _usable(self, candidate: Candidate, part: VaultTrace | None = None) -> bool:
        found = candidate.found
        lossy = found.fidelity > self._worst_fidelity
        failed = not lossy and self._bad.holds(candidate.source.peer, found.key)
        if part is not None and (lossy or failed):
            part.refused["too_lossy" if lossy else "failed_before"] += 1
        return not (lossy or failed)

    def _needs(self, digest: bytes, view: View, expected: str, expects: Needs | None) -> Needs | None:
        layout = self._layouts.get(digest)
        if layout is not None:
            return Needs.of(layout) if not expected or signature_json(layout) == expected else None
        if expects is not None:
            return expects
        rows = [*view.partials, *(each for group in view.blocks.values() for each in group)]
        return Needs(
            *(any(each.found.layout_digest == digest for each in group) for group in (rows, view.windows, view.states))
        )

    # --- counting -----------------------------------------------------------------------------------

    def _none(self, view: View, request: RestoreRequest) -> RestoreOutcome:
        outcome = RestoreOutcome(reason=self.why_not(view, request))
        if request.more:
            return outcome
        self._telemetry.count("restores_none")
        for tier, reason in view.reasons.items():
            self._telemetry.tier(tier).miss(outcome.reason if self._has(view, tier) else reason)
        if outcome.reason != "too_short":
            why = outcome.reason.replace("_", " ")
            self._telemetry.emit(
                "miss", "debug", f"{request.model}: nothing to restore ({why})", reason=outcome.reason,
                model=request.model, tokens=str(len(request.chain.tokens)),
            )  # fmt: skip
        return outcome

    @staticmethod
    def _has(view: View, tier: str) -> bool:
        return bool(view.states) if tier == "ssm" else bool(view.blocks or view.partials or view.windows)

    def why_not(self, view: View, request: RestoreRequest) -> str:
        """Why nothing is restored: of several reasons the one that a person can do something about."""
        if request.limit < request.have + max(1, self._min_restore_tokens()):
            return "too_short"
        if NOT_WORTH_IT in view.reasons.values():
            return NOT_WORTH_IT
        digests = view.digests()
        if digests and all(self._needs(each, view, request.expected, None) is None for each in digests):
            return "foreign_layout"
        reasons = [reason for reason in view.reasons.values() if reason]
        serious = [reason for reason in reasons if reason != "never_stored"]
        if serious:
            return serious[0]
        expects = _needs_of_signature(request.expected)
        if self._has(view, "kv") and expects not in (None, ROWS_ONLY):
            return "no_checkpoint"
        return "too_little" if digests else "never_stored"

    def _count(self, request: RestoreRequest, outcome: RestoreOutcome, seconds: float) -> None:
        if outcome.reason == NOT_WORTH_IT:
            self._telemetry.count("restores_given_up")
        if not outcome.position and outcome.reason == NOT_WORTH_IT:
            for tier in outcome.bytes_by_tier or ("kv",):
                self._telemetry.tier(tier).miss(outcome.reason)
            return
        if not outcome.position:
            self._telemetry.count("restores_failed")
            failing = {candidate.found.kind.tier for candidate, _, _ in outcome.failures}
            for tier in failing or outcome.bytes_by_tier or ("kv",):
                self._telemetry.tier(tier).miss(outcome.reason)
            self._telemetry.emit(
                "fault", "warning", f"{request.model}: a restore failed ({outcome.reason})",
                reason=outcome.reason, model=request.model,
            )  # fmt: skip
            return
        gained = outcome.position - request.have
        self._telemetry.count("restores")
        self._telemetry.count("prefill_tokens_saved", gained)
        for tier, size in outcome.bytes_by_tier.items():
            telemetry = self._telemetry.tier(tier)
            telemetry.hit(gained, size)
            telemetry.promote_s.add(seconds)
        split = {f"{tier}_bytes": str(size) for tier, size in outcome.bytes_by_tier.items()}
        self._telemetry.emit(
            "promote", "info",
            f"{request.model}: {gained} tokens restored in {seconds * 1e3:.0f} ms ({outcome.codec})",
            model=request.model, tokens=str(gained), position=str(outcome.position), bytes=str(outcome.bytes),
            ms=f"{seconds * 1e3:.1f}", codec=outcome.codec, **split,
        )  # fmt: skip

    def _record_failed(self, candidate: Candidate, error: BaseException) -> str:
        """A record that was promised did not come whole: counted, shown when damaged, and not asked for again soon."""
        reason = reason_of(error)
        tier, peer = candidate.found.kind.tier, candidate.source.peer
        self._telemetry.count(f"failed_records_{reason}")
        if is_damage(error):
            self._telemetry.emit(
                "fault", "error", f"{peer} sent a record that is not what was written ({reason})",
                reason=reason, peer=peer, key=candidate.found.key.hex()[:12], tier=tier,
            )  # fmt: skip
        self._bad.add(peer, candidate.found.key, SLOW_S if isinstance(error, PeerError | TimeoutError) else BAD_S)
        self._routers[tier].known.discard([candidate.found.key])
        return reason


def _tiers(needs: Needs) -> tuple[str, ...]:
    kv = needs.rows or needs.window
    return (*(("kv",) if kv else ()), *(("ssm",) if needs.state else ()))


def _needs_of_signature(expected: str) -> Needs | None:
    if not expected:
        return None
    kinds = {row[0] for row in json.loads(expected)}
    return Needs("rows" in kinds, "window" in kinds, "state" in kinds)


def _difference(layout: Layout, expected: str) -> str:
    """How a stored layout differs from the expected signature, "" where they are alike."""
    stored, wanted = json.loads(signature_json(layout)), json.loads(expected)
    if len(stored) != len(wanted):
        return f"{len(stored)} layers stored, {len(wanted)} here"
    for number, (there, here) in enumerate(zip(stored, wanted, strict=True)):
        if there != here:
            return f"layer {number} is a {_layer_text(there)} there, a {_layer_text(here)} here"
    return ""


def _layer_text(row: list[Any]) -> str:
    parts = ", ".join(f"{name} {value}" for name, value in row[3])
    return f"{row[1]}({parts})" if parts else str(row[1])
