"""Store, probe, promote, touch and the administration of a vault, over real gRPC and in process."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import numpy as np
import pytest
from running_vaults import Vault, running_vault
from wire_records import ROOT, blocks_of, checkpoint, prompt, put, record, take

from tierkv.codec.record import RecordKind
from tierkv.errors import NotAuthenticated, PeerError, StaleToken
from tierkv.identity.blocks import BlockKey, Media, PromptChain
from tierkv.rpc import probing, wire
from tierkv.rpc.auth import Token
from tierkv.rpc.bulk import ChunkKind, read_chunks
from tierkv.rpc.local import LocalVault
from tierkv.rpc.vault_port import Missing, Piece, VaultPort
from tierkv.store.base import Selector
from tierkv.v1 import vault_service_pb2 as pb
from tierkv.v1 import vault_service_pb2_grpc as pb_grpc

WRONG = Token("wrong-wrong-wrong-wrong", True, "given")


@pytest.fixture(params=["remote", "local"])
async def port(request: pytest.FixtureRequest, vault: Vault) -> VaultPort:
    """The same promises, whether the vault is behind a wire or not."""
    return vault.client() if request.param == "remote" else LocalVault(vault.store, telemetry=vault.runtime.telemetry)


# --- what goes in comes out ---------------------------------------------------------------------


async def test_many_records_come_back_byte_for_byte_in_the_order_asked(port: VaultPort):
    chain = prompt(256 * 40 + 17)
    records = blocks_of(chain, size=30_000)
    assert await put(port, records) == ["stored"] * 41
    order = [*range(40, -1, -3), *range(41)]
    assert await take(port, [records[i].key for i in order]) == [records[i].data for i in order]


async def test_a_record_larger_than_a_message_comes_back(port: VaultPort):
    big = record(RecordKind.STATE, ROOT, [1, 2], 0, size=5_000_001)
    assert await put(port, [big]) == ["stored"]
    assert await take(port, [big.key]) == [big.data]


async def test_records_that_are_not_there_say_so_in_their_place(port: VaultPort):
    here = record(RecordKind.BLOCK, ROOT, [1], 0)
    await put(port, [here])
    absent = BlockKey(b"\x09" * 32)
    assert await take(port, [absent, here.key, absent]) == ["never_stored", here.data, "never_stored"]


async def test_storing_twice_keeps_one_and_better_fidelity_replaces(port: VaultPort):
    lossy = record(RecordKind.BLOCK, ROOT, [1], 0, fidelity=20)
    exact = record(RecordKind.BLOCK, ROOT, [1], 0, fidelity=0, seed=2)
    assert await put(port, [lossy, lossy, exact, lossy]) == ["stored", "present", "replaced", "present"]
    assert await take(port, [lossy.key]) == [exact.data]


async def test_nothing_asked_nothing_answered(port: VaultPort):
    assert await put(port, []) == []
    assert await take(port, []) == []
    assert await port.touch([]) == []


async def test_touch_says_which_are_there(port: VaultPort):
    here = record(RecordKind.BLOCK, ROOT, [1], 0)
    await put(port, [here])
    assert await port.touch([here.key, BlockKey(bytes(32)), here.key]) == [True, False, True]


async def test_a_promote_that_is_left_early_closes_its_record(port: VaultPort, vault: Vault):
    big = record(RecordKind.STATE, ROOT, [1, 2], 0, size=20_000_000, segments=1)
    await put(port, [big])
    async with contextlib.aclosing(port.promote([big.key] * 3)) as items:
        async for item in items:
            assert isinstance(item, Piece)
            break
    for _ in range(100):
        if not vault.store._catalog._readers:
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("the record stayed open")


async def test_message_size_is_the_readers_choice(vault: Vault):
    big = record(RecordKind.STATE, ROOT, [1], 0, size=3_000_000)
    small = vault.client(message_bytes=64 << 10)
    assert await put(small, [big]) == ["stored"]
    assert await take(small, [big.key]) == [big.data]


# --- refusals are polite and single -------------------------------------------------------------


async def test_a_refused_record_does_not_stop_the_others():
    async with running_vault(max_record_bytes=100_000) as vault:
        client = vault.client()
        good = blocks_of(prompt(700))
        too_large = record(RecordKind.STATE, ROOT, [9], 0, size=100_000)
        damaged = bytearray(good[1].data)
        damaged[-1] ^= 1

        async def sent():
            yield good[0].header, [good[0].data]
            yield too_large.header, [too_large.data]
            yield good[1].header, [bytes(damaged)]
            yield good[2].header, [good[2].data]
            yield good[2].header, [good[2].data[:50]]

        outcomes = await client.store(sent())
        assert [outcome.outcome for outcome in outcomes] == [
            "stored",
            "too_large",
            "bad_checksum",
            "stored",
            "truncated",
        ]
        assert [outcome.accepted for outcome in outcomes] == [True, False, False, True, False]
        assert [outcome.key for outcome in outcomes[:4]] == [good[0].key, too_large.key, good[1].key, good[2].key]
        tier = vault.runtime.telemetry.tier("kv").snapshot()
        assert tier.refusals == {"too_large": 1, "bad_checksum": 1, "truncated": 1}
        assert tier.stores == 2
        assert tier.bytes_in == len(good[0].data) + len(good[2].data)


async def test_a_record_from_before_a_purge_is_refused(port: VaultPort, vault: Vault):
    first = record(RecordKind.BLOCK, ROOT, [1], 0, epoch=vault.store.epoch)
    await put(port, [first])
    vault.store.purge(vault.store.preview_purge(Selector()).token)
    assert await put(port, [first]) == ["stale_epoch"]
    renewed = record(RecordKind.BLOCK, ROOT, [1], 0, epoch=vault.store.epoch)
    assert await put(port, [renewed]) == ["stored"]


async def test_a_full_vault_refuses_and_goes_on(vault: Vault):
    client = vault.client()
    huge = record(RecordKind.STATE, ROOT, [1], 0, size=33 << 20, segments=1)
    await put(client, [huge])
    vault.store.pin(Selector())
    other = record(RecordKind.STATE, ROOT, [2], 0, size=33 << 20, segments=1)
    small = record(RecordKind.STATE, ROOT, [3], 0)
    assert await put(client, [other, small]) == ["full", "stored"]


# --- probing ------------------------------------------------------------------------------------


async def test_a_prompt_is_found_to_the_token(port: VaultPort):
    stored = prompt(256 * 3 + 100)
    await put(port, blocks_of(stored))
    found = await port.probe(stored, blocks=True)
    assert (found.leading_blocks, sorted(found.blocks)) == (3, [0, 1, 2])
    assert found.partial is not None
    assert (found.partial.start, found.partial.agreeing, found.partial.end) == (768, 100, 868)
    longer = PromptChain.of(ROOT, np.concatenate([stored.tokens, np.arange(5000)]))
    found = await port.probe(longer, blocks=True)
    assert (found.leading_blocks, found.partial and found.partial.agreeing) == (3, 100)


async def test_a_divergence_inside_a_block_is_found_where_it_is(port: VaultPort):
    stored = prompt(256 * 3)
    await put(port, blocks_of(stored))
    tokens = stored.tokens.copy()
    tokens[300] += 1
    found = await port.probe(PromptChain.of(ROOT, tokens), blocks=True)
    assert found.leading_blocks == 1
    assert found.partial is not None
    assert (found.partial.key, found.partial.start, found.partial.agreeing) == (stored.keys[1], 256, 44)
    tokens[0] += 1
    found = await port.probe(PromptChain.of(ROOT, tokens), blocks=True)
    assert (found.blocks, found.partial, found.missing.reason) == ({}, None, "never_stored")


async def test_a_prompt_shorter_than_a_block_uses_the_head_of_one(port: VaultPort):
    stored = prompt(256)
    await put(port, blocks_of(stored))
    found = await port.probe(PromptChain.of(ROOT, stored.tokens[:90]), blocks=True)
    assert (found.leading_blocks, found.partial and found.partial.agreeing) == (0, 90)


async def test_the_child_that_agrees_longest_is_chosen(port: VaultPort):
    tokens = prompt(250).tokens
    await put(port, [record(RecordKind.BLOCK, ROOT, tokens[:n], 0) for n in (50, 200, 120)])
    found = await port.probe(PromptChain.of(ROOT, tokens[:180]), blocks=True)
    assert found.partial is not None
    assert (found.partial.n_tokens, found.partial.agreeing) == (200, 180)


async def test_holes_in_a_chain_are_reported(port: VaultPort):
    chain = prompt(256 * 4)
    records = blocks_of(chain)
    await put(port, [records[0], records[1], records[3]])
    found = await port.probe(chain, blocks=True)
    assert (found.leading_blocks, sorted(found.blocks), found.missing.reason) == (2, [0, 1, 3], "never_stored")


async def test_checkpoints_serve_only_where_their_tail_is_a_prefix(port: VaultPort):
    chain = prompt(900)
    other = PromptChain.of(ROOT, np.concatenate([chain.tokens[:600], [7] * 50]))
    await put(
        port,
        [
            checkpoint(chain, 100), checkpoint(chain, 512), checkpoint(chain, 800), checkpoint(other, 640),
            checkpoint(chain, 300, RecordKind.WINDOW), checkpoint(chain, 890),
        ],
    )  # fmt: skip
    asked = PromptChain.of(ROOT, chain.tokens[:850])
    found = await port.probe(asked, states=True)
    assert [each_.end for each_ in found.states] == [800, 512, 100]
    assert found.windows == ()
    assert found.leading_blocks == 0
    found = await port.probe(asked, windows=True, states=True)
    assert [each_.end for each_ in found.windows] == [300]


async def test_too_lossy_records_are_misses_with_that_reason(port: VaultPort):
    chain = prompt(600)
    await put(port, blocks_of(chain, fidelity=20))
    found = await port.probe(chain, blocks=True, worst_fidelity=0)
    assert (found.blocks, found.partial, found.missing.reason) == ({}, None, "too_lossy")
    assert (await port.probe(chain, blocks=True, worst_fidelity=20)).leading_blocks == 2


async def test_another_models_records_are_not_found(port: VaultPort):
    chain = prompt(600)
    await put(port, blocks_of(chain))
    other = PromptChain.of(BlockKey(b"\x06" * 32), chain.tokens)
    found = await port.probe(other, blocks=True, states=True)
    assert (found.blocks, found.partial, found.states) == ({}, None, ())


async def test_part_of_a_block_ends_before_media_that_may_differ(port: VaultPort):
    tokens = np.arange(200)
    image = (Media(100, 20, b"cat" * 8),)
    stored = PromptChain.of(ROOT, tokens, image)
    await put(port, [record(RecordKind.BLOCK, ROOT, tokens, 0, media=image)])
    whole = await port.probe(stored, blocks=True)
    assert whole.partial is not None
    assert whole.partial.agreeing == 200
    other = await port.probe(PromptChain.of(ROOT, tokens, (Media(100, 20, b"dog" * 8),)), blocks=True)
    assert other.partial is None or other.partial.agreeing <= 100
    longer = PromptChain.of(ROOT, np.arange(150), (Media(100, 20, b"dog" * 8),))
    found = await port.probe(longer, blocks=True)
    assert found.partial is not None
    assert found.partial.agreeing == 100


@pytest.mark.parametrize("held", [3, 45, 50])
async def test_a_long_prompt_takes_two_round_trips_only_where_it_must(vault: Vault, held: int, monkeypatch):
    monkeypatch.setattr(probing, "WINDOW_TOKENS", 2048)
    chain = prompt(256 * 50 + 30)
    await put(vault.client(), blocks_of(chain)[:held] + blocks_of(chain)[50:] * (held == 50))
    diverging = chain.tokens.copy()
    if held < 50:
        diverging = np.concatenate([chain.tokens[: held * 256], prompt(256 * (50 - held), 9).tokens])
        await put(vault.client(), blocks_of(PromptChain.of(ROOT, chain.tokens[: held * 256 + 200]))[-1:])
        diverging[held * 256 : held * 256 + 77] = chain.tokens[held * 256 : held * 256 + 77]
    client = vault.client()
    asked: list[probing.ProbeQuery] = []
    original = client._ask

    async def counted(query, total_s):
        asked.append(query)
        return await original(query, total_s)

    monkeypatch.setattr(client, "_ask", counted)
    found = await client.probe(PromptChain.of(ROOT, diverging), blocks=True)
    assert found.leading_blocks == held
    assert found.partial is not None
    assert found.partial.agreeing == (30 if held == 50 else 77)
    assert len(asked) == (2 if held == 3 else 1)
    tier = vault.runtime.telemetry.tier("kv").snapshot()
    assert (tier.hits, tier.misses) == (1, 0)


async def test_checkpoints_before_the_token_window_are_found_by_their_keys(vault: Vault, monkeypatch):
    monkeypatch.setattr(probing, "WINDOW_TOKENS", 2048)
    chain = prompt(256 * 30)
    other = PromptChain.of(ROOT, np.concatenate([chain.tokens[:512], [3] * 40]))
    client = vault.client()
    await put(client, [checkpoint(chain, 530), checkpoint(chain, 512), checkpoint(other, 540), checkpoint(chain, 7000)])
    found = await client.probe(chain, states=True)
    assert [each_.end for each_ in found.states] == [7000, 530, 512]


async def test_probing_counts_hits_and_misses_and_peeking_does_not(vault: Vault):
    client = vault.client()
    chain = prompt(256 * 2 + 40)
    tier = vault.runtime.telemetry.tier("kv")
    await client.probe(chain, blocks=True)
    await put(client, blocks_of(chain))
    await client.probe(chain, blocks=True)
    for _ in range(3):
        await client.probe(chain, blocks=True, peek=True)
    seen = tier.snapshot()
    assert (seen.hits, seen.misses, dict(seen.miss_reasons), seen.hit_tokens) == (1, 1, {"never_stored": 1}, 552)
    assert seen.windows[0].hits == 1


async def test_what_was_probed_is_leased_and_what_was_peeked_at_is_not(vault: Vault):
    client = vault.client()
    chain = prompt(300)
    await put(client, blocks_of(chain))
    await client.probe(chain, blocks=True, peek=True)
    assert vault.store.stats().leases == 0
    await client.probe(chain, blocks=True)
    assert vault.store.stats().leases == 2


# --- damage -------------------------------------------------------------------------------------


async def test_a_record_damaged_in_the_vault_is_quarantined_and_missed_with_a_reason(port: VaultPort, vault: Vault):
    records = blocks_of(prompt(700))
    await put(port, records)
    reader = vault.store.open(records[1].key, count_hit=False)
    assert reader is not None
    with reader:
        reader.views(len(records[1].data) - 10, 1)[0][0] ^= 0x40
    keys = [item.key for item in records]
    assert await take(port, keys) == [records[0].data, "damaged", records[2].data]
    assert await take(port, keys) == [records[0].data, "quarantined", records[2].data]
    assert vault.store.stats().quarantined_records == 1
    assert vault.runtime.telemetry.snapshot().counters["damaged_records"] == 1
    assert await _shown(vault, "quarantine") == ("error", records[1].key.hex()[:8])
    assert await put(port, [records[1]]) == ["stored"]
    assert await take(port, keys) == [item.data for item in records]


async def test_a_reader_that_leaves_at_damage_finds_all_of_it_the_next_time(vault: Vault):
    """Blocks 2, 30 and 59 of 60 are damaged; the reader asks for all and goes at the first that is missing."""
    port, records = vault.client(), blocks_of(prompt(60 * 256), size=300_000)
    await put(port, records)
    for index in (2, 30, 59):
        reader = vault.store.open(records[index].key, count_hit=False)
        assert reader is not None
        with reader:
            reader.views(len(records[index].data) - 10, 1)[0][0] ^= 0x40
    keys = [item.key for item in records]
    async with contextlib.aclosing(port.promote(keys)) as items:
        async for item in items:
            if isinstance(item, Missing):
                break
    for _ in range(1500):
        if vault.store.stats().quarantined_records == 3:
            break
        await asyncio.sleep(0.02)
    found = await port.probe(prompt(60 * 256), blocks=True)
    assert set(range(60)) - set(found.blocks) == {2, 30, 59}
    assert await put(port, [records[index] for index in (2, 30, 59)]) == ["stored"] * 3
    assert await take(port, keys) == [item.data for item in records]
    assert vault.runtime.telemetry.snapshot().counters["damaged_records"] == 3


async def _shown(vault: Vault, kind: str) -> tuple[str, str]:
    """Severity and the head of the key of the first such event, which the next sweep brings."""
    for _ in range(500):
        for event in vault.runtime.telemetry.events.after(0)[0]:
            if event.kind == kind:
                return event.severity, event.attributes["key"][:8]
        await asyncio.sleep(0.02)
    raise AssertionError(f"no {kind} event")


# --- people -------------------------------------------------------------------------------------


async def test_purge_shows_removes_and_takes_back(vault: Vault):
    client = vault.client()
    chain = prompt(600)
    records = blocks_of(chain)
    await put(client, records)
    page = await client.list_prefixes()
    assert (page.total, page.prefixes[0].tokens, page.prefixes[0].records, page.prefixes[0].tier) == (1, 600, 3, "kv")
    plan = await client.preview_purge(Selector(root=ROOT))
    assert (plan.records, plan.tokens, len(plan.examples)) == (3, 600, 1)
    result = await client.purge(plan.token)
    assert result.records == 3
    assert await take(client, [records[0].key]) == ["purged"]
    with pytest.raises(StaleToken):
        await client.purge(plan.token)
    assert (await client.undo_purge(result.undo_token))[0] == 3
    assert await take(client, [records[0].key]) == [records[0].data]
    with pytest.raises(StaleToken):
        await client.undo_purge(result.undo_token)
    events = [event for event in vault.runtime.telemetry.events.after(0)[0] if event.kind == "purge"]
    assert ["purged 3 records" in events[0].message, "brought back 3 records" in events[1].message] == [True, True]


async def test_pins_and_statistics(vault: Vault):
    client = vault.client()
    await put(client, blocks_of(prompt(600)))
    assert await client.pin(Selector(root=ROOT)) == 3
    stats = await client.stats()
    assert (stats.tier.records, stats.tier.pinned_records, stats.tier.tokens, stats.policy) == (3, 3, 600, "lru")
    assert await client.unpin(Selector(root=ROOT)) == 3


@pytest.mark.parametrize(
    "selector",
    [
        pb.Selector(root=b"short"), pb.Selector(prefixes=[b"abc"]), pb.Selector(prefixes=[b"abcd"] * 1025),
        pb.Selector(older_than_s=-1), pb.Selector(older_than_s=float("nan")), pb.Selector(tier="disk"),
        pb.Selector(model="x" * 513),
    ],
)  # fmt: skip
async def test_a_selector_that_cannot_be_meant_is_refused(vault: Vault, selector: pb.Selector):
    client = vault.client()
    with pytest.raises(PeerError, match=r"INVALID_ARGUMENT.*selector"):
        await client._unary("PreviewPurge", pb.PreviewPurgeRequest(selector=selector), pb.PreviewPurgeResponse, 5)


# --- the token ----------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, WRONG])
async def test_without_the_token_state_stays_closed_and_statistics_are_open(vault: Vault, token: Token | None):
    from tierkv.rpc.client import VaultClient

    client = VaultClient(vault.runtime.address, token, connect_timeout_s=5, probe_timeout_s=10, frame_timeout_s=10)
    for call in (
        lambda: client.probe(prompt(10), blocks=True),
        lambda: put(client, [record(RecordKind.BLOCK, ROOT, [1], 0)]),
        lambda: take(client, [BlockKey(bytes(32))]),
        lambda: client.touch([BlockKey(bytes(32))]),
        lambda: client.list_prefixes(),
        lambda: client.purge("x"),
    ):
        client.link.breaker = type(client.link.breaker)(client.peer)
        with pytest.raises(NotAuthenticated):
            await call()
    client.link.breaker = type(client.link.breaker)(client.peer)
    assert (await client.stats()).tier.records == 0
    await client.close()
    assert vault.store.stats().records == 0
    assert vault.runtime.telemetry.snapshot().counters["calls_refused"] == 6


async def test_insecure_opens_state_but_never_purges():
    async with running_vault(insecure=True) as vault:
        client = vault.client(WRONG)
        records = blocks_of(prompt(300))
        assert await put(client, records) == ["stored"] * 2
        plan = await client.preview_purge()
        with pytest.raises(NotAuthenticated):
            await client.purge(plan.token)
        assert vault.store.stats().records == 2


# --- other implementations ----------------------------------------------------------------------


async def test_a_plain_protobuf_client_can_store_and_promote(vault: Vault):
    """The hand-written framing is only a faster way to the same bytes."""
    records = blocks_of(prompt(600))
    writer_messages = []
    from tierkv.rpc.bulk import MessageWriter

    writer = MessageWriter(64 << 10)
    for index, item in enumerate(records):
        writer_messages += writer.add_record(index, [item.data], len(item.data))
    writer.add_end(len(records))
    writer_messages.append(writer.flush())
    requests = [pb.StoreRequest.FromString(message) for message in writer_messages]
    async with grpc.aio.insecure_channel(vault.runtime.address) as channel:
        stub = pb_grpc.VaultServiceStub(channel)
        metadata = vault.token.metadata
        answer = await stub.Store(iter(requests), metadata=metadata)
        assert [result.outcome for result in answer.results] == ["stored"] * 3
        keys = [item.key for item in records]
        got = bytearray()
        async for message in stub.BatchPromote(pb.BatchPromoteRequest(keys=keys), metadata=metadata):
            for chunk in read_chunks(pb.BatchPromoteResponse(chunks=message.chunks).SerializeToString()):
                got += chunk.data if chunk.kind is ChunkKind.DATA else b""
        assert bytes(got) == b"".join(item.data for item in records)
        assert (await stub.Stats(pb.StatsRequest())).tier.records == 3


# --- bounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("Probe", pb.ProbeRequest(root=b"short")),
        ("Probe", pb.ProbeRequest(root=bytes(32), block_keys=[b"short"])),
        ("Probe", pb.ProbeRequest(root=bytes(32), block_keys=[bytes(32)] * (wire.MAX_KEYS + 1))),
        ("Probe", pb.ProbeRequest(root=bytes(32), tokens=[0] * (wire.MAX_TOKENS + 1))),
        ("Probe", pb.ProbeRequest(root=bytes(32), tokens_start=100)),
        ("Touch", pb.TouchRequest(keys=[b"x"])),
        ("Touch", pb.TouchRequest(keys=[bytes(32)] * (wire.MAX_KEYS + 1))),
        ("Purge", pb.PurgeRequest(token="x" * 1000)),
    ],
)
async def test_a_request_out_of_bounds_is_refused_with_a_reason(vault: Vault, name: str, request_):
    with pytest.raises((PeerError, StaleToken)) as refused:
        await vault.client()._unary(name, request_, pb.StatsResponse, 5)
    assert "INTERNAL" not in str(refused.value)


async def test_thousands_of_keys_a_call_are_fine(vault: Vault):
    client = vault.client()
    chain = prompt(256 * 5000)
    records = [
        record(RecordKind.BLOCK, chain.parent_at(i * 256), chain.tokens[i * 256 : i * 256 + 256], i * 256, size=8)
        for i in range(300)
    ]
    await put(client, records)
    assert (await client.probe(chain, blocks=True)).leading_blocks == 300
    assert len(await take(client, chain.keys)) == 5000


async def test_bytes_that_are_no_message_are_an_invalid_argument(vault: Vault):
    async with grpc.aio.insecure_channel(vault.runtime.address) as channel:
        for name in ("Probe", "Touch", "Purge", "ListPrefixes", "Stats"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(f"/tierkv.v1.VaultService/{name}")(b"\xff" * 9, metadata=vault.token.metadata)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
