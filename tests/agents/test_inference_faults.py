"""Processes that die, freeze, start twice or speak nonsense: the engine goes on, nothing leaks, it works again."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from agent_processes import (
    RUNNER,
    TOKEN,
    Cluster,
    assert_state,
    environment,
    eventually,
    hybrid_layout,
    prompt,
    rows_layout,
)

from tierkv.errors import HandoffError
from tierkv.handoff.channel import Channel
from tierkv.handoff.client import ModelAnnouncement, NotRestored, Restored, model_files
from tierkv.handoff.protocol import HEADER, MAGIC, pack


def restored(engine, tokens):
    got = engine.restore(tokens)
    return got if isinstance(got, Restored) else None


def test_without_a_vault_nothing_is_copied(cluster: Cluster):
    cluster.agent()
    engine = cluster.engine().ready()
    tokens = prompt(300)
    offer = engine.offer(tokens)
    assert not offer.wanted
    assert offer.reason == "no_kv_vault"
    assert engine.restore(tokens) == NotRestored("no_vault")


def test_one_machine_is_enough(cluster: Cluster):
    agent = cluster.agent(local_vault_bytes=64 << 20)
    engine = cluster.engine(layout=hybrid_layout()).ready()
    tokens = prompt(600)
    engine.demote(tokens[:500])
    assert_state(engine.restore(tokens), engine.layout, tokens, 500)
    local = agent.tier("local")
    assert local.records == 3  # two blocks and a checkpoint
    assert local.size_bytes > 0


def test_a_local_vault_is_the_first_tier_of_a_remote_one(cluster: Cluster):
    vault = cluster.vault()
    agent = cluster.agent(vault, local_vault_bytes=64 << 20)
    engine = cluster.engine().ready()
    tokens = prompt(600)
    engine.demote(tokens)
    assert agent.tier("local").records == vault.tier("kv").records == 3
    vault.kill()
    assert_state(engine.restore(tokens), engine.layout, tokens, 599)


def test_a_hybrid_needs_both_tiers(cluster: Cluster):
    cluster.agent(cluster.vault())
    engine = cluster.engine(layout=hybrid_layout()).ready()
    assert engine.offer(prompt(300)).reason == "no_ssm_vault"


def test_a_vault_that_is_gone_and_comes_back_empty(cluster: Cluster):
    vault = cluster.vault()
    agent = cluster.agent(vault)
    engine = cluster.engine().ready()
    tokens = prompt(600)
    engine.demote(tokens)
    vault.kill()
    began = time.monotonic()
    got = engine.restore(tokens)
    assert time.monotonic() - began < 3.0
    assert isinstance(got, NotRestored)
    assert got.reason in ("unreachable", "breaker_open", "timed_out")
    assert isinstance(engine.restore(tokens), NotRestored)
    back = cluster.vault(port=vault.port)
    eventually(lambda: engine.offer(tokens).wanted)
    engine.close()
    other = cluster.engine().ready()
    eventually(lambda: other.demote(tokens).rows_from is None)
    assert back.tier("kv").records == 3
    assert_state(eventually(lambda: restored(other, tokens)), other.layout, tokens, 599)
    assert agent.alive


def test_records_wait_for_a_vault_that_is_down(cluster: Cluster):
    vault = cluster.vault()
    agent = cluster.agent(vault)
    engine = cluster.engine().ready()
    vault.kill()
    tokens = prompt(600)
    engine.demote(tokens, stored=False)
    cluster.vault(port=vault.port)
    assert engine.mover.drain(20.0, stored=True)
    assert_state(eventually(lambda: restored(engine, tokens)), engine.layout, tokens, 599)
    assert any(event.startswith("link") for event in agent.event_kinds())


def test_a_prompt_that_is_larger_than_the_queue_is_stored_whole(cluster: Cluster):
    """84 MB through a queue of 4: what comes from the engine waits for the vault to take what came before."""
    vault = cluster.vault()
    agent = cluster.agent(vault, queue_bytes=4 << 20, kv_codec="raw")
    engine = cluster.engine(layout=rows_layout(layers=4, heads=4, dim=64)).ready()
    tokens = prompt(40 * 256)
    engine.demote(tokens)
    assert vault.tier("kv").records == 40
    counters = agent.snapshot().counters
    assert not [name for name in counters if "dropped" in name or "failed" in name], counters
    assert_state(eventually(lambda: restored(engine, tokens)), engine.layout, tokens, len(tokens) - 1)


def test_engines_that_send_more_than_the_queue_holds_at_once_lose_nothing(cluster: Cluster):
    vault = cluster.vault()
    agent = cluster.agent(vault, queue_bytes=4 << 20, kv_codec="raw")
    layout = rows_layout(layers=4, heads=4, dim=64)
    engines = [cluster.engine(layout=layout).ready() for _ in range(3)]
    prompts = [prompt(12 * 256, seed) for seed in range(3)]
    for engine, tokens in zip(engines, prompts, strict=True):
        assert engine.mover.submit(engine.transfer(tokens, engine.offer(tokens)))
    for engine in engines:
        assert engine.mover.drain(30.0, stored=True)
    assert vault.tier("kv").records == 36
    assert not [name for name in agent.snapshot().counters if "dropped" in name or "failed" in name]


def test_a_vault_that_dies_while_a_region_waits_for_room_ends_the_waiting(cluster: Cluster):
    """The beginning stays queued: with it a later start of the vault is worth something."""
    vault = cluster.vault()
    agent = cluster.agent(vault, queue_bytes=4 << 20, kv_codec="raw")
    engine = cluster.engine(layout=rows_layout(layers=4, heads=4, dim=64)).ready()
    tokens = prompt(40 * 256)
    offer = engine.offer(tokens)
    vault.freeze()
    assert engine.mover.submit(engine.transfer(tokens, offer))
    assert engine.mover.drain(20.0), "it waits for a vault that does not answer"
    counters = eventually(lambda: (c := agent.snapshot().counters).get("transfers_failed_queue_full") and c)
    assert counters["transfers_failed_queue_full"] == 1
    assert any(event.startswith("drop") for event in agent.event_kinds())
    vault.thaw()
    assert engine.mover.drain(20.0, stored=True)
    assert vault.tier("kv").records >= 1
    engine.demote(tokens)
    assert vault.tier("kv").records == 40


def test_with_a_vault_that_is_down_and_a_full_queue_nothing_more_is_taken_until_it_is_back(cluster: Cluster):
    vault = cluster.vault()
    agent = cluster.agent(vault, queue_bytes=4 << 20, kv_codec="raw")
    engine = cluster.engine(layout=rows_layout(layers=4, heads=4, dim=64)).ready()
    vault.kill()
    engine.demote(prompt(600), stored=False)
    eventually(lambda: engine.offer(prompt(600, 1)).reason == "queue_full")  # it is known by now that the vault is down
    assert agent.snapshot().counters["offers_declined_queue_full"] >= 1
    back = cluster.vault(port=vault.port)
    eventually(lambda: engine.offer(prompt(600, 1)).wanted)
    engine.demote(prompt(600, 2))
    assert back.tier("kv").records == 6


def test_records_that_only_a_vault_that_is_down_still_lacks_make_room(cluster: Cluster):
    """The local vault has them: what waits for the remote one must not keep others out of both."""
    vault = cluster.vault()
    agent = cluster.agent(vault, queue_bytes=4 << 20, kv_codec="raw", local_vault_bytes=256 << 20)
    engine = cluster.engine(layout=rows_layout(layers=4, heads=4, dim=64)).ready()
    vault.kill()
    tokens = prompt(40 * 256)
    engine.demote(tokens, stored=False)
    counters = eventually(lambda: (c := agent.snapshot().counters).get("records_dropped_queue_full") and c)
    assert "transfers_failed_queue_full" not in counters
    eventually(lambda: agent.tier("local").records == 40)
    assert_state(engine.restore(tokens), engine.layout, tokens, len(tokens) - 1)


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.1])
def test_a_vault_killed_in_the_middle_of_a_restore(cluster: Cluster, delay_s: float):
    vault = cluster.vault()
    agent = cluster.agent(vault, kv_codec="raw")
    engine = cluster.engine(layout=rows_layout(layers=8, heads=4, dim=64)).ready()
    tokens = prompt(3000)
    engine.demote(tokens)
    killer = threading.Timer(delay_s, vault.kill)
    killer.start()
    began = time.monotonic()
    got = engine.restore(tokens)
    assert time.monotonic() - began < 6.0
    killer.join()
    if isinstance(got, Restored):
        assert_state(got, engine.layout, tokens, got.position)
    assert agent.alive


def test_a_vault_killed_in_the_middle_of_a_store(cluster: Cluster):
    vault = cluster.vault()
    agent = cluster.agent(vault, kv_codec="raw")
    engine = cluster.engine(layout=rows_layout(layers=8, heads=4, dim=64)).ready()
    tokens = prompt(3000)
    offer = engine.offer(tokens)
    engine.mover.submit(engine.transfer(tokens, offer))
    time.sleep(0.02)
    vault.kill()
    assert engine.mover.drain(20.0)
    back = cluster.vault(port=vault.port)
    assert engine.mover.drain(20.0, stored=True)
    assert back.tier("kv").records == 12
    assert_state(eventually(lambda: restored(engine, tokens)), engine.layout, tokens, 2999)
    assert agent.alive


def test_a_frozen_vault_is_left_at_the_deadline(cluster: Cluster):
    vault = cluster.vault()
    cluster.agent(vault)
    engine = cluster.engine().ready()
    tokens = prompt(600)
    engine.demote(tokens)
    vault.freeze()
    began = time.monotonic()
    assert isinstance(engine.restore(tokens), NotRestored)
    assert time.monotonic() - began < 3.0
    vault.thaw()
    assert_state(eventually(lambda: restored(engine, tokens)), engine.layout, tokens, 599)


def test_an_agent_killed_between_calls(cluster: Cluster):
    vault = cluster.vault()
    agent = cluster.agent(vault)
    engine = cluster.engine().ready()
    tokens = prompt(600)
    engine.demote(tokens)
    agent.kill()
    for _ in range(3):
        began = time.monotonic()
        assert engine.restore(tokens) == NotRestored("no_agent")
        assert engine.offer(tokens) is None
        engine.client.hit(engine.model, tokens, 500)
        engine.client.report_hot({"entries": 1})
        assert time.monotonic() - began < 0.5
    cluster.agent(vault)
    engine.ready()
    assert_state(eventually(lambda: restored(engine, tokens)), engine.layout, tokens, 599)


def test_an_agent_killed_in_the_middle_of_a_restore(cluster: Cluster):
    vault = cluster.vault()
    agent = cluster.agent(vault, kv_codec="raw")
    engine = cluster.engine(layout=rows_layout(layers=8, heads=4, dim=64)).ready()
    tokens = prompt(3000)
    engine.demote(tokens)
    threading.Timer(0.02, agent.kill).start()
    began = time.monotonic()
    got = engine.restore(tokens)
    assert time.monotonic() - began < 3.0
    if isinstance(got, Restored):
        assert_state(got, engine.layout, tokens, 2999)


def test_a_frozen_agent_never_holds_the_engine(cluster: Cluster):
    vault = cluster.vault()
    agent = cluster.agent(vault)
    engine = cluster.engine().ready()
    tokens = prompt(300)
    agent.freeze()
    began = time.monotonic()
    assert engine.client.offer(engine.model, tokens, 300, engine.layout, budget_s=0.1) is None
    assert engine.restore(tokens, budget_s=0.3) == NotRestored("timed_out")
    assert engine.restore(tokens, budget_s=0.3).reason in ("no_agent", "timed_out")
    assert time.monotonic() - began < 1.5
    agent.thaw()
    engine.ready()
    eventually(lambda: engine.demote(tokens).wanted)
    assert_state(eventually(lambda: restored(engine, tokens)), engine.layout, tokens, 299)


def test_a_wrong_token_is_a_reason(cluster: Cluster):
    vault = cluster.vault()
    agent = cluster.agent(vault, token="another-token-altogether")
    engine = cluster.engine().ready()
    assert engine.restore(prompt(300)) == NotRestored("not_authenticated")
    engine.demote(prompt(300), stored=False)
    assert agent.alive


def test_changed_weights_are_refused(cluster: Cluster):
    cluster.agent(cluster.vault())
    engine = cluster.engine().ready()
    seen = model_files(engine.folder)
    (engine.folder / "model.safetensors").write_bytes(b"v" * 1000)
    engine.model = engine.client.announce(ModelAnnouncement("toy", seen, "{}"))
    engine.ready()
    assert engine.model.state == "weights_changed"
    assert engine.offer(prompt(300)).reason == "weights_changed"
    assert engine.restore(prompt(300)) == NotRestored("weights_changed")


def test_nothing_is_stored_before_the_identity_is_known(cluster: Cluster):
    agent = cluster.agent(cluster.vault())
    engine = cluster.engine().ready()
    big = cluster.home / "big"
    big.mkdir()
    with (big / "model.safetensors").open("wb") as file:
        file.truncate(256 << 20)
    engine.model = engine.client.announce(ModelAnnouncement("big", model_files(big), "{}"))
    offer = engine.offer(prompt(300))
    got = engine.restore(prompt(300))
    if engine.ready().model.state == "ready" and offer.reason:
        assert offer.reason == "identity_pending"
        assert got in (NotRestored("identity_pending"), NotRestored("never_stored"))
    assert agent.alive


def test_lossless_readers_do_not_see_what_a_lossy_restore_made(cluster: Cluster):
    """An int8 agent's records restored elsewhere taint what is computed after them, whatever codec stores that."""
    vault = cluster.vault()
    lossy = cluster.agent(vault, name="lossy", kv_codec="int8", socket=str(cluster.home / "a.sock"))
    weights = b"tainted"
    writer = cluster.engine(weights=weights, socket=cluster.home / "a.sock").ready()
    tokens = prompt(512)
    writer.demote(tokens)
    lossy.stop()
    cluster.agent(vault, name="exact", socket=str(cluster.home / "b.sock"))
    middle = cluster.engine(weights=weights, socket=cluster.home / "b.sock").ready()
    longer = np.concatenate([tokens, prompt(300, seed=2)])
    got = middle.restore(longer)
    assert isinstance(got, Restored)
    assert (got.position, got.fidelity, got.codec) == (512, 20, "int8")
    middle.demote(longer)
    cluster.agent(vault, name="strict", worst_fidelity="lossless", socket=str(cluster.home / "c.sock"))
    reader = cluster.engine(weights=weights, socket=cluster.home / "c.sock").ready()
    assert isinstance(reader.restore(longer), NotRestored)
    clean = prompt(300, seed=3)
    reader.demote(clean)
    assert_state(reader.restore(clean), reader.layout, clean, 299)


