"""``tierkv config``: what is in force and why, faults, schema, one changed line."""

import json
import os
from pathlib import Path

import pytest
from cli_agents import program


@pytest.fixture
def file():
    path = Path("tierkv.toml")
    path.write_text(
        "[vault]\nport = 7 # mine\nmax_bytes = '2GiB'\n"
        "[[cluster.kv_cold]]\nhost = 'a'\n[[cluster.kv_cold]]\nhost = 'b'\n"
    )
    return path


def test_show_with_origin(run, file, monkeypatch):
    monkeypatch.setenv("TIERKV_INFERENCE__KV_CODEC", "lossless")
    out = run("config", "show", "--origin").out
    lines = {" ".join(line.split()) for line in out.splitlines()}
    assert "port = 7 # tierkv.toml:2" in lines
    assert 'max_bytes = "2GiB" # tierkv.toml:3' in lines
    assert 'kv_codec = "lossless" # $TIERKV_INFERENCE__KV_CODEC' in lines
    assert 'undo_s = "1min" # default' in lines
    assert "[cluster.kv_cold[1]]" in lines
    assert 'host = "b" # tierkv.toml:7' in lines
    assert "#" not in run("config", "show").out.replace("# port is not set", "")


def test_show_as_json_has_plain_values(run, file):
    found = run("config", "show", "--json").json
    assert found["schema"] == "tierkv.config/1"
    assert found["path"] == os.path.abspath("tierkv.toml")
    values = {item["key"]: item for item in found["values"]}
    assert values["vault.max_bytes"]["value"] == 2 << 30
    assert values["vault.max_bytes"]["origin"] == {"kind": "file", "name": "tierkv.toml", "line": 3}
    assert values["inference.memory_threshold"]["origin"]["kind"] == "default"
    assert values["inference.memory_threshold"]["apply"] == "live"


def test_show_spells_every_value_as_the_file_would_take_it(run, file):
    """Long durations, sizes of any unit, fractions of many digits, quotes: what is shown means what is in force."""
    file.write_text(
        "[cluster]\nname = 'the \"lab\" \\ 2'\n[inference]\nmemory_threshold = 0.6543217\nconnect_timeout_s = 0.25\n"
        "[vault]\nmax_bytes = 24000000000\ndisk_bytes = 5000000001\nttl_s = 5400\n"
    )
    shown = run("config", "show").out
    for line in ('dead_after_s = "30d"', 'ttl_s = "90min"', 'max_bytes = "24GB"', 'ram_bytes = "512MiB"'):
        assert line in shown.splitlines()
    before = run("config", "show", "--json").json["values"]
    Path("other.toml").write_text(shown)
    after = run("--config", "other.toml", "config", "show", "--json").json["values"]
    assert [one["value"] for one in after] == [one["value"] for one in before]


def test_show_without_a_file_says_so_on_stderr(run):
    ran = run("config", "show")
    assert ran.code == 0
    assert "no configuration file found: these are defaults" in ran.err
    assert "[inference]" in ran.out


def test_path(run, file):
    assert run("config", "path").out.strip() == os.path.abspath("tierkv.toml")
    file.unlink()
    ran = run("config", "path")
    assert (ran.code, ran.out) == (0, "")
    assert "looked for tierkv.toml" in ran.err
    assert run("config", "path", "--json").json["path"] is None


def test_validate(run, file):
    assert run("config", "validate").out == "tierkv.toml: ok\n"
    file.write_text("[inference]\nmemory_threshold = 60\nkv_dim = 4\n[vault]\nprot = 1\n")
    ran = run("config", "validate")
    assert (ran.code, ran.out) == (2, "")
    assert "tierkv.toml: 2 faults" in ran.err
    assert "line 2: inference.memory_threshold = 60" in ran.err
    assert "line 5: vault.prot = 1: unknown key (did you mean 'port'?)" in ran.err
    found = run("config", "validate", "--json")
    assert found.code == 2
    assert [fault["line"] for fault in found.json["faults"]] == [2, 5]
    assert found.json["ok"] is False


def test_validate_warns_of_keys_that_do_nothing(run, file):
    file.write_text("[inference]\nkv_dim = 4\n")
    ran = run("config", "validate")
    assert ran.code == 0
    assert "warning: line 2: inference.kv_dim: not needed" in ran.err
    assert run("config", "validate", "--json").json["warnings"][0]["key"] == "inference.kv_dim"


