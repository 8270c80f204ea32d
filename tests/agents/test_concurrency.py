"""Many at once: engines on one agent, agents on one vault, evictions under promotions, updates under write-behind.

No wrong state, no deadlock, nothing fetched twice at a time. Every row that comes back tells its prompt's prefix.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from agent_processes import TOKEN, Cluster, Engine, assert_state, hybrid_layout, prompt, rows_layout
from faulty_vault import FaultyVault

from tierkv.handoff.client import NotRestored, Restored

# Nothing here takes a tenth of it; what takes longer hangs.
HANG_S = 120.0
SECONDS = 4.0
SYSTEM = prompt(600, 1)


def conversation(number: int, turns: int) -> np.ndarray:
    """A prompt that shares the first 600 tokens with every other, and all turns but the last with its own next one."""
    return np.concatenate([SYSTEM, *(prompt(90 + 37 * turn, 100 * number + turn) for turn in range(turns))])


def all_at_once(jobs: list[Callable[[], None]]) -> None:
    """Every job in a thread of its own; the first that fails fails the test, and so does one that does not end."""
    failures: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + HANG_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not [thread for thread in threads if thread.is_alive()], "a deadlock"
    if failures:
        raise failures[0]


def checked(engine: Engine, tokens: np.ndarray, seen: Counter[str]) -> None:
    """What came back is right, or nothing came."""
    got = engine.restore(tokens)
    if isinstance(got, Restored):
        assert_state(got, engine.layout, tokens, got.position)
        seen["right"] += 1
    else:
        assert isinstance(got, NotRestored)
        seen[got.reason] += 1


def busy(engine: Engine, first: int, seen: Counter[str]) -> Callable[[], None]:
    """Conversations that grow, branch and come back, for a while: hand over, restore, hand over what goes on."""

    def work() -> None:
        end, number = time.monotonic() + SECONDS, first
        while time.monotonic() < end:
            for turns in (1, 2, 3):
                tokens = conversation(number % 6, turns)
                checked(engine, tokens, seen)
                offer = engine.offer(tokens)
                if offer is not None and offer.wanted:
                    engine.mover.submit(engine.transfer(tokens, offer))
            number += 1

    return work


@pytest.mark.parametrize("layout", [rows_layout(), hybrid_layout(window=True)], ids=["rows", "hybrid"])
def test_four_engines_on_one_agent(cluster: Cluster, layout):
    agent = cluster.agent(cluster.vault(), cluster.vault("ssm-vault"))
    engines = [cluster.engine(layout=layout).ready() for _ in range(4)]
    seen: Counter[str] = Counter()
    all_at_once([busy(engine, 2 * n, seen) for n, engine in enumerate(engines)])
    assert seen["right"] > 10, seen
    assert set(seen) <= {"right", "never_stored", "no_checkpoint", "too_little", "cancelled"}, seen
    for engine in engines:
        assert engine.mover.drain(30.0, stored=True)
    for number in range(6):
        tokens = conversation(number, 3)
        engines[0].demote(tokens)
        assert_state(engines[1].restore(np.append(tokens, 7)), layout, tokens, len(tokens))
    counters = agent.snapshot().counters
    assert not [name for name in counters if "crashed" in name or "malformed" in name], counters


def test_two_agents_on_one_vault(cluster: Cluster):
    vault = cluster.vault()
    sockets = [cluster.home / "a.sock", cluster.home / "b.sock"]
    for name, socket in zip("ab", sockets, strict=True):
        cluster.agent(vault, name=name, socket=str(socket))
    engines = [cluster.engine(socket=sockets[n % 2]).ready() for n in range(4)]
    seen: Counter[str] = Counter()
    all_at_once([busy(engine, n, seen) for n, engine in enumerate(engines)])
    assert seen["right"] > 10, seen
    for engine in engines:
        assert engine.mover.drain(30.0, stored=True)
    # What one agent stored, the other finds; and it was stored once.
    tokens = conversation(0, 3)
    assert_state(engines[1].restore(np.append(tokens, 7)), engines[1].layout, tokens, len(tokens))
    blocks = {tuple(conversation(number, 3)[: 256 * n]) for number in range(6) for n in range(1, 5)}
    assert vault.tier("kv").records < 2 * len(blocks) + 6 * 3


def test_evictions_race_with_promotions(cluster: Cluster):
    """Two engines fill a small vault with prompts that nobody asks for, two restore what they have just stored."""
    layout = rows_layout(layers=4, heads=4, dim=32)
    vault = cluster.vault(max_bytes=10 << 20)
    agent = cluster.agent(vault, kv_codec="raw")
    engines = [cluster.engine(layout=layout).ready() for _ in range(4)]
    seen: Counter[str] = Counter()

    def writes(engine: Engine, first: int) -> Callable[[], None]:
        def work() -> None:
            end, seed = time.monotonic() + SECONDS, first
            while time.monotonic() < end:
                engine.demote(prompt(300, seed), stored=False)
                seed += 1

        return work

    def reads(engine: Engine, first: int) -> Callable[[], None]:
        def work() -> None:
            end, seed = time.monotonic() + SECONDS, first
            while time.monotonic() < end:
                engine.demote(prompt(300, seed), stored=False)
                for back in (0, 1, 2, 3, 5):
                    checked(engine, prompt(300, seed - back), seen)
                seed += 1

        return work

    all_at_once([*(writes(e, 1000 * n) for n, e in enumerate(engines[:2])),
                 *(reads(e, 10_000 * n) for n, e in enumerate(engines[2:], 1))])  # fmt: skip
    assert vault.tier("kv").evictions > 0
    assert seen["right"] > 0, seen
    assert vault.alive
    assert agent.alive
    for engine in engines:
        assert engine.mover.drain(30.0)


def test_updates_race_with_write_behind(cluster: Cluster):
    """The engine goes on in the arrays' own memory while the mover still carries what was handed over."""
    cluster.agent(cluster.vault(), kv_codec="raw")
    engine = cluster.engine(layout=rows_layout(layers=4, heads=4, dim=64)).ready()
    for seed in range(4):
        tokens = prompt(1500, seed)
        offer = engine.offer(tokens)
        transfer = engine.transfer(tokens, offer)
        assert engine.mover.submit(transfer)
        longer = np.append(tokens, prompt(200, seed + 50))
        second = engine.offer(longer)  # while the first is on its way
        assert engine.mover.submit(engine.transfer(longer, second)) if second.wanted else True
        got = engine.restore(longer)
        if isinstance(got, Restored):
            assert_state(got, engine.layout, longer, got.position)
        assert engine.mover.drain(30.0, stored=True)
        engine.demote(longer)
        assert_state(engine.restore(np.append(longer, 3)), engine.layout, longer, 1700)


