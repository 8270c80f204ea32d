"""Live samples are counted and shown; a layer that breaks its codec's floor is stored as a better codec."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
from agent_processes import prompt
from explained_agent import Rig, demote, explained_agent, restore, until

from tierkv.agents.quality import Sample, sample_of
from tierkv.agents.raised_layers import MAX_MODELS, RaisedLayers
from tierkv.codec.frame import CodecId, FrameHeader
from tierkv.codec.record import RecordHeader
from tierkv.codec.registry import CODEC_NAMES, codec_named, floor_db, next_better
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
        {"layers": [[0, 0, 1.0]] * 9000}, {"kl_mean": math.nan}, {"kl_mean": -1.0}, {"tokens": None},
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


async def test_a_layer_below_its_floor_is_stored_better_from_then_on():
    async with explained_agent(kv_codec="int8") as rig:
        engine = await rig.engine()
        await demote(engine, prompt(512))
        assert codecs_of(rig) == {(0, "int8"), (1, "int8")}
        await asyncio.to_thread(report, engine, [[0, 0, 39.0], [0, 1, 41.0], [1, 0, 31.5], [1, 1, 40.0]])
        quality = rig.agent.quality
        root = next(iter(rig.agent.engines._engines.values())).models[0].root
        await until(lambda: quality.of(root).samples == 1)
        assert {layer: codec.name for layer, codec in quality.of(root).raised.items()} == {1: "lossless"}
        events = [each for each in rig.agent.telemetry.events.after(0)[0] if each.kind == "quality"]
        assert [each.severity for each in events] == ["warning"]
        assert "layer 1 came back at 31.5 dB with int8, whose floor is 35 dB" in events[0].message
        (shown,) = (await rig.client.get_node()).node.engines
        assert (shown.quality_samples, shown.quality_raised_layers, shown.quality_codec) == (1, 1, "int8")
        assert (shown.quality_kl_mean, shown.quality_snr_db_min) == (pytest.approx(2e-4), 31.5)
        rig.kv.store.purge(rig.kv.store.preview_purge(Selector()).token)
        tokens = prompt(512, seed=4)
        await demote(engine, tokens)
        assert codecs_of(rig) == {(0, "int8"), (1, "lossless")}
        assert isinstance(await restore(engine, tokens), Restored)


async def test_a_restart_remembers_which_layers_were_raised(tmp_path):
    kept = tmp_path / "cache" / "raised-layers.json"
    async with explained_agent(kv_codec="int8", raised_layers=kept) as rig:
        engine = await rig.engine()
        await demote(engine, prompt(512))
        await asyncio.to_thread(report, engine, [[0, 0, 39.0], [1, 0, 31.5]])
        root = next(iter(rig.agent.engines._engines.values())).models[0].root
        await until(lambda: rig.agent.quality.of(root).samples == 1)
    assert json.loads(kept.read_text()) == {
        "schema": "tierkv.raised-layers/1", "models": {root.hex(): {"1": "lossless"}},
    }  # fmt: skip
    async with explained_agent(kv_codec="int8", raised_layers=kept) as rig:
        engine = await rig.engine()
        await demote(engine, prompt(512))
        assert codecs_of(rig) == {(0, "int8"), (1, "lossless")}
        (shown,) = (await rig.client.get_node()).node.engines
        assert (shown.quality_samples, shown.quality_raised_layers) == (0, 1)


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
        await asyncio.to_thread(report, engine, [[0, 0, 10.0]])
        root = next(iter(rig.agent.engines._engines.values())).models[0].root
        await until(lambda: rig.agent.quality.of(root).samples == 1)
        assert rig.agent.quality.of(root).raised == {}
