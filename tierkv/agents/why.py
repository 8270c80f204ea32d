"""Reasons in words: what a slug that statistics count means to somebody who asks why a prompt was computed."""

from __future__ import annotations

from tierkv.agents.pending import QUEUE_PEER
from tierkv.agents.unstored import NOT_STORED
from tierkv.telemetry.explanation import Explanation, TierFinding
from tierkv.units import format_duration

_TEXTS = {
    "not_in_engine": "the engine's own cache did not have it",
    "not_asked": "not part of this question",
    "never_stored": "never stored",
    NOT_STORED: "could not be stored",
    "no_vault": "there is no vault for it",
    "replaced": "replaced by another copy",
    "loading": "the vault was still loading its records",
    "too_lossy": "stored less exactly than worst_fidelity allows",
    "failed_before": "a copy that failed at an earlier restore is left alone for a while",
    "no_checkpoint": "there is no checkpoint at a position that the rows reach",
    "no_rows_for_it": "no rows reach the checkpoint",
    "too_little": "what there is saves fewer tokens than min_restore_tokens",
    "identity_pending": "the model's weights were still being hashed",
    "timed_out": "the vault was too slow",
    "unreachable": "the vault is not reachable",
    "breaker_open": "the vault failed a moment ago and is left alone for a while",
    "not_authenticated": "the vault does not take this agent's token",
    "wrong_service": "what answers at the vault's address does not answer as a TierKV vault does",
    "cancelled": "the engine went away",
    "agent_silent": "the agent did not answer the engine",
    "no_agent": "the engine could not reach the agent",
    "agent_error": "a fault of the agent; its log says more",
    "hook_error": "a fault of the engine's hook; the engine's log says more",
    "weights_changed": "the model's files changed after they were loaded",
    "weights_unreadable": "the model's files cannot be read",
    "model_unknown": "the engine has not said which model it serves",
    "model_files": "the model's files are not those that the engine loaded",
    "unsupported_class": "its cache has a class that is not carried",
    "batched_cache": "its cache is that of a batch",
    "batch": "its cache is that of a batch",
    "mid_batch": "its cache is in the middle of a padded batch",
    "foreign_layout": "its cache is laid out otherwise than expected",
    "engine_version": "this version of the engine is built otherwise than expected",
    "no_state": "its cache holds nothing",
    "dtype": "its cache has arrays of a type that is not carried",
    "position_unknown": "no layer says how many tokens it has seen",
    "positions_differ": "its layers stand at different positions",
    "position_mismatch": "it stands elsewhere than its tokens end",
    "inside_media": "it ends inside an image",
    "bad_range": "a layer does not hold these rows",
    "rows_dropped": "a chunk has lost its first rows",
    "damaged": "the record was damaged",
    "covered": "the engine's own cache had all of it",
    "refused": "the vault refused",
    "failed": "the restore failed",
}
# A record whose bytes are not what was written.
_DAMAGE = frozenset(
    {
        "bad_checksum", "bad_layout", "bad_length", "bad_message", "bad_payload", "bad_scalars", "foreign_key",
        "foreign_model", "foreign_position", "foreign_record", "foreign_tokens", "impossible_header", "incomplete",
        "no_record_header", "not_a_frame", "out_of_order", "oversized", "reordered", "truncated", "unknown_codec",
        "unknown_version", "wrong_segment", "wrong_shape",
    }
)  # fmt: skip
_GONE = {
    "evicted": "evicted",
    "purged": "purged by somebody",
    "expired": "expired",
    "quarantined": "found damaged and set aside",
}


def reason_text(reason: str) -> str:
    """The reason for people; a slug that nobody has put into words is shown as it is."""
    if reason in _TEXTS:
        return _TEXTS[reason]
    if reason in _GONE:
        return _GONE[reason]
    return f"a record was damaged or foreign ({reason})" if reason in _DAMAGE else reason.replace("_", " ")


