"""What a hook says to a person: each thing once, until there is something else to say; and its numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from tierkv.handoff.client import HandoffClient
from tierkv.handoff.links import Health
from tierkv.hooks.counters import HotCounters

log = logging.getLogger("tierkv")

# A good start takes less, and an agent that was only restarted is back before.
GRACE_S = 10.0
FIRST_REPEAT_S = 60.0
LONGEST_REPEAT_S = 3600.0


@dataclass(slots=True)
class Voice:
    _said: dict[str, str] = field(default_factory=dict[str, str])

    def say(self, topic: str, text: str, *, level: int = logging.WARNING) -> None:
        """One line in the log for each change of what there is to say about ``topic``; "" is nothing to say."""
        if self._said.get(topic, "") != text:
            self._said[topic] = text
            if text:
                log.log(level, "%s", text)


class AgentWatch:
    """Says when the agent is there, lost, back, and now and then why it is not; ``look`` is called about once a second.

    ``grace_s``: how long nothing is said at the start. An agent that is only restarted is lost and back, no more.
    """

    def __init__(self, client: HandoffClient, *, grace_s: float = GRACE_S) -> None:
        self._client = client
        self._times_up = 0
        self._grace_s = grace_s
        self._forget()

    def _forget(self) -> None:
        self._lost = False
        self._trouble = ""
        self._next_s = self._grace_s
        self._repeat_s = FIRST_REPEAT_S

    def look(self) -> None:
        health = self._client.health
        if health.times_up > self._times_up:
            again, after = ("again ", f" after {health.outage_s:.1f} s") if self._times_up else ("", "")
            text = f"connected {again}to the inference agent {self._client.node}".rstrip() + after
            self._times_up = health.times_up
            self._grace_s = GRACE_S
            self._forget()
            log.info("%s", text)
        if health.up:
            return
        if self._times_up and not self._lost:
            self._lost = True
            log.warning(
                "lost the inference agent at %s; the engine goes on without tiers, trying again",
                self._client.socket_path,
            )
        elif health.down_s >= self._next_s or (self._trouble and self._trouble != health.trouble):
            self._explain(health)

    def _explain(self, health: Health) -> None:
        self._trouble = health.trouble
        self._next_s = health.down_s + self._repeat_s
        self._repeat_s = min(LONGEST_REPEAT_S, self._repeat_s * 4)
        place, since = self._client.socket_path, f"for {health.down_s:.0f} s"
        if health.trouble == "absent":
            log.warning("no inference agent at %s %s; the engine goes on without tiers, trying again", place, since)
        elif health.trouble == "silent":
            log.warning("the inference agent at %s does not answer yet (%s), trying again", place, since)
        else:
            why = self._client.last_error
            log.warning("the inference agent at %s refuses this engine (%s): %s; trying again", place, since, why)


def reporter(
    client: HandoffClient, counters: HotCounters, *, grace_s: float = GRACE_S
) -> Callable[[], dict[str, object]]:
    """What ``Mover`` calls once a second on its own thread, for ``HandoffClient.report_hot``."""
    watch = AgentWatch(client, grace_s=grace_s)

    def report() -> dict[str, object]:
        watch.look()
        memory = psutil.virtual_memory()
        used = {"used_bytes": memory.total - memory.available, "total_bytes": memory.total}
        return {**counters.report(), **used}

    return report
