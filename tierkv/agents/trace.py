"""What was looked for and found for the last requests: lengths, positions, keys, reasons; no prompt text, no token ids.

Written while a request is answered, at the cost of a few small objects; read by ``explain``.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tierkv.agents.restore_run import RestoreOutcome, RestoreRequest
from tierkv.codec.record import RecordKind
from tierkv.identity.blocks import BLOCK_TOKENS, BlockKey, PromptChain, beginning_of
from tierkv.rpc.local import LOCAL_PEER
from tierkv.rpc.vault_port import ProbeResult
from tierkv.store.journal import NOTHING_MISSING, Fate

MAX_CHECKPOINTS = 16
# A key is 32 bytes, so a trace is at most about 40 KB; a longer prompt is explained as far as that.
MAX_KEYS = 1024
# Prompts that an engine evicted are remembered by so many keys: about 1 MB.
MAX_EVICTED_KEYS = 8192


@dataclass(slots=True)
class VaultTrace:
    """One vault's part in one request. ``kind``: "kv" for rows and windows, "ssm" for recurrent state.

    ``reach``: how far its rows go from the prompt's start, before anything was refused. ``error``: why it did not
    answer. ``failed``: records that it promised and that did not come whole, by reason. ``problem``: what the first
    error of either kind says.
    """

    kind: str
    peer: str
    seconds: float = 0.0
    reach: int = 0
    differs_at: int = 0
    checkpoints: tuple[int, ...] = ()
    missing: Fate = NOTHING_MISSING
    error: str = ""
    problem: str = ""
    refused: Counter[str] = field(default_factory=Counter[str])
    failed: Counter[str] = field(default_factory=Counter[str])
    failed_at: int = 0
    used_tokens: int = 0
    used_bytes: int = 0

    @property
    def tier(self) -> str:
        return "local" if self.peer == LOCAL_PEER else self.kind

    def answered(self, result: ProbeResult) -> None:
        """What the vault says it has."""
        self.missing, self.reach = result.missing, result.reach
        partial = result.partial
        if partial is not None:
            self.differs_at = self.reach + 1 if partial.agreeing < partial.n_tokens else 0
        ends = {found.end for found in (*result.windows, *result.states)}
        self.checkpoints = tuple(sorted(ends, reverse=True)[:MAX_CHECKPOINTS])


@dataclass(slots=True)
class RequestTrace:
    """One request. ``outcome``: "asked", "restored", "hot" or "computed". ``restore_id``: the hook's, 0 for none.

    ``hot_reason``: why the engine's own cache had no more. ``layout_note``: how a stored layout differs. ``more``: the
    same prompt comes in another form if this one gives nothing; ``other_form``: then what was found of this one.
    """

    number: int
    time_unix_s: float
    engine: str
    engine_build: str
    model: str
    prompt_tokens: int
    root: BlockKey | None = None
    keys: tuple[BlockKey, ...] = ()
    beginning: bytes = b""
    restore_id: int = 0
    limit: int = 0
    have: int = 0
    position: int = 0
    outcome: str = "asked"
    reason: str = ""
    looked: bool = False
    vaults: list[VaultTrace] = field(default_factory=list[VaultTrace])
    hot_reason: str = ""
    hot_why: str = ""
    hot_gone_unix_s: float = 0.0
    seconds: float = 0.0
    codec: str = ""
    fidelity: int = 0
    bytes: int = 0
    layout_note: str = ""
    more: bool = False
    other_form: RequestTrace | None = None
    expected_restore_s: float = 0.0
    expected_prefill_s: float = 0.0

    @property
    def found(self) -> int:
        """How far anything of the prompt reaches, whether it could be used or not."""
        return max((max((each.reach, *each.checkpoints)) for each in self.vaults), default=0)

    def is_of_same_prompt(self, other: RequestTrace) -> bool:
        """As far as can be told: another form has other keys."""
        return (self.prompt_tokens, self.beginning) == (other.prompt_tokens, other.beginning)

    def prompt(self, chain: PromptChain) -> None:
        """The prompt by its keys."""
        self.root, self.keys = chain.root, chain.keys[:MAX_KEYS]
        self.beginning = beginning_of(chain.tokens)

    def begin_look(self) -> None:
        """Vaults are asked, again perhaps: only the last look counts."""
        self.looked = True
        self.vaults.clear()

    def vault(self, kind: str, peer: str) -> VaultTrace:
        """The part of this vault, which is there from now on."""
        for each in self.vaults:
            if (each.kind, each.peer) == (kind, peer):
                return each
        self.vaults.append(VaultTrace(kind, peer))
        return self.vaults[-1]

    def ended(self, request: RestoreRequest, outcome: RestoreOutcome) -> None:
        """The restore has an outcome; what each vault gave is counted."""
        self.reason = outcome.reason
        self.seconds = outcome.seconds
        for candidate, reason, problem in outcome.failures:
            part = self.vault(candidate.found.kind.tier, candidate.source.peer)
            part.failed[reason] += 1
            part.problem = part.problem or problem
            part.failed_at = part.failed_at or candidate.found.start + 1
        if not outcome.position:
            self.outcome = "hot" if self.have else "computed"
            self.position = self.have
            return
        self.outcome, self.position = "restored", outcome.position
        self.codec, self.fidelity, self.bytes = outcome.codec, outcome.fidelity, outcome.bytes
        checkpoints: list[tuple[VaultTrace, int]] = []
        for candidate, size_bytes in outcome.used:
            found = candidate.found
            part = self.vault(found.kind.tier, candidate.source.peer)
            part.used_bytes += size_bytes
            if found.kind is RecordKind.BLOCK:
                begin = max(found.start, request.rows_from)
                part.used_tokens += max(0, min(found.start + found.agreeing, outcome.position) - begin)
            else:
                checkpoints.append((part, found.end))
        # A window or a recurrent state stands for the tokens that the rows of other layers are of.
        for part, end in checkpoints:
            part.used_tokens = max(part.used_tokens, end)


class Evicted:
    """What an engine's own cache let go, by the keys of its blocks. Owned by the event loop."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def add(self, chain: PromptChain, why: str) -> None:
        """The engine has just evicted this prompt, for ``why``."""
        now_s = time.time()
        for key in (*chain.keys, beginning_of(chain.tokens)):
            self._keys.pop(key, None)
            self._keys[key] = (now_s, why)
        while len(self._keys) > MAX_EVICTED_KEYS:
            self._keys.popitem(last=False)

    def of(self, chain: PromptChain, have: int) -> tuple[float, str] | None:
        """When and why what this prompt shares with an evicted one, beyond ``have`` tokens, was evicted."""
        for index in range(len(chain.keys) - 1, have // BLOCK_TOKENS - 1, -1):
            if found := self._keys.get(chain.keys[index]):
                return found
        return self._keys.get(beginning_of(chain.tokens)) if have < BLOCK_TOKENS else None


class TraceBook:
    """The last requests of an agent's engines, at most ``kept``. Owned by the event loop."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._next = 0
        self._traces: OrderedDict[int, RequestTrace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._traces)

    def begin(self, engine: str, build: str, model: str, prompt_tokens: int) -> RequestTrace:
        """A new request is in the book; the oldest may leave it."""
        self._next += 1
        trace = RequestTrace(self._next, time.time(), engine, build, model, prompt_tokens)
        self._traces[trace.number] = trace
        while len(self._traces) > self._kept:
            self._traces.popitem(last=False)
        return trace

    def get(self, number: int) -> RequestTrace | None:
        """The request of that number, the last one for 0; None when it is not, or no longer, here."""
        return self._traces.get(number or next(reversed(self._traces), 0))

    def of_restore(self, engine: str, restore_id: int) -> RequestTrace | None:
        """The request for which this engine asked that restore, while it is here."""
        for trace in self.latest():
            if trace.engine == engine and trace.restore_id == restore_id:
                return trace
        return None

    def joined(self, earlier: RequestTrace, later: RequestTrace) -> None:
        """Both were one request, for two forms of the state: the one that tells more of it stays, as the later one."""
        if self._traces.pop(earlier.number, None) is None or later.number not in self._traces:
            return
        if later.outcome == "restored" or later.found > earlier.found:
            later.other_form = earlier
            return
        earlier.number, earlier.restore_id, earlier.other_form = later.number, later.restore_id, later
        earlier.more, earlier.outcome, earlier.position = False, later.outcome, later.position
        self._traces[later.number] = earlier

    def latest(self) -> Iterator[RequestTrace]:
        """The latest first."""
        return reversed(self._traces.values())


def scratch_trace(model: str, prompt_tokens: int) -> RequestTrace:
    """A trace that no book keeps, for a question that is no request."""
    return RequestTrace(0, time.time(), "", "", model, prompt_tokens)
