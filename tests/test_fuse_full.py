"""A full mount: what programs see, with the sizes that they were told."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from retainzfs import fsck, mkfs
from tests.conftest import Live

pytestmark = pytest.mark.fuse

MIB = 1 << 20
SIZE = 64 * MIB
# 256 KiB zones: one is kept for collection, and a write is refused when it may not fit whole.
LEFT_MOST = 3 * MIB


@pytest.fixture
def small(fresh: Live) -> Iterator[Live]:
    """A mounted image of 64 MiB, checked after the test."""
    mkfs.make(str(fresh.image), size=SIZE, force=True)
    fresh.mount()
    yield fresh
    fresh.umount()
    assert fsck.check(str(fresh.image), scrub=True).findings == []


def available(path: Path) -> int:
    statvfs = os.statvfs(path)
    return statvfs.f_bavail * statvfs.f_frsize


def until_full(step: Callable[[], object]) -> None:
    """Repeat a step until it is refused for want of space, and for no other reason."""
    try:
        while True:
            step()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def fill(path: Path, piece: int = MIB) -> int:
    """Append until the device is full; return the file's size. Neither fsync nor close may fail:
    what write(2) took has its place."""
    with path.open("ab", buffering=0) as file:
        until_full(lambda: file.write(os.urandom(piece)))
        os.fsync(file.fileno())
    return path.stat().st_size


def fill_names(directory: Path) -> int:
    """Create empty files until that is refused; return how many there are."""
    numbers = itertools.count()
    until_full(lambda: os.mknod(directory / f"{next(numbers):05}{'n' * 240}"))
    return next(numbers) - 1


def test_df_told_the_truth(small: Live) -> None:
    promised = available(small.path)
    assert promised > 0.9 * SIZE - LEFT_MOST
    whole = small.path / "whole"
    with whole.open("wb", buffering=0) as file:
        for at in range(0, promised, MIB):
            data = b"%015d\n" % at * (min(MIB, promised - at) // 16)
            assert file.write(data) == len(data)
        os.fsync(file.fileno())
    assert available(small.path) < MIB
    with whole.open("rb") as file:
        for at in range(0, promised, MIB):
            assert file.read(16) == b"%015d\n" % at
            file.seek(at + MIB)


def test_a_full_mount_takes_everything_but_bytes(small: Live) -> None:
    root = small.path
    (root / "run").mkdir()
    (root / "victim").write_bytes(b"v" * 3 * MIB)
    (root / "other").write_bytes(b"o" * 3 * MIB)
    size = fill(root / "fill")
    fill(root / "fill", 4096)
    assert size > SIZE - 6 * MIB - 4 * MIB - LEFT_MOST
    os.setxattr(root / "run", "user.retainz.keep_last", b"2")
    (root / "fill").chmod(0o600)
    os.utime(root / "fill", ns=(1, 2))
    (root / "other").rename(root / "run" / "renamed")
    (root / "run" / "renamed").rename(root / "other")
    os.truncate(root / "other", MIB)
    (root / "victim").unlink()
    with (root / "retry").open("wb") as file:  # a save that failed is tried again
        file.write(b"r" * 2 * MIB)
        os.fsync(file.fileno())
    assert (root / "retry").read_bytes() == b"r" * 2 * MIB
    fill(root / "fill")
    small.umount()
    small.mount()
    assert (root / "other").read_bytes() == b"o" * MIB
    assert (root / "retry").read_bytes() == b"r" * 2 * MIB
    for name in ("fill", "other", "retry"):
        (root / name).unlink()
    (root / "run").rmdir()
    (root / "whole").write_bytes(b"w" * (SIZE - 2 * MIB - LEFT_MOST))


def test_a_map_on_a_nearly_full_mount_is_written_back(small: Live) -> None:
    """Stores through a map meet the device at msync, when nobody can be refused any more."""
    rng = random.Random(1)
    path = small.path / "map"
    data = bytearray(rng.randbytes(SIZE * 7 // 10))
    path.write_bytes(data)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        for _ in range(12):
            for _ in range(100):
                at = rng.randrange(len(data) - 8)
                data[at : at + 8] = view[at : at + 8] = rng.randbytes(8)
            view.flush()
    assert path.read_bytes() == data


def test_names_are_refused_and_can_be_deleted(small: Live) -> None:
    root = small.path
    made = fill_names(root)
    assert made > 100
    assert os.statvfs(root).f_favail == 0
    small.umount()
    small.mount()
    names = os.listdir(root)
    assert len(names) == made
    for name in names:
        os.unlink(root / name)
    assert fill_names(root) > 0.9 * made