def detail_of(finding: TierFinding, asked_unix_s: float, why: str) -> str:
    """Why this tier gave no more. ``why``: what the reason's slug does not say."""
    reason = finding.reason
    if not reason:
        return ""
    if reason == "differs":
        text = f"the nearest stored prompt differs from token {finding.differs_at:,} on"
        return f"{text} ({why})" if why else text
    if reason == "other_identity":
        return f"stored under another identity ({why})"
    if reason == "foreign_layout":
        return f"stored with another cache layout{f' ({why})' if why else ''}"
    if reason == "not_worth_it":
        return "computing it was expected to be quicker"
    text = reason_text(reason)
    if finding.gone_unix_s:
        ago_s = asked_unix_s - finding.gone_unix_s
        text += f" {format_duration(ago_s)} before" if ago_s >= 0 else f" {format_duration(-ago_s)} after the request"
    return f"{text} ({why})" if why else text


def sentence_of(
    explained: Explanation, *, prompt_only: bool, least_tokens: int, beyond: Explanation | None = None
) -> str:
    """What happened and why no more, in one sentence.

    ``beyond``: of a state that takes another form from some position on, what was found of that form.
    """
    request = explained.request
    n, position, hot = request.prompt_tokens, request.position, request.hot_tokens
    if request.outcome == "asked":
        return f"a prompt of {n:,} tokens is being looked up"
    if request.outcome == "restored":
        return _restored(explained, prompt_only, beyond)
    why = _why_none(explained, least_tokens)
    if hot and position:
        head = f"{position:,} of {n:,} tokens were in the engine's own cache"
        return head if position >= n - 1 or request.reason == "covered" else f"{head}; no more was restored: {why}"
    return f"nothing {'would be' if prompt_only else 'was'} restored of {n:,} tokens: {why}"


def _restored(explained: Explanation, prompt_only: bool, beyond: Explanation | None) -> str:
    request = explained.request
    n, position, hot = request.prompt_tokens, request.position, request.hot_tokens
    givers = sorted({each.peer for each in explained.tiers if each.tier != "hot" and each.used_tokens})
    source = f" from {' and '.join(givers)}" if givers else ""
    if prompt_only:
        text = f"{position:,} of {n:,} tokens would be restored"
    elif hot:
        text = f"{hot:,} of {n:,} tokens were in the engine's own cache, {position - hot:,} more were restored{source}"
    else:
        text = f"restored {position:,} of {n:,} tokens{source}"
    if request.seconds:
        text += f" in {format_duration(request.seconds)}"
    if position >= n - 2:
        return text
    return f"{text}; the rest {_rest(explained, beyond)}"


def _rest(explained: Explanation, beyond: Explanation | None = None) -> str:
    """Why a restore ended where it did: what the tier that reached least far says."""
    if explained.request.reason == "not_worth_it":
        return "would have taken longer than computing it"
    limiting = _vaults_with_a_reason(explained)
    if not limiting:
        return "was not stored" if beyond is None else _rest(beyond)
    least = min(limiting, key=lambda each: each.found_tokens)
    return "was never stored" if least.reason == "never_stored" else f"did not come: {least.detail}"


def _vaults_with_a_reason(explained: Explanation) -> list[TierFinding]:
    """What waits in the agent to be sent holds little of anything: it tells why only where nothing else does."""
    telling = [each for each in explained.tiers if each.tier != "hot" and each.detail]
    return [each for each in telling if each.peer != QUEUE_PEER] or telling


def _why_none(explained: Explanation, least_tokens: int) -> str:
    reason = explained.request.reason
    if reason == "too_short":
        return f"fewer than {least_tokens} tokens were left to gain"
    if reason == "not_worth_it":
        restore_s, prefill_s = explained.expected_restore_s, explained.expected_prefill_s
        if restore_s >= prefill_s > 0:
            restore, prefill = format_duration(restore_s), format_duration(prefill_s)
            return f"restoring was expected to take {restore}, computing {prefill}"
        return "it came slower than computing takes"
    asked = _vaults_with_a_reason(explained)
    same = [each for each in asked if each.reason == reason]
    telling = same or [each for each in asked if each.reason not in ("never_stored", "no_vault")] or asked
    if reason in ("", "never_stored", "failed", "no_checkpoint", "too_little") and asked:
        # That a checkpoint is not there is told best by the vault that had it.
        other = [each for each in asked if each.reason not in ("never_stored", "no_checkpoint")]
        telling = other or same or asked
    return telling[0].detail if telling else reason_text(reason) if reason else "no vault was asked"
