"""Whatever a client sends, a vault refuses it politely, forgets it, and goes on; and a reader may stall."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest
from running_vaults import Vault
from wire_records import ROOT, blocks_of, prompt, put, record, take

from tierkv.codec.record import RecordKind
from tierkv.errors import WrongService
from tierkv.rpc import vault_service
from tierkv.rpc.bulk import ChunkKind, MessageWriter
from tierkv.rpc.channels import open_channel
from tierkv.rpc.inflow import Inflow
from tierkv.rpc.vault_port import Missing, Piece
from tierkv.v1 import vault_service_pb2 as pb

DATA = record(RecordKind.BLOCK, ROOT, range(100), 0, size=3000).data
TOTAL = len(DATA)


def message(*chunks) -> bytes:
    """A message of (index, total, offset, data) chunks and "end" marks."""
    writer = MessageWriter(4 << 20)
    for chunk in chunks:
        if isinstance(chunk, int):
            writer.add_end(chunk)
        elif isinstance(chunk, str):
            writer.add_missing(0, chunk)
        else:
            writer.add_data(*chunk)
    whole = writer.flush()
    assert whole is not None
    return whole


async def send(vault: Vault, *messages: bytes) -> pb.StoreResponse:
    channel = open_channel(vault.runtime.address)
    try:
        call = channel.stream_unary("/tierkv.v1.VaultService/Store")(iter(messages), metadata=vault.token.metadata)
        return pb.StoreResponse.FromString(await call)
    finally:
        await channel.close()


@pytest.mark.parametrize(
    "messages",
    [
        [b"not a message"],
        [b"\x0a\x05short"],
        [message((1, TOTAL, 0, DATA))],
        [message((0, TOTAL, 0, DATA[:500]), (1, TOTAL, 0, DATA))],
        [message((0, TOTAL, 0, DATA[:500]), (0, TOTAL, 600, DATA[600:]))],
        [message((0, TOTAL, 0, DATA[:500]), (0, TOTAL + 1, 500, DATA[500:]))],
        [message((0, TOTAL, 5, DATA[5:]))],
        [message((0, TOTAL, 0, DATA))],
        [message((0, TOTAL, 0, DATA[:500]), 1)],
        [message((0, TOTAL, 0, DATA[:500]))],
        [message("evicted")],
        [message(0, (0, TOTAL, 0, DATA))],
        [message((0, TOTAL, 0, DATA), 2)],
        [message(0), message(0)],
        [],
    ],
)
async def test_a_stream_out_of_order_is_an_invalid_argument_and_leaves_no_room_taken(vault: Vault, messages):
    before = vault.store.stats().size_bytes
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await send(vault, *messages)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    stats = vault.store.stats()
    assert stats.size_bytes - before == stats.records * (64 << 10)
    assert await put(vault.client(), blocks_of(prompt(300))) == ["stored"] * 2


async def test_random_damage_to_a_stream_never_stores_a_damaged_record(vault: Vault):
    dice = random.Random(11)
    sound = message((0, TOTAL, 0, DATA[:1500]), (0, TOTAL, 1500, DATA[1500:]), 1)
    outcomes, codes = set(), set()
    for _ in range(150):
        damaged = bytearray(sound)
        for _ in range(dice.choice([1, 1, 2, 8])):
            damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        cut = dice.choice([len(damaged), dice.randrange(len(damaged))])
        try:
            answer = await send(vault, bytes(damaged[:cut]))
            outcomes |= {result.outcome for result in answer.results}
        except grpc.aio.AioRpcError as error:
            codes.add(error.code())
        assert vault.store.stats().records <= 1
    assert codes == {grpc.StatusCode.INVALID_ARGUMENT}
    assert "internal" not in outcomes
    assert "bad_checksum" in outcomes
    key = record(RecordKind.BLOCK, ROOT, range(100), 0, size=3000).key
    assert await take(vault.client(), [key]) in ([DATA], ["quarantined"])


@pytest.mark.parametrize("total", [1, 96, 97, 1 << 40, (1 << 63)])
async def test_an_announced_size_that_cannot_be_is_refused_before_memory_is_taken(vault: Vault, total: int):
    before = vault.store.stats().size_bytes
    piece = DATA[: min(total, 64)]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await send(vault, message((0, total, 0, piece)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert vault.store.stats().size_bytes == before


async def test_a_sender_that_leaves_in_mid_record_takes_no_room(vault: Vault):
    big = record(RecordKind.STATE, ROOT, [1], 0, size=20 << 20, segments=1)
    before = vault.store.stats().size_bytes
    channel = open_channel(vault.runtime.address)
    call = channel.stream_unary("/tierkv.v1.VaultService/Store")(metadata=vault.token.metadata)
    await call.write(message((0, len(big.data), 0, big.data[: 2 << 20])))
    for _ in range(1000):
        if vault.store.stats().size_bytes > before:
            break
        await asyncio.sleep(0.01)
    call.cancel()
    for _ in range(500):
        if vault.store.stats().size_bytes == before:
            break
        await asyncio.sleep(0.01)
    assert vault.store.stats().size_bytes == before
    await channel.close()


async def test_a_sender_that_falls_silent_is_cut_off(vault: Vault, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vault_service, "STALL_S", 0.2)
    channel = open_channel(vault.runtime.address)
    call = channel.stream_unary("/tierkv.v1.VaultService/Store")(metadata=vault.token.metadata)
    await call.write(message((0, TOTAL, 0, DATA[:500])))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await channel.close()


async def test_a_stalled_reader_is_cut_off_and_its_record_let_go(vault: Vault, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vault_service, "STALL_S", 0.3)
    big = record(RecordKind.STATE, ROOT, [1], 0, size=20 << 20, segments=1)
    await put(vault.client(), [big])
    channel = open_channel(vault.runtime.address)
    request = pb.BatchPromoteRequest(keys=[big.key] * 3).SerializeToString()
    call = channel.unary_stream("/tierkv.v1.VaultService/BatchPromote")(request, metadata=vault.token.metadata)
    await call.read()
    for _ in range(500):
        if not vault.store._catalog._readers:
            break
        await asyncio.sleep(0.02)
    assert not vault.store._catalog._readers
    sent = vault.runtime.telemetry.tier("kv").snapshot().bytes_out
    assert sent < 24 << 20
    call.cancel()
    await channel.close()


async def test_only_so_many_bulk_streams_run_at_once(vault: Vault, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vault_service, "MAX_BULK_STREAMS", 1)
    channel = open_channel(vault.runtime.address)
    call = channel.stream_unary("/tierkv.v1.VaultService/Store")(metadata=vault.token.metadata)
    await call.write(message((0, TOTAL, 0, DATA[:-1])))
    async with asyncio.timeout(20):
        while not vault.store.stats().size_bytes:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
    with pytest.raises(grpc.aio.AioRpcError, match="bulk streams"):
        await send(vault, message(0))
    call.cancel()
    await channel.close()


# --- the reader's own checks --------------------------------------------------------------------


def flow(*messages: bytes, keys: int = 1) -> list[Piece | Missing]:
    inflow = Inflow("peer", keys, 0, 1 << 20)
    items = [item for each in messages for item in inflow.take(each)]
    if not inflow.ended:
        raise WrongService("peer", "no end")
    return items


def test_a_sound_stream_is_taken():
    items = flow(message((0, 10, 0, b"01234"), (0, 10, 5, b"56789"), 1))
    assert [bytes(item.data) for item in items if isinstance(item, Piece)] == [b"01234", b"56789"]
    assert flow(message("evicted", 1)) == [Missing(0, "evicted")]


@pytest.mark.parametrize(
    "messages",
    [
        [message(0)],
        [message(2)],
        [message((0, 10, 0, b"01234"), 1)],
        [message((0, 10, 0, b"0123456789"))],
        [message((0, 10, 0, b"01234"), "evicted", 1)],
        [message((0, 10, 5, b"56789"), 1)],
        [message((1, 10, 0, b"0123456789"), 1)],
        [message((0, 10, 0, b"0123456789"), (1, 5, 0, b"01234"), 1)],
        [message("evicted", "evicted", 1)],
        [message((0, 2 << 20, 0, b"too large"), 1)],
        [message((0, 10, 0, b"01234"), (0, 11, 5, b"56789"), 1)],
        [message("evicted", 1), message(1)],
        [b"\x0a\x03abc"],
    ],
)
def test_a_vault_that_errs_is_not_believed(messages: list[bytes]):
    with pytest.raises(WrongService):
        flow(*messages)


def test_kinds_are_what_the_wire_says():
    assert [int(kind) for kind in ChunkKind] == [1, 2, 3]
