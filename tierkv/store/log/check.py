"""fsck: reads every file of a vault's folder, says what is not as it was written, and repairs what can be.

Repairing never guesses: a damaged record is taken out (its bytes are erased), a write cut short is cut off, hints and
``vault.meta`` are made anew from the data. What is sound is served again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from tierkv.errors import BadFrame, CorruptionError, StartupError
from tierkv.store.base import Checked, Finding
from tierkv.store.log.files import Disk, read_into
from tierkv.store.log.folder import LOCK, META, Folder, Meta
from tierkv.store.log.format import ALIGN, RECORD_AT, Mark, SegmentHead, unpack_slot
from tierkv.store.log.hints import unpack_hint
from tierkv.store.log.scan import Damage, Found, scan
from tierkv.store.log.segment import Segment
from tierkv.store.verify import RecordVerifier

_READ_BYTES = 4 << 20


def check_segment(segment: Segment) -> Iterator[Found | Damage]:
    """Every entry in sight that is sound to its last byte, and everything that is not. Raises OSError."""
    for found in scan(segment):
        if isinstance(found, Damage):
            yield found
        elif found.mark is Mark.LIVE:
            reason = _verified(segment, found)
            yield Damage(found.head.block, found.head.blocks, reason, key_of(found)) if reason else found


def key_of(found: Found) -> bytes:
    return b"" if found.header is None else found.header.key


def _verified(segment: Segment, found: Found) -> str:
    """Why the record is damaged, or ""."""
    size, at = found.head.size_bytes, found.head.block * ALIGN + RECORD_AT
    verifier = RecordVerifier(size)
    buffer = memoryview(bytearray(min(size, _READ_BYTES)))
    try:
        for offset in range(0, size, _READ_BYTES):
            piece = buffer[: min(_READ_BYTES, size - offset)]
            read_into(segment.fd, [piece], at + offset)
            verifier.feed(piece)
        verifier.finish()
    except CorruptionError as error:
        return getattr(error, "reason", "damaged_record")
    return ""


class FolderCheck:
    """fsck of a folder that no vault has open. Raises StartupError when one has, or when it cannot be read."""

    def __init__(self, path: Path, *, repair: bool, disk: Disk | None = None) -> None:
        if not path.is_dir():
            raise StartupError(f"there is no vault folder at {path}")
        if not (path / META).exists() and not any(path.glob("*.seg")):
            raise StartupError(f"{path} holds no vault: neither {META} nor segments")
        self._disk = disk or Disk()
        self._repair = repair
        self._folder = Folder(path, self._disk)
        self._records = self._done = 0
        self._epoch = self._folder.meta.epoch
        self._total = sum(self._folder.segment_path(n).stat().st_size for n in self._folder.segments())

    def run(self) -> Iterator[Checked]:
        """Reads everything; progress about once a record and at every finding. Raises OSError."""
        try:
            numbers = self._folder.segments()
            for number in numbers:
                yield from self._segment(number)
            yield from self._strays(set(numbers))
            if self._folder.meta_damage:
                if self._repair:
                    # How many purges there were is not known: later than all of them.
                    self._folder.save(Meta(self._epoch + 1 + secrets.randbits(20), 0.0), durable=True)
                yield self._progress(Finding(META, 0, self._folder.meta_damage, repaired=self._repair))
        finally:
            self._folder.close()

    def _progress(self, finding: Finding | None = None) -> Checked:
        return Checked(self._done, self._total, self._records, finding)

    def _segment(self, number: int) -> Iterator[Checked]:
        segment = Segment.open(number, self._folder.segment_path(number), self._disk)
        try:
            yield from self._head(segment)
            before, damaged = self._done, False
            for found in check_segment(segment):
                if isinstance(found, Damage):
                    damaged = True
                    yield self._progress(self._damage(segment, found))
                else:
                    self._records += 1
                    self._done = before + (found.head.block + found.head.blocks) * ALIGN
                    yield self._progress()
            yield from self._hint(segment, stale=damaged)
            self._done = before + segment.size_bytes
            yield self._progress()
        finally:
            segment.let_go()

    def _head(self, segment: Segment) -> Iterator[Checked]:
        data = os.pread(segment.fd, ALIGN, 0)
        try:
            self._epoch = max(self._epoch, SegmentHead.unpack(data).epoch)
            segment.generation, segment.closed = unpack_slot(data)
        except BadFrame as error:
            if error.reason == "unknown_version":
                raise StartupError(f"{segment.path}: {error}") from None
            if self._repair:
                self._disk.unlink(self._folder.hint_path(segment.number))
                self._disk.write(segment.fd, [SegmentHead(segment.number, self._epoch, 0.0).pack()], 0)
            yield self._progress(Finding(segment.path.name, 0, error.reason, ALIGN, repaired=self._repair))

    def _damage(self, segment: Segment, damage: Damage) -> Finding:
        name, at = segment.path.name, damage.block * ALIGN
        torn = damage.tail and not segment.closed
        if self._repair:
            if torn:
                segment.cut(at)
            else:
                self._take_out(segment, damage)
        reason = "torn_tail" if torn else damage.reason
        return Finding(name, at, reason, damage.blocks * ALIGN, damage.key, self._repair)

    def _take_out(self, segment: Segment, damage: Damage) -> None:
        """The place reads as nothing from now on, whether or not the system can punch it out."""
        if not segment.erase(damage.block, damage.blocks):
            for block in range(damage.block, damage.block + damage.blocks):
                self._disk.write(segment.fd, [bytes(ALIGN)], block * ALIGN)

    def _hint(self, segment: Segment, *, stale: bool) -> Iterator[Checked]:
        path = self._folder.hint_path(segment.number)
        if not path.exists():
            return
        reason = ""
        try:
            unpack_hint(
                path.read_bytes(),
                segment=segment.number,
                generation=segment.generation,
                end_block=-(-segment.size_bytes // ALIGN),
            )
        except BadFrame as error:
            reason = error.reason
        except (ValueError, KeyError, TypeError):
            reason = "damaged_hint"
        if self._repair and (reason or stale):
            # A hint may speak of what was taken out.
            self._disk.unlink(path)
        if reason:
            yield self._progress(Finding(path.name, 0, reason, repaired=self._repair))

    def _strays(self, numbers: set[int]) -> Iterator[Checked]:
        """Files that belong to no vault, or to a segment that is gone."""
        known = {META, LOCK, *(self._folder.segment_path(n).name for n in numbers)}
        known |= {self._folder.hint_path(n).name for n in numbers}
        for path in sorted(self._folder.path.iterdir()):
            if path.name in known:
                continue
            ours = path.suffix == ".new" or (path.suffix == ".hint" and path.stem.isdigit())
            if ours and self._repair:
                self._disk.unlink(path)
            reason = "left_over" if ours else "unknown_file"
            yield self._progress(Finding(path.name, 0, reason, repaired=ours and self._repair))