def test_validate_of_a_named_file_leaves_the_environment_out(run, file, monkeypatch):
    monkeypatch.setenv("TIERKV_VAULT__PORT", "x")
    assert run("config", "validate").code == 2
    assert run("config", "validate", "tierkv.toml").code == 0
    syntax = Path("broken.toml")
    syntax.write_text("[vault\n")
    found = run("config", "validate", "broken.toml", "--json")
    assert found.code == 2
    assert "line 1, column 7" in found.json["faults"][0]["problem"]


def test_validate_tells_every_fault_of_file_and_environment_at_once_and_where_it_came_from(run, file, monkeypatch):
    file.write_text("[vault]\nprot = 1\n[security]\ntoken_file = '/no/such/token'\n")
    faults = {
        "TIERKV_VAULT__PORT": ("x", "vault.port = 'x'"),
        "TIERKV_NOBODY__KNOWS": ("1", "nobody: unknown key"),
        "TIERKV_CLUSTER__KV_COLD__0__PORT": ("0", "cluster.kv_cold[0].port = 0: must be from 1"),
        "TIERKV_INFERENCE__CONNECT_TIMEOUT_S": (
            "-1",
            "inference.connect_timeout_s = -1: must be from 10ms to 1min",
        ),
        "TIERKV_INFERENCE__QUEUE_BYTES": ("-4GiB", "inference.queue_bytes = '-4GiB': must be from 4MiB"),
    }
    for name, (value, _) in faults.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TIERKV_VAULT_PORT", "1")
    ran = run("config", "validate")
    assert (ran.code, ran.out) == (2, "")
    assert "tierkv.toml: 7 faults" in ran.err
    assert "line 2: vault.prot = 1: unknown key" in ran.err
    assert "line 4: security.token_file = '/no/such/token': there is no such file" in ran.err
    for name, (_, told) in faults.items():
        assert f"{name}: {told}" in ran.err
    assert "warning: TIERKV_VAULT_PORT: is not used (did you mean TIERKV_VAULT__PORT?)" in ran.err
    file.unlink()
    without = run("config", "validate", "--json")
    assert without.code == 2
    assert {fault["where"] for fault in without.json["faults"]} == set(faults)
    monkeypatch.setenv("TIERKV_CONFIG", "nowhere.toml")
    unread = run("config", "validate").err
    assert "tierkv: nowhere.toml: 6 faults" in unread
    assert "nowhere.toml does not exist (named by TIERKV_CONFIG)" in unread
    assert "TIERKV_VAULT__PORT: vault.port = 'x'" in unread


def test_validate_of_a_file_for_another_machine_only_warns_of_a_token_that_is_not_here(run, file):
    file.write_text("[security]\ntoken_file = '/no/such/token'\n")
    ran = run("config", "validate", "tierkv.toml")
    assert (ran.code, ran.out) == (0, "tierkv.toml: ok\n")
    assert "warning: line 2: security.token_file = '/no/such/token': there is no such file" in ran.err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "nas.local", "192.168.1.4"])
def test_validate_warns_of_a_port_beyond_this_machine_without_a_token(run, file, monkeypatch, host):
    monkeypatch.delenv("TIERKV_TOKEN", raising=False)
    file.write_text(f"[inference]\nhost = '{host}'\n[vault]\nport = 50051\nhost = '{host}'\n")
    ran = run("config", "validate")
    assert (ran.code, ran.out) == (0, "tierkv.toml: ok\n")
    told = "an agent does not listen there without a shared token (give security.token_file, --token-file"
    assert f"warning: line 2: inference.host = '{host}': {told}" in ran.err
    assert f"warning: line 5: vault.host = '{host}': {told}" in ran.err
    monkeypatch.setenv("TIERKV_VAULT__HOST", "127.0.0.1")
    assert "vault.host" not in run("config", "validate").err
    monkeypatch.setenv("TIERKV_TOKEN", "x" * 43)
    assert run("config", "validate").err == ""
    assert "vault.host" in run("config", "validate", "tierkv.toml").err


