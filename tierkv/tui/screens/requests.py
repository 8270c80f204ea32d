"""The last requests of the engines, and of one of them why it was answered the way it was, tier by tier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding

from tierkv.telemetry.explanation import Explanation, TierFinding
from tierkv.tui.operate import Holder, RequestRow, explainers_of
from tierkv.tui.screens.work import AskedTable, WorkScreen, as_json
from tierkv.tui.text import age, clock, short_count, short_duration, short_size, wrap
from tierkv.tui.theme import Glyphs, Role
from tierkv.tui.widgets.lines import Line, left, right
from tierkv.tui.widgets.table import Column, Pager, Table, number
from tierkv.tui.widgets.words import Words

OUTCOMES: dict[str, Role] = {"restored": "ok", "hot": "accent", "computed": "warn"}
LABEL = 11
TIER_HEADINGS = {
    "where": "the engine, or the vault that was asked",
    "asked": "tokens that it was asked for",
    "found": "tokens of those that it had",
    "used": "tokens of those that were restored",
    "bytes": "what came over the wire for them",
    "took": "from the question to the last of it",
}


class Requests(AskedTable):
    """The latest first."""

    tab = "events"
    drilled = True
    BINDINGS = [
        Binding("enter", "open", "Explain"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("s", "sort", "Sort"),
        Binding("S", "sort_reversed", "Reverse the order", show=False),
        Binding("r", "refresh", "Ask again", show=False),
        Binding("Y", "copy_json", "Copy the row as JSON", show=False),
        Binding("escape,left", "back", "Back"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.table: Table[RequestRow] = Table("table", self._columns(), lambda row: row.key, "asking")
        self.crumb = "last requests"
        self._silent: set[str] = set()

    def _columns(self) -> tuple[Column[RequestRow], ...]:
        return (
            Column(
                "time", "when it came, in this machine's time zone",
                8, lambda r: clock(r.line.time_unix_s), 0, lambda r: r.line.time_unix_s, role=_dim,
            ),
            Column(
                "outcome", "restored from the vaults; hot: the engine had it; computed; asked: not answered yet",
                9, lambda r: r.line.outcome, 0, lambda r: r.line.outcome, role=self._outcome,
            ),
            number(
                "tokens", "the length of the prompt",
                7, 2, lambda r: r.line.prompt_tokens, short_count, self._fresh,
            ),
            number(
                "hot", "tokens that the engine's own cache had",
                6, 4, lambda r: r.line.hot_tokens, short_count, self._fresh,
            ),
            number(
                "from", "the position from which the engine had to compute",
                6, 3, lambda r: r.line.position, short_count, self._fresh,
            ),
            number(
                "took", "the restore, from the lookup to the state in the engine",
                5, 5, lambda r: r.line.seconds or None, short_duration, self._fresh,
            ),
            Column(
                "node", "the agent beside the engine",
                9, lambda r: r.holder.name, 6, lambda r: r.holder.name, role=self._fresh,
            ),
            Column(
                "why", "why it was not more; enter says it tier by tier",
                14, lambda r: r.line.reason.replace("_", " "), 1, lambda r: r.line.reason,
            ),
            Column(
                "model", "the model of the engine",
                12, lambda r: r.line.model, 7, lambda r: r.line.model, grow=True,
            ),
        )  # fmt: skip

    def _fresh(self, row: RequestRow) -> Role:
        """Dim for what an agent said before it went."""
        return "dim" if row.holder.address in self._silent else "text"

    def _outcome(self, row: RequestRow) -> Role:
        return "dim" if row.holder.address in self._silent else OUTCOMES.get(row.line.outcome, "text")

    async def ask(self) -> None:
        operator = self.console_app.operator
        if operator is None:
            self.table.empty = "requests are not in a recording"
            self.redraw()
            return
        asked = self.who()
        rows, failures = await operator.requests(asked)
        self.table.empty = "; ".join(f"{one.name}: {why}" for one, why in failures) or "no request has come yet"
        if not asked:
            self.table.empty = "no inference agent answers"
        if not self.paused:
            told = {one.address for one in asked} - {one.address for one, _ in failures}
            self._silent = {row.holder.address for row in self.table.rows} - told
            rows += [row for row in self.table.rows if row.holder.address in self._silent]
            self.crumb = f"last requests; {len(self._silent)} silent" if self._silent else "last requests"
            self.table.show(sorted(rows, key=lambda row: -row.line.time_unix_s))
            self.redraw()

    def who(self) -> list[Holder]:
        return explainers_of(self.view)

    def draw(self) -> None:
        self.table.draw()

    def exported(self) -> Any:
        return [_json(row) for row in self.table.shown]

    def action_open(self) -> None:
        if self.table.chosen is not None:
            self.app.push_screen(Explained(self.table.chosen))
            self.console_app.tick()

    def on_table_opened(self) -> None:
        self.action_open()

    def action_copy_json(self) -> None:
        if self.table.chosen is not None:
            self.copied(as_json(_json(self.table.chosen)), "the request as JSON")


def _dim(_: RequestRow) -> Role:
    return "dim"


def _json(row: RequestRow) -> Any:
    return {**asdict(row.line), "node": row.holder.name}


class Explained(WorkScreen):
    """One request: the sentence, what was expected, and every tier with what it had and why it gave no more."""

    tab = "events"
    drilled = True
    BINDINGS = [
        Binding("r", "refresh", "Ask again"),
        Binding("Y", "copy_json", "Copy as JSON"),
        Binding("escape,left", "back", "Back"),
    ]

    def __init__(self, row: RequestRow) -> None:
        super().__init__()
        self.row = row
        self.crumb = f"request {row.line.id} at {row.holder.name}"
        self.pager = Pager("explained")
        self.found: Explanation | str = "asking the agent, and the vaults what they have now"

    def body(self) -> ComposeResult:
        yield self.pager

    def main(self) -> Pager:
        return self.pager

    def on_mount(self) -> None:
        self.action_refresh()

    def action_refresh(self) -> None:
        operator, holder = self.console_app.operator, self.row.holder
        if operator is None:
            return

        async def ask() -> None:
            self.found = await operator.explain(holder, self.row.line.id)
            self.redraw()

        self.run_worker(ask(), exclusive=True, group="explain")

    def draw(self) -> None:
        self.pager.show(list(self._lines()))

    def words(self) -> tuple[Words, ...]:
        return (Words.named("TIERS", TIER_HEADINGS),)

    def exported(self) -> Any:
        return asdict(self.found) if isinstance(self.found, Explanation) else {"error": self.found}

    def action_copy_json(self) -> None:
        self.copied(as_json(self.exported()), "the explanation as JSON")

    def _lines(self) -> Iterator[Line]:
        width, glyphs, found = self.size.width, self.console_app.glyphs, self.found
        if not isinstance(found, Explanation):
            yield (left(f" {found}", width, "dim", glyphs),)
            return
        for text in wrap(found.sentence, width - 2, 4, glyphs.ellipsis):
            yield (left(f" {text}", width, "strong", glyphs),)
        request = found.request
        ago = age(max(0.0, self.view.now_unix_s - request.time_unix_s))
        facts = [
            ("request", f"{request.id} at {clock(request.time_unix_s)}, {ago} ago: {request.prompt_tokens:,} tokens"),
            ("model", f"{request.model}{f', identity {found.identity[:12]}' if found.identity else ''}"),
        ]
        if found.codec:
            facts.append(("codec", f"{found.codec}, {short_size(found.restored_bytes)}"))
        if found.expected_prefill_s:
            restore, prefill = short_duration(found.expected_restore_s), short_duration(found.expected_prefill_s)
            facts.append(("expected", f"restoring {restore}, computing {prefill}"))
        if found.differing_parts:
            facts.append(("differs in", ", ".join(found.differing_parts)))
        for label, text in facts:
            yield (left(f" {label}", LABEL, "dim", glyphs), left(text, width - LABEL, "text", glyphs))
        yield ()
        yield _heading(width, glyphs)
        for tier in found.tiers:
            yield from _tier(tier, width, glyphs)


def _heading(width: int, glyphs: Glyphs) -> Line:
    where, *numbers = TIER_HEADINGS
    return (
        left(" TIERS", LABEL, "head", glyphs),
        left(where, 22, "dim", glyphs),
        *(right(title, 8, "dim", glyphs) for title in numbers),
        left("", max(0, width - LABEL - 62), "text", glyphs),
    )


def _tier(tier: TierFinding, width: int, glyphs: Glyphs) -> Iterator[Line]:
    def told(number: int, known: bool = True) -> str:
        return f"{number:,}" if known else glyphs.unknown

    numbers = (
        told(tier.asked_tokens, tier.asked),
        told(tier.found_tokens, tier.asked),
        told(tier.used_tokens, tier.used_tokens > 0),
        short_size(tier.used_bytes) if tier.used_bytes else glyphs.unknown,
        short_duration(tier.seconds) if tier.seconds else glyphs.unknown,
    )
    yield (
        left(f"  {tier.tier}", LABEL, "strong", glyphs),
        left(tier.peer, 22, "text", glyphs),
        *(right(number, 8, "text", glyphs) for number in numbers),
    )
    refused = ", ".join(f"{reason.replace('_', ' ')} {count:,}" for reason, count in sorted(tier.refused.items()))
    why = "; ".join(part for part in (tier.detail, refused and f"not used: {refused}") if part)
    for text in wrap(why, width - LABEL - 1, 3, glyphs.ellipsis) if why else ():
        yield (left("", LABEL, "text", glyphs), left(text, width - LABEL, "warn" if tier.reason else "dim", glyphs))
