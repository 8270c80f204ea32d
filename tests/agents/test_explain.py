"""For any request ``Explain`` says in one sentence why it was restored or computed, and shows it tier by tier."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
from agent_processes import TOKEN, Engine, assert_state, hybrid_layout, prompt, rows_layout
from explained_agent import Rig, demote, explained_agent, finding, restore, until
from faulty_vault import FaultyVault

from tierkv.agents.why import sentence_of
from tierkv.errors import Refused
from tierkv.handoff.client import ModelAnnouncement, ModelHandle, NotRestored, Restored, model_files
from tierkv.identity.blocks import BlockKey, PromptChain
from tierkv.rpc.explain_wire import explanation_from_proto, explanation_to_proto
from tierkv.state.layout import LayerLayout, Layout
from tierkv.store.base import Selector
from tierkv.telemetry.explanation import Explanation, RequestLine, TierFinding


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with explained_agent() as rig:
        yield rig


async def test_without_a_request_there_is_nothing_to_explain(rig: Rig):
    assert await rig.client.requests() == []
    with pytest.raises(Refused, match="no request has come yet"):
        await rig.explain()
    await rig.engine()
    with pytest.raises(Refused, match="no request has come yet"):
        await rig.explain(7)
    with pytest.raises(Refused, match="no engine here serves 'other'"):
        await rig.client.explain_prompt([1, 2, 3], "other")
    with pytest.raises(Refused, match="at least 2 tokens"):
        await rig.client.explain_prompt([1])


async def test_a_vault_has_no_requests(rig: Rig):
    with pytest.raises(Refused, match="ask the inference agent"):
        await rig.kv.node_client(rig.kv.token).requests()


async def test_a_whole_restore_needs_no_reason(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(700)
    await demote(engine, tokens)
    assert_state(await restore(engine, tokens), engine.layout, tokens, 699)
    explained = await rig.explain()
    peer = rig.kv.runtime.address
    assert explained.sentence.startswith(f"restored 699 of 700 tokens from {peer} in ")
    assert ";" not in explained.sentence
    kv = finding(explained, "kv")
    assert (kv.asked_tokens, kv.found_tokens, kv.used_tokens, kv.reason, kv.detail) == (699, 699, 699, "", "")
    assert kv.used_bytes == explained.restored_bytes > 0
    assert explained.codec == "lossless"
    assert explained.engine == "toy 1.0"
    assert explained.identity == engine.model.state or len(explained.identity) == 12


async def test_the_rest_was_never_stored(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(900)
    await demote(engine, tokens[:600])
    assert_state(await restore(engine, tokens), engine.layout, tokens, 600)
    explained = await rig.explain()
    assert explained.sentence.startswith("restored 600 of 900 tokens from ")
    assert explained.sentence.endswith("; the rest was never stored")
    assert (finding(explained, "kv").reason, finding(explained, "kv").found_tokens) == ("never_stored", 600)


@pytest.mark.parametrize("place", [300, 512, 700])
async def test_the_first_differing_token_is_named(rig: Rig, place: int):
    """Inside a block, at a block's first token, and inside the last, short block. Counted from 1."""
    engine = await rig.engine()
    stored = prompt(900)
    await demote(engine, stored)
    other = stored.copy()
    other[place] += 1
    assert_state(await restore(engine, other), engine.layout, other, place)
    explained = await rig.explain()
    kv = finding(explained, "kv")
    assert (kv.reason, kv.differs_at, kv.used_tokens) == ("differs", place + 1, place)
    assert f"the nearest stored prompt differs from token {place + 1:,} on" in explained.sentence


async def test_a_prompt_that_was_never_stored(rig: Rig):
    engine = await rig.engine()
    assert isinstance(await restore(engine, prompt(400)), NotRestored)
    explained = await rig.explain()
    assert explained.sentence == "nothing was restored of 400 tokens: never stored"
    assert explained.request.outcome == "computed"


