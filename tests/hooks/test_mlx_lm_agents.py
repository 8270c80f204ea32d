"""The real server, the real inference agent and real vaults, each in its own process."""

import sys
import tempfile
from pathlib import Path

import pytest
from test_mlx_lm_server import OTHER, TEXT, serve, wait_for  # noqa: F401 - serve is a fixture

sys.path.append(str(Path(__file__).resolve().parents[1] / "agents"))


@pytest.fixture
def cluster(monkeypatch):
    """In a short path: a Unix socket's name has at most 107 bytes."""
    from agent_processes import Cluster

    monkeypatch.delenv("TIERKV_SOCKET", raising=False)
    with tempfile.TemporaryDirectory(prefix="tierkv-") as home:
        running = Cluster(Path(home))
        yield running
        running.close()


def stored(vault, records):
    """Waits until the vault holds at least so many records."""
    wait_for(lambda: sum(tier.records for tier in vault.snapshot().tiers) >= records, 40)


def evict(server, times=3):
    for n in range(times):
        server.complete(f"{n} {OTHER}")


def restored_again(server, cold):
    """Waits until the evicted text comes back from the vaults: the model's identity is known, the state is stored."""
    wait_for(lambda: server.complete(TEXT) == (cold, len(TEXT) - 1) or evict(server), 60)


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text"])
def test_cold_evicted_and_restored_from_vaults_with_the_same_text(cluster, serve, name):  # noqa: F811
    kv, ssm = cluster.vault("kv-vault"), cluster.vault("ssm-vault")
    cluster.agent(kv, ssm)
    with serve(name, cluster.socket, "--prompt-cache-size", "2") as server:
        wait_for(lambda: "connected to the inference agent" in server.said())
        cold, cached = server.complete(TEXT)
        assert cached == 0
        evict(server)
        restored_again(server, cold)
        assert "restored 495 of 496 tokens" in server.said()
        assert kv.tier("kv").records > 0
        assert (ssm.tier("ssm").records > 0) == (name == "qwen3_next")
        assert server.healthy()


def test_frozen_and_killed_agents_and_vaults_cost_a_miss_and_nothing_else(cluster, serve):  # noqa: F811
    kv = cluster.vault("kv-vault")
    agent = cluster.agent(kv)
    with serve("llama", cluster.socket, "--prompt-cache-size", "1") as server:
        wait_for(lambda: "connected to the inference agent" in server.said())
        cold, _ = server.complete(TEXT)
        stored(kv, 2)
        agent.freeze()
        evict(server, 2)
        assert server.complete(TEXT) == (cold, 0)
        agent.thaw()
        agent.kill()
        evict(server, 2)
        assert server.complete(TEXT) == (cold, 0)
        cluster.agent(kv)
        wait_for(lambda: server.said().count("connected again to the inference agent") > 0, 40)
        evict(server)
        restored_again(server, cold)
        evict(server, 2)
        kv.kill()
        assert server.complete(TEXT) == (cold, 0)
        assert server.healthy()
        assert "Traceback" not in server.said()
