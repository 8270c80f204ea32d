"""From a trace to an explanation: vaults are asked what became of what they did not have; one sentence is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from tierkv.agents.engine import Engine, Engines
from tierkv.agents.identities import Identities
from tierkv.agents.model_registry import Model
from tierkv.agents.promote import Promoter
from tierkv.agents.restore_run import NOT_WORTH_IT, RestoreRequest
from tierkv.agents.routing import TierRouter
from tierkv.agents.trace import RequestTrace, TraceBook, VaultTrace, scratch_trace
from tierkv.agents.why import detail_of, reason_text, sentence_of
from tierkv.errors import Refused, TierKVError
from tierkv.identity.blocks import BLOCK_TOKENS, PromptChain, Tokens
from tierkv.rpc.tracing import Traced
from tierkv.store.journal import NEVER_STORED, Fate
from tierkv.telemetry.explanation import Explanation, RequestLine, TierFinding

# Every engine has states that are too short. What begins like this is about the engine's own lookup.
COMMON, OWN_LOOKUP = frozenset({"too_short"}), "engine_"
# Of these another state of the same engine says nothing.
PASSING = frozenset({"no_agent", "identity_pending", "mover_full", "queue_full", "hook_error"})
DEFAULT_LINES, MAX_LINES = 50, 1000
# Reasons that a vault knows more about than it says while a request waits.
ASK_MORE = frozenset({"", "never_stored", "evicted", "purged", "expired", "quarantined", "loading", "replaced"})


class Explainer:
    """Answers ``tierkv explain`` and the console. Owned by the event loop; asks vaults, changes and counts nothing."""

    def __init__(
        self,
        traces: TraceBook,
        routers: Mapping[str, TierRouter],
        promoter: Promoter,
        identities: Identities,
        engines: Engines,
        min_restore_tokens: Callable[[], int],
        refusals: Callable[[str], Mapping[str, int]],
    ) -> None:
        """``refusals``: how many states an engine's hook could not hand over, by reason, for an engine's id."""
        self._traces = traces
        self._ports = {(tier, port.peer): port for tier, router in routers.items() for port in router.ports}
        self._promoter = promoter
        self._identities = identities
        self._engines = engines
        self._min_restore_tokens = min_restore_tokens
        self._refusals = refusals

    def requests(self, limit: int) -> list[RequestLine]:
        """The latest first; ``limit`` 0 means 50."""
        most = min(limit or DEFAULT_LINES, MAX_LINES)
        return [_line(trace) for _, trace in zip(range(most), self._traces.latest(), strict=False)]

    async def explain(self, number: int) -> Explanation:
        """The request of that number, 0 for the last one. Raises Refused when it is not (or no longer) known."""
        trace = self._traces.get(number)
        if trace is None:
            raise Refused(
                f"request {number} is not among the last {len(self._traces)} that are kept here"
                if number and len(self._traces) else "no request has come yet since this agent started"
            )  # fmt: skip
        return await self._explained(trace)

    async def explain_prompt(self, tokens: Tokens, model_name: str) -> Explanation:
        """What would be found for this prompt now. Raises Refused for a model that no engine has announced."""
        if len(tokens) < 2:
            raise Refused("a prompt has at least 2 tokens")
        found = self._engines.models_named(model_name)
        if found is None:
            raise Refused(f"no engine here serves {model_name!r}" if model_name else "no engine is attached here")
        engine, forms = found
        traces = [await self._looked_up(engine, model, tokens) for model in forms]
        return await self._explained(max(traces, key=lambda each: (each.position, each.found)))

    async def _looked_up(self, engine: Engine, model: Model, tokens: Tokens) -> RequestTrace:
        trace = scratch_trace(model.name, len(tokens))
        trace.engine_build = engine.build or engine.kind
        trace.limit = len(tokens) - 1
        if model.root is None or model.unusable_reason:
            trace.outcome, trace.reason = "computed", model.unusable_reason
            return trace
        chain = PromptChain.of(model.root, tokens[: trace.limit])
        trace.prompt(chain)
        request = RestoreRequest(0, model.name, chain, 0, 0, trace.limit, "", 10.0, model.prefill.seconds)
        view, plan = await self._promoter.look_up(request, trace, peek=True)
        trace.position = plan.position if plan is not None else 0
        trace.outcome = "restored" if plan is not None else "computed"
        trace.reason = "" if plan is not None else self._promoter.why_not(view, request)
        trace.hot_reason = "not_asked"
        return trace

    # --- one trace ------------------------------------------------------------------------------------

    async def _explained(self, trace: RequestTrace) -> Explanation:
        asked = [part for part in trace.vaults if not part.error and (part.kind, part.peer) in self._ports]
        answers = await asyncio.gather(*(self._trace_at(part, trace) for part in asked))
        traced = {(part.kind, part.peer): answer for part, answer in zip(asked, answers, strict=True)}
        findings = [self._hot(trace)]
        findings += [self._vault(trace, part, traced.get((part.kind, part.peer))) for part in trace.vaults]
        differing = self._differing(trace, [each for each in answers if each is not None])
        explained = Explanation(
            _line(trace), "", tuple(findings), trace.root.hex()[:12] if trace.root else "",
            trace.keys[-1].hex()[:16] if trace.keys else "", trace.codec, trace.fidelity, trace.bytes,
            trace.expected_restore_s, trace.expected_prefill_s, differing, trace.engine_build,
        )  # fmt: skip
        beyond = None
        if trace.other_form is not None and trace.other_form.limit > trace.limit:
            beyond = await self._explained(trace.other_form)
        sentence = sentence_of(
            explained, prompt_only=trace.number == 0, least_tokens=self._min_restore_tokens(), beyond=beyond
        )
        return replace(explained, sentence=sentence)

    async def _trace_at(self, part: VaultTrace, trace: RequestTrace) -> Traced | None:
        if trace.root is None:
            return None
        # By now the vault may have the prompt: what it had when it was asked counts.
        beginning = b"" if part.reach else trace.beginning
        try:
            return await self._ports[part.kind, part.peer].trace(trace.root, trace.keys, beginning)
        except TierKVError:
            return None

    def _hot(self, trace: RequestTrace) -> TierFinding:
        covered = trace.have >= trace.limit
        used = trace.have if trace.position >= trace.have else 0
        reason = "" if covered else trace.hot_reason or "not_in_engine"
        finding = TierFinding(
            "hot", trace.engine_build, trace.number > 0, trace.prompt_tokens, trace.have, used, reason=reason,
            gone_unix_s=trace.hot_gone_unix_s,
        )  # fmt: skip
        return replace(finding, detail=detail_of(finding, trace.time_unix_s, trace.hot_why))

    def _vault(self, trace: RequestTrace, part: VaultTrace, traced: Traced | None) -> TierFinding:
        ssm = part.kind == "ssm"
        found = max(part.checkpoints, default=0) if ssm else part.reach
        reason, fate = self._reason(trace, part, traced)
        differs_at = part.differs_at
        if reason == "never_stored" and not ssm and traced is not None and _parts_here(part, traced):
            differs_at = differs_at or part.reach + 1
        # Another identity's prompt with the same first tokens is nearer than one that differs from the first token on.
        if differs_at <= 1 and reason == "never_stored" and traced is not None and traced.other_identities:
            reason = "other_identity"
        if differs_at and not ssm and reason == "never_stored":
            reason = "differs"
        refused = dict(part.refused + part.failed)
        finding = TierFinding(
            part.tier, part.peer, True, trace.limit, found, part.used_tokens, part.used_bytes, part.checkpoints,
            refused, part.seconds, reason, "", differs_at if reason == "differs" else 0,
            fate.unix_s if fate is not None and fate.reason == reason else 0.0,
        )  # fmt: skip
        why = self._why(trace, part, traced, reason, fate)
        return replace(finding, detail=detail_of(finding, trace.time_unix_s, why))

    def _reason(self, trace: RequestTrace, part: VaultTrace, traced: Traced | None) -> tuple[str, Fate | None]:
        """Why this vault gave no more, "" if it gave all that was wanted of it; and what became of what is missing."""
        if part.error:
            return part.error, None
        if part.used_tokens and trace.position >= trace.limit:
            return "", None
        if trace.reason == NOT_WORTH_IT:
            return NOT_WORTH_IT, None
        if part.failed:
            return part.failed.most_common(1)[0][0], None
        if part.refused:
            return part.refused.most_common(1)[0][0], None
        if trace.reason == "foreign_layout" and (part.reach or part.checkpoints):
            return "foreign_layout", None
        if part.kind == "ssm":
            return self._checkpoint_reason(part, traced)
        if part.reach >= trace.limit:
            return ("" if part.used_tokens or _failed_elsewhere(trace, part) else trace.reason), None
        if part.missing.reason not in ASK_MORE:
            return part.missing.reason, part.missing
        fate = traced.next_block if traced is not None and traced.leading_blocks * BLOCK_TOKENS <= part.reach else None
        if fate is None or fate.reason != part.missing.reason:
            # Stored again since, perhaps: what the vault said when it was asked counts.
            fate = part.missing if part.missing.reason else NEVER_STORED
        return fate.reason, fate

    @staticmethod
    def _checkpoint_reason(part: VaultTrace, traced: Traced | None) -> tuple[str, Fate | None]:
        lost = next((fate for fate in (traced.lost_checkpoints if traced is not None else ())), None)
        if lost is not None and lost.end > max(part.checkpoints, default=0):
            return lost.reason, lost
        if part.checkpoints:
            return ("" if part.used_tokens else "no_rows_for_it"), None
        if part.missing.reason in ASK_MORE:
            return "never_stored", None
        return part.missing.reason, part.missing

    def _why(self, trace: RequestTrace, part: VaultTrace, traced: Traced | None, reason: str, fate: Fate | None) -> str:
        """What the slug does not say."""
        if part.error or reason in part.failed:
            return part.problem
        if reason == "foreign_layout":
            return trace.layout_note
        if reason == "other_identity" and traced is not None:
            other = traced.other_identities[0]
            parts = self._identities.differing(trace.root, other.root) if trace.root is not None else ()
            what = ", ".join(parts) if parts else "this agent has never seen it"
            return f"{other.model} as {other.root.hex()[:12]}: {what}"
        if fate is not None and fate.reason == reason and fate.why:
            return fate.why
        if reason == "never_stored":
            return self._not_handed_over(trace, COMMON)
        return self._not_handed_over(trace, COMMON | PASSING) if reason == "differs" else ""

    def _not_handed_over(self, trace: RequestTrace, left_out: frozenset[str]) -> str:
        """A hook says how many states it could not hand over and why, not of which prompts they were."""
        refusals = self._refusals(trace.engine).items()
        found = {each: n for each, n in refusals if each not in left_out and not each.startswith(OWN_LOOKUP)}
        if not found:
            return ""
        reason, count = max(found.items(), key=lambda each: each[1])
        states = "1 state" if count == 1 else f"{count:,} states"
        return f"its engine could not hand over {states}: {reason_text(reason)}"

    def _differing(self, trace: RequestTrace, answers: list[Traced]) -> tuple[str, ...]:
        root = trace.root
        others = [other.root for answer in answers for other in answer.other_identities]
        return self._identities.differing(root, others[0]) if root is not None and others else ()


def _failed_elsewhere(trace: RequestTrace, part: VaultTrace) -> bool:
    """Whether another vault is why nothing of this one was used."""
    if part.missing.reason == trace.reason:
        return False
    others = (each for each in trace.vaults if each is not part)
    return any(each.error or each.failed.total() or each.missing.reason == trace.reason for each in others)


def _parts_here(part: VaultTrace, traced: Traced) -> bool:
    """Whether other prompts go on where this one is not known any further."""
    return traced.others_follow and traced.leading_blocks * BLOCK_TOKENS == part.reach


def _line(trace: RequestTrace) -> RequestLine:
    return RequestLine(
        trace.number, trace.time_unix_s, trace.model, trace.prompt_tokens, trace.have, trace.position, trace.outcome,
        trace.reason, trace.seconds,
    )  # fmt: skip
