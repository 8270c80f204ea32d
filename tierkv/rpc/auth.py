"""The shared token: found or made, and asked for by every agent.

Who may do what is decided here and nowhere else (``access_of`` and ``TokenGate.admits``): health is open to all;
telemetry is open to readers of an agent that listens on loopback only; prompts' state needs the token unless the
agent is ``insecure``; what destroys or changes always needs it.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import grpc

from tierkv.errors import ConfigError, StartupError
from tierkv.paths import token_path

_log = logging.getLogger(__name__)

TOKEN_ENV = "TIERKV_TOKEN"  # noqa: S105
MIN_TOKEN_CHARS = 16
MAX_TOKEN_BYTES = 4096
_HEADER = "authorization"
_SCHEME = "Bearer "


@dataclass(frozen=True, slots=True)
class Token:
    """``explicit``: given on purpose, so good enough to listen beyond loopback. ``source`` is for people."""

    value: str = field(repr=False)
    explicit: bool
    source: str

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a client sends with every call."""
        return ((_HEADER, _SCHEME + self.value),)


def load_or_create_token(explicit: str | None = None, token_file: Path | None = None) -> Token:
    """The token given here, in ``$TIERKV_TOKEN`` or in ``token_file``; else this user's own, made if need be.

    Raises ConfigError when a token that was given cannot be used, StartupError when none can be made.
    """
    if found := load_token(explicit, token_file):
        return found
    path = token_path()
    try:
        return Token(_create(path), explicit=False, source=str(path))
    except OSError as error:
        raise StartupError(f"cannot make the token file {path}: {error.strerror}") from error


def load_token(explicit: str | None = None, token_file: Path | None = None) -> Token | None:
    """As ``load_or_create_token``, for tools that must not make one: None when there is none. Raises ConfigError."""
    if explicit:
        return Token(_checked(explicit, "the token that was given"), explicit=True, source="given")
    if from_env := os.environ.get(TOKEN_ENV):
        return Token(_checked(from_env, f"${TOKEN_ENV}"), explicit=True, source=f"${TOKEN_ENV}")
    if token_file is not None:
        return Token(_read(token_file.expanduser()), explicit=True, source=str(token_file))
    path = token_path()
    if not path.exists():
        return None
    return Token(_read(path), explicit=False, source=str(path))


def new_token() -> str:
    """256 random bits, printable."""
    return secrets.token_urlsafe(32)


def _create(path: Path) -> str:
    """The token in ``path``, which exists with mode 0600 afterwards; whoever links first wins, all others read it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(new_token() + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
    finally:
        draft.unlink(missing_ok=True)
    return _read(path)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the token file {path}: {error.strerror}") from error
    if mode & 0o077:
        _log.warning("the token file %s can be read by others (mode %03o): chmod 600 it", path, mode & 0o777)
    try:
        return _checked(text.decode("ascii"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"the token in {path} is not plain text") from error


def _checked(text: str, source: str) -> str:
    value = text.strip()
    if not MIN_TOKEN_CHARS <= len(value) <= MAX_TOKEN_BYTES or not value.isascii() or not value.isprintable():
        raise ConfigError(
            f"the token in {source} is not usable: it needs {MIN_TOKEN_CHARS} or more printable ASCII characters "
            "(make one with 'tierkv token new')"
        )
    return value


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on ``host``. A name other than localhost counts as beyond."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Access(Enum):
    """What a method gives away or changes."""

    OPEN = "health"
    TELEMETRY = "telemetry"
    STATE = "state"
    CONTROL = "control"


_VAULT = "/tierkv.v1.VaultService/"
_NODE = "/tierkv.v1.NodeService/"
_TELEMETRY = {
    _NODE + "GetNode",
    _NODE + "WatchSnapshots",
    _NODE + "WatchEvents",
    _NODE + "ListRequests",
    _VAULT + "Stats",
}
_STATE = {
    *(_VAULT + name for name in ("Probe", "Store", "BatchPromote", "Touch", "Trace")),
    *(_VAULT + name for name in ("ListPrefixes", "DescribePrefix", "ListRecords", "PreviewPurge")),
    *(_NODE + name for name in ("GetConfig", "ValidateConfig", "WatchConfig", "Explain")),
}
_OPEN = ("/grpc.health.v1.Health/", "/grpc.reflection.")


def access_of(method: str) -> Access:
    """The class of a full method name; one that is not known here counts as control."""
    if method.startswith(_OPEN):
        return Access.OPEN
    if method in _TELEMETRY:
        return Access.TELEMETRY
    return Access.STATE if method in _STATE else Access.CONTROL


@dataclass(frozen=True, slots=True)
class TokenGate:
    """Knows the token and how strict this agent is."""

    token: Token
    loopback_only: bool
    insecure: bool

    def holds_token(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Compared in constant time."""
        expected = (_SCHEME + self.token.value).encode()
        for key, value in metadata:
            if key == _HEADER:
                given = value.encode() if isinstance(value, str) else value
                return hmac.compare_digest(given, expected)
        return False

    def admits(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        access = access_of(method)
        if access is Access.OPEN:
            return True
        if access is Access.TELEMETRY and (self.loopback_only or self.insecure):
            return True
        if access is Access.STATE and self.insecure:
            return True
        return self.holds_token(metadata)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Every call passes the gate or ends with UNAUTHENTICATED; ``on_refusal`` is told the method."""

    def __init__(self, gate: TokenGate, on_refusal: Callable[[str], None]) -> None:
        self._gate = gate
        self._on_refusal = on_refusal

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        metadata: Sequence[Any] = handler_call_details.invocation_metadata or ()
        if handler is None or self._gate.admits(handler_call_details.method, metadata):
            return handler
        self._on_refusal(handler_call_details.method)
        return _refusing(handler)


async def _refuse(_: object, context: grpc.aio.ServicerContext) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "wrong or no token: give both sides the same one (security.token_file or TIERKV_TOKEN)",
    )


def _refusing(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """A handler of the same shape that answers nothing; the request is not even parsed."""
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(_refuse)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(_refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(_refuse)
    return grpc.unary_unary_rpc_method_handler(_refuse)
