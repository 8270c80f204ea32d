"""A hook's two connections to the agent, kept up by a background thread: no request ever waits for a connect."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tierkv.errors import HandoffError
from tierkv.handoff.channel import Channel, Refusal

# A connect to nobody is one system call: an agent that comes back is found within a second.
LOOK_EVERY_S = 0.5
FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 1.0
REFUSED_BACKOFF_S = 5.0
# No request waits for a hello. An agent that is busy or frozen answers the one that waits as soon as it can; a second
# one would only stand behind it, and the agent would make an arena of 256 MiB for each.
HELLO_BUDGET_S = 60.0

Trouble = Literal["absent", "silent", "refused"]


@dataclass(slots=True, eq=False)
class Link:
    """A connection that comes and goes. Whoever uses ``channel`` holds ``lock``."""

    kind: str
    channel: Channel | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class Health:
    """What is known of the connections.

    ``times_up``: how often both were up. ``down_s``: how long they have not been, 0 while they are; ``outage_s``: how
    long they were not before they last were. ``trouble``: nobody listens ("absent"), somebody listens and says nothing
    ("silent"), or an agent that will not have this engine ("refused").
    """

    up: bool
    times_up: int
    down_s: float
    outage_s: float
    trouble: Trouble


class Links:
    """``greet(kind, channel)`` is called on the background thread with every new connection, before anybody uses it."""

    def __init__(self, path: Path, engine: str, build: str, greet: Callable[[str, Channel], None]) -> None:
        self.path = path
        self.control = Link("control")
        self.demote = Link("demote")
        self.last_error = ""
        self._hello = {"engine": engine, "build": build, "engine_id": uuid.uuid4().hex}
        self._greet = greet
        self._wake = threading.Event()
        self._connected = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._noting = threading.Lock()
        self._trouble: Trouble = "absent"
        self._times_up = 0
        self._down_since_s: float | None = time.monotonic()
        self._outage_s = 0.0

    @property
    def up(self) -> bool:
        """Whether both connections are up as far as is known."""
        return self.control.channel is not None and self.demote.channel is not None

    @property
    def health(self) -> Health:
        with self._noting:
            down_s = 0.0 if self._down_since_s is None else time.monotonic() - self._down_since_s
            return Health(self._down_since_s is None, self._times_up, down_s, self._outage_s, self._trouble)

    def start(self) -> None:
        """The background thread runs; later calls cost nothing."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="tierkv-connect", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether both connections are up by then."""
        self.start()
        return self._connected.wait(timeout_s) and self.up

    def poke(self) -> None:
        """A connection looks lost: the thread sees to it now."""
        self._wake.set()

    def drop(self, link: Link, channel: Channel, error: HandoffError | None = None) -> None:
        """The connection is given up; regions in use go back to the agent with it."""
        if error is not None:
            self.last_error = str(error)
        if link.channel is channel:
            with self._noting:
                link.channel = None
                self._connected.clear()
                if self._down_since_s is None:
                    self._down_since_s = time.monotonic()
        channel.close()
        self._wake.set()

    def close(self) -> None:
        """Both connections are closed and no thread connects again."""
        self._closed = True
        self._wake.set()
        for link in (self.control, self.demote):
            channel = link.channel
            if channel is not None:
                self.drop(link, channel)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._closed:
            try:
                self._connect_missing()
                wait_s, backoff_s = LOOK_EVERY_S, FIRST_BACKOFF_S
            except HandoffError as error:
                self.last_error = str(error)
                longest_s = REFUSED_BACKOFF_S if self._trouble == "refused" else LONGEST_BACKOFF_S
                wait_s, backoff_s = backoff_s, min(longest_s, backoff_s * 2)
            self._wake.wait(wait_s)
            self._wake.clear()

    def _connect_missing(self) -> None:
        for link in (self.demote, self.control):
            channel = link.channel
            if channel is not None and channel.hung_up:
                self.drop(link, channel)
            if link.channel is None and not self._closed:
                self._connect(link)
        with self._noting:
            if self.up and self._down_since_s is not None:
                self._outage_s = time.monotonic() - self._down_since_s
                self._down_since_s = None
                self._times_up += 1
                self._connected.set()

    def _connect(self, link: Link) -> None:
        channel = self._greeted(link)
        try:
            self._greet(link.kind, channel)
        except HandoffError:
            channel.close()
            raise
        link.channel = channel
        if self._closed:
            self.drop(link, channel)

    def _greeted(self, link: Link) -> Channel:
        try:
            channel = Channel.connected(self.path)
        except HandoffError as error:
            nobody = isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError)
            self._trouble = "absent" if nobody else "silent"
            raise
        self._trouble = "silent"
        deadline = time.monotonic() + HELLO_BUDGET_S
        hello = {**self._hello, "channel": link.kind}
        try:
            channel.greet(hello, writable=link is self.demote, deadline=deadline, given_up=lambda: self._closed)
        except Refusal:
            self._trouble = "refused"
            raise
        return channel
