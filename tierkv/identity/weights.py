"""A digest of what a model's files contain, made once and remembered by what the file system says of them.

Two fine-tunes have the same names, sizes and headers, so only the content tells them apart. A file's digest is
cached under its device, inode, size and modification time in nanoseconds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from blake3 import blake3

from tierkv.errors import Refused
from tierkv.identity.kept import keep_json

SeenFile = tuple[str, int, int, int, int]
"""path, device, inode, size in bytes, modification time in ns: as the engine's hook saw them when it loaded them."""

_CACHE_VERSION = 1
_MAX_CACHED = 4096
_CONTENT = "tierkv 2026 v1 file contents"


class WeightsUnusable(Refused):
    """A model without a trustworthy digest: nothing of it is stored. ``reason`` is "weights_changed",
    "weights_unreadable" or "no_weights"."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class DigestCache:
    """File digests on disk. Losing it costs one more hashing, so whatever cannot be read or written is ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = self._read()

    @staticmethod
    def _name(device: int, inode: int, size: int, mtime_ns: int) -> str:
        return f"{device}:{inode}:{size}:{mtime_ns}"

    def get(self, device: int, inode: int, size: int, mtime_ns: int) -> str | None:
        return self._known.get(self._name(device, inode, size, mtime_ns))

    def put(self, device: int, inode: int, size: int, mtime_ns: int, digest: str) -> None:
        """The digest is in the file, written whole or not at all."""
        self._known = {**self._read(), **self._known, self._name(device, inode, size, mtime_ns): digest}
        while len(self._known) > _MAX_CACHED:
            del self._known[next(iter(self._known))]
        with contextlib.suppress(OSError):
            keep_json(self.path, {"version": _CACHE_VERSION, "files": self._known})

    def _read(self) -> dict[str, str]:
        try:
            data = json.loads(self.path.read_text())
            files = cast("dict[object, object]", data["files"] if data["version"] == _CACHE_VERSION else {})
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return {str(key): value for key, value in files.items() if isinstance(value, str) and _is_digest(value)}


def _is_digest(value: str) -> bool:
    return len(value) == 64 and all(c in "0123456789abcdef" for c in value)


def content_digest(files: Sequence[SeenFile], cache: DigestCache | None = None) -> str:
    """64 hex digits over the contents of all files, whatever their names, folder and order.

    Each file must still be the one that was seen, before and after it is read: raises WeightsUnusable otherwise,
    and when a file cannot be read or there is none. Hashing uses all cores and releases the interpreter lock.
    """
    if not files:
        raise WeightsUnusable("no_weights", "the model was announced without files")
    parts = sorted((Path(seen[0]).suffix, _file_digest(seen, cache)) for seen in files)
    total = blake3(derive_key_context=_CONTENT)
    for suffix, digest in parts:
        total.update(len(suffix).to_bytes(4, "little") + suffix.encode() + bytes.fromhex(digest))
    return total.hexdigest()


def _file_digest(seen: SeenFile, cache: DigestCache | None) -> str:
    path, stamp = seen[0], seen[1:]
    try:
        _check_unchanged(path, stamp)
        known = cache.get(*stamp) if cache else None
        if known is not None:
            return known
        hasher = blake3(max_threads=blake3.AUTO)
        if stamp[2]:
            hasher.update_mmap(path)
        _check_unchanged(path, stamp)
    except OSError as error:
        raise WeightsUnusable("weights_unreadable", f"{path}: {error.strerror or error}") from error
    digest = hasher.hexdigest()
    if cache:
        cache.put(*stamp, digest)
    return digest


def _check_unchanged(path: str, stamp: tuple[int, int, int, int]) -> None:
    stat = Path(path).stat()
    if (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) != stamp:
        raise WeightsUnusable("weights_changed", f"{path} is not the file that the engine loaded")


def text_digest(text: str) -> str:
    """64 hex digits of a configuration's text; equal JSON values give equal digests."""
    try:
        text = json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        pass
    return blake3(text.encode()).hexdigest()
