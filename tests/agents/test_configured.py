"""The configuration of a running agent: checked, applied, taken back and reloaded, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.agents.configured import Configured
from tierkv.agents.live_keys import LiveKey, WhatIf, lower_threshold
from tierkv.config.load import Flag, load_source
from tierkv.config.running import Base
from tierkv.errors import Refused, StaleToken
from tierkv.telemetry.node import NodeTelemetry
from tierkv.telemetry.snapshot import MemorySnapshot, NodeSnapshot, TierSnapshot

TEXT = '[vault]\nmax_bytes = "1GiB"   # a comment\nundo_s = 60\n[inference]\nmemory_threshold = 0.8\n'
GIB = 1 << 30


class Agent:
    """A vault's configuration whose live keys write into ``taken``; ``refusing`` makes one of them refuse."""

    def __init__(self, path: Path, flags: dict[str, Flag] | None = None) -> None:
        self.taken: list[tuple[str, object]] = []
        self.refusing = ""
        self.telemetry = NodeTelemetry("kv-vault", "nas")
        base = Base(path, flags or {}, {})
        keys = {
            "vault.max_bytes": LiveKey(
                self._setter("vault.max_bytes"),
                lambda value: WhatIf(GIB - value, 2, "would evict some"),
                lambda value: "set aside at the start" if value > GIB else "",
            ),
            "vault.undo_s": LiveKey(self._setter("vault.undo_s")),
        }
        self.config = Configured(base, base.check(base.read(), {}), "kv-vault", keys, self.telemetry)

    def _setter(self, key: str):
        def take(value: object) -> None:
            if self.refusing == key:
                raise Refused("pinned")
            self.taken.append((key, value))

        return take

    def value(self, key: str) -> object:
        return next(one.value for one in self.config.state().values if one.key == key)

    def events(self) -> list[str]:
        return [event.message for event in self.telemetry.events.after(0)[0] if event.kind == "config"]


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    path = tmp_path / "tierkv.toml"
    path.write_text(TEXT)
    return Agent(path)


def effects(agent: Agent, changes: dict) -> list[tuple[str, str]]:
    return [(one.key, one.effect) for one in agent.config.check(changes).effects]


