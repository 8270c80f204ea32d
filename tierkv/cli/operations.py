"""``tierkv vault stats | fsck | compact | warm | drain | export | import``: looking after vaults that run, or a folder.

With --json every step is a line (``tierkv.vault-<operation>/1``), the last one says ``"finished": true``.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv.cli import selection
from tierkv.cli.ask import Answer, ask_vaults, exit_code_of
from tierkv.cli.context import Target, add_connect, address_of, is_same, loaded, token_of
from tierkv.cli.operations_files import export_records
from tierkv.cli.operations_import import import_records
from tierkv.cli.operations_shown import Shown
from tierkv.cli.output import clean, document, plural, say
from tierkv.cli.parser import Commands
from tierkv.cli.prefixes import failures, tell_failures
from tierkv.errors import EXIT_FAILED, EXIT_OK, EXIT_PARTIAL, UsageError
from tierkv.units import format_size

if TYPE_CHECKING:
    from tierkv.rpc.admin import OperationStep, VaultStats
    from tierkv.rpc.client import VaultClient


def add(commands: Commands) -> None:
    for_each = "Asks every vault that tierkv.toml names, or those given with --connect."
    stats = commands.add(
        "stats",
        _stats,
        "what vaults hold, on disk and in memory",
        description=f"Shows what vaults hold, on disk and in memory, what is dead, damaged or refused.\n{for_each}",
        example="  tierkv vault stats\n  tierkv vault stats --connect nas:50051 --json",
    )
    fsck = commands.add(
        "fsck",
        _fsck,
        "check every record to its last byte, of vaults that run or of a folder",
        description="Reads every record to its last byte and says what is not as it was written. Without FOLDER it\n"
        f"asks vaults that run. {for_each}\nExits with 1 when something is damaged and was not repaired.",
        example="  tierkv vault fsck --connect nas:50051\n  tierkv vault fsck --connect nas:50051 --repair\n"
        "  tierkv vault fsck ~/.local/share/tierkv/vault --repair   # the vault is stopped",
    )
    fsck.add_argument("folder", nargs="?", metavar="FOLDER", help="a vault's persist_path, while no vault has it open")
    fsck.add_argument("--repair", action="store_true", help="take damaged records out, make the rest whole")
    compact = commands.add(
        "compact",
        _compact,
        "give back the room that dead records take",
        description=f"Copies what lives in mostly dead files together and gives their room back.\n{for_each}",
        example="  tierkv vault compact --connect nas:50051",
    )
    warm = commands.add(
        "warm",
        _warm,
        "read records ahead from disk to memory",
        description=f"Reads records from disk to memory, before somebody asks for them. Counts as no use.\n{for_each}",
        example="  tierkv vault warm --all\n  tierkv vault warm --prefix 1f0c5a2b --connect nas:50051",
    )
    drain = commands.add(
        "drain",
        _drain,
        "copy records to another vault, before a machine sleeps",
        description="Copies records to the vault at --to; what is copied also stays where it is and counts as no use.\n"
        f"{for_each} At the end the vault at --to says which\nof the records it holds; "
        "exits with 4 when it does not hold all of them.",
        example="  tierkv vault drain --connect mini:50051 --to nas:50051 --all\n"
        "  tierkv vault drain --connect mini:50051 --to nas:50051 --older-than 2h",
    )
    drain.add_argument(
        "--to", metavar="HOST:PORT", required=True, help="the vault that takes the records in, as the others reach it"
    )
    export = commands.add(
        "export",
        export_records,
        "write records to a file that another vault takes in",
        description=f"Writes records to FILE, each once; counts as no use of them.\n{for_each}",
        example="  tierkv vault export talk.tkx --prefix 1f0c5a2b\n"
        "  tierkv vault export all.tkx --all --connect nas:50051\n"
        "  tierkv vault import talk.tkx --connect nas:50051",
    )
    export.add_argument("file", metavar="FILE", help="the file to write; one that is there is replaced")
    taking = commands.add(
        "import",
        import_records,
        "take in a file that 'tierkv vault export' wrote",
        description="Puts the records of FILE into the vaults that tierkv.toml names: attention state into a KV\n"
        "vault, checkpoints into an SSM vault, of several into the one where agents look for the prompt.\n"
        "With --connect, into that vault. Exits with 4 when a vault does not hold all it was given,\n"
        "or when a part of FILE is damaged.",
        example="  tierkv vault import talk.tkx\n  tierkv vault import talk.tkx --connect nas:50051",
    )
    taking.add_argument("file", metavar="FILE", help="what 'tierkv vault export' wrote")
    for parser in (warm, drain, export):
        selection.add_options(parser, everything=True)
    for parser in (stats, fsck, compact, taking):
        add_connect(parser)
    stats.add_argument("--json", action="store_true", help="one JSON document")
    for parser in (fsck, compact, warm, drain, export, taking):
        parser.add_argument("--json", action="store_true", help="one line of JSON a step")


# --- stats ----------------------------------------------------------------------------------------


def _stats(arguments: argparse.Namespace) -> int:
    configuration = loaded(arguments)
    asked = selection.vaults(configuration, arguments.connect)
    answers = asyncio.run(ask_vaults(asked, token_of(configuration), lambda vault: vault.stats()))
    tell_failures(answers)
    if arguments.json:
        found = [_stats_json(answer) for answer in answers if answer.value is not None]
        document("vault-stats", vaults=found, failures=failures(answers))
    else:
        for answer in answers:
            if answer.value is not None:
                _print_stats(answer.target, answer.value)
    return EXIT_OK if any(answer.value for answer in answers) else exit_code_of(answers)


def _stats_json(answer: Answer[VaultStats]) -> dict[str, Any]:
    stats = answer.value
    assert stats is not None
    tier = stats.tier
    return {
        "vault": answer.target.address,
        "records": tier.records,
        "size_bytes": tier.size_bytes,
        "cap_bytes": tier.cap_bytes,
        "index_bytes": stats.index_bytes,
        "epoch": stats.epoch,
        "leases": stats.leases,
        "policy": clean(stats.policy, 40),
        "loading": stats.loading,
        "refusals": stats.refusals,
        "quarantined": tier.quarantined_records,
        "disk": {**asdict(stats.disk), "damaged": tier.quarantined_records} if stats.disk else None,
    }


def _print_stats(target: Target, stats: VaultStats) -> None:
    tier, disk = stats.tier, stats.disk
    say(f"{target.address}: {plural(tier.records, 'record')}, {format_size(tier.size_bytes)} of "
        f"{format_size(tier.cap_bytes)}, {clean(stats.policy, 40)}, epoch {stats.epoch}")  # fmt: skip
    say(f"    index {format_size(stats.index_bytes)}, {plural(stats.leases, 'lease')}, "
        f"{tier.quarantined_records:,} quarantined")  # fmt: skip
    if disk is None:
        return
    state = f"loading ({disk.segments_loaded} of {disk.segments} segments)" if stats.loading else "loaded"
    say(f"    {clean(disk.folder)}: {plural(disk.segments, 'segment')}, {state}, {clean(disk.durability, 20)}")
    say(f"    memory {format_size(disk.ram_bytes)} of {format_size(disk.ram_cap_bytes)}, "
        f"{plural(disk.hot_records, 'hot record')}")  # fmt: skip
    say(f"    dead {format_size(disk.dead_bytes)}, not synced {format_size(disk.unsynced_bytes)}, "
        f"writes cut short {disk.torn}")  # fmt: skip
    if disk.problem:
        say(f"    cannot write: {clean(disk.problem, 40)}")


# --- operations on vaults that run ----------------------------------------------------------------


def _compact(arguments: argparse.Namespace) -> int:
    return _operate(arguments, "compact", lambda vault: vault.compact())


def _warm(arguments: argparse.Namespace) -> int:
    wanted = selection.chosen(arguments)
    return _operate(arguments, "warm", lambda vault: vault.warm(wanted))


def _drain(arguments: argparse.Namespace) -> int:
    wanted, to = selection.chosen(arguments), arguments.to
    configuration = loaded(arguments)
    asked = selection.vaults(configuration, arguments.connect)
    others = [target for target in asked if not is_same(target, address_of(to, "--to"))]
    if not others or (arguments.connect and len(others) < len(asked)):
        raise UsageError(f"--to {to} is the vault that is to be drained: name another one")
    return _operate(arguments, "drain", lambda vault: vault.drain(to, wanted), asked=others, taker=to)


def _operate(
    arguments: argparse.Namespace,
    name: str,
    begin: Callable[[VaultClient], AsyncIterator[OperationStep]],
    *,
    asked: list[Target] | None = None,
    taker: str = "",
) -> int:
    """Runs the operation on one vault after another, since each keeps a disk busy."""
    configuration = loaded(arguments)
    asked = selection.vaults(configuration, arguments.connect) if asked is None else asked
    token = token_of(configuration)

    async def one(vault: VaultClient) -> bool:
        return await _run(vault, begin(vault), Shown(name, arguments.json, taker=taker), arguments)

    answers: list[Answer[bool]] = []
    for target in asked:
        answers += asyncio.run(ask_vaults([target], token, one, bound_s=None))
    tell_failures(answers)
    if any(answer.error for answer in answers):
        return EXIT_PARTIAL if any(answer.value is not None for answer in answers) else exit_code_of(answers)
    return EXIT_OK if all(answer.value for answer in answers) else EXIT_FAILED if name == "fsck" else EXIT_PARTIAL


async def _run(
    vault: VaultClient, steps: AsyncIterator[OperationStep], show: Shown, arguments: argparse.Namespace
) -> bool:
    """Whether all of it was done and, of an fsck, everything is sound by now."""
    first = last = None
    async for last in steps:
        if first is None and last.free_bytes is not None:
            show.room(arguments.to, last.total_bytes, last.free_bytes)
        first = first or last
        for finding in last.findings:
            show.finding(vault.peer, finding)
        show.step(vault.peer, last)
    if show.unrepaired:
        disk = (await vault.stats()).disk
        show.left_to_repair(vault.peer, asked=arguments.repair, folder=disk.folder if disk else "", running=True)
    all_kept = last is not None and last.kept in (None, last.total)
    return last is not None and last.finished and not last.refused and all_kept and not show.unrepaired


# --- fsck -----------------------------------------------------------------------------------------


def _fsck(arguments: argparse.Namespace) -> int:
    """0: everything is sound (or was repaired); 1: something is not."""
    if arguments.folder is None:
        return _operate(arguments, "fsck", lambda vault: vault.fsck(repair=arguments.repair))
    if arguments.connect:
        raise UsageError("a folder is checked here, --connect asks a vault that runs: give one of them")
    from tierkv.rpc.admin import OperationStep
    from tierkv.store.log.check import FolderCheck

    show, folder = Shown("fsck", arguments.json), str(Path(arguments.folder))
    records = total_bytes = found = 0
    for step in FolderCheck(Path(arguments.folder), repair=arguments.repair).run():
        records, total_bytes = step.records, step.total_bytes
        if step.finding is not None:
            found += 1
            show.finding(folder, step.finding)
        else:
            show.step(folder, OperationStep(records, 0, step.done_bytes, total_bytes, False))
    show.step(folder, OperationStep(records, records + found, total_bytes, total_bytes, True))
    show.left_to_repair(folder, asked=arguments.repair, folder=folder, running=False)
    return EXIT_FAILED if show.unrepaired else EXIT_OK
