"""Live samples are counted and shown; a layer that breaks its codec's floor is stored as a better codec."""

from __future__ import annotations

import asyncio
import json
import math

import agent_processes
import numpy as np
import pytest
from agent_processes import prompt
from explained_agent import Rig, demote, explained_agent, restore, until

from tierkv.agents import codec_loss, transfer
from tierkv.agents.codec_loss import CodecLoss
from tierkv.agents.quality import Sample, sample_of
from tierkv.agents.raised_layers import MAX_MODELS, RaisedLayers
from tierkv.codec.frame import CodecId, FrameHeader
from tierkv.codec.record import RecordHeader
from tierkv.codec.registry import (
    CODEC_NAMES,
    codec_named,
    decode_segment,
    encode_segment,
    floor_db,
    next_better,
)
from tierkv.handoff.client import Restored
from tierkv.identity.blocks import BlockKey
from tierkv.store.base import Selector


def test_every_lossy_codec_has_a_floor_and_a_better_one_until_nothing_is_lost():
    for name in CODEC_NAMES:
        codec = codec_named(name)
        assert (floor_db(codec) > 0) == (codec.fidelity > 0)
        better = next_better(codec)
        assert better.fidelity < codec.fidelity or better.fidelity == 0
    assert [next_better(codec_named(name)).name for name in ("int8-g256", "int8", "int8z")] == [
        "int8", "lossless", "lossless",
    ]  # fmt: skip


def test_what_is_not_a_sample_is_none():
    good = {"codec": "int8+raw", "tokens": 100, "layers": [[0, 0, 39.5], [1, 1, None]], "positions": 8}
    good |= {"kl_mean": 1e-4, "top1_fraction": 1.0}
    sample = sample_of(good)
    assert sample == Sample(frozenset({"int8", "raw"}), 100, 8, 1e-4, 1.0, ((0, 39.5), (1, math.inf)))
    for change in (
        {"layers": None}, {"layers": [[0, 0]]}, {"layers": [["0", 0, 1.0]]}, {"layers": [[0, 0, "x"]]},
        {"layers": [[0, 0, 1.0]] * 9000}, {"layers": [[-1, 0, 1.0]]}, {"layers": [[1 << 40, 0, 1.0]]},
        {"kl_mean": math.nan}, {"kl_mean": -1.0}, {"tokens": None},
        {"top1_fraction": True},
    ):  # fmt: skip
        assert sample_of({**good, **change}) is None


def report(engine, layers, **more) -> None:
    values = {"codec": "int8", "tokens": 512, "positions": 32, "kl_mean": 2e-4, "top1_fraction": 1.0, **more}
    engine.client.sampled(engine.model, layers=layers, **values)
    engine.client.report_hot({})


def codecs_of(rig: Rig) -> set[tuple[int, str]]:
    """(layer, codec) of every segment in the vault."""
    found = set()
    for key, _ in rig.kv.store.records(Selector()):
        with rig.kv.store.open(key) as reader:
            data = reader.read(0, reader.size_bytes)
        _, offset = RecordHeader.unpack_frame(data)
        while offset < len(data):
            frame = FrameHeader.unpack(data[offset:])
            found.add((frame.layer, CodecId(frame.codec).name.lower()))
            offset += frame.frame_bytes
    return found


@pytest.fixture
def spiky(monkeypatch):
    """Layer 1's values as a group of 256 with one scale cannot hold them: one of them is sixty times the rest."""
    plain = agent_processes.state_of

    def state_of(layout, tokens):
        arrays = plain(layout, tokens)
        for key in [key for key in arrays if key[0] == 1]:
            values = np.random.default_rng(key[1]).standard_normal(arrays[key].shape).astype(np.float32)
            values[:, :, ::16, 0] = 60
            arrays[key] = values
        return arrays

    monkeypatch.setattr(agent_processes, "state_of", state_of)


