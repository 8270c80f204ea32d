"""The session of returning prompts on a running EXO, through its own HTTP API: cold, hot, evicted, restored.

    tierkv bench exo -- [--url URL] [--model ID] [--tokens 3700,8000] [--evict recreate|prompts] [--json]

EXO runs with the hook (``tierkv install`` or ``tierkv exo``), an inference agent and vaults beside it. Each prompt is
sent when EXO has never seen it (cold) and once more (hot). Then the prompt leaves EXO's memory: with ``recreate`` the
instance is deleted and placed again, so that its cache is gone; with ``prompts`` other prompts are sent until EXO
evicts it (set memory_threshold low enough). Then it is sent again (restored). TTFT is the time to the first piece of
text, ``cached`` what EXO says of usage.prompt_tokens_details.cached_tokens. Numbers are what EXO says, not asserted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass

from _leaving import leave_with

TIMEOUT_S = 1800.0
READY_S = 600.0
# What a first prompt of so many words comes to says how many words make a prompt of so many tokens.
TRIAL_WORDS = 200
SENTENCE = (
    "the cache of a reader keeps what was read before so that nobody reads it twice and the tier below keeps what the "
    "reader had to drop when memory was short while the network carries it back before the next word is due"
)


@dataclass(frozen=True, slots=True)
class Run:
    tokens_asked: int
    phase: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    text: str


class Exo:
    def __init__(self, url: str, model: str) -> None:
        self.url = url.rstrip("/")
        self.model = model or self._only_model()

    def _call(self, method: str, path: str, body: object = None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("Content-Type", "application/json")
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)

    def _json(self, method: str, path: str, body: object = None):
        with self._call(method, path, body) as answer:
            return json.load(answer)

    def instances(self) -> dict[str, dict]:
        """Every instance's shard assignments, by the instance's id."""
        found = {}
        for name, tagged in self._json("GET", "/state")["instances"].items():
            inner = next(iter(tagged.values())) if len(tagged) == 1 else tagged
            found[name] = inner.get("shardAssignments") or inner.get("shard_assignments") or {}
        return found

    def _only_model(self) -> str:
        models = {each.get("modelId") or each.get("model_id") for each in self.instances().values()} - {None}
        if len(models) != 1:
            raise SystemExit(f"say which model with --model; EXO serves: {', '.join(sorted(models)) or 'none'}")
        return models.pop()

    def ask(self, prompt: str, max_tokens: int = 8) -> tuple[float, int, int, str]:
        """TTFT in seconds, the prompt's tokens, how many of them were cached, and the text."""
        body = {
            "model": self.model, "stream": True, "max_tokens": max_tokens, "temperature": 0.0,
            "messages": [{"role": "user", "content": prompt}],
        }  # fmt: skip
        began, first, usage, text = time.perf_counter(), 0.0, {}, ""
        with self._call("POST", "/v1/chat/completions", body) as answer:
            for line in answer:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                said = json.loads(line[6:])
                if "error" in said:
                    raise SystemExit(f"EXO: {said['error'].get('message')}")
                first = first or time.perf_counter() - began
                usage = said.get("usage") or usage
                for choice in said.get("choices", ()):
                    text += choice.get("delta", {}).get("content") or ""
        details = usage.get("prompt_tokens_details") or {}
        return first, usage.get("prompt_tokens", 0), details.get("cached_tokens", 0), text

    def recreate(self) -> None:
        """Every instance of the model is deleted and placed again: its runners, and their caches, are new."""
        ours = {
            name: each for name, each in self.instances().items()
            if self.model in (each.get("modelId"), each.get("model_id"))
        }  # fmt: skip
        for name in ours:
            self._json("DELETE", f"/instance/{name}")
        deadline = time.monotonic() + READY_S
        while ours.keys() & self.instances().keys():
            self._pause(deadline)
        shards = max((shards_of(each) for each in ours.values()), key=len, default=[])
        sharding = "Tensor" if any("Tensor" in each for each in shards) else "Pipeline"
        placing = {"model_id": self.model, "sharding": sharding, "min_nodes": max(1, len(shards))}
        self._json("POST", "/place_instance", placing)
        self.wait_ready(deadline)

    def wait_ready(self, deadline: float) -> None:
        while True:
            try:
                self.ask("ready?", 1)
                return
            except (OSError, urllib.error.URLError, ValueError, SystemExit):
                self._pause(deadline)

    @staticmethod
    def _pause(deadline: float) -> None:
        if time.monotonic() > deadline:
            raise SystemExit("EXO does not get ready")
        time.sleep(1.0)


