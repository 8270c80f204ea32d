"""What became of a prompt's records in one vault: asked by ``tierkv explain`` after the fact, never by a restore."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.codec.record import RecordKind
from tierkv.errors import UsageError
from tierkv.identity.blocks import KEY_BYTES, BlockKey
from tierkv.rpc import wire
from tierkv.rpc.channels import printable
from tierkv.store.base import OtherIdentity, Store
from tierkv.store.journal import Fate
from tierkv.v1 import vault_service_pb2 as pb

BEGINNING_BYTES = 16
MAX_LOST = 64
MAX_OTHERS = 16
MAX_TEXT_CHARS = 200


@dataclass(frozen=True, slots=True)
class Traced:
    """``next_block``: what became of the block after the leading ones; None when all of the prompt's are here.

    ``others_follow``: another record stands on the last leading block. ``lost_checkpoints``: the furthest first.
    """

    leading_blocks: int
    next_block: Fate | None
    others_follow: bool
    lost_checkpoints: tuple[Fate, ...]
    other_identities: tuple[OtherIdentity, ...]
    remembers_since_unix_s: float
    node: str = ""


def trace(store: Store, root: BlockKey, keys: Sequence[BlockKey], beginning: bytes) -> Traced:
    """Reads the index and the journal; counts and leases nothing. Without ``beginning`` no other identity is sought."""
    here = store.lookup(keys)
    leading = next((index for index, entry in enumerate(here) if entry is None), len(keys))
    tip = keys[leading - 1] if leading else root
    lost = [fate for fate in store.lost_checkpoints({root, *keys}) if fate.kind is not None]
    return Traced(
        leading,
        store.fate(keys[leading]) if leading < len(keys) else None,
        bool(store.children(tip, (RecordKind.BLOCK,), limit=1)),
        tuple(sorted(lost, key=lambda fate: -fate.end)[:MAX_LOST]),
        tuple(store.same_beginning(root, beginning)),
        store.remembers_since_unix_s,
    )


# --- the wire -----------------------------------------------------------------------------------


def request_to_proto(root: BlockKey, keys: Sequence[BlockKey], beginning: bytes) -> pb.TraceRequest:
    return pb.TraceRequest(root=root, block_keys=keys[: wire.MAX_KEYS], beginning=beginning)


def request_from_proto(request: pb.TraceRequest) -> tuple[BlockKey, list[BlockKey], bytes]:
    """Raises UsageError, naming the field, for a request out of bounds."""
    if len(request.root) != KEY_BYTES:
        raise UsageError(f"root has {KEY_BYTES} bytes, not {len(request.root)}")
    if len(request.beginning) not in (0, BEGINNING_BYTES):
        raise UsageError(f"beginning has {BEGINNING_BYTES} bytes or none, not {len(request.beginning)}")
    return BlockKey(request.root), wire.checked_keys(request.block_keys), request.beginning


def traced_to_proto(traced: Traced, node: str) -> pb.TraceResponse:
    return pb.TraceResponse(
        leading_blocks=traced.leading_blocks,
        next_block=None if traced.next_block is None else _fate_to_proto(traced.next_block),
        others_follow=traced.others_follow,
        lost_checkpoints=[_fate_to_proto(fate) for fate in traced.lost_checkpoints],
        other_identities=[
            pb.OtherIdentity(root=other.root, model=other.model, records=other.records)
            for other in traced.other_identities
        ],
        remembers_since_unix_s=traced.remembers_since_unix_s,
        node=node,
    )


def traced_from_proto(message: pb.TraceResponse) -> Traced:
    """What a vault answered; texts are cleaned and lists cut."""
    return Traced(
        min(message.leading_blocks, wire.MAX_KEYS),
        _fate_from_proto(message.next_block) if message.HasField("next_block") else None,
        message.others_follow,
        tuple(_fate_from_proto(fate) for fate in message.lost_checkpoints[:MAX_LOST]),
        tuple(
            OtherIdentity(BlockKey(other.root), _text(other.model), other.records)
            for other in message.other_identities[:MAX_OTHERS]
            if len(other.root) == KEY_BYTES
        ),
        message.remembers_since_unix_s,
        wire.slug(message.node),
    )


def _fate_to_proto(fate: Fate) -> pb.RecordFate:
    return pb.RecordFate(
        reason=fate.reason, time_unix_s=fate.unix_s, why=fate.why, kind=int(fate.kind or 0), end=fate.end
    )


def _fate_from_proto(message: pb.RecordFate) -> Fate:
    kind = RecordKind(message.kind) if message.kind in (1, 2, 3) else None
    return Fate(wire.slug(message.reason), wire.moment(message.time_unix_s), _text(message.why), kind, message.end)


def _text(text: str) -> str:
    return printable(text, MAX_TEXT_CHARS)
