"""A vault's folder: locked by one process, of one format, with the few facts that no segment holds."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tierkv.errors import StartupError
from tierkv.store.log.files import Disk
from tierkv.store.log.format import FORMAT

META, LOCK = "vault.meta", "vault.lock"
_SEGMENT_NAME = re.compile(r"^(\d{8})\.seg$")
_HINT_NAME = re.compile(r"^(\d{8})\.hint$")
_MAX_META_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Meta:
    """``epoch``: the vault's purge epoch. ``vault_s``: seconds it has run in all its lives; ages count in them."""

    epoch: int = 0
    vault_s: float = 0.0

    def pack(self) -> bytes:
        body = json.dumps({"format": FORMAT, "epoch": self.epoch, "vault_s": self.vault_s}).encode()
        return body + b"\n" + xxhash.xxh3_64_hexdigest(body).encode() + b"\n"


class Folder:
    """The folder is this object's until ``close``.

    Raises StartupError when another process has it, when it cannot be read, or when it is of another format.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self.disk = disk
        self.read_only = ""
        self.meta_damage = ""
        self.lock_fd = self._lock()
        try:
            self.meta = self._read_meta()
        except BaseException:
            os.close(self.lock_fd)
            raise

    def close(self) -> None:
        """Another process may have the folder."""
        fd, self.lock_fd = self.lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def save(self, meta: Meta, *, durable: bool) -> None:
        """Raises OSError; then the folder says what it said before."""
        self.disk.replace(self.path / META, [meta.pack()], durable=durable)
        self.meta = meta

    def segments(self) -> list[int]:
        """Numbers of the segments, oldest first."""
        return sorted(int(found[1]) for path in self.path.iterdir() if (found := _SEGMENT_NAME.match(path.name)))

    def hints(self) -> list[int]:
        return sorted(int(found[1]) for path in self.path.iterdir() if (found := _HINT_NAME.match(path.name)))

    def segment_path(self, number: int) -> Path:
        return self.path / f"{number:08}.seg"

    def hint_path(self, number: int) -> Path:
        return self.path / f"{number:08}.hint"

    def _lock(self) -> int:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            fd = self._lock_for_reading(error)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise StartupError(f"cannot lock the vault folder {self.path}: {error.strerror}") from error
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise StartupError(
                f"{who} has the vault folder {self.path} open: two vaults cannot share one; stop that process, or give "
                "this vault a persist_path of its own"
            ) from None
        if not self.read_only:
            try:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            except OSError:
                pass  # only for the message above
        return fd

    def _lock_for_reading(self, error: OSError) -> int:
        """A folder that cannot be written is still served from, if it holds a vault."""
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            try:
                fd = os.open(self.path / LOCK, os.O_RDONLY)
            except OSError:
                pass
            else:
                self.read_only = "read_only" if error.errno == errno.EROFS else "permission_denied"
                return fd
        raise StartupError(f"cannot open the vault folder {self.path}: {error.strerror}") from error

    def _read_meta(self) -> Meta:
        try:
            with (self.path / META).open("rb") as file:
                data = file.read(_MAX_META_BYTES)
        except FileNotFoundError:
            if self.segments():
                self.meta_damage = "missing"
            return Meta()
        except OSError as error:
            raise StartupError(f"cannot read {self.path / META}: {error.strerror}") from error
        body, _, check = data.partition(b"\n")
        try:
            if check.strip().decode("ascii") != xxhash.xxh3_64_hexdigest(body):
                raise ValueError("checksum")
            facts = json.loads(body)
            if facts["format"] == FORMAT:
                return Meta(int(facts["epoch"]), float(facts["vault_s"]))
            version = facts["format"]
        except (ValueError, KeyError, TypeError):
            self.meta_damage = "damaged"
            return Meta()
        raise StartupError(
            f"{self.path} is of format {version}; this build reads {FORMAT}. Start the version that wrote it and "
            "'tierkv vault export', or give this vault an empty persist_path"
        )
