"""Folders that vanish with the process that made them; one that was killed is swept up after by the next."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

_LOCK = "in-use"


class Scratch:
    """A folder of this user alone, from now until ``remove``. Its lock is free as soon as this process is gone."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        draft = self.path / f"{_LOCK}.new"
        self._lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The name appears with the lock held: nobody takes a folder that is being made for an abandoned one.
        draft.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Nothing is left of it; twice is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(prefix: str, parent: Path | None = None) -> list[Path]:
    """What killed processes of this user left is gone: folders of ``Scratch`` whose lock is free. Their paths."""
    swept: list[Path] = []
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if _remove_abandoned(folder):
                swept.append(folder)
    return swept


def _remove_abandoned(folder: Path) -> bool:
    """False when it is another user's, or in use. Raises OSError when it has no lock, so that it is none of ours."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
    return True