@pytest.mark.parametrize("security", ["insecure = true", "token_file = 'token'"])
@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost", "::1"])
def test_validate_does_not_warn_of_a_port_that_may_be_opened(run, file, monkeypatch, security, host):
    monkeypatch.delenv("TIERKV_TOKEN", raising=False)
    Path("token").write_text("x" * 43)
    file.write_text(f"[vault]\nhost = '{host}'\n[security]\n{security}\n")
    assert "vault.host" not in run("config", "validate").err
    if host != "0.0.0.0":
        file.write_text(f"[vault]\nhost = '{host}'\n")
        assert run("config", "validate").err == ""


@pytest.mark.parametrize("number", ["1" * 10_000, "1_" * 6000 + "1"])
def test_number_that_python_does_not_read_is_told_with_its_line(run, file, number):
    file.write_text(f"[vault]\nport = {number}\n")
    ran = run("config", "validate")
    assert ran.code == 2
    assert f"line 2: a number of {len(number.replace('_', '')):,} digits; no key takes one" in ran.err
    assert len(run("vault", "--port", "1" * 5000).err) < 300


def test_variable_fits_a_lone_table_and_an_absent_list(run, file, monkeypatch):
    monkeypatch.setenv("TIERKV_CLUSTER__KV_COLD__0__PORT", "5")
    file.write_text("[cluster.kv_cold]\nhost = 'a'\n")
    assert "port = 5" in run("config", "show").out
    file.write_text("")
    assert "port = 5" in run("config", "show").out


@pytest.mark.parametrize(
    "words",
    [["status"], ["events"], ["agent", "--role", "kv-vault"], ["vault"], ["config", "show"], ["prefixes"], ["tui"],
     ["purge", "--all", "--dry-run"], ["token", "path"], ["mlx-lm", "--", "x"]],
    ids=" ".join,
)  # fmt: skip
def test_broken_file_stops_every_command_with_exit_code_2(run, words):
    Path("tierkv.toml").write_text("[vault]\nport = oops\n")
    ran = run(*words)
    assert ran.code == 2
    assert ran.out == ""
    assert "line 2, column 8: Invalid value" in ran.err
    assert "Traceback" not in ran.err


def test_schema(run):
    out = run("config", "schema", "inference.memory_threshold").out
    assert out.startswith("inference.memory_threshold  [live]\n")
    assert "default 0.6; allowed above 0, up to 1" in out
    assert "vault.max_record_bytes  [restart]" in run("config", "schema").out
    assert run("config", "schema", "[vault]").out.count("vault.") >= 8
    assert "cluster.kv_cold[].host" in run("config", "schema", "cluster.kv_cold").out
    unknown = run("config", "schema", "vualt")
    assert unknown.code == 2
    assert "did you mean 'vault'?" in unknown.err
    entries = {item["key"]: item for item in run("config", "schema", "--json").json["keys"]}
    assert entries["inference.demote"]["choices"] == ["ahead", "on-evict"]
    assert entries["vault.max_bytes"]["minimum"] == 1 << 20
    assert entries["inference.memory_threshold"]["kind"] == "fraction"


def test_schema_fits_the_screen(run):
    assert max(map(len, run("config", "schema").out.splitlines())) <= 100


def test_set_changes_one_line(run, file):
    before = file.read_text()
    dry = run("config", "set", "vault.port", "8", "--dry-run")
    assert dry.code == 0
    assert "-port = 7 # mine\n+port = 8 # mine" in dry.out
    assert file.read_text() == before
    ran = run("config", "set", "vault.port", "8")
    assert ran.code == 0
    assert "tierkv.toml.bak" in ran.err
    assert file.read_text() == before.replace("port = 7", "port = 8")
    assert Path("tierkv.toml.bak").read_text() == before
    assert "nothing to change" in run("config", "set", "vault.port", "8").err


def test_set_refuses_what_would_be_a_fault(run, file):
    before = file.read_text()
    ran = run("config", "set", "inference.memory_threshold", "70")
    assert ran.code == 2
    assert "write 0.70" in ran.err
    assert run("config", "set", "cluster.kv_cold.host", "x").code == 2
    assert file.read_text() == before
    file.unlink()
    assert "there is no configuration file to change" in run("config", "set", "vault.port", "1").err


def test_stdout_is_data_and_stderr_is_everything_else(file):
    ran = program("config", "show", "--json", TIERKV_INFERENCE__KV_DIM="3")
    assert ran.err == ""
    assert json.loads(ran.out)["schema"] == "tierkv.config/1"