def worst_db(rig: Rig, engine, restored: Restored, tokens) -> dict[int, float]:
    """Of each layer: energy of what was stored over that of the difference, in decibels."""
    exact = agent_processes.state_of(engine.layout, tokens[: restored.position])
    found: dict[int, float] = {}
    for (layer, _), array in exact.items():
        back = restored.arrays[layer, _].astype(np.float64)
        noise = np.sum((array - back) ** 2)
        db = 10 * math.log10(np.sum(array.astype(np.float64) ** 2) / noise) if noise else math.inf
        found[layer] = min(db, found.get(layer, math.inf))
    return found


async def shown_engine(rig: Rig, condition):
    async with asyncio.timeout(10):
        while True:
            (engine,) = (await rig.client.get_node()).node.engines
            if condition(engine):
                return engine
            await asyncio.sleep(0.05)


def root_of(rig: Rig) -> BlockKey:
    return next(iter(rig.agent.engines._engines.values())).models[0].root


def events_of(rig: Rig) -> list:
    return [each for each in rig.agent.telemetry.events.after(0)[0] if each.kind == "quality"]


async def sampled(rig: Rig, engine, layers, **more) -> None:
    before = rig.agent.quality.of(root_of(rig)).samples
    await asyncio.to_thread(report, engine, layers, **more)
    await until(lambda: rig.agent.quality.of(root_of(rig)).samples == before + 1)


async def test_a_layer_below_its_floor_is_stored_better_from_then_on(spiky):
    async with explained_agent(kv_codec="int8-g256") as rig:
        engine = await rig.engine()
        tokens = prompt(512)
        await demote(engine, tokens)
        assert codecs_of(rig) == {(0, "int8_g256"), (1, "int8_g256")}
        own = worst_db(rig, engine, await restore(engine, tokens, limit=512), tokens)
        await sampled(rig, engine, [[0, 0, 39.0], [0, 1, 31.0], [1, 0, 29.5], [1, 1, 40.0]], codec="int8-g256")
        quality = rig.agent.quality.of(root_of(rig))
        assert quality.raised == {}
        assert quality.suspects == {0: 31.0, 1: 29.5}
        rig.kv.store.purge(rig.kv.store.preview_purge(Selector()).token)
        await demote(engine, prompt(512, seed=1))
        await until(lambda: not quality.suspects)
        assert {layer: codec.name for layer, codec in quality.raised.items()} == {1: "int8"}
        raised, excused = events_of(rig)
        assert (raised.severity, excused.severity) == ("warning", "info")
        assert "layer 1 came back at 29.5 dB, and int8-g256 by itself leaves 29.1 dB" in raised.message
        assert raised.message.endswith("below its floor of 32.5 dB; it is stored as int8 from now on")
        assert float(raised.attributes["snr_db"]) == pytest.approx(own[1], abs=0.3)
        assert "a layer came back below int8-g256's floor of 32.5 dB (layer 0 at 31.0 dB)" in excused.message
        assert float(excused.attributes["snr_db"]) == pytest.approx(own[0], abs=1.0)
        await asyncio.to_thread(engine.client.report_hot, {})  # as hooks do once a second
        shown = await shown_engine(rig, lambda engine: engine.quality_raised_layers)
        assert (shown.quality_samples, shown.quality_raised_layers, shown.quality_codec) == (1, 1, "int8-g256")
        assert (shown.quality_kl_mean, shown.quality_snr_db_min) == (pytest.approx(2e-4), 29.5)
        rig.kv.store.purge(rig.kv.store.preview_purge(Selector()).token)
        tokens = prompt(512, seed=4)
        await demote(engine, tokens)
        assert codecs_of(rig) == {(0, "int8_g256"), (1, "int8")}
        better = worst_db(rig, engine, await restore(engine, tokens, limit=512), tokens)
        assert better[1] > own[1] + 3


