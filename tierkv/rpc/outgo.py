"""Records on their way out of a store: checked before their first byte leaves, then read as the reader takes them.

Runs in executor threads, one at a time; an ``Outgo`` belongs to one call and holds a few open records and messages.
Only the bytes of a message are joined by whoever sends it: what another core has just copied costs more to send.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

from tierkv.errors import CorruptionError
from tierkv.identity.blocks import BlockKey
from tierkv.rpc.bulk import Buffer, MessageWriter, encode_message
from tierkv.store.base import RecordReader, Store
from tierkv.store.verify import RecordVerifier

_log = logging.getLogger(__name__)

_VERIFY_BYTES = 1 << 20
AHEAD_BYTES = 8 << 20
"""How much is read at once, but for the first message. A thread's turn costs as much as sending 100 KiB; twice this is
held while a reader stalls, which takes memory where records come from a disk."""
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
        _verify(reader, key)
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


def check(store: Store, key: BlockKey, on_damage: Callable[[], None]) -> None:
    """As ``open_verified``, for the sake of the quarantine alone."""
    opened = open_verified(store, key, on_damage, count_hit=False)
    if not isinstance(opened, str):
        opened.close()


def _quarantine(store: Store, key: BlockKey, problem: str, on_damage: Callable[[], None]) -> str:
    store.quarantine(key, problem)
    on_damage()
    return DAMAGED


def _verify(reader: RecordReader, key: BlockKey) -> None:
    verifier = RecordVerifier(reader.size_bytes)
    for offset in range(0, reader.size_bytes, _VERIFY_BYTES):
        for view in reader.views(offset, _VERIFY_BYTES):
            verifier.feed(view)
    if verifier.finish().key != key:
        raise CorruptionError("another record lies under this key")


class Outgoing:
    """One message, which looks into its records until it is ``encoded``; ``data_bytes`` of it are theirs."""

    def __init__(self, parts: list[Buffer], size_bytes: int, data_bytes: int, readers: list[RecordReader]) -> None:
        self._parts, self._readers = parts, readers
        self.size_bytes, self.data_bytes = size_bytes, data_bytes
        self.is_encoded = False

    def encoded(self) -> bytes:
        """Its bytes; once, in any thread. The ``Outgo`` that it is from must not have been closed."""
        message = encode_message(self._parts, self.size_bytes)
        self._parts = []
        self.is_encoded = True
        return message

    def close(self) -> None:
        """The records that end in it may be evicted again."""
        self._parts = []
        while self._readers:
            self._readers.pop().close()


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
        self._looking: deque[Outgoing] = deque()
        self._messages = self._run()
        self._data_bytes = 0
        self._wanted_bytes = 1
        self._n_opened = 0
        self._met_damage = False
        self._lock = threading.Lock()

    @property
    def suspects(self) -> Sequence[BlockKey]:
        """What was not read, if some of what was read is damaged: the reader may have left because of that."""
        return self._keys[self._n_opened :] if self._met_damage else ()

    def next_messages(self) -> list[Outgoing]:
        """The next ones, of AHEAD_BYTES or one; none when all is said. Records of those encoded by now are let go."""
        with self._lock:
            while self._looking and self._looking[0].is_encoded:
                self._looking.popleft().close()
            wanted, self._wanted_bytes = self._wanted_bytes, AHEAD_BYTES
            found: list[Outgoing] = []
            for message in self._messages:
                found.append(message)
                self._looking.append(message)
                wanted -= message.size_bytes
                if wanted <= 0:
                    break
            return found

    def close(self) -> None:
        """All records may be evicted again; messages that are not encoded are lost."""
        with self._lock:
            self._messages.close()
            while self._looking:
                self._looking.popleft().close()
            while self._held:
                self._held.pop().close()
            if self._reader is not None:
                self._reader.close()
                self._reader = None

    def _run(self) -> Generator[Outgoing, None, None]:
        for index, key in enumerate(self._keys):
            opened = open_verified(self._store, key, self._on_damage, count_hit=not self._peek)
            self._n_opened = index + 1
            if isinstance(opened, str):
                self._met_damage = self._met_damage or opened == DAMAGED
                self._on_missing(opened)
                self._writer.add_missing(index, opened)
                if not self._writer.room and (message := self._flush()):
                    yield message
                continue
            self._reader = opened
            yield from self._record(index, opened)
            # The open message still looks into the record, which may be evicted only after it has been closed.
            self._reader = None
            self._held.append(opened)
            if len(self._held) == _MAX_HELD and (message := self._flush()):
                yield message
        self._writer.add_end(len(self._keys))
        if message := self._flush():
            yield message

    def _flush(self) -> Outgoing | None:
        parts, size = self._writer.take()
        if not parts:
            return None
        message = Outgoing(parts, size, self._data_bytes, self._held)
        self._held, self._data_bytes = [], 0
        return message

    def _record(self, index: int, reader: RecordReader) -> Iterator[Outgoing]:
        offset, total = 0, reader.size_bytes
        while offset < total:
            if not self._writer.room and (message := self._flush()):
                yield message
            before = offset
            for view in reader.views(offset, min(self._writer.room, total - offset)):
                self._writer.add_data(index, total, offset, view)
                offset += len(view)
            if offset == before:
                raise OSError(f"record {reader.entry.header.key.hex()[:12]} ends at {offset} of {total} bytes")
            self._data_bytes += offset - before