def shards_of(assignments: dict) -> list[str]:
    """What each rank of an instance has, as EXO's state names it: PipelineShardMetadata or TensorShardMetadata."""
    held = assignments.get("runnerToShard") or assignments.get("runner_to_shard") or {}
    return [next(iter(each), "") for each in held.values()]


def prompt_of(words: int, salt: str) -> str:
    """A prompt of so many words and some more that begins with ``salt``."""
    known = SENTENCE.split()
    text = " ".join(known[n % len(known)] if n % 7 else str(n) for n in range(words))
    return f"{salt} {text} Continue."


def words_for(exo: Exo) -> Callable[[int], int]:
    """How many words make a prompt of so many tokens, with the model that EXO serves."""
    few, many = (exo.ask(prompt_of(words, uuid.uuid4().hex), 1)[1] for words in (0, TRIAL_WORDS))
    per_word = max(1, many - few) / TRIAL_WORDS
    return lambda tokens: max(1, round((tokens - few) / per_word))


def evict(exo: Exo, options: argparse.Namespace, words: Callable[[int], int]) -> None:
    if options.evict == "recreate":
        exo.recreate()
        return
    for _ in range(options.others):
        exo.ask(prompt_of(words(options.other_tokens), uuid.uuid4().hex), 1)


def session(exo: Exo, options: argparse.Namespace) -> list[Run]:
    runs: list[Run] = []
    exo.wait_ready(time.monotonic() + READY_S)
    words = words_for(exo)
    for tokens in options.tokens:
        prompt = prompt_of(words(tokens), uuid.uuid4().hex)
        for phase in ("cold", "hot", "restored"):
            if phase == "restored":
                # What was handed over has to arrive; EXO itself does not say when it has.
                time.sleep(options.settle_s)
                evict(exo, options, words)
                # A new runner's hook has to find the agent, which takes a loaded machine longer than EXO waits.
                time.sleep(options.settle_s)
            ttft_s, prompt_tokens, cached, text = exo.ask(prompt)
            runs.append(Run(tokens, phase, ttft_s, prompt_tokens, cached, text))
            if not options.json:
                print(f"{prompt_tokens:>7,} tokens  {phase:<9}  TTFT {ttft_s:8.3f} s  cached {cached:>7,}", flush=True)
        if not options.json:
            cold, restored = runs[-3], runs[-1]
            same = "same text" if cold.text == restored.text else "other text"
            print(
                f"{'':>15} restored {cold.ttft_s / max(restored.ttft_s, 1e-9):.1f}x faster than cold, {same}",
                flush=True,
            )
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(prog="tierkv bench exo", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:52415", help="EXO's API (default: %(default)s)")
    parser.add_argument("--model", default="", help="model id; default: the only one that EXO serves")
    parser.add_argument("--tokens", default="3700,8000", type=lambda text: [int(each) for each in text.split(",")])
    parser.add_argument("--evict", choices=("recreate", "prompts"), default="recreate")
    parser.add_argument("--others", type=int, default=4, help="prompts that push it out, with --evict prompts")
    parser.add_argument("--other-tokens", type=int, default=4000)
    parser.add_argument(
        "--settle-s",
        type=float,
        default=5.0,
        help="time for state to arrive before it is evicted, and for a new runner to find the agent",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    try:
        runs = session(Exo(options.url, options.model), options)
    except urllib.error.URLError as error:
        print(f"EXO at {options.url}: {getattr(error, 'reason', error)}", file=sys.stderr)
        return 3
    if options.json:
        print(json.dumps({"schema": "tierkv.bench-exo/1", "runs": [asdict(each) for each in runs]}, indent=2))
    return 0


if __name__ == "__main__":
    leave_with(main)
