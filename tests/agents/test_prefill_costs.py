"""What computing costs is known per model, told to hooks, and remembered when engines and agents start again."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from agent_processes import TOKEN, Cluster, Engine, assert_state, eventually, prompt, rows_layout
from explained_agent import Rig, demote, explained_agent, restore, until
from faulty_vault import FaultyVault

from tierkv.agents import control_channel
from tierkv.agents.break_even import prefill_sample
from tierkv.agents.prefill_costs import MAX_MODELS, REMEMBERED_SAMPLES, PrefillCosts
from tierkv.handoff.client import NotRestored
from tierkv.handoff.protocol import SHORTEST_WORTH_S, FileSeen, ModelAnnouncement

SAID = ModelAnnouncement("m", (FileSeen("/a/m.safetensors", 1, 2, 1000, 4),), '{"layers": 2}')


def kept_in(path: Path, said: ModelAnnouncement = SAID, build: str = "mlx-lm 0.31.3") -> float:
    """What a later agent expects of 1,000 tokens."""
    return PrefillCosts(path).of(said, "mlx-lm", build).seconds(0, 1000)


def test_a_later_agent_knows_what_computing_costs(tmp_path: Path):
    """1 ms a token and 2 us a pair, by hand: 1,000 tokens 1 + 1 = 2 s, 2,000 tokens 2 + 4 = 6 s."""
    path = tmp_path / "cache" / "costs.json"
    costs = PrefillCosts(path)
    cost = costs.of(SAID, "mlx-lm", "mlx-lm 0.31.3")
    cost.measured(0, 1000, 2.0)
    cost.measured(0, 2000, 6.0)
    costs.keep()
    later = PrefillCosts(path).of(SAID, "mlx-lm", "mlx-lm 0.31.3")
    assert later.seconds(0, 4000) == pytest.approx(4 + 16)
    assert later.terms == pytest.approx((1e-3, 2e-6))
    assert "/a/m.safetensors" not in path.read_text()


def test_all_forms_of_a_cache_are_one_model(tmp_path: Path):
    costs = PrefillCosts(tmp_path / "costs.json")
    plain = costs.of(SAID, "mlx-lm", "b")
    assert costs.of(replace(SAID, kv_bits=4, kv_group_size=64, quantized_kv_start=100), "mlx-lm", "b") is plain
    assert costs.of(replace(SAID, max_kv_size=512), "mlx-lm", "b") is plain


@pytest.mark.parametrize(
    ("said", "build"),
    [
        (SAID, "mlx-lm 0.32.0"),
        (replace(SAID, name="n"), "mlx-lm 0.31.3"),
        (replace(SAID, config='{"layers": 3}'), "mlx-lm 0.31.3"),
        (replace(SAID, weights=(FileSeen("/a/m.safetensors", 1, 2, 1001, 4),)), "mlx-lm 0.31.3"),
        (replace(SAID, draft=(FileSeen("/a/d.safetensors", 1, 2, 10, 4),)), "mlx-lm 0.31.3"),
        (replace(SAID, shard_kind="pipeline", shard_world=2), "mlx-lm 0.31.3"),
    ],
)
def test_another_model_or_engine_is_not_taken_for_it(tmp_path: Path, said: ModelAnnouncement, build: str):
    path = tmp_path / "costs.json"
    costs = PrefillCosts(path)
    costs.of(SAID, "mlx-lm", "mlx-lm 0.31.3").measured(0, 1000, 2.0)
    costs.keep()
    assert kept_in(path) == pytest.approx(2.0)
    assert kept_in(path, said, build) == 0.0


def test_what_was_measured_last_is_kept_and_what_others_wrote_stays(tmp_path: Path):
    path = tmp_path / "costs.json"
    mine, other = PrefillCosts(path), PrefillCosts(path)
    cost = mine.of(SAID, "mlx-lm", "mlx-lm 0.31.3")
    for number in range(REMEMBERED_SAMPLES + 5):
        cost.measured(0, 1000, 100.0 if number < 5 else 1.0)
    mine.keep()
    other.of(replace(SAID, name="n"), "mlx-lm", "mlx-lm 0.31.3").measured(0, 1000, 3.0)
    other.keep()
    assert kept_in(path) == pytest.approx(1.0)
    assert kept_in(path, replace(SAID, name="n")) == pytest.approx(3.0)
    before = path.stat().st_mtime_ns, path.stat().st_ino
    mine.keep()
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_the_file_does_not_grow_with_the_models_that_were_ever_served(tmp_path: Path):
    path = tmp_path / "costs.json"
    for number in range(MAX_MODELS + 3):
        costs = PrefillCosts(path)
        costs.of(replace(SAID, name=f"m{number}"), "mlx-lm", "b").measured(0, 1000, 1.0)
        costs.keep()
    assert len(json.loads(path.read_text())["models"]) == MAX_MODELS
    assert PrefillCosts(path).of(replace(SAID, name="m0"), "mlx-lm", "b").seconds(0, 1000) == 0.0
    assert PrefillCosts(path).of(replace(SAID, name=f"m{MAX_MODELS + 2}"), "mlx-lm", "b").seconds(0, 1000) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "", "not json", "[]", "3", "[" * 100_000, '{"schema": "another"}', '{"schema": "tierkv.prefill-costs/1"}',
        '{"schema": "tierkv.prefill-costs/1", "models": []}',
        '{"schema": "tierkv.prefill-costs/1", "models": {"a": 7}}',
        "\x00\xff" * 1000,
    ],
)  # fmt: skip
def test_a_damaged_file_counts_for_nothing_and_is_written_anew(tmp_path: Path, text: str):
    path = tmp_path / "costs.json"
    path.write_text(text, encoding="latin-1")
    costs = PrefillCosts(path)
    cost = costs.of(SAID, "mlx-lm", "mlx-lm 0.31.3")
    assert cost.seconds(0, 1000) == 0.0
    cost.measured(0, 1000, 2.0)
    costs.keep()
    assert kept_in(path) == pytest.approx(2.0)


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    costs = PrefillCosts(tmp_path / "file" / "costs.json")
    costs.of(SAID, "mlx-lm", "b").measured(0, 1000, 2.0)
    costs.keep()
    assert "cannot be" in caplog.text
    assert costs.of(SAID, "mlx-lm", "b").seconds(0, 1000) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "row",
    [
        None, 7, "x", {}, [], [0, 100], [0, 100, 1.0, 2], [0, 100, "1"], [0.5, 100, 1.0], [-1, 100, 1.0],
        [100, 100, 1.0], [0, 1 << 40, 1.0], [0, 100, 0], [0, 100, -1.0], [0, 100, 1e9],
        [0, 100, float("nan")], [0, 100, float("inf")],
    ],
)  # fmt: skip
def test_what_cannot_be_a_prefill_is_none(row: object):
    assert prefill_sample(row) is None


def test_a_prefill_is_read():
    assert prefill_sample([0, 100, 2]) == (0, 100, 2.0)


# --- engines and agents -----------------------------------------------------------------------------


async def test_a_hook_is_told_the_cost_of_its_own_model():
    """1,000 tokens of this model in 2 s, of the other in 0.1 s: neither is taken for the other."""
    async with explained_agent() as rig:
        one, two = await rig.engine(name="one"), await rig.engine(name="two")
        await rig.prefilled(one, (0, 1000, 2.0))
        await rig.prefilled(two, (0, 1000, 0.1))

        def told() -> bool:
            for engine in (one, two):
                engine.client.report_hot({})
            return one.model.computing_s(0, 1000) > 0 < two.model.computing_s(0, 1000)

        async with asyncio.timeout(10):
            while not await asyncio.to_thread(told):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert one.model.computing_s(0, 500) == pytest.approx(1.0)
        assert two.model.computing_s(0, 500) == pytest.approx(0.05)


async def test_a_prefill_of_a_model_that_was_not_announced_is_left_out():
    async with explained_agent() as rig:
        engine = await rig.engine()
        rows = [[7, 0, 1000, 5.0], [True, 0, 1000, 5.0], ["0", 0, 1000, 5.0], [0, 1000, 5.0], [0, 0, 1000, 2.0]]
        await asyncio.to_thread(engine.client.report_hot, {"prefills": rows})
        (inside,) = rig.agent.engines._engines.values()
        await until(lambda: inside.models[0].prefill.seconds(0, 1000) > 0)
        assert inside.models[0].prefill.seconds(0, 1000) == pytest.approx(2.0)


def noted_budgets(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What every restore from now on may take."""
    look_up, budgets = rig.agent.promoter.look_up, []

    def noted(request, trace, **options):
        budgets.append(request.budget_s)
        return look_up(request, trace, **options)

    monkeypatch.setattr(rig.agent.promoter, "look_up", noted)
    return budgets


