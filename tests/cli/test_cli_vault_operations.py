"""What the operations of ``tierkv vault`` say of records that did not arrive, and what they leave as it was."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
from cli_agents import VaultThread, config_file

from tierkv.cli.operations_import import Routes, Taker
from tierkv.identity.blocks import BLOCK_TOKENS, PromptChain

BLOCKS = 60


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def last(ran) -> dict:
    return [each for each in lines(ran.out) if each.get("finished")][-1]


@pytest.fixture
def on_disk(home, tmp_path):
    with VaultThread(persist_path=tmp_path / "vault", ram_bytes=4 << 20, disk_bytes=64 << 20) as running:
        yield running


@pytest.fixture
def small(home):
    """Room for about half of ``BLOCKS`` records."""
    with VaultThread(max_bytes=256 << 10, max_record_bytes=64 << 10) as running:
        yield running


def records_in(run, vault: VaultThread) -> int:
    return run("vault", "stats", "--connect", vault.address, "--json").json["vaults"][0]["records"]


def exported(run, vault: VaultThread, path: Path) -> Path:
    assert run("vault", "export", str(path), "--all", "--connect", vault.address).code == 0
    return path


def starts_of(data: bytes) -> list[int]:
    """Where the records of an export begin."""
    at, starts = 8, []
    while length := struct.unpack_from("<Q", data, at)[0]:
        starts.append(at + 8)
        at += 8 + length
    return starts


def test_what_the_target_gave_up_again_is_not_called_taken(run, on_disk, small, tmp_path):
    on_disk.store(model="talk", blocks=BLOCKS)
    path = exported(run, on_disk, tmp_path / "talk.tkx")
    for operation in (
        ("import", str(path), "--connect", small.address),
        ("drain", "--all", "--connect", on_disk.address, "--to", small.address),
    ):
        told = run("vault", *operation)
        here = records_in(run, small)
        assert 0 < here < BLOCKS
        assert told.code == 4, told
        assert f"kept {here} of {BLOCKS} (no room)" in told.out
        assert "done" not in told.out
        assert "free, up to" in told.err
        told = run("vault", *operation, "--json")
        assert told.code == 4
        assert last(told)["kept"] == records_in(run, small)
        assert last(told)["refused"] == {"no_room": BLOCKS - last(told)["kept"]}


def test_export_drain_and_warm_count_as_no_use(run, on_disk, vault, tmp_path):
    on_disk.store(model="talk", blocks=3)
    listing = ("prefixes", "--connect", on_disk.address, "--json")
    before = run(*listing).json["prefixes"]
    exported(run, on_disk, tmp_path / "talk.tkx")
    assert run("vault", "drain", "--all", "--connect", on_disk.address, "--to", vault.address).code == 0
    assert run("vault", "warm", "--all", "--connect", on_disk.address).code == 0
    after = run(*listing).json["prefixes"]
    for one, other in zip(before, after, strict=True):
        assert other.pop("last_hit")[:19] == one.pop("last_hit")[:19]
        assert other == one


def test_an_import_without_connect_puts_records_only_where_agents_look(run, on_disk, home, tmp_path):
    on_disk.store(model="talk", blocks=3)
    path = exported(run, on_disk, tmp_path / "talk.tkx")
    with (
        VaultThread(name="a") as kv,
        VaultThread(name="b", role="ssm-vault") as ssm,
        VaultThread(name="c") as watched,
    ):
        more = f"[console]\nconnect = ['{watched.address}']\n"
        config = config_file(tmp_path, kv=kv.port, ssm=ssm.port, more=more)
        told = run("vault", "import", str(path), "--config", str(config))
        assert told.code == 0, told
        assert told.out.startswith(f"{kv.address}: import done: 3 of 3")
        assert [records_in(run, each) for each in (kv, ssm, watched)] == [3, 0, 0]
    with VaultThread(name="b", role="ssm-vault") as ssm:
        told = run("vault", "import", str(path), "--config", str(config_file(tmp_path, kv=1, ssm=ssm.port)))
        assert told.code == 4
        assert "3 records not taken: no vault of their tier answers" in told.err
        assert records_in(run, ssm) == 0


class Named:
    def __init__(self, peer: str) -> None:
        self.peer = peer


@pytest.mark.parametrize("n_tokens", [100, BLOCK_TOKENS, 3 * BLOCK_TOKENS + 7])
@pytest.mark.parametrize("seed", range(6))
def test_of_several_vaults_the_one_is_chosen_where_agents_look_for_the_prompt(n_tokens, seed):
    import numpy as np

    from tierkv.agents.routing import TierRouter
    from tierkv.codec.record import RecordHeader, RecordKind
    from tierkv.identity.blocks import BlockKey, block_key, window_key

    rng = np.random.default_rng(seed)
    chain = PromptChain.of(BlockKey(rng.bytes(32)), rng.integers(0, 1000, n_tokens))
    peers = [Named(f"10.0.0.{n}:50051") for n in range(4)]
    [home] = TierRouter("kv", None, peers).targets(chain)  # type: ignore[arg-type]
    routes = Routes([Taker(peer, "kv") for peer in peers], anywhere=False)  # type: ignore[arg-type]

    def header(kind: RecordKind, start: int, key_of) -> RecordHeader:
        tokens, parent = chain.tokens[start : start + BLOCK_TOKENS], chain.parent_at(start)
        key = key_of(parent, tokens, (), start)
        return RecordHeader(kind, key, parent, chain.root, tokens, start, b"", b"", 0, 0, 0.0, 0, 0, 0)

    for start in range(0, n_tokens, BLOCK_TOKENS):
        [taker] = routes.takers_of(header(RecordKind.BLOCK, start, block_key))
        assert taker.vault is home
    [taker] = routes.takers_of(header(RecordKind.WINDOW, n_tokens // BLOCK_TOKENS * BLOCK_TOKENS, window_key))
    assert taker.vault is home


def test_a_damaged_record_costs_only_itself(run, on_disk, vault, tmp_path):
    on_disk.store(model="talk", blocks=5)
    path = exported(run, on_disk, tmp_path / "talk.tkx")
    data = bytearray(path.read_bytes())
    data[starts_of(data)[2] + 4000] ^= 1
    path.write_bytes(data)
    told = run("vault", "import", str(path), "--connect", vault.address)
    assert told.code == 4
    assert "record 2 is not taken: bad checksum" in told.err
    assert "1 damaged, 4 taken" in told.err
    assert "done" not in told.out + told.err
    assert records_in(run, vault) == 4
    told = run("vault", "import", str(path), "--connect", vault.address, "--json")
    assert [each["unusable"] for each in lines(told.out) if "unusable" in each] == [
        {"number": 2, "reason": "bad_checksum"}
    ]


@pytest.mark.parametrize("content", [b"", b"root:x:0:0:root:/root:/bin/bash\n" * 9, b"TKX", bytes(64)])
def test_a_file_that_is_no_export_is_refused_before_anything_is_applied(run, vault, tmp_path, content):
    path = tmp_path / "passwd"
    path.write_bytes(content)
    told = run("vault", "import", str(path), "--connect", vault.address)
    assert told.code == 1
    assert "this is not an export of TierKV" in told.err
    assert told.out == ""
    assert "what came before" not in told.err


@pytest.mark.parametrize("others", [0, 1])
def test_a_vault_that_fails_while_it_takes_records_in_makes_an_import_partial(
    run, on_disk, vault, tmp_path, monkeypatch, others
):
    from tierkv.errors import Unreachable
    from tierkv.rpc.client import VaultClient

    on_disk.store(model="talk", blocks=2)
    path = exported(run, on_disk, tmp_path / "talk.tkx")
    store = VaultClient.store

    async def failing(self, records):
        outcomes = await store(self, records)
        if self.peer == vault.address:
            raise Unreachable(self.peer, "went away")
        return outcomes

    monkeypatch.setattr(VaultClient, "store", failing)
    with VaultThread(name="b", role="ssm-vault") as ssm:
        more = ("--connect", ssm.address) if others else ()
        told = run("vault", "import", str(path), "--connect", vault.address, *more)
    assert told.code == 4
    assert "went away" in told.err
    assert "done" not in told.out


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_vault_is_not_drained_onto_itself(run, vault, host):
    vault.store(model="talk")
    told = run("vault", "drain", "--all", "--connect", vault.address, "--to", f"{host}:{vault.port}")
    assert told.code == 2
    assert "is the vault that is to be drained" in told.err


def damage_payloads(folder: Path, places: int) -> None:
    """One byte before the end of so many records is another: their payloads are damaged, nothing else."""
    [segment] = folder.glob("*.seg")
    size = segment.stat().st_size
    entry = (size - 4096) // 3
    fd = os.open(segment, os.O_RDWR)
    for place in range(places):
        at = 4096 + place * (entry // 4096 + 1) * 4096 + 5000
        byte = os.pread(fd, 1, at)[0]
        os.pwrite(fd, bytes([byte ^ 1]), at)
    os.close(fd)


def test_a_damaged_record_is_drained_and_exported_as_damaged_and_counted_alike_everywhere(run, home, vault, tmp_path):
    folder = tmp_path / "vault"
    # The hot copies are sound: with memory for one record, the others are read from the disk.
    with VaultThread(persist_path=folder, ram_bytes=1 << 20, disk_bytes=64 << 20, max_record_bytes=64 << 10) as first:
        first.store(model="talk", blocks=3)
    damage_payloads(folder, 1)
    with VaultThread(persist_path=folder, ram_bytes=1 << 20, disk_bytes=64 << 20) as running:
        told = run("vault", "drain", "--all", "--connect", running.address, "--to", vault.address)
        assert told.code == 4
        assert "kept 2 of 3" in told.out
        assert "not kept: 1 damaged" in told.out
        [stats] = run("vault", "stats", "--connect", running.address, "--json").json["vaults"]
        assert (stats["quarantined"], stats["disk"]["damaged"]) == (1, 1)
        assert "1 quarantined" in run("vault", "stats", "--connect", running.address).out
        assert "1 QUARANTINED" in run("status", "--connect", running.address).out


def test_fsck_counts_what_it_found_and_says_how_to_repair_it(run, home, tmp_path):
    folder = tmp_path / "vault"
    with VaultThread(persist_path=folder, ram_bytes=4 << 20, disk_bytes=64 << 20) as running:
        running.store(model="talk", blocks=3)
        damage_payloads(folder, 1)
        told = run("vault", "fsck", "--connect", running.address)
        assert told.code == 1
        assert "fsck done" in told.out
        assert "2 sound records, 1 damaged place" in told.out
        assert "--repair takes damaged records out" in told.err
        told = run("vault", "fsck", "--connect", running.address, "--repair")
        assert told.code == 0
        assert "1 damaged place, 1 repaired" in told.out
        assert told.err == ""
    told = run("vault", "fsck", str(folder))
    assert told.code == 0
    assert "2 sound records, no damage" in told.out


def test_what_a_running_vault_cannot_repair_is_said_to_need_a_stopped_one(run, home, tmp_path):
    """An entry whose head is damaged and that no index knows: it was there before the vault started."""
    folder = tmp_path / "vault"
    with VaultThread(persist_path=folder, ram_bytes=4 << 20, disk_bytes=64 << 20) as running:
        running.store(model="talk", blocks=3)
    [segment] = folder.glob("*.seg")
    for hint in folder.glob("*.hint"):
        hint.unlink()
    fd = os.open(segment, os.O_RDWR)
    os.pwrite(fd, b"\xff\x00", 4096 + 20)
    os.close(fd)
    with VaultThread(persist_path=folder, ram_bytes=4 << 20, disk_bytes=64 << 20) as running:
        for _ in range(2):
            told = run("vault", "fsck", "--connect", running.address, "--repair")
            repaired = told.code == 0
            if not repaired:
                assert told.code == 1
                assert f"stop it, then 'tierkv vault fsck {folder} --repair'" in told.err
        assert not repaired or "no damage" in told.out
    assert run("vault", "fsck", str(folder), "--repair").code == 0
    assert run("vault", "fsck", str(folder)).code == 0


@pytest.mark.parametrize("name", ["stats", "fsck", "compact", "warm", "drain", "export", "import"])
def test_the_help_of_each_operation_shows_its_own_words(run, name):
    told = run("vault", name, "--help").out
    example = told.partition("example:")[2]
    wanted = {"fsck": "--repair", "drain": "--to", "export": ".tkx", "import": ".tkx", "warm": "--all"}
    assert f"tierkv vault {name}" in example
    assert wanted.get(name, "") in example
    if name in ("export", "import"):
        assert "FILE        " in told.replace("\n", " ")
