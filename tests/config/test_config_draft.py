"""The draft behind the form: whatever is typed into any field changes the line of that key and no other byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_config_edit import SHIPPED, VALUES, changed_lines, settable

from tierkv.config.draft import Draft, Field
from tierkv.config.load import DEFAULT

SLOW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
BOUND = ("inference.frame_timeout_s", "inference.restore_timeout_s", "console.refresh_hz")


def value_for(data: st.DataObject, key) -> str:
    choices = [choice for choice in key.choices if choice]
    return "1" if key.path in BOUND else data.draw(st.sampled_from(choices) if choices else VALUES[key.kind])


def draft_of(folder: Path, text: bytes) -> Draft:
    path = folder / "tierkv.toml"
    path.write_bytes(text)
    return Draft(path)


@SLOW
@given(st.lists(st.sampled_from(settable), min_size=1, max_size=4), st.data(), st.booleans())
def test_any_edits_of_any_keys_change_those_lines_only(tmp_path: Path, keys, data, windows: bool) -> None:
    draft = draft_of(tmp_path, SHIPPED.replace(b"\n", b"\r\n") if windows else SHIPPED)
    for key in keys:
        before, value = draft.text, value_for(data, key)
        path = key.path.replace("[]", "")
        assert draft.set(path, value) == ()
        left, came = changed_lines(before, draft.text)
        leaf = path.rpartition(".")[2]
        assert len(left) <= 1
        assert all(line.startswith((leaf, "[cluster.recompute]")) or not line.strip() for line in came)
        if came:
            assert draft.text.splitlines()[draft.line_of(path) - 1].startswith(leaf)
        assert draft.text.count("\r\n") in (0, draft.text.count("\n"))
    told = "".join(draft.text.splitlines(keepends=True))
    draft.write()
    assert draft.path.read_bytes() == told.encode()
    assert draft.take_back()
    assert draft.path.read_bytes().replace(b"\r\n", b"\n") == SHIPPED
    draft.revert()
    assert not draft.changed


@SLOW
@given(st.sampled_from(settable), st.text(max_size=40))
def test_whatever_is_typed_is_taken_whole_or_refused_with_a_reason(tmp_path: Path, key, text: str) -> None:
    draft = draft_of(tmp_path, SHIPPED)
    path = key.path.replace("[]", "")
    faults = draft.set(path, text)
    if faults:
        assert draft.text == draft.base_text
        assert all(fault.problem for fault in faults)
    else:
        left, came = changed_lines(draft.base_text, draft.text)
        assert len(left) <= 1
        assert len([line for line in came if "=" in line]) <= 1


def test_enter_on_any_field_as_it_stands_changes_nothing(tmp_path: Path) -> None:
    """Sizes that no unit divides, long durations, spellings of one's own."""
    text = SHIPPED + b"\n[console]\nrefresh_hz = 3\n" if b"[console]" not in SHIPPED else SHIPPED
    draft = draft_of(tmp_path, text)
    for path, value in (
        ("vault.max_bytes", "5000000001"), ("vault.dead_after_s", "86400123"), ("vault.ttl_s", "1500ms"),
        ("inference.memory_threshold", "0.6543217"),
    ):  # fmt: skip
        assert draft.set(path, value) == ()
    draft.write()
    for field in draft.fields():
        if field.value is not None:
            assert draft.set(field.path, field.text) == (), field
            assert not draft.changed, field


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("vault.max_bytes", 24 << 30, "24GiB"), ("vault.max_bytes", 5_000_000_001, "5000000001"),
        ("vault.dead_after_s", 30 * 86400.0, "30d"), ("vault.sync_s", 0.25, "250ms"), ("vault.ttl_s", 0.0, "0"),
        ("security.insecure", False, "false"), ("console.connect", ["a:1"], '["a:1"]'), ("vault.port", None, ""),
    ],
)  # fmt: skip
def test_a_field_is_offered_as_one_would_type_it(path: str, value: object, text: str) -> None:
    key = next(key for key in settable if key.path == path)
    assert Field(path, key, value, DEFAULT).text == text
