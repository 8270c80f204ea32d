"""tierkv.toml as a form made from the schema, with its raw text beside it; faults at their field while one types."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.widgets import Static

from tierkv.errors import ConfigError
from tierkv.tui.screens.apply import Apply, Outcome
from tierkv.tui.screens.overview import FilterInput
from tierkv.tui.screens.work import WorkScreen, as_json
from tierkv.tui.text import clean, wrap
from tierkv.tui.theme import Role
from tierkv.tui.widgets.lines import Line, Lines, left
from tierkv.tui.widgets.table import Column, Pager, Table
from tierkv.tui.widgets.words import Words

if TYPE_CHECKING:
    from tierkv.config.draft import Draft, Field

EXPLAINED = 4
BESIDE_MIN = 130
MOST_SHOWN = 4096


class ConfigView(WorkScreen):
    """Changes pile up in a draft; ``a`` shows what they would do everywhere before anything is written."""

    tab = "config"
    BINDINGS = [
        Binding("enter", "edit", "Edit"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("a", "apply", "Apply"),
        Binding("t", "text", "Text"),
        Binding("R", "revert", "Drop changes", show=False),
        Binding("r", "reload", "Read the file again", show=False),
        Binding("w", "overwrite", "Keep mine over theirs", show=False),
        Binding("E", "editor", "Open in $EDITOR", show=False),
        Binding("s", "sort", "Sort", show=False),
        Binding("y", "copy", "Copy the row", show=False),
        Binding("Y", "copy_json", "Copy the row as JSON", show=False),
    ]

    def __init__(self, path: Path | None, recorded: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self.path = path
        self.recorded = recorded
        self.draft: Draft | None = None
        self.problem = ""
        self.on_disk = False
        self.table: Table[Field] = Table("table", self._columns(), lambda field: field.path, "no keys")
        self.raw = Pager("beside")
        self._doc = Lines("doc")
        self.as_text = False
        self._editing = ""

    def _columns(self) -> tuple[Column[Field], ...]:
        return (
            Column(
                "", "what is changed and not applied yet, or faulty",
                1, self._sign, 0, role=_mark_role,
            ),
            Column(
                "key", "section and name, as 'tierkv config set' takes it",
                28, lambda f: f.path, 0, lambda f: f.path, grow=True, role=_key_role,
            ),
            Column(
                "value", "as the file would say it; dim: the default",
                18, lambda f: clean(f.text) or "not set", 1, role=_value_role,
            ),
            Column(
                "change", "live: agents take it over at once; restart: when they start again",
                7, lambda f: f.key.apply, 3, lambda f: f.key.apply, role=lambda _: "dim",
            ),
            Column(
                "from", "the line of the file; default: the file does not say it",
                10, self._from, 2, lambda f: str(f.origin), role=lambda _: "dim",
            ),
        )  # fmt: skip

    def _sign(self, field: Field) -> str:
        glyphs = self.console_app.glyphs
        return glyphs.refused if field.fault else glyphs.changed if field.changed else " "

    def _from(self, field: Field) -> str:
        if field.origin.kind == "file":
            return f"line {field.origin.line}" if field.origin.line else "the file"
        return str(field.origin)

    def words(self) -> tuple[Words, ...]:
        glyphs = self.console_app.glyphs
        first, *columns = self.table.columns
        signs = (f"{glyphs.changed} {glyphs.refused}", first.told)
        told = Words.of("COLUMNS", columns)
        return (Words(told.heading, (signs, *told.told)),)

    def body(self) -> ComposeResult:
        with Horizontal(id="columns"):
            yield self.table
            yield self.raw
        yield self._doc

    def main(self) -> Table[Any] | Pager:
        return self.raw if self.as_text and not self.has_class("-wide") else self.table

    def on_mount(self) -> None:
        self._load()
        self.set_interval(1.0, self._look_at_disk)

    def _load(self) -> None:
        from tierkv.config.draft import Draft

        if self.path is None:
            self.problem = "no file; these are defaults" if self.recorded is None else "as it was recorded"
            self.draft = None
            return
        try:
            self.draft = Draft(self.path)
            self.problem = ""
        except ConfigError as error:
            self.draft, self.problem = None, str(error).splitlines()[0]

    def _look_at_disk(self) -> None:
        if self.draft is None or not self.is_current:
            return
        there = self.draft.changed_on_disk()
        if there and not self.draft.changed:
            self.draft.reload()
            self.tell("the file was changed by somebody else and is read again")
        elif there != self.on_disk:
            self.on_disk = there
            if there:
                self.tell("the file changed on disk: r reads it (drops yours), w keeps yours over it", "alert")
        self.redraw()

    # --- drawing ---------------------------------------------------------------------------------

    def draw(self) -> None:
        width = self.size.width
        wide = width >= BESIDE_MIN
        self.set_class(wide, "-wide")
        self.set_class(self.as_text, "-text")
        self.crumb = self._crumb()
        self.table.show(self._fields())
        self.raw.show(self._text_lines(width // 2 if wide else width))
        self._follow()
        self._doc.styles.height = EXPLAINED
        self._doc.paint(self._explained(width))

    def _crumb(self) -> str:
        if self.problem:
            return clean(self.problem)
        if self.draft is None:
            return ""
        parts: list[str] = []
        count = len(self.draft.changes()) if self.draft.changed and not self.draft.faults else 0
        if count:
            parts.append(f"{count} changed")
        if self.draft.faults:
            parts.append(f"{len(self.draft.faults)} fault" + ("s" if len(self.draft.faults) > 1 else ""))
        if self.on_disk:
            parts.append("changed on disk")
        parts.append(str(self.path))
        return clean(", ".join(parts))

    def _fields(self) -> list[Field]:
        from tierkv.config.draft import Field as Shown
        from tierkv.config.keys import keys
        from tierkv.config.load import DEFAULT

        if self.draft is not None:
            return self.draft.fields()
        if self.recorded is not None:
            return recorded_fields(self.recorded)
        plain = [key for key in keys() if key.kind not in ("peers", "peer") and "[]" not in key.path]
        return [Shown(key.path, key, key.default, DEFAULT) for key in plain]

    def _text_lines(self, width: int) -> list[Line]:
        glyphs = self.console_app.glyphs
        if self.draft is None:
            return []
        at = self._line()
        wrong = {fault.line for fault in self.draft.faults if fault.line}
        before = set(self.draft.base_text.splitlines())
        lines: list[Line] = []
        for number, text in enumerate(self.draft.text.splitlines(), 1):
            role: Role = "bad" if number in wrong else "warn" if text not in before else _toml_role(text)
            if number == at:
                role = "select"
            sign = glyphs.refused if number in wrong else glyphs.cursor if number == at else " "
            lines.append(
                (left(f"{number:>4} {sign} ", 7, "faint", glyphs), left(text.expandtabs(4), width - 8, role, glyphs))
            )
        return lines

    def _line(self) -> int:
        field = self.table.chosen
        try:
            return self.draft.line_of(field.path) if self.draft and field else 0
        except ConfigError:
            return 0

    def _follow(self) -> None:
        """The raw text shows the line of the key under the cursor."""
        line = self._line()
        if line and self.has_class("-wide"):
            self.raw.top = max(0, line - 1 - self.raw.size.height // 2)
            self.raw.draw()

    def _explained(self, width: int) -> list[Line]:
        glyphs, field = self.console_app.glyphs, self.table.chosen
        if field is None:
            return [()] * EXPLAINED
        rule: Line = (left(glyphs.rule * width, width, "faint", glyphs),)
        faults = self._faults_now(field)
        if faults:
            text = f"{faults[0].problem}{f'; {faults[0].suggestion}' if faults[0].suggestion else ''}"
            faulty = wrap(f"{glyphs.refused} {field.path}: {text}", width - 2, EXPLAINED - 1, glyphs.ellipsis)
            return [rule, *(((f" {line}", "bad"),) for line in faulty)]
        facts = ["at once" if field.key.apply == "live" else "after a restart"]
        facts.append(f"default {field.key.shown(field.key.default) or 'empty'}")
        facts += [f"allowed {field.key.allowed}"] if field.key.allowed else []
        told = "; ".join(facts)
        name = max(len(field.path) + 3, min(34, width - len(told)))
        first: Line = (left(f" {field.path}", name, "head", glyphs), left(told, width - name, "dim", glyphs))
        doc = wrap(field.key.doc, width - 2, EXPLAINED - 2, glyphs.ellipsis)
        return [rule, first, *(((f" {text}", "text"),) for text in doc)]

    def _faults_now(self, field: Field) -> Any:
        if self._editing and self.draft is not None and self._editing == field.path:
            return self.draft.tried(field.path, self.query_one(FilterInput).value)
        if field.fault:
            return (field.fault,)
        others = self.draft.faults if self.draft is not None else ()
        return tuple(fault for fault in others if fault.key in ("", field.path))

    # --- editing ---------------------------------------------------------------------------------

    def action_move(self, down: int) -> None:
        super().action_move(down)
        self.redraw()

    def action_edit(self) -> None:
        field = self.table.chosen
        if field is None or self.draft is None:
            return
        self._editing = field.path
        self.add_class("-editing")
        name = field.path.rpartition(".")[2]
        self.query_one("#prompt", Static).update(f"{name} = ")
        entry = self.query_one(FilterInput)
        entry.placeholder = field.key.allowed
        entry.value = field.text
        entry.focus()
        entry.cursor_position = len(entry.value)

    def typed(self, text: str) -> None:
        if self.has_class("-editing"):
            self._doc.paint(self._explained(self.size.width))
        else:
            super().typed(text)

    def entered(self, text: str) -> None:
        if not self.has_class("-editing"):
            super().entered(text)
        elif self.draft is not None:
            faults = self.draft.set(self._editing, text)
            if not faults:
                self.close_prompt()
            self.redraw()

    def close_prompt(self) -> None:
        super().close_prompt()
        self.remove_class("-editing")
        self._editing = ""
        self.query_one("#prompt", Static).update("/")
        self.redraw()

    def action_back(self) -> None:
        if self.has_class("-editing"):
            self.close_prompt()
        elif self.as_text:
            self.action_text()
        else:
            super().action_back()

    def action_text(self) -> None:
        self.as_text = not self.as_text
        self.call_after_refresh(self.redraw)
        self.redraw()

    def action_revert(self) -> None:
        if self.draft is not None and self.draft.changed:
            self.draft.revert()
            self.tell("the changes are dropped")
            self.redraw()

    def action_reload(self) -> None:
        self._load()
        self.on_disk = False
        self.redraw()

    def action_overwrite(self) -> None:
        if self.draft is not None and self.on_disk:
            self.draft.rebase()
            self.on_disk = False
            self.tell("yours stands; a applies it over what is on disk")
            self.redraw()

    def action_editor(self) -> None:
        """The text in the person's own editor; what it leaves becomes the draft."""
        if self.draft is None:
            return
        command = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
        descriptor, name = tempfile.mkstemp(suffix=".toml")
        scratch = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                file.write(self.draft.text)
            with self.app.suspend():
                subprocess.run([*command, name], check=False)
            self.draft.set_text(scratch.read_bytes().decode("utf-8", errors="replace"))
        except OSError as error:
            self.tell(f"{command[0]}: {error.strerror}", "bad")
        finally:
            scratch.unlink(missing_ok=True)
        self.redraw()

    # --- applying --------------------------------------------------------------------------------

    def action_apply(self) -> None:
        draft = self.draft
        if draft is None:
            return
        if draft.faults:
            self.tell(f"not while there are faults: {draft.faults[0].problem}", "bad")
        elif not draft.changed:
            self.tell("nothing is changed")
        elif draft.changed_on_disk():
            self.tell("the file changed on disk: r reads it (drops yours), w keeps yours over it", "alert")
        else:
            nodes = [node.target for node in self.view.nodes if node.counts]
            self.app.push_screen(Apply(draft, nodes), self._applied)

    def _applied(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self.tell(outcome.text, outcome.role)
            self.redraw()

    def exported(self) -> Any:
        return {"path": str(self.path), "values": {field.path: field.value for field in self.table.shown}}

    def action_copy(self) -> None:
        if self.table.chosen is not None:
            self.copied(f"{self.table.chosen.path} = {self.table.chosen.text}", "the row")

    def action_copy_json(self) -> None:
        if self.table.chosen is not None:
            self.copied(as_json({self.table.chosen.path: self.table.chosen.value}), "the value as JSON")


def recorded_fields(recorded: Mapping[str, object]) -> list[Field]:
    """What a recording says, as far as it is of keys that this console knows and of values that can be shown."""
    from tierkv.config.draft import Field
    from tierkv.config.edit import resolve_key
    from tierkv.config.load import Origin

    there = Origin("flag", "recorded")
    found: list[Field] = []
    for path, value in recorded.items():
        with suppress(ConfigError, TypeError, ValueError, ArithmeticError):
            field = Field(path, resolve_key(path)[0], value, there)
            if len(field.text) < MOST_SHOWN:
                found.append(field)
    return found


def _mark_role(field: Field) -> Role:
    return "bad" if field.fault else "warn"


def _key_role(field: Field) -> Role:
    return "bad" if field.fault else "strong" if field.changed else "text"


def _value_role(field: Field) -> Role:
    return "bad" if field.fault else "warn" if field.changed else "dim" if field.origin.kind == "default" else "strong"


def _toml_role(text: str) -> Role:
    shown = text.lstrip()
    return "dim" if shown.startswith("#") else "head" if shown.startswith("[") else "text"
