"""Regions that are held: by hooks that free none, by hooks and agents frozen and thawed later; and clocks that jump."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from agent_processes import TOKEN, AgentProcess, Cluster, assert_state, environment, eventually, prompt, rows_layout

from tierkv.handoff.channel import Channel
from tierkv.handoff.client import NotRestored, Restored
from tierkv.rpc.auth import load_or_create_token
from tierkv.rpc.node_client import NodeClient

LAYOUT = rows_layout(layers=8, heads=4, dim=64)
ARENA_BYTES = 4 << 20
TOKENS = prompt(3000, 5)

# An engine in a process of its own: restores the same prompt again and again, and says what came of each.
HOOK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from agent_processes import Engine, assert_state, rows_layout, prompt
from tierkv.handoff.client import Restored
layout, tokens = rows_layout(layers=8, heads=4, dim=64), prompt(3000, 5)
engine = Engine(Path(sys.argv[2]), Path(sys.argv[3]), layout=layout, weights=b"held").ready()
while True:
    got = engine.restore(tokens)
    if isinstance(got, Restored):
        assert_state(got, layout, tokens, got.position)
        print("right", got.position, flush=True)
    else:
        print("none", got.reason, flush=True)
        engine.client.wait_available(5.0)
"""


@pytest.fixture
def place(cluster: Cluster) -> Cluster:
    cluster.agent(cluster.vault(), kv_codec="raw", handoff_bytes=ARENA_BYTES)
    return cluster


def stored(place: Cluster, weights: bytes = b"held"):
    engine = place.engine(layout=LAYOUT, weights=weights).ready()
    engine.demote(TOKENS)
    return engine


class Hook:
    def __init__(self, place: Cluster) -> None:
        command = [sys.executable, "-c", HOOK, str(Path(__file__).parent), str(place.socket), str(place.home)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(place.home))
        self.said: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def hook(place: Cluster) -> Iterator[Hook]:
    stored(place)
    running = Hook(place)
    yield running
    running.close()


def test_a_hook_that_frees_nothing_holds_up_only_itself(place: Cluster):
    agent = place.processes[-1]
    engine = stored(place)
    before = psutil.Process(agent.process.pid).num_fds()
    hello = {"channel": "control", "engine": "toy", "build": "toy 1.0", "engine_id": "greedy"}
    channel = Channel.open(place.socket, hello, writable=False, budget_s=5.0)
    announcement = {"model": 0, "announcement": engine.model.announcement.to_json(), "fidelity": 0}
    channel.send("announce", announcement, deadline=time.monotonic() + 1)
    body = {
        "id": 1, "model": 0, "have": 0, "rows_from": 0, "limit": 2999, "expected": None, "media": [], "budget_s": 2.0,
    }  # fmt: skip
    channel.send("restore", body, TOKENS.astype("<i8").tobytes(), deadline=time.monotonic() + 1)
    began, ops = time.monotonic(), []
    while not ops or ops[-1] not in ("done", "failed", "none"):
        message = channel.receive(time.monotonic() + 10)
        assert message is not None, ops
        ops.append(message.op)
    assert time.monotonic() - began < 8.0
    assert ops.count("piece") * (1 << 20) <= ARENA_BYTES + (1 << 20)
    assert_state(engine.restore(TOKENS), LAYOUT, TOKENS, 2999)
    channel.close()
    eventually(lambda: psutil.Process(agent.process.pid).num_fds() <= before + 2)


def test_a_hook_frozen_in_mid_restore_and_thawed_gets_right_rows_or_none(place: Cluster, hook: Hook):
    other = place.engines[0]
    eventually(lambda: "right 2999" in hook.said)
    for delay_s in (0.0, 0.01):
        time.sleep(delay_s)
        hook.process.send_signal(signal.SIGSTOP)
        for _ in range(2):
            began = time.monotonic()
            assert_state(other.restore(TOKENS), LAYOUT, TOKENS, 2999)
            assert time.monotonic() - began < 8.0
        count = len(hook.said)
        hook.process.send_signal(signal.SIGCONT)
        eventually(lambda count=count: "right 2999" in hook.said[count + 1 :])
    assert hook.process.poll() is None
    assert {line.split()[0] for line in hook.said} <= {"right", "none"}


