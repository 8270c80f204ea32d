"""A real engine over vaults with folders: killed under load and started again, and a conversation carried elsewhere."""

import os
import subprocess
import sys
import threading

import pytest
from test_mlx_lm_agents import cluster, evict, restored_again  # noqa: F401 - cluster is a fixture
from test_mlx_lm_server import OTHER, TEXT, serve, wait_for  # noqa: F401 - serve is a fixture


def program(*words):
    """The command line, with the token of the tests' agents."""
    from agent_processes import TOKEN

    done = subprocess.run(
        [sys.executable, "-m", "tierkv", *words], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "TIERKV_TOKEN": TOKEN},
    )  # fmt: skip
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def durable(running, role, folder):
    """A vault in ``folder``; started again at the same port where it was before."""
    limits = {"persist_path": str(folder), "disk_bytes": 256 << 20, "ram_bytes": 8 << 20, "min_free_bytes": 0}
    return running.vault(role, **limits)


def started_again(running, vault):
    """The vault was killed without a farewell and runs again, at its place."""
    vault.kill()
    return running.vault(**{**vault.options, "port": vault.port})


@pytest.mark.parametrize("name", ["qwen3_next"])
def test_killed_under_load_started_again_and_carried_to_another_machine(cluster, serve, tmp_path, name):  # noqa: F811
    kv, ssm = (durable(cluster, f"{tier}-vault", tmp_path / tier) for tier in ("kv", "ssm"))
    cluster.agent(kv, ssm)
    with serve(name, cluster.socket, "--prompt-cache-size", "2") as server:
        wait_for(lambda: "connected to the inference agent" in server.said())
        cold, cached = server.complete(TEXT)
        assert cached == 0
        evict(server)
        restored_again(server, cold)
        stop, answers = threading.Event(), []

        def load():
            while not stop.is_set():
                answers.append(server.complete(f"{len(answers)} {OTHER} {OTHER}", max_tokens=1))

        thread = threading.Thread(target=load)
        thread.start()
        try:
            for _ in range(2):
                before = len(answers)
                wait_for(lambda before=before: len(answers) > before + 2, 60)
                kv, ssm = started_again(cluster, kv), started_again(cluster, ssm)
        finally:
            stop.set()
            thread.join(60)
        evict(server)
        restored_again(server, cold)
        assert "Traceback" not in server.said()
        assert server.healthy()
    file = tmp_path / "talk.tkx"
    program("vault", "export", str(file), "--all", "--connect", kv.address, "--connect", ssm.address)
    for vault in (kv, ssm):
        program("vault", "fsck", "--connect", vault.address)
    elsewhere = type(cluster)(cluster.home / "b")
    try:
        other_kv, other_ssm = (durable(elsewhere, f"{tier}-vault", tmp_path / f"b-{tier}") for tier in ("kv", "ssm"))
        program("vault", "import", str(file), "--connect", other_kv.address, "--connect", other_ssm.address)
        elsewhere.agent(other_kv, other_ssm)
        with serve(name, elsewhere.socket, "--prompt-cache-size", "2") as server:
            wait_for(lambda: "connected to the inference agent" in server.said())
            wait_for(lambda: server.complete(TEXT) == (cold, len(TEXT) - 1) or evict(server), 60)
            assert f"restored {len(TEXT) - 1} of" in server.said()
    finally:
        elsewhere.close()
