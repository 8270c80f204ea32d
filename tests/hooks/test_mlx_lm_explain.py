"""The real server, a real agent and a real vault: ``tierkv explain`` tells of every kind of request."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_mlx_lm_agents import evict, restored_again, stored
from test_mlx_lm_server import TEXT, serve, wait_for  # noqa: F401 - serve is a fixture

sys.path.append(str(Path(__file__).resolve().parents[1] / "agents"))


@pytest.fixture
def cluster(monkeypatch):
    from agent_processes import Cluster

    monkeypatch.delenv("TIERKV_SOCKET", raising=False)
    with tempfile.TemporaryDirectory(prefix="tierkv-") as home:
        running = Cluster(Path(home))
        yield running
        running.close()


def explain(agent, home, *words):
    from agent_processes import TOKEN

    command = [sys.executable, "-m", "tierkv", "explain", "--connect", agent.address, *words]
    environment = {**os.environ, "TIERKV_HOME": str(home), "TIERKV_TOKEN": TOKEN}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=home)
    assert done.returncode == 0, done.stderr
    return done.stdout


def told(agent, home, outcome, position=None):
    """What explain says of the last request, once the hook has told how it went on."""
    found = {}

    def there():
        found.update(json.loads(explain(agent, home, "--json")))
        request = found["request"]
        return request["outcome"] == outcome and position in (None, request["position"])

    wait_for(there, 30)
    return found


def test_cold_hot_and_restored_requests_are_explained(cluster, serve):  # noqa: F811
    kv = cluster.vault("kv-vault")
    agent = cluster.agent(kv, break_even=False, quality_sample=1)
    n = len(TEXT)
    with serve("llama", cluster.socket, "--prompt-cache-size", "2") as server:
        wait_for(lambda: "connected to the inference agent" in server.said())
        cold, _ = server.complete(TEXT)
        assert told(agent, cluster.home, "computed")["schema"] == "tierkv.explain/1"
        stored(kv, 2)
        assert server.complete(TEXT) == (cold, n - 1)
        hot = told(agent, cluster.home, "hot", n - 1)
        assert hot["sentence"] == f"{n - 1:,} of {n:,} tokens were in the engine's own cache"
        evict(server)
        restored_again(server, cold)
        restored = told(agent, cluster.home, "restored", n - 1)
        assert restored["sentence"].startswith(f"restored {n - 1:,} of {n:,} tokens from {kv.address} in ")
        hot_tier, kv_tier = restored["tiers"][0], next(tier for tier in restored["tiers"] if tier["tier"] == "kv")
        assert hot_tier["reason"] == "evicted"
        assert "the engine's prompt cache was full" in hot_tier["detail"]
        assert (kv_tier["found_tokens"], kv_tier["used_tokens"]) == (n - 1, n - 1)
        assert f"{n:,}" in explain(agent, cluster.home, "--list")
        # Nothing else to do: the restored prompt is prefilled again and compared. It is stored without loss, and
        # prefilled in other steps than before.
        wait_for(lambda: any(engine.quality_samples for engine in agent.snapshot().engines), 40)
        (engine,) = [engine for engine in agent.snapshot().engines if engine.quality_samples]
        assert (engine.quality_codec, engine.quality_top1_fraction) == ("lossless", 1.0)
        assert engine.quality_kl_mean < 1e-6
        assert engine.quality_snr_db_min == 0.0 or engine.quality_snr_db_min > 80
        assert engine.quality_raised_layers == 0
        text = cluster.home / "prompt.txt"
        text.write_text(TEXT)
        folder = server_model(server)
        shown = explain(agent, cluster.home, "--prompt", str(text), "--tokenizer", folder)
        assert shown.startswith(f"{n - 1:,} of {n:,} tokens would be restored")
        assert "jumps over" not in shown


def server_model(server):
    words = Path(f"/proc/{server.process.pid}/cmdline").read_bytes().split(b"\0")
    return words[words.index(b"--model") + 1].decode()
