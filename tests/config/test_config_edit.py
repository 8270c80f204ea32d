"""Editing one value leaves every other byte of the file alone, and the file is never half written."""

import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierkv.config import edit as editing
from tierkv.config.atomic import replace
from tierkv.config.edit import plan, resolve_key, set_value, write
from tierkv.config.keys import keys
from tierkv.config.rows import rows
from tierkv.config.source import parse
from tierkv.errors import ConfigError, ConfigFaults

SHIPPED = (Path(__file__).parents[2] / "tierkv.toml").read_bytes()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tierkv.toml"
    path.write_bytes(SHIPPED)
    return path


def changed_lines(old: str, new: str) -> tuple[list[str], list[str]]:
    """Lines that left and lines that came, when everything else is equal and in order."""
    old_lines, new_lines = old.splitlines(keepends=True), new.splitlines(keepends=True)
    start = 0
    while start < min(len(old_lines), len(new_lines)) and old_lines[start] == new_lines[start]:
        start += 1
    end = 0
    while end < min(len(old_lines), len(new_lines)) - start and old_lines[-1 - end] == new_lines[-1 - end]:
        end += 1
    return old_lines[start : len(old_lines) - end], new_lines[start : len(new_lines) - end]


@pytest.mark.parametrize(
    ("key", "value", "left", "came"),
    [
        (
            "inference.memory_threshold",
            "0.7",
            ["memory_threshold = 0.60     # of this machine's memory; above it the engine's prefix cache evicts\n"],
            ["memory_threshold = 0.7     # of this machine's memory; above it the engine's prefix cache evicts\n"],
        ),
        ("cluster.kv_cold.host", "nas", ['host = "127.0.0.1"\n'], ['host = "nas"\n']),
        ("cluster.kv_cold[0].port", "7", ["port = 50051\n"], ["port = 7\n"]),
        ("vault.port", "7", [], ["port = 7\n"]),
        ("inference.kv_codec", "lossless", [], ['kv_codec = "lossless"\n']),
        ("console.connect", '["a:1", "b:2"]', [], ['connect = ["a:1", "b:2"]\n']),
        ("security.insecure", "true", [], ["insecure = true\n"]),
        ("cluster.name", 'quote " and \\', ['name = "tierkv"\n'], ['name = "quote \\" and \\\\"\n']),
        ("cluster.recompute.port", "9", [], ["\n", "[cluster.recompute]\n", "port = 9\n"]),
    ],
)
def test_only_the_line_of_the_key_changes(file, key, value, left, came):
    edit = plan(file, key, value)
    assert changed_lines(edit.old_text, edit.new_text) == (left, came)


def test_new_key_goes_below_its_commented_default(file):
    lines = plan(file, "inference.demote", "on-evict").new_text.splitlines()
    assert lines[lines.index('demote = "on-evict"') - 1].startswith('# demote = "ahead"')


@pytest.mark.parametrize(
    ("text", "key", "value", "expected"),
    [
        ("", "vault.port", "1", "[vault]\nport = 1\n"),
        ("# only a comment", "vault.port", "1", "# only a comment\n\n[vault]\nport = 1\n"),
        ("[vault]", "vault.port", "1", "[vault]\nport = 1\n"),
        ("[vault] # c", "vault.port", "1", "[vault] # c\nport = 1\n"),
        ("[vault]\r\nport=1\r\n", "vault.undo_s", "5s", '[vault]\r\nport=1\r\nundo_s = "5s"\r\n'),
        ("vault.port = 1\n", "vault.undo_s", "5", "vault.port = 1\nvault.undo_s = 5\n"),
        ("vault = { port = 1 } # c\n", "vault.port", "2", "vault = { port = 2 } # c\n"),
        (
            "cluster.kv_cold = {host='a', port=1}\n",
            "cluster.kv_cold.port",
            "2",
            "cluster.kv_cold = {host='a', port=2}\n",
        ),
        (
            "[[cluster.kv_cold]]\nhost='a'\n\n# b\n[[cluster.kv_cold]]\nhost='b'\n",
            "cluster.kv_cold[0].port",
            "2",
            "[[cluster.kv_cold]]\nhost='a'\nport = 2\n\n# b\n[[cluster.kv_cold]]\nhost='b'\n",
        ),
        (
            '[console]\nconnect = [ # all\n  "a:1", # one\n]\n',
            "console.connect",
            "[]",
            "[console]\nconnect = []\n",
        ),
        (
            "[cluster.kv_cold]\nhost='a'\n",
            "cluster.name",
            "n",
            "[cluster.kv_cold]\nhost='a'\n\n[cluster]\nname = \"n\"\n",
        ),
        ('["vault"]\n"port" = 1\n', "vault.port", "2", '["vault"]\n"port" = 2\n'),
        ("[vault]\nport   =   1   # c\n", "vault.port", "2", "[vault]\nport   =   2   # c\n"),
    ],
)
def test_every_way_to_write_a_table(tmp_path, text, key, value, expected):
    path = tmp_path / "t.toml"
    path.write_bytes(text.encode())
    assert plan(path, key, value).new_text == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("inference.memory_threshold", "70", "write 0.70"),
        ("inference.memory_treshold", "0.7", "did you mean 'inference.memory_threshold'?"),
        ("memory_threshold", "0.7", "did you mean 'inference.memory_threshold'?"),
        ("inference", "0.7", "unknown key"),
        ("vault.port", "abc", "must be a whole number"),
        ("cluster.kv_cold[3].host", "a", "cluster.kv_cold has no entry 3"),
        ("vault.max_record_bytes", "1TiB", "must be from 64KiB to 64GiB"),
    ],
)
def test_edit_that_would_break_the_file_is_refused(file, key, value, message):
    with pytest.raises(ConfigError) as raised:
        plan(file, key, value)
    assert message in str(raised.value)
    assert file.read_bytes() == SHIPPED