async def test_what_the_models_own_rounding_does_to_a_layer_is_not_the_codecs_fault():
    """In bfloat16 the same tokens prefilled in other steps agree to some 32 dB, with no codec at all."""
    async with explained_agent(kv_codec="int8") as rig:
        engine = await rig.engine()
        for seed in range(3):
            await demote(engine, prompt(512, seed=seed))
            await sampled(rig, engine, [[0, 0, 31.8], [0, 1, 30.0], [1, 0, 33.0]])
        await demote(engine, prompt(512, seed=9))
        quality = rig.agent.quality.of(root_of(rig))
        await until(lambda: not quality.suspects)
        assert quality.raised == {}
        assert codecs_of(rig) == {(0, "int8"), (1, "int8")}
        (event,) = events_of(rig)
        assert (event.severity, event.attributes["layers"]) == ("info", "2")
        assert "2 layers came back below int8's floor of 35 dB (layer 0 at 30.0 dB)" in event.message


async def test_a_suspect_is_measured_on_the_next_prompt_whose_rows_are_stored():
    async with explained_agent(kv_codec="int8") as rig:
        engine = await rig.engine()
        tokens = prompt(512)
        await demote(engine, tokens)
        await sampled(rig, engine, [[0, 0, 31.8]])
        quality = rig.agent.quality.of(root_of(rig))
        await demote(engine, tokens)
        assert quality.suspects == {0: 31.8}
        await demote(engine, prompt(64, seed=3))
        await until(lambda: not quality.suspects)


async def test_not_more_is_measured_than_tells_enough(monkeypatch):
    """What it costs does not grow with the prompt."""
    monkeypatch.setattr(codec_loss, "ENOUGH_VALUES", 4096)
    seen = []
    real = transfer.loss_of
    monkeypatch.setattr(transfer, "loss_of", lambda *args: seen.append(args[1].size) or real(*args))
    async with explained_agent(kv_codec="int8", handoff_bytes=4 << 20) as rig:
        engine = await rig.engine()
        await demote(engine, prompt(512))
        assert seen == []
        await sampled(rig, engine, [[0, 0, 31.8]])
        await demote(engine, prompt(65_536, seed=2))
        assert 4096 <= sum(seen) <= 2 * 2 * 16 * 65_536 // 4
        await until(lambda: len(events_of(rig)) == 1)


def test_the_loss_of_a_codec_is_what_numpy_says():
    values = np.random.default_rng(3).standard_normal((1, 2, 64, 32)).astype(np.float32)
    for name, array, expected in (
        ("int8", values, None), ("lossless", values, math.inf), ("int8", np.full_like(values, np.nan), math.inf),
        ("int8", np.zeros_like(values), math.inf),
    ):  # fmt: skip
        codec = codec_named(name)
        header, buffers = encode_segment(codec, array, "float32", layer=5, index=1, position=0, token_axis=2)
        losses: codec_loss.Losses = {}
        for _ in range(2):
            codec_loss.add_losses(losses, codec_loss.loss_of(codec, array, header, bytes(buffers[1])))
        assert losses[5, 1].values == 2 * array.size
        if expected is None:
            back = np.empty_like(array)
            decode_segment(header, bytes(buffers[1]), back)
            expected = 10 * math.log10(np.sum(array.astype(float) ** 2) / np.sum((array.astype(float) - back) ** 2))
        assert losses[5, 1].snr_db == pytest.approx(expected, abs=1e-6)


def test_what_another_codec_lost_before_is_not_added():
    losses = {(0, 0): CodecLoss(codec_named("int8-g256"), 10, 1.0, 1.0)}
    codec_loss.add_losses(losses, {(0, 0): CodecLoss(codec_named("int8"), 4, 2.0, 0.5)})
    assert losses == {(0, 0): CodecLoss(codec_named("int8"), 4, 2.0, 0.5)}


