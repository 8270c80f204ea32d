"""Which vault holds what: a tier's local vault first, then its remote ones."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence

from tierkv.agents.known import KnownKeys, Place
from tierkv.codec.record import RecordKind
from tierkv.errors import PeerError, TierKVError
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey, PromptChain
from tierkv.rpc.probing import MAX_CHECKPOINTS
from tierkv.rpc.vault_port import ProbeResult, VaultPort
from tierkv.state.layout import LayerKind

TIERS = ("kv", "ssm")
# The kinds of layers whose state each tier keeps.
TIER_KINDS: Mapping[str, tuple[LayerKind, ...]] = {"kv": ("rows", "window"), "ssm": ("state",)}


class TierRouter:
    """The vaults of one tier. With several remote ones, a whole chain stays together on one of them."""

    def __init__(self, tier: str, local: VaultPort | None, remote: Sequence[VaultPort]) -> None:
        self.tier = tier
        self.known = KnownKeys()
        self._local = (local,) if local is not None else ()
        self._remote = tuple(remote)

    @property
    def exists(self) -> bool:
        return bool(self._local or self._remote)

    @property
    def ports(self) -> tuple[VaultPort, ...]:
        return self._local + self._remote

    def targets(self, chain: PromptChain) -> tuple[VaultPort, ...]:
        """Where records of this prompt go and are looked for: the local vault, and one remote by rendezvous hashing.

        The first block chooses, so that a probe of one vault sees a chain without holes.
        """
        if len(self._remote) < 2:
            return self.ports
        head = chain.keys[0] if chain.keys else chain.root
        home = home_of(head, [port.peer for port in self._remote])
        return (*self._local, self._remote[home])

    async def probe(
        self, chain: PromptChain, *, worst_fidelity: int, timeout_s: float, peek: bool = False
    ) -> list[tuple[VaultPort, ProbeResult | PeerError, float]]:
        """What each of the prompt's vaults has, or why it does not say, and after how long; asked at the same time."""
        kv = self.tier == "kv"

        async def ask(port: VaultPort) -> tuple[VaultPort, ProbeResult | PeerError, float]:
            began_s = time.monotonic()
            try:
                answer = await port.probe(
                    chain, blocks=kv, windows=kv, states=not kv, worst_fidelity=worst_fidelity, timeout_s=timeout_s,
                    peek=peek,
                )  # fmt: skip
            except TierKVError as error:
                answer = error if isinstance(error, PeerError) else PeerError(port.peer, str(error))
            return port, answer, time.monotonic() - began_s

        return list(await asyncio.gather(*(ask(port) for port in self.targets(chain))))

    def learn(self, chain: PromptChain, result: ProbeResult, is_bad: Callable[[BlockKey], bool]) -> None:
        """What a vault has said it holds, and does not hold, of a prompt is known; a bad record counts as not held."""
        if self.tier == "kv":
            gone = [key for index, key in enumerate(chain.keys) if index not in result.blocks]
            self.known.discard([*gone, *self.known.after(gone)])
        places = self.known.places_after((chain.root, *chain.keys))
        own = (place.key_in(chain) for place in places if not _may_be_held(place, result))
        self.known.discard([key for key in own if key is not None])
        for found in result.blocks.values():
            if not is_bad(found.key):
                self.known.learn(found.key, found.fidelity)
        partial = () if result.partial is None else (result.partial,)
        for found in (*partial, *result.windows, *result.states):
            if not is_bad(found.key):
                full = found.kind is RecordKind.BLOCK and found.n_tokens == BLOCK_TOKENS
                place = None if full else Place(chain.parent_at(found.start), found.kind, found.end)
                self.known.learn(found.key, found.fidelity, place)


def _may_be_held(place: Place, result: ProbeResult) -> bool:
    """Whether a vault that gave this answer for a prompt can hold the prompt's own record at this place."""
    if place.kind is RecordKind.BLOCK:
        # The answer names the record that agrees longest, after the full blocks that it has.
        agreeing = result.partial.agreeing if result.partial is not None else 0
        return place.end <= result.leading_blocks * BLOCK_TOKENS + agreeing
    listed = result.windows if place.kind is RecordKind.WINDOW else result.states
    ends = [found.end for found in listed]
    return place.end in ends or (len(ends) >= MAX_CHECKPOINTS and place.end < min(ends))


def home_of(head: bytes, peers: Sequence[str]) -> int:
    """Which of a tier's remote vaults has the prompts whose first full block, or root without one, is ``head``."""
    weights = [hashlib.blake2b(head + peer.encode(), digest_size=8).digest() for peer in peers]
    return max(range(len(peers)), key=weights.__getitem__)
