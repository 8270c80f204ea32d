"""Where a configuration is found, what wins, and where each value came from."""

import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierkv.config import Config, load
from tierkv.config.keys import by_path, keys
from tierkv.config.load import Flag, load_source
from tierkv.config.model import CODECS
from tierkv.config.rows import rows
from tierkv.config.source import located, parse
from tierkv.errors import ConfigError, ConfigFaults

SEED = """
[cluster]
role = "inference"
[cluster.kv_cold]
host = "192.168.1.20"
port = 50051
[cluster.ssm_cold]
host = "192.168.1.30"
port = 50052
[cluster.recompute]
host = "127.0.0.1"
port = 50053
[inference]
memory_threshold = 0.60
exo_path = "~/exo"
kv_dim = 256
[vault]
port = 50051
max_bytes = "24GiB"
persist_path = "/var/lib/tierkv"
"""


def from_text(text: str, environ=None, flags=None):
    return load_source(parse(text, Path("t.toml")), environ=environ or {}, flags=flags)


def test_file_of_the_seed_is_accepted_with_warnings_for_what_is_not_needed():
    loaded = from_text(SEED)
    assert loaded.config.kv_vaults() == (("192.168.1.20", 50051),)
    assert loaded.config.ssm_vaults() == (("192.168.1.30", 50052),)
    assert loaded.config.vault.max_bytes == 24 * 1024**3
    assert loaded.config.inference.memory_threshold == 0.6
    warned = {fault.key: str(fault) for fault in loaded.warnings}
    assert set(warned) == {"inference.kv_dim", "cluster.recompute"}
    assert warned["inference.kv_dim"].startswith("line 16: inference.kv_dim: not needed")


def test_shipped_file_loads_without_warnings_and_names_this_machine():
    loaded = load(Path(__file__).parents[2] / "tierkv.toml", environ={})
    assert loaded.warnings == ()
    assert loaded.config.kv_vaults() == (("127.0.0.1", 50051),)
    assert loaded.config.ssm_vaults() == (("127.0.0.1", 50052),)
    assert loaded.config.vault_port("kv-vault") == 50051
    assert loaded.config.vault_port("ssm-vault") == 50052


def test_defaults_shown_in_the_shipped_file_are_the_defaults():
    text = (Path(__file__).parents[2] / "tierkv.toml").read_text()
    shown = from_text("\n".join(_uncommented(line) for line in text.splitlines()))
    optional = {"cluster.role", "vault.port"}
    for row in rows(shown):
        if row.path not in optional and ".kv_cold" not in row.path and ".ssm_cold" not in row.path:
            assert row.value == row.key.default, row.path


def _uncommented(line: str) -> str:
    name, _, _ = line.removeprefix("# ").partition(" = ")
    known = {key.path.rpartition(".")[2] for key in keys()}
    return line.removeprefix("# ") if line.startswith("# ") and name in known else line


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIERKV_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TIERKV_CONFIG", raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path


def test_search_order(home, monkeypatch):
    if not Path("/etc/tierkv/tierkv.toml").exists():
        assert load().path is None
    (home / "home" / "tierkv.toml").write_text("[cluster]\nname='home'")
    assert load().config.cluster.name == "home"
    (home / "tierkv.toml").write_text("[cluster]\nname='here'")
    assert load().config.cluster.name == "here"
    (home / "named.toml").write_text("[cluster]\nname='variable'")
    monkeypatch.setenv("TIERKV_CONFIG", str(home / "named.toml"))
    assert load().config.cluster.name == "variable"
    (home / "flag.toml").write_text("[cluster]\nname='flag'")
    assert load(home / "flag.toml").config.cluster.name == "flag"


