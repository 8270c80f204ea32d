"""Records on their way out of a store: checked before their first byte leaves, then read as the reader takes them.

An ``Outgo`` belongs to one call and holds a few open records and messages. It opens and reads in executor threads, one
at a time. What lies in memory is checked and joined into messages by whoever sends them: what another core has just
worked on costs more to send.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from tierkv.errors import CorruptionError
from tierkv.identity.blocks import BlockKey
from tierkv.rpc.bulk import Buffer, MessageWriter, encode_message
from tierkv.store.base import RecordReader, Store
from tierkv.store.verify import RecordVerifier

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_CHECK_BYTES = 4 << 20
"""What a sender checks before others get their turn: a quarter of a millisecond."""
AHEAD_BYTES = 8 << 20
"""How much is read at once, but for the first message; twice this is held while a reader stalls, which takes memory
where records come from a disk, and keeps others from being evicted."""
MOST_AHEAD_BYTES = 32 << 20
"""The same for a reader that is fast, while nothing has to be waited for: a thread's turn costs as much as sending
half a MiB."""
_FAST_BYTES_PER_S = 0.5e9
_AT_ONCE_S = 0.001
# Records that one message may look into at once: so many stay open until it is closed.
_MAX_HELD = 16
DAMAGED = "damaged"
UNREADABLE = "unreadable"


def open_verified(
    store: Store, key: BlockKey, on_damage: Callable[[], None], *, count_hit: bool = True
) -> RecordReader | str:
    """The open record, every frame of it intact just now; or the reason why there is none.

    A damaged one is quarantined and ``on_damage`` is called; the store's events tell which.
    """
    return _open(store, key, on_damage, count_hit=count_hit, verify_in_memory=True)


def check(store: Store, key: BlockKey, on_damage: Callable[[], None]) -> None:
    """As ``open_verified``, for the sake of the quarantine alone."""
    opened = open_verified(store, key, on_damage, count_hit=False)
    if not isinstance(opened, str):
        opened.close()


def _open(
    store: Store, key: BlockKey, on_damage: Callable[[], None], *, count_hit: bool, verify_in_memory: bool
) -> RecordReader | str:
    try:
        reader = store.open(key, count_hit=count_hit)
    except CorruptionError as error:
        return _quarantine(store, key, str(error), on_damage)
    except OSError as error:
        _log.error("record %s cannot be opened: %s", key.hex()[:12], error)
        return UNREADABLE
    if reader is None:
        return store.missing_reason(key)
    try:
        if verify_in_memory or not reader.in_memory:
            verification = _Verification(reader, key)
            while not verification.step(_READ_BYTES):
                pass
    except CorruptionError as error:
        reader.close()
        return _quarantine(store, key, str(error), on_damage)
    except OSError as error:
        reader.close()
        _log.error("record %s cannot be read: %s", key.hex()[:12], error)
        return UNREADABLE
    except BaseException:
        reader.close()
        raise
    return reader


def _quarantine(store: Store, key: BlockKey, problem: str, on_damage: Callable[[], None]) -> str:
    store.quarantine(key, problem)
    on_damage()
    return DAMAGED


class _Verification:
    """The check of one open record, in steps."""

    def __init__(self, reader: RecordReader, key: BlockKey) -> None:
        self._reader, self._key = reader, key
        self._verifier = RecordVerifier(reader.size_bytes)
        self._offset = 0

    @property
    def left_bytes(self) -> int:
        return max(0, self._reader.size_bytes - self._offset)

    def step(self, n_bytes: int) -> bool:
        """True at the end of a sound record, False before. Raises CorruptionError."""
        for view in self._reader.views(self._offset, n_bytes):
            self._verifier.feed(view)
        self._offset += n_bytes
        if self.left_bytes:
            return False
        if self._verifier.finish().key != self._key:
            raise CorruptionError("another record lies under this key")
        return True


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a message begins: in the call's records, and in one that its ``reader`` has open unless at its start."""

    index: int = 0
    offset: int = 0
    reader: RecordReader | None = None


