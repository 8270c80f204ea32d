"""The configuration of a running agent: what is in force, checked changes to it, and reloads that keep the last good.

A change that came over the network lies over file, environment and flags until the agent restarts or reads its file
again (SIGHUP); it is written into the agent's own file as well, or the effect says why it cannot outlive the restart.
A key that cannot change while the agent runs waits for the restart, and says so.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tierkv.agents.live_keys import LiveKey
from tierkv.config.edit import shown
from tierkv.config.load import Flag, Loaded
from tierkv.config.own_file import OwnFile, Saved, values_of
from tierkv.config.rows import rows
from tierkv.config.running import Base
from tierkv.errors import ConfigError, ConfigFaults, Fault, Refused, StaleToken, TierKVError
from tierkv.rpc.config_port import Changes, ConfigApplied, ConfigCheck, ConfigEffect, ConfigState, ConfigValue
from tierkv.telemetry.node import NodeTelemetry

T = TypeVar("T")

HIDDEN = frozenset({"inference.tenant"})
"""A tenant's name is part of every key: who knows it may ask for that tenant's state."""

CONSOLES = frozenset({"cluster.name"})
"""What stands in a section of the agents and only the console shows."""

_SHARED = ("cluster.", "security.", "telemetry.")
_OWN = {"inference": ("inference.", "vault.max_record_bytes"), "vault": ("vault.",)}


@dataclass(frozen=True, slots=True)
class _Undo:
    token: str
    revision: int
    overlay: Mapping[str, Flag]
    saved: Saved = field(default_factory=Saved)


class Configured:
    """Implements ``ConfigPort``. ``keys``: what can change live; owned by the agent's event loop."""

    def __init__(self, base: Base, loaded: Loaded, role: str, keys: Mapping[str, LiveKey], telemetry: NodeTelemetry):
        self._base, self._keys, self._telemetry = base, keys, telemetry
        self._prefixes = _SHARED + _OWN["inference" if role == "inference" else "vault"]
        self._own = OwnFile(base)
        self._changing = asyncio.Lock()
        self._source = base.read()
        self._overlay: Mapping[str, Flag] = {}
        self._wanted = loaded
        self._in_force = values_of(loaded)
        self._revision = 1
        self._last_fault = ""
        self._undo: _Undo | None = None
        self._listeners: list[Callable[[], None]] = []

    # --- reading ---------------------------------------------------------------------------------

    def state(self) -> ConfigState:
        found: list[ConfigValue] = []
        following = self._at_next_start()
        for row in rows(self._wanted):
            now = self._in_force.get(row.path, row.value)
            live = row.path in self._keys
            value = ConfigValue(row.path, now, str(row.origin), live, following.get(row.path, now))
            if row.path in HIDDEN and now:
                value = ConfigValue(row.path, "(hidden)", str(row.origin), live, "(hidden)")
            found.append(value)
        return ConfigState(self._revision, str(self._base.path or ""), tuple(found), self._last_fault)

    def _at_next_start(self) -> dict[str, object]:
        """What file, flags and environment say now; of a faulty file, which would end the start, what is wanted."""
        try:
            return values_of(self._base.check(self._base.read(), {}))
        except ConfigError:
            return values_of(self._wanted)

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # --- planning --------------------------------------------------------------------------------

    def check(self, changes: Changes) -> ConfigCheck:
        try:
            _, wanted = self._planned(changes, "")
        except ConfigFaults as error:
            return ConfigCheck(self._revision, faults=error.faults)
        except ConfigError as error:
            return ConfigCheck(self._revision, faults=(Fault("", None, str(error)),))
        plan = self._own.plan(self._kept(changes, wanted))
        return ConfigCheck(self._revision, self._effects(changes, wanted, plan))

    def _uses(self, key: str) -> bool:
        return key.startswith(self._prefixes) and key not in CONSOLES

    def _planned(self, changes: Changes, who: str) -> tuple[dict[str, Flag], Loaded]:
        """The overlay with the changes and what it leads to. Raises ConfigError."""
        overlay = dict(self._overlay)
        for key, value in changes.items():
            where = self._base.place(self._source, key)
            if self._uses(key):
                overlay[where] = Flag(f"applied by {who}", value)
        return overlay, self._base.check(self._source, overlay)

    def _kept(self, changes: Changes, wanted: Loaded) -> dict[str, object]:
        """What the agent's own file is to say: those of the changes that it uses."""
        after = values_of(wanted)
        named = (self._base.shown(key, after) for key in changes)
        return {key: after[key] for key in named if self._uses(key) and key in after}

    def _effects(self, changes: Changes, wanted: Loaded, saved: Saved) -> tuple[ConfigEffect, ...]:
        after = values_of(wanted)
        effects = (self._effect(self._base.shown(key, after), value, after) for key, value in changes.items())
        return tuple(replace(one, unsaved=saved.unsaved.get(one.key, "")) for one in effects)

    def _effect(self, key: str, value: object, after: Mapping[str, object]) -> ConfigEffect:
        if not self._uses(key):
            return ConfigEffect(key, None, value, "not_used")
        now, then = self._in_force.get(key), after.get(key, value)
        if now == then:
            return ConfigEffect(key, now, then, "unchanged")
        live = self._keys.get(key)
        why_not = live.why_not(then) if live else ""
        if live is None or why_not:
            return ConfigEffect(key, now, then, "restart", why_not)
        what_if = live.what_if(then)
        if what_if is None:
            return ConfigEffect(key, now, then, "live")
        return ConfigEffect(key, now, then, "live", what_if.note, what_if.evict_bytes, what_if.evict_prefixes)

    # --- changing --------------------------------------------------------------------------------

    async def apply(self, changes: Changes, *, revision: int, who: str) -> ConfigApplied:
        return await self._whole(self._apply(changes, revision, who))

    async def _apply(self, changes: Changes, revision: int, who: str) -> ConfigApplied:
        if revision and revision != self._revision:
            raise StaleToken("the configuration changed meanwhile; look at it again")
        try:
            overlay, wanted = self._planned(changes, who)
        except ConfigError as error:
            raise Refused(str(error)) from None
        before = self._overlay
        effects = self._effects(changes, wanted, Saved())
        await self._take_over(wanted)
        saved = await asyncio.to_thread(self._own.save, self._kept(changes, wanted))
        effects = tuple(replace(one, unsaved=saved.unsaved.get(one.key, "")) for one in effects)
        self._overlay = overlay
        self._undo = _Undo(secrets.token_hex(8), self._changed(), before, saved)
        for one in effects:
            if one.effect in ("live", "restart"):
                self._told("info", f"{_change(one)} (by {who})", who, one.key)
        return ConfigApplied(self._revision, effects, self._undo.token)

    async def undo(self, undo_token: str, *, who: str) -> ConfigApplied:
        return await self._whole(self._take_back(undo_token, who))

    async def _take_back(self, undo_token: str, who: str) -> ConfigApplied:
        undo = self._undo
        if undo is None or undo.token != undo_token or undo.revision != self._revision:
            raise StaleToken("that change cannot be taken back: it is taken back already, or another came after it")
        before = dict(self._in_force)
        await self._take_over(self._base.check(self._source, undo.overlay))
        restored = await asyncio.to_thread(self._own.take_back, undo.saved)
        self._overlay, self._undo = undo.overlay, None
        revision = self._changed()
        effects = tuple(
            ConfigEffect(key, before[key], value, "live")
            for key, value in self._in_force.items()
            if before.get(key) != value
        )
        rest = "" if restored else f"; {self._own.path} was changed meanwhile and still says what was taken back"
        self._told("info" if restored else "warning", f"{who} took a change of the configuration back{rest}", who)
        return ConfigApplied(revision, effects, "")

    async def reload(self) -> bool:
        """The file was read again and is in force as far as it can be; False: it is faulty, the last good one stays."""
        return await self._whole(self._reload())

    async def _whole(self, change: Coroutine[None, None, T]) -> T:
        """One change at a time, to its end even when the caller has gone."""

        async def run() -> T:
            async with self._changing:
                return await change

        return await asyncio.shield(asyncio.create_task(run()))

    async def _reload(self) -> bool:
        try:
            source = self._base.read()
            wanted = self._base.check(source, {})
            await self._take_over(wanted)
        except TierKVError as error:
            self._last_fault = str(error)[:2000]
            self._changed()
            self._told("error", f"reload: the last good configuration stays: {self._last_fault}", "SIGHUP")
            return False
        self._source, self._overlay, self._undo, self._last_fault = source, {}, None, ""
        self._changed()
        waiting = [value.key for value in self.state().values if value.pending != value.value]
        rest = f"; from its next start on: {', '.join(waiting)}" if waiting else ""
        self._told("info", f"{self._base.path or 'no file'} was read again{rest}", "SIGHUP")
        return True

    async def _take_over(self, wanted: Loaded) -> None:
        """Live keys have their new values; when one refuses, those before it have their old ones again."""
        after, done = values_of(wanted), list[str]()
        for key, live in self._keys.items():
            if key not in after or after[key] == self._in_force.get(key) or live.why_not(after[key]):
                continue
            try:
                await _called(live, after[key])
            except (TierKVError, ValueError, OSError, MemoryError) as error:
                for known in reversed(done):
                    await _called(self._keys[known], self._in_force[known])
                raise Refused(f"{key}: {error}") from None
            done.append(key)
        self._in_force.update({key: after[key] for key in done})
        self._wanted = wanted

    def _changed(self) -> int:
        self._revision += 1
        for listener in tuple(self._listeners):
            listener()
        return self._revision

    def _told(self, severity: str, message: str, who: str, key: str = "") -> None:
        attributes = {"actor": who, **({"key": key} if key else {})}
        self._telemetry.emit("config", severity, message, **attributes)  # pyright: ignore[reportArgumentType]


async def _called(live: LiveKey, value: object) -> None:
    outcome = live.set(value)
    if inspect.isawaitable(outcome):
        await outcome


def _change(effect: ConfigEffect) -> str:
    """An effect as the event log tells it."""
    change = f"{effect.key} {shown(effect.key, effect.before)} -> {shown(effect.key, effect.after)}"
    if effect.effect == "live":
        return f"{change}, until the restart: {effect.unsaved}" if effect.unsaved else change
    return f"{change}, not in force: {effect.unsaved}" if effect.unsaved else f"{change}, from its next start on"
