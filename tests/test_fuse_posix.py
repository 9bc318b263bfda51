"""What POSIX and Linux promise of names, descriptors, times and locks, on a mount."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from retainzfs.session import kernel_time_ns
from tests.conftest import Live, retainzfs, run_python
from tests.test_fuse_names import fails

pytestmark = pytest.mark.fuse

AT_FDCWD = -100
UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2


# Names and paths


def test_a_path_can_be_longer_than_a_call_takes(room: Path) -> None:
    """4096 bytes for one call; step by step a tree may be deeper."""
    name = "x" * 200
    here = os.open(room, os.O_RDONLY)
    for _ in range(25):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    deep = os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here)
    os.close(deep)
    os.close(here)
    fails(errno.ENAMETOOLONG, os.stat, "/".join([str(room), *[name] * 25]))
    shutil.rmtree(room / name)
    assert os.listdir(room) == []


def test_links_that_lead_nowhere_end(room: Path) -> None:
    (room / "one").symlink_to("other")
    (room / "other").symlink_to("one")
    fails(errno.ELOOP, os.stat, room / "one")
    fails(errno.ELOOP, os.open, room / "one", os.O_CREAT | os.O_WRONLY)
    (room / "link0").touch()
    for number in range(41):
        (room / f"link{number + 1}").symlink_to(f"link{number}")
    assert (room / "link40").stat().st_size == 0
    fails(errno.ELOOP, os.stat, room / "link41")
    fails(errno.ELOOP, os.open, room / "link1", os.O_RDONLY | os.O_NOFOLLOW)


def test_names_do_not_cross_filesystems(room: Path, tmp_path: Path) -> None:
    (room / "file").write_bytes(b"content")
    (tmp_path / "file").write_bytes(b"theirs")
    fails(errno.EXDEV, os.rename, room / "file", tmp_path / "file")
    fails(errno.EXDEV, os.link, tmp_path / "file", room / "linked")
    shutil.move(room / "file", tmp_path / "moved")
    assert (tmp_path / "moved").read_bytes() == b"content"
    assert os.listdir(room) == []


def test_listings_tell_kinds_and_numbers(room: Path) -> None:
    (room / "file").touch()
    (room / "directory").mkdir()
    (room / "link").symlink_to("file")
    os.mkfifo(room / "fifo")
    with os.scandir(room) as entries:
        told = {e.name: (e.is_file(follow_symlinks=False), e.is_dir(follow_symlinks=False),
                         e.is_symlink(), e.inode()) for e in entries}  # fmt: skip
    expected = {}
    for name in ("file", "directory", "link", "fifo"):
        status = (room / name).lstat()
        kind = stat.S_IFMT(status.st_mode)
        kinds = (kind == stat.S_IFREG, kind == stat.S_IFDIR, kind == stat.S_IFLNK)
        expected[name] = (*kinds, status.st_ino)
    assert told == expected


# Opening


def test_exclusive_creation(room: Path) -> None:
    exclusive = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    (room / "file").touch()
    (room / "dangling").symlink_to("target")
    for name in ("file", "dangling"):
        fails(errno.EEXIST, os.open, room / name, exclusive)
    assert not (room / "target").exists()
    os.close(os.open(room / "dangling", os.O_CREAT | os.O_WRONLY))
    assert (room / "target").exists()


def test_one_of_many_creates(room: Path) -> None:
    code = (
        "import os, sys\n"
        "won = 0\n"
        "for n in range(100):\n"
        "    try:\n"
        "        os.close(os.open(f'{sys.argv[1]}/{n}', os.O_CREAT | os.O_EXCL | os.O_WRONLY))\n"
        "        won += 1\n"
        "    except FileExistsError:\n"
        "        pass\n"
        "print(won)\n"
    )
    racers = [
        subprocess.Popen([sys.executable, "-c", code, room], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert sum(int(racer.communicate(timeout=60)[0]) for racer in racers) == 100


def test_opening_directories(room: Path) -> None:
    (room / "directory").mkdir()
    (room / "file").touch()
    fails(errno.EISDIR, os.open, room / "directory", os.O_WRONLY)
    fails(errno.EISDIR, os.open, room / "directory", os.O_CREAT | os.O_RDONLY)
    fails(errno.ENOTDIR, os.open, room / "file", os.O_RDONLY | os.O_DIRECTORY)
    here = os.open(room / "directory", os.O_RDONLY)
    fails(errno.EISDIR, os.read, here, 10)
    fails(errno.EINVAL, os.ftruncate, here, 10)
    os.fsync(here)
    os.close(here)


def test_appending_through_all_kinds_of_descriptors(room: Path) -> None:
    """Through the page cache and past it, in several processes; records stay whole."""
    code = (
        "import os, sys\n"
        "path, access, letter = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()\n"
        "fd = os.open(path, access | os.O_APPEND)\n"
        "for n in range(50):\n"
        "    assert os.write(fd, letter * 4999 + b'\\n') == 5000\n"
    )
    path = room / "log"
    path.touch()
    accesses = {"a": os.O_WRONLY, "b": os.O_RDWR, "c": os.O_RDWR | os.O_DSYNC}
    writers = [
        subprocess.Popen([sys.executable, "-c", code, path, str(access), letter])
        for letter, access in accesses.items()
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    lines = path.read_text().splitlines()
    assert sorted(lines) == [letter * 4999 for letter in "abc" for _ in range(50)]


def test_positional_writes_of_an_appending_descriptor_append(room: Path) -> None:
    """As on Linux everywhere, though POSIX says otherwise."""
    for access in (os.O_WRONLY, os.O_RDWR):
        (room / "file").write_bytes(b"12345")
        fd = os.open(room / "file", access | os.O_APPEND)
        assert os.pwrite(fd, b"67", 0) == 2
        os.close(fd)
        assert (room / "file").read_bytes() == b"1234567"


# Without a name


def test_an_unlinked_file_does_all_that_descriptors_do(room: Path) -> None:
    fd = os.open(room / "file", os.O_RDWR | os.O_CREAT)
    (room / "file").unlink()
    os.pwrite(fd, b"content", 9000)
    os.fchmod(fd, 0o640)
    os.utime(fd, ns=(1, 2))
    os.setxattr(fd, "user.name", b"gone")
    os.ftruncate(fd, 9003)
    assert os.getxattr(fd, "user.name") == b"gone"
    status = os.fstat(fd)
    assert (status.st_nlink, status.st_size) == (0, 9003)
    assert stat.S_IMODE(status.st_mode) == 0o640
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    assert os.pread(again, 100, 8999) == b"\0con"
    here = os.open(room, os.O_RDONLY)
    source = f"/proc/self/fd/{again}"
    fails(errno.ENOENT, lambda: os.link(source, room / "back", src_dir_fd=here))
    os.close(here)
    os.close(again)
    assert os.listdir(room) == []


def test_what_was_unlinked_while_open_is_gone_after_a_crash(fresh: Live) -> None:
    fresh.mount()
    before = os.statvfs(fresh.path)
    with (fresh.path / "file").open("wb") as file, (fresh.path / "stays").open("wb") as stays:
        file.write(bytes(range(256)) * 40_000)
        file.flush()
        os.fsync(file.fileno())
        os.unlink(fresh.path / "file")
        stays.write(b"content")
        stays.flush()
        os.fsync(stays.fileno())
        fresh.signal(signal.SIGKILL)
        # Of a mount without a daemon nothing can be closed cleanly.
        fails(errno.ENOTCONN, file.close)
        fails(errno.ENOTCONN, stays.close)
    fresh.umount()
    assert retainzfs("fsck", fresh.image).returncode == 0
    fresh.mount()
    after = os.statvfs(fresh.path)
    assert os.listdir(fresh.path) == ["stays"]
    assert before.f_ffree - after.f_ffree == 1
    assert before.f_bfree == after.f_bfree


@pytest.mark.parametrize("kind", ["fifo", "path", "directory"])
def test_what_needs_no_handle_is_known_while_it_is_used(room: Path, kind: str) -> None:
    """The kernel opens these by itself."""
    path = room / "gone"
    if kind == "fifo":
        os.mkfifo(path, 0o640)
        fd = os.open(path, os.O_RDWR)
        path.unlink()
    elif kind == "path":
        path.write_bytes(b"content")
        fd = os.open(path, os.O_PATH)
        path.unlink()
    else:
        path.mkdir()
        fd = os.open(path, os.O_PATH)
        path.rmdir()
    assert os.listdir(room) == []
    path.touch()
    assert os.fstat(fd).st_nlink == 0
    assert os.fstat(fd).st_ino != path.stat().st_ino
    os.close(fd)


# Times


def utimensat(path: Path, atime: tuple[int, int], mtime: tuple[int, int]) -> None:
    """utimensat(2) with (seconds, nanoseconds), where Python lets nothing be left out."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.utimensat(AT_FDCWD, bytes(path), struct.pack("4q", *atime, *mtime), 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