class FoundDamage(CorruptionError):
    """A record in a message is not sound; ``Outgo.without`` it the call goes on."""

    def __init__(self, problem: str, index: int, place: _Place) -> None:
        super().__init__(problem)
        self.index, self.place = index, place


class Outgoing:
    """One message, which looks into its records until it is ``encoded``; ``data_bytes`` of it are theirs."""

    def __init__(
        self,
        place: _Place,
        parts: list[Buffer],
        size_bytes: int,
        data_bytes: int,
        readers: list[RecordReader],
        unverified: deque[tuple[int, _Verification]],
        on_sound: Callable[[int], None],
    ) -> None:
        self._place, self._parts, self._readers = place, parts, readers
        self._unverified, self._on_sound = unverified, on_sound
        self.size_bytes, self.data_bytes = size_bytes, data_bytes
        self.is_encoded = False

    def checks(self) -> Iterator[None]:
        """Checks what begins in it, each record to its end, and pauses every few MiB. Raises FoundDamage."""
        n_bytes = 0
        while self._unverified:
            index, verification = self._unverified[0]
            n_bytes += min(verification.left_bytes, _CHECK_BYTES)
            try:
                is_sound = verification.step(_CHECK_BYTES)
            except CorruptionError as error:
                raise FoundDamage(str(error), index, self._place) from None
            if is_sound:
                self._unverified.popleft()
                self._on_sound(index)
            if n_bytes >= _CHECK_BYTES:
                n_bytes = 0
                yield

    def encoded(self) -> bytes:
        """Its bytes; once, in any thread. The ``Outgo`` that it is from must not have been closed. Raises FoundDamage
        where not all has been checked yet."""
        for _ in self.checks():
            pass
        message = encode_message(self._parts, self.size_bytes)
        self._parts = []
        self.is_encoded = True
        return message

    def close(self, keep: RecordReader | None = None) -> None:
        """The records that end in it may be evicted again, except for ``keep``."""
        self._parts = []
        self._unverified.clear()
        _close_all(self._readers, keep)


def _close_all(readers: list[RecordReader], keep: RecordReader | None = None) -> None:
    while readers:
        reader = readers.pop()
        if reader is not keep:
            reader.close()


