"""Names through a real mount: links, renames, directories, special files, attributes."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from retainzfs import fs
from tests.conftest import PATIENCE_S, Live, as_user

pytestmark = pytest.mark.fuse

NOREPLACE, EXCHANGE = 1, 2
AT_FDCWD = -100


def rename2(old: Path, new: Path, flags: int) -> None:
    """renameat2(2), which Python does not have."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, bytes(old), AT_FDCWD, bytes(new), flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(old))


def fails(number: int, call: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        call(*arguments)
    assert caught.value.errno == number, f"{caught.value} is not {errno.errorcode[number]}"


# Names


@pytest.mark.parametrize(
    "name",
    ["with blank", "epoch=3-step=1000.ckpt", "Größe-模型-🔥", "x" * 255, "new\nline", "-rf", "~"],
)
def test_any_name(room: Path, name: str) -> None:
    (room / name).write_bytes(b"content")
    assert os.listdir(room) == [name]
    assert (room / name).read_bytes() == b"content"
    (room / name).unlink()
    assert os.listdir(room) == []


def test_a_name_that_is_no_text(room: Path) -> None:
    path = bytes(room) + b"/\xff\xfe"
    with open(path, "wb"):
        pass
    assert os.listdir(bytes(room)) == [b"\xff\xfe"]


def test_names_that_are_too_long(room: Path) -> None:
    fails(errno.ENAMETOOLONG, (room / ("x" * 256)).touch)
    fails(errno.ENAMETOOLONG, (room / ("é" * 128)).mkdir)
    (room / "short").touch()
    fails(errno.ENAMETOOLONG, os.rename, room / "short", room / ("x" * 256))


def test_what_does_not_exist(room: Path) -> None:
    fails(errno.ENOENT, (room / "nothing").read_bytes)
    fails(errno.ENOENT, (room / "nothing").unlink)
    fails(errno.ENOENT, (room / "nothing").rmdir)
    fails(errno.ENOENT, (room / "nothing" / "below").touch)
    (room / "file").touch()
    fails(errno.ENOTDIR, (room / "file" / "below").touch)
    fails(errno.EEXIST, os.mkdir, room / "file")


# Links


def test_hard_links(room: Path) -> None:
    one, other = room / "one", room / "other"
    one.write_bytes(b"both")
    os.link(one, other)
    assert one.stat().st_ino == other.stat().st_ino
    assert one.stat().st_nlink == 2
    with other.open("ab") as file:
        file.write(b" of us")
    one.unlink()
    assert other.stat().st_nlink == 1
    assert other.read_bytes() == b"both of us"
    (room / "directory").mkdir()
    fails(errno.EPERM, os.link, room / "directory", room / "second")


@pytest.mark.parametrize("target", ["target", "/absolute/nowhere", "x" * 4000])
def test_symbolic_links(room: Path, target: str) -> None:
    link = room / "link"
    link.symlink_to(target)
    assert os.readlink(link) == target
    assert stat.S_ISLNK(link.lstat().st_mode)
    assert link.lstat().st_size == len(target)
    (room / "target").write_bytes(b"here")
    if target == "target":
        assert link.read_bytes() == b"here"


# Renaming


def test_renaming_a_file(room: Path) -> None:
    (room / "directory").mkdir()
    (room / "old").write_bytes(b"content")
    number = (room / "old").stat().st_ino
    os.rename(room / "old", room / "directory" / "new")
    assert (room / "directory" / "new").stat().st_ino == number
    assert os.listdir(room) == ["directory"]
    assert (room / "directory" / "new").read_bytes() == b"content"


def test_renaming_over_something(room: Path) -> None:
    one, other = room / "one", room / "other"
    one.write_bytes(b"one")
    other.write_bytes(b"other")
    with other.open("rb") as replaced:
        os.rename(one, other)
        assert replaced.read() == b"other"
    assert other.read_bytes() == b"one"
    (room / "full").mkdir()
    (room / "full" / "file").touch()
    (room / "empty").mkdir()
    fails(errno.EISDIR, os.rename, other, room / "empty")
    fails(errno.ENOTDIR, os.rename, room / "empty", other)
    fails(errno.ENOTEMPTY, os.rename, room / "empty", room / "full")
    os.rename(room / "full", room / "empty")
    assert (room / "empty" / "file").exists()
    assert sorted(os.listdir(room)) == ["empty", "other"]
    fails(errno.EINVAL, os.rename, room / "empty", room / "empty" / "below")


def test_renaming_to_another_name_of_itself(room: Path) -> None:
    (room / "one").touch()
    os.link(room / "one", room / "other")
    os.rename(room / "one", room / "other")  # rename(2): does nothing
    assert sorted(os.listdir(room)) == ["one", "other"]


def test_renaming_without_replacing(room: Path) -> None:
    (room / "one").write_bytes(b"one")
    (room / "other").write_bytes(b"other")
    fails(errno.EEXIST, rename2, room / "one", room / "other", NOREPLACE)
    assert (room / "other").read_bytes() == b"other"
    rename2(room / "one", room / "third", NOREPLACE)
    assert (room / "third").read_bytes() == b"one"


def test_exchanging(room: Path) -> None:
    (room / "file").write_bytes(b"content")
    (room / "directory" / "sub").mkdir(parents=True)
    rename2(room / "file", room / "directory", EXCHANGE)
    assert (room / "directory").read_bytes() == b"content"
    assert os.listdir(room / "file") == ["sub"]
    fails(errno.ENOENT, rename2, room / "file", room / "nothing", EXCHANGE)


# Directories


def test_link_counts_of_directories(room: Path) -> None:
    assert room.stat().st_nlink == 2
    for name in "abc":
        (room / name).mkdir()
    assert room.stat().st_nlink == 5
    os.rename(room / "a", room / "b" / "a")
    assert room.stat().st_nlink == 4
    assert (room / "b").stat().st_nlink == 3
    fails(errno.ENOTEMPTY, os.rmdir, room / "b")
    shutil.rmtree(room / "b")
    assert room.stat().st_nlink == 3


def test_parents(room: Path) -> None:
    (room / "a" / "b").mkdir(parents=True)
    assert os.stat(room / "a" / "b" / "..").st_ino == os.stat(room / "a").st_ino
    here = os.open(room / "a" / "b", os.O_RDONLY)
    os.rename(room / "a" / "b", room / "c")
    assert os.stat("..", dir_fd=here).st_ino == room.stat().st_ino
    os.close(here)


def test_deleting_while_listing(room: Path) -> None:
    names = {f"file{number:04}" for number in range(2000)}
    for name in names:
        (room / name).touch()
    seen = set()
    with os.scandir(room) as entries:
        for entry in entries:
            assert entry.name not in seen, "a name was listed twice"
            seen.add(entry.name)
            os.unlink(entry.path)
    assert seen == names
    assert os.listdir(room) == []
    room.rmdir()


def test_listing_while_names_come_and_go(room: Path) -> None:
    stay = {f"stay{number:03}" for number in range(300)}
    for name in stay:
        (room / name).touch()
    seen = []
    with os.scandir(room) as entries:
        for number, entry in enumerate(entries):
            seen.append(entry.name)
            (room / f"new{number}").touch()
            if number:
                (room / f"new{number - 1}").unlink()
            if number > 1000:
                break
    assert stay <= set(seen)
    assert len(seen) == len(set(seen))


def test_completion_markers_are_listed_first(room: Path) -> None:
    for name in ("weights.bin", ".metadata", "aaa", "trainer_state.json"):
        (room / name).touch()
    assert set(os.listdir(room)[:2]) == {".metadata", "trainer_state.json"}


def test_a_removed_directory_that_is_open(room: Path) -> None:
    (room / "gone").mkdir()
    here = os.open(room / "gone", os.O_RDONLY)
    (room / "gone").rmdir()
    assert os.fstat(here).st_nlink == 0
    assert os.listdir(here) == []
    fails(errno.ENOENT, lambda: os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


def test_directory_times_change_when_names_do(room: Path) -> None:
    (room / "file").touch()
    os.utime(room, ns=(0, 0))
    (room / "file").write_bytes(b"content")
    (room / "file").read_bytes()
    os.listdir(room)
    assert room.stat().st_mtime_ns == 0
    (room / "file").rename(room / "other")
    assert room.stat().st_mtime_ns > 0


def test_new_files_in_a_setgid_directory(room: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files to other groups")
    os.chown(room, 0, 4321)
    room.chmod(0o2775)
    (room / "file").touch()
    (room / "directory").mkdir()
    assert (room / "file").stat().st_gid == 4321
    assert (room / "directory").stat().st_gid == 4321
    assert (room / "directory").stat().st_mode & stat.S_ISGID


def test_special_files(room: Path) -> None:
    os.mkfifo(room / "fifo", 0o640)
    assert stat.S_ISFIFO((room / "fifo").stat().st_mode)
    assert stat.S_IMODE((room / "fifo").stat().st_mode) == 0o640 & ~_umask()
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(room, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{here}/socket")  # a short path, whatever the room's is
        os.close(here)
    assert stat.S_ISSOCK((room / "socket").stat().st_mode)
    if os.geteuid() == 0:
        os.mknod(room / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        assert (room / "null").stat().st_rdev == os.makedev(1, 3)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Extended attributes


def test_extended_attributes(room: Path) -> None:
    path = room / "file"
    path.touch()
    os.setxattr(path, "user.one", b"1")
    os.setxattr(path, "user.bytes", bytes(range(256)))
    os.setxattr(path, "user.empty", b"")
    assert set(os.listxattr(path)) == {"user.one", "user.bytes", "user.empty"}
    assert os.getxattr(path, "user.bytes") == bytes(range(256))
    assert os.getxattr(path, "user.empty") == b""
    fails(errno.EEXIST, os.setxattr, path, "user.one", b"2", os.XATTR_CREATE)
    fails(errno.ENODATA, os.setxattr, path, "user.two", b"2", os.XATTR_REPLACE)
    os.setxattr(path, "user.one", b"2", os.XATTR_REPLACE)
    assert os.getxattr(path, "user.one") == b"2"
    os.removexattr(path, "user.one")
    fails(errno.ENODATA, os.getxattr, path, "user.one")
    fails(errno.ENODATA, os.removexattr, path, "user.one")


def test_our_attributes_are_checked(room: Path) -> None:
    os.setxattr(room, "user.retainz.keep_last", b"3")
    assert os.listxattr(room) == ["user.retainz.keep_last"]
    fails(errno.EINVAL, os.setxattr, room, "user.retainz.keep_last", b"none")
    fails(errno.EINVAL, os.setxattr, room, "user.retainz.keep_lst", b"3")
    fails(errno.EINVAL, os.setxattr, room, "user.retainz.state", b"complete")
    fails(errno.ENOTSUP, os.setxattr, room, "user.retainz.quota", b"1G")
    explained = json.loads(os.getxattr(room, "user.retainz.explain"))
    assert explained["attributes"]["keep_last"]["value"] == 3


def test_access_control_lists_are_refused(room: Path) -> None:
    # acl(5) as the kernel wants it: rwx for the owner, a user, the group, the mask and others.
    entries = [(1, 7, 0), (2, 7, 1234), (4, 7, 0), (16, 7, 0), (32, 7, 0)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    fails(errno.ENOTSUP, os.setxattr, room, "system.posix_acl_access", acl)


def test_collecting_is_for_root_and_the_mounting_user(live: Live, room: Path) -> None:
    room.chmod(0o777)
    (room / "file").touch()
    os.setxattr(live.path, "user.retainz.gc", b"1")
    code = f"""
import os
with open({str(room / "theirs")!r}, "w"):
    pass
try:
    os.setxattr({str(room / "theirs")!r}, "user.retainz.gc", b"1")
except PermissionError:
    raise SystemExit(0)
raise SystemExit("it was allowed")
"""
    done = as_user(1234, code)
    assert done.returncode == 0, done.stderr


def test_reaping_is_seen_at_once(room: Path) -> None:
    """The kernel caches names, and nobody told it that this one goes."""
    os.setxattr(room, "user.retainz.keep_last", b"1")
    os.setxattr(room, "user.retainz.reap", b"1")
    first = room / "step-1.pt"
    first.write_bytes(b"first")
    assert first.stat().st_size == 5  # now the kernel has it all
    (room / "step-2.pt").write_bytes(b"second")
    deadline = time.monotonic() + PATIENCE_S
    while first.name in os.listdir(room):
        assert time.monotonic() < deadline, "nothing was reaped"
    deadline = time.monotonic() + fs.TIMEOUT_S / 2  # the cache alone would keep it for longer
    while first.exists():
        assert time.monotonic() < deadline, "the kernel still has the name"
    assert (room / "step-2.pt").read_bytes() == b"second"


# The control directory


def test_the_control_directory_is_found_and_not_listed(live: Live) -> None:
    assert ".retainz" not in os.listdir(live.path)
    assert set(os.listdir(live.path / ".retainz")) == {
        "stats.json",
        "zones.json",
        "generations.json",
        "scrub.json",
        "trace.json",
        "metrics",
        "config.toml",
    }
    stats = json.loads((live.path / ".retainz/stats.json").read_bytes())
    assert stats["target"] == str(live.image)
    assert len(json.loads((live.path / ".retainz/zones.json").read_bytes())) > 64
    assert "retainzfs_capacity_bytes" in (live.path / ".retainz/metrics").read_text()
    assert 'commit = "fsync"' in (live.path / ".retainz/config.toml").read_text()


def test_the_control_directory_cannot_be_changed(live: Live, room: Path) -> None:
    control = live.path / ".retainz"
    (room / "file").touch()
    fails(errno.EPERM, os.rmdir, control)
    fails(errno.EPERM, os.rename, control, room / "mine")
    (room / "directory").mkdir()
    fails(errno.EPERM, os.rename, room / "directory", control)
    fails(errno.EPERM, os.rename, room / "file", control / "file")
    fails(errno.EPERM, os.link, room / "file", control / "file")
    fails(errno.EPERM, os.unlink, control / "stats.json")
    fails(errno.EPERM, os.mkdir, control / "new")
    fails(errno.EPERM, os.chmod, control, 0o777)
    fails(errno.EPERM, os.truncate, control / "stats.json", 0)
    fails(errno.EPERM, os.setxattr, control, "user.x", b"1")
    fails(errno.EACCES, os.open, control / "stats.json", os.O_WRONLY)
    fails(errno.EEXIST, os.mkdir, control)
    fails(errno.ENOENT, (control / "nothing").read_bytes)
    assert os.listxattr(control) == []
    assert os.stat(control / "..").st_ino == os.stat(live.path).st_ino
