"""The real mlx_lm.server, asked over HTTP as any client would ask it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tierkv.errors import PeerError, Unreachable

# A cold prompt of 16k tokens takes minutes on two cores; silence is bounded by the server's own progress comments.
_SILENCE_S = 600.0
# The most the server gives.
_TOP_LOGPROBS = 11

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered request. ``ttft_s`` runs from sending the request to the first token's text."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Logprobs:
    """For every generated token: its id, and the log probabilities of the likeliest tokens, by id."""

    tokens: tuple[int, ...]
    likeliest: tuple[dict[int, float], ...]
    cached_tokens: int


class Engine:
    """A server on 127.0.0.1; every request is greedy, so equal states give equal answers."""

    def __init__(self, port: int) -> None:
        self._port = port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stream(self, prompt: str, max_tokens: int, progress: Progress = lambda *_: None) -> Answer:
        """The answer to ``prompt``, timed; ``progress`` hears how many prompt tokens are prefilled."""
        body = {**self._body(prompt, max_tokens), "stream": True, "stream_options": {"include_usage": True}}
        text, usage, ttft_s = "", {}, 0.0
        with _Request(self._port, body) as request:
            for line in request.lines():
                if line.startswith(b": keepalive "):
                    done, _, of = line.split()[2].partition(b"/")
                    progress(int(done), int(of))
                elif line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    ttft_s = ttft_s or request.elapsed_s()
                    event = json.loads(line[6:])
                    text += "".join(choice["text"] for choice in event["choices"])
                    usage = event.get("usage", usage)
            total_s = request.elapsed_s()
        if not usage:
            raise PeerError(self.address, "the engine ended its answer early")
        return Answer(text, usage["prompt_tokens"], _cached(usage), ttft_s, total_s)

    def logprobs(self, prompt: str, max_tokens: int) -> Logprobs:
        """What the engine thinks of each next token, to the last bit (the numbers are JSON floats)."""
        body = {**self._body(prompt, max_tokens), "logprobs": True, "top_logprobs": _TOP_LOGPROBS}
        with _Request(self._port, body) as request:
            document = json.loads(b"".join(request.lines()))
        tokens: list[int] = []
        likeliest: list[dict[int, float]] = []
        for step in document["choices"][0]["logprobs"]["content"]:
            values = {entry["id"]: entry["logprob"] for entry in step["top_logprobs"]}
            tokens.append(max(values, key=values.__getitem__))
            likeliest.append(values)
        return Logprobs(tuple(tokens), tuple(likeliest), _cached(document["usage"]))

    def _body(self, prompt: str, max_tokens: int) -> dict[str, object]:
        return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}


class _Request:
    """One POST to /v1/completions and the lines of its answer."""

    def __init__(self, port: int, body: dict[str, object]) -> None:
        self._address = f"127.0.0.1:{port}"
        self._body = json.dumps(body)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SILENCE_S)
        self._began = 0.0

    def __enter__(self) -> _Request:
        self._connection.connect()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    def lines(self) -> Iterator[bytes]:
        """The answer's lines; the clock has been running since the connection was made."""
        try:
            self._connection.request("POST", "/v1/completions", self._body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            if response.status != 200:
                shown = response.read(500).decode(errors="replace")
                raise PeerError(self._address, f"the engine answered {response.status}: {shown}")
            yield from response
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(self._address, f"the engine does not answer: {error}") from error


def max_difference(one: Logprobs, other: Logprobs) -> float:
    """The largest difference of two runs' log probabilities, over the tokens both name, up to where they part."""
    largest = 0.0
    for position, (a, b) in enumerate(zip(one.likeliest, other.likeliest, strict=False)):
        largest = max([largest, *(abs(a[token] - b[token]) for token in a.keys() & b.keys())])
        if one.tokens[position] != other.tokens[position]:
            break
    return largest


def _cached(usage: dict[str, dict[str, int]]) -> int:
    return usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
