"""``tierkv purge``: removes what was shown first, and nothing else; can be taken back for a while."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING, Any

from tierkv.cli import selection
from tierkv.cli.ask import Answer, ask_vaults, exit_code_of
from tierkv.cli.context import Target, loaded, token_of
from tierkv.cli.output import clean, document, plural, say, warn
from tierkv.cli.parser import Commands
from tierkv.cli.prefixes import NOTHING_MATCHES, failures, tell_failures
from tierkv.errors import EXIT_FAILED, EXIT_OK, EXIT_PARTIAL, EXIT_REFUSED, StaleToken, UsageError
from tierkv.units import format_duration, format_size

if TYPE_CHECKING:
    from tierkv.rpc.admin import PurgePlan
    from tierkv.rpc.auth import Token
    from tierkv.rpc.client import VaultClient
    from tierkv.store.base import PurgeResult, Selector

_EXAMPLE = """\
  tierkv purge --model SmolLM2 --dry-run     what would go
  tierkv purge --older-than 7d               shows it, asks, then does it
  tierkv purge --all --yes --json            for scripts
  tierkv purge --undo TOKEN                  takes it back, for as long as vault.undo_s says
"""


def add(commands: Commands) -> None:
    parser = commands.add(
        "purge",
        _purge,
        "remove records from the vaults: first shown, then done, can be taken back",
        description="Every vault first says what would go (a dry run) and gives a token for exactly that; what comes\n"
        "in between is not touched. Needs the shared token.",
        example=_EXAMPLE,
    )
    selection.add_options(parser, everything=True)
    parser.add_argument("--dry-run", action="store_true", help="show what would go, remove nothing")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask; needed when this is not a terminal")
    parser.add_argument("--undo", metavar="TOKEN", action="append", default=[], help="take a purge back; several times")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _purge(arguments: argparse.Namespace) -> int:
    configuration = loaded(arguments)
    asked = selection.vaults(configuration, arguments.connect)
    token = token_of(configuration)
    if arguments.undo:
        return _undo(arguments, asked, token)
    wanted = selection.chosen(arguments)
    if not arguments.dry_run and not arguments.yes and not sys.stdin.isatty():
        raise UsageError("this is not a terminal, so nobody can be asked: add --yes, or look first with --dry-run")
    # One loop for both rounds: gRPC wakes the loop that it began with, and complains on stderr when that is closed.
    with asyncio.Runner() as runner:
        return _shown_and_done(arguments, asked, token, wanted, runner)


def _shown_and_done(
    arguments: argparse.Namespace, asked: list[Target], token: Token | None, wanted: Selector, runner: asyncio.Runner
) -> int:
    plans = runner.run(ask_vaults(asked, token, lambda vault: vault.preview_purge(wanted)))
    tell_failures(plans)
    useful = [plan for plan in plans if plan.value is not None and plan.value.records]
    if not arguments.json:
        _print_plans(plans)
    if arguments.dry_run or not useful:
        if arguments.json:
            document("purge", dry_run=arguments.dry_run, vaults=[_plan_json(plan) for plan in plans], purged=[])
        elif not useful and any(plan.value for plan in plans):
            warn(NOTHING_MATCHES)
        return exit_code_of(plans)
    if not arguments.yes and not _confirmed(useful):
        warn("nothing was purged")
        return EXIT_FAILED
    return _apply(arguments, plans, useful, token, runner)


def _apply(
    arguments: argparse.Namespace,
    plans: list[Answer[PurgePlan]],
    useful: list[Answer[PurgePlan]],
    token: Token | None,
    runner: asyncio.Runner,
) -> int:
    tokens = {plan.target.address: plan.value.token for plan in useful if plan.value}

    async def one(vault: VaultClient) -> PurgeResult:
        return await vault.purge(tokens[vault.peer])

    results = runner.run(ask_vaults([plan.target for plan in useful], token, one))
    tell_failures(results)
    if arguments.json:
        purged = [_result_json(result) for result in results if result.value]
        failed = failures(plans) + failures(results)
        document("purge", dry_run=False, vaults=[_plan_json(plan) for plan in plans], purged=purged, failures=failed)
    else:
        _print_results(results)
    if any(result.value for result in results) and any(answer.error for answer in (*plans, *results)):
        return EXIT_PARTIAL
    return exit_code_of(results)


def _print_plans(plans: list[Answer[PurgePlan]]) -> None:
    for plan in plans:
        if plan.value is None:
            continue
        pinned = f" ({plan.value.pinned_records:,} pinned)" if plan.value.pinned_records else ""
        counts = f"{plural(plan.value.records, 'record')}{pinned}, {plural(plan.value.prefixes, 'prefix', 'prefixes')}"
        cost = f"{format_size(plan.value.bytes)}, {plural(plan.value.tokens, 'token')} to prefill again"
        say(f"{plan.target.address}: {counts}, {cost}")
        for prefix in plan.value.examples[:5]:
            text = f"{prefix.leaf_key.hex()[:12]}  {prefix.tokens:,} tokens  {format_size(prefix.own_bytes)}"
            say(f"    {text}  {clean(prefix.model, 60)}")
        unnamed = plan.value.prefixes - len(plan.value.examples[:5])
        if unnamed > 0:
            say(f"    and {unnamed:,} more")


def _print_results(results: list[Answer[PurgeResult]]) -> None:
    undo: list[str] = []
    for result in results:
        if result.value is None:
            continue
        done = f"{plural(result.value.records, 'record')} purged, {format_size(result.value.bytes)}"
        say(f"{result.target.address}: {done}")
        if result.value.undo_s > 0:
            undo.append(f"--undo {result.value.undo_token}")
    kept = [result.value.undo_s for result in results if result.value and result.value.undo_s > 0]
    if kept:
        say(f"for {format_duration(min(kept))} this takes it back: tierkv purge {' '.join(undo)}")


def _confirmed(useful: list[Answer[PurgePlan]]) -> bool:
    records = sum(plan.value.records for plan in useful if plan.value)
    size = sum(plan.value.bytes for plan in useful if plan.value)
    where = plural(len(useful), "vault")
    question = f"purge {plural(records, 'record')} ({format_size(size)}) from {where}? type yes: "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() == "yes"


def _plan_json(plan: Answer[PurgePlan]) -> dict[str, Any]:
    value = plan.value
    return {
        "vault": plan.target.address,
        "error": {"kind": type(plan.error).__name__, "message": plan.reason} if plan.error else None,
        "records": value.records if value else None,
        "bytes": value.bytes if value else None,
        "prefixes": value.prefixes if value else None,
        "tokens": value.tokens if value else None,
        "pinned_records": value.pinned_records if value else None,
    }


def _result_json(result: Answer[PurgeResult]) -> dict[str, Any]:
    value = result.value
    assert value is not None
    return {
        "vault": result.target.address,
        "records": value.records,
        "bytes": value.bytes,
        "undo_token": value.undo_token,
        "undo_s": value.undo_s,
        "epoch": value.epoch,
    }


# --- taking back --------------------------------------------------------------------------------


def _undo(arguments: argparse.Namespace, asked: list[Target], token: Token | None) -> int:
    """Every token is tried at every vault: it is known at the one that gave it."""
    code = EXIT_OK
    restored: list[dict[str, Any]] = []
    failed: list[Answer[Any]] = []
    for undo_token in arguments.undo:
        answers = asyncio.run(ask_vaults(asked, token, _taking_back(undo_token)))
        done = [answer for answer in answers if answer.value is not None]
        for answer in done:
            records, size = answer.value or (0, 0)
            restored.append({"vault": answer.target.address, "records": records, "bytes": size})
            if not arguments.json:
                say(f"{answer.target.address}: {plural(records, 'record')} back, {format_size(size)}")
        if not done:
            other = [answer for answer in answers if not isinstance(answer.error, StaleToken)]
            tell_failures(other)
            failed += other
            if not other:
                warn(
                    f"tierkv: no vault knows the undo token {clean(undo_token, 60)!r}: it is used, or its time is over"
                )
            code = exit_code_of(other) if other else EXIT_REFUSED
    if arguments.json:
        document("purge", undone=restored, failures=failures(failed))
    return EXIT_PARTIAL if restored and code else code


def _taking_back(undo_token: str) -> Any:
    async def one(vault: VaultClient) -> tuple[int, int]:
        return await vault.undo_purge(undo_token)

    return one
