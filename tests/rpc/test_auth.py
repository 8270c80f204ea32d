"""The token: how it is found and made, and who may do what."""

from __future__ import annotations

import multiprocessing
import stat
from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv.rpc.auth import Access, Token, TokenGate, access_of, is_loopback, load_or_create_token, load_token
from tierkv.v1 import node_service_pb2, vault_service_pb2


def test_a_first_start_makes_a_token_that_only_its_owner_reads(tierkv_home: Path):
    token = load_or_create_token()
    path = tierkv_home / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(tierkv_home.stat().st_mode) == 0o700
    assert path.read_text().strip() == token.value
    assert not token.explicit
    assert load_or_create_token() == token
    assert [item.name for item in tierkv_home.iterdir()] == ["token"]


def _start(home: str, barrier, answers) -> None:
    import os

    os.environ["TIERKV_HOME"] = home
    barrier.wait()
    answers.put(load_or_create_token().value)


def test_first_starts_at_the_same_time_agree(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_start, args=(str(tmp_path / "h"), barrier, answers)) for _ in range(4)]
    for process in processes:
        process.start()
    values = {answers.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(values) == 1


def test_what_is_given_wins_over_the_environment_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "token"
    file.write_text("from-the-file-0123456789\n")
    file.chmod(0o600)
    assert load_or_create_token(None, file).value == "from-the-file-0123456789"
    monkeypatch.setenv("TIERKV_TOKEN", "from-the-environment-0123")
    assert load_or_create_token(None, file).value == "from-the-environment-0123"
    given = load_or_create_token("given-0123456789abcdef", file)
    assert (given.value, given.explicit) == ("given-0123456789abcdef", True)


def test_a_tool_does_not_make_a_token(tierkv_home: Path):
    assert load_token() is None
    assert not tierkv_home.exists()


@pytest.mark.parametrize("text", ["", "short", "has\nnewline-in-the-middle", "ä" * 20, "x" * 5000])
def test_an_unusable_token_is_refused_and_never_shown(tmp_path: Path, text: str):
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError) as refused:
        load_or_create_token(None, file)
    assert not text or text not in str(refused.value)


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        load_or_create_token(None, tmp_path / "nowhere")


def test_a_token_that_others_can_read_is_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o644)
    load_or_create_token(None, file)
    assert "chmod 600" in caplog.text


def test_a_token_is_not_in_its_repr():
    assert "secret-secret" not in repr(Token("secret-secret-secret", True, "given"))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("192.168.1.2", False), ("myhost.local", False), ("", False),
    ],
)  # fmt: skip
def test_what_counts_as_loopback(host: str, expected: bool):
    assert is_loopback(host) is expected


GOOD = (("authorization", "Bearer right-right-right"),)
WRONG = (("authorization", "Bearer wrong-wrong-wrong"),)
V, N = "/tierkv.v1.VaultService/", "/tierkv.v1.NodeService/"


@pytest.mark.parametrize(
    ("method", "loopback", "insecure", "without_token"),
    [
        ("/grpc.health.v1.Health/Check", False, False, True),
        (N + "GetNode", True, False, True),
        (N + "WatchEvents", False, False, False),
        (V + "Stats", False, True, True),
        (V + "Probe", True, False, False),
        (V + "BatchPromote", True, False, False),
        (V + "Store", True, True, True),
        (V + "Purge", True, True, False),
        (V + "Pin", True, True, False),
        ("/tierkv.v1.Later/Method", True, True, False),
    ],
)
def test_who_may_do_what(method: str, loopback: bool, insecure: bool, without_token: bool):
    gate = TokenGate(Token("right-right-right", True, "given"), loopback, insecure)
    assert gate.admits(method, GOOD)
    assert gate.admits(method, ()) is without_token
    assert gate.admits(method, WRONG) is without_token


def test_every_method_of_the_wire_has_its_class_on_purpose():
    """A method that is added to the proto files must be added here, with a thought."""
    classes = {
        Access.TELEMETRY: {"GetNode", "WatchSnapshots", "WatchEvents", "ListRequests", "Stats"},
        Access.STATE: {
            "Probe", "Store", "BatchPromote", "Touch", "ListPrefixes", "DescribePrefix", "ListRecords", "PreviewPurge",
            "GetConfig", "ValidateConfig", "WatchConfig", "Trace", "Explain",
        },
        Access.CONTROL: {"Purge", "UndoPurge", "Pin", "Unpin", "ApplyConfig", "Fsck", "Compact", "Warm", "Drain"},
    }  # fmt: skip
    for module, service in ((vault_service_pb2, "VaultService"), (node_service_pb2, "NodeService")):
        for method in module.DESCRIPTOR.services_by_name[service].methods:
            access = access_of(f"/tierkv.v1.{service}/{method.name}")
            assert method.name in classes[access], method.name
