"""The last events of one agent, in a ring: readers follow by id and learn how many they were too late for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice

from tierkv.telemetry.snapshot import Event

MAX_MESSAGE_CHARS = 500
MAX_ATTRIBUTES = 16
MAX_ATTRIBUTE_CHARS = 200

Listener = Callable[[], None]


class EventRing:
    """Keeps the newest ``kept`` events; ids are consecutive from 1. Any thread may add or read."""

    def __init__(self, kept: int = 2000) -> None:
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=max(1, kept))
        self._listeners: list[Listener] = []
        self._last_id = 0

    @property
    def last_id(self) -> int:
        return self._last_id

    def add(
        self, time_unix_s: float, kind: str, severity: str, node: str, message: str, attributes: Mapping[str, str]
    ) -> Event:
        """The event is kept under the next id and every listener is told. Long texts are cut."""
        cut = {k[:MAX_ATTRIBUTE_CHARS]: v[:MAX_ATTRIBUTE_CHARS] for k, v in islice(attributes.items(), MAX_ATTRIBUTES)}
        with self._lock:
            self._last_id += 1
            event = Event(self._last_id, time_unix_s, kind, severity, node, message[:MAX_MESSAGE_CHARS], cut)
            self._events.append(event)
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()
        return event

    def after(self, after_id: int, limit: int = 500) -> tuple[list[Event], int]:
        """Up to ``limit`` kept events after ``after_id``, and how many before the first of them are gone.

        An id of the future was learnt from an earlier run of this agent: everything kept is new to that reader.
        """
        with self._lock:
            if after_id > self._last_id:
                after_id = 0
            first_kept = self._last_id - len(self._events) + 1
            skip = max(0, after_id + 1 - first_kept)
            dropped = max(0, first_kept - 1 - after_id)
            return list(islice(self._events, skip, skip + limit)), dropped

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """``listener`` is called, on the adding thread, after every event, until the returned function is called."""
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return unsubscribe
