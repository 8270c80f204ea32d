"""``tierkv vault import``: the records of a file into vaults, each to where the agents look for it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tierkv.cli import ask, selection
from tierkv.cli.context import Target, loaded, token_of
from tierkv.cli.operations_shown import Shown
from tierkv.cli.prefixes import tell_failures
from tierkv.errors import EXIT_FAILED, EXIT_OK, EXIT_PARTIAL, BadFrame, TierKVError, UsageError

if TYPE_CHECKING:
    from tierkv.codec.record import RecordHeader
    from tierkv.rpc.auth import Token
    from tierkv.rpc.bundle import Unusable
    from tierkv.rpc.client import VaultClient
    from tierkv.rpc.operations_arrivals import Arrivals

_BATCH_BYTES, _BATCH_RECORDS = 32 << 20, 4096
_TIERS = {"kv-vault": "kv", "ssm-vault": "ssm"}


def import_records(arguments: argparse.Namespace) -> int:
    """0: all of the file is where it was to go; 1: nothing could be taken from the file; 4: some of it is missing."""
    configuration = loaded(arguments)
    path = Path(arguments.file)
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    asked, token = selection.vaults(configuration, arguments.connect), token_of(configuration)
    if not arguments.connect:
        # What only the console looks at is not where agents look for records.
        asked = [target for target in asked if target.role] or asked
    show = Shown("import", arguments.json)
    from tierkv.rpc.bundle import read_bundle

    with path.open("rb") as file:
        try:
            records = read_bundle(file, configuration.config.vault.max_record_bytes)
        except BadFrame as error:
            raise BadFrame(error.reason, f"{path}: {error}") from None
        contents = Contents(file, records)
        answers = asyncio.run(_import(contents, asked, token, show, anywhere=bool(arguments.connect)))
    tell_failures(answers)
    if all(answer.error for answer in answers):
        return EXIT_PARTIAL if contents.broken_off else ask.exit_code_of(answers)
    return _told(path, contents, [answer.value for answer in answers if answer.value is not None], show)


@dataclass(slots=True)
class Contents:
    """What is read from the file. ``problem``: why it could not be read to its end, or "". ``broken_off``: a vault
    failed after it had begun to take records in, and may hold some."""

    file: BinaryIO
    records: Iterator[bytes | Unusable]
    unusable: list[Unusable] = field(default_factory=list["Unusable"])
    sound: int = 0
    homeless: int = 0
    problem: str = ""
    broken_off: bool = False

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def __iter__(self) -> Iterator[bytes]:
        """The sound records; what is not sound is noted."""
        try:
            for record in self.records:
                if isinstance(record, bytes):
                    self.sound += 1
                    yield record
                else:
                    self.unusable.append(record)
        except BadFrame as error:
            self.problem = str(error)


@dataclass(slots=True, eq=False)
class Taker:
    """A vault that takes records in. ``arrivals`` is None for one that does not answer: it takes nothing."""

    vault: VaultClient
    tier: str
    arrivals: Arrivals | None = None
    meant: int = 0
    meant_bytes: int = 0
    kept: int = 0
    waiting: list[bytes] = field(default_factory=list[bytes])
    error: TierKVError | None = None

    def give(self, record: bytes) -> None:
        self.meant += 1
        self.meant_bytes += len(record)
        self.waiting.append(record)

    async def send(self) -> None:
        """What waits has been sent, or is counted as not taken."""
        records, self.waiting = self.waiting, []
        if self.arrivals is None or not records:
            return
        if self.error is None:
            try:
                self.arrivals.add(await self.vault.store(self._addressed(records, self.arrivals.epoch)))
                return
            except TierKVError as error:
                self.error = error
        self.arrivals.refused["not_sent"] += len(records)

    async def settle(self) -> None:
        if self.arrivals is not None and self.error is None:
            try:
                self.kept = await self.arrivals.settle()
            except TierKVError as error:
                self.error = error

    async def _addressed(
        self, records: list[bytes], epoch: int
    ) -> AsyncIterator[tuple[RecordHeader, Sequence[bytes | bytearray | memoryview]]]:
        from tierkv.rpc.operations_arrivals import readdressed

        for record in records:
            yield readdressed(record, epoch)


class Routes:
    """Which vault is for which record: one of its tier, and of several the one where agents look for its whole chain.

    ``anywhere``: where no vault of the tier was asked, another will do.
    """

    def __init__(self, takers: Sequence[Taker], *, anywhere: bool) -> None:
        self._takers, self._anywhere = takers, anywhere
        self._heads: dict[bytes, bytes] = {}

    def takers_of(self, header: RecordHeader) -> list[Taker]:
        """One vault; none; or all of the tier, for the end of a chain whose beginning is not in the file."""
        head = self._head(header)
        takers = [taker for taker in self._takers if taker.tier == header.kind.tier]
        if not takers:
            takers = [taker for taker in self._takers if self._anywhere or taker.tier not in _TIERS.values()]
        if len(takers) < 2 or head is None:
            return takers
        from tierkv.agents.routing import home_of

        return [takers[home_of(head, [taker.vault.peer for taker in takers])]]

    def _head(self, header: RecordHeader) -> bytes | None:
        """What chooses among a tier's vaults (see ``TierRouter.targets``); a file has heads before tails."""
        if header.parent != header.root:
            head = self._heads.get(header.parent)
        else:
            head = header.key if header.is_full_block else header.root
        if head is not None and header.is_full_block:
            self._heads[header.key] = head
        return head


