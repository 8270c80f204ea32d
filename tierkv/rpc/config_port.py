"""Configuration of a running agent, as plain values: what is in force, what a change would do, what it did.

``NodeService`` serves a ``ConfigPort``; command line and console get the same values from ``ConfigClient``. Values are
what TOML and JSON both hold: text, numbers, booleans and lists of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tierkv.errors import Fault, TierKVError

Changes = Mapping[str, object]
"""Key path -> new value."""


@dataclass(frozen=True, slots=True)
class ConfigValue:
    """``live``: a change takes effect at once. ``pending``: what the next start will use, by file, flags and
    environment as they are now; equal to ``value`` mostly."""

    key: str
    value: object
    origin: str = ""
    live: bool = False
    pending: object = None


@dataclass(frozen=True, slots=True)
class ConfigState:
    """What one agent runs with. ``last_fault``: why the last reload was not taken over, "" when it was."""

    revision: int = 0
    path: str = ""
    values: tuple[ConfigValue, ...] = ()
    last_fault: str = ""


@dataclass(frozen=True, slots=True)
class ConfigEffect:
    """What one change does on one agent. ``effect``: "live", "restart", "unchanged" or "not_used".

    ``unsaved``: why the agent will not have the value after its restart; "" where its own file says so.
    """

    key: str
    before: object
    after: object
    effect: str
    note: str = ""
    evict_bytes: int = 0
    evict_prefixes: int = 0
    unsaved: str = ""

    @property
    def never(self) -> bool:
        """It would take effect with a restart, and the restart will not know of it."""
        return self.effect == "restart" and bool(self.unsaved)


@dataclass(frozen=True, slots=True)
class ConfigCheck:
    """The change is possible when there are no ``faults``; ``revision`` is what it was planned on."""

    revision: int
    effects: tuple[ConfigEffect, ...] = ()
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigApplied:
    """``undo_token`` takes exactly this change back, as long as no other came after it."""

    revision: int
    effects: tuple[ConfigEffect, ...]
    undo_token: str


@dataclass(frozen=True, slots=True)
class Checked:
    """What one agent said to the change, or why it said nothing."""

    peer: str
    check: ConfigCheck | None = None
    error: TierKVError | None = None

    @property
    def ready(self) -> bool:
        return self.check is not None and not self.check.faults


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What became of the change on one agent: applied, refused (``error``), or taken back because another refused."""

    peer: str
    applied: ConfigApplied | None = None
    error: TierKVError | None = None
    taken_back: bool = False

    @property
    def in_force(self) -> bool:
        return self.applied is not None and not self.taken_back


class ConfigPort(Protocol):
    """Owned by the agent's event loop."""

    def state(self) -> ConfigState: ...

    def check(self, changes: Changes) -> ConfigCheck:
        """Changes nothing."""
        ...

    async def apply(self, changes: Changes, *, revision: int, who: str) -> ConfigApplied:
        """All of it is in force, or Refused (StaleToken for another revision) and nothing of it is."""
        ...

    async def undo(self, undo_token: str, *, who: str) -> ConfigApplied:
        """Raises StaleToken when the token is unknown or something came after that change."""
        ...

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """``listener`` is called after every change, until the returned function is called."""
        ...


def evictions(effects: Sequence[ConfigEffect]) -> tuple[int, int]:
    """Bytes and prefixes that the changes would evict at once."""
    return sum(one.evict_bytes for one in effects), sum(one.evict_prefixes for one in effects)
