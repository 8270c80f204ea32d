"""Sixteen requests at once at a real server with hook, agent and vaults; one that decodes meanwhile; a draft model."""

import json
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_mlx_lm_server import TEXT, serve, wait_for  # noqa: F401 - serve is a fixture
from tokenizers import pre_tokenizers

sys.path.append(str(Path(__file__).resolve().parents[1] / "agents"))

# Four conversations that share their first 496 tokens, in four variants that share 60 more.
PROMPTS = [f"{TEXT}{'ABCD'[n % 4] * 60} and then {n:02d} tales were told." for n in range(16)]


@pytest.fixture
def cluster():
    """In a short path: a Unix socket's name has at most 107 bytes."""
    from agent_processes import Cluster

    with tempfile.TemporaryDirectory(prefix="tierkv-") as home:
        running = Cluster(Path(home))
        yield running
        running.close()


def ready(server):
    """The server's agent knows the model: what is computed from now on is stored."""
    wait_for(lambda: "connected to the inference agent" in server.said(), 60)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_sixteen_requests_at_once_give_the_answers_of_one_at_a_time(cluster, serve, name):  # noqa: F811
    kv, ssm = cluster.vault("kv-vault"), cluster.vault("ssm-vault")
    agent = cluster.agent(kv, ssm, min_store_tokens=16, min_restore_tokens=16)
    with serve(name, cluster.socket, "--prompt-cache-size", "3") as server:
        ready(server)
        alone = [server.complete(prompt)[0] for prompt in PROMPTS]
        wait_for(lambda: kv.tier("kv").records > 16, 60)
        with ThreadPoolExecutor(16) as pool:
            for _ in range(2):
                together = list(pool.map(server.complete, PROMPTS))
                assert [text for text, _ in together] == alone
                assert sum(cached >= len(TEXT) - 1 for _, cached in together) >= 8, [c for _, c in together]
        assert server.healthy()
        assert "Traceback" not in server.said()
    counters = agent.snapshot().counters
    assert counters["restores"] > 0
    assert not [name for name in counters if "crashed" in name or "malformed" in name], counters


def gaps(server, stop):
    """The longest pause between two tokens of a stream that is decoded until ``stop`` is set."""
    letter = sorted(pre_tokenizers.ByteLevel.alphabet()).index("a")  # a token that is text, so that it is sent at once
    body = {"prompt": "Go on: ", "max_tokens": 4000, "temperature": 0.0, "stream": True, "logit_bias": {letter: 1000}}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    longest, tokens, last = 0.0, 0, 0.0
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data:") and b"[DONE]" not in line:
                now = time.monotonic()
                longest, tokens, last = max(longest, now - last if last else 0.0), tokens + 1, now
            if stop.is_set():
                break
    return longest, tokens


def test_a_request_that_only_decodes_is_held_up_no_longer_than_a_restore_may_take(cluster, serve):  # noqa: F811
    """Others come meanwhile, and the vault freezes: the agent gives up on it, and the stream goes on."""
    kv = cluster.vault("kv-vault")
    cluster.agent(kv, min_store_tokens=16, min_restore_tokens=16)
    with serve("llama", cluster.socket, "--prompt-cache-size", "2") as server:
        ready(server)
        for prompt in PROMPTS[:4]:
            server.complete(prompt)
        wait_for(lambda: kv.tier("kv").records > 4, 60)
        kv.freeze()
        stop, found = threading.Event(), []
        stream = threading.Thread(target=lambda: found.append(gaps(server, stop)))
        stream.start()
        for prompt in PROMPTS[:8]:
            server.complete(prompt)
        stop.set()
        stream.join(60)
        kv.thaw()
        longest, tokens = found[0]
        assert tokens > 10
        assert longest < 10.0
        assert server.healthy()


def test_a_draft_model_beside_the_model_changes_no_answer(cluster, serve, model_folders):  # noqa: F811
    kv = cluster.vault("kv-vault")
    cluster.agent(kv, min_store_tokens=16, min_restore_tokens=16)
    with serve("llama", cluster.socket, "--prompt-cache-size", "2") as server:
        plain = [server.complete(prompt)[0] for prompt in PROMPTS[:3]]
    draft = ("--draft-model", str(model_folders("one_head")), "--num-draft-tokens", "3")
    with serve("llama", cluster.socket, "--prompt-cache-size", "1", *draft) as server:
        ready(server)
        assert [server.complete(prompt)[0] for prompt in PROMPTS[:3]] == plain

        def restored():
            answers = [server.complete(prompt) for prompt in PROMPTS[:3]]
            assert [text for text, _ in answers] == plain
            return answers[0][1] > len(TEXT)

        wait_for(restored, 60)
        assert "restored" in server.said()
        assert "Traceback" not in server.said()


# Chunks of 256: a longer prompt's are whole at the end of its answer only, where this prompt does not go on.
@pytest.mark.parametrize(
    ("name", "prompt"), [("mamba2", PROMPTS[0]), ("falcon_h1", PROMPTS[1]), ("llama4", TEXT[:200])]
)
def test_every_kind_of_cache_is_restored_in_a_real_server(cluster, serve, name, prompt):  # noqa: F811
    kv, ssm = cluster.vault("kv-vault"), cluster.vault("ssm-vault")
    cluster.agent(kv, ssm, min_store_tokens=16, min_restore_tokens=16)
    with serve(name, cluster.socket, "--prompt-cache-size", "1") as server:
        ready(server)
        cold, cached = server.complete(prompt)
        assert cached == 0

        def restored():
            for number in range(3):
                server.complete(f"{number} something else that is long enough for an entry")
            text, cached = server.complete(prompt)
            assert text == cold
            return cached == len(prompt) - 1

        wait_for(restored, 90)
        assert f"restored {len(prompt) - 1} of" in server.said()
        assert server.healthy()
