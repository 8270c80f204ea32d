"""A BatchPromote stream as its reader checks it: in the order asked, gapless, within bounds, ended on purpose."""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.errors import BadFrame, WrongService
from tierkv.rpc.bulk import Chunk, ChunkKind, read_chunks
from tierkv.rpc.vault_port import Missing, Piece


class Inflow:
    """Chunks of ``n_keys`` records become pieces numbered from ``base``. Raises WrongService where the vault errs."""

    def __init__(self, peer: str, n_keys: int, base: int, max_record_bytes: int) -> None:
        self._peer, self._n_keys, self._base, self._max_record_bytes = peer, n_keys, base, max_record_bytes
        self._next = 0
        self._total = 0
        self._offset = 0
        self.received_bytes = 0
        self.ended = False

    def take(self, message: bytes) -> Iterator[Piece | Missing]:
        try:
            for chunk in read_chunks(message):
                if (item := self._chunk(chunk)) is not None:
                    yield item
        except BadFrame as error:
            raise WrongService(self._peer, f"sent what is not a TierKV stream ({error})") from None

    def _chunk(self, chunk: Chunk) -> Piece | Missing | None:
        if self.ended or (chunk.kind is not ChunkKind.END and chunk.index != self._next):
            raise BadFrame("out_of_order", "records come in the order asked")
        if chunk.kind is ChunkKind.DATA:
            return self._data(chunk)
        if self._offset:
            raise BadFrame("truncated", "a record ends before its end")
        if chunk.kind is ChunkKind.END:
            if self._next != self._n_keys or chunk.index != self._n_keys:
                raise BadFrame("truncated", "the stream ends before the last record")
            self.ended = True
            return None
        if self._next >= self._n_keys:
            raise BadFrame("out_of_order", "more records than were asked for")
        self._next += 1
        return Missing(self._base + chunk.index, chunk.reason)

    def _data(self, chunk: Chunk) -> Piece:
        if not self._offset:
            if self._next >= self._n_keys or chunk.total > self._max_record_bytes:
                raise BadFrame("too_large", "more records, or a larger one, than were asked for")
            self._total = chunk.total
        if chunk.total != self._total or chunk.offset != self._offset:
            raise BadFrame("out_of_order", "the pieces of a record are a gapless run")
        self._offset += len(chunk.data)
        self.received_bytes += len(chunk.data)
        piece = Piece(self._base + chunk.index, chunk.total, chunk.offset, chunk.data)
        if self._offset == self._total:
            self._next += 1
            self._offset = 0
        return piece