def test_one_of_several_entries_must_be_named(tmp_path):
    path = tmp_path / "t.toml"
    path.write_text("[[cluster.kv_cold]]\nhost='a'\n[[cluster.kv_cold]]\nhost='b'\n")
    with pytest.raises(ConfigError, match="has 2 entries; name one"):
        plan(path, "cluster.kv_cold.host", "c")
    assert 'host = "c"' not in plan(path, "cluster.kv_cold[1].host", "c").new_text
    assert plan(path, "cluster.kv_cold[1].host", "c").new_text.endswith('host="c"\n')


VALUES = {
    "string": st.sampled_from(["x", "with 'quotes\"", "ünï"]), "path": st.sampled_from(["/a b/c", "~/x"]),
    "host": st.sampled_from(["nas", "10.0.0.1"]), "port": st.integers(1, 65535).map(str),
    "integer": st.integers(64, 100).map(str), "fraction": st.sampled_from(["0.5", "0.25"]),
    "boolean": st.sampled_from(["true", "false"]), "size": st.sampled_from(["1GiB", "2GiB", "536870912"]),
    "duration": st.sampled_from(["1", "1500ms"]), "list": st.sampled_from(["[]", '["a:1"]']),
}  # fmt: skip
settable = [key for key in keys() if key.kind not in ("peers", "peer", "table")]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(settable), st.data(), st.booleans())
def test_any_edit_of_any_key_changes_that_line_only(tmp_path, key, data, windows):
    choices = [choice for choice in key.choices if choice]
    value = data.draw(st.sampled_from(choices) if choices else VALUES[key.kind])
    if key.path in ("inference.frame_timeout_s", "inference.restore_timeout_s", "console.refresh_hz"):
        value = "1"
    path = tmp_path / "tierkv.toml"
    path.write_bytes(SHIPPED.replace(b"\n", b"\r\n") if windows else SHIPPED)
    edit = plan(path, key.path.replace("[]", ""), value)
    left, came = changed_lines(edit.old_text, edit.new_text)
    leaf = key.path.rpartition(".")[2]
    assert len(left) <= 1
    assert len([line for line in came if "=" in line]) <= 1
    assert all(line.startswith((leaf, "[cluster.recompute]")) or not line.strip() for line in came)
    assert ("\r\n" in edit.new_text) == windows
    assert edit.new_text.count("\r\n") in (0, edit.new_text.count("\n"))


def test_writing_keeps_mode_backup_and_symlink(file, tmp_path):
    file.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    backup = write(plan(link, "vault.port", "7"))
    assert link.is_symlink()
    assert tomllib.loads(file.read_text())["vault"]["port"] == 7
    assert file.stat().st_mode & 0o777 == 0o640
    assert backup == file.with_name("tierkv.toml.bak")
    assert backup.read_bytes() == SHIPPED
    assert backup.stat().st_mode & 0o777 == 0o640
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link.toml", "tierkv.toml", "tierkv.toml.bak"]


def test_byte_order_mark_survives(tmp_path):
    path = tmp_path / "t.toml"
    path.write_bytes(b"\xef\xbb\xbf[vault]\r\nport = 1\r\n")
    write(plan(path, "vault.port", "2"))
    assert path.read_bytes() == b"\xef\xbb\xbf[vault]\r\nport = 2\r\n"


def test_file_that_changed_meanwhile_is_not_overwritten(file):
    edit = plan(file, "vault.port", "7")
    file.write_bytes(SHIPPED + b"# somebody was here\n")
    with pytest.raises(ConfigError, match="changed meanwhile"):
        write(edit)
    assert file.read_bytes() == SHIPPED + b"# somebody was here\n"


def test_failed_write_leaves_the_old_file_and_no_litter(file, monkeypatch):
    edit = plan(file, "vault.port", "7")

    def fail(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        write(edit)
    assert file.read_bytes() == SHIPPED
    assert [entry.name for entry in file.parent.iterdir()] == ["tierkv.toml"]


def test_replace_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        replace(path, b"new", like=path)
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_edit_is_proved_before_it_is_offered(file, monkeypatch):
    monkeypatch.setattr(editing, "set_value", lambda text, *_: text + "\n[console]\nread_only = true\n")
    with pytest.raises(ConfigError, match="cannot be set without rewriting other lines"):
        plan(file, "vault.port", "7")


def test_keys_resolve_with_and_without_an_index():
    assert resolve_key("cluster.kv_cold.host")[1] == ("cluster", "kv_cold", "host")
    assert resolve_key("cluster.kv_cold[2].host")[1] == ("cluster", "kv_cold", 2, "host")
    with pytest.raises(ConfigFaults, match=r"set cluster\.kv_cold\.host"):
        resolve_key("cluster.kv_cold")


def test_every_value_in_force_can_be_set_to_itself(file):
    from tierkv.config.load import load_source

    for row in rows(load_source(parse(SHIPPED.decode(), file), environ={})):
        if isinstance(row.value, str) and row.value:
            assert tomllib.loads(set_value("", tuple(row.path.split(".")), row.value))