# --- the hand-off socket ----------------------------------------------------------------------------


def raw_channel(cluster: Cluster, kind: str = "control") -> Channel:
    hello = {"channel": kind, "engine": "toy", "build": "toy 1.0", "engine_id": f"raw-{random.random()}"}
    return Channel.open(cluster.socket, hello, writable=kind == "demote", budget_s=5.0)


def test_an_engine_of_another_version_is_told_on_both_sides(cluster: Cluster):
    agent = cluster.agent()
    hello = {"channel": "control", "engine": "toy", "build": "toy 1.0", "engine_id": "other", "version": 99}
    for _ in range(3):
        with pytest.raises(HandoffError, match=r"different versions of TierKV; update .* \(other_version\)"):
            Channel.open(cluster.socket, hello, writable=False, budget_s=5.0)
    told = [event for event in agent.event_kinds() if "an engine is not served" in event]
    assert len(told) == 1
    assert "different versions of TierKV; update the older one" in told[0]
    assert agent.snapshot().counters["handoff_refused_other_version"] == 3


def test_a_second_agent_on_the_same_socket_says_so(cluster: Cluster):
    cluster.agent()
    options = {"name": "second", "port": 0, "socket": str(cluster.socket), "token": TOKEN}
    second = subprocess.run(
        [sys.executable, "-c", RUNNER, "inference", json.dumps(options)],
        capture_output=True, text=True, timeout=60, env=environment(cluster.home), check=False,
    )  # fmt: skip
    assert second.returncode != 0
    assert "another inference agent already listens on" in second.stderr