def let_the_clock_tick() -> None:
    """The kernel's clock of file times moves every few milliseconds."""
    start = kernel_time_ns()
    while kernel_time_ns() == start:
        pass


def test_times_can_be_left_out_and_be_now(room: Path) -> None:
    path = room / "file"
    path.touch()
    utimensat(path, (10, 1), (20, 2))
    utimensat(path, (0, UTIME_OMIT), (30, 3))
    assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (10 * 10**9 + 1, 30 * 10**9 + 3)
    let_the_clock_tick()
    before = path.stat()
    utimensat(path, (0, UTIME_OMIT), (0, UTIME_OMIT))
    assert path.stat() == before
    start = kernel_time_ns()
    utimensat(path, (0, UTIME_NOW), (0, UTIME_OMIT))
    assert path.stat().st_mtime_ns == 30 * 10**9 + 3
    assert start <= path.stat().st_atime_ns <= time.time_ns()
    utimensat(path, (-5, 6), (0, UTIME_NOW))
    assert path.stat().st_atime_ns == -5 * 10**9 + 6
    assert start <= path.stat().st_mtime_ns <= time.time_ns()
    fails(errno.EINVAL, utimensat, path, (0, 10**9), (0, 0))


def changed(path: Path, change: Callable[[Path], object]) -> str:
    """Return which times change: letters of a, m and c."""
    names = ("st_atime_ns", "st_mtime_ns", "st_ctime_ns")
    before = path.stat()
    let_the_clock_tick()
    change(path)
    after = path.stat()
    return "".join(n[3] for n in names if getattr(before, n) != getattr(after, n))