async def test_a_restart_remembers_which_layers_were_raised(tmp_path, spiky):
    kept = tmp_path / "cache" / "raised-layers.json"
    async with explained_agent(kv_codec="int8-g256", raised_layers=kept) as rig:
        engine = await rig.engine()
        await sampled(rig, engine, [[0, 0, 39.0], [1, 0, 28.0]], codec="int8-g256")
        await demote(engine, prompt(512))
        root = root_of(rig)
        await until(lambda: not rig.agent.quality.of(root).suspects)
    assert json.loads(kept.read_text()) == {
        "schema": "tierkv.raised-layers/1", "models": {root.hex(): {"1": "int8"}},
    }  # fmt: skip
    async with explained_agent(kv_codec="int8-g256", raised_layers=kept) as rig:
        engine = await rig.engine()
        await demote(engine, prompt(512))
        assert codecs_of(rig) == {(0, "int8_g256"), (1, "int8")}
        (shown,) = (await rig.client.get_node()).node.engines
        assert (shown.quality_samples, shown.quality_raised_layers) == (0, 1)


async def test_what_follows_counts_where_it_was_compared():
    """A hybrid's rows are compared alone; its means begin with the first sample that has one."""
    async with explained_agent(kv_codec="int8") as rig:
        engine = await rig.engine()
        await sampled(rig, engine, [[0, 0, 39.0]], positions=0, kl_mean=0.0, top1_fraction=1.0)
        found = rig.agent.quality.of(root_of(rig))
        assert (found.samples, found.compared, found.kl_mean, found.top1_fraction) == (1, 0, 0.0, 0.0)
        await sampled(rig, engine, [[0, 0, 39.0]], kl_mean=1e-3, top1_fraction=0.5)
        assert (found.samples, found.compared, found.kl_mean, found.top1_fraction) == (2, 1, 1e-3, 0.5)
        await sampled(rig, engine, [[0, 0, 39.0]], kl_mean=2e-3, top1_fraction=1.0)
        assert (found.kl_mean, found.top1_fraction) == (pytest.approx(1.3e-3), pytest.approx(0.65))


ROOT = BlockKey(bytes(range(32)))
OTHER = BlockKey(bytes(32))


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "1", "null", '{"models": {}}', '{"schema": "tierkv.raised-layers/2", "models": {}}',
        '{"schema": "tierkv.raised-layers/1"}', '{"schema": "tierkv.raised-layers/1", "models": [1]}',
        '{"schema": "tierkv.raised-layers/1", "models": {"xy": {"1": "lossless"}, "00": {"1": "lossless"}}}',
        '{"schema": "tierkv.raised-layers/1", "models": {"' + ROOT.hex() + '": {"-1": "lossless", "1": "best"}}}',
        '{"schema": "tierkv.raised-layers/1", "models": {"' + ROOT.hex() + '": {"2": 3, "99999": "raw"}}}',
        "[" * 100_000, "\x00\xff",
    ],
)  # fmt: skip
def test_a_file_of_raised_layers_that_says_nothing_true_counts_for_nothing(tmp_path, text):
    path = tmp_path / "raised-layers.json"
    path.write_text(text)
    layers = RaisedLayers(path)
    assert layers.load() == {}
    layers.keep(ROOT, {1: codec_named("lossless")})
    assert layers.load() == {ROOT: {1: codec_named("lossless")}}


def test_raised_layers_of_other_models_stay_and_the_oldest_model_goes(tmp_path):
    layers = RaisedLayers(tmp_path / "raised-layers.json")
    better = {7: codec_named("int8"), 9: codec_named("lossless")}
    for number in range(MAX_MODELS):
        layers.keep(BlockKey(number.to_bytes(32, "big")), better)
    layers.keep(ROOT, better)
    found = layers.load()
    assert len(found) == MAX_MODELS
    assert OTHER not in found
    assert found[ROOT] == better
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raised-layers.json"]


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    layers = RaisedLayers(tmp_path / "file" / "raised-layers.json")
    layers.keep(ROOT, {1: codec_named("lossless")})
    assert layers.load() == {}
    assert "a restart forgets which layers were raised" in caplog.text


async def test_samples_of_another_codec_raise_nothing():
    async with explained_agent(kv_codec="lossless") as rig:
        engine = await rig.engine()
        await sampled(rig, engine, [[0, 0, 10.0]])
        quality = rig.agent.quality.of(root_of(rig))
        assert (quality.raised, quality.suspects) == ({}, {})