def test_sixteen_restores_of_one_prompt_ask_the_vault_once(cluster: Cluster):
    vault = FaultyVault(token=TOKEN).start()
    try:
        agent = cluster.agent(kv_cold=[vault.address], handoff_bytes=4 << 20, frame_timeout_s=8.0)
        engines = [cluster.engine().ready() for _ in range(16)]
        tokens = prompt(2000)
        engines[0].demote(tokens)
        vault.delay_s, before = 1.0, vault.promotes
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda engine: engine.restore(tokens), engines))
        for got in answers:
            assert_state(got, engines[0].layout, tokens, 1999)
        assert vault.promotes == before + 1
        assert agent.snapshot().counters["restores"] == 16
        vault.delay_s = 0.0
        # Prompts that share a head: what is on its way for one is not asked for by the next.
        longer = [np.append(tokens, prompt(300, n)) for n in range(1, 5)]
        for engine, each in zip(engines, longer, strict=False):
            engine.demote(each)
        vault.delay_s, vault.keys_asked = 1.0, 0
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda pair: pair[0].restore(pair[1]), zip(engines, longer, strict=False)))
        for got, each in zip(answers, longer, strict=True):
            assert_state(got, engines[0].layout, each, 2299)
        # Seven shared blocks once; of each prompt the block where they part and the tail.
        assert vault.keys_asked == 7 + 4 * 2
    finally:
        cluster.close()
        vault.stop()


def test_a_restore_that_hangs_does_not_hold_up_the_others(cluster: Cluster):
    """One engine waits for a frozen vault; another, whose state is here, is served meanwhile."""
    vault = FaultyVault(token=TOKEN).start()
    try:
        cluster.agent(kv_cold=[vault.address], local_vault_bytes=64 << 20, frame_timeout_s=3.0)
        slow, quick = cluster.engine(weights=b"slow").ready(), cluster.engine(weights=b"quick").ready()
        tokens = prompt(700)
        for engine in (slow, quick):
            engine.demote(tokens)
        vault.fault = "freeze-all"
        waits: list[float] = []

        def restores(engine: Engine) -> None:
            for _ in range(5):
                began = time.monotonic()
                assert_state(engine.restore(tokens), engine.layout, tokens, 699)
                waits.append(time.monotonic() - began)

        all_at_once([lambda: restores(quick), lambda: restores(slow)])
        assert max(waits) < 8.0, waits
    finally:
        cluster.close()
        vault.stop()