def through(path: Path, flags: int, call: Callable[[int], object] = os.fsync) -> None:
    fd = os.open(path, flags)
    call(fd)
    os.close(fd)


def there_and_back(path: Path) -> None:
    os.rename(path, f"{path}.new")
    os.rename(f"{path}.new", path)


Changes = dict[str, tuple[Callable[[Path], object], str]]
OF_A_FILE: Changes = {
    "write": (lambda p: through(p, os.O_WRONLY, lambda fd: os.write(fd, b"x")), "mc"),
    "write through pages": (lambda p: through(p, os.O_RDWR, lambda fd: os.write(fd, b"x")), "mc"),
    "write of nothing": (lambda p: through(p, os.O_WRONLY, lambda fd: os.write(fd, b"")), ""),
    "truncate": (lambda p: os.truncate(p, 3), "mc"),
    "truncate to the same size": (lambda p: os.truncate(p, 7), "mc"),
    "open with O_TRUNC": (lambda p: through(p, os.O_WRONLY | os.O_TRUNC), "mc"),
    "open and fsync": (lambda p: through(p, os.O_RDWR), ""),
    "chmod": (lambda p: os.chmod(p, 0o600), "c"),
    "chown": (lambda p: os.chown(p, os.geteuid(), os.getegid()), "c"),
    "setxattr": (lambda p: os.setxattr(p, "user.a", b""), "c"),
    "link": (lambda p: os.link(p, f"{p}.link"), "c"),
    "unlink of one name": (lambda p: os.unlink(f"{p}.other"), "c"),
    "rename": (there_and_back, "c"),
    "stat": (lambda p: p.stat(), ""),
}
OF_A_DIRECTORY: Changes = {
    "new file": (lambda p: (p / "new").touch(), "mc"),
    "mkdir": (lambda p: (p / "new").mkdir(), "mc"),
    "symlink": (lambda p: (p / "new").symlink_to("x"), "mc"),
    "link": (lambda p: os.link(p / "file", p / "new"), "mc"),
    "unlink": (lambda p: (p / "file").unlink(), "mc"),
    "rmdir": (lambda p: (p / "sub").rmdir(), "mc"),
    "rename": (lambda p: (p / "file").rename(p / "new"), "mc"),
    "write below": (lambda p: (p / "file").write_bytes(b"x"), ""),
    "chmod below": (lambda p: (p / "file").chmod(0o600), ""),
    "setxattr below": (lambda p: os.setxattr(p / "file", "user.a", b""), ""),
    "chmod": (lambda p: p.chmod(0o700), "c"),
    "setxattr": (lambda p: os.setxattr(p, "user.a", b""), "c"),
    "refused mkdir": (lambda p: fails(errno.EEXIST, os.mkdir, p / "sub"), ""),
    "refused unlink": (lambda p: fails(errno.ENOENT, os.unlink, p / "nothing"), ""),
}


@pytest.mark.parametrize("change", OF_A_FILE)
def test_which_times_of_a_file_change(room: Path, change: str) -> None:
    call, expected = OF_A_FILE[change]
    path = room / "file"
    path.write_bytes(b"content")
    os.link(path, room / "file.other")
    assert changed(path, call) == expected


@pytest.mark.parametrize("change", OF_A_DIRECTORY)
def test_which_times_of_a_directory_change(room: Path, change: str) -> None:
    call, expected = OF_A_DIRECTORY[change]
    (room / "file").touch()
    (room / "sub").mkdir()
    assert changed(room, call) == expected


