"""A vault that is damaged, forgetful, slow or dishonest costs a miss with a reason, never a wrong answer."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from agent_processes import TOKEN, Engine, assert_state, hybrid_layout, prompt, ready_engine
from explained_agent import demote, restore
from lying_vault import LyingVault

from tierkv.agents.inference import InferenceAgent, InferenceOptions
from tierkv.codec.record import RecordKind
from tierkv.errors import DeadlineExceeded, Unreachable
from tierkv.handoff.client import NotRestored, Restored
from tierkv.state.layout import Layout


@dataclass
class Rig:
    agent: InferenceAgent
    kv: LyingVault
    ssm: LyingVault
    home: Path
    engines: list[Engine]

    async def engine(self, layout: Layout | None = None, **options) -> Engine:
        return await ready_engine(self.agent.server.path, self.home, self.engines, layout=layout, **options)

    def counter(self, name: str) -> int:
        return self.agent.telemetry.snapshot().counters.get(name, 0)

    def events(self, kind: str) -> list[str]:
        return [event.message for event in self.agent.telemetry.events.after(0)[0] if event.kind == kind]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="tierkv-") as name:
        home = Path(name)
        options = InferenceOptions(
            "test", port=0, socket=home / "s", token=TOKEN, kv_codec="lossless", min_store_tokens=1,
            min_restore_tokens=1, handoff_bytes=8 << 20, break_even=False,
        )  # fmt: skip
        kv, ssm = LyingVault(), LyingVault()
        agent = InferenceAgent(options, {"kv": [kv], "ssm": [ssm]})
        await agent.start()
        rig = Rig(agent, kv, ssm, home, [])
        yield rig
        for engine in rig.engines:
            await asyncio.to_thread(engine.close)
        await agent.stop()


def flip(position: int):
    """Tampering: one bit of every record is turned."""

    def tamper(_key, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[position % len(data)] ^= 1
        return bytes(changed)

    return tamper


@pytest.mark.parametrize("position", [0, 5, 50, 100, 200, 400, 3000, -1, -500, -10_000])
async def test_a_damaged_record_is_a_counted_miss(rig: Rig, position: int):
    engine = await rig.engine()
    tokens = prompt(300)
    await demote(engine, tokens)
    rig.kv.tamper = flip(position)
    got = await restore(engine, tokens)
    assert isinstance(got, NotRestored)
    assert sum(n for name, n in rig.agent.telemetry.snapshot().counters.items() if name.startswith("failed_rec")) >= 1
    assert any("not what was written" in message for message in rig.events("fault"))


async def test_a_failed_block_is_not_offered_again_until_it_is_stored_anew(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(300)
    await demote(engine, tokens)
    rig.kv.tamper = flip(-1)
    assert isinstance(await restore(engine, tokens), NotRestored)
    rig.kv.tamper = lambda _key, data: data
    asked = len(rig.kv.promotes)
    assert isinstance(await restore(engine, tokens), NotRestored)
    assert len(rig.kv.promotes) == asked
    assert (await demote(engine, tokens)).rows_from == 0
    assert_state(await restore(engine, tokens), engine.layout, tokens, 299)


async def test_what_a_vault_has_evicted_is_offered_again(rig: Rig):
    """An offer of what is thought to be stored asks the vault in the background, for the next one."""
    engine = await rig.engine()
    tokens = prompt(300)
    await demote(engine, tokens)
    rig.kv.records.clear()
    assert (await demote(engine, tokens)).reason == "known"
    await asyncio.sleep(0.1)
    assert (await demote(engine, tokens)).rows_from == 0
    assert_state(await restore(engine, tokens), engine.layout, tokens, 299)


async def test_damage_in_a_later_block_leaves_the_prefix(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(1000)
    await demote(engine, tokens)
    third = next(key for key, (header, _) in rig.kv.records.items() if header.start == 512)
    rig.kv.tamper = lambda key, data: data[:-1] if key == third else data
    assert_state(await restore(engine, tokens), engine.layout, tokens, 512)
    rig.kv.tamper = lambda _key, data: data
    assert_state(await restore(engine, tokens), engine.layout, tokens, 512)


async def test_a_record_that_is_gone_meanwhile_leaves_the_prefix(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(1000)
    await demote(engine, tokens)
    second = next(key for key, (header, _) in rig.kv.records.items() if header.start == 256)
    rig.kv.tamper = lambda key, data: None if key == second else data
    assert_state(await restore(engine, tokens), engine.layout, tokens, 256)
    assert rig.counter("failed_records_evicted") == 1


async def test_another_prompts_record_is_refused(rig: Rig):
    """The vault answers every key with one and the same record, intact in itself."""
    engine = await rig.engine()
    tokens, other = prompt(300), prompt(300, seed=9)
    await demote(engine, tokens)
    await demote(engine, other)
    (foreign,) = [
        data for header, data in rig.kv.records.values() if header.start == 0 and header.tokens[0] == other[0]
    ]
    rig.kv.tamper = lambda _key, _data: foreign
    assert await restore(engine, tokens) == NotRestored("foreign_key")


async def test_a_forced_collision_is_a_miss(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """Same key, other token ids: the ids that the record carries are compared."""
    from tierkv.codec import record as record_module

    engine = await rig.engine()
    tokens = prompt(256)
    await demote(engine, tokens)
    ((key, (header, data)),) = rig.kv.records.items()
    other_ids = header.tokens.copy()
    other_ids[7] += 1
    forged = replace(header, tokens=other_ids)
    monkeypatch.setitem(record_module._KEY_OF, RecordKind.BLOCK, lambda *_: key)
    frames = data[len(header.pack_frame()) :]
    rig.kv.tamper = lambda _key, _data: forged.pack_frame() + frames
    assert await restore(engine, np.append(tokens, 5)) == NotRestored("foreign_tokens")


async def test_a_record_of_another_model_is_refused(rig: Rig):
    engine, other = await rig.engine(weights=b"1" * 100), await rig.engine(weights=b"2" * 100)
    tokens = prompt(200)
    await demote(other, tokens)
    ((_, (header, data)),) = rig.kv.records.items()
    await demote(engine, tokens)
    rig.kv.tamper = lambda key, mine: data if key != header.key else mine
    assert isinstance(await restore(engine, tokens), NotRestored)


async def test_a_claim_that_more_tokens_agree_is_checked(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(200)
    await demote(engine, tokens)
    other = tokens.copy()
    other[50] += 1
    rig.kv.claims = lambda found: replace(found, agreeing=199)
    assert await restore(engine, other) == NotRestored("foreign_tokens")


@pytest.mark.parametrize("field", ["n_tokens", "start", "raw_bytes", "size_bytes"])
async def test_wrong_claims_about_a_record_never_give_wrong_rows(rig: Rig, field: str):
    engine = await rig.engine()
    tokens = prompt(250)
    await demote(engine, tokens)
    rig.kv.claims = lambda found: replace(found, **{field: getattr(found, field) + 1 if field != "start" else 256})
    got = await restore(engine, tokens)
    if isinstance(got, Restored):
        assert_state(got, engine.layout, tokens, got.position)


async def test_a_damaged_checkpoint_falls_back_to_an_earlier_one(rig: Rig):
    engine = await rig.engine(hybrid_layout())
    tokens = prompt(600)
    await demote(engine, tokens[:300])
    await demote(engine, tokens[:500])
    last = next(key for key, (header, _) in rig.ssm.records.items() if header.end == 500)
    rig.ssm.tamper = lambda key, data: data[:-3] + b"xyz" if key == last else data
    assert_state(await restore(engine, tokens), engine.layout, tokens, 300)


async def test_rows_that_fail_leave_a_hybrid_without_restore(rig: Rig):
    engine = await rig.engine(hybrid_layout())
    tokens = prompt(600)
    await demote(engine, tokens[:500])
    rig.kv.tamper = flip(-1)
    assert isinstance(await restore(engine, tokens), NotRestored)


async def test_slow_records_are_left_out_at_the_deadline(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(2000)
    await demote(engine, tokens)
    rig.kv.seconds_a_record = 0.25
    began = time.monotonic()
    got = await restore(engine, tokens, budget_s=1.2)
    assert time.monotonic() - began < 3.0
    assert isinstance(got, Restored)
    assert 256 <= got.position < 1999
    assert_state(got, engine.layout, tokens, got.position)


async def test_a_vault_that_never_answers_is_left_at_the_deadline(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(300)
    await demote(engine, tokens)
    rig.kv.seconds_a_record = 60.0
    assert await restore(engine, tokens, budget_s=0.5) == NotRestored("timed_out")
    rig.kv.seconds_a_record = 0.0
    fresh = prompt(100, seed=3)
    await demote(engine, fresh)
    assert_state(await restore(engine, fresh), engine.layout, fresh, 99)


async def test_a_slow_vault_is_waited_for_as_long_as_the_budget_lasts(rig: Rig):
    """The hook gives up on a silent agent after 3 s; one that waits for a vault is not silent."""
    engine = await rig.engine()
    tokens = prompt(200)
    await demote(engine, tokens)
    rig.kv.seconds_a_record = 3.5
    assert_state(await restore(engine, tokens, budget_s=10.0), engine.layout, tokens, 199)


async def test_a_record_that_cannot_be_sent_does_not_stop_the_next(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    engine = await rig.engine()

    def broken(*_args: object, **_options: object) -> None:
        raise ValueError("a fault of the test")

    with monkeypatch.context() as patched:
        patched.setattr(rig.kv, "probe", broken)
        await demote(engine, prompt(200))
    assert rig.counter("records_dropped_not_sendable") == 1
    tokens = prompt(200, seed=1)
    await demote(engine, tokens)
    assert_state(await restore(engine, tokens), engine.layout, tokens, 199)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Unreachable("v", "gone"), "unreachable"), (DeadlineExceeded("v", "slow"), "timed_out")],
)
async def test_an_absent_vault_is_a_reason(rig: Rig, error, reason: str):
    engine = await rig.engine()
    tokens = prompt(300)
    await demote(engine, tokens)
    rig.kv.error = error
    assert await restore(engine, tokens) == NotRestored(reason)
    assert rig.agent.telemetry.tier("kv").snapshot().miss_reasons[reason] == 1


async def test_a_broken_stream_leaves_what_came_before(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(1000)
    await demote(engine, tokens)

    def breaks(key, data):
        if rig.kv.records[key][0].start == 512:
            rig.kv.error = Unreachable("v", "killed")
        return data

    rig.kv.tamper = breaks
    assert_state(await restore(engine, tokens), engine.layout, tokens, 768)


async def test_refused_stores_are_counted_and_not_taken_for_stored(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(300)
    rig.kv.refuse_with = "stale_epoch"
    await demote(engine, tokens)
    assert rig.agent.telemetry.tier("kv").snapshot().refusals == {"stale_epoch": 2}
    rig.kv.refuse_with = ""
    assert (await demote(engine, tokens)).rows_from == 0
    assert_state(await restore(engine, tokens), engine.layout, tokens, 299)


async def test_identical_restores_at_once_ask_the_vault_once(rig: Rig):
    engines = [await rig.engine() for _ in range(4)]
    tokens = prompt(1025)
    await demote(engines[0], tokens)
    rig.kv.seconds_a_record = 0.4  # on a busy machine too all four ask before the first record is there
    results = await asyncio.gather(*(restore(engine, tokens) for engine in engines))
    for got in results:
        assert_state(got, engines[0].layout, tokens, 1024)
    asked = [key for keys in rig.kv.promotes for key in keys]
    assert len(asked) == len(set(asked)) == 4


async def test_a_restore_that_is_left_does_not_end_the_one_that_shares_it(rig: Rig):
    first, second = await rig.engine(), await rig.engine()
    tokens = prompt(1025)
    await demote(first, tokens)
    rig.kv.seconds_a_record = 0.1
    leaving = asyncio.create_task(restore(first, tokens))
    await asyncio.sleep(0.05)
    staying = asyncio.create_task(restore(second, tokens))
    await asyncio.sleep(0.1)
    first.client.close()
    assert_state(await staying, second.layout, tokens, 1024)
    assert isinstance(await leaving, NotRestored)


async def test_rows_after_a_lossy_restore_are_not_called_exact(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(600)
    await demote(engine, tokens[:512])
    for key, (header, data) in list(rig.kv.records.items()):
        lossy = replace(header, fidelity=20)
        rig.kv.records[key] = (lossy, lossy.pack_frame() + data[len(header.pack_frame()) :])
    got = await restore(engine, tokens)
    assert isinstance(got, Restored)
    assert got.fidelity == 20
    await demote(engine, np.concatenate([tokens, prompt(300, seed=4)]))
    assert {header.fidelity for header, _ in rig.kv.records.values()} == {20}
    await demote(engine, prompt(300, seed=8))
    assert {header.fidelity for header, _ in rig.kv.records.values()} == {0, 20}
    other = await rig.engine()
    await demote(other, tokens)
    assert rig.kv.records[rig.kv.promotes[0][0]][0].fidelity == 0, "a better record replaces a worse one"


async def test_the_taint_outlives_the_agents_memory(rig: Rig):
    """A hook that was restored lossily says so to the agent that it meets next."""
    engine = await rig.engine()
    engine.model.fidelity = 30
    links = engine.client.links
    channel = links.control.channel
    assert channel is not None
    links.drop(links.control, channel)
    await asyncio.to_thread(engine.ready)
    await demote(engine, prompt(100))
    assert {header.fidelity for header, _ in rig.kv.records.values()} == {30}


async def test_scalars_and_layout_travel_in_the_record(rig: Rig):
    engine = await rig.engine(hybrid_layout())
    await demote(engine, prompt(100))
    ((header, _),) = rig.ssm.records.values()
    assert json.loads(header.scalars) == {"1": {"offset": 100, "_idx": 3}}
    assert Layout.from_json(header.layout) == engine.layout
    assert header.model == "toy"
    assert header.codec == "lossless"


async def test_an_agent_that_fails_in_its_own_books_still_answers(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    engine = await rig.engine()
    tokens = prompt(600)
    await demote(engine, tokens)

    def broken(*_: object) -> None:
        raise KeyError("a fault of the agent")

    monkeypatch.setattr(rig.agent.engines._parts.toucher, "restored", broken)
    began = time.monotonic()
    assert await restore(engine, tokens) == NotRestored("agent_error")
    assert time.monotonic() - began < 2.5  # it would take an agent that says nothing for dead after 3 s
    assert rig.counter("restores_crashed") == 1
    monkeypatch.undo()
    assert_state(await restore(engine, tokens), engine.layout, tokens, 599)
