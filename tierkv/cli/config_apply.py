"""``tierkv config set ... --apply``: every agent is asked what the change would do, then all take it over or none."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierkv.cli.context import loaded, targets, token_of
from tierkv.cli.output import clean, say, warn
from tierkv.errors import (
    EXIT_OK,
    EXIT_PARTIAL,
    EXIT_REFUSED,
    EXIT_UNREACHABLE,
    DeadlineExceeded,
    TierKVError,
    Unreachable,
    exit_code,
)

if TYPE_CHECKING:
    from tierkv.config.edit import Edit
    from tierkv.rpc.config_client import Acknowledged, Checked
    from tierkv.rpc.config_port import ConfigEffect


def apply(arguments: argparse.Namespace, edit: Edit) -> int:
    """The file and the running agents have the new value, or, when one agent refuses, none of them.

    Every agent writes the value into its own file, or says why it will not have it after its restart. An agent that
    cannot be reached does not stop the others: it reads its file when it starts (exit code 4).
    """
    # One loop for both rounds: gRPC wakes the loop that it began with, and complains on stderr when that is closed.
    with asyncio.Runner() as runner:
        return _apply(arguments, edit, runner)


def _apply(arguments: argparse.Namespace, edit: Edit, runner: asyncio.Runner) -> int:
    from tierkv.config.edit import take_back, write
    from tierkv.rpc.config_client import apply_everywhere, check_everywhere

    configuration = loaded(arguments)
    peers = [target.address for target in targets(configuration, arguments.connect)]
    token, changes = token_of(configuration), {edit.location: edit.after}
    checked = runner.run(check_everywhere(peers, token, changes))
    _show_checks(checked)
    absent = [one for one in checked if isinstance(one.error, Unreachable | DeadlineExceeded)]
    against = [one for one in checked if not one.ready and one not in absent]
    if against:
        warn("nothing was changed: " + ", ".join(one.peer for one in against) + " would not take it")
        return (
            EXIT_REFUSED if all(one.error is None for one in against) else exit_code(against[0].error or TierKVError())
        )
    if arguments.dry_run:
        warn("dry run: nothing was changed")
        return EXIT_OK
    if edit.changes:
        write(edit)
    done = runner.run(apply_everywhere(checked, token, changes))
    if not all(one.in_force for one in done):
        restored = not edit.changes or take_back(edit)
        _show_refusal(done)
        warn("the file is as it was" if restored else f"{edit.path} was changed by somebody else and stays as it is")
        return EXIT_REFUSED
    say(f"written to {edit.path}" if edit.changes else f"{edit.path} had it already")
    never = _tell_unsaved(done)
    if absent:
        warn(f"not reached: {', '.join(one.peer for one in absent)}; they read their file when they start")
    if absent and not done:
        return EXIT_UNREACHABLE
    return EXIT_PARTIAL if absent or never else EXIT_OK


def _tell_unsaved(done: Sequence[Acknowledged]) -> bool:
    """Whether some agent neither has the value nor will have it."""
    effects = [(one.peer, effect) for one in done if one.applied for effect in one.applied.effects if effect.unsaved]
    for peer, effect in effects:
        when = "not in force" if effect.never else "in force until its restart"
        warn(f"{peer}: {when}: {clean(effect.unsaved)}")
    return any(effect.never for _, effect in effects)


def _show_checks(checked: Sequence[Checked]) -> None:
    for one in checked:
        if one.check is None:
            text = clean(str(one.error)).removeprefix(f"{one.peer}: ")
            warn(f"{one.peer}: {text}")
            continue
        for fault in one.check.faults:
            warn(f"{one.peer}: {clean(str(fault))}")
        for effect in one.check.effects:
            say(f"{one.peer}: {effect_text(effect)}")


def effect_text(effect: ConfigEffect) -> str:
    """One effect in a line: "at once: 0.8 -> 0.7; would evict 3.1 GiB, 9 prefixes now"."""
    from tierkv.config.edit import shown

    note = f"; {clean(effect.note)}" if effect.note else ""
    if effect.effect == "not_used":
        return "does not use it"
    if effect.unsaved:
        note += f"; {clean(effect.unsaved)}"
    if effect.effect == "unchanged":
        return f"has it already{', until its restart' if effect.unsaved else ''}{note}"
    when = "at once" if effect.effect == "live" else "not in force" if effect.never else "after a restart"
    when += ", until its restart" if effect.unsaved and not effect.never else ""
    return f"{when}: {clean(shown(effect.key, effect.before))} -> {clean(shown(effect.key, effect.after))}{note}"


def _show_refusal(done: Sequence[Acknowledged]) -> None:
    for one in done:
        if one.error is not None:
            warn(f"{one.peer}: {clean(str(one.error))}")
        elif one.taken_back:
            warn(f"{one.peer}: taken back")
