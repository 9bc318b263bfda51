"""The same calls on a mount and on an ordinary directory have the same results."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.conftest import Live

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(400)]

AT_FDCWD = -100
NOREPLACE, EXCHANGE = 1, 2
PROFILE = settings(
    max_examples=100,
    stateful_step_count=60,
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
# Who is not root cannot look into what it may not read.
FLOOR = 0 if os.geteuid() == 0 else 0o700
HANDLES = 4  # open at one time
TIMES = (0, 1, -1_500_000_001, 1_700_000_000_987_654_321)  # ns; what the tree comparison looks at

# Few and short, so that calls meet.
names = st.sampled_from(["a", "b", "d", "d/a", "d/b", "e", "e/a"])
accesses = st.sampled_from([os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
writing = st.sampled_from([os.O_WRONLY, os.O_RDWR])
CREATE = os.O_CREAT
creations = st.sampled_from(
    [0, CREATE, CREATE | os.O_TRUNC, CREATE | os.O_EXCL, CREATE | os.O_APPEND, os.O_TRUNC]
)
# Around the sizes where bytes move from the inode to blocks, and from block to block.
offsets = st.sampled_from([0, 1, 100, 255, 4095, 4096, 4097, 9000, 70_000])
lengths = st.sampled_from([0, 1, 17, 256, 257, 4095, 4096, 5000, 66_000])
handles = st.integers(0, HANDLES - 1)
fills = st.integers(1, 255)
edits = st.lists(
    st.tuples(st.sampled_from(["write", "truncate", "sync"]), offsets, lengths, fills),
    min_size=2,
    max_size=8,
)
modes = st.sampled_from([0o644, 0o600, 0o755, 0o4755, 0o2755, 0o2644, 0o1777, 0])
owners = st.sampled_from([-1, 0, 1234])
attributes = st.sampled_from(["user.a", "user.b", "trusted.c"])


def rename2(old: str, new: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), old)


class Node(NamedTuple):
    """What is compared of a name."""

    mode: int
    nlink: int
    owner: tuple[int, int]
    size: int
    content: bytes | str
    xattrs: dict[str, bytes]
    mtime_ns: int | None  # None: it is not one that a call has set
    inode: int  # a small number; the names of one inode have the same


class Side:
    """One of the two trees, with what is open in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.open: dict[int, int] = {}  # handle → descriptor

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def close(self) -> None:
        for fd in self.open.values():
            os.close(fd)
        self.open.clear()

    def clear(self) -> None:
        self.close()
        for entry in os.scandir(self.root):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)

    def tree(self) -> dict[str, Node]:
        numbers: dict[int, int] = {}
        found = {}
        for path in self._walk(self.root):
            inode = numbers.setdefault(path.lstat().st_ino, len(numbers))
            found[str(path.relative_to(self.root))] = self._node(path, inode)
        return found

    def _walk(self, directory: Path) -> Iterator[Path]:
        for name in sorted(os.listdir(directory)):
            path = directory / name
            yield path
            if stat.S_ISDIR(path.lstat().st_mode):
                yield from self._walk(path)

    @staticmethod
    def _node(path: Path, inode: int) -> Node:
        status = path.lstat()
        content: bytes | str = b""
        if stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        xattrs = os.listxattr(path, follow_symlinks=False)
        return Node(
            mode=status.st_mode,
            nlink=status.st_nlink,
            owner=(status.st_uid, status.st_gid),
            size=0 if stat.S_ISDIR(status.st_mode) else status.st_size,
            content=content,
            xattrs={name: os.getxattr(path, name, follow_symlinks=False) for name in xattrs},
            mtime_ns=status.st_mtime_ns if status.st_mtime_ns in TIMES else None,
            inode=inode,
        )


def outcome(call: Callable[[Side], object], side: Side) -> object:
    """Return what the call returned, or the name of its error."""
    try:
        return call(side)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def something_open(machine: Machine) -> bool:
    return bool(machine.theirs.open)


