"""``Trace``: what became of a prompt's records, told by a real vault; and what it refuses to be asked."""

from __future__ import annotations

import time

import numpy as np
import pytest
from running_vaults import running_vault
from wire_records import ROOT, blocks_of, put

from tierkv.codec.record import RecordKind
from tierkv.errors import PeerError
from tierkv.identity.blocks import BlockKey, PromptChain, beginning_of
from tierkv.rpc.tracing import traced_from_proto
from tierkv.store.base import Selector
from tierkv.v1 import vault_service_pb2 as pb


def test_prompts_are_compared_by_their_first_64_tokens():
    tokens = np.arange(100)
    assert beginning_of(tokens) == beginning_of(tokens[:64]) == beginning_of(tokens.astype("<i8").tobytes())
    assert len(beginning_of(tokens)) == 16
    assert beginning_of(tokens[:63]) == b""
    assert beginning_of(tokens + 1) != beginning_of(tokens)


async def test_what_is_here_what_is_gone_and_when():
    async with running_vault() as vault:
        client = vault.client()
        chain = PromptChain.of(ROOT, np.arange(600))
        await put(client, blocks_of(chain, partial=False))
        traced = await client.trace(ROOT, chain.keys, b"")
        assert (traced.leading_blocks, traced.next_block, traced.others_follow) == (2, None, False)
        assert traced.remembers_since_unix_s <= time.time()
        vault.store.purge(vault.store.preview_purge(Selector()).token)
        traced = await client.trace(ROOT, chain.keys, b"")
        assert traced.leading_blocks == 0
        assert traced.next_block is not None
        assert traced.next_block.reason == "purged"
        assert abs(traced.next_block.unix_s - time.time()) < 60
        assert (traced.next_block.kind, traced.next_block.end) == (RecordKind.BLOCK, 256)


async def test_another_prompt_goes_on_where_this_one_ends_and_another_model_has_the_same():
    async with running_vault() as vault:
        client = vault.client()
        tokens = np.arange(600)
        chain = PromptChain.of(ROOT, tokens)
        await put(client, blocks_of(chain, partial=False))
        other = tokens.copy()
        other[300] += 1
        traced = await client.trace(ROOT, PromptChain.of(ROOT, other).keys, b"")
        assert (traced.leading_blocks, traced.others_follow) == (1, True)
        assert traced.next_block is not None
        assert traced.next_block.reason == "never_stored"
        another = BlockKey(b"\x06" * 32)
        traced = await client.trace(another, PromptChain.of(another, tokens).keys, beginning_of(tokens))
        assert [(each.root, each.records) for each in traced.other_identities] == [(ROOT, 2)]
        assert (await client.trace(another, (), beginning_of(other + 7))).other_identities == ()


@pytest.mark.parametrize(
    "request_",
    [
        pb.TraceRequest(root=b"short"),
        pb.TraceRequest(root=bytes(32), beginning=b"x"),
        pb.TraceRequest(root=bytes(32), block_keys=[b"short"]),
    ],
)
async def test_a_malformed_question_is_an_error(request_: pb.TraceRequest):
    async with running_vault() as vault:
        client = vault.client()
        with pytest.raises(PeerError, match="INVALID_ARGUMENT"):
            await client._unary("Trace", request_, pb.TraceResponse, 5.0)


def test_an_answer_from_the_network_is_bounded_and_clean():
    fates = [pb.RecordFate(reason="x" * 1000, why="\x1b[31m" * 100, kind=77, end=5)] * 1000
    others = [pb.OtherIdentity(root=b"short"), *[pb.OtherIdentity(root=bytes(32), model="m\n")] * 100]
    traced = traced_from_proto(pb.TraceResponse(lost_checkpoints=fates, other_identities=others))
    assert len(traced.lost_checkpoints) == 64
    assert len(traced.lost_checkpoints[0].reason) == 64
    assert traced.lost_checkpoints[0].kind is None
    assert "\x1b" not in traced.lost_checkpoints[0].why
    assert len(traced.other_identities) == 15
    assert traced.other_identities[0].model.isprintable()