@pytest.mark.parametrize(
    ("weighs", "computing_s", "asked_s", "wanted_s"),
    [(True, 0.5, 30.0, 0.5), (True, 0.5, 0.3, 0.3), (True, 0.001, 30.0, SHORTEST_WORTH_S), (False, 0.5, 30.0, 12.0)],
)
async def test_a_restore_may_take_what_computing_takes(
    monkeypatch: pytest.MonkeyPatch, weighs: bool, computing_s: float, asked_s: float, wanted_s: float
):
    """Also where the hook, whose engine has only just started, does not know how long that is."""
    async with explained_agent(break_even=weighs, restore_timeout_s=12.0) as rig:
        engine = await rig.engine()
        await rig.prefilled(engine, (0, 1000, computing_s))
        budgets = noted_budgets(rig, monkeypatch)
        await restore(engine, prompt(1001), budget_s=asked_s)
        assert budgets == [pytest.approx(wanted_s)]


@pytest.mark.parametrize(("weighs", "n_tokens", "wanted_s"), [(True, 8000, 0.8), (True, 600, 0.2), (False, 8000, 12.0)])
async def test_before_anything_was_computed_a_fast_engine_is_assumed(
    monkeypatch: pytest.MonkeyPatch, weighs: bool, n_tokens: int, wanted_s: float
):
    """8,000 tokens at 10,000 a second."""
    fastest = control_channel.FASTEST_TOKENS_PER_S
    async with explained_agent(assumed_tokens_per_s=fastest, break_even=weighs, restore_timeout_s=12.0) as rig:
        engine = await rig.engine()
        budgets = noted_budgets(rig, monkeypatch)
        await restore(engine, prompt(n_tokens + 1), budget_s=30.0)
        assert budgets == [pytest.approx(wanted_s)]


