"""The commands that talk to agents, against real ones."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from cli_agents import VaultThread, config_file, program

from tierkv.cli import ask, purge
from tierkv.cli.ask import Answer
from tierkv.cli.context import Target
from tierkv.cli.output import Style
from tierkv.cli.status import node_lines
from tierkv.errors import StartupError
from tierkv.handoff.server import HandoffServer
from tierkv.rpc.node_client import NodeReport
from tierkv.telemetry.histogram import HistogramSnapshot
from tierkv.telemetry.snapshot import (
    EngineSnapshot,
    Event,
    LinkSnapshot,
    MemorySnapshot,
    NodeSnapshot,
    TierSnapshot,
)


@pytest.fixture
def config(vault):
    return config_file(Path.cwd(), kv=vault.port)


# --- status --------------------------------------------------------------------------------------


def test_status_without_any_agent_exits_with_3(run):
    config_file(Path.cwd(), kv=1, ssm=2, inference=3)
    ran = run("status")
    assert ran.code == 3
    assert ran.out.count("DOWN") == 3
    assert "connection refused" in ran.out
    assert "0 of 3 agents up" in ran.out
    nodes = run("status", "--json").json["nodes"]
    assert [(node["address"], node["expected_role"], node["reachable"]) for node in nodes] == [
        ("127.0.0.1:3", "inference", False),
        ("127.0.0.1:1", "kv-vault", False),
        ("127.0.0.1:2", "ssm-vault", False),
    ]
    assert all(node["error"]["kind"] == "Unreachable" and node["node"] is None for node in nodes)


def test_status_of_a_vault_and_two_absent_agents(run, vault, config):
    vault.store(model="SmolLM2", blocks=3)
    ran = run("status")
    assert ran.code == 0
    assert ran.err == ""
    assert "up    kv-vault  nas" in ran.out
    assert "3 records, 768 tokens" in ran.out.replace("\n", " ").replace("  ", "")
    assert "1 of 3 agents up" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    document = run("status", "--json").json
    assert document["schema"] == "tierkv.status/1"
    node = next(node for node in document["nodes"] if node["reachable"])
    assert node["authenticated"] is True
    assert 0 < node["rtt_s"] < 5
    assert abs(node["clock_skew_s"]) < 2
    assert node["node"]["role"] == "kv-vault"
    assert node["node"]["tiers"][0]["cap_bytes"] == 16 << 20
    assert node["node"]["tiers"][0]["records"] == 3
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", node["node"]["started"])


def test_connect_alone_counts_when_there_is_no_file(run, vault):
    ran = run("status", "--connect", vault.address, "--json")
    assert [node["address"] for node in ran.json["nodes"]] == [vault.address]


def test_connect_is_asked_instead_of_what_the_file_names(run, vault, config):
    with VaultThread(role="ssm-vault", name="air") as second:
        ran = run("status", "--connect", second.address, "--connect", second.address)
    assert "up    ssm-vault  air" in ran.out
    assert "1 of 1 agent up" in ran.out


def test_role_other_than_expected_is_noted(run, vault):
    config_file(Path.cwd(), kv=1, ssm=vault.port)
    assert "the configuration expects ssm-vault here" in run("status").out


def test_something_else_at_the_port_and_a_silent_one_are_named_in_time(run, monkeypatch):
    monkeypatch.setattr(ask, "STATUS_BOUND_S", 1.5)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        began = time.monotonic()
        ran = run("status", "--connect", f"127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - began < 20
    assert ran.code == 3
    assert "DOWN" in ran.out


def test_wrong_token_reads_on_loopback_but_is_not_authenticated(run, vault, config, monkeypatch):
    monkeypatch.setenv("TIERKV_TOKEN", "a-wrong-token-of-length")
    ran = run("status")
    assert ran.code == 0
    assert "read only (not authenticated)" in " ".join(ran.out.split())


def test_status_lines_show_everything_within_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    tier = TierSnapshot(
        "kv", 3 << 30, 4 << 30, 1234, 98765, hits=12, misses=5, miss_reasons={"never_stored": 3, "timed_out": 2},
        evictions=4, bytes_in=5 << 30, bytes_out=1 << 30, refusals={"store_full": 2}, pinned_records=7,
        quarantined_records=1, promote_s=HistogramSnapshot({40: 99, 60: 1}, 1.0),
    )  # fmt: skip
    link = LinkSnapshot("nas.local:50051", "kv", "backoff", 0.0004, 118e6, 90e6, 3, "nas.local:50051: not reachable")
    engine = EngineSnapshot("mlx-lm", "mlx-lm 0.32.2", "SmolLM2-135M", "", True, 12000, 26.0)
    node = NodeSnapshot(
        "id", "mini\x1b[31m", "inference", "0.1.0", "127.0.0.1:50050", 1, 1000.0, 1200.0, 1,
        MemorySnapshot(64 << 30, 40 << 30, 300 << 20, 0.6, 1 << 30, "threshold unreachable: 3.1 GiB are not cache"),
        (tier, TierSnapshot("hot", hits=1)), (link,), (engine,), "promoting 3 prefixes",
    )  # fmt: skip
    lines = node_lines(Answer(Target("127.0.0.1", 50050, "inference"), NodeReport(node, False, 0.0012, -37.2)), Style())
    text = " ".join(" ".join(line.split()) for line in lines)
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in text
    for piece in (
        "up inference mini?[31m",
        "127.0.0.1:50050 1.2 ms tierkv 0.1.0 up 3m 20s clock 37 s behind read only (not authenticated)",
        "memory 62% of 64.0 GiB in use, OVER threshold 60%; this agent 300 MiB; device 1.0 GiB; threshold unreachable",
        "doing promoting 3 prefixes",
        "mlx-lm 0.32.2: SmolLM2-135M, attached, weights are being hashed; saved 12,000 tokens, 26 s of prefill",
        "kv 3.0 GiB of 4.0 GiB (75%), 1,234 records, 98,765 tokens, 7 pinned",
        "12 hits, 5 misses (never_stored 3, timed_out 2), 4 evictions",
        "promote p50 1.2 ms, p99 1.2 ms of 100; in 5.0 GiB, out 1.0 GiB; refused (store_full 2); 1 QUARANTINED",
        "hot 1 hit, 0 misses, 0 evictions",
        "link kv nas.local:50051 backoff, 400 us, receives 113 MiB/s, sends 85.8 MiB/s, 3 failures, last:",
    ):
        assert piece in text, piece


@pytest.mark.parametrize(
    ("kl", "top1", "snr", "raised", "text"),
    [
        (2e-4, 0.996, 37.5, 0, "KL 2.0e-04, same top token 99.6%, worst layer 37.5 dB"),
        (0.0, 1.0, 0.0, 0, "KL 0.0e+00, same top token 100.0%, every bit came back"),
        (3.0, 0.0, 1.0, 0, "KL 3.0e+00, same top token 0.0%, worst layer 1.0 dB"),
        # What follows was not compared.
        (0.0, 0.0, 37.5, 1, "worst layer 37.5 dB; 1 layer put on a better codec"),
    ],
)
def test_status_says_of_samples_what_was_compared(monkeypatch, kl, top1, snr, raised, text):
    monkeypatch.setenv("COLUMNS", "200")
    engine = EngineSnapshot("mlx-lm", "mlx-lm 0.32.2", "m", "id", True, 0, 0.0, "", "int8", 2, kl, top1, snr, raised)
    node = NodeSnapshot(
        "id", "n", "inference", "0.1.0", "127.0.0.1:50050", 1, 1000.0, 1200.0, 1, MemorySnapshot(64, 40), (), (),
        (engine,),
    )  # fmt: skip
    report = NodeReport(node, True, 0.001, 0.0)
    lines = node_lines(Answer(Target("127.0.0.1", 50050, "inference"), report), Style())
    assert f"2 samples of int8: {text}" in [line.split("quality")[1].strip() for line in lines if "quality" in line]


# --- events --------------------------------------------------------------------------------------


def test_events_in_order_with_filters(run, vault, config):
    vault.store(model="m", blocks=1)
    ran = run("events")
    assert ran.code == 0
    assert "kv-vault 'nas' listens on" in ran.out
    assert "127.0.0.1:1: nothing listens there (connection refused)" in ran.err
    lines = [json.loads(line) for line in run("events", "--json", "--kind", "start").out.splitlines()]
    assert [(line["schema"], line["kind"], line["node"]) for line in lines] == [("tierkv.events/1", "start", "nas")]
    assert run("events", "--severity", "error").out == ""
    assert len(run("events", "--last", "1").out.splitlines()) == 1


def test_events_without_any_agent_exits_with_3(run):
    config_file(Path.cwd(), kv=1, ssm=2, inference=3)
    assert run("events").code == 3


def test_following_events_shows_new_ones_until_interrupted(run, vault, config):
    words = [sys.executable, "-m", "tierkv", "events", "--follow", "--json", "--kind", "purge"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        deadline = time.monotonic() + 30
        shown = ""
        vault.store(model="m")
        while not shown and time.monotonic() < deadline:
            # The follower may not be connected yet: what it remembers is shown first, so no event is lost.
            assert run("purge", "--all", "--yes").code in (0, 4)
            assert process.stdout is not None
            shown = process.stdout.readline()
        assert json.loads(shown)["kind"] == "purge"
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130


def test_event_text_never_reaches_the_terminal_uncleaned(run, vault, config, capsys):
    from argparse import Namespace

    from tierkv.cli.events import _Printer

    printer = _Printer(Namespace(json=False, kind=[], severity="debug", last=0))
    printer.show(Event(1, 1e300, "evil\x07", "error", "a\x1b]0;x", "line\nbreak\x1b[2J"), "x:1")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count("\n") == 1
    assert "ERROR: line?break?[2J" in out


# --- prefixes, pin, purge ------------------------------------------------------------------------


def test_prefixes(run, vault, config):
    leaf = vault.store(model="SmolLM2", blocks=2, seed=1)
    vault.store(model="Qwen", blocks=1, seed=2)
    ran = run("prefixes")
    assert ran.code == 0
    assert "127.0.0.1:1: nothing listens there (connection refused)" in ran.err
    assert leaf.hex()[:12] in ran.out
    assert "2 prefixes of 2" in ran.err
    found = run("prefixes", "--model", "SmolLM2", "--json").json
    assert found["schema"] == "tierkv.prefixes/1"
    (prefix,) = found["prefixes"]
    assert (prefix["key"], prefix["tokens"], prefix["model"], prefix["vault"]) == (
        leaf.hex(), 512, "SmolLM2", vault.address,
    )  # fmt: skip
    assert found["failures"][0]["kind"] == "Unreachable"


def test_pin_and_unpin(run, vault):
    where = ("--connect", vault.address)
    leaf = vault.store(model="m", blocks=2)
    assert run("pin", "--prefix", leaf.hex()[:8], *where).out == f"{vault.address}: 2 records pinned\n"
    assert run("prefixes", "--json", *where).json["prefixes"][0]["pinned"] is True
    assert run("unpin", "--all", "--json", *where).json["vaults"] == [{"vault": vault.address, "records": 2}]


def test_dry_run_purges_nothing(run, vault):
    where = ("--connect", vault.address)
    vault.store(model="a", blocks=3, seed=1)
    vault.store(model="b", blocks=1, seed=2)
    ran = run("purge", "--model", "a", "--dry-run", *where)
    assert ran.code == 0
    assert ran.out.startswith(f"{vault.address}: 3 records, 1 prefix, ")
    assert "768 tokens to prefill again" in ran.out
    assert run("purge", "--all", "--dry-run", "--json", *where).json["vaults"][0]["records"] == 4


def test_a_dry_run_says_how_many_prefixes_it_does_not_name(run, vault):
    for seed in range(7):
        vault.store(model="a", blocks=1, seed=seed + 1)
    ran = run("purge", "--all", "--dry-run", "--connect", vault.address)
    assert ran.code == 0
    assert ran.out.count(" tokens  ") == 5
    assert "    and 2 more\n" in ran.out


def test_purge_and_undo(run, vault):
    where = ("--connect", vault.address)
    vault.store(model="a", blocks=3, seed=1)
    vault.store(model="b", blocks=1, seed=2)
    ran = run("purge", "--model", "a", "--yes", *where)
    assert ran.code == 0
    assert f"{vault.address}: 3 records purged" in ran.out
    token = re.search(r"--undo (\S+)", ran.out)
    assert token is not None
    assert len(run("prefixes", "--json", *where).json["prefixes"]) == 1
    back = run("purge", "--undo", token[1], *where)
    assert (back.code, back.out) == (0, f"{vault.address}: 3 records back, {back.out.rsplit(', ')[-1]}")
    assert len(run("prefixes", "--json", *where).json["prefixes"]) == 2
    again = run("purge", "--undo", token[1], *where)
    assert again.code == 5
    assert "it is used, or its time is over" in again.err


def test_purge_with_an_absent_vault_is_partly_applied(run, vault, config):
    vault.store(model="a")
    ran = run("purge", "--all", "--yes", "--json")
    assert ran.code == 4
    assert ran.json["purged"][0]["records"] == 1
    assert ran.json["failures"][0]["vault"] == "127.0.0.1:1"


def test_purge_without_any_vault_exits_with_3(run):
    config_file(Path.cwd(), kv=1, ssm=2)
    assert run("purge", "--all", "--yes").code == 3


def test_purge_of_nothing_is_fine(run, vault):
    ran = run("purge", "--model", "nobody", "--yes", "--connect", vault.address)
    assert ran.code == 0
    assert ran.err == "nothing matches; 'tierkv prefixes' lists what there is\n"


def test_a_pin_that_pins_nothing_has_failed(run, vault):
    vault.store(model="m", blocks=1)
    for command, code in (("pin", 1), ("unpin", 0)):
        ran = run(command, "--prefix", "deadbeef00", "--connect", vault.address)
        assert ran.code == code
        assert ran.err == "nothing matches; 'tierkv prefixes' lists what there is\n"


@pytest.mark.parametrize(("typed", "code", "left"), [("yes\n", 0, 0), ("y\n", 1, 1), ("\n", 1, 1), ("", 1, 1)])
def test_on_a_terminal_purge_asks(run, vault, monkeypatch, typed, code, left):
    vault.store(model="a")

    class Terminal:
        def isatty(self):
            return True

        def readline(self):
            return typed

    monkeypatch.setattr(purge.sys, "stdin", Terminal())
    ran = run("purge", "--all", "--connect", vault.address)
    assert ran.code == code
    assert "purge 1 record (" in ran.err
    assert "from 1 vault? type yes:" in ran.err
    assert len(run("prefixes", "--json", "--connect", vault.address).json["prefixes"]) == left


@pytest.mark.parametrize("words", [("purge", "--all", "--yes"), ("pin", "--all"), ("prefixes",)], ids=" ".join)
def test_wrong_token_exits_with_5(run, vault, monkeypatch, words):
    monkeypatch.setenv("TIERKV_TOKEN", "a-wrong-token-of-length")
    ran = run(*words, "--connect", vault.address)
    assert ran.code == 5
    assert "wrong or no token" in ran.err
    assert "Traceback" not in ran.err


# --- agents --------------------------------------------------------------------------------------


class AgentProcess:
    def __init__(self, *words: str, stdin=None) -> None:
        self.ready = Path("ready")
        self.ready.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tierkv", *words, "--ready-file", str(self.ready)],
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while not self.ready.exists() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.ready.exists(), self.process.stderr and self.process.stderr.read()
        self.port = int(self.ready.read_text())

    def end(self, number=signal.SIGTERM) -> tuple[int, str, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_agent_serves_until_a_signal_and_ends_with_0(run, number):
    agent = AgentProcess("vault", "--port", "0", "--max-bytes", "8MiB", "--name", "one")
    document = run("status", "--connect", f"127.0.0.1:{agent.port}", "--json").json
    assert document["nodes"][0]["node"]["name"] == "one"
    assert document["nodes"][0]["node"]["tiers"][0]["cap_bytes"] == 8 << 20
    code, out, err = agent.end(number)
    assert (code, out) == (0, "")
    assert f"listening on 127.0.0.1:{agent.port}" in err
    assert "Traceback" not in err


def test_role_and_port_come_from_the_configuration(run):
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    Path("tierkv.toml").write_text(
        f"[cluster]\nrole = 'ssm-vault'\n[cluster.ssm_cold]\nport = {port}\n[vault]\nmax_bytes='8MiB'\n"
    )
    agent = AgentProcess("agent")
    try:
        assert agent.port == port
        nodes = run("status", "--json").json["nodes"]
        assert [(node["address"], node["node"] and node["node"]["role"]) for node in nodes if node["reachable"]] == [
            (f"127.0.0.1:{port}", "ssm-vault")
        ]
    finally:
        agent.end()


def test_agent_ends_when_its_standard_input_does():
    agent = AgentProcess("vault", "--port", "0", "--max-bytes", "8MiB", "--until-stdin-closes", stdin=subprocess.PIPE)
    out, err = agent.process.communicate(timeout=20)  # closes the pipe
    assert (agent.process.returncode, out) == (0, "")
    assert "Traceback" not in err


def test_port_in_use_is_one_clear_message_and_exit_code_1(vault):
    ran = program("vault", "--port", str(vault.port), "--max-bytes", "8MiB")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == (
        f"tierkv: 127.0.0.1:{vault.port} is already in use; choose another port (--port) or stop what listens there\n"
    )


def test_unsafe_bind_is_refused_with_exit_code_5():
    ran = program("vault", "--host", "0.0.0.0", "--port", "0", "--max-bytes", "8MiB")
    assert (ran.code, ran.out) == (5, "")
    assert "refusing to listen on 0.0.0.0 without a shared token" in ran.err
    assert "Traceback" not in ran.err


def test_unusable_token_and_host_are_one_message(run):
    Path("token").write_text("short")
    ran = run("vault", "--token-file", "token", "--port", "0")
    assert ran.code == 2
    assert "it needs 16 or more" in ran.err
    ran = program("vault", "--host", "no-such-host.invalid", "--port", "0", "--insecure", "--max-bytes", "8MiB")
    assert ran.code == 1
    assert "is not an address of this machine" in ran.err
    ran = run("vault", "--host", "no-such-host.invalid", "--port", "0", "--max-bytes", "8MiB")
    assert (ran.code, ran.err) == (1, "tierkv: 'no-such-host.invalid' is not an address of this machine\n")


def test_socket_whose_path_is_too_long_says_what_to_set(tmp_path):
    server = HandoffServer(tmp_path / ("s" * 120), Mock(), arena_bytes=1, settings=dict)
    with pytest.raises(StartupError, match=r"a shorter one with TIERKV_SOCKET .* or a shorter TIERKV_HOME"):
        asyncio.run(server.start())


def test_warnings_of_the_configuration_are_told_at_the_start():
    Path("tierkv.toml").write_text("[inference]\nkv_dim = 4\n")
    agent = AgentProcess("vault", "--port", "0", "--max-bytes", "8MiB")
    _, _, err = agent.end()
    assert "warning: line 2: inference.kv_dim: not needed" in err


def test_environment_wins_over_the_file_and_the_flag_over_both():
    Path("tierkv.toml").write_text("[vault]\nport = 1\n[cluster]\nnode_name = 'file'\n")
    os.environ["TIERKV_VAULT__PORT"] = "2"
    try:
        agent = AgentProcess("vault", "--port", "0", "--max-bytes", "8MiB")
    finally:
        del os.environ["TIERKV_VAULT__PORT"]
    _, _, err = agent.end()
    assert agent.port > 2
    assert "kv-vault 'file' listening" in err


def test_three_agents_of_the_shipped_file_find_each_other(run, tmp_path):
    """The shipped configuration with free ports in place of the fixed ones."""
    ports = []
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    for one in sockets:
        ports.append(one.getsockname()[1])
        one.close()
    shipped = (Path(__file__).parents[2] / "tierkv.toml").read_text()
    text = shipped.replace("port = 50051\n\n", f"port = {ports[0]}\n\n").replace("port = 50052", f"port = {ports[1]}")
    Path("tierkv.toml").write_text(
        text.replace("# port = 50050", f"port = {ports[2]}").replace('"4GiB"', '"16MiB"')
        .replace('# handoff_bytes = "256MiB"', 'handoff_bytes = "4MiB"')
    )  # fmt: skip
    agents = []
    try:
        agents = [AgentProcess("agent", "--role", role) for role in ("kv-vault", "ssm-vault", "inference")]
        assert [agent.port for agent in agents] == ports
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            document = run("status", "--json")
            nodes = {node["expected_role"]: node["node"] for node in document.json["nodes"]}
            if all(nodes.values()) and len(nodes["inference"]["links"]) == 2:
                break
        assert {role: node["role"] for role, node in nodes.items()} == {role: role for role in nodes}
        assert sorted((link["tier"], link["peer"]) for link in nodes["inference"]["links"]) == [
            ("kv", f"127.0.0.1:{ports[0]}"),
            ("ssm", f"127.0.0.1:{ports[1]}"),
        ]
        assert nodes["inference"]["memory"]["threshold_fraction"] == 0.6
        assert "3 of 3 agents up" in run("status").out
    finally:
        codes = [agent.end()[0] for agent in agents]
    assert codes == [0, 0, 0]