def test_reading_moves_the_time_of_access_once(room: Path) -> None:
    """As the mount option relatime says: only what is older than the last change."""
    path = room / "file"
    path.write_bytes(b"content")
    assert changed(path, Path.read_bytes) == "a"
    assert changed(path, Path.read_bytes) == ""
    os.utime(path, (0, 0))
    # Pages would be read again without a word to the filesystem.
    assert (
        changed(path, lambda p: through(p, os.O_RDONLY | os.O_DIRECT, lambda fd: os.read(fd, 9)))
        == "a"
    )


# Holes


def test_where_data_and_holes_are(room: Path) -> None:
    """A file counts as one piece of data; what matters is that nothing is taken for a hole."""
    path = room / "file"
    with path.open("w+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"data", 1 << 20)
        size = (1 << 20) + 4
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
        assert os.lseek(file.fileno(), 5, os.SEEK_HOLE) == size
        fails(errno.ENXIO, os.lseek, file.fileno(), size, os.SEEK_DATA)
        fails(errno.ENXIO, os.lseek, file.fileno(), size + 1, os.SEEK_HOLE)
    subprocess.run(["cp", "--sparse=always", path, room / "copy"], check=True)
    assert (room / "copy").read_bytes() == path.read_bytes()
    assert (room / "copy").stat().st_blocks < 16


# Locks


LOCKER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, int(sys.argv[2]))
except BlockingIOError:
    sys.exit(3)
"""


def test_byte_ranges_lock_where_they_overlap(room: Path) -> None:
    path = room / "file"
    path.touch()
    with path.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 10, 100)
        codes = {at: run_python(LOCKER, str(path), str(at)).returncode for at in (90, 91, 109, 110)}
        assert codes == {90: 0, 91: 3, 109: 3, 110: 0}
        with path.open("rb"):
            pass  # the close of any descriptor of the file ends the process' locks
        assert run_python(LOCKER, str(path), "100").returncode == 0


def test_a_lock_ends_with_its_process_and_wakes_who_waits(room: Path) -> None:
    path = room / "file"
    path.touch()
    code = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1], 'r+b')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"locked\n"
        with subprocess.Popen(command, stdout=subprocess.PIPE) as second, path.open("r+b") as file:
            fails(errno.EAGAIN, fcntl.flock, file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            first.kill()
            assert second.stdout is not None
            assert second.stdout.readline() == b"locked\n"
            second.kill()
            fcntl.flock(file, fcntl.LOCK_SH)
            fcntl.lockf(file, fcntl.LOCK_EX)


def test_a_shared_lock_is_shared(room: Path) -> None:
    path = room / "file"
    path.touch()
    with path.open("rb") as one, path.open("rb") as two, path.open("rb") as three:
        fcntl.flock(one, fcntl.LOCK_SH)
        fcntl.flock(two, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fails(errno.EAGAIN, fcntl.flock, three, fcntl.LOCK_EX | fcntl.LOCK_NB)
        copy = os.dup(two.fileno())  # a lock belongs to the open file, not to the descriptor
        os.close(copy)
        fcntl.flock(one, fcntl.LOCK_UN)
        fails(errno.EAGAIN, fcntl.flock, three, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(two, fcntl.LOCK_UN)
        fcntl.flock(three, fcntl.LOCK_EX | fcntl.LOCK_NB)


# Allocation


@pytest.mark.parametrize(
    ("access", "before"),
    # What is there glibc has to read; with O_WRONLY it says EBADF.
    [(os.O_WRONLY, b""), (os.O_RDWR, b""), (os.O_RDWR, b"begun"), (os.O_RDWR, b"x" * 5000)],
)
def test_allocation_makes_the_size_and_stores_nothing(
    room: Path, access: int, before: bytes
) -> None:
    size = 300_001
    path = room / "step-1.bin"
    path.write_bytes(before)
    os.utime(path, ns=(0, 0))
    file = os.open(path, access)
    os.posix_fallocate(file, 0, size)
    os.fsync(file)
    status = os.fstat(file)
    assert status.st_size == size
    assert status.st_blocks * 512 <= 8192
    assert status.st_mtime_ns > 0
    assert path.read_bytes() == before.ljust(size, b"\0")
    data = os.urandom(size)
    assert os.pwrite(file, data, 0) == size
    os.fsync(file)
    os.posix_fallocate(file, size if access == os.O_WRONLY else 0, 10)
    os.close(file)
    assert path.read_bytes() == data + bytes(10 if access == os.O_WRONLY else 0)
    assert path.stat().st_blocks * 512 >= size
