"""The operator over gRPC: every holder is asked at once, each within a bound."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from tierkv.errors import TierKVError
from tierkv.rpc.admin import RecordLine
from tierkv.rpc.auth import Token
from tierkv.rpc.config_client import ConfigClient, apply_everywhere, check_everywhere
from tierkv.rpc.config_port import Acknowledged, Changes, Checked, ConfigState
from tierkv.rpc.node_client import NodeClient
from tierkv.telemetry.explanation import Explanation
from tierkv.tui.operate import Done, Holder, PrefixList, PrefixRow, Preview, Purged, RequestRow, Selection, chosen

if TYPE_CHECKING:
    from tierkv.rpc.client import VaultClient
    from tierkv.store.base import Selector

T = TypeVar("T")

BOUND_S = 15.0
PREFIXES_MAX = 1000
REQUESTS_MAX = 200


class _Client(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=_Client)


async def _answer(client: C, address: str, ask: Callable[[C], Awaitable[T]]) -> T | str:
    """What ``ask`` brings within the bound, or why it brings nothing; the client is closed."""
    try:
        async with asyncio.timeout(BOUND_S):
            return await ask(client)
    except TimeoutError:
        return f"no answer within {BOUND_S:g} s"
    except TierKVError as error:
        return str(error).removeprefix(f"{address}: ")
    finally:
        await client.close()


class LiveOperator:
    """``token`` is asked for anew at every request, so that a token made meanwhile is used."""

    def __init__(self, token: Callable[[], Token | None]) -> None:
        self._token = token

    async def _at(self, holder: Holder, ask: Callable[[VaultClient], Awaitable[T]]) -> T | str:
        """The holder's answer, or why there is none."""
        # What vaults are asked with needs numpy: loaded when it is wanted, beside the screen, so that the console
        # shows its first data without it.
        rpc = await asyncio.to_thread(importlib.import_module, "tierkv.rpc.client")
        return await _answer(rpc.VaultClient(holder.address, self._token()), holder.address, ask)

    async def prefixes(self, holders: Sequence[Holder]) -> PrefixList:
        answers = await asyncio.gather(
            *(self._at(one, lambda vault: vault.list_prefixes(None, PREFIXES_MAX)) for one in holders)
        )
        rows: list[PrefixRow] = []
        failures: list[tuple[Holder, str]] = []
        total = 0
        for holder, answer in zip(holders, answers, strict=True):
            if isinstance(answer, str):
                failures.append((holder, answer))
            else:
                rows += [PrefixRow(holder, info) for info in answer.prefixes]
                total += answer.total
        return PrefixList(tuple(rows), total, tuple(failures))

    async def records(self, holders: Sequence[Holder], key: bytes) -> list[tuple[Holder, tuple[RecordLine, ...]]]:
        answers = await asyncio.gather(*(self._at(one, lambda vault: vault.describe_prefix(key)) for one in holders))
        return [
            (holder, answer)
            for holder, answer in zip(holders, answers, strict=True)
            if not isinstance(answer, str) and answer
        ]

    async def pin(self, holders: Sequence[Holder], what: Selection, on: bool) -> list[Done]:
        asked = chosen(holders, what)
        answers = await asyncio.gather(
            *(self._at(one, lambda vault: (vault.pin if on else vault.unpin)(_selector(what))) for one in asked)
        )
        return [
            Done(one, error=answer) if isinstance(answer, str) else Done(one, answer)
            for one, answer in zip(asked, answers, strict=True)
        ]

    async def preview(self, holders: Sequence[Holder], what: Selection) -> list[Preview]:
        asked = chosen(holders, what)
        answers = await asyncio.gather(
            *(self._at(one, lambda vault: vault.preview_purge(_selector(what))) for one in asked)
        )
        return [
            Preview(one, error=answer) if isinstance(answer, str) else Preview(one, answer)
            for one, answer in zip(asked, answers, strict=True)
        ]

    async def purge(self, previews: Sequence[Preview]) -> list[Purged]:
        async def one(preview: Preview) -> Purged:
            assert preview.plan is not None
            token = preview.plan.token
            answer = await self._at(preview.holder, lambda vault: vault.purge(token))
            if isinstance(answer, str):
                return Purged(preview.holder, error=answer)
            return Purged(preview.holder, answer.records, answer.bytes, answer.undo_token, answer.undo_s)

        useful = [preview for preview in previews if preview.plan and preview.plan.records]
        return list(await asyncio.gather(*(one(preview) for preview in useful)))

    async def undo(self, purged: Sequence[Purged]) -> list[Done]:
        async def one(done: Purged) -> Done:
            answer = await self._at(done.holder, lambda vault: vault.undo_purge(done.undo_token))
            return Done(done.holder, error=answer) if isinstance(answer, str) else Done(done.holder, answer[0])

        return list(await asyncio.gather(*(one(done) for done in purged if done.undo_token)))

    async def config(self, address: str) -> ConfigState | str:
        return await _answer(ConfigClient(address, self._token()), address, lambda client: client.get())

    async def _node(self, holder: Holder, ask: Callable[[NodeClient], Awaitable[T]]) -> T | str:
        """The agent's answer, or why there is none."""
        return await _answer(NodeClient(holder.address, self._token()), holder.address, ask)

    async def requests(self, holders: Sequence[Holder]) -> tuple[list[RequestRow], list[tuple[Holder, str]]]:
        answers = await asyncio.gather(*(self._node(one, lambda node: node.requests(REQUESTS_MAX)) for one in holders))
        rows: list[RequestRow] = []
        failures: list[tuple[Holder, str]] = []
        for holder, answer in zip(holders, answers, strict=True):
            if isinstance(answer, str):
                failures.append((holder, answer))
            else:
                rows += [RequestRow(holder, line) for line in answer]
        return rows, failures

    async def explain(self, holder: Holder, number: int) -> Explanation | str:
        return await self._node(holder, lambda node: node.explain(number))

    async def check(self, addresses: Sequence[str], changes: Changes) -> list[Checked]:
        return await check_everywhere(addresses, self._token(), changes)

    async def apply(self, checked: Sequence[Checked], changes: Changes) -> list[Acknowledged]:
        return await apply_everywhere(checked, self._token(), changes)


def _selector(what: Selection) -> Selector:
    from tierkv.store.base import Selector

    return Selector(
        model=what.model if what.scope in ("model", "prefix") else "",
        prefixes=(what.prefix,) if what.prefix else (),
        older_than_s=what.older_than_s,
        tier=what.tier if what.scope == "tier" else "",
    )
