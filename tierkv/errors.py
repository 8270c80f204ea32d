"""Every error TierKV raises, in one tree, grouped by the moment a user meets it.

::

    TierKVError
    ├── ConfigError              reading tierkv.toml            (exit 2)
    │   └── ConfigFaults         all faults of one file at once
    ├── UsageError               the command line               (exit 2)
    ├── StartupError             an agent that cannot start     (exit 1)
    │   ├── PortInUse
    │   ├── UnsafeBind           beyond loopback without a token (exit 5)
    │   └── MissingExtra         a package of an extra is absent
    ├── PeerError                talking to another process
    │   ├── Unreachable          nobody answers                 (exit 3)
    │   ├── NotAuthenticated     wrong or no token              (exit 5)
    │   ├── DeadlineExceeded     too slow
    │   ├── WrongService         something else listens there
    │   ├── BreakerOpen          not asked, it failed just now
    │   └── HandoffError         engine and agent on one machine do not understand each other
    ├── Refused                  asked for something we do not do (exit 5)
    │   ├── RecordTooLarge       larger than its cap, before allocation
    │   ├── StoreFull            everything that is left is pinned or leased
    │   ├── StoreUnwritable      the disk takes nothing; what is there is still served
    │   ├── StaleEpoch           written before a purge that covers it
    │   ├── StaleToken           a purge token that no longer says what it would do
    │   └── UnsupportedState     an engine state that cannot be carried faithfully
    └── CorruptionError          bytes that are not what was written
        ├── BadFrame             unknown version, bad length, bad checksum
        └── ForeignRecord        a record that belongs to another prompt, model or layout

One table below maps each to a gRPC status name and an exit code.
"""

from __future__ import annotations

from dataclasses import dataclass


class TierKVError(Exception):
    """The root: catch this at the edges (servicer, worker, command line, hook) and nowhere else."""


# --- reading tierkv.toml ------------------------------------------------------------------------


class ConfigError(TierKVError):
    """A configuration file cannot be read."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with a configuration: where, what stands there, what to write instead.

    ``where`` is "line 12", the name of an environment variable or of a flag; ``line`` is 0 where there is none.
    """

    key: str
    value: object
    problem: str
    suggestion: str = ""
    where: str = ""
    line: int = 0

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        shown = "" if self.value is None else f" = {_shortened(self.value)}"
        hint = f" ({self.suggestion})" if self.suggestion else ""
        key = f"{self.key}{shown}: " if self.key else ""
        return f"{place}{key}{self.problem}{hint}"


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class ConfigFaults(ConfigError):
    """Everything that is wrong with one file, in the order of its keys."""

    def __init__(self, source: str, faults: tuple[Fault, ...]) -> None:
        self.source = source
        self.faults = faults
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  {fault}" for fault in faults))


# --- the command line ---------------------------------------------------------------------------


class UsageError(TierKVError):
    """The command line asks for something that does not make sense."""


class Terminated(KeyboardInterrupt):
    """A signal such as SIGTERM asked the command to end: it does, in order, as after ctrl-c (exit 128 + number)."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__()


# --- starting an agent --------------------------------------------------------------------------


class StartupError(TierKVError):
    """An agent cannot start; the message says what to change."""


class PortInUse(StartupError):
    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        super().__init__(f"{host}:{port} is already in use; choose another port (--port) or stop what listens there")


class UnsafeBind(StartupError):
    def __init__(self, host: str) -> None:
        self.host = host
        super().__init__(
            f"refusing to listen on {host} without a shared token: make one with 'tierkv token new', give it "
            "to every machine (security.token_file, or TIERKV_TOKEN), or set security.insecure = true if "
            "everyone who can reach this port may read prompts"
        )


class MissingExtra(StartupError):
    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"the package {package!r} is missing: pip install 'tierkv[{extra}]'")


# --- talking to another process -----------------------------------------------------------------


class PeerError(TierKVError):
    """Another process did not do what was asked; ``peer`` is its address."""

    def __init__(self, peer: str, message: str) -> None:
        self.peer = peer
        super().__init__(f"{peer}: {message}")


class Unreachable(PeerError):
    """Nobody answers at that address."""


class NotAuthenticated(PeerError):
    """The peer wants a token and ours is absent or wrong."""


class DeadlineExceeded(PeerError):
    """The peer did not answer in time."""


class WrongService(PeerError):
    """Something listens there, but it is not what was expected (or of another version)."""


class BreakerOpen(PeerError):
    """The peer failed a moment ago and is not asked before its back-off ends."""


class HandoffError(PeerError):
    """The socket between an engine and its agent is absent, ended, or carried something malformed."""


# --- asking for something we do not do ----------------------------------------------------------


class Refused(TierKVError):
    """A request that is understood and declined."""


class RecordTooLarge(Refused):
    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        self.size_bytes, self.limit_bytes = size_bytes, limit_bytes
        super().__init__(f"a record of {size_bytes} bytes is over the limit of {limit_bytes} bytes")


class StoreFull(Refused):
    def __init__(self, size_bytes: int, cap_bytes: int) -> None:
        self.size_bytes, self.cap_bytes = size_bytes, cap_bytes
        super().__init__(f"no room for {size_bytes} bytes in {cap_bytes}: what is left is pinned, leased or being read")


class StoreUnwritable(Refused):
    """``reason``: disk_full, read_only, permission_denied or io_error."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class StaleEpoch(Refused):
    def __init__(self, epoch: int, purge_epoch: int) -> None:
        self.epoch, self.purge_epoch = epoch, purge_epoch
        super().__init__(f"written at epoch {epoch}, purged at epoch {purge_epoch}")