def test_flags_win_over_environment_over_file_over_defaults():
    text = "[vault]\nport = 1\nmax_bytes = '1GiB'\nundo_s = 5\n"
    environ = {"TIERKV_VAULT__PORT": "2", "TIERKV_VAULT__MAX_BYTES": "2GiB"}
    loaded = from_text(text, environ, {"vault.port": Flag("--port", 3)})
    vault = loaded.config.vault
    assert (vault.port, vault.max_bytes, vault.undo_s, vault.ttl_s) == (3, 2 << 30, 5.0, 0.0)
    assert str(loaded.origin("vault.port")) == "--port"
    assert str(loaded.origin("vault.max_bytes")) == "$TIERKV_VAULT__MAX_BYTES"
    assert str(loaded.origin("vault.undo_s")) == "t.toml:4"
    assert str(loaded.origin("vault.ttl_s")) == "default"


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("TIERKV_INFERENCE__MEMORY_THRESHOLD", "0.75", "inference.memory_threshold", 0.75),
        ("TIERKV_INFERENCE__KV_CODEC", "lossless", "inference.kv_codec", "lossless"),
        ("TIERKV_INFERENCE__PROBE_TIMEOUT_S", "250ms", "inference.probe_timeout_s", 0.25),
        ("TIERKV_INFERENCE__RESTORE_TIMEOUT_S", "20", "inference.restore_timeout_s", 20.0),
        ("TIERKV_VAULT__MAX_BYTES", "1048576", "vault.max_bytes", 1 << 20),
        ("TIERKV_SECURITY__INSECURE", "true", "security.insecure", True),
        ("TIERKV_CLUSTER__NAME", "123", "cluster.name", "123"),
        ("TIERKV_CONSOLE__CONNECT", '["a:1", "b:2"]', "console.connect", ["a:1", "b:2"]),
        ("TIERKV_CLUSTER__KV_COLD__HOST", "nas", "cluster.kv_cold.host", "nas"),
        ("TIERKV_CLUSTER__SSM_COLD__PORT", "6000", "cluster.ssm_cold.port", 6000),
    ],
)
def test_environment_values_are_read_as_their_kind(name, text, key, value):
    loaded = from_text("", {name: text})
    found = {row.path: row for row in rows(loaded)}
    assert found[key].value == value
    assert str(found[key].origin) == f"${name}"


def test_environment_variables_of_other_meaning_are_left_alone():
    from_text(
        "", {"TIERKV_CONFIG": "x", "TIERKV_HOME": "/x", "TIERKV_TOKEN": "t", "TIERKV_EXO_SRC": "1", "TIERKV__X": "1"}
    )


def test_environment_overlays_one_entry_of_a_list():
    two = "[[cluster.kv_cold]]\nhost='a'\n[[cluster.kv_cold]]\nhost='b'\n"
    loaded = from_text(two, {"TIERKV_CLUSTER__KV_COLD__1__PORT": "7"})
    assert loaded.config.kv_vaults() == (("a", 50051), ("b", 7))
    assert str(loaded.origin("cluster.kv_cold[1].port")) == "$TIERKV_CLUSTER__KV_COLD__1__PORT"
    with pytest.raises(ConfigFaults, match="names one of several entries") as raised:
        from_text(two, {"TIERKV_CLUSTER__KV_COLD__PORT": "7"})
    assert "TIERKV_CLUSTER__KV_COLD__0__PORT" in str(raised.value)
    one = "[[cluster.kv_cold]]\nhost='a'\n"
    assert from_text(one, {"TIERKV_CLUSTER__KV_COLD__PORT": "7"}).config.kv_vaults() == (("a", 7),)


def test_overlay_that_does_not_fit_is_a_fault_not_a_crash():
    for environ in (
        {"TIERKV_CLUSTER__NAME__X": "1"},
        {"TIERKV_VAULT__PORT__0__X": "1"},
        {"TIERKV_CLUSTER__KV_COLD__9__HOST": "x"},
        {"TIERKV_NO__SUCH": "1"},
        {"TIERKV_CONSOLE__CONNECT__0": "a:1"},
    ):
        for text in ("", "[cluster]\nname='x'\n[vault]\nport=1\n", "[[cluster.kv_cold]]\nhost='a'\n"):
            with pytest.raises(ConfigFaults):
                from_text(text, environ)


def test_one_table_and_a_list_of_one_mean_the_same():
    table = from_text("[cluster.kv_cold]\nhost='a'\nport=1\n").config
    listed = from_text("[[cluster.kv_cold]]\nhost='a'\nport=1\n").config
    inline = from_text("cluster.kv_cold = [{host='a', port=1}]").config
    assert table == listed == inline


@pytest.mark.parametrize(
    ("text", "kv", "ssm"),
    [
        ("", ["127.0.0.1:50051"], ["127.0.0.1:50052"]),
        ("[inference]\nlocal_vault_bytes='1GiB'", [], []),
        ("[cluster.kv_cold]\nhost='a'", ["a:50051"], ["a:50051"]),
        ("[cluster.ssm_cold]\nhost='b'", ["b:50052"], ["b:50052"]),
        ("[cluster.kv_cold]\nhost='a'\n[inference]\nlocal_vault_bytes='1GiB'", ["a:50051"], []),
        ("[cluster]\nkv_cold=[]\nssm_cold=[]", [], []),
        ("[cluster]\nkv_cold=[]", [], []),
    ],
)
def test_where_state_goes(text, kv, ssm):
    config = from_text(text).config
    assert [f"{host}:{port}" for host, port in config.kv_vaults()] == kv
    assert [f"{host}:{port}" for host, port in config.ssm_vaults()] == ssm


