"""Every kind of fault, with the piece of the message that helps."""

import os
from pathlib import Path

import pytest

from tierkv.config.load import Flag, load
from tierkv.errors import ConfigError, ConfigFaults, exit_code


@pytest.fixture
def faults_of(tmp_path):
    def run(text: str, environ=None, flags=None):
        path = tmp_path / "tierkv.toml"
        path.write_text(text)
        with pytest.raises(ConfigFaults) as raised:
            load(path, environ=environ or {}, flags=flags)
        return raised.value.faults

    return run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[cluster]\nrolle = 'inference'",
            "line 2: cluster.rolle = 'inference': unknown key (did you mean 'role'?)",
        ),
        ("[securty]\ninsecure = true", "line 1: securty: unknown key (did you mean 'security'?)"),
        (
            "[inference]\nmax_bytes = '1GiB'",
            "line 2: inference.max_bytes = '1GiB': unknown key (max_bytes belongs in [vault])",
        ),
        ("memory_threshold = 0.6", "unknown key (memory_threshold belongs in [inference])"),
        (
            "[cluster.kv_cold]\nprot = 1",
            "line 2: cluster.kv_cold.prot = 1: unknown key (did you mean 'port'?)",
        ),
        (
            "[inference]\nmemory_threshold = 60",
            "memory_threshold = 60: must be above 0 and up to 1 (a fraction, not per cent: write 0.60)",
        ),
        ("[inference]\nmemory_threshold = '60%'", "must be a fraction (write 0.60 for 60 %)"),
        ("[inference]\nmemory_threshold = '0.6'", "(write it without quotes: 0.6)"),
        ("[inference]\nmemory_threshold = 0", "must be above 0 and up to 1 (for example 0.60)"),
        ("[inference]\nmemory_threshold = 1.7", "must be above 0 and up to 1 (for example 0.60)"),
        ("[inference]\nmemory_threshold = 5", "(a fraction, not per cent: write 0.05)"),
        ("[inference]\nmemory_threshold = 100.5", "must be above 0 and up to 1 (for example 0.60)"),
        ("[inference]\nmemory_threshold = -0.5", "must be above 0 and up to 1"),
        ("[inference]\nmemory_threshold = nan", "must be above 0 and up to 1"),
        ("[inference]\nmemory_threshold = inf", "must be above 0 and up to 1"),
        ("[inference]\nmemory_threshold = true", "must be a fraction above 0"),
        ("[inference]\nkv_codec = 'int9'", "one of raw, lossless, int8-g256, int8, int8z (did you mean 'int8'?)"),
        ("[inference]\ndemote = 'on_evict'", "must be one of ahead, on-evict (did you mean 'on-evict'?)"),
        ("[inference]\ndemote = 3", "line 2: inference.demote = 3: must be one of ahead, on-evict"),
        ("[inference]\ndemote = ['ahead']", "must be one of ahead, on-evict"),
        (
            "[inference]\nqueue_bytes = 4",
            "must be from 4MiB to 256GiB (a number without a unit is bytes; did you mean '4GiB'?)",
        ),
        ("[vault]\nmax_bytes = '4 gigs'", "is not a size (write for example '4GiB' or '512MiB')"),
        ("[vault]\nmax_bytes = 1.5", "is not a size"),
        ("[vault]\nmax_bytes = -1", "must be from 1MiB to 64TiB"),
        ("[vault]\nmax_bytes = '999999999999TiB'", "must be from 1MiB to 64TiB"),
        ("[inference]\nconnect_timeout_s = 500", "(the unit is seconds; did you mean '500ms'?)"),
        ("[inference]\nconnect_timeout_s = 'soon'", "is not a duration (write for example '30s', '250ms' or '5min')"),
        ("[inference]\nrestore_timeout_s = inf", "is not a duration"),
        ("[inference]\nport = '50050'", "must be a whole number (write it without quotes: 50050)"),
        ("[inference]\nport = 70000", "line 2: inference.port = 70000: must be from 0 to 65535"),
        ("[cluster.kv_cold]\nport = 0", "must be from 1 to 65535"),
        ("[inference]\nport = 1.0", "must be a whole number"),
        ("[cluster.kv_cold]\nhost = 'nas:50051'", "holds a port as well (write host = 'nas' and port = 50051)"),
        ("[cluster.kv_cold]\nhost = 'http://nas/x'", "must be a host, not a URL (write 'nas')"),
        ("[cluster.kv_cold]\nhost = 'a b'", "is not a host name or an IP address"),
        ("[cluster.kv_cold]\nhost = '300.1.1.1'", "is not a host name or an IP address"),
        ("[cluster.kv_cold]\nhost = 5", "must be a host name or an IP address in quotes"),
        ("[security]\ninsecure = 'yes'", "must be true or false (without quotes)"),
        ("[cluster]\nname = 4", "must be text (put it in quotes: '4')"),
        ("[cluster]\nname = \"a\\u0007b\"", "holds control characters"),
        ("[cluster]\nnode_name = '" + "n" * 65 + "'", "must be at most 64 characters"),
        ("vault = 3", "line 1: vault = 3: must be a table (write [vault] with its keys below it)"),
        ("[[vault]]\nport = 1", "vault = 'a list': must be a table"),
        ("[cluster]\nkv_cold = 'nas:50051'", "must be a table, or a list of tables"),
        ("[cluster]\nkv_cold = ['nas']", "cluster.kv_cold[0] = 'nas': must be a table"),
        ("[console]\nconnect = 'nas:1'", "must be a list (write ['nas:1'])"),
        ("[console]\nconnect = ['nas']", "console.connect[0] = 'nas': is not an address (write host:port"),
        ("[vault]\nmax_bytes='1MiB'\nmax_record_bytes='2MiB'", "line 3: vault.max_record_bytes = '2MiB': is more than"),
        ("[inference]\nrestore_timeout_s=1\nframe_timeout_s=2", "line 3: inference.frame_timeout_s = 2: is more than"),
        ("[[cluster.kv_cold]]\n[[cluster.kv_cold]]\n", "line 2: cluster.kv_cold[1]: 127.0.0.1:50051 is given twice"),
        ("[vault]\npolicy = 'LRU'", "(did you mean 'lru'?)"),
    ],
)  # fmt: skip
def test_fault_says_where_and_what_to_write(faults_of, text, message):
    assert message in "\n".join(str(fault) for fault in faults_of(text))