def test_an_agent_frozen_in_mid_restore_and_thawed_costs_a_miss(place: Cluster, hook: Hook):
    agent = place.processes[-1]
    eventually(lambda: "right 2999" in hook.said)
    for delay_s in (0.0, 0.02):
        time.sleep(delay_s)
        agent.freeze()
        eventually(lambda: hook.said[-1].startswith("none"))
        agent.thaw()
        count = len(hook.said)
        eventually(lambda count=count: "right 2999" in hook.said[count:])
    assert hook.process.poll() is None


def test_a_request_that_a_frozen_agent_did_not_answer_is_explained_as_that(place: Cluster):
    """And an earlier request is not taken for it."""
    agent = place.processes[-1]
    engine = stored(place)
    assert_state(engine.restore(TOKENS), LAYOUT, TOKENS, 2999)
    engine.client.served(engine.model, len(TOKENS), have=0, position=2999, asked=True)
    for reason, words in (("agent_silent", "did not answer the engine"), ("no_agent", "could not reach the agent")):
        if reason == "agent_silent":
            agent.freeze()
        assert engine.restore(TOKENS) == NotRestored(reason)
        agent.thaw()
        assert engine.client.wait_available(30.0)
        engine.client.served(engine.model, len(TOKENS), have=1, position=1, asked=True)
        engine.client.flush_outbox()
        explained = eventually(lambda words=words: words in (last := explanation(agent)).sentence and last)
        assert explained.request.reason == reason
        engine.client.links.drop(engine.client.links.control, engine.client.links.control.channel)
    outcomes = [line.outcome for line in asyncio.run(asked(agent, lambda client: client.requests()))]
    assert outcomes.count("restored") == 1


async def asked(agent: AgentProcess, question):
    client = NodeClient(agent.address, load_or_create_token(TOKEN, None))
    try:
        return await question(client)
    finally:
        await client.close()


def explanation(agent: AgentProcess):
    return asyncio.run(asked(agent, lambda client: client.explain(0)))


def test_an_agent_frozen_while_state_is_handed_over_takes_it_or_drops_it(place: Cluster):
    agent = place.processes[-1]
    engine = place.engine(layout=LAYOUT, weights=b"frozen").ready()
    for number, delay_s in enumerate((0.0, 0.02)):
        tokens = prompt(3000, 50 + number)
        offer = engine.offer(tokens)
        assert engine.mover.submit(engine.transfer(tokens, offer))
        time.sleep(delay_s)
        agent.freeze()
        time.sleep(0.3)
        agent.thaw()
        assert engine.mover.drain(30.0, stored=True)
        eventually(lambda tokens=tokens: isinstance(engine.restore(tokens), Restored))
        assert_state(engine.restore(tokens), LAYOUT, tokens, 2999)


# --- clocks -------------------------------------------------------------------------------------------

# gRPC makes deadlines of time.time() and keeps them by a clock of its own: only TierKV's own calls jump.
JUMPING = """
import os, sys, time
_file, _time = os.environ["TIERKV_TEST_CLOCK"], time.time
def jumped():
    if not sys._getframe(1).f_globals.get("__name__", "").startswith("tierkv"):
        return _time()
    try:
        with open(_file) as file:
            return _time() + float(file.read() or 0)
    except (OSError, ValueError):
        return _time()
time.time = jumped
"""


@pytest.mark.parametrize("jump_s", [10 * 365 * 86400.0, -10 * 365 * 86400.0])
def test_a_clock_that_jumps_changes_no_answer(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, jump_s: float):
    """Ten years forth or back, on the vault and the agent, between a store and its restore and in mid-life."""
    folder, clock = cluster.home / "site", cluster.home / "clock"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(JUMPING)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("TIERKV_TEST_CLOCK", str(clock))
    vault = cluster.vault()
    agent = cluster.agent(vault)
    engine = cluster.engine().ready()
    tokens = prompt(700)
    engine.demote(tokens)
    clock.write_text(str(jump_s))
    time.sleep(1.5)  # the vault sweeps once a second
    got = engine.restore(tokens)
    if isinstance(got, Restored):
        assert_state(got, engine.layout, tokens, 699)
    else:
        assert got.reason == "expired"
    other = prompt(700, 1)
    engine.demote(other)
    assert_state(engine.restore(other), engine.layout, other, 699)
    clock.write_text("0")
    engine.demote(np.concatenate([other, prompt(100, 2)]))
    assert_state(engine.restore(other), engine.layout, other, 699)
    assert agent.alive
    assert vault.alive
    assert json.dumps(agent.event_kinds())
