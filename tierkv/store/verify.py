"""Checks a record while its bytes arrive, in pieces of any size, without a second copy of them."""

from __future__ import annotations

from xxhash import xxh3_128, xxh3_128_digest

from tierkv.codec.frame import HEADER_BYTES, check_header, payload_hash
from tierkv.codec.record import MAX_HEADER_BYTES, RecordHeader
from tierkv.errors import BadFrame


class RecordVerifier:
    """The same verdict as ``codec.record.verify_record``, reached in one pass over the stream."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.header: RecordHeader | None = None
        self._seen = 0
        self._held = bytearray()
        self._wanted = HEADER_BYTES
        self._left = 0
        self._expected: bytes | None = None
        self._hash = xxh3_128()
        self._segments = 0
        self._raw_bytes = 0

    def feed(self, data: memoryview) -> None:
        """Takes the next bytes. Raises BadFrame or ForeignRecord at the first that cannot belong to a sound record."""
        if self._seen + len(data) > self.size_bytes:
            raise BadFrame("bad_length", f"more than the announced {self.size_bytes} bytes arrive")
        offset, end = 0, len(data)
        while offset < end:
            if self._expected is not None:
                offset = self._hash_on(data, offset)
            elif self.header is None or self._held or end - offset < HEADER_BYTES:
                offset = self._hold(data, offset)
            else:
                offset = self._take_segments(data, offset)
        self._seen += end

    def finish(self) -> RecordHeader:
        """The header of a record that is whole and sound. Raises BadFrame."""
        if self.header is None or self._seen != self.size_bytes or self._expected is not None or self._held:
            raise BadFrame("truncated", f"{self._seen} of {self.size_bytes} bytes, or a frame that is not whole")
        if self._segments != self.header.segments or self._raw_bytes != self.header.raw_bytes:
            raise BadFrame("bad_length", "the record does not hold what its header says")
        return self.header

    def _take_segments(self, data: memoryview, offset: int) -> int:
        """Segments that lie in ``data`` as a whole, and the frame header of the first that reaches beyond it."""
        size, left_in_record = len(data), self.size_bytes - self._seen
        while size - offset >= HEADER_BYTES:
            is_segment, raw_length, length, expected = check_header(data, offset)
            offset += HEADER_BYTES
            end = offset + length
            if not is_segment or end > left_in_record:
                raise BadFrame("truncated", "a segment frame is not whole")
            self._segments += 1
            self._raw_bytes += raw_length
            if end > size:
                self._left, self._expected = length, expected
                break
            if xxh3_128_digest(data[offset:end]) != expected:
                raise BadFrame("bad_checksum", "the payload's checksum does not match")
            offset = end
        return offset

    def _hash_on(self, data: memoryview, offset: int) -> int:
        take = min(self._left, len(data) - offset)
        self._hash.update(data[offset : offset + take])
        self._left -= take
        if not self._left:
            if self._hash.digest() != self._expected:
                raise BadFrame("bad_checksum", "the payload's checksum does not match")
            self._expected = None
            self._hash.reset()
        return offset + take

    def _hold(self, data: memoryview, offset: int) -> int:
        """Collects the record header's frame, or a frame header that was cut in two."""
        take = min(self._wanted - len(self._held), len(data) - offset)
        self._held += data[offset : offset + take]
        offset += take
        if len(self._held) < self._wanted:
            return offset
        if self.header is not None:
            self._begin_segment(self._seen + offset)
        elif self._wanted == HEADER_BYTES:
            self._begin_record_header()
        else:
            self._end_record_header()
        return offset

    def _begin_record_header(self) -> None:
        is_segment, _, length, _ = check_header(self._held)
        if is_segment or not 0 < length <= MAX_HEADER_BYTES:
            raise BadFrame("no_record_header", "a record starts with its header frame")
        self._wanted += length
        if self._wanted > self.size_bytes:
            raise BadFrame("truncated", "a frame ends behind the end of its record")

    def _end_record_header(self) -> None:
        header, frame_bytes = RecordHeader.unpack_frame(self._held)
        size = frame_bytes + header.segment_bytes
        if size != self.size_bytes:
            raise BadFrame("bad_length", f"the header speaks of {size} bytes, {self.size_bytes} are announced")
        self.header = header
        self._held.clear()
        self._wanted = HEADER_BYTES

    def _begin_segment(self, payload_at: int) -> None:
        is_segment, raw_length, length, expected = check_header(self._held)
        if not is_segment or payload_at + length > self.size_bytes:
            raise BadFrame("truncated", "a segment frame is not whole")
        self._held.clear()
        self._segments += 1
        self._raw_bytes += raw_length
        if length:
            self._left, self._expected = length, expected
        elif expected != payload_hash(b""):
            raise BadFrame("bad_checksum", "the payload's checksum does not match")