async def _import(
    contents: Contents, asked: list[Target], token: Token | None, show: Shown, *, anywhere: bool
) -> list[ask.Answer[Taker]]:
    from tierkv.rpc.client import VaultClient

    async with contextlib.AsyncExitStack() as stack:
        takers: dict[Target, Taker] = {}
        for target in asked:
            vault = VaultClient(target.address, token, connect_timeout_s=ask.CONNECT_S)
            stack.push_async_callback(vault.close)
            takers[target] = Taker(vault, _TIERS.get(target.role, ""))
        answers = await ask.ask_all(asked, lambda target: _ready(takers[target]), ask.CONTROL_BOUND_S)
        if not all(answer.error for answer in answers):
            await _move(contents, list(takers.values()), show, anywhere=anywhere)
        contents.broken_off = any(taker.error for taker in takers.values())
        return [
            ask.Answer(each.target, error=error) if (error := takers[each.target].error) else each for each in answers
        ]


async def _ready(taker: Taker) -> Taker:
    from tierkv.rpc.operations_arrivals import Arrivals

    stats = await taker.vault.stats()
    # Agents go by what their configuration calls a vault.
    taker.tier, taker.arrivals = taker.tier or stats.tier.name, Arrivals(taker.vault, stats)
    return taker


async def _move(contents: Contents, takers: list[Taker], show: Shown, *, anywhere: bool) -> None:
    from tierkv.codec.record import RecordHeader

    there = [taker for taker in takers if taker.arrivals is not None]
    if len(there) == 1 and there[0].arrivals is not None:
        show.room(there[0].vault.peer, contents.size_bytes, there[0].arrivals.free_bytes)
    routes = Routes(takers, anywhere=anywhere)
    held_bytes = held = 0
    for record in contents:
        header, _ = RecordHeader.unpack_frame(record)
        chosen = routes.takers_of(header)
        contents.homeless += not any(taker.arrivals for taker in chosen)
        for taker in chosen:
            taker.give(record)
        held_bytes, held = held_bytes + len(record), held + 1
        if held_bytes >= _BATCH_BYTES or held >= _BATCH_RECORDS:
            await _send(there, contents, show)
            held_bytes = held = 0
    await _send(there, contents, show)
    await asyncio.gather(*(taker.settle() for taker in there))


async def _send(takers: list[Taker], contents: Contents, show: Shown) -> None:
    from tierkv.rpc.admin import OperationStep

    await asyncio.gather(*(taker.send() for taker in takers))
    for taker in takers:
        if taker.arrivals is not None:
            refused = dict(taker.arrivals.refused)
            show.step(
                taker.vault.peer,
                OperationStep(taker.meant, 0, contents.file.tell(), contents.size_bytes, False, refused=refused),
            )


def _told(path: Path, contents: Contents, takers: list[Taker], show: Shown) -> int:
    from tierkv.rpc.admin import OperationStep

    kept = sum(taker.kept for taker in takers)
    show.flawed = bool(contents.unusable or contents.problem or contents.homeless or contents.broken_off)
    show.file(path, contents.unusable, contents.problem, contents.homeless, kept)
    for taker in takers:
        if taker.arrivals is not None and (taker.meant or len(takers) == 1 or show.as_json):
            show.step(
                taker.vault.peer,
                OperationStep(
                    taker.meant, taker.meant, taker.meant_bytes, taker.meant_bytes, True,
                    refused=dict(taker.arrivals.refused), kept=taker.kept,
                ),
            )  # fmt: skip
    if not kept and (contents.unusable or contents.problem):
        return EXIT_FAILED
    return EXIT_PARTIAL if show.flawed or any(taker.kept < taker.meant for taker in takers) else EXIT_OK
