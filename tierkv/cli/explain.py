"""``tierkv explain``: why the last prompt, or any, was restored or computed; tier by tier."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tierkv.cli.ask import ask_all
from tierkv.cli.context import Target, add_connect, loaded, targets, token_of
from tierkv.cli.output import Style, clean, document, say, table, warn, width
from tierkv.cli.parser import Commands
from tierkv.cli.snapshot_json import time_of
from tierkv.errors import EXIT_OK, MissingExtra, TierKVError, UsageError
from tierkv.units import format_duration, format_size

if TYPE_CHECKING:
    from tierkv.rpc.node_client import NodeClient
    from tierkv.telemetry.explanation import Explanation, RequestLine, TierFinding

_EXAMPLE = """\
  tierkv explain                                        the last request of this machine's engine
  tierkv explain 41                                     that one
  tierkv explain --list                                 the last requests, the latest first
  tierkv explain --prompt ids.json                      what would be found for these token ids now
  tierkv explain --prompt text.txt --tokenizer MODEL    the same for a text, cut as MODEL's tokenizer.json cuts it
"""
_BOUND_S = 10.0
_MAX_PROMPT_BYTES = 64 << 20

T = TypeVar("T")


def add(commands: Commands) -> None:
    parser = commands.add(
        "explain",
        _explain,
        "why a prompt was restored or computed, tier by tier",
        description="One sentence, then for each tier (the engine's own cache, a vault inside the agent, the vaults)\n"
        "what was asked, found and used, and why it gave no more: another token, never stored, evicted or purged and\n"
        "when, another model or layout, damaged, too slow, not worth it. Shows lengths and positions, never a prompt.",
        example=_EXAMPLE,
    )
    parser.add_argument("request", nargs="?", type=int, default=0, metavar="REQUEST", help="its number (the last)")
    parser.add_argument("--list", action="store_true", help="the last requests")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="with --list: at most N (default 20)")
    parser.add_argument(
        "--prompt", metavar="FILE", default="", help="a prompt instead: token ids (JSON or words), or text; - for stdin"
    )
    parser.add_argument("--tokenizer", metavar="PATH", default="", help="for text: a model folder or tokenizer.json")
    parser.add_argument("--model", metavar="NAME", default="", help="with --prompt: the model, if there are several")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    add_connect(parser)


def _explain(arguments: argparse.Namespace) -> int:
    _check(arguments)
    try:
        return _explained(arguments)
    except TierKVError as error:
        if arguments.json:
            said = {"kind": type(error).__name__, "message": str(error)}
            document(
                "explain", **({"requests": []} if arguments.list else {"request": None, "sentence": ""}), error=said
            )
        raise


def _explained(arguments: argparse.Namespace) -> int:
    configuration = loaded(arguments)
    asked = [target for target in targets(configuration, arguments.connect) if target.role in ("inference", "")]
    token = token_of(configuration)
    if arguments.list:
        lines = asyncio.run(_first(asked, token, lambda node: node.requests(arguments.limit)))
        _show_list(lines, as_json=arguments.json)
        return EXIT_OK
    if arguments.prompt:
        ids = prompt_ids(arguments.prompt, arguments.tokenizer)
        explained = asyncio.run(_first(asked, token, lambda node: node.explain_prompt(ids, arguments.model)))
    else:
        explained = asyncio.run(_first(asked, token, lambda node: node.explain(arguments.request)))
    if arguments.json:
        document("explain", **as_json(explained))
    else:
        for line in explanation_lines(explained, Style()):
            say(line)
    return EXIT_OK


def _check(arguments: argparse.Namespace) -> None:
    if arguments.request < 0 or not 1 <= arguments.limit <= 1000:
        raise UsageError("a request has a number from 1 on, and --limit is from 1 to 1000")
    if sum((bool(arguments.request), arguments.list, bool(arguments.prompt))) > 1:
        raise UsageError("a request's number, --list and --prompt exclude one another")
    if (arguments.tokenizer or arguments.model) and not arguments.prompt:
        raise UsageError("--tokenizer and --model belong to --prompt")


async def _first(asked: list[Target], token: Any, ask: Callable[[NodeClient], Awaitable[T]]) -> T:
    """The answer of the first agent that has one; raises what the first one said when none has."""
    from tierkv.rpc.node_client import NodeClient

    async def one(target: Target) -> T:
        client = NodeClient(target.address, token)
        try:
            return await ask(client)
        finally:
            await client.close()

    answers = await ask_all(asked, one, _BOUND_S)
    for answer in answers:
        if answer.value is not None:
            return answer.value
    errors = [answer.error for answer in answers if answer.error is not None]
    raise errors[0] if errors else UsageError("the configuration names no inference agent")


# --- prompts ----------------------------------------------------------------------------------------


def prompt_ids(name: str, tokenizer: str) -> list[int]:
    """The token ids of a file: numbers as JSON or words, or with ``tokenizer`` the ids of its text.

    Raises UsageError for anything else.
    """
    text = _read(name)
    if tokenizer:
        return _encoded(text, Path(tokenizer).expanduser())
    try:
        found = json.loads(text)
    except ValueError:
        found = text.split()
    found = [found] if isinstance(found, int) else found
    try:
        ids = [int(each) for each in cast("list[Any]", found)] if isinstance(found, list) else None
    except (ValueError, TypeError):
        ids = None
    if not ids:
        raise UsageError(f"{name} holds no token ids; for a text say with which --tokenizer to cut it")
    return ids


def _read(name: str) -> str:
    try:
        if name == "-":
            import sys

            return sys.stdin.read(_MAX_PROMPT_BYTES)
        with Path(name).expanduser().open(encoding="utf-8") as file:
            return file.read(_MAX_PROMPT_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {name}: {error}") from None


def _encoded(text: str, place: Path) -> list[int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtra("tokenizers", "mlx") from None
    file = place / "tokenizer.json" if place.is_dir() else place
    if not file.is_file():
        raise UsageError(f"there is no tokenizer.json at {place}")
    try:
        return Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    except TierKVError:
        raise
    except Exception as error:  # the library raises Exception itself
        raise UsageError(f"{file} is not a tokenizer: {error}") from None


# --- showing ----------------------------------------------------------------------------------------


def as_json(explained: Explanation) -> dict[str, Any]:
    """The fields of the document ``tierkv.explain/1``."""
    fields = asdict(explained)
    request = fields["request"]
    request["time"] = time_of(request.pop("time_unix_s"))
    for tier in fields["tiers"]:
        tier["gone"] = time_of(gone) if (gone := tier.pop("gone_unix_s")) else None
        tier["differs_at"] = tier["differs_at"] or None
    return fields


def explanation_lines(explained: Explanation, style: Style) -> list[str]:
    """The sentence, the facts and the table, in lines of at most the terminal's width."""
    import textwrap

    request = explained.request
    lines = textwrap.wrap(style.bold(clean(explained.sentence, 500)), width(), break_on_hyphens=False)
    number = f"request {request.id}, " if request.id else ""
    when = f"{format_duration(max(0.0, time.time() - request.time_unix_s))} ago" if request.id else "now"
    facts = [f"{number}{when}", clean(request.model, 60)]
    if explained.identity:
        facts.append(f"identity {clean(explained.identity, 12)}")
    if explained.codec:
        facts.append(f"{clean(explained.codec, 30)}, {format_size(explained.restored_bytes)}")
    if explained.expected_prefill_s:
        restore, prefill = explained.expected_restore_s, explained.expected_prefill_s
        facts.append(f"expected: restoring {format_duration(restore)}, computing {format_duration(prefill)}")
    lines += textwrap.wrap(style.dim("; ".join(fact for fact in facts if fact)), width(), break_on_hyphens=False)
    return [*lines, "", *_tier_lines(explained, style)]