def test_a_socket_that_a_killed_agent_left_is_replaced(cluster: Cluster):
    cluster.agent().kill()
    assert cluster.socket.exists()
    cluster.agent()
    engine = cluster.engine().ready()
    assert engine.client.available
    assert cluster.socket.stat().st_mode & 0o777 == 0o600
    assert cluster.socket.parent.stat().st_mode & 0o777 == 0o700


def test_a_stopped_agent_leaves_no_socket(cluster: Cluster):
    agent = cluster.agent()
    agent.stop()
    assert not cluster.socket.exists()


def test_a_hook_killed_while_it_holds_regions(cluster: Cluster):
    """The memory, the descriptors and the transfers of a dead engine come back; others are served meanwhile."""
    vault = cluster.vault()
    agent = cluster.agent(vault, kv_codec="raw")
    engine = cluster.engine(layout=rows_layout(layers=8, heads=4, dim=64)).ready()
    tokens = prompt(2000)
    engine.demote(tokens)
    assert_state(engine.restore(tokens), engine.layout, tokens, 1999)  # the connections of a restore are there
    process = psutil.Process(agent.process.pid)
    before, arenas_before = process.num_fds(), arenas(process)
    announcement = engine.model.announcement.to_json()
    for _ in range(5):
        channel = raw_channel(cluster)
        deadline = time.monotonic() + 5
        channel.send("announce", {"model": 0, "announcement": announcement, "fidelity": 0}, deadline=deadline)
        ask = {
            "id": 1,
            "model": 0,
            "have": 0,
            "rows_from": 0,
            "limit": 2000,
            "expected": None,
            "media": [],
            "budget_s": 30,
        }
        channel.send("restore", ask, tokens.astype("<i8").tobytes(), deadline=deadline)
        while (message := channel.receive(deadline)) is not None and message.op != "piece":
            pass
        assert message is not None
        channel.close()
    half = raw_channel(cluster, "demote")
    half.send("begin", {"transfer": 1, "scalars": {}}, deadline=time.monotonic() + 1)
    half.close()
    assert_state(engine.restore(tokens), engine.layout, tokens, 1999)
    eventually(lambda: arenas(process) == arenas_before)
    eventually(lambda: process.num_fds() < before + 5)  # a socket each would be five and more
    eventually(lambda: len(agent.snapshot().engines) == 1)


