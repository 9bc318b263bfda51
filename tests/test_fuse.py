"""Bytes through a real mount: written anywhere, truncated, sparse, mapped, by several processes."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from retainzfs.session import READ_AHEAD_KIB
from tests.conftest import Live, as_user, run_python

pytestmark = pytest.mark.fuse

MIB = 1 << 20


def noise(length: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length)


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 4095, 4096, 4097, MIB + 1, 9 * MIB + 17])
def test_what_is_written_is_read(room: Path, length: int) -> None:
    data = noise(length, seed=length)
    (room / "file").write_bytes(data)
    assert (room / "file").read_bytes() == data
    assert (room / "file").stat().st_size == length


def test_writes_anywhere_match_a_bytearray(room: Path) -> None:
    rng = random.Random(7)
    model = bytearray()
    path = room / "file"
    with path.open("wb", buffering=0) as writer, path.open("rb", buffering=0) as reader:
        for step in range(200):
            offset = rng.choice((rng.randrange(3 * MIB), len(model), rng.randrange(64) * 4096))
            data = rng.randbytes(rng.choice((1, 100, 4096, 5000, 70_000, 300_000)))
            model.extend(bytes(max(0, offset + len(data) - len(model))))
            model[offset : offset + len(data)] = data
            writer.seek(offset)
            assert writer.write(data) == len(data)
            if step % 40 == 13:
                size = rng.randrange(len(model) + 100_000)
                os.ftruncate(writer.fileno(), size)
                model[size:] = b""
                model.extend(bytes(size - len(model)))
            if step % 50 == 7:
                os.fsync(writer.fileno())
            at = rng.randrange(len(model) + 1)
            reader.seek(at)
            assert reader.read(50_000) == model[at : at + 50_000], f"step {step}"
    assert path.read_bytes() == model


def test_overwriting_in_place(room: Path) -> None:
    path = room / "file"
    data = bytearray(noise(3 * MIB))
    path.write_bytes(data)
    with path.open("r+b") as file:
        for offset, length in ((0, 10), (4090, 20), (MIB - 1, 2), (2 * MIB, MIB)):
            file.seek(offset)
            file.write(b"\xaa" * length)
            data[offset : offset + length] = b"\xaa" * length
    assert path.read_bytes() == data


def test_opening_with_truncation_empties(room: Path) -> None:
    path = room / "file"
    path.write_bytes(noise(MIB))
    with path.open("wb") as file:
        assert path.stat().st_size == 0
        file.write(b"new")
    assert path.read_bytes() == b"new"


def test_truncating_down_and_up_leaves_zeros(room: Path) -> None:
    path = room / "file"
    path.write_bytes(noise(2 * MIB))
    os.truncate(path, 5000)
    os.truncate(path, 3 * MIB)
    assert path.read_bytes() == noise(2 * MIB)[:5000] + bytes(3 * MIB - 5000)
    os.truncate(path, 0)
    assert path.read_bytes() == b""
    assert path.stat().st_blocks == 0


def test_a_sparse_file_takes_what_it_holds(room: Path) -> None:
    path = room / "file"
    where = (5 << 30) + 123
    with path.open("wb") as file:
        file.seek(where)
        file.write(b"far away")
    assert path.stat().st_size == where + 8
    assert path.stat().st_blocks * 512 < MIB
    with path.open("rb") as reader:
        reader.seek(where - 4)
        assert reader.read(100) == bytes(4) + b"far away"
        reader.seek(1 << 32)
        assert reader.read(4096) == bytes(4096)
    os.truncate(path, 1 << 40)
    assert path.stat().st_size == 1 << 40


def test_a_small_file_does_not_look_like_a_hole(room: Path) -> None:
    """Its bytes are in the inode; tar and cp skip files that take no blocks."""
    (room / "small").write_bytes(b"x" * 100)
    assert (room / "small").stat().st_blocks == 1
    (room / "empty").touch()
    assert (room / "empty").stat().st_blocks == 0


def test_too_large_a_file_is_refused(room: Path) -> None:
    (room / "file").touch()
    with pytest.raises(OSError, match="too large") as caught:
        os.truncate(room / "file", (1 << 60) + 1)
    assert caught.value.errno == errno.EFBIG


def test_an_unlinked_file_lives_while_it_is_open(room: Path) -> None:
    path = room / "file"
    with path.open("w+b") as file:
        file.write(noise(MIB))
        path.unlink()
        file.flush()
        assert not path.exists()
        assert os.fstat(file.fileno()).st_nlink == 0
        file.seek(0)
        assert file.read() == noise(MIB)
        file.write(b"more")
        file.flush()
        os.fsync(file.fileno())
        assert os.fstat(file.fileno()).st_size == MIB + 4
    assert list(room.iterdir()) == []


def test_two_processes_append(room: Path) -> None:
    code = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
        "for n in range(200):\n"
        "    os.write(fd, f'{sys.argv[2]} {n:06d}\\n'.encode())\n"
    )
    path = room / "log"
    path.touch()
    processes = [
        subprocess.Popen(["python3", "-c", code, str(path), name]) for name in ("one", "two")
    ]
    assert [process.wait(60) for process in processes] == [0, 0]
    lines = path.read_text().splitlines()
    assert len(lines) == 400
    for name in ("one", "two"):
        mine = [line for line in lines if line.startswith(name)]
        assert mine == [f"{name} {n:06d}" for n in range(200)]


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
def test_mapped_reading(room: Path, flags: int) -> None:
    path = room / "file"
    path.write_bytes(noise(3 * MIB + 5))
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as mapped,
    ):
        assert mapped[:] == noise(3 * MIB + 5)


def test_private_stores_stay_private(room: Path) -> None:
    path = room / "file"
    path.write_bytes(bytes(8192))
    with (
        path.open("r+b") as file,
        mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        ) as mapped,
    ):
        mapped[:4] = b"mine"
    assert path.read_bytes() == bytes(8192)


def test_shared_stores_arrive_with_msync(room: Path) -> None:
    path = room / "file"
    path.write_bytes(bytes(2 * MIB))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[100:108] = b"shared!!"
        mapped[MIB : MIB + 4] = b"tail"
        mapped.flush()
        # Through a handle that does not use the page cache.
        code = "import os,sys;fd=os.open(sys.argv[1],os.O_RDONLY|os.O_DIRECT);" \
            "sys.stdout.buffer.write(os.pread(fd, 8, 100) + os.pread(fd, 4, 1 << 20))"  # fmt: skip
        assert run_python(code, str(path)).stdout == "shared!!tail"
    assert path.read_bytes()[MIB : MIB + 4] == b"tail"


def test_a_map_sees_what_another_handle_writes(room: Path) -> None:
    """A write-only handle goes past the page cache that the map shows."""
    path = room / "file"
    path.write_bytes(b"a" * 8192)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as mapped,
    ):
        assert mapped[4096:4100] == b"aaaa"
        with path.open("r+b") as other:
            writer = os.open(path, os.O_WRONLY)
            os.pwrite(writer, b"bbbb", 4096)
            os.close(writer)
            assert mapped[4096:4100] == b"bbbb"
            assert os.pread(other.fileno(), 4, 4096) == b"bbbb"


def test_a_reopened_file_shows_its_new_content(room: Path) -> None:
    path = room / "file"
    for turn in range(4):
        data = noise(MIB, seed=turn)
        path.write_bytes(data)
        for _ in range(2):  # the second time from pages that were kept
            assert path.read_bytes() == data


def test_times_have_nanoseconds(room: Path) -> None:
    path = room / "file"
    path.write_bytes(b"x")
    times = (1_600_000_000_123_456_789, 1_700_000_000_987_654_321)
    os.utime(path, ns=times)
    status = path.stat()
    assert (status.st_atime_ns, status.st_mtime_ns) == times
    os.utime(path, ns=(-1_500_000_001, -1))
    status = path.stat()
    assert (status.st_atime_ns, status.st_mtime_ns) == (-1_500_000_001, -1)
    before = path.stat().st_ctime_ns
    path.write_bytes(b"y")
    written = path.stat().st_mtime_ns
    os.utime(path)  # the kernel's clock and ours must be one
    assert before <= written <= path.stat().st_mtime_ns


def test_writing_moves_mtime_and_ctime(room: Path) -> None:
    path = room / "file"
    path.write_bytes(b"x")
    os.utime(path, ns=(0, 0))
    with path.open("ab") as file:
        file.write(b"y")
    assert path.stat().st_mtime_ns > 0
    os.utime(path, ns=(0, 0))
    os.truncate(path, 0)
    assert path.stat().st_mtime_ns > 0


def test_the_kernel_checks_permissions(room: Path) -> None:
    room.chmod(0o755)
    (room / "secret").write_bytes(b"root only")
    (room / "secret").chmod(0o600)
    (room / "public").write_bytes(b"for all")
    (room / "public").chmod(0o644)
    drop = room / "drop"
    drop.mkdir()
    drop.chmod(0o1777)
    (drop / "not yours").touch()
    code = f"""
