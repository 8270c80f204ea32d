"""``tierkv prefixes``, ``pin`` and ``unpin``: what the vaults hold, and what must not be evicted."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING, Any

from tierkv.cli import selection
from tierkv.cli.ask import Answer, ask_vaults, exit_code_of
from tierkv.cli.context import loaded, token_of
from tierkv.cli.output import Style, clean, document, plural, say, table, warn
from tierkv.cli.parser import Commands
from tierkv.cli.snapshot_json import time_of
from tierkv.errors import EXIT_FAILED, EXIT_OK, EXIT_PARTIAL, UsageError
from tierkv.units import format_duration, format_size

if TYPE_CHECKING:
    from tierkv.rpc.admin import PrefixPage, PrefixSummary

_SHORT_KEY = 12
NOTHING_MATCHES = "nothing matches; 'tierkv prefixes' lists what there is"


def add(commands: Commands) -> None:
    listing = commands.add(
        "prefixes",
        _prefixes,
        "what the vaults hold: model, tokens, bytes, hits, age",
        description="Lists prefixes (a prompt's state from its first token on), most recently used first. OWN is what\n"
        "only this prefix uses; the rest of TOTAL is shared with others.",
        example="  tierkv prefixes --model SmolLM2 --limit 20\n  tierkv prefixes --json",
    )
    selection.add_options(listing, everything=False)
    listing.add_argument("--limit", type=int, default=50, metavar="N", help="at most N a vault (default 50)")
    listing.add_argument("--json", action="store_true", help="one JSON document")
    for name, summary in (("pin", "keep records from being evicted"), ("unpin", "let pinned records be evicted again")):
        parser = commands.add(
            name, _pin, summary, example=f"  tierkv {name} --prefix 1f0c5a2b\n  tierkv {name} --model SmolLM2"
        )
        selection.add_options(parser, everything=True)
        parser.add_argument("--json", action="store_true", help="one JSON document")


def _prefixes(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.limit <= 100_000:
        raise UsageError("--limit must be from 1 to 100000")
    configuration, wanted = loaded(arguments), selection.selector(arguments)
    asked = selection.vaults(configuration, arguments.connect)
    token = token_of(configuration)
    answers = asyncio.run(ask_vaults(asked, token, lambda vault: vault.list_prefixes(wanted, arguments.limit)))
    tell_failures(answers)
    found = [(prefix, answer) for answer in answers if answer.value for prefix in answer.value.prefixes]
    found.sort(key=lambda pair: -pair[0].last_hit_unix_s)
    if arguments.json:
        document(
            "prefixes",
            prefixes=[_as_json(prefix, answer.target.address) for prefix, answer in found],
            total=sum(answer.value.total for answer in answers if answer.value),
            failures=failures(answers),
        )
    else:
        _print(found, answers)
    return EXIT_OK if any(answer.value for answer in answers) else exit_code_of(answers)


def _as_json(prefix: PrefixSummary, address: str) -> dict[str, Any]:
    return {
        "key": prefix.leaf_key.hex(),
        "vault": address,
        "tier": prefix.tier,
        "model": prefix.model,
        "root": prefix.root.hex(),
        "tokens": prefix.tokens,
        "own_bytes": prefix.own_bytes,
        "total_bytes": prefix.total_bytes,
        "records": prefix.records,
        "hits": prefix.hits,
        "created": time_of(prefix.created_unix_s),
        "last_hit": time_of(prefix.last_hit_unix_s),
        "pinned": prefix.pinned,
        "fidelity": prefix.fidelity,
        "codecs": list(prefix.codecs),
    }


def _print(found: list[tuple[PrefixSummary, Answer[PrefixPage]]], answers: list[Answer[PrefixPage]]) -> None:
    now = time.time()
    header = ("KEY", "TIER", "TOKENS", "OWN", "TOTAL", "HITS", "USED", "PIN", "MODEL")
    rows = [
        (
            prefix.leaf_key.hex()[:_SHORT_KEY],
            clean(prefix.tier, 6),
            f"{prefix.tokens:,}",
            format_size(prefix.own_bytes),
            format_size(prefix.total_bytes),
            f"{prefix.hits:,}",
            format_duration(max(0.0, now - prefix.last_hit_unix_s)) if prefix.last_hit_unix_s else "never",
            "pin" if prefix.pinned else "",
            clean(prefix.model, 60),
        )
        for prefix, _ in found
    ]
    if rows:
        lines = table(header, rows, right=(2, 3, 4, 5, 6))
        say(Style().bold(lines[0]))
        say("\n".join(lines[1:]))
    total = sum(answer.value.total for answer in answers if answer.value)
    if any(answer.value for answer in answers):
        warn(f"{plural(len(found), 'prefix', 'prefixes')} of {total:,}")


def failures(answers: list[Answer[Any]]) -> list[dict[str, str]]:
    return [
        {"vault": answer.target.address, "kind": type(answer.error).__name__, "message": answer.reason}
        for answer in answers
        if answer.error
    ]


def tell_failures(answers: list[Answer[Any]]) -> None:
    for answer in answers:
        if answer.error:
            warn(f"tierkv: {answer.target.address}: {clean(answer.reason)}")


def _pin(arguments: argparse.Namespace) -> int:
    configuration, wanted = loaded(arguments), selection.chosen(arguments)
    asked = selection.vaults(configuration, arguments.connect)
    pinning = arguments.command == "pin"
    token = token_of(configuration)
    answers = asyncio.run(ask_vaults(asked, token, lambda vault: (vault.pin if pinning else vault.unpin)(wanted)))
    tell_failures(answers)
    done = [{"vault": answer.target.address, "records": answer.value} for answer in answers if answer.value is not None]
    if arguments.json:
        document(arguments.command, vaults=done, failures=failures(answers))
    else:
        for item in done:
            say(f"{item['vault']}: {plural(int(item['records'] or 0), 'record')} {arguments.command}ned")
    code = exit_code_of(answers)
    if done and not any(item["records"] for item in done):
        warn(NOTHING_MATCHES)
        # Who pins wants something kept, and nothing is; who unpins has what was wanted.
        code = code or (EXIT_FAILED if pinning else EXIT_OK)
    return EXIT_PARTIAL if done and code and any(answer.error for answer in answers) else code