def arenas(process: psutil.Process) -> int:
    """How many descriptors of memory shared with hooks the agent holds: two an arena, the mapping has its own."""
    links = (os.path.join(f"/proc/{process.pid}/fd", name) for name in os.listdir(f"/proc/{process.pid}/fd"))
    return sum(os.path.islink(link) and "tierkv-arena" in os.readlink(link) for link in links)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("stuck", ["memory", "vault"])
def test_a_restore_ends_with_the_hook_that_asked_for_it(cluster: Cluster, stuck: str):
    """Not at the end of its budget, whether it waits for regions that a dead hook never frees or for a hung vault."""
    vault = cluster.vault()
    agent = cluster.agent(vault, kv_codec="raw", handoff_bytes=4 << 20, frame_timeout_s=25.0, probe_timeout_s=25.0)
    engine = cluster.engine(layout=rows_layout(layers=8, heads=4, dim=64)).ready()
    tokens = prompt(1500)
    engine.demote(tokens)
    process = psutil.Process(agent.process.pid)
    before = arenas(process)
    if stuck == "vault":
        vault.freeze()
    channel = raw_channel(cluster)
    deadline = time.monotonic() + 10
    announcement = engine.model.announcement.to_json()
    channel.send("announce", {"model": 0, "announcement": announcement, "fidelity": 0}, deadline=deadline)
    ask = {"id": 1, "model": 0, "have": 0, "rows_from": 0, "limit": 1500, "expected": None, "media": []}
    channel.send("restore", {**ask, "budget_s": 30}, tokens.astype("<i8").tobytes(), deadline=deadline)
    seen = []
    while (message := channel.receive(time.monotonic() + 1.5)) is not None and len(seen) < 20:
        seen.append(message.op)
        if message.op == "working":
            break
    assert seen[-1] == "working", "the restore is stuck"
    assert ("piece" in seen) == (stuck == "memory")
    assert arenas(process) > before
    channel.close()
    began = time.monotonic()
    eventually(lambda: arenas(process) == before)
    assert time.monotonic() - began < 15, "a budget of 30 s is not waited for"
    assert agent.alive