import os
def refused(call, *arguments):
    try:
        call(*arguments)
    except PermissionError:
        return
    raise SystemExit(f"{{call}} {{arguments}} was allowed")
os.umask(0o027)
refused(open, {str(room / "secret")!r})
refused(open, {str(room / "public")!r}, "a")
refused(open, {str(room / "new")!r}, "w")
refused(os.chmod, {str(room / "public")!r}, 0o777)
refused(os.chown, {str(room / "public")!r}, 1234, -1)
refused(os.unlink, {str(drop / "not yours")!r})
assert open({str(room / "public")!r}).read() == "for all"
with open({str(drop / "mine")!r}, "w") as file:
    file.write("mine")
os.mkdir({str(drop / "dir")!r})
os.unlink({str(drop / "mine")!r})
with open({str(drop / "kept")!r}, "w") as file:
    pass
"""
    done = as_user(1234, code)
    assert done.returncode == 0, done.stderr
    status = (drop / "kept").stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 1234, 0o640)
    assert stat.S_IMODE((drop / "dir").stat().st_mode) == 0o750


def test_changes_take_privileges_away(room: Path) -> None:
    path = room / "file"
    changes: dict[str, Callable[[], object]] = {
        "write": lambda: path.write_bytes(b"x"),
        "append": lambda: run_python("open(__import__('sys').argv[1],'ab').write(b'y')", str(path)),
        "truncate": lambda: os.truncate(path, 0),
        "chown": lambda: os.chown(path, os.geteuid(), os.getegid()),
    }
    for name, change in changes.items():
        path.write_bytes(b"content")
        path.chmod(0o6755)
        assert stat.S_IMODE(path.stat().st_mode) == 0o6755
        change()
        assert stat.S_IMODE(path.stat().st_mode) == 0o755, name


def test_statfs_tells_the_truth(live: Live, room: Path) -> None:
    before = os.statvfs(live.path)
    assert before.f_namemax == 255
    assert before.f_bavail <= before.f_bfree <= before.f_blocks
    assert before.f_blocks * before.f_frsize < live.image.stat().st_size
    (room / "file").write_bytes(noise(8 * MIB))
    os.sync()
    with (room / "file").open("r+b") as file:
        os.fsync(file.fileno())
    after = os.statvfs(live.path)
    taken = (before.f_bavail - after.f_bavail) * after.f_frsize
    assert 8 * MIB <= taken < 9 * MIB
    # An estimate; what the log may add counts as metadata until the next snapshot.
    assert 0 <= before.f_ffree - after.f_ffree < 16
    shown = subprocess.run(["df", "--output=fstype", live.path], capture_output=True, check=True)
    assert b"fuse.retainzfs" in shown.stdout


def test_a_full_filesystem_says_so_and_lets_one_delete(fresh: Live) -> None:
    fresh.mount()
    block = noise(4 * MIB)
    written = []
    with pytest.raises(OSError, match="No space") as caught:  # noqa: PT012
        for number in range(100):
            path = fresh.path / f"file{number}"
            with path.open("wb") as file:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())
            written.append(path)
    assert caught.value.errno == errno.ENOSPC
    assert len(written) > 40
    for path in written:
        assert path.read_bytes() == block
    for path in written[::2]:
        path.unlink()
    (fresh.path / "again").write_bytes(block)
    assert (fresh.path / "again").read_bytes() == block


def test_locks_hold_between_processes(room: Path) -> None:
    path = room / "file"
    path.write_bytes(b"content")
    code = (
        "import fcntl, sys\n"
        "with open(sys.argv[1], 'r+b') as file:\n"
        "    getattr(fcntl, sys.argv[2])(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    )
    for name, lock in (("flock", fcntl.flock), ("lockf", fcntl.lockf)):
        with path.open("r+b") as file:
            lock(file, fcntl.LOCK_EX)
            assert "BlockingIOError" in run_python(code, str(path), name).stderr
            lock(file, fcntl.LOCK_UN)
            assert run_python(code, str(path), name).returncode == 0


def test_what_is_not_supported_says_so(room: Path) -> None:
    with pytest.raises(OSError, match="not supported") as caught:
        os.open(room, os.O_TMPFILE | os.O_WRONLY)
    assert caught.value.errno == errno.ENOTSUP
    path = room / "file"
    path.write_bytes(b"content")
    command = ["fallocate", "--length", "1M", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "not supported" in done.stderr
    assert path.read_bytes() == b"content"


def test_programs_are_told_to_use_large_buffers(room: Path) -> None:
    (room / "file").touch()
    assert (room / "file").stat().st_blksize == MIB


def test_read_ahead_was_raised(live: Live) -> None:
    status = os.stat(live.path)
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    if os.geteuid() != 0:
        pytest.skip("only root may set the read-ahead")
    assert Path("/sys/class/bdi", device, "read_ahead_kb").read_text() == f"{READ_AHEAD_KIB}\n"
