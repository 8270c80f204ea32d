"""The real mlx_lm.server over HTTP, in its own process, with the hook in it and an agent in this one."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from importlib.metadata import version

import pytest
from fake_agent import FakeAgent

from tierkv.demo.processes import free_port

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 8
OTHER = "Something else entirely, long enough to be worth an entry of its own in the cache."


class Server:
    def __init__(self, process, port, log):
        self.process, self.port, self.log = process, port, log

    def complete(self, text, max_tokens=6, **more):
        """(text, tokens that were cached) of a completion."""
        body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0.0, **more}
        answer = self._post("/v1/completions", body)
        cached = answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return answer["choices"][0]["text"], cached

    def chat(self, messages, max_tokens=6):
        answer = self._post("/v1/chat/completions", {"messages": messages, "max_tokens": max_tokens})
        cached = answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return answer["choices"][0]["message"].get("content", ""), cached

    def _post(self, path, body):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        end = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    return json.load(response)
            except ConnectionResetError:
                # mlx-lm's server lets five connections wait to be accepted. Of more at once, with or without the
                # hook, the kernel resets some that nobody has read from; a handler that fails leaves a traceback.
                if time.monotonic() > end or "Traceback" in self.said():
                    raise
                time.sleep(0.1)

    def healthy(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def said(self):
        return self.log.read_text()


@pytest.fixture
def serve(tmp_path, model_folders):
    """serve("llama", agent_path, "--prompt-cache-size", "1") as a context manager: a Server that answers."""

    @contextmanager
    def serving(name, agent_path, *arguments):
        port = free_port()
        log = tmp_path / f"server-{port}.log"
        command = [
            sys.executable, "-m", "tierkv.hooks.mlx_lm", "--tierkv-socket", str(agent_path), "--",
            "--model", str(model_folders(name)), "--port", str(port), *arguments,
        ]  # fmt: skip
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        server = Server(process, port, log)
        try:
            wait_for(lambda: server.healthy() or process.poll() is not None, 90)
            assert process.poll() is None, server.said()
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise

    return serving


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def connected(agent):
    wait_for(lambda: agent.reports and agent.announced)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_prompt_goes_cold_hot_evicted_and_restored_with_the_same_answer(agent, serve, name):
    tokens = len(TEXT)
    with serve(name, agent.path, "--prompt-cache-size", "2") as server:
        connected(agent)
        cold, cached = server.complete(TEXT)
        assert cached == 0
        hot, cached = server.complete(TEXT)
        assert (hot, cached) == (cold, tokens - 1)
        wait_for(lambda: agent.entries)
        for n in range(3):
            server.complete(f"{n} {OTHER}")
        assert agent.ops("restore")[-1]["have"] <= 2
        restored, cached = server.complete(TEXT)
        assert (restored, cached) == (cold, tokens - 1)
        again, cached = server.complete(TEXT)  # twice the same: fully covered
        assert (again, cached) == (cold, tokens - 1)
        assert server.healthy()
        wait_for(lambda: agent.reports[-1]["hits_by_kind"].get("restored"))
        assert agent.reports[-1]["evictions"] > 0
        assert agent.reports[-1]["prefill_tokens_per_s"] > 0
        assert agent.reports[-1]["used_bytes"] > 0
        assert not agent.reports[-1]["not_restored"].get("hook_error")


def test_a_conversation_is_restored_to_the_token(agent, serve):
    with serve("llama", agent.path, "--prompt-cache-size", "1") as server:
        connected(agent)
        messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": "And then?"}]
        answer, _ = server.chat(messages)
        first = len(f"[system] {TEXT}\n[user] And then?\n[assistant] ")
        server.complete(OTHER * 2)
        wait_for(lambda: max((e.position for e in agent.entries), default=0) > first)
        server.complete(OTHER)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
        _, cached = server.chat(messages)
        assert cached >= first
        assert server.healthy()


def test_the_agent_may_die_at_any_time_and_come_back(agent, serve, tmp_path):
    with serve("llama", agent.path, "--prompt-cache-size", "1") as server:
        connected(agent)
        cold, _ = server.complete(TEXT)
        agent.stop()
        agent.stop = lambda: None
        server.complete(OTHER)
        assert server.complete(TEXT) == (cold, 0)
        wait_for(lambda: "no inference agent" in server.said())
        again = FakeAgent(agent.path).start()
        try:
            connected(again)
            server.complete(OTHER)
            wait_for(lambda: again.entries)
            server.complete(OTHER[::-1])
            assert server.complete(OTHER)[1] == len(OTHER) - 1
            assert server.healthy()
        finally:
            again.stop()
        assert server.said().count("no inference agent") == 1
        assert "Traceback" not in server.said()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_without_an_agent_the_server_serves_and_ends_as_it_was_asked(serve, tmp_path, number, code):
    with serve("llama", tmp_path / "nobody.sock") as server:
        cold, _ = server.complete(TEXT)
        assert server.complete(TEXT) == (cold, len(TEXT) - 1)
        wait_for(lambda: "no inference agent" in server.said())
        server.process.send_signal(number)
        assert server.process.wait(20) == code
        assert "Traceback" not in server.said()


@pytest.mark.skipif(version("mlx-lm").startswith("0.31."), reason="its server has no --kv-bits")
def test_quantised_caches_come_back(agent, serve):
    arguments = ("--prompt-cache-size", "1", "--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "64")
    with serve("quantisable", agent.path, *arguments) as server:
        connected(agent)
        server.complete(TEXT)
        server.complete(OTHER)
        wait_for(lambda: any(e.model == 1 for e in agent.entries))
        assert server.complete(TEXT)[1] == len(TEXT) - 1
        assert server.healthy()


def test_requests_at_the_same_time_are_all_answered(agent, serve):
    from concurrent.futures import ThreadPoolExecutor

    with serve("qwen3_next", agent.path, "--prompt-cache-size", "2") as server:
        connected(agent)
        texts = [f"{n} {TEXT}" for n in range(4)]
        with ThreadPoolExecutor(4) as pool:
            first = list(pool.map(server.complete, texts))
            second = list(pool.map(server.complete, texts))
        assert [cached for _, cached in first] == [0] * 4
        assert len(second) == 4
        assert server.healthy()