def test_a_region_is_freed_once(shared: Cluster):
    agent = shared.processes[-1]
    before = agent.snapshot().counters.get("handoff_malformed", 0)
    channel = raw_channel(shared)
    channel.send("free", {"offset": 0}, deadline=time.monotonic() + 1)
    assert hangs_up(channel)
    eventually(lambda: agent.snapshot().counters.get("handoff_malformed", 0) == before + 1)


def hangs_up(channel: Channel) -> bool:
    try:
        channel.receive(time.monotonic() + 5)
    except Exception:
        return True
    return False


@pytest.mark.parametrize(
    "hello",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        HEADER.pack(MAGIC, 1 << 31, 0),
        HEADER.pack(MAGIC, 2, 1 << 31) + b"{}",
        pack("hello", {"version": 2, "channel": "control"}),
        pack("hello", {"version": 1, "channel": "other"}),
        pack("hello", {"version": 1, "channel": "control", "engine": 5}),
        pack("restore", {"version": 1}),
        b"",
    ],
)
def test_a_wrong_hello_is_answered_or_hung_up_on(shared: Cluster, hello: bytes):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(shared.socket))
    sock.sendall(hello)
    sock.shutdown(socket.SHUT_WR)
    sock.settimeout(8)
    try:
        answer = sock.recv(4096)
    except ConnectionResetError:  # it did not even read all of it
        answer = b""
    assert answer == b"" or b"refused" in answer
    assert all(process.alive for process in shared.processes)


