"""Every key of the configuration that an agent has an option for reaches it."""

from dataclasses import fields, replace
from pathlib import Path

from tierkv.agents.inference import InferenceOptions
from tierkv.agents.vault import VaultOptions
from tierkv.cli import options
from tierkv.config.load import load_source
from tierkv.config.source import parse

TEXT = """
[cluster]
node_name = "mini"
[[cluster.kv_cold]]
host = "nas"
[[cluster.kv_cold]]
host = "fe80::1"
port = 7
[cluster.ssm_cold]
host = "air"
port = 8
[inference]
host = "10.0.0.1"
port = 9
memory_threshold = 0.7
demote = "on-evict"
kv_codec = "int8z"
ssm_codec = "raw"
worst_fidelity = "lossless"
min_store_tokens = 1
min_restore_tokens = 2
handoff_bytes = "8MiB"
queue_bytes = "16MiB"
local_vault_bytes = "1GiB"
local_vault_path = "/v"
connect_timeout_s = "2s"
probe_timeout_s = 3
frame_timeout_s = "400ms"
restore_timeout_s = "5s"
socket = "/s"
tenant = "t"
[vault]
host = "10.0.0.2"
port = 10
max_bytes = "1GiB"
max_record_bytes = "1MiB"
undo_s = 11
ttl_s = "1h"
[security]
token_file = "/t"
insecure = true
[telemetry]
events_kept = 12
"""


def config(text: str):
    return load_source(parse(text, Path("t.toml")), environ={}).config


def test_inference_options(home: Path):
    assert options.inference(config(TEXT), reflection=True, ready_file=Path("r")) == InferenceOptions(
        name="mini", host="10.0.0.1", port=9, socket=Path("/s"), kv_cold=("nas:50051", "[fe80::1]:7"),
        ssm_cold=("air:8",), memory_threshold=0.7, demote="on-evict", kv_codec="int8z", ssm_codec="raw",
        min_store_tokens=1, min_restore_tokens=2, handoff_bytes=8 << 20, queue_bytes=16 << 20,
        local_vault_bytes=1 << 30, local_vault_path=Path("/v"), worst_fidelity="lossless", connect_timeout_s=2.0,
        probe_timeout_s=3.0, frame_timeout_s=0.4, restore_timeout_s=5.0, max_record_bytes=1 << 20, tenant="t",
        token_file=Path("/t"),
        insecure=True, reflection=True, events_kept=12, ready_file=Path("r"),
        raised_layers=home / "cache" / "raised-layers.json",
    )  # fmt: skip


def test_vault_options():
    expected = VaultOptions(
        name="mini", host="10.0.0.2", port=10, max_bytes=1 << 30, max_record_bytes=1 << 20, undo_s=11.0, ttl_s=3600.0,
        token_file=Path("/t"), insecure=True, events_kept=12,
    )  # fmt: skip
    for role in ("kv-vault", "ssm-vault"):
        built = options.vault(config(TEXT), role, reflection=False, ready_file=None)
        assert built == replace(expected, role=role)


def test_defaults_of_the_configuration_are_those_of_the_options(home: Path):
    built = options.inference(config("[cluster]\nnode_name='n'"), reflection=False, ready_file=None)
    vaults = {"kv_cold": ("127.0.0.1:50051",), "ssm_cold": ("127.0.0.1:50052",)}
    plain = InferenceOptions("n", **vaults, raised_layers=home / "cache" / "raised-layers.json")
    assert built == plain
    vault = options.vault(config("[cluster]\nnode_name='n'"), "kv-vault", reflection=False, ready_file=None)
    assert vault == VaultOptions("n")


def test_record_limit_follows_a_small_vault():
    built = options.vault(config("[vault]\nmax_bytes = '2MiB'"), "kv-vault", reflection=False, ready_file=None)
    assert built.max_record_bytes == 2 << 20


def test_every_option_is_set_on_purpose():
    """An option that is added to an agent needs a key, or a place in this list."""
    not_keys = {"token", "ready_fd", "on_ready"}
    text = Path(options.__file__).read_text()
    for kind in (InferenceOptions, VaultOptions):
        for field in fields(kind):
            assert field.name in not_keys or f"{field.name}=" in text, field.name
