"""``Explain`` and ``ListRequests``: messages to domain values and back, and the methods of ``NodeService``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from tierkv.errors import Refused, UsageError
from tierkv.rpc.channels import printable
from tierkv.rpc.serving import Context, unary
from tierkv.telemetry.explanation import Explanation, RequestLine, TierFinding
from tierkv.v1 import node_service_pb2 as pb

if TYPE_CHECKING:
    from tierkv.identity.blocks import Tokens

MAX_PROMPT_TOKENS = 1 << 20
MAX_TEXT_CHARS = 500
MAX_ITEMS = 64


class ExplainPort(Protocol):
    """Who knows the requests of this node's engines. Raises Refused or UsageError."""

    def requests(self, limit: int) -> list[RequestLine]: ...

    async def explain(self, number: int) -> Explanation: ...

    async def explain_prompt(self, tokens: Tokens, model_name: str) -> Explanation: ...


class ExplainMethods:
    """The two methods over ``port``; without one (a vault) both are refused."""

    def __init__(self, port: ExplainPort | None) -> None:
        self._port = port

    def handlers(self) -> Mapping[str, grpc.RpcMethodHandler]:
        return {
            "ListRequests": unary(pb.ListRequestsRequest, self._list),
            "Explain": unary(pb.ExplainRequest, self._explain),
        }

    def _known(self) -> ExplainPort:
        if self._port is None:
            raise Refused("this agent has no engine; ask the inference agent")
        return self._port

    async def _list(self, request: pb.ListRequestsRequest, _: Context) -> pb.ListRequestsResponse:
        return pb.ListRequestsResponse(
            requests=[_line_to_proto(line) for line in self._known().requests(request.limit)]
        )

    async def _explain(self, request: pb.ExplainRequest, _: Context) -> pb.ExplainResponse:
        port = self._known()
        if not request.tokens:
            return explanation_to_proto(await port.explain(request.id))
        if len(request.tokens) > MAX_PROMPT_TOKENS or len(request.model) > MAX_TEXT_CHARS:
            raise UsageError(f"at most {MAX_PROMPT_TOKENS:,} tokens, and a name of {MAX_TEXT_CHARS} characters")
        import numpy as np  # not at the top: the console, which reads explanations, starts without it

        return explanation_to_proto(await port.explain_prompt(np.array(request.tokens, np.int64), request.model))


# --- messages -----------------------------------------------------------------------------------

_LINE = (
    "id", "time_unix_s", "model", "prompt_tokens", "hot_tokens", "position", "outcome", "reason", "seconds",
)  # fmt: skip
_FINDING = (
    "tier", "peer", "asked", "asked_tokens", "found_tokens", "used_tokens", "used_bytes", "seconds", "reason", "detail",
    "differs_at", "gone_unix_s",
)  # fmt: skip
_EXPLANATION = (
    "sentence", "identity", "key", "codec", "fidelity", "restored_bytes", "expected_restore_s", "expected_prefill_s",
    "engine",
)  # fmt: skip


def explanation_to_proto(explained: Explanation) -> pb.ExplainResponse:
    return pb.ExplainResponse(
        request=_line_to_proto(explained.request),
        tiers=[
            pb.TierFinding(
                **{name: getattr(each, name) for name in _FINDING},
                checkpoints=each.checkpoints,
                refused=dict(each.refused),
            )
            for each in explained.tiers
        ],
        differing_parts=explained.differing_parts,
        **{name: getattr(explained, name) for name in _EXPLANATION},
    )


def explanation_from_proto(message: pb.ExplainResponse) -> Explanation:
    """What an agent answered; texts are cleaned, lists cut."""
    tiers = tuple(
        TierFinding(
            **_values(each, _FINDING),
            checkpoints=tuple(each.checkpoints[:MAX_ITEMS]),
            refused={_text(reason): count for reason, count in list(each.refused.items())[:MAX_ITEMS]},
        )
        for each in message.tiers[:MAX_ITEMS]
    )
    differing = tuple(_text(part) for part in message.differing_parts[:MAX_ITEMS])
    return Explanation(
        request=line_from_proto(message.request), tiers=tiers, differing_parts=differing,
        **_values(message, _EXPLANATION),
    )  # fmt: skip


def _line_to_proto(line: RequestLine) -> pb.RequestLine:
    return pb.RequestLine(**{name: getattr(line, name) for name in _LINE})


def line_from_proto(message: pb.RequestLine) -> RequestLine:
    return RequestLine(**_values(message, _LINE))


def _values(message: Any, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(message, name) for name in names}
    return {name: _text(value) if isinstance(value, str) else value for name, value in values.items()}


def _text(text: str) -> str:
    return printable(text, MAX_TEXT_CHARS)