def test_the_agent_survives_2000_malformed_messages(cluster: Cluster):
    vault = cluster.vault()
    agent = cluster.agent(vault, handoff_bytes=4 << 20)
    engine = cluster.engine().ready()
    tokens = prompt(300)
    engine.demote(tokens)
    rng = random.Random(7)
    seeds = fuzz_seeds(engine, tokens)
    sent = 0
    while sent < 2000:
        channel = raw_channel(cluster, rng.choice(["control", "demote"]))
        sock = channel._socket
        sock.settimeout(2.0)
        try:
            for _ in range(40):
                sent += 1
                sock.sendall(mutated(rng, rng.choice(seeds)))
        except OSError:
            pass
        channel.close()
    assert agent.alive
    assert_state(engine.restore(tokens), engine.layout, tokens, 299)
    counters = agent.snapshot().counters
    assert counters["handoff_malformed"] > 10
    assert counters.get("restores_crashed", 0) == 0
    assert counters.get("pieces_crashed", 0) == 0
    assert "Traceback" not in agent.log.read_text()


def fuzz_seeds(engine, tokens: np.ndarray) -> list[tuple[dict[str, object], bytes]]:
    ids = tokens.astype("<i8").tobytes()
    layout = engine.layout.to_json()
    piece = {"op": "piece", "transfer": 1, "offset": 0, "bytes": 4096, "segments": [[0, 0, 0, 0, [1, 2, 8, 16]]]}
    return [
        ({"op": "announce", "model": 0, "announcement": engine.model.announcement.to_json(), "fidelity": 0}, b""),
        ({"op": "offer", "id": 1, "model": 0, "position": 300, "media": [], "tokens_bytes": len(ids)}, ids + layout),
        ({"op": "restore", "id": 2, "model": 0, "have": 0, "rows_from": 0, "limit": 299, "media": [],
          "expected": engine.layout.signature(), "budget_s": 1.0}, ids),
        ({"op": "hit", "id": 3, "model": 0, "position": 100, "media": [[1, 2, "aa"]]}, ids),
        ({"op": "free", "offset": 0}, b""),
        ({"op": "begin", "transfer": 1, "scalars": {"1": {"offset": 3}}}, b""),
        (piece, b""),
        ({"op": "end", "transfer": 1}, b""),
        ({"op": "dropped", "transfer": 1, "reason": "x"}, b""),
        ({"op": "report", "stats": {"entries": 3, "hits": 5, "note": "n"}}, b""),
        ({"op": "flush", "timeout_s": 0.01}, b""),
    ]  # fmt: skip


