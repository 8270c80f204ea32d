"""A file is replaced as a whole or not at all, by one program at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def replace(path: Path, data: bytes, *, like: Path) -> None:
    """``path`` holds ``data`` or, if that fails at any moment, what it held before; mode and owner as ``like``."""
    status = like.stat()
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), status.st_mode & 0o7777)
            with contextlib.suppress(PermissionError):
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def replace_keeping(path: Path, before: bytes, after: bytes) -> Path:
    """``path`` holds ``after``, and ``before`` is beside it as ``.bak``, whose path is returned. Raises OSError."""
    backup = path.with_name(path.name + ".bak")
    replace(backup, before, like=path)
    replace(path, after, like=path)
    return backup


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """While the block runs no other program of TierKV changes ``path``; where files cannot be locked it just runs.

    What is locked is the folder: the file itself is another one after every change.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
