"""``tierkv vault`` and its operations, against real vaults on disk and in memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_agents import VaultThread, _store

from tierkv.cli.main import parse


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def on_disk(home, tmp_path):
    with VaultThread(persist_path=tmp_path / "vault", ram_bytes=4 << 20, disk_bytes=64 << 20) as running:
        yield running


def test_vault_without_an_operation_is_still_the_vault_itself():
    from tierkv.cli.agent import _agent

    assert parse(["vault", "--port", "50051"]).run is _agent
    assert parse(["vault", "stats", "--json"]).run is not _agent


def test_stats_tell_what_is_on_disk_and_in_memory(run, on_disk, tmp_path):
    on_disk.store(model="m", blocks=3)
    told = run("vault", "stats", "--connect", on_disk.address, "--json").json
    assert told["schema"] == "tierkv.vault-stats/1"
    [vault] = told["vaults"]
    assert (vault["records"], vault["epoch"], vault["policy"], vault["loading"]) == (3, 0, "lru", False)
    assert vault["disk"]["folder"] == str(tmp_path / "vault")
    assert vault["disk"]["durability"] == "batched"
    assert vault["disk"]["disk_cap_bytes"] == 64 << 20
    assert vault["disk"]["hot_records"] == 3
    text = run("vault", "stats", "--connect", on_disk.address).out
    assert "3 records" in text
    assert str(tmp_path / "vault") in text


def test_a_conversation_exported_from_one_vault_is_taken_in_by_another_whatever_its_epoch(
    run, on_disk, vault, tmp_path
):
    leaf = on_disk.store(model="talk", blocks=3)
    on_disk.store(model="other", blocks=1, seed=5)
    vault.store(model="old", seed=9)
    assert run("purge", "--model", "old", "--yes", "--connect", vault.address).code == 0
    path = str(tmp_path / "talk.tkx")
    done = run("vault", "export", path, "--model", "talk", "--connect", on_disk.address, "--json")
    assert done.code == 0, done.err
    assert lines(done.out)[-1]["finished"] is True
    assert os.stat(path).st_mode & 0o777 == 0o600
    taken = run("vault", "import", path, "--connect", vault.address, "--json")
    assert taken.code == 0, taken.err
    last = lines(taken.out)[-1]
    assert (last["schema"], last["done"], last["finished"], last["refused"]) == ("tierkv.vault-import/1", 3, True, {})
    [prefix] = run("prefixes", "--connect", vault.address, "--json").json["prefixes"]
    assert (prefix["key"], prefix["model"], prefix["tokens"]) == (leaf.hex(), "talk", 768)


def test_of_several_vaults_each_takes_in_the_records_of_its_tier(run, on_disk, home, tmp_path):
    """Blocks are attention state: an SSM vault takes them only when no KV vault is asked."""
    on_disk.store(model="talk", blocks=3)
    path = str(tmp_path / "talk.tkx")
    assert run("vault", "export", path, "--all", "--connect", on_disk.address).code == 0
    with VaultThread(name="a") as kv, VaultThread(name="b", role="ssm-vault") as ssm:
        both = run("vault", "import", path, "--connect", kv.address, "--connect", ssm.address, "--json")
        assert both.code == 0, both.err
        assert {each["vault"]: each["done"] for each in lines(both.out) if each["finished"]} == {
            kv.address: 3, ssm.address: 0,
        }  # fmt: skip
        alone = run("vault", "import", path, "--connect", ssm.address, "--json")
        assert [each["done"] for each in lines(alone.out) if each["finished"]] == [3]


@pytest.mark.parametrize("cut", [20, 9000, -1])
def test_a_file_that_was_cut_short_gives_what_is_whole_and_says_so(run, on_disk, vault, tmp_path, cut):
    on_disk.store(model="talk", blocks=3)
    path = tmp_path / "talk.tkx"
    assert run("vault", "export", str(path), "--all", "--connect", on_disk.address).code == 0
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    taken = run("vault", "import", str(path), "--connect", vault.address)
    assert taken.code == (1 if cut == 20 else 4)
    assert ("nothing was taken" if cut == 20 else "what came before is in") in taken.err
    assert "done" not in taken.out
    stored = run("vault", "stats", "--connect", vault.address, "--json").json["vaults"][0]["records"]
    assert stored == {20: 0, 9000: 1, -1: 3}[cut]


def test_drain_copies_everything_to_another_vault(run, on_disk, vault):
    leaf = on_disk.store(model="talk", blocks=4)
    done = run("vault", "drain", "--connect", on_disk.address, "--to", vault.address, "--all", "--json")
    assert done.code == 0, done.err
    last = lines(done.out)[-1]
    assert (last["done"], last["total"], last["finished"], last["refused"]) == (4, 4, True, {})
    [prefix] = run("prefixes", "--connect", vault.address, "--json").json["prefixes"]
    assert prefix["key"] == leaf.hex()


def test_warm_and_compact_say_how_far_they_are(run, on_disk):
    on_disk.store(model="talk", blocks=4)
    warm = run("vault", "warm", "--all", "--connect", on_disk.address, "--json")
    assert warm.code == 0, warm.err
    assert lines(warm.out)[-1]["done"] == 4
    compact = run("vault", "compact", "--connect", on_disk.address, "--json")
    assert compact.code == 0, compact.err
    assert lines(compact.out)[-1]["finished"] is True


def test_fsck_finds_what_was_broken_in_a_vault_that_runs_and_in_its_folder(run, home, tmp_path):
    folder = tmp_path / "vault"
    with VaultThread(persist_path=folder, ram_bytes=4 << 20, disk_bytes=64 << 20) as running:
        running.store(model="talk", blocks=3)
        [segment] = folder.glob("*.seg")
        size = segment.stat().st_size
        fd = os.open(segment, os.O_RDWR)
        os.pwrite(fd, b"\xff\x00", size - 1000)
        os.close(fd)
        assert run("vault", "fsck", str(folder)).code == 1  # in use
        looked = run("vault", "fsck", "--connect", running.address, "--json")
        assert looked.code == 1, looked.err
        [finding] = [line["finding"] for line in lines(looked.out) if "finding" in line]
        assert (finding["reason"], finding["repaired"]) == ("bad_checksum", False)
    offline = run("vault", "fsck", str(folder), "--json")
    assert offline.code == 1
    assert [line["finding"]["reason"] for line in lines(offline.out) if "finding" in line] == ["bad_checksum"]
    repaired = run("vault", "fsck", str(folder), "--repair")
    assert repaired.code == 0
    assert "(repaired)" in repaired.out
    assert run("vault", "fsck", str(folder)).code == 0


def start(folder: Path, home: Path, ready: Path) -> tuple[subprocess.Popen, str]:
    """The real program with a folder; its address once it serves."""
    config = folder.parent / "vault.toml"
    config.write_text(f"[vault]\npersist_path = '{folder}'\nram_bytes = '8MiB'\ndisk_bytes = '64MiB'\n")
    ready.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "tierkv", "vault", "--port", "0", "--config", str(config), "--ready-file", str(ready)],
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 60
    while not ready.exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    return process, f"127.0.0.1:{ready.read_text().strip()}"


def test_a_vault_that_is_killed_under_load_serves_all_it_acknowledged_when_it_is_back(run, home, tmp_path):
    import asyncio
    import threading

    folder, ready = tmp_path / "vault", tmp_path / "ready"
    acknowledged: list[bytes] = []
    for turn in range(3):
        process, address = start(folder, home, ready)

        def load(address=address, turn=turn) -> None:
            for n in range(10_000):
                try:
                    acknowledged.append(asyncio.run(_store(address, "talk", 2, turn * 100_000 + n)))
                except Exception:
                    return

        thread = threading.Thread(target=load)
        before = len(acknowledged)
        thread.start()
        while len(acknowledged) < before + 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        thread.join()
    process, address = start(folder, home, ready)
    try:
        here = {p["key"] for p in run("prefixes", "--limit", "9999", "--connect", address, "--json").json["prefixes"]}
        assert {key.hex() for key in acknowledged} <= here
        assert run("vault", "fsck", "--connect", address).code == 0
    finally:
        process.terminate()
        process.wait()
