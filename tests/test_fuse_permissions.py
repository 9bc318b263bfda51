"""Who may do what, on a mount: the kernel checks, with the modes and owners that we keep."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.conftest import as_user

pytestmark = pytest.mark.fuse

USER, OTHER = 1234, 1235
# For code that runs as somebody else: `refused(number, call, *arguments)`.
REFUSED = """
import errno, os
def refused(number, call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        if error.errno == number:
            return
        raise
    raise SystemExit(f"{call.__name__}{arguments} was allowed")
"""


def succeeds_as(uid: int, code: str, room: Path) -> None:
    """Run code as another user in the room; it has `refused` and relative paths."""
    done = as_user(uid, f"{REFUSED}\nos.chdir({str(room)!r})\n{code}")
    assert done.returncode == 0, done.stderr


def test_directories_need_their_bits(room: Path) -> None:
    for name, mode in (("search", 0o711), ("list", 0o744), ("neither", 0o700), ("write", 0o733)):
        (room / name).mkdir()
        (room / name / "file").write_bytes(b"content")
        (room / name / "file").chmod(0o644)
        (room / name).chmod(mode)
    code = """
assert open("search/file").read() == "content"
refused(errno.EACCES, os.listdir, "search")
assert os.listdir("list") == ["file"]
refused(errno.EACCES, os.stat, "list/file")
refused(errno.EACCES, open, "neither/file")
refused(errno.EACCES, os.mkdir, "search/new")
refused(errno.EACCES, os.rename, "search/file", "write/new")
refused(errno.EACCES, os.listdir, "write")
os.mkdir("write/new")
os.rmdir("write/new")
os.unlink("write/file")
assert not os.access("neither", os.X_OK) and os.access("search", os.X_OK)
"""
    room.chmod(0o755)
    succeeds_as(USER, code, room)


def test_what_only_the_owner_may(room: Path) -> None:
    room.chmod(0o777)
    for name, mode in (("open", 0o666), ("closed", 0o644)):
        (room / name).write_bytes(b"content")
        (room / name).chmod(mode)
    os.setxattr(room / "open", "user.a", b"1")
    code = f"""
os.utime("open")
refused(errno.EPERM, lambda: os.utime("open", (1, 1)))
refused(errno.EACCES, os.utime, "closed")
refused(errno.EPERM, os.chmod, "open", 0o600)
refused(errno.EPERM, os.chown, "open", {USER}, -1)
refused(errno.EACCES, os.truncate, "closed", 0)
refused(errno.EACCES, os.setxattr, "closed", "user.a", b"1")
os.setxattr("open", "user.a", b"2")
refused(errno.EPERM, os.setxattr, "open", "trusted.a", b"1")
open("mine", "w").close()
refused(errno.EPERM, os.chown, "mine", 0, -1)
refused(errno.EPERM, os.chown, "mine", -1, 0)
os.chown("mine", {USER}, {USER})
os.chmod("mine", 0o600)
"""
    succeeds_as(USER, code, room)
    assert (room / "closed").read_bytes() == b"content"
    fails_to_read = as_user(OTHER, f"open({str(room / 'mine')!r})")
    assert "PermissionError" in fails_to_read.stderr


def test_trusted_attributes_are_for_root(room: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root sets trusted attributes")
    room.chmod(0o755)
    (room / "file").touch()
    os.setxattr(room / "file", "trusted.a", b"1")
    os.setxattr(room / "file", "user.a", b"1")
    assert set(os.listxattr(room / "file")) == {"trusted.a", "user.a"}
    code = """
assert os.listxattr("file") == ["user.a"], os.listxattr("file")
refused(errno.ENODATA, os.getxattr, "file", "trusted.a")
"""
    succeeds_as(USER, code, room)


def test_in_a_sticky_directory_everybody_has_his_own(room: Path) -> None:
    drop = room / "drop"
    drop.mkdir()
    drop.chmod(0o1777)
    room.chmod(0o777)
    succeeds_as(OTHER, "open('drop/theirs', 'w').close(); os.mkdir('drop/dir')", room)
    code = """
open("drop/mine", "w").close()
refused(errno.EPERM, os.unlink, "drop/theirs")
refused(errno.EPERM, os.rmdir, "drop/dir")
refused(errno.EPERM, os.rename, "drop/theirs", "drop/new")
refused(errno.EPERM, os.rename, "drop/theirs", "outside")
refused(errno.EPERM, os.rename, "drop/mine", "drop/theirs")
os.rename("drop/mine", "drop/new")
os.rename("drop/new", "outside")
"""
    succeeds_as(USER, code, room)
    os.chown(drop, USER, USER)  # who owns the directory may take all away
    succeeds_as(USER, "os.unlink('drop/theirs'); os.rmdir('drop/dir')", room)


@pytest.mark.parametrize("access", ["O_WRONLY", "O_RDWR", "O_WRONLY | os.O_TRUNC"])
def test_a_strangers_write_takes_privileges_away(room: Path, access: str) -> None:
    room.chmod(0o777)
    (room / "file").write_bytes(b"content")
    (room / "file").chmod(0o6777)
    code = f"fd = os.open('file', os.{access}); os.write(fd, b'x'); os.close(fd)"
    succeeds_as(USER, code, room)
    assert stat.S_IMODE((room / "file").stat().st_mode) == 0o777


def test_set_group_id_stays_where_it_means_something_else(room: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files to others")
    (room / "directory").mkdir()
    (room / "directory").chmod(0o2775)
    os.chown(room / "directory", USER, USER)
    assert stat.S_IMODE((room / "directory").stat().st_mode) == 0o2775
    room.chmod(0o777)
    code = f"""
os.mkdir("inside", 0o755)
os.chown("inside", -1, {USER})
os.chmod("inside", 0o2755)
os.mkdir("inside/below")
os.mkdir("inside/below/deeper")
assert os.stat("inside/below/deeper").st_mode & 0o2000
"""
    succeeds_as(USER, code, room)