async def missed_for_eviction(engine) -> tuple[np.ndarray, float]:
    """A prompt that others have pushed out of the vault and that was asked for, and when it was."""
    tokens = prompt(600)
    await demote(engine, tokens)
    for seed in range(1, 12):
        await demote(engine, prompt(600, seed))
    before = time.time()
    assert isinstance(await restore(engine, tokens), NotRestored)
    return tokens, before


async def test_an_evicted_prompt_says_when_and_why():
    async with explained_agent(vault={"cap_bytes": 1 << 20}) as rig:
        engine = await rig.engine(rows_layout(4))
        _, before = await missed_for_eviction(engine)
        explained = await rig.explain()
        kv = finding(explained, "kv")
        assert kv.reason == "evicted"
        assert before - 60 < kv.gone_unix_s <= before
        assert "evicted" in explained.sentence
        assert "before (the vault was full, policy lru)" in explained.sentence


async def test_an_evicted_prompt_says_when_and_why_also_after_it_was_stored_again():
    async with explained_agent(vault={"cap_bytes": 1 << 20}) as rig:
        engine = await rig.engine(rows_layout(4))
        tokens, before = await missed_for_eviction(engine)
        await demote(engine, tokens)
        assert rig.kv.store.lookup(PromptChain.of(engine_root(rig), tokens).keys[:1])[0] is not None
        explained = await rig.explain()
        kv = finding(explained, "kv")
        assert kv.reason == "evicted"
        assert before - 60 < kv.gone_unix_s <= before
        assert "before (the vault was full, policy lru)" in explained.sentence


async def test_a_purged_prompt(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(400)
    await demote(engine, tokens)
    rig.kv.store.purge(rig.kv.store.preview_purge(Selector()).token)
    assert isinstance(await restore(engine, tokens), NotRestored)
    explained = await rig.explain()
    assert finding(explained, "kv").reason == "purged"
    assert finding(explained, "kv").gone_unix_s > 0
    assert "purged by somebody" in explained.sentence


async def test_an_expired_prompt():
    async with explained_agent(vault={"ttl_s": 0.05}) as rig:
        engine = await rig.engine()
        tokens = prompt(400)
        await demote(engine, tokens)
        rig.kv.store.adjust(ttl_s=0.01)
        await asyncio.sleep(0.1)
        rig.kv.store._catalog._leases.clear()
        for _ in range(3):
            rig.kv.store.sweep()
        assert isinstance(await restore(engine, tokens), NotRestored)
        explained = await rig.explain()
        assert finding(explained, "kv").reason == "expired"
        assert "(not used for longer than ttl_s)" in explained.sentence


async def test_a_layout_that_differs_says_in_which_layer(rig: Rig):
    engine = await rig.engine(hybrid_layout(window=True))
    tokens = prompt(400)
    await demote(engine, tokens)
    layers = list(engine.layout.layers)
    layers[3] = LayerLayout("window", "RotatingKVCache", layers[3].arrays, (("max_size", 128),))
    got = await restore(engine, tokens, expected=Layout(tuple(layers)).signature())
    assert got == NotRestored("foreign_layout")
    explained = await rig.explain()
    there, here = "RotatingKVCache(max_size 64)", "RotatingKVCache(max_size 128)"
    assert f"another cache layout (layer 3 is a {there} there, a {here} here)" in explained.sentence


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"kv_bits": 8}, "kv_bits (none there, 8 here)"),
        ({"max_kv_size": 4096}, "max_kv_size (none there, 4096 here)"),
        ({"dtype": "float16"}, "dtype (none there, float16 here)"),
        ({"config": "{}"}, "config"),
    ],
)
async def test_another_identity_says_which_part_differs(rig: Rig, change: dict, part: str):
    engine = await rig.engine()
    tokens = prompt(400)
    await demote(engine, tokens)
    options = {"config": '{"layers": 2}', **change}
    engine.model = engine.client.announce(ModelAnnouncement("toy", model_files(engine.folder), **options))
    await asyncio.to_thread(engine.ready)
    assert isinstance(await restore(engine, tokens), NotRestored)
    explained = await rig.explain()
    assert finding(explained, "kv").reason == "other_identity"
    assert explained.differing_parts == (part,)
    assert f": {part})" in explained.sentence
    # What was computed instead is stored a moment later, and the request is explained as it was.
    await demote(engine, tokens)
    assert f": {part})" in (await rig.explain()).sentence
    assert isinstance(await restore(engine, tokens), Restored)
    assert "identity" not in (await rig.explain()).sentence


