"""How the steps of an operation on vaults are shown: on a terminal, in a log, in JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.cli.output import clean, line, plural, say, warn
from tierkv.units import format_size

if TYPE_CHECKING:
    from tierkv.rpc.admin import OperationStep
    from tierkv.rpc.bundle import Unusable
    from tierkv.store.base import Finding

_EVERY_S = 1.0
# So many damaged records of a file are told one by one.
_TOLD = 5


class Shown:
    """Progress on stderr about once a second, the end on stdout; in JSON each step. ``taker``: where records go."""

    def __init__(self, name: str, as_json: bool, *, taker: str = "") -> None:
        self._name, self.as_json, self._taker = name, as_json, taker
        # Set where not all of a file could be taken: then nothing is called done.
        self.flawed = False
        self._next_s = time.monotonic() + _EVERY_S
        self._found = self._repaired = 0

    def step(self, vault: str, step: OperationStep) -> None:
        if self.as_json:
            more = {} if step.kept is None else {"kept": step.kept}
            line(
                f"vault-{self._name}", vault=vault, done=step.done, total=step.total, done_bytes=step.done_bytes,
                total_bytes=step.total_bytes, finished=step.finished, refused=step.refused, **more,
            )  # fmt: skip
        elif step.finished:
            self._end(vault, step)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _EVERY_S
            warn(f"{vault}: {self._name}: {self._checked(step) if self._name == 'fsck' else _moved(step)}")

    def room(self, taker: str, total_bytes: int, free_bytes: int) -> None:
        """Before anything moves: what is to come may not fit."""
        if total_bytes > free_bytes and not self.as_json:
            warn(
                f"{taker}: {format_size(free_bytes)} free, up to {format_size(total_bytes)} to come: it gives up what "
                "it used longest ago, or does not keep all of this"
            )

    def finding(self, vault: str, finding: Finding) -> None:
        self._found += 1
        self._repaired += finding.repaired
        if self.as_json:
            line(f"vault-{self._name}", vault=vault, finding={**asdict(finding), "key": finding.key.hex()})
            return
        where = f"{clean(finding.file)} at {finding.offset}" if finding.file else finding.key.hex()[:12]
        done = "repaired" if finding.repaired else "found"
        say(f"{vault}: {where}: {clean(finding.reason, 60)}, {format_size(finding.size_bytes)} ({done})")

    @property
    def unrepaired(self) -> int:
        """Findings that are as they were."""
        return self._found - self._repaired

    def left_to_repair(self, vault: str, *, asked: bool, folder: str, running: bool) -> None:
        """What to do about damage that is still there."""
        if self.as_json or not self.unrepaired:
            return
        if not asked:
            warn(f"{vault}: --repair takes damaged records out and makes the rest whole")
        elif running and folder:
            warn(
                f"{vault}: {self.unrepaired} of them cannot be repaired while the vault runs: stop it, then "
                f"'tierkv vault fsck {clean(folder)} --repair'"
            )
        else:
            warn(f"{vault}: {self.unrepaired} of them cannot be repaired: take files that are not the vault's away")

    def file(self, path: Path, unusable: Sequence[Unusable], problem: str, homeless: int, kept: int) -> None:
        """What could not be taken from a file, and why."""
        if self.as_json:
            for each in unusable:
                line(f"vault-{self._name}", file=str(path), unusable=asdict(each))
            if problem or homeless:
                line(f"vault-{self._name}", file=str(path), problem=problem, without_vault=homeless)
            return
        for each in unusable[:_TOLD]:
            warn(f"{path}: record {each.number} is not taken: {each.reason.replace('_', ' ')}")
        if unusable:
            warn(f"{path}: {len(unusable):,} damaged, {kept:,} taken")
        if problem:
            warn(f"{path}: {problem}; {'what came before is in' if kept else 'nothing was taken'}")
        if homeless:
            warn(f"{path}: {plural(homeless, 'record')} not taken: no vault of their tier answers")

    def _end(self, vault: str, step: OperationStep) -> None:
        if self._name == "fsck":
            say(f"{vault}: fsck done: {self._checked(step)}")
        elif step.kept is None:
            say(f"{vault}: {self._name} done: {_moved(step)}")
        elif step.kept == step.total and self.flawed:
            say(f"{vault}: {self._name}: took {_moved(step)}")
        elif step.kept == step.total:
            say(f"{vault}: {self._name} done: {_moved(step)}" + (f", on {self._taker}" if self._taker else ""))
        else:
            why = " (no room)" if step.refused.get("no_room") else ""
            who = f"{self._taker} " if self._taker else ""
            say(f"{vault}: {self._name}: {who}kept {step.kept:,} of {step.total:,}{why}")
        if step.refused:
            reasons = [f"{count:,} {clean(reason, 40).replace('_', ' ')}" for reason, count in step.refused.items()]
            say(f"    not {'kept' if step.kept is not None else 'done'}: {', '.join(reasons)}")

    def _checked(self, step: OperationStep) -> str:
        """Records and places, which no total is known of before the end; bytes, which one is known of."""
        read = f"{format_size(step.total_bytes)} read"
        if not step.finished:
            read = f"{format_size(step.done_bytes)} of {read}"
        sound = step.done
        damaged = plural(self._found, "damaged place") if self._found else "no damage"
        repaired = f", {self._repaired:,} repaired" if self._repaired else ""
        return f"{read}, {plural(sound, 'sound record')}, {damaged}{repaired}"


def _moved(step: OperationStep) -> str:
    of = f" of {step.total:,}" if step.total else ""
    size = f", {format_size(step.done_bytes)} of {format_size(step.total_bytes)}" if step.total_bytes else ""
    return f"{step.done:,}{of}{size}"