def test_all_faults_come_at_once_in_the_order_of_the_file(faults_of):
    faults = faults_of(
        "[vault]\nport = -1\nmax_bytes = '1MiB'\nmax_record_bytes = '2MiB'\n"
        "[inference]\nmemory_threshold = 60\nkv_codec = 'x'\n[nonsense]\n",
        environ={"TIERKV_CONSOLE__REFRESH_HZ": "9"},
        flags={"security.insecure": Flag("--insecure", "x")},
    )
    assert [(fault.line, fault.key) for fault in faults] == [
        (2, "vault.port"),
        (4, "vault.max_record_bytes"),
        (6, "inference.memory_threshold"),
        (7, "inference.kv_codec"),
        (8, "nonsense"),
        (0, "security.insecure"),
        (0, "console.refresh_hz"),
    ]
    assert [fault.where for fault in faults[-2:]] == ["--insecure", "TIERKV_CONSOLE__REFRESH_HZ"]


def test_faulty_entry_of_a_list_names_its_index_and_line(faults_of):
    (fault,) = faults_of("[[cluster.ssm_cold]]\nhost='a'\n\n[[cluster.ssm_cold]]\nhost='b'\nport='x'\n")
    assert (fault.key, fault.line) == ("cluster.ssm_cold[1].port", 6)


def test_line_is_found_behind_comments_and_multiline_values(faults_of):
    (fault,) = faults_of(
        '# port = 1\n[console]\nconnect = [ # [vault]\n  "a:1",\n]\n'
        'theme = """\\\n  [vault]\\\n  port = 3"""\n[vault]\n"port" = -1\n'
    )
    assert (fault.key, fault.line) == ("vault.port", 10)


def test_inline_table_and_dotted_key_have_their_line(faults_of):
    assert faults_of("\n\ncluster.kv_cold = {host = 'a:1'}")[0].line == 3
    assert faults_of("\ninference.port = 'x'")[0].line == 2


# --- files that cannot be read ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[vault\nport = 1", "line 1, column 7: Expected ']'"),
        (
            b"[vault]\nhost = nas",
            'line 2, column 8: Invalid value\n    host = nas\n           ^\n    text needs quotes: "nas"',
        ),
        (b"[vault]\nport = 1\nport = 2\n", "a key is given twice"),
        (b"[vault]\n[vault]\n", "line 2"),
        (b"a = " + b"[" * 20000, "nested too deeply"),
        (b"a" + b".a" * 2000 + b" = 1", "nested too deeply"),
        (b"[a" + b".a" * 900 + b"]", "nested too deeply"),
        (b"a = " + b"9" * 5000, "digits"),
        (b"[vault]\nhost = 'caf\xe9'", "line 2: not UTF-8 (byte 0xe9)"),
        ("[vault]".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (b"#" * (1 << 20) + b"#", "larger than 1 MiB"),
        (b"\x00", "line 1, column 1"),
    ],
)
def test_broken_file_is_one_message_with_its_place(tmp_path, data, message):
    path = tmp_path / "tierkv.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as raised:
        load(path, environ={})
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert exit_code(raised.value) == 2


def test_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path):
    path = tmp_path / "tierkv.toml"
    path.write_bytes(b"\xef\xbb\xbf[vault]\r\nport = 7\r\n")
    loaded = load(path, environ={})
    assert loaded.config.vault.port == 7
    assert loaded.origin("vault.port").line == 2


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "tierkv.toml")
    with pytest.raises(ConfigError, match="is a pipe, not a regular file"):
        load(tmp_path / "tierkv.toml", environ={})


def test_directory_missing_file_and_endless_device(tmp_path):
    with pytest.raises(ConfigError, match="is a directory; name the file"):
        load(tmp_path, environ={})
    with pytest.raises(ConfigError, match=r"does not exist \(named by --config\)"):
        load(tmp_path / "none.toml", environ={})
    with pytest.raises(ConfigError, match=r"does not exist \(named by TIERKV_CONFIG\)"):
        load(environ={"TIERKV_CONFIG": str(tmp_path / "none.toml")})
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load(Path("/dev/zero"), environ={})
    dangling = tmp_path / "link.toml"
    dangling.symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="does not exist"):
        load(dangling, environ={})


def test_unreadable_file(tmp_path, monkeypatch):
    path = tmp_path / "tierkv.toml"
    path.write_text("")

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root reads everything, so the refusal is injected
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        load(path, environ={})