class StaleToken(Refused):
    """The purge token is unknown, expired, used, or no longer covers what it showed."""


class UnsupportedState(Refused):
    """A layer's state cannot be carried faithfully; ``reason`` is a short slug that statistics count."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


# --- bytes that are not what was written --------------------------------------------------------


class CorruptionError(TierKVError):
    """Damaged or foreign bytes: counted, quarantined and shown, never a quiet miss."""


class BadFrame(CorruptionError):
    """A frame or record that cannot be trusted; ``reason`` is a short slug that statistics count."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class ForeignRecord(CorruptionError):
    """A record whose own tokens, model or layout are not those it was asked for."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


# --- one table: error, gRPC status, exit code ---------------------------------------------------

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_PARTIAL = 4
EXIT_REFUSED = 5
EXIT_INTERRUPTED = 130

STATUS_AND_EXIT: tuple[tuple[type[TierKVError], str, int], ...] = (
    (ConfigError, "INVALID_ARGUMENT", EXIT_USAGE),
    (UsageError, "INVALID_ARGUMENT", EXIT_USAGE),
    (UnsafeBind, "FAILED_PRECONDITION", EXIT_REFUSED),
    (StartupError, "FAILED_PRECONDITION", EXIT_FAILED),
    (Unreachable, "UNAVAILABLE", EXIT_UNREACHABLE),
    (BreakerOpen, "UNAVAILABLE", EXIT_UNREACHABLE),
    (DeadlineExceeded, "DEADLINE_EXCEEDED", EXIT_UNREACHABLE),
    (WrongService, "UNIMPLEMENTED", EXIT_UNREACHABLE),
    (NotAuthenticated, "UNAUTHENTICATED", EXIT_REFUSED),
    (RecordTooLarge, "INVALID_ARGUMENT", EXIT_REFUSED),
    (StoreFull, "RESOURCE_EXHAUSTED", EXIT_REFUSED),
    (StoreUnwritable, "RESOURCE_EXHAUSTED", EXIT_REFUSED),
    (StaleEpoch, "FAILED_PRECONDITION", EXIT_REFUSED),
    (StaleToken, "FAILED_PRECONDITION", EXIT_REFUSED),
    (Refused, "FAILED_PRECONDITION", EXIT_REFUSED),
    (CorruptionError, "DATA_LOSS", EXIT_FAILED),
    (TierKVError, "INTERNAL", EXIT_FAILED),
)


def exit_code(error: BaseException) -> int:
    """The exit code of a command that ended with ``error``."""
    if isinstance(error, Terminated):
        return 128 + error.number
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return next((code for kind, _, code in STATUS_AND_EXIT if isinstance(error, kind)), EXIT_FAILED)


def grpc_status(error: BaseException) -> str:
    """The name of the gRPC status that carries ``error`` (``grpc.StatusCode[...]``)."""
    return next((name for kind, name, _ in STATUS_AND_EXIT if isinstance(error, kind)), "INTERNAL")