def _tier_lines(explained: Explanation, style: Style) -> list[str]:
    import textwrap

    header = ("TIER", "WHERE", "ASKED", "FOUND", "USED", "BYTES", "TIME", "WHY NO MORE")
    rows = [_row(each) for each in explained.tiers]
    lines = table(header, rows, right=(2, 3, 4, 5, 6))
    margin = max((line.find(row[-1]) for line, row in zip(lines[1:], rows, strict=True) if row[-1]), default=0)
    shown = [style.bold(lines[0])]
    for line in lines[1:]:
        shown += textwrap.wrap(
            line, max(width(), margin + 30), subsequent_indent=" " * margin, break_on_hyphens=False,
            drop_whitespace=False, replace_whitespace=False,
        )  # fmt: skip
    return shown


def _row(each: TierFinding) -> tuple[str, ...]:
    asked = f"{each.asked_tokens:,}" if each.asked else "-"
    found = f"{each.found_tokens:,}" if each.asked else "-"
    why = clean(each.detail, 300)
    refused = ", ".join(f"{clean(reason, 40)} {count:,}" for reason, count in sorted(each.refused.items()))
    return (
        clean(each.tier, 8),
        clean(each.peer, 40),
        asked,
        found,
        f"{each.used_tokens:,}" if each.used_tokens else "-",
        format_size(each.used_bytes) if each.used_bytes else "-",
        format_duration(each.seconds) if each.seconds else "-",
        f"{why} [{refused}]" if refused else why,
    )


def _show_list(lines: list[RequestLine], *, as_json: bool) -> None:
    if as_json:
        rows = [{**asdict(line), "time": time_of(line.time_unix_s)} for line in lines]
        for row in rows:
            del row["time_unix_s"]
        document("explain-list", requests=rows)
        return
    if not lines:
        warn("no request has come yet")
        return
    now = time.time()
    header = ("REQUEST", "AGO", "TOKENS", "HOT", "FROM", "TOOK", "OUTCOME", "MODEL")
    rows = [
        (
            str(line.id),
            format_duration(max(0.0, now - line.time_unix_s)),
            f"{line.prompt_tokens:,}",
            f"{line.hot_tokens:,}",
            f"{line.position:,}",
            format_duration(line.seconds) if line.seconds else "-",
            clean(line.outcome + (f" ({line.reason})" if line.reason else ""), 40),
            clean(line.model, 40),
        )
        for line in lines
    ]
    found = table(header, rows, right=(0, 1, 2, 3, 4, 5))
    say(Style().bold(found[0]))
    say("\n".join(found[1:]))