def test_each_change_is_live_restart_unchanged_or_not_used(agent: Agent) -> None:
    changes = {
        "vault.max_bytes": "512MiB", "vault.port": 6000, "vault.undo_s": 60, "inference.memory_threshold": 0.7,
    }  # fmt: skip
    assert effects(agent, changes) == [
        ("vault.max_bytes", "live"), ("vault.port", "restart"), ("vault.undo_s", "unchanged"),
        ("inference.memory_threshold", "not_used"),
    ]  # fmt: skip
    one = agent.config.check({"vault.max_bytes": "512MiB"}).effects[0]
    assert (one.before, one.after, one.evict_bytes, one.evict_prefixes) == (GIB, GIB // 2, GIB // 2, 2)
    assert agent.taken == []


def test_what_was_not_set_aside_at_the_start_needs_a_restart(agent: Agent) -> None:
    one = agent.config.check({"vault.max_bytes": "2GiB"}).effects[0]
    assert (one.effect, one.note) == ("restart", "set aside at the start")


def test_faults_are_told_all_at_once_with_a_suggestion(agent: Agent) -> None:
    check = agent.config.check({"vault.max_bytes": "lots", "vault.undo_s": -1})
    assert {fault.key for fault in check.faults} == {"vault.max_bytes", "vault.undo_s"}
    (unknown,) = agent.config.check({"vault.max_byte": 1}).faults
    assert "max_bytes" in unknown.suggestion


async def test_apply_takes_live_keys_over_and_keeps_the_others_for_the_restart(agent: Agent) -> None:
    applied = await agent.config.apply({"vault.undo_s": 5, "vault.port": 6000}, revision=1, who="ann")
    assert agent.taken == [("vault.undo_s", 5.0)]
    assert applied.revision == 2
    port = next(one for one in agent.config.state().values if one.key == "vault.port")
    assert (port.value, port.pending, port.origin) == (None, 6000, "applied by ann")
    assert agent.events() == [
        "vault.undo_s 1min -> 5s (by ann)",
        "vault.port nothing -> 6000, from its next start on (by ann)",
    ]


async def test_what_was_applied_is_in_the_agents_own_file_and_undo_takes_it_out_again(agent: Agent, tmp_path) -> None:
    path = tmp_path / "tierkv.toml"
    planned = agent.config.check({"vault.undo_s": 5, "vault.port": 6000})
    assert [one.unsaved for one in planned.effects] == ["", ""]
    assert path.read_text() == TEXT
    applied = await agent.config.apply({"vault.undo_s": 5, "vault.port": 6000}, revision=1, who="ann")
    assert path.read_text() == TEXT.replace("undo_s = 60\n", 'undo_s = "5s"\nport = 6000\n')
    assert await agent.config.reload()
    assert agent.value("vault.undo_s") == 5.0
    applied = await agent.config.apply({"vault.undo_s": 9}, revision=0, who="ann")
    await agent.config.undo(applied.undo_token, who="ann")
    assert path.read_text() == TEXT.replace("undo_s = 60\n", 'undo_s = "5s"\nport = 6000\n')


async def test_what_the_restart_will_not_know_is_said_before_and_after(tmp_path: Path) -> None:
    path = tmp_path / "tierkv.toml"
    path.write_text(TEXT)
    flags = {"vault.undo_s": Flag("--undo", 10), "vault.port": Flag("--port", 5)}
    agent = Agent(path, flags)
    for effects in (
        agent.config.check({"vault.undo_s": 5, "vault.port": 6000}).effects,
        (await agent.config.apply({"vault.undo_s": 5, "vault.port": 6000}, revision=0, who="ann")).effects,
    ):
        undo, port = effects
        assert (undo.effect, undo.unsaved, undo.never) == ("live", "--undo wins at its start", False)
        assert (port.effect, port.unsaved, port.never) == ("restart", "--port wins at its start", True)
    assert agent.events() == [
        "vault.undo_s 10s -> 5s, until the restart: --undo wins at its start (by ann)",
        "vault.port 5 -> 6000, not in force: --port wins at its start (by ann)",
    ]
    values = {one.key: (one.value, one.pending) for one in agent.config.state().values}
    assert values["vault.undo_s"] == (5.0, 10.0)
    assert values["vault.port"] == (5, 5)


async def test_a_caller_that_goes_leaves_a_whole_change(agent: Agent, tmp_path: Path) -> None:
    import asyncio

    changing = asyncio.create_task(agent.config.apply({"vault.undo_s": 5}, revision=0, who="ann"))
    await asyncio.sleep(0)
    changing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await changing
    async with asyncio.timeout(10):
        while agent.config.state().revision == 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert agent.taken == [("vault.undo_s", 5.0)]
    assert 'undo_s = "5s"\n' in (tmp_path / "tierkv.toml").read_text()
    await agent.config.apply({"vault.undo_s": 6}, revision=2, who="ann")


async def test_a_change_planned_on_an_older_revision_is_stale(agent: Agent) -> None:
    await agent.config.apply({"vault.undo_s": 5}, revision=0, who="ann")
    with pytest.raises(StaleToken):
        await agent.config.apply({"vault.undo_s": 6}, revision=1, who="bob")


async def test_when_one_key_refuses_those_before_it_are_as_they_were(agent: Agent) -> None:
    agent.refusing = "vault.undo_s"
    with pytest.raises(Refused, match="undo_s: pinned"):
        await agent.config.apply({"vault.max_bytes": "512MiB", "vault.undo_s": 5}, revision=0, who="ann")
    assert agent.taken == [("vault.max_bytes", GIB // 2), ("vault.max_bytes", GIB)]
    assert agent.value("vault.max_bytes") == GIB
    assert agent.config.state().revision == 1


async def test_undo_restores_what_was_and_only_while_nothing_came_after(agent: Agent) -> None:
    first = await agent.config.apply({"vault.undo_s": 5}, revision=0, who="ann")
    await agent.config.undo(first.undo_token, who="ann")
    assert agent.taken == [("vault.undo_s", 5.0), ("vault.undo_s", 60.0)]
    with pytest.raises(StaleToken):
        await agent.config.undo(first.undo_token, who="ann")
    second = await agent.config.apply({"vault.undo_s": 6}, revision=0, who="ann")
    await agent.config.apply({"vault.undo_s": 7}, revision=0, who="bob")
    with pytest.raises(StaleToken):
        await agent.config.undo(second.undo_token, who="ann")


async def test_reload_takes_the_file_over_and_keeps_the_last_good_one(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "tierkv.toml"
    path.write_text(TEXT.replace("undo_s = 60", "undo_s = 30"))
    assert await agent.config.reload()
    assert agent.value("vault.undo_s") == 30.0
    path.write_text("[vault]\nundo_s = nonsense\n")
    assert not await agent.config.reload()
    assert agent.value("vault.undo_s") == 30.0
    assert "undo_s" in agent.config.state().last_fault
    assert agent.events()[-1].startswith("reload: the last good configuration stays")
    path.write_text(TEXT)
    assert await agent.config.reload()
    assert agent.config.state().last_fault == ""


async def test_a_flag_wins_over_the_file_and_an_applied_change_over_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "tierkv.toml"
    path.write_text(TEXT)
    agent = Agent(path, {"vault.undo_s": Flag("--undo", 10)})
    assert agent.value("vault.undo_s") == 10.0
    await agent.config.apply({"vault.undo_s": 5}, revision=0, who="ann")
    assert agent.value("vault.undo_s") == 5.0
    assert await agent.config.reload()
    assert agent.value("vault.undo_s") == 10.0


def test_a_tenants_name_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "tierkv.toml"
    path.write_text("[inference]\ntenant = 'acme'\n")
    assert Agent(path).value("inference.tenant") == "(hidden)"


def test_a_lower_mark_evicts_what_is_above_it() -> None:
    """100 GiB, 80 used, 20 of them cache in 10 entries of 2 GiB: a mark of 0.75 wants 5 GiB, three entries."""
    hot = TierSnapshot("hot", size_bytes=20 * GIB, records=10)
    snapshot = NodeSnapshot("i", "mini", "inference", "", "", 1, 0, 0, 1, MemorySnapshot(100 * GIB, 80 * GIB), (hot,))
    low = lower_threshold(snapshot, 0.75)
    assert (low.evict_bytes, low.evict_prefixes) == (5 * GIB, 3)
    assert low.note == "would evict 5.0 GiB, 3 prefixes now"
    assert lower_threshold(snapshot, 0.9).evict_bytes == 0
    assert lower_threshold(snapshot, 0.5).note == "cannot be reached: 60.0 GiB are not cache"


def test_load_source_takes_changes_of_one_entry_of_a_list(tmp_path: Path) -> None:
    path = tmp_path / "tierkv.toml"
    path.write_text("[[cluster.kv_cold]]\nhost='a'\n[[cluster.kv_cold]]\nhost='b'\n")
    base = Base(path, {}, {})
    place = base.place(base.read(), "cluster.kv_cold[1].host")
    loaded = load_source(base.read(), flags={place: Flag("x", "c")}, environ={})
    assert [host for host, _ in loaded.config.kv_vaults()] == ["a", "c"]


async def test_what_the_schema_calls_live_is_taken_over_by_an_agent_or_the_console(tmp_path: Path, monkeypatch) -> None:
    """And what it says needs a restart is taken over by nobody, but for a local vault, which can shrink."""
    from tierkv.agents.inference import InferenceOptions, build_inference_agent
    from tierkv.agents.live_keys import store_keys
    from tierkv.config.keys import keys
    from tierkv.store.disk import DiskStore
    from tierkv.store.disk_options import DiskOptions
    from tierkv.store.ram import RamStore
    from tierkv.tui.app import OWN_KEYS

    monkeypatch.setenv("TIERKV_HOME", str(tmp_path))
    agent = build_inference_agent(
        InferenceOptions("mini", port=0, socket=tmp_path / "s", kv_cold=("127.0.0.1:1",), queue_bytes=4 << 20)
    )
    ram = RamStore(1 << 20, 1 << 18)
    disk = DiskStore(tmp_path / "vault", DiskOptions(disk_bytes=64 << 20, ram_bytes=1 << 20, max_record_bytes=1 << 18))
    try:
        taken = {*agent.runtime.live_keys, *store_keys(ram), *store_keys(disk), *OWN_KEYS}
        said = {key.path for key in keys() if key.apply == "live"}
        ignored = {"inference.kv_dim"}
        assert said - ignored == taken - {"inference.local_vault_bytes"}
        (client,) = (client for _, client in agent._clients)
        for key, seconds in (("connect", 3.0), ("probe", 4.0), ("frame", 5.0), ("restore", 6.0)):
            agent.runtime.live_keys[f"inference.{key}_timeout_s"].set(seconds)
        assert (client._link.connect_timeout_s, client._probe_timeout_s, client._frame_timeout_s) == (3.0, 4.0, 5.0)
        assert agent.settings.to_json()["restore_budget_s"] == 6.0
        assert agent.engines._parts.restore_timeout_s() == 6.0
        assert agent.promoter._probe_timeout_s == 4.0
        agent.runtime.live_keys["inference.queue_bytes"].set(8 << 20)
        assert agent.pending.cap_bytes == 8 << 20
    finally:
        await agent.stop()
        ram.close()
        disk.close()
