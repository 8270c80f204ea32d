"""Which agents a command asks."""

from pathlib import Path

import pytest

from tierkv.cli.context import targets
from tierkv.config.load import load_source
from tierkv.config.source import parse
from tierkv.errors import UsageError

HERE = ["inference 127.0.0.1:50050", "kv-vault 127.0.0.1:50051", "ssm-vault 127.0.0.1:50052"]


@pytest.mark.parametrize(
    ("text", "connect", "expected"),
    [
        (None, [], HERE),
        (None, ["nas:1"], [" nas:1"]),
        ("", [], HERE),
        ("", ["nas:1", "air:2", "nas:1"], [" nas:1", " air:2"]),
        ("[console]\nconnect=['a:1', '[::1]:2', 'a:1']", [], [*HERE, " a:1", " [::1]:2"]),
        ("[console]\nconnect=['a:1', '[::1]:2']", ["b:1"], [" b:1"]),
        ("[inference]\nhost='0.0.0.0'\nport=7", [], ["inference 127.0.0.1:7", *HERE[1:]]),
        ("[inference]\nhost='::'\nport=7", [], ["inference [::1]:7", *HERE[1:]]),
        ("[inference]\nlocal_vault_bytes='1GiB'", [], HERE[:1]),
        ("[cluster.kv_cold]\nhost='nas'", [], [HERE[0], "kv-vault nas:50051"]),
        (
            "[cluster.ssm_cold]\nhost='air'\n[[cluster.kv_cold]]\nhost='a'\n[[cluster.kv_cold]]\nhost='b'\nport=9",
            [],
            [HERE[0], "kv-vault a:50051", "kv-vault b:9", "ssm-vault air:50052"],
        ),
        ("[cluster]\nrole='ssm-vault'\n[vault]\nhost='0.0.0.0'", [], ["ssm-vault 127.0.0.1:50052"]),
        ("[cluster]\nrole='kv-vault'\n[cluster.kv_cold]\nhost='nas'\nport=9\n[vault]\nhost='10.0.0.1'", [],
         ["kv-vault 10.0.0.1:9", "kv-vault nas:9"]),
    ],
)  # fmt: skip
def test_targets(text, connect, expected):
    source = None if text is None else parse(text, Path("t.toml"))
    found = targets(load_source(source, environ={}), connect)
    assert [f"{target.role} {target.address}" for target in found] == expected


def test_malformed_address_is_a_usage_error():
    with pytest.raises(UsageError, match="host:port"):
        targets(load_source(None, environ={}), ["nas"])
