"""One prompt through its life: cold, hot, evicted, restored, and the next turn on top of what was restored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tierkv.demo.cluster import PROMPT_CACHE_ENTRIES, Cluster, Shipped
from tierkv.demo.engine import Answer, Engine, max_difference
from tierkv.demo.models import ModelName, state_bytes
from tierkv.demo.processes import DemoFailed
from tierkv.demo.progress import Progress
from tierkv.demo.text import Prompt, Tokens, filler_prompt, prompt_of
from tierkv.units import format_duration

Phase = Literal["cold", "hot", "restored", "next_turn"]

_ANSWER_TOKENS = 16
# As long as a prefill step of the engine's decides nothing: every shape of kernel has run once by then.
_WARM_UP_TOKENS = 300
_STORED_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """One measured request. ``moved_bytes`` is what it took from the vaults."""

    model: ModelName
    tokens: int
    phase: Phase
    codec: str
    ttft_s: float
    cached_tokens: int
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt's runs, and what they say together. ``state_bytes`` is what ``restored_bytes`` is in memory."""

    model: ModelName
    tokens: int
    codec: str
    speedup: float
    hot_speedup: float
    next_turn_speedup: float
    same_text: bool
    max_logit_diff: float
    stored_bytes: int
    restored_bytes: int
    state_bytes: int
    text: str
    runs: tuple[Run, ...]

    @property
    def ratio(self) -> float:
        return self.state_bytes / self.restored_bytes if self.restored_bytes else 0.0


class Measurement:
    """Measures prompts of one model on a running engine."""

    def __init__(
        self, cluster: Cluster, engine: Engine, model: ModelName, config: dict[str, object], tokens: Tokens, codec: str
    ) -> None:
        self._cluster = cluster
        self._engine = engine
        self._model: ModelName = model
        self._config = config
        self._tokens = tokens
        self._codec = codec
        self._fillers = 0
        self._used_tokens = 0

    def warm_up(self, progress: Progress) -> None:
        """The weights are loaded and known to the agent, and nothing that runs only once is left for the clock."""
        progress.step("loading the weights, first steps")
        prompt = self._prompt(_WARM_UP_TOKENS)
        self._engine.stream(prompt.text, 4)
        self._engine.stream(prompt.longer, 4)
        progress.step("waiting until the agent has hashed the weights")
        self._cluster.wait_until(self._cluster.knows_the_weights, _STORED_WITHIN_S, "the weights were not hashed")

    def measure(self, wanted_tokens: int, progress: Progress) -> Comparison:
        """All phases of a prompt of about ``wanted_tokens``. Raises DemoFailed when the state did not come back."""
        prompt = self._prompt(wanted_tokens)
        self._evict(progress)
        before = self._cluster.wait_quiet()
        cold = self._ask(prompt.text, "cold", progress)
        progress.step("cold: the state is on its way to the vaults")
        stored = self._wait_stored(before)
        hot = self._ask(prompt.text, "hot", progress)
        hot_logprobs = self._engine.logprobs(prompt.text, _ANSWER_TOKENS)
        self._evict(progress)
        restored, moved = self._restored(prompt.text, "restored", hot, progress)
        self._evict(progress)
        logprobs = self._engine.logprobs(prompt.text, _ANSWER_TOKENS)
        if logprobs.cached_tokens != hot_logprobs.cached_tokens:
            raise DemoFailed(f"{logprobs.cached_tokens} tokens came back, {hot_logprobs.cached_tokens} were evicted")
        self._evict(progress)
        longer, longer_moved = self._restored(prompt.longer, "next_turn", hot, progress)
        return Comparison(
            model=self._model,
            tokens=prompt.tokens,
            codec=self._codec,
            speedup=cold.ttft_s / restored.ttft_s,
            hot_speedup=cold.ttft_s / hot.ttft_s,
            next_turn_speedup=cold.ttft_s / longer.ttft_s,
            same_text=cold.text == hot.text == restored.text,
            max_logit_diff=max_difference(hot_logprobs, logprobs),
            stored_bytes=stored.bytes_to_vaults - before.bytes_to_vaults,
            restored_bytes=moved,
            state_bytes=state_bytes(self._config, restored.cached_tokens),
            text=restored.text,
            runs=(
                self._run("cold", cold),
                self._run("hot", hot),
                self._run("restored", restored, moved),
                self._run("next_turn", longer, longer_moved),
            ),
        )

    def _prompt(self, wanted_tokens: int) -> Prompt:
        """A prompt of text that no other prompt of this measurement has: a shared beginning would not be cold."""
        prompt = prompt_of(self._tokens, wanted_tokens, self._used_tokens)
        self._used_tokens += prompt.tokens
        return prompt

    def _run(self, phase: Phase, answer: Answer, moved_bytes: int = 0) -> Run:
        return Run(
            self._model, answer.prompt_tokens, phase, self._codec, answer.ttft_s, answer.cached_tokens, moved_bytes
        )

    def _ask(self, text: str, phase: Phase, progress: Progress) -> Answer:
        what = f"{self._model}: {phase.replace('_', ' ')}"
        progress.step(f"{what}: prefilling")
        answer = self._engine.stream(
            text, _ANSWER_TOKENS, lambda done, of: progress.step(f"{what}: prefilled {done:,} of {of:,} tokens")
        )
        self._cluster.check()
        progress.say(
            f"{what}: first token after {format_duration(answer.ttft_s)}, "
            f"{answer.cached_tokens:,} of {answer.prompt_tokens:,} tokens were cached"
        )
        if phase == "cold" and answer.cached_tokens:
            raise DemoFailed(f"a prompt that was never asked had {answer.cached_tokens} cached tokens")
        if phase == "hot" and answer.cached_tokens != answer.prompt_tokens - 1:
            raise DemoFailed(f"the engine kept {answer.cached_tokens} of {answer.prompt_tokens} tokens")
        return answer

    def _restored(self, text: str, phase: Phase, hot: Answer, progress: Progress) -> tuple[Answer, int]:
        before = self._cluster.wait_quiet()
        answer = self._ask(text, phase, progress)
        after = self._cluster.shipped()
        moved = after.bytes_from_vaults - before.bytes_from_vaults
        if answer.cached_tokens < hot.cached_tokens or not moved or after.promotions <= before.promotions:
            raise DemoFailed(
                f"{phase}: {answer.cached_tokens} of {hot.cached_tokens} evicted tokens came back, {moved} bytes moved"
            )
        return answer, moved

    def _wait_stored(self, before: Shipped) -> Shipped:
        self._cluster.wait_until(
            lambda: self._cluster.shipped().stores > before.stores, _STORED_WITHIN_S, "nothing reached the vaults"
        )
        return self._cluster.wait_quiet()

    def _evict(self, progress: Progress) -> None:
        """The engine's cache holds nothing but short prompts that are too short to be stored."""
        progress.step("evicting")
        self._cluster.wait_quiet()
        before = self._cluster.hot_evictions()
        for _ in range(PROMPT_CACHE_ENTRIES):
            self._fillers += 1
            self._engine.stream(filler_prompt(self._fillers), 1)
        self._cluster.wait_until(
            lambda: self._cluster.hot_evictions() > before, _STORED_WITHIN_S, "the engine did not evict"
        )