class Machine(RuleBasedStateMachine):
    live: Live
    ours: Side
    theirs: Side

    def both(self, call: Callable[[Side], object]) -> None:
        ours, theirs = outcome(call, self.ours), outcome(call, self.theirs)
        assert ours == theirs, f"the mount says {ours!r}, the other directory {theirs!r}"

    def through(self, nth: int, call: Callable[[int], object]) -> None:
        """The call on an open descriptor."""
        handle = sorted(self.theirs.open)[nth % len(self.theirs.open)]
        self.both(lambda side: call(side.open[handle]))

    @initialize()
    def begin(self) -> None:
        """With a tree in which most names are something."""
        for side in (self.ours, self.theirs):
            for directory in ("d", "e"):
                os.mkdir(side.path(directory))
            for name, length in (("a", 9000), ("b", 100), ("d/a", 4096)):
                Path(side.path(name)).write_bytes(bytes([length % 251]) * length)
            os.symlink("d/a", side.path("e/a"))

    @rule()
    def compare(self) -> None:
        ours, theirs = self.ours.tree(), self.theirs.tree()
        assert ours.keys() == theirs.keys()
        for name, node in theirs.items():
            assert ours[name]._asdict() == node._asdict(), name

    def teardown(self) -> None:
        try:
            self.compare()
        finally:
            self.ours.clear()
            self.theirs.clear()
            self.live.check()

    # Descriptors

    @rule(handle=handles, name=names, access=accesses, flags=creations, mode=modes)
    def open(self, handle: int, name: str, access: int, flags: int, mode: int) -> None:
        def opening(side: Side) -> None:
            if handle in side.open:
                os.close(side.open.pop(handle))
            # Without O_NONBLOCK a fifo would wait for its other end.
            how = access | flags | os.O_NONBLOCK
            side.open[handle] = os.open(side.path(name), how, mode & 0o1777)

        self.both(opening)

    @precondition(something_open)
    @rule(handle=handles)
    def close(self, handle: int) -> None:
        if handle in self.theirs.open:
            self.both(lambda side: os.close(side.open.pop(handle)))

    @rule(name=names, access=writing, steps=edits)
    def edit(self, name: str, access: int, steps: list[tuple[str, int, int, int]]) -> None:
        def editing(side: Side) -> None:
            fd = os.open(side.path(name), access | os.O_CREAT | os.O_NONBLOCK, 0o644)
            try:
                for how, offset, length, fill in steps:
                    match how:
                        case "write":
                            os.pwrite(fd, bytes([fill]) * length, offset)
                        case "truncate":
                            os.ftruncate(fd, offset)
                        case "sync":
                            os.fsync(fd)
            finally:
                os.close(fd)

        self.both(editing)

    @precondition(something_open)
    @rule(handle=handles, length=lengths, fill=fills)
    def write(self, handle: int, length: int, fill: int) -> None:
        self.through(handle, lambda fd: os.write(fd, bytes([fill]) * length))

    @precondition(something_open)
    @rule(handle=handles, length=lengths, fill=fills, offset=offsets)
    def pwrite(self, handle: int, length: int, fill: int, offset: int) -> None:
        self.through(handle, lambda fd: os.pwrite(fd, bytes([fill]) * length, offset))

    @precondition(something_open)
    @rule(handle=handles, length=lengths)
    def read(self, handle: int, length: int) -> None:
        self.through(handle, lambda fd: os.read(fd, length))

    @precondition(something_open)
    @rule(handle=handles, length=lengths, offset=offsets)
    def pread(self, handle: int, length: int, offset: int) -> None:
        self.through(handle, lambda fd: os.pread(fd, length, offset))

    @precondition(something_open)
    @rule(handle=handles, offset=offsets, whence=st.sampled_from([os.SEEK_SET, os.SEEK_END]))
    def seek(self, handle: int, offset: int, whence: int) -> None:
        def seeking(fd: int) -> int:
            # What a position in a directory is, is every filesystem's own affair.
            return 0 if stat.S_ISDIR(os.fstat(fd).st_mode) else os.lseek(fd, offset, whence)

        self.through(handle, seeking)

    @precondition(something_open)
    @rule(handle=handles, size=offsets)
    def ftruncate(self, handle: int, size: int) -> None:
        self.through(handle, lambda fd: os.ftruncate(fd, size))

    @precondition(something_open)
    @rule(handle=handles)
    def fsync(self, handle: int) -> None:
        self.through(handle, os.fsync)

    @precondition(something_open)
    @rule(handle=handles)
    def fstat(self, handle: int) -> None:
        def told(fd: int) -> object:
            status = os.fstat(fd)
            size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            return status.st_mode, status.st_nlink, size

        self.through(handle, told)

    # Names

    @rule(name=names)
    def unlink(self, name: str) -> None:
        self.both(lambda side: os.unlink(side.path(name)))

    @rule(name=names, mode=modes)
    def mkdir(self, name: str, mode: int) -> None:
        self.both(lambda side: os.mkdir(side.path(name), mode | 0o700))

    @rule(name=names)
    def rmdir(self, name: str) -> None:
        self.both(lambda side: os.rmdir(side.path(name)))

    @rule(name=names)
    def listing(self, name: str) -> None:
        self.both(lambda side: sorted(os.listdir(side.path(name))))

    @rule(old=names, new=names)
    def link(self, old: str, new: str) -> None:
        self.both(lambda side: os.link(side.path(old), side.path(new)))

    @rule(name=names, to=st.sampled_from(["a", "d", "d/a", "nowhere", "x" * 300]))
    def symlink(self, name: str, to: str) -> None:
        self.both(lambda side: os.symlink(to, side.path(name)))

    @rule(name=names)
    def mkfifo(self, name: str) -> None:
        self.both(lambda side: os.mkfifo(side.path(name)))

    @rule(old=names, new=names)
    def rename(self, old: str, new: str) -> None:
        self.both(lambda side: os.rename(side.path(old), side.path(new)))

    @rule(old=names, new=names, flags=st.sampled_from([NOREPLACE, EXCHANGE, NOREPLACE | EXCHANGE]))
    def rename_with_flags(self, old: str, new: str, flags: int) -> None:
        self.both(lambda side: rename2(side.path(old), side.path(new), flags))

    # Attributes

    @rule(name=names, size=offsets)
    def truncate(self, name: str, size: int) -> None:
        self.both(lambda side: os.truncate(side.path(name), size))

    @rule(name=names, mode=modes)
    def chmod(self, name: str, mode: int) -> None:
        def changing(side: Side) -> None:
            path = side.path(name)
            # Root keeps a file's privileges when it writes elsewhere, and loses them here.
            allowed = 0o7777 if os.path.isdir(path) else 0o1777
            os.chmod(path, mode & allowed | FLOOR)

        self.both(changing)

    @rule(name=names, uid=owners, gid=owners, follow=st.booleans())
    def chown(self, name: str, uid: int, gid: int, follow: bool) -> None:
        self.both(lambda side: os.chown(side.path(name), uid, gid, follow_symlinks=follow))

    @rule(name=names, mtime=st.sampled_from(TIMES), follow=st.booleans())
    def utime(self, name: str, mtime: int, follow: bool) -> None:
        times = (0, mtime)
        self.both(lambda side: os.utime(side.path(name), ns=times, follow_symlinks=follow))

    @rule(
        name=names,
        attribute=attributes,
        value=st.sampled_from([b"", b"1", b"x" * 5000]),
        flags=st.sampled_from([0, os.XATTR_CREATE, os.XATTR_REPLACE]),
        follow=st.booleans(),
    )
    def setxattr(self, name: str, attribute: str, value: bytes, flags: int, follow: bool) -> None:
        self.both(
            lambda side: os.setxattr(
                side.path(name), attribute, value, flags, follow_symlinks=follow
            )
        )

    @rule(name=names, attribute=attributes)
    def getxattr(self, name: str, attribute: str) -> None:
        self.both(lambda side: os.getxattr(side.path(name), attribute))

    @rule(name=names, attribute=attributes)
    def removexattr(self, name: str, attribute: str) -> None:
        self.both(lambda side: os.removexattr(side.path(name), attribute))

    # Life

    @rule(luck=st.integers(0, 15))
    def remount(self, luck: int) -> None:
        if luck:
            return
        self.ours.close()
        self.theirs.close()
        self.live.umount()
        self.live.mount()
        self.compare()


def reference() -> tempfile.TemporaryDirectory[str]:
    """Return a directory on a filesystem that has all that we promise."""
    for where in ("/dev/shm", None):
        if where is not None and not os.path.isdir(where):
            continue
        directory = tempfile.TemporaryDirectory(dir=where)
        try:
            os.setxattr(directory.name, "user.a", b"")
            os.removexattr(directory.name, "user.a")
        except OSError:
            directory.cleanup()
            continue
        return directory
    pytest.skip("neither /dev/shm nor the temporary directory has extended attributes")


def test_a_mount_answers_like_an_ordinary_directory(fresh: Live) -> None:
    fresh.mount()
    with reference() as other:

        class Here(Machine):
            live = fresh
            ours = Side(fresh.path)
            theirs = Side(Path(other))

        run_state_machine_as_test(Here, settings=PROFILE)
