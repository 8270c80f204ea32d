"""Log lines, events and counters never have prompt text, token ids or state in them, whatever goes wrong."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import numpy as np
from agent_processes import TOKEN, Cluster, rows_layout
from faulty_vault import FAULTS, FaultyVault

from tierkv.handoff.client import ModelAnnouncement, model_files
from tierkv.handoff.protocol import pack

# Ids that nothing else is: seven digits, and as hex and bytes just as rare.
SECRET = np.array([7_654_321 + 1009 * n for n in range(700)], np.int64)


def told(tokens: np.ndarray) -> list[str]:
    """How the ids might look in a text."""
    found = [str(token) for token in tokens[:50].tolist()]
    found += [tokens[n : n + 2].astype("<i8").tobytes().hex() for n in range(0, 40, 2)]
    return [*found, repr(tokens[:4].astype("<i8").tobytes())[2:20]]


def test_nothing_of_a_prompt_is_in_any_log_event_or_counter(cluster: Cluster):
    vault = FaultyVault(token=TOKEN).start()
    real = cluster.vault(name="quiet")
    agent = cluster.agent(kv_cold=[vault.address, real.address], kv_codec="raw", handoff_bytes=4 << 20)
    engine = cluster.engine(layout=rows_layout(layers=2, heads=2, dim=16)).ready()
    try:
        for fault in FAULTS:
            if fault == "crash":
                continue
            vault.fault = "none"
            engine.demote(SECRET, stored=False)
            vault.fault = fault
            engine.restore(SECRET, budget_s=1.0)
            engine.client.hit(engine.model, SECRET, 600)
            engine.client.report_hot({"entries": 1, "note": "fine", "refusals": {"dtype": 1}})
        _talk_nonsense(cluster, engine)
        time.sleep(0.5)
        texts = {
            "agent log": agent.log.read_text(),
            "vault log": real.log.read_text(),
            "agent events": "\n".join(agent.event_kinds()),
            "vault events": "\n".join(real.event_kinds()),
            "snapshot": json.dumps(asdict(agent.snapshot()), default=str),
            "hook": engine.client.last_error,
        }
        for where, text in texts.items():
            for secret in told(SECRET):
                assert secret not in text, where
        assert "restore" in texts["agent events"] or "promote" in texts["agent events"]
    finally:
        cluster.close()
        vault.stop()


def _talk_nonsense(cluster: Cluster, engine) -> None:
    """Malformed messages that carry the ids: what is said of them must not repeat them."""
    from test_inference_faults import raw_channel

    ids = SECRET.astype("<i8").tobytes()
    engine.client.announce(ModelAnnouncement(str(SECRET[0])[:3], model_files(engine.folder), "{}"))
    for body in ({"op": "restore", "tokens": SECRET.tolist()}, {"op": "offer", "position": int(SECRET[0])}):
        channel = raw_channel(cluster)
        op = str(body.pop("op"))
        channel._socket.sendall(pack(op, body, len(ids)) + ids)
        channel._socket.settimeout(2.0)
        try:
            while channel._socket.recv(4096):
                pass
        except OSError:
            pass
        channel.close()


def test_no_log_call_is_given_tokens_or_arrays():
    """Read in the source: what is logged or emitted names no prompt."""
    import ast
    from pathlib import Path

    root = Path(__file__).resolve().parents[2] / "tierkv"
    secret = {"tokens", "ids", "prompt", "blob", "payload", "tail", "arrays", "rows"}
    found: list[str] = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value)
            if owner.rpartition(".")[2] not in ("log", "_log", "logger") and node.func.attr != "emit":
                continue
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                named = {each.id for each in ast.walk(argument) if isinstance(each, ast.Name)}
                called = {
                    each.id
                    for call in ast.walk(argument)
                    if isinstance(call, ast.Call) and ast.unparse(call.func) in ("len", "str")
                    for each in ast.walk(call)
                    if isinstance(each, ast.Name)
                }
                if leaked := (named & secret) - called:
                    found.append(f"{path.relative_to(root)}:{node.lineno}: {sorted(leaked)}")
    assert found == []