class Outgo:
    """The messages of one BatchPromote call; with ``peek`` it counts as no use of its records."""

    def __init__(
        self,
        store: Store,
        keys: Sequence[BlockKey],
        message_bytes: int,
        on_damage: Callable[[], None],
        on_missing: Callable[[str], None],
        *,
        peek: bool = False,
    ) -> None:
        self._store, self._keys = store, keys
        self._on_damage, self._on_missing = on_damage, on_missing
        self._peek = peek
        self._writer = MessageWriter(message_bytes)
        self._reader: RecordReader | None = None
        self._held: list[RecordReader] = []
        self._unverified: deque[tuple[int, _Verification]] = deque()
        self._looking: deque[Outgoing] = deque()
        self._begins = _Place()
        self._messages = self._run(self._begins)
        self._data_bytes = 0
        self._began_s = time.monotonic()
        self._given_bytes = self._last_given_bytes = 0
        self._n_opened = 0
        self._missing: dict[int, str] = {}
        self._sound: set[int] = set()
        self._met_damage = False
        self._lock = threading.Lock()

    @property
    def suspects(self) -> Sequence[BlockKey]:
        """What was not checked, if some of what was is damaged: the reader may have left because of that."""
        if not self._met_damage:
            return ()
        return [key for index, key in enumerate(self._keys) if index not in self._sound and index not in self._missing]

    def next_messages(self) -> list[Outgoing]:
        """The next ones, of AHEAD_BYTES or one; none when all is said. Records of those encoded by now are let go."""
        with self._lock:
            while self._looking and self._looking[0].is_encoded:
                self._looking.popleft().close()
            began_s = time.monotonic()
            # What was given last is on its way only now.
            sent_bytes = self._given_bytes - self._last_given_bytes
            is_fast = sent_bytes > _FAST_BYTES_PER_S * (began_s - self._began_s)
            wanted, most = (AHEAD_BYTES, MOST_AHEAD_BYTES if is_fast else 0) if self._given_bytes else (1, 0)
            found: list[Outgoing] = []
            n_bytes = 0
            for message in self._messages:
                found.append(message)
                self._looking.append(message)
                n_bytes += message.size_bytes
                if n_bytes >= wanted and (n_bytes >= most or time.monotonic() - began_s > _AT_ONCE_S):
                    break
            self._given_bytes += n_bytes
            self._last_given_bytes = n_bytes
            return found

    def without(self, damage: FoundDamage) -> list[Outgoing]:
        """As ``next_messages``, from the message on that was found to be damaged; it and later ones are lost."""
        with self._lock:
            self._messages.close()
            self._let_go(keep=damage.place.reader)
            self._writer.take()
            self._data_bytes = 0
            self._reader = damage.place.reader
            self._met_damage = True
            reason = _quarantine(self._store, self._keys[damage.index], str(damage), self._on_damage)
            self._tell_missing(damage.index, reason)
            self._begins = damage.place
            self._messages = self._run(damage.place)
        return self.next_messages()

    def close(self) -> None:
        """All records may be evicted again; messages that are not encoded are lost."""
        with self._lock:
            self._messages.close()
            self._let_go()

    def _let_go(self, keep: RecordReader | None = None) -> None:
        while self._looking:
            self._looking.popleft().close(keep)
        _close_all(self._held, keep)
        self._unverified.clear()
        reader, self._reader = self._reader, None
        if reader is not None and reader is not keep:
            reader.close()

    def _run(self, begins: _Place) -> Generator[Outgoing, None, None]:
        if begins.reader is not None:
            yield from self._record(begins.index, begins.reader, begins.offset)
        for index in range(begins.index + (begins.reader is not None), len(self._keys)):
            if not self._writer.room and (message := self._flush(_Place(index))):
                yield message
            opened = self._missing.get(index) or self._opened(index)
            if isinstance(opened, str):
                self._tell_missing(index, opened)
                self._writer.add_missing(index, opened)
            else:
                yield from self._record(index, opened)
        self._writer.add_end(len(self._keys))
        if message := self._flush(_Place(len(self._keys))):
            yield message

    def _opened(self, index: int) -> RecordReader | str:
        """An open record, which the sender checks unless it has just been read from elsewhere; or why there is none."""
        count_hit = not self._peek and index >= self._n_opened
        self._n_opened = max(self._n_opened, index + 1)
        key = self._keys[index]
        opened = _open(self._store, key, self._on_damage, count_hit=count_hit, verify_in_memory=False)
        if isinstance(opened, str):
            self._met_damage = self._met_damage or opened == DAMAGED
        elif opened.in_memory:
            self._unverified.append((index, _Verification(opened, key)))
        else:
            self._sound.add(index)
        return opened

    def _tell_missing(self, index: int, reason: str) -> None:
        if index not in self._missing:
            self._missing[index] = reason
            self._on_missing(reason)

    def _flush(self, next_begins: _Place) -> Outgoing | None:
        parts, size = self._writer.take()
        if not parts:
            return None
        message = Outgoing(self._begins, parts, size, self._data_bytes, self._held, self._unverified, self._sound.add)
        self._held, self._unverified, self._data_bytes, self._begins = [], deque(), 0, next_begins
        return message

    def _record(self, index: int, reader: RecordReader, offset: int = 0) -> Iterator[Outgoing]:
        self._reader = reader
        total = reader.size_bytes
        while offset < total:
            if not self._writer.room and (message := self._flush(_Place(index, offset, reader))):
                yield message
            before = offset
            for view in reader.views(offset, min(self._writer.room, total - offset)):
                self._writer.add_data(index, total, offset, view)
                offset += len(view)
            if offset == before:
                raise OSError(f"record {reader.entry.header.key.hex()[:12]} ends at {offset} of {total} bytes")
            self._data_bytes += offset - before
        # The open message still looks into the record, which may be evicted only after it has been closed.
        self._reader = None
        self._held.append(reader)
        if len(self._held) == _MAX_HELD and (message := self._flush(_Place(index + 1))):
            yield message
