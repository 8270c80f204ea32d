"""What the vaults hold, prefix by prefix; one of them drilled into its blocks and where they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding

from tierkv.rpc.admin import RecordLine
from tierkv.tui.operate import Holder, PrefixList, PrefixRow, Selection, away_of, holders_of, nowhere
from tierkv.tui.screens.work import AskedTable, WorkScreen, as_json
from tierkv.tui.text import age, clean, clock, counted, short_count, short_size
from tierkv.tui.theme import Glyphs, Role
from tierkv.tui.widgets.lines import Line, left, right
from tierkv.tui.widgets.table import Column, Pager, Table, number
from tierkv.tui.widgets.words import Words

TIERS = {"kv": "KV", "ssm": "SSM"}
KINDS = {1: "block", 2: "window", 3: "state"}

RECORD_HEADINGS = {
    "kind": "block: attention rows of 256 tokens; window: of a sliding window; state: a recurrent checkpoint",
    "positions": "the tokens that it is for",
    "size": "bytes as they are stored",
    "hits": "how many restores used it",
    "used": "how long ago that was last",
    "codec": "how it is encoded; lossless is exact",
    "shared": "own: no other prefix uses it",
    "where": "the nodes that hold it",
}


def model_of(name: str) -> str:
    return clean(name).rstrip("/").rsplit("/", 1)[-1] or "unnamed"


class Prefixes(AskedTable):
    tab = "prefixes"
    BINDINGS = [
        Binding("enter", "open", "Open"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("s", "sort", "Sort"),
        Binding("S", "sort_reversed", "Reverse the order", show=False),
        Binding("p", "pin", "Pin"),
        Binding("x", "app.purge", "Purge"),
        Binding("r", "refresh", "Ask again", show=False),
        Binding("y", "copy", "Copy the key", show=False),
        Binding("Y", "copy_json", "Copy the row as JSON", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.table: Table[PrefixRow] = Table("table", self._columns(), lambda row: row.key, "asking")
        self.found = PrefixList()
        self._silent: set[str] = set()
        self.asked_s: float | None = None

    def _columns(self) -> tuple[Column[PrefixRow], ...]:
        return (
            Column(
                "key", "how the key of its last block begins",
                8, lambda r: r.info.leaf_key.hex()[:8], 1, role=self._fresh,
            ),
            Column(
                "model", "the model that made it; no other can use it",
                12, _model, 0, lambda r: r.info.model, grow=True, role=self._fresh,
            ),
            Column(
                "tier", "KV: attention state; SSM: recurrent checkpoints",
                4, lambda r: TIERS.get(r.info.tier, r.info.tier), 6, lambda r: r.info.tier,
            ),
            number(
                "tokens", "its length, from the beginning of the prompt",
                6, 2, lambda r: r.info.tokens, short_count, self._fresh,
            ),
            number(
                "own", "bytes that no other prefix shares: what purging it sets free",
                5, 3, lambda r: r.info.own_bytes, short_size, self._fresh, marked=True,
            ),
            number(
                "total", "bytes of all its blocks, those that others share too",
                5, 9, lambda r: r.info.total_bytes, short_size, self._fresh, marked=True,
            ),
            number(
                "hits", "how many restores used it",
                5, 5, lambda r: r.info.hits, short_count, self._fresh, marked=True,
            ),
            number(
                "used", "how long ago that was last",
                6, 4, lambda r: r.info.last_hit_unix_s, self._ago, self._fresh,
            ),
            number(
                "age", "how long ago it was stored",
                6, 8, lambda r: r.info.created_unix_s, self._ago, self._fresh,
            ),
            Column(
                "pin", "pin: it is never evicted",
                3, _pin, 5, lambda r: r.info.pinned, descending=True, role=lambda _: "accent",
            ),
            Column(
                "codec", "how its state is encoded; lossless is exact",
                9, lambda r: ",".join(r.info.codecs), 10, lambda r: r.info.codecs,
            ),
            Column(
                "node", "the vault that holds it",
                9, lambda r: r.holder.name, 7, lambda r: r.holder.name, role=self._fresh,
            ),
        )  # fmt: skip

    def _fresh(self, row: PrefixRow) -> Role:
        """Dim for what a vault said before it went."""
        return "dim" if row.holder.address in self._silent else "text"

    def _ago(self, unix_s: float | None) -> str:
        return age(max(0.0, self.view.now_unix_s - unix_s)) if unix_s else "never"

    async def ask(self) -> None:
        operator = self.console_app.operator
        if operator is None:
            self.table.empty = "prefixes are not in a recording"
            self.redraw()
            return
        asked, away = self.who(), away_of(self.view)
        found = await operator.prefixes(asked)
        gone = [(one.holder, one.error) for one in away]
        silent = [*found.failures, *gone]
        if not self.paused:
            self._silent = {holder.address for holder, _ in silent}
            kept = [row for row in self.found.rows if row.holder.address in self._silent]
            found = replace(
                found, rows=(*found.rows, *kept), total=found.total + len(kept), failures=(*found.failures, *gone)
            )
            self.found, self.asked_s = found, time.monotonic()
            told = "; ".join(f"{holder.name}: {why}" for holder, why in silent)
            self.table.empty = f"no vault that answers holds anything; {told}" if told else "no vault holds anything"
            if len(silent) - len(gone) == len(asked):
                self.table.empty = f"no vault answers{'; ' if told else ''}{told}"
            self.table.show(found.rows)
            self.redraw()

    def who(self) -> list[Holder]:
        return holders_of(self.view)

    def draw(self) -> None:
        if self.asked_s is None:
            self.crumb = "asking"
        else:
            self.crumb = (
                f"{len(self.table.shown):,} of {self.found.total:,}, {age(time.monotonic() - self.asked_s)} old"
            )
        if self.found.failures:
            holder, why = self.found.failures[0]
            count = len(self.found.failures)
            missing = clean(holder.name) if count == 1 else f"{count} vaults"
            self.crumb = f"without {missing}; {self.crumb}; {clean(holder.name)}: {clean(why)}"
        self.table.draw()

    def exported(self) -> Any:
        return [_json(row) for row in self.table.shown]

    def purgeable(self) -> list[Selection]:
        """What a purge from here may mean, the chosen prefix first."""
        row = self.table.chosen
        if row is None:
            return []
        info = row.info
        return [
            Selection("prefix", row.holder.address, row.holder.name, info.model, info.leaf_key),
            Selection("model", model=info.model),
            Selection("node", row.holder.address, row.holder.name),
        ]

    def action_open(self) -> None:
        if self.table.chosen is not None:
            self.app.push_screen(PrefixDetail(self.table.chosen, holders_of(self.view)))
            self.console_app.tick()

    def on_table_opened(self) -> None:
        self.action_open()

    def action_pin(self) -> None:
        row, operator = self.table.chosen, self.console_app.operator
        if row is None or operator is None:
            return
        on = not row.info.pinned
        what = Selection("prefix", row.holder.address, row.holder.name, row.info.model, row.info.leaf_key)

        async def change() -> None:
            for done in await operator.pin([row.holder], what, on):
                word = "pinned" if on else "unpinned"
                text = f"{done.holder.name}: {done.error or counted(done.records, 'record') + ' ' + word}"
                self.tell(clean(text), "bad" if done.error else "strong")
            await self.ask()

        self.run_worker(change(), group="pin")

    def action_copy(self) -> None:
        if self.table.chosen is not None:
            self.copied(self.table.chosen.info.leaf_key.hex(), "the key")

    def action_copy_json(self) -> None:
        if self.table.chosen is not None:
            self.copied(as_json(_json(self.table.chosen)), "the prefix as JSON")


def _exact(fidelity: int) -> str:
    return "exact" if fidelity == 0 else f"lossy (fidelity {fidelity}, 0 is exact)"


def _model(row: PrefixRow) -> str:
    return model_of(row.info.model)


def _pin(row: PrefixRow) -> str:
    return "pin" if row.info.pinned else ""


def _json(row: PrefixRow) -> Any:
    return {**asdict(row.info), "node": row.holder.name, "address": row.holder.address}


class PrefixDetail(WorkScreen):
    """One prefix: a line a record, and at which nodes it is."""

    tab = "prefixes"
    drilled = True
    BINDINGS = [
        Binding("r", "refresh", "Ask again"),
        Binding("y", "copy", "Copy the key", show=False),
        Binding("Y", "copy_json", "Copy as JSON", show=False),
        Binding("escape,left", "back", "Back"),
    ]

    def __init__(self, row: PrefixRow, holders: list[Holder]) -> None:
        super().__init__()
        self.row, self._holders = row, holders
        self.crumb = f"{row.info.leaf_key.hex()[:8]} of {model_of(row.info.model)}"
        self.pager = Pager("prefix")
        self.found: list[tuple[Holder, tuple[RecordLine, ...]]] | None = None

    def body(self) -> ComposeResult:
        yield self.pager

    def main(self) -> Pager:
        return self.pager

    def on_mount(self) -> None:
        self.action_refresh()

    def action_refresh(self) -> None:
        operator = self.console_app.operator
        if operator is None:
            return

        async def ask() -> None:
            self.found = await operator.records(holders_of(self.view) or self._holders, self.row.info.leaf_key)
            self.redraw()

        self.run_worker(ask(), exclusive=True, group="records")

    def purgeable(self) -> list[Selection]:
        info, holder = self.row.info, self.row.holder
        return [Selection("prefix", holder.address, holder.name, info.model, info.leaf_key)]

    def draw(self) -> None:
        self.pager.show(list(self._lines()))

    def words(self) -> tuple[Words, ...]:
        return (Words.named("RECORDS", RECORD_HEADINGS),)

    def exported(self) -> Any:
        return {"prefix": _json(self.row), "records": [[h.name, [asdict(r) for r in rs]] for h, rs in self.found or ()]}

    def action_copy(self) -> None:
        self.copied(self.row.info.leaf_key.hex(), "the key")

    def action_copy_json(self) -> None:
        self.copied(as_json(self.exported()), "the prefix as JSON")

    def _lines(self) -> Iterator[Line]:
        width, glyphs, info = self.size.width, self.console_app.glyphs, self.row.info
        last = f", last {clock(info.last_hit_unix_s)}" if info.hits else ""
        facts = (
            ("model", info.model or "unnamed"),
            ("key", info.leaf_key.hex()),
            ("root", info.root.hex()),
            ("size", f"{info.tokens:,} tokens; {short_size(info.own_bytes)} its own of {short_size(info.total_bytes)}"),
            ("used", f"{counted(info.hits, 'hit')}{last}; made {clock(info.created_unix_s)}"),
            ("codec", f"{', '.join(info.codecs)}; {_exact(info.fidelity)}{'; pinned' if info.pinned else ''}"),
        )
        for label, text in facts:
            yield (left(f" {label}", 9, "dim", glyphs), left(text, width - 9, "text", glyphs))
        yield ()
        yield _heading(width, glyphs)
        if not self.found:
            text = "asking" if self.found is None else nowhere(self.view)
            yield (left(f"  {text}", width, "dim", glyphs),)
            return
        where: dict[bytes, list[str]] = {}
        for holder, records in self.found:
            for record in records:
                where.setdefault(record.key, []).append(holder.name)
        known = {record.key: record for _, records in self.found for record in records}
        for record in sorted(known.values(), key=lambda one: (one.start, one.kind)):
            yield self._record(record, ", ".join(where[record.key]), width, glyphs)

    def _record(self, record: RecordLine, where: str, width: int, glyphs: Glyphs) -> Line:
        used = age(max(0.0, self.view.now_unix_s - record.last_hit_unix_s)) if record.last_hit_unix_s else "never"
        return (
            left(f"  {record.key.hex()[:8]}", 11, "text", glyphs),
            left(KINDS.get(record.kind, "?"), 7, "accent", glyphs),
            right(f"{record.start:,}-{record.end:,}", 15, "text", glyphs),
            right(short_size(record.size_bytes), 6, "text", glyphs),
            right(short_count(record.hits), 6, "text", glyphs),
            right(used, 8, "text", glyphs),
            left(f"  {record.codec}", 11, "dim", glyphs),
            left("own" if record.own else "shared", 7, "text" if record.own else "dim", glyphs),
            left(f"{where}{' pinned' if record.pinned else ''}", max(0, width - 71), "strong", glyphs),
        )


def _heading(width: int, glyphs: Glyphs) -> Line:
    kind, *numbers, codec, own, where = RECORD_HEADINGS
    return (
        left(" RECORDS", 11, "head", glyphs),
        left(kind, 7, "dim", glyphs),
        *(right(title, each, "dim", glyphs) for title, each in zip(numbers, (15, 6, 6, 8), strict=True)),
        left(f"  {codec}", 11, "dim", glyphs),
        left(own, 7, "dim", glyphs),
        left(where, max(0, width - 71), "dim", glyphs),
    )
