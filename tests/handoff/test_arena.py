"""Shared memory is there in full, cannot be cut short, and its regions never overlap."""

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkv.errors import HandoffError
from tierkv.handoff.arena import ALIGNMENT, Arena, Regions


def test_both_sides_see_the_same_bytes():
    made = Arena.create(1 << 20, writable=True)
    given = Arena.attach(os.dup(made.fd), 1 << 20, writable=False)
    made.view[5:10] = b"hello"
    assert bytes(given.view[5:10]) == b"hello"
    with pytest.raises(TypeError):
        given.view[0] = 1
    given.close()
    made.close()


def test_nobody_can_cut_it_short():
    arena = Arena.create(1 << 20, writable=True)
    for size in (0, 4096, 1 << 21):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(arena.fd, size)
    assert os.fstat(arena.fd).st_blocks * 512 >= 1 << 20, "a hole would kill whoever touches it"
    arena.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has seals")
@pytest.mark.parametrize("maker_writes", [True, False])
def test_once_both_have_it_nobody_else_writes_it_or_punches_a_hole(maker_writes: bool):
    made = Arena.create(1 << 20, writable=maker_writes)
    given = Arena.attach(os.dup(made.fd), 1 << 20, writable=not maker_writes)
    writer, reader = (made, given) if maker_writes else (given, made)
    writer.view[:5] = b"right"
    # What a stranger with the rights to open /proc/PID/fd/N gets.
    stranger = os.open(f"/proc/self/fd/{made.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(stranger, b"wrong", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(stranger, 1 << 20)
    keep_size_and_punch_hole = 1 | 2
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.fallocate(stranger, keep_size_and_punch_hole, ctypes.c_long(0), ctypes.c_long(1 << 20)) == -1
    assert ctypes.get_errno() == errno.EPERM
    os.close(stranger)
    writer.view[5:7] = b"ed"
    assert bytes(reader.view[:7]) == b"righted"
    given.close()
    made.close()


def test_an_arena_smaller_than_announced_is_refused():
    arena = Arena.create(1 << 20, writable=True)
    with pytest.raises(HandoffError, match="smaller"):
        Arena.attach(os.dup(arena.fd), 1 << 21, writable=True)
    arena.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has seals")
def test_an_arena_that_could_be_cut_short_is_refused(tmp_path: Path):
    before = files_called("memfd:", str(tmp_path))
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    for fd in (unsealed, plain):
        os.ftruncate(fd, 1 << 20)
        with pytest.raises(HandoffError):
            Arena.attach(fd, 1 << 20, writable=True)
    assert files_called("memfd:", str(tmp_path)) == before


def files_called(*names: str) -> list[str]:
    """This process's open files of these names; a thread that another test has left may open others meanwhile."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return sorted(file for file in found if any(name in file for name in names))


def test_memory_that_is_not_there_is_an_error_and_leaks_nothing(monkeypatch: pytest.MonkeyPatch):
    before = files_called("memfd:")

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HandoffError, match="shared memory"):
        Arena.create(1 << 20, writable=True)
    assert files_called("memfd:") == before


def test_closing_waits_for_the_last_view():
    arena = Arena.create(1 << 16, writable=True)
    array = np.frombuffer(arena.view, np.uint8)
    array[7] = 9
    arena.close()
    assert array[7] == 9
    assert array.nbytes >= mmap.PAGESIZE


def test_regions_come_back_whole():
    regions = Regions(4 * ALIGNMENT)
    a, b, c = (regions.allocate(1) for _ in range(3))
    assert (a, b, c) == (0, ALIGNMENT, 2 * ALIGNMENT)
    assert regions.allocate(2 * ALIGNMENT) is None
    regions.release(b)
    regions.release(c)
    assert regions.allocate(3 * ALIGNMENT) == ALIGNMENT
    with pytest.raises(HandoffError):
        regions.release(b + 1)
    with pytest.raises(HandoffError):
        regions.release(3 * ALIGNMENT)


class RegionModel(RuleBasedStateMachine):
    """Against a plain list of who holds which unit."""

    UNITS = 16

    def __init__(self) -> None:
        super().__init__()
        self.regions = Regions(self.UNITS * ALIGNMENT)
        self.units = [None] * self.UNITS
        self.held: dict[int, int] = {}

    @rule(units=st.integers(1, 8))
    def allocate(self, units: int) -> None:
        offset = self.regions.allocate(units * ALIGNMENT - 1)
        gaps = [i for i in range(self.UNITS - units + 1) if self.units[i : i + units] == [None] * units]
        if offset is None:
            assert not gaps
            return
        place = offset // ALIGNMENT
        assert place == gaps[0], "first fit"
        self.units[place : place + units] = [offset] * units
        self.held[offset] = units

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            offset = data.draw(st.sampled_from(sorted(self.held)))
            self.regions.release(offset)
            place, units = offset // ALIGNMENT, self.held.pop(offset)
            self.units[place : place + units] = [None] * units

    @invariant()
    def used_is_what_is_held(self) -> None:
        assert self.regions.used_bytes == sum(self.held.values()) * ALIGNMENT


RegionModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRegions = RegionModel.TestCase