@pytest.mark.parametrize(
    ("text", "kv", "ssm"),
    [
        ("", 50051, 50052),
        ("[vault]\nport=7", 7, 7),
        ("[cluster.kv_cold]\nport=8\n[cluster.ssm_cold]\nport=9", 8, 9),
        ("[[cluster.kv_cold]]\nhost='a'\nport=8\n[[cluster.kv_cold]]\nhost='b'\nport=8", 8, 50052),
        ("[[cluster.kv_cold]]\nhost='a'\nport=8\n[[cluster.kv_cold]]\nhost='b'\nport=9", 50051, 50052),
    ],
)
def test_port_of_a_vault(text, kv, ssm):
    config = from_text(text).config
    assert (config.vault_port("kv-vault"), config.vault_port("ssm-vault")) == (kv, ssm)


def test_node_name_falls_back_to_the_host_name_and_the_role():
    host = socket.gethostname().split(".")[0]
    assert Config().node_name("kv-vault") == f"{host}/kv-vault"
    assert Config().node_name("inference") == f"{host}/inference"
    assert from_text("[cluster]\nnode_name='mini'").config.node_name("kv-vault") == "mini"


# --- the key table -----------------------------------------------------------------------------


def test_every_key_has_an_explanation_and_says_when_it_takes_effect():
    for key in keys():
        assert len(key.doc) > 10, key.path
        assert key.doc.endswith("."), key.path
        assert key.apply in ("live", "restart"), key.path
        assert key.kind, key.path
    assert by_path()["inference.memory_threshold"].apply == "live"
    assert by_path()["vault.max_bytes"].least == 1 << 20
    assert by_path()["vault.max_bytes"].most == 64 << 40
    assert by_path()["inference.demote"].choices == ("ahead", "on-evict")
    assert by_path()["vault.port"].most == 65535
    assert "cluster.kv_cold[].host" in by_path()


def test_every_default_is_a_value_that_its_own_check_accepts():
    for key in keys():
        section, _, leaf = key.path.rpartition(".")
        if key.default is None or "[]" in section or key.path.startswith("cluster.recompute"):
            continue
        assert Config.model_validate({section: {leaf: key.default}})


def test_codecs_are_those_of_the_registry():
    registry = pytest.importorskip("tierkv.codec.registry")
    assert set(registry.CODEC_NAMES) == set(CODECS)


# --- nothing gets through as a traceback --------------------------------------------------------

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["1GiB", "a:1", "127.0.0.1", "int8", "60%"])
)  # fmt: skip
names = st.sampled_from([part for key in keys() for part in key.path.replace("[]", "").split(".")]) | st.text(
    max_size=6
)
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.dictionaries(names, trees, max_size=5),
    st.dictionaries(
        st.builds(lambda a, b: f"TIERKV_{a}__{b}".upper(), names, names) | st.text(max_size=8),
        st.text(max_size=8),
        max_size=2,
    ),
)
def test_any_tree_loads_or_is_a_list_of_faults(values, environ):
    import tomlkit

    def without_none(node):
        if isinstance(node, dict):
            return {key: without_none(value) for key, value in node.items() if value is not None}
        return [without_none(value) for value in node if value is not None] if isinstance(node, list) else node

    text = tomlkit.dumps(without_none(values))
    try:
        from_text(text, environ)
    except ConfigFaults as error:
        assert_told(error)
    except ConfigError:
        with pytest.raises(ValueError):
            parse_strictly(text)


def parse_strictly(text: str) -> None:
    import tomllib

    tomllib.loads(text)


toml_bits = st.sampled_from(
    ["[vault]", "[[cluster.kv_cold]]", "[cluster", "]", "port", " = ", "1", '"', "'", '"""', "'''", "\n", "\r\n", "#",
     "{", "}", ",", "[", ".", "\\", "inference.port", "true", "0.6", "x", "\x00", "é", "\ufeff", "\t"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(toml_bits, max_size=25).map("".join))
def test_any_text_loads_or_is_a_configuration_error(text):
    try:
        from_text(text)
    except ConfigError as error:
        assert_told(error)


def assert_told(error: ConfigError) -> None:
    assert str(error)
    assert not isinstance(error, ConfigFaults) or error.faults


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=5), trees.filter(lambda tree: tree is not None), max_size=4))
def test_every_key_is_located_on_the_line_where_it_stands(values):
    import tomlkit

    try:
        text = tomlkit.dumps({key: value for key, value in values.items() if not isinstance(value, list | dict)})
        source = parse(text, Path("x"))
    except (ConfigError, ValueError):
        return
    places = [path for _, path in located(text)]
    assert places == [(key,) for key in source.values]
