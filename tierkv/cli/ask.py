"""Asking several agents at once, each within a bound, without one failure hiding the others' answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from tierkv.cli.context import Target
from tierkv.errors import (
    EXIT_OK,
    EXIT_PARTIAL,
    EXIT_UNREACHABLE,
    DeadlineExceeded,
    NotAuthenticated,
    TierKVError,
    exit_code,
)

if TYPE_CHECKING:
    from tierkv.rpc.auth import Token
    from tierkv.rpc.client import VaultClient
    from tierkv.rpc.node_client import NodeReport

T = TypeVar("T")

_CAUSE = re.compile(r"not reachable \(.*: ([^:()]+)\)$", re.DOTALL)

# A silent or frozen peer is known after this long; a status of many nodes takes no longer than of one.
STATUS_BOUND_S = 1.5
CONNECT_S = 1.0
CONTROL_BOUND_S = 15.0


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What one agent said, or why it did not."""

    target: Target
    value: T | None = None
    error: TierKVError | None = None

    @property
    def reason(self) -> str:
        """The error without the address, which is shown beside it, and of a failed connection only its cause."""
        if self.error is None:
            return ""
        text = str(self.error).removeprefix(f"{self.target.address}: ")
        cause = _CAUSE.match(text)
        return f"not reachable: {cause[1].lower()}" if cause else text


async def ask_all(
    targets: Sequence[Target], ask: Callable[[Target], Awaitable[T]], bound_s: float | None
) -> list[Answer[T]]:
    """One answer a target, in order; none takes longer than ``bound_s`` (None: the calls have bounds of their own)."""

    async def one(target: Target) -> Answer[T]:
        try:
            async with asyncio.timeout(bound_s):
                return Answer(target, await ask(target))
        except TimeoutError:
            return Answer(target, error=DeadlineExceeded(target.address, f"no answer within {bound_s or 0:g} s"))
        except TierKVError as error:
            return Answer(target, error=error)

    return list(await asyncio.gather(*(one(target) for target in targets)))


async def node_reports(targets: Sequence[Target], token: Token | None) -> list[Answer[NodeReport]]:
    from tierkv.rpc.node_client import NodeClient

    async def ask(target: Target) -> NodeReport:
        client = NodeClient(target.address, token, connect_timeout_s=CONNECT_S)
        try:
            return await client.get_node(timeout_s=STATUS_BOUND_S)
        finally:
            await client.close()

    return await ask_all(targets, ask, STATUS_BOUND_S)


async def ask_vaults(
    targets: Sequence[Target],
    token: Token | None,
    ask: Callable[[VaultClient], Awaitable[T]],
    *,
    bound_s: float | None = CONTROL_BOUND_S,
) -> list[Answer[T]]:
    """``ask`` with a client for each target."""
    from tierkv.rpc.client import VaultClient

    async def one(target: Target) -> T:
        client = VaultClient(target.address, token, connect_timeout_s=CONNECT_S)
        try:
            return await ask(client)
        finally:
            await client.close()

    return await ask_all(targets, one, bound_s)


def exit_code_of(answers: Sequence[Answer[T]]) -> int:
    """0 when all did it, 4 when some did; when none did: 5 if a token was missing or wrong, else the first's code."""
    errors = [answer.error for answer in answers if answer.error is not None]
    if not answers:
        return EXIT_UNREACHABLE
    if not errors:
        return EXIT_OK
    if len(errors) < len(answers):
        return EXIT_PARTIAL
    refused = [error for error in errors if isinstance(error, NotAuthenticated)]
    return exit_code((refused or errors)[0])
