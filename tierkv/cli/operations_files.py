"""``tierkv vault export``: records from vaults into a file."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.cli import selection
from tierkv.cli.ask import Answer, ask_vaults, exit_code_of
from tierkv.cli.context import Target, loaded, token_of
from tierkv.cli.operations_shown import Shown
from tierkv.cli.output import plural, say
from tierkv.cli.prefixes import tell_failures
from tierkv.errors import EXIT_OK, EXIT_PARTIAL, CorruptionError, UsageError
from tierkv.units import format_size

if TYPE_CHECKING:
    from tierkv.rpc.auth import Token
    from tierkv.rpc.bundle import BundleWriter
    from tierkv.rpc.client import VaultClient
    from tierkv.store.base import Selector


def export_records(arguments: argparse.Namespace) -> int:
    """Records that several vaults hold are written once. The file is there when all of it is."""
    wanted = selection.chosen(arguments)
    configuration = loaded(arguments)
    asked, token = selection.vaults(configuration, arguments.connect), token_of(configuration)
    show, path = Shown("export", arguments.json), Path(arguments.file)
    draft = path.with_name(path.name + ".new")
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file in it")
    from tierkv.rpc.bundle import BundleWriter

    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            writer = BundleWriter(file)
            answers = _export_all(asked, token, wanted, writer, show)
            writer.finish()
        tell_failures(answers)
        if not any(answer.value is not None for answer in answers):
            return exit_code_of(answers)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    if not arguments.json:
        say(f"{path}: {plural(writer.records, 'record')}, {format_size(writer.size_bytes)}")
    return EXIT_PARTIAL if any(answer.error or answer.value for answer in answers) else EXIT_OK


def _export_all(
    asked: list[Target], token: Token | None, wanted: Selector, writer: BundleWriter, show: Shown
) -> list[Answer[int]]:
    answers: list[Answer[int]] = []
    known: set[bytes] = set()

    async def one(vault: VaultClient) -> int:
        return await _export_from(vault, wanted, writer, known, show)

    for target in asked:
        answers += asyncio.run(ask_vaults([target], token, one, bound_s=None))
    return answers


async def _export_from(
    vault: VaultClient, wanted: Selector, writer: BundleWriter, known: set[bytes], show: Shown
) -> int:
    """How many records could not be had."""
    from tierkv.codec.record import verify_record
    from tierkv.rpc.admin import OperationStep
    from tierkv.rpc.vault_port import Missing

    records = [(key, size) for key, size in await vault.list_records(wanted) if key not in known]
    total_bytes, done_bytes, done = sum(size for _, size in records), 0, 0
    missing: Counter[str] = Counter()
    data = bytearray()
    async for item in vault.promote([key for key, _ in records], peek=True):
        if isinstance(item, Missing):
            missing[item.reason] += 1
            continue
        data += item.data
        if len(data) < item.total:
            continue
        try:
            known.add(verify_record(data).key)
        except CorruptionError:
            missing["damaged"] += 1
        else:
            writer.add(data)
            done, done_bytes = done + 1, done_bytes + len(data)
        data = bytearray()
        show.step(vault.peer, OperationStep(done, len(records), done_bytes, total_bytes, False, refused=dict(missing)))
    show.step(vault.peer, OperationStep(done, len(records), done_bytes, total_bytes, True, refused=dict(missing)))
    return missing.total()