JUNK = [None, -1, 0, 1, 2**31, 2**62, 2**70, 1.5, float("nan"), "", "x" * 300, True, [], {}, [[]], [[1, 2]], {"1": 2}]


def mutated(rng: random.Random, seed: tuple[dict[str, object], bytes]) -> bytes:
    """A message with one or two fields, its blob, its lengths or its bytes changed."""
    fields, blob = dict(seed[0]), seed[1]
    for _ in range(rng.randint(0, 2)):
        name = rng.choice(list(fields))
        if rng.random() < 0.2:
            fields.pop(name)
        elif isinstance(fields[name], dict) and fields[name] and rng.random() < 0.7:
            inner = dict(fields[name])
            inner[rng.choice(list(inner))] = rng.choice(JUNK)
            fields[name] = inner
        else:
            fields[name] = rng.choice(JUNK)
    if rng.random() < 0.2:
        blob = blob[: rng.randint(0, len(blob))] + rng.randbytes(rng.randint(0, 16))
    text = json.dumps(fields).encode()
    head = HEADER.pack(MAGIC, len(text), len(blob))
    if rng.random() < 0.1:
        head = struct.pack("<4sII", MAGIC, rng.choice([0, len(text), 1 << 21]), rng.choice([0, len(blob), 1 << 27]))
    data = bytearray(head + text + blob)
    if rng.random() < 0.15:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def test_the_mutations_are_not_all_refused_at_the_first_byte():
    rng = random.Random(7)
    seeds = [({"op": "free", "offset": 0}, b"")]
    whole = sum(mutated(rng, rng.choice(seeds))[:4] == MAGIC for _ in range(500))
    assert whole > 400


def test_no_agent_costs_an_engine_nothing(tmp_path: Path):
    from agent_processes import Engine

    engine = Engine(tmp_path / "nobody.sock", tmp_path)
    engine.client.connect_budget_s = 0.05
    tokens = prompt(300)
    began = time.monotonic()
    for _ in range(50):
        assert engine.restore(tokens) == NotRestored("no_agent")
        assert engine.offer(tokens) is None
    assert time.monotonic() - began < 1.0
    engine.close()
    assert not os.path.exists(tmp_path / "nobody.sock")
