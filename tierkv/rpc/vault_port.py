"""What the inference agent asks of a vault, whether it is remote (``client``) or in its own process (``local``)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tierkv.codec.record import RecordHeader, RecordKind
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey, PromptChain
from tierkv.store.journal import Fate

if TYPE_CHECKING:
    from tierkv.rpc.tracing import Traced


@dataclass(frozen=True, slots=True)
class Found:
    """A record that may serve the prompt.

    ``agreeing`` of its ``n_tokens`` tokens equal the prompt's from ``start`` on (already compared, token by token).
    """

    key: BlockKey
    kind: RecordKind
    start: int
    n_tokens: int
    agreeing: int
    size_bytes: int
    raw_bytes: int
    fidelity: int
    layout_digest: bytes

    @property
    def end(self) -> int:
        return self.start + self.n_tokens


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one vault has of a prompt.

    ``blocks``: full blocks by index, as far as they are held (holes are possible). ``partial``: the record after the
    leading run that agrees longest with the prompt (full or partial; agreeing >= 1). ``windows`` and ``states``:
    checkpoints whose tokens are a prefix of the prompt, longest first. ``missing``: what became of the first
    record that is not there, with reason "" where all is.
    """

    blocks: dict[int, Found]
    leading_blocks: int
    partial: Found | None
    windows: tuple[Found, ...]
    states: tuple[Found, ...]
    epoch: int
    missing: Fate
    node: str

    @property
    def reach(self) -> int:
        """How many tokens of the prompt the leading run and the record after it are of."""
        return self.leading_blocks * BLOCK_TOKENS + (self.partial.agreeing if self.partial is not None else 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [offset, offset + len(data)) of record ``index`` of the request; ``total`` is the record's size."""

    index: int
    total: int
    offset: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Missing:
    """Record ``index`` of the request is not there, and why."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class StoreOutcome:
    """``outcome`` is "stored", "present", "replaced", or the slug of a refusal."""

    key: BlockKey
    accepted: bool
    outcome: str


class VaultPort(Protocol):
    """Every call has a deadline and raises PeerError (Unreachable, DeadlineExceeded, BreakerOpen, ...) and nothing
    else; a breaker counts failures. Owned by one event loop."""

    @property
    def peer(self) -> str: ...

    async def probe(
        self,
        chain: PromptChain,
        *,
        blocks: bool = False,
        windows: bool = False,
        states: bool = False,
        worst_fidelity: int = 255,
        peek: bool = False,
        timeout_s: float | None = None,
    ) -> ProbeResult: ...

    async def store(
        self, records: AsyncIterator[tuple[RecordHeader, Sequence[bytes | bytearray | memoryview]]]
    ) -> list[StoreOutcome]:
        """Sends whole records (header frame and segment frames, as buffers in order) on one stream."""
        ...

    def promote(self, keys: Sequence[BlockKey], *, timeout_s: float | None = None) -> AsyncIterator[Piece | Missing]:
        """One BatchPromote: pieces in the order asked, each record's pieces in order of offset and gapless."""
        ...

    async def touch(self, keys: Sequence[BlockKey]) -> list[bool]: ...

    async def trace(self, root: BlockKey, keys: Sequence[BlockKey], beginning: bytes) -> Traced:
        """What became of a prompt's records; ``beginning`` as ``identity.blocks.beginning_of`` makes it."""
        ...

    async def close(self) -> None: ...