async def test_what_comes_by_then_is_used():
    async with explained_agent(assumed_tokens_per_s=10.0) as rig:
        engine = await rig.engine()
        tokens = prompt(2001)
        await demote(engine, tokens)
        assert engine.model.computing_s(0, 2000) == 0.0
        assert_state(await restore(engine, tokens, budget_s=11.0), engine.layout, tokens, 2000)


@pytest.mark.parametrize("fault", ["freeze", "trickle"])
def test_the_first_request_after_a_restart_is_not_held_by_a_vault_that_hangs(tmp_path: Path, fault: str):
    """Engine and agent are new, the hook would wait 30 s, and computing is remembered to take 4 s."""
    vault = FaultyVault(token=TOKEN).start()
    place = Cluster(tmp_path)
    try:
        options = {"kv_cold": [vault.address], "break_even": True, "frame_timeout_s": 20.0, "restore_timeout_s": 30.0}
        agent = place.agent(**options)
        tokens = prompt(4001)
        engine = place.engine(layout=rows_layout(8)).ready()
        engine.demote(tokens)
        engine.client.report_hot({"prefills": [[engine.model.id, 0, 4000, 4.0]]})
        eventually((tmp_path / "cache" / "prefill-costs.json").exists)
        place.engines.remove(engine)
        engine.close()
        agent.kill()
        vault.fault = fault
        place.agent(name="again", **options)
        engine = place.engine(layout=rows_layout(8)).ready()
        assert engine.restore(tokens, budget_s=30.0) == NotRestored("not_worth_it")
    finally:
        place.close()
        vault.stop()


def test_nor_the_first_request_of_a_model_that_was_never_computed_here(tmp_path: Path):
    """The hook would wait 30 s, and a frame may take 20: the agent itself says at 0.4 s that it takes too long."""
    vault = FaultyVault(token=TOKEN).start()
    place = Cluster(tmp_path)
    try:
        agent = place.agent(kv_cold=[vault.address], break_even=True, frame_timeout_s=20.0, restore_timeout_s=30.0)
        engine: Engine = place.engine(layout=rows_layout(8)).ready()
        engine.demote(prompt(4001))
        vault.fault = "freeze"
        assert engine.restore(prompt(4001), budget_s=30.0) == NotRestored("timed_out")
        assert agent.tier("kv").miss_reasons["timed_out"] >= 1
    finally:
        place.close()
        vault.stop()
