"""A vault that does wrong in every way there is: the right answer in bounded time, a reason, and all is well again.

For each fault: what comes back is bit for bit the engine's own or nothing; the engine waits a few seconds at most; the
agent counts why; once the vault does right again the same agent and engine restore; descriptors, threads and
memory of the agent are what they were, and the whole arena is free.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from agent_processes import (
    TOKEN,
    AgentProcess,
    Cluster,
    Engine,
    assert_state,
    environment,
    eventually,
    prompt,
    rows_layout,
    state_of,
)
from faulty_vault import FAULTS, LISTENERS, FaultyVault, Listener

from tierkv.handoff.client import NotRestored, Restored

LAYOUT = rows_layout(layers=4, heads=4, dim=32)
ARENA_BYTES = 8 << 20
# Several times what each fault takes: 3 s at most, and this machine may be busy.
BOUND_S = 8.0


@pytest.fixture(scope="module")
def vault() -> Iterator[FaultyVault]:
    running = FaultyVault(token=TOKEN).start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def place(vault: FaultyVault) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="tierkv-") as home:
        running = Cluster(Path(home))
        running.agent(kv_cold=[vault.address], kv_codec="raw", handoff_bytes=ARENA_BYTES)
        yield running
        running.close()


@pytest.fixture(scope="module")
def engine(place: Cluster) -> Engine:
    return place.engine(layout=LAYOUT).ready()


@pytest.fixture
def agent(place: Cluster) -> AgentProcess:
    return place.processes[0]


def reasons(agent: AgentProcess) -> dict[str, int]:
    """Everything that the agent has counted for a reason."""
    snapshot = agent.snapshot()
    counted = {name: n for name, n in snapshot.counters.items() if "_" in name}
    for tier in snapshot.tiers:
        counted |= {f"{tier.name} miss {reason}": n for reason, n in tier.miss_reasons.items()}
        counted |= {f"{tier.name} refused {reason}": n for reason, n in tier.refusals.items()}
    return counted


def grown(before: dict[str, int], after: dict[str, int]) -> set[str]:
    return {name for name, n in after.items() if n > before.get(name, 0)}


def asked_again(engine: Engine, tokens) -> Restored | None:
    """The engine computes the prompt anew, hands it over where it is wanted, and asks for it."""
    engine.demote(tokens, stored=False)
    engine.mover.drain(5.0, stored=True)  # a record that waits to be sent would be read from the queue
    got = engine.restore(tokens)
    return got if isinstance(got, Restored) and got.position == len(tokens) - 1 else None


def holding(process: psutil.Process) -> tuple[int, int]:
    return process.num_fds(), process.num_threads()


# What the agent says of each; any of them will do.
EXPECTED = {
    "truncate": {"wrong_service"},
    "cut-short": {"wrong_service", "cut_short"},
    "damage": {"damaged", "bad_checksum"},
    "damage-late": {"damaged", "bad_checksum"},
    "reorder": {"wrong_service"},
    "duplicate": {"wrong_service"},
    "oversize": {"wrong_service", "oversized"},
    "too-long": {"wrong_service"},
    "huge-message": {"wrong_service", "failed", "refused"},
    "other-version": {"wrong_service"},
    "other-prompt": {"foreign_key"},
    "garbage": {"wrong_service"},
    "empty": {"wrong_service", "cut_short"},
    "missing": {"evicted"},
    "wrong-index": {"wrong_service"},
    "overclaim": {"never_stored"},
    "probe-garbage": {"wrong_service"},
    "freeze": {"timed_out"},
    "freeze-all": {"timed_out"},
    "trickle": {"timed_out"},
    "deny": {"not_authenticated"},
    "unimplemented": {"wrong_service"},
    "internal": {"failed", "refused", "unreachable"},
}


@pytest.mark.parametrize("fault", EXPECTED)
def test_a_fault_in_a_restore(vault: FaultyVault, engine: Engine, agent: AgentProcess, fault: str):
    seed = list(FAULTS).index(fault)
    tokens, other = prompt(900, seed), prompt(900, seed + 1000)
    vault.fault = "none"
    eventually(lambda: asked_again(engine, other))
    eventually(lambda: asked_again(engine, tokens))
    before, process = reasons(agent), psutil.Process(agent.process.pid)
    held, memory = holding(process), process.memory_info().rss
    vault.fault = fault
    began = time.monotonic()
    got = engine.restore(tokens)
    assert time.monotonic() - began < BOUND_S
    if isinstance(got, Restored):
        assert_state(got, LAYOUT, tokens, got.position)
    else:
        assert got.reason
    new = grown(before, reasons(agent))
    print(fault, "->", got if isinstance(got, NotRestored) else got.position, sorted(new))
    if not isinstance(got, Restored) or got.position < 899:
        assert any(name.endswith(tuple(EXPECTED[fault])) for name in new), (fault, new)
    vault.fault = "none"
    assert_state(eventually(lambda: asked_again(engine, tokens)), LAYOUT, tokens, 899)
    assert agent.alive
    eventually(lambda: all(now <= was + 3 for now, was in zip(holding(process), held, strict=True)))
    assert process.memory_info().rss < memory + (48 << 20)


def test_the_whole_arena_is_free_after_all_of_them(engine: Engine, vault: FaultyVault):
    """A restore of four times the arena goes through it: no region was lost."""
    vault.fault = "none"
    tokens = prompt(9000, 77)
    assert sum(array.nbytes for array in state_of(LAYOUT, tokens).values()) > 4 * ARENA_BYTES
    assert_state(eventually(lambda: asked_again(engine, tokens), 60), LAYOUT, tokens, 8999)


def test_every_fault_has_its_test():
    stores = {"full", "internal", "deny", "freeze-all"}
    assert EXPECTED.keys() | stores | {"none", "crash"} == FAULTS.keys()


@pytest.mark.parametrize(("fault", "slug"), [("full", "full"), ("deny", "not_authenticated"), ("internal", "failed")])
def test_a_fault_in_a_store(vault: FaultyVault, engine: Engine, agent: AgentProcess, fault: str, slug: str):
    tokens = prompt(700, 5000 + list(FAULTS).index(fault))
    before = reasons(agent)
    vault.fault = fault
    engine.demote(tokens, stored=False)
    eventually(lambda: any(slug in name or "refused" in name for name in grown(before, reasons(agent))))
    vault.fault = "none"
    assert_state(eventually(lambda: asked_again(engine, tokens)), LAYOUT, tokens, 699)


@pytest.mark.parametrize("kind", [*LISTENERS, "nobody"])
def test_something_else_on_the_port(kind: str):
    """Until a vault comes there: then the same agent finds it without a restart."""
    listener = Listener("silent" if kind == "nobody" else kind)
    if kind == "nobody":
        listener.stop()
    with tempfile.TemporaryDirectory(prefix="tierkv-") as home:
        place = Cluster(Path(home))
        agent = place.agent(kv_cold=[listener.address], handoff_bytes=ARENA_BYTES)
        try:
            engine = place.engine().ready()
            tokens = prompt(600)
            for _ in range(3):
                began = time.monotonic()
                got = engine.restore(tokens)
                assert time.monotonic() - began < BOUND_S
                assert isinstance(got, NotRestored)
                assert got.reason in ("unreachable", "timed_out", "wrong_service", "breaker_open"), got
            assert agent.tier("kv").miss_reasons
            listener.stop()
            vault = FaultyVault(port=listener.port, token=TOKEN).start()
            try:
                assert_state(eventually(lambda: asked_again(engine, tokens)), engine.layout, tokens, 599)
            finally:
                vault.stop()
        finally:
            place.close()


def test_it_can_be_used_by_hand(tmp_path: Path):
    program = [sys.executable, str(Path(__file__).with_name("faulty_vault.py"))]
    listed = subprocess.run([*program, "--list"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert all(name in listed for name in (*FAULTS, *LISTENERS))
    with subprocess.Popen(
        [*program, "--port", "0", "--fault", "truncate", "--token", TOKEN], text=True, stdin=subprocess.PIPE,
        stderr=subprocess.PIPE, env=environment(tmp_path),
    ) as running:  # fmt: skip
        assert running.stderr is not None
        assert running.stdin is not None
        assert "with the fault 'truncate'" in running.stderr.readline()
        running.stdin.write("none\n")
        running.stdin.flush()
        assert "fault 'none'" in running.stderr.readline()
        running.kill()
