"""A file of records that one vault gives and another takes in: a conversation on its way to another machine.

======================  ============================================================================================
8 bytes                 magic ``TKX1``, version (u16), zero (u16)
a record, many times    its length (u64), then the record as ``codec.record`` lays it out, heads before tails
the end                 a length of 0 (u64), how many records there were (u64), xxh3-64 of those 16 bytes (u64)
======================  ============================================================================================

Every record checks itself and tells its length, so a damaged one costs only itself, and a file that was cut short gives
what is whole in it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import xxhash

from tierkv.codec.record import verify_record
from tierkv.errors import BadFrame, CorruptionError

VERSION = 1
_HEAD = struct.Struct("<4sHH")
_MAGIC = b"TKX1"
_LENGTH = struct.Struct("<Q")
_END = struct.Struct("<QQ")


class BundleWriter:
    """Writes records one after another; without ``finish`` the file is known to be incomplete."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.records = 0
        self.size_bytes = 0
        file.write(_HEAD.pack(_MAGIC, VERSION, 0))

    def add(self, record: bytes | bytearray) -> None:
        self._file.write(_LENGTH.pack(len(record)))
        self._file.write(record)
        self.records += 1
        self.size_bytes += len(record)

    def finish(self) -> None:
        end = _END.pack(0, self.records)
        self._file.write(end + _LENGTH.pack(xxhash.xxh3_64_intdigest(end)))


@dataclass(frozen=True, slots=True)
class Unusable:
    """Record ``number`` (from 0) cannot be taken from the file; ``reason`` is a slug. What follows it can be."""

    number: int
    reason: str


def read_bundle(file: BinaryIO, max_record_bytes: int) -> Iterator[bytes | Unusable]:
    """The records, each sound to its last byte, and in the place of one that is not, why.

    Raises BadFrame at once for a file that is no export, and later where it cannot be read on; what came before that
    is good. ``file`` can be sought in.
    """
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise BadFrame("not_a_bundle", "this is not an export of TierKV")
    _, version, _ = _HEAD.unpack(head)
    if version != VERSION:
        raise BadFrame("unknown_version", f"this is an export of version {version}; this build reads {VERSION}")
    return _records(file, max_record_bytes)


def _records(file: BinaryIO, max_record_bytes: int) -> Iterator[bytes | Unusable]:
    at = file.tell()
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(at)
    count = 0
    while length := _LENGTH.unpack(_exactly(file, _LENGTH.size))[0]:
        if length > size_bytes - file.tell():
            raise BadFrame("truncated", f"the file ends inside record {count}, or the length of that is damaged")
        if length > max_record_bytes:
            file.seek(length, os.SEEK_CUR)
            yield Unusable(count, "too_large")
        else:
            yield _sound(_exactly(file, length), count)
        count += 1
    told, check = _END.unpack(_exactly(file, _END.size))
    if told != count or check != xxhash.xxh3_64_intdigest(_END.pack(0, told)):
        raise BadFrame("truncated", f"the file ends after {count} records, and its end is damaged")


def _sound(record: bytes, number: int) -> bytes | Unusable:
    try:
        verify_record(record)
    except CorruptionError as error:
        return Unusable(number, getattr(error, "reason", "damaged"))
    return record


def _exactly(file: BinaryIO, length: int) -> bytes:
    data = file.read(length)
    if len(data) != length:
        raise BadFrame("truncated", "the file ends before its end")
    return data