async def test_other_weights_and_adapters_are_told_by_name(rig: Rig):
    first = await rig.engine(weights=b"one")
    tokens = prompt(400)
    await demote(first, tokens)
    second = await rig.engine(weights=b"two")
    assert isinstance(await restore(second, tokens), NotRestored)
    assert (await rig.explain()).differing_parts == ("weights",)
    files = model_files(first.folder)
    adapted = ModelAnnouncement("toy", files, '{"layers": 2}', adapter=model_files(second.folder))
    first.model = first.client.announce(adapted)
    await asyncio.to_thread(first.ready)
    assert isinstance(await restore(first, tokens), NotRestored)
    assert finding(await rig.explain(), "kv").detail.endswith(": adapter)")


async def test_another_tenants_salt_is_told_and_not_shown(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(400)
    await demote(engine, tokens)
    rig.agent.engines._parts.registry._tenant = "a tenant's secret name"
    engine.model = engine.client.announce(ModelAnnouncement("again", model_files(engine.folder), '{"layers": 2}'))
    await asyncio.to_thread(engine.ready)
    assert isinstance(await restore(engine, tokens), NotRestored)
    explained = await rig.explain()
    assert explained.differing_parts == ("tenant",)
    assert "secret" not in repr(explained)
    assert "secret" not in (rig.agent.identities._path).read_text()


async def test_another_config_file_is_not_taken_for_other_weights(rig: Rig):
    """It is one of the files that the weights' digest covers."""
    first = await rig.engine()
    tokens = prompt(400)
    await demote(first, tokens)
    (first.folder / "config.json").write_text('{"layers": 3}')
    first.model = first.client.announce(ModelAnnouncement("toy", model_files(first.folder), '{"layers": 3}'))
    await asyncio.to_thread(first.ready)
    assert isinstance(await restore(first, tokens), NotRestored)
    assert (await rig.explain()).differing_parts == ("config, and perhaps weights",)


async def test_an_identity_of_another_machine_is_told_as_unknown(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(400)
    await demote(engine, tokens)
    other = await rig.engine(weights=b"two")
    rig.agent.identities._known.clear()
    assert isinstance(await restore(other, tokens), NotRestored)
    explained = await rig.explain()
    assert explained.differing_parts == ()
    assert "this agent has never seen it" in explained.sentence


async def test_a_damaged_record_is_named_as_such(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(700)
    await demote(engine, tokens)
    damage(rig, second_block(rig, tokens))
    assert_state(await restore(engine, tokens), engine.layout, tokens, 256)
    explained = await rig.explain()
    kv = finding(explained, "kv")
    assert kv.refused == {"damaged": 1}
    assert kv.reason == "damaged"
    assert explained.sentence.startswith("restored 256 of 700 tokens")
    assert "damaged" in explained.sentence


async def test_a_prompt_that_is_damaged_in_many_places_heals_at_once(rig: Rig):
    """Every other block of twelve: one request finds the first, what is computed instead brings all of them again."""
    engine = await rig.engine()
    tokens = prompt(12 * 256 + 40)
    await demote(engine, tokens)
    chain = PromptChain.of(engine_root(rig), tokens)
    for index in (1, 4, 5, 8, 11):
        damage(rig, chain.keys[index])
    assert_state(await restore(engine, tokens), engine.layout, tokens, 256)
    await until(lambda: rig.kv.store.stats().quarantined_records == 5)
    await demote(engine, tokens)
    assert_state(await restore(engine, tokens), engine.layout, tokens, len(tokens) - 1)


def engine_root(rig: Rig) -> BlockKey:
    (root,) = {prefix.leaf.header.root for prefix in rig.kv.store.prefixes(Selector())}
    return root


def damage(rig: Rig, key: BlockKey) -> None:
    with rig.kv.store.open(key) as reader:
        view = np.frombuffer(reader.views(reader.size_bytes - 40, 8)[0], np.uint8)
        ctypes.memset(view.ctypes.data, int(view[0]) ^ 0xFF, 1)


def second_block(rig: Rig, tokens: np.ndarray) -> BlockKey:
    headers = [prefix.leaf.header for prefix in rig.kv.store.prefixes(Selector())]
    (leaf,) = [header for header in headers if header.end == len(tokens)]
    return leaf.parent


async def test_a_vault_that_is_gone_and_then_left_alone(rig: Rig):
    engine = await rig.engine()
    await rig.kv.runtime.stop(0.0)
    assert isinstance(await restore(engine, prompt(400)), NotRestored)
    first = await rig.explain()
    assert finding(first, "kv").reason in ("unreachable", "timed_out")
    assert "not reachable" in first.sentence or "too slow" in first.sentence
    assert isinstance(await restore(engine, prompt(400)), NotRestored)
    second = await rig.explain()
    assert finding(second, "kv").reason == "breaker_open"
    assert "left alone for a while" in second.sentence


@pytest.mark.parametrize(
    ("fault", "reason", "words"),
    [
        ("truncate", "wrong_service", "sent what is not a TierKV stream"),
        ("empty", "wrong_service", "ended a stream before its end"),
        ("huge-message", "wrong_service", "sent a larger message than any may be"),
        ("freeze", "timed_out", "no data for"),
        ("damage", "bad_checksum", "a record was damaged or foreign (bad_checksum)"),
    ],
)
async def test_a_fault_of_one_vault_in_a_restore_is_told_of_that_vault(fault: str, reason: str, words: str):
    faulty = FaultyVault(token=TOKEN).start()
    try:
        async with explained_agent(kv_address=faulty.address) as rig:
            engine = await rig.engine(hybrid_layout())
            tokens = prompt(600)
            await demote(engine, tokens[:599])
            faulty.fault = fault
            assert isinstance(await restore(engine, tokens), NotRestored)
            explained = await rig.explain()
            kv, ssm = finding(explained, "kv"), finding(explained, "ssm")
            assert kv.reason == reason
            assert words in kv.detail
            assert words in explained.sentence
            assert fault == "damage" or faulty.address in explained.sentence
            assert ssm.reason == "no_rows_for_it"
    finally:
        faulty.stop()


async def test_a_vault_whose_checkpoints_cannot_be_had_does_not_put_the_blame_on_the_one_with_the_rows(rig: Rig):
    engine = await rig.engine(hybrid_layout())
    tokens = prompt(600)
    await demote(engine, tokens[:599])
    await rig.ssm.runtime.stop(0.0)
    assert isinstance(await restore(engine, tokens), NotRestored)
    explained = await rig.explain()
    kv, ssm = finding(explained, "kv"), finding(explained, "ssm")
    assert ssm.reason in ("unreachable", "timed_out")
    assert ssm.peer in explained.sentence
    assert (kv.reason, kv.detail, kv.found_tokens) == ("", "", 599)


async def test_a_missing_checkpoint_and_an_evicted_one(rig: Rig):
    engine = await rig.engine(hybrid_layout())
    tokens = prompt(600)
    await demote(engine, tokens[:520])
    assert_state(await restore(engine, tokens), engine.layout, tokens, 520)
    explained = await rig.explain()
    assert finding(explained, "ssm").checkpoints == (520,)
    assert finding(explained, "ssm").used_tokens == 520
    rig.ssm.store.purge(rig.ssm.store.preview_purge(Selector()).token)
    assert isinstance(await restore(engine, tokens), NotRestored)
    explained = await rig.explain()
    ssm = finding(explained, "ssm")
    assert (ssm.reason, ssm.found_tokens) == ("purged", 0)
    assert "purged by somebody" in explained.sentence


async def test_windows_and_rows_of_the_same_tokens_are_not_added_up(rig: Rig):
    engine = await rig.engine(hybrid_layout(window=True))
    tokens = prompt(600)
    await demote(engine, tokens[:520])
    assert_state(await restore(engine, tokens), engine.layout, tokens, 520)
    explained = await rig.explain()
    assert [finding(explained, tier).used_tokens for tier in ("kv", "ssm")] == [520, 520]


@pytest.mark.parametrize(("outcome", "position"), [("restored", 1014), ("computed", 0)])
def test_what_waits_to_be_sent_is_no_reason_where_a_vault_has_one(outcome: str, position: int):
    """The queue holds another prompt that begins alike; the vault's record of this one is damaged."""
    queue = TierFinding("kv", "queue", True, 1999, 10, reason="differs", detail="differs from 11 on", differs_at=11)
    vault = TierFinding("kv", "v:1", True, 1999, 1999, position, reason="bad_checksum", detail="a record was damaged")
    request = RequestLine(1, 0.0, "m", 2000, 0, position, outcome, "bad_checksum", 0.01)
    told = sentence_of(Explanation(request, "", (queue, vault)), prompt_only=False, least_tokens=64)
    assert told.endswith("a record was damaged")
    alone = sentence_of(Explanation(request, "", (queue,)), prompt_only=False, least_tokens=64)
    assert alone.endswith("differs from 11 on")


async def test_a_long_sentence_comes_whole(rig: Rig):
    """Of the network's texts 200 characters are kept; of what an agent explains, 500."""
    await restore(await rig.engine(), prompt(600))
    long = replace(await rig.explain(), sentence="s" * 450 + ".")
    assert explanation_from_proto(explanation_to_proto(long)).sentence == long.sentence


async def test_too_lossy_records(rig: Rig):
    engine = await rig.engine()
    await rig.agent._set_codec("kv", "int8")
    tokens = prompt(400)
    await demote(engine, tokens)
    rig.agent.promoter.set_worst_fidelity(0)
    assert isinstance(await restore(engine, tokens), NotRestored)
    assert "stored less exactly than worst_fidelity allows" in (await rig.explain()).sentence


async def test_a_prompt_too_short_to_ask_for(rig: Rig):
    engine = await rig.engine()
    rig.agent.settings.min_restore_tokens = 64
    engine.client.served(engine.model, 30, have=0, position=0, reason="too_short", asked=False)
    await _told(rig, engine, 1)
    explained = await rig.explain()
    assert explained.sentence == "nothing was restored of 30 tokens: fewer than 64 tokens were left to gain"
    assert [each.tier for each in explained.tiers] == ["hot"]


async def test_what_the_engine_had_itself(rig: Rig):
    engine = await rig.engine()
    engine.client.served(engine.model, 500, have=499, position=499, reason="covered", asked=False)
    await _told(rig, engine, 1)
    explained = await rig.explain()
    assert explained.sentence == "499 of 500 tokens were in the engine's own cache"
    assert (explained.request.outcome, finding(explained, "hot").used_tokens) == ("hot", 499)


async def test_the_hot_tier_says_when_and_why_it_evicted(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(600)
    await asyncio.to_thread(
        engine.client.offer, engine.model, tokens, 600, engine.layout, budget_s=5.0, leaving="memory was over it"
    )
    assert isinstance(await restore(engine, tokens, have=0), NotRestored)
    hot = finding(await rig.explain(), "hot")
    assert (hot.reason, hot.found_tokens) == ("evicted", 0)
    assert hot.gone_unix_s > 0
    assert hot.detail.endswith("before (memory was over it)")


async def test_a_restore_that_the_hook_did_not_use(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(400)
    await demote(engine, tokens)
    await restore(engine, tokens)
    engine.client.served(engine.model, 400, have=0, position=0, reason="foreign_layout", asked=True)
    await asyncio.to_thread(engine.client.report_hot, {})
    await until(lambda: next(rig.agent.traces.latest()).outcome == "computed")
    explained = await rig.explain()
    assert explained.request.reason == "foreign_layout"
    assert explained.sentence.startswith("nothing was restored of 400 tokens: ")


# --- a state that takes another form as it grows ------------------------------------------------------


async def two_forms(rig: Rig, layout: Layout | None = None) -> tuple[Engine, ModelHandle, ModelHandle]:
    """A model's cache up to 512 tokens, and beyond: the hook asks for the longer one first."""
    engine = await rig.engine(layout)
    short = engine.model
    long = engine.client.announce(ModelAnnouncement("toy", model_files(engine.folder), '{"layers": 2}', kv_bits=8))
    engine.model = long
    await asyncio.to_thread(engine.ready)
    return engine, short, long


async def ask_both(engine: Engine, short: ModelHandle, long: ModelHandle, tokens: np.ndarray):
    engine.model = long
    got = await restore(engine, tokens, above=512, more=True)
    if isinstance(got, NotRestored):
        engine.model = short
        got = await restore(engine, tokens, limit=512)
    return got


async def test_two_forms_are_one_request(rig: Rig):
    engine, short, long = await two_forms(rig)
    tokens = prompt(900)
    engine.model = short
    await demote(engine, tokens[:512])
    assert_state(await ask_both(engine, short, long, tokens), engine.layout, tokens, 512)
    assert [(line.prompt_tokens, line.outcome) for line in await rig.client.requests()] == [(900, "restored")]
    told = await rig.explain()
    assert told.sentence.startswith("restored 512 of 900 tokens from ")
    assert "; the rest did not come: stored under another identity (toy as " in told.sentence
    assert told.sentence.endswith(": kv_bits (none there, 8 here))")
    tiers = {each.name: each for each in rig.agent.telemetry.snapshot().tiers}
    assert (tiers["kv"].hits, tiers["kv"].misses) == (1, 0)


async def test_a_prompt_that_is_there_in_the_other_form_alone(rig: Rig):
    """Also where other prompts are stored in the form that was asked for."""
    engine, short, _ = await two_forms(rig)
    tokens = prompt(600)
    await demote(engine, tokens)
    engine.model = short
    await demote(engine, prompt(400, 5))
    assert isinstance(await restore(engine, tokens[:500]), NotRestored)
    kv = finding(await rig.explain(), "kv")
    assert (kv.reason, kv.differs_at) == ("other_identity", 0)
    assert "kv_bits (8 there, none here)" in kv.detail


async def test_of_two_forms_the_one_that_tells_more_is_told(rig: Rig):
    """Rows of the longer form are there and no checkpoint; of the shorter form there is nothing."""
    engine, short, long = await two_forms(rig, hybrid_layout())
    tokens = prompt(900)
    await demote(engine, tokens[:899])
    rig.ssm.store.purge(rig.ssm.store.preview_purge(Selector()).token)
    assert isinstance(await ask_both(engine, short, long, tokens), NotRestored)
    (line,) = await rig.client.requests()
    assert (line.prompt_tokens, line.outcome, line.position) == (900, "computed", 0)
    told = await rig.explain(line.id)
    assert finding(told, "kv").found_tokens == 899
    assert "purged by somebody" in told.sentence
    engine.client.served(short, 900, have=0, position=0, reason="", asked=True)
    await asyncio.to_thread(engine.client.report_hot, {})
    misses = {each.name: each.misses for each in rig.agent.telemetry.snapshot().tiers}
    assert misses["kv"] == 1
    assert len(await rig.client.requests()) == 1


async def test_nothing_short_of_the_longer_form_is_used_in_its_place(rig: Rig):
    engine, _, _ = await two_forms(rig)
    tokens = prompt(900)
    await demote(engine, tokens[:500])
    assert isinstance(await restore(engine, tokens, above=512), NotRestored)
    assert_state(await restore(engine, tokens, above=499), engine.layout, tokens, 500)
    # What min_restore_tokens asks for counts from what the engine has, not from where the form begins.
    rig.agent.settings.min_restore_tokens = 64
    assert_state(await restore(engine, tokens, above=499), engine.layout, tokens, 500)


async def test_another_prompt_that_follows_is_another_request(rig: Rig):
    engine, short, _ = await two_forms(rig)
    await restore(engine, prompt(900), above=512, more=True)
    engine.model = short
    await restore(engine, prompt(900, 5), limit=512)
    assert len(await rig.client.requests()) == 2


async def test_a_prompt_file_is_explained_by_the_form_that_has_it(rig: Rig):
    engine, short, _ = await two_forms(rig)
    tokens = prompt(400)
    engine.model = short
    await demote(engine, tokens)
    told = await rig.client.explain_prompt(tokens.tolist())
    assert told.sentence == "399 of 400 tokens would be restored"


async def test_requests_are_listed_the_latest_first_and_bounded(rig: Rig):
    engine = await rig.engine()
    for n in (300, 301, 302):
        await restore(engine, prompt(n))
    lines = await rig.client.requests()
    assert [(line.id, line.prompt_tokens) for line in lines] == [(3, 302), (2, 301), (1, 300)]
    assert [line.id for line in await rig.client.requests(2)] == [3, 2]
    rig.agent.traces._kept = 2
    await restore(engine, prompt(303))
    assert [line.id for line in await rig.client.requests()] == [4, 3]
    with pytest.raises(Refused):
        await rig.explain(1)


async def test_a_prompt_is_explained_without_a_request_and_without_a_trace_of_it(rig: Rig):
    engine = await rig.engine()
    tokens = prompt(900)
    await demote(engine, tokens[:600])
    hits = rig.kv.runtime.telemetry.tier("kv").snapshot().hits
    explained = await rig.client.explain_prompt(tokens.tolist())
    assert explained.sentence == "600 of 900 tokens would be restored; the rest was never stored"
    assert rig.kv.runtime.telemetry.tier("kv").snapshot().hits == hits
    assert await rig.client.requests() == []
    unknown = await rig.client.explain_prompt(prompt(300, seed=3).tolist(), "toy")
    assert (
        unknown.sentence == "nothing would be restored of 300 tokens: the nearest stored prompt differs from token 1 on"
    )


async def test_a_model_whose_weights_are_not_known_yet(rig: Rig):
    engine = await rig.engine()
    for model in next(iter(rig.agent.engines._engines.values())).models.values():
        model.state = "hashing"
    assert isinstance(await restore(engine, prompt(300)), NotRestored)
    assert "still being hashed" in (await rig.explain()).sentence


async def test_no_token_and_no_text_is_kept(rig: Rig):
    """What a trace holds of a prompt cannot be turned back: keys are hashes, the rest are numbers."""
    engine = await rig.engine()
    tokens = np.arange(400) * 1_000_003 + 123_456_789_012
    await restore(engine, tokens)
    shown = repr(next(rig.agent.traces.latest())) + repr(await rig.explain())
    assert not any(str(token) in shown for token in tokens)


async def _told(rig: Rig, engine, requests: int) -> None:
    await asyncio.to_thread(engine.client.report_hot, {})
    await until(lambda: len(rig.agent.traces) >= requests)
