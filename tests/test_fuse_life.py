"""The life of a mount: remounts, kill -9, signals, busy unmounts, failures."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retainzfs import fsck, mkfs, mounts, unmounting
from retainzfs.errors import MountBusy, MountError
from tests.conftest import PATIENCE_S, Live

pytestmark = pytest.mark.fuse

MIB = 1 << 20


def noise(length: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length)


def test_everything_is_there_after_a_remount(fresh: Live) -> None:
    fresh.mount()
    root = fresh.path
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "large").write_bytes(noise(10 * MIB))
    (root / "small").write_bytes(b"small")
    (root / "small").chmod(0o640)
    os.utime(root / "small", ns=(123_456_789_012, 987_654_321_098))
    os.setxattr(root / "small", "user.colour", b"blue")
    os.link(root / "small", root / "linked")
    (root / "pointer").symlink_to("deep/er")
    with (root / "sparse").open("wb") as file:
        file.seek(5 << 30)
        file.write(b"end")
    for number in range(300):
        (root / f"many{number}").write_bytes(b"%d" % number)
    before = _picture(root)
    fresh.umount()
    assert os.listdir(root) == []
    fresh.mount()
    assert _picture(root) == before
    assert (root / "deep" / "er" / "large").read_bytes() == noise(10 * MIB)
    assert os.getxattr(root / "linked", "user.colour") == b"blue"
    with (root / "sparse").open("rb") as file:
        file.seek(5 << 30)
        assert file.read() == b"end"
    fresh.umount()
    report = fsck.check(str(fresh.image), scrub=True)
    assert report.findings == []


def _picture(root: Path) -> dict[str, tuple[object, ...]]:
    """Return everything that stat tells of a tree, but access times."""
    picture: dict[str, tuple[object, ...]] = {}
    for path in [root, *root.rglob("*")]:
        s = path.lstat()
        picture[str(path.relative_to(root))] = (
            s.st_ino, s.st_mode, s.st_nlink, s.st_uid, s.st_gid, s.st_size, s.st_blocks,
            s.st_mtime_ns, s.st_ctime_ns,
        )  # fmt: skip
    return picture


def test_killed_in_the_middle_of_a_save(fresh: Live) -> None:
    """What was closed in a stream, or synced, is there; the rest is whole or not there."""
    fresh.mount()
    run = fresh.path / "run"
    run.mkdir()
    for step in range(1, 5):
        (run / f"step-{step}.pt").write_bytes(noise(5 * MIB, seed=step))
    with (fresh.path / "synced").open("wb") as synced:
        synced.write(b"synced" * 1000)
        synced.flush()
        os.fsync(synced.fileno())
    (fresh.path / "tmp").write_bytes(noise(MIB))
    renamed = run / "step-5.pt"
    os.rename(fresh.path / "tmp", renamed)
    unfinished = os.open(run / "step-6.pt", os.O_WRONLY | os.O_CREAT)
    os.write(unfinished, noise(MIB))
    fresh.signal(signal.SIGKILL)
    with pytest.raises(OSError, match="not connected"):
        os.write(unfinished, noise(MIB))
    with pytest.raises(OSError, match="not connected"):
        os.close(unfinished)
    assert mounts.find_mount(str(fresh.path)) is not None, "the bare directory reappeared"
    with pytest.raises(OSError, match="not connected"):
        os.listdir(fresh.path)
    fresh.umount()

    report = fsck.check(str(fresh.image), scrub=True)
    assert not report.damaged, report.findings
    assert any("not unmounted cleanly" in finding.text for finding in report.findings)

    fresh.mount()
    for step in range(1, 5):
        assert (run / f"step-{step}.pt").read_bytes() == noise(5 * MIB, seed=step)
    assert (fresh.path / "synced").read_bytes() == b"synced" * 1000
    assert renamed.read_bytes() == noise(MIB)
    if (run / "step-6.pt").exists():
        assert noise(MIB).startswith((run / "step-6.pt").read_bytes())
    (run / "step-6.pt").write_bytes(noise(5 * MIB, seed=6))
    assert (run / "step-6.pt").read_bytes() == noise(5 * MIB, seed=6)
    fresh.umount()
    assert fsck.check(str(fresh.image), scrub=True).findings == []


def test_a_full_device_during_a_save(fresh: Live) -> None:
    """The write is told, older generations stay, and the retry works once there is room."""
    mkfs.make(str(fresh.image), size=64 * MIB, force=True)
    fresh.mount()
    run = fresh.path / "run"
    run.mkdir()
    saved = 0
    with pytest.raises(OSError, match="No space") as caught:  # noqa: PT012
        while True:
            _save(run / f"step-{saved + 1}.pt", 8 * MIB, seed=saved + 1)
            saved += 1
    assert caught.value.errno == errno.ENOSPC
    assert saved >= 4
    for _ in range(2):
        for step in range(1, saved + 1):
            assert (run / f"step-{step}.pt").read_bytes() == noise(8 * MIB, seed=step)
        states = {row["number"]: row["state"] for row in _generations(run)}
        assert states == dict.fromkeys(range(1, saved + 1), "complete") | {saved + 1: "incomplete"}
        fresh.umount()
        fresh.mount()
    (run / "step-1.pt").unlink()
    _save(run / f"step-{saved + 1}.pt", 8 * MIB, seed=saved + 1)
    for step in range(2, saved + 2):
        assert (run / f"step-{step}.pt").read_bytes() == noise(8 * MIB, seed=step)
    assert [row["state"] for row in _generations(run)] == ["complete"] * saved
    fresh.umount()
    assert fsck.check(str(fresh.image), scrub=True).findings == []


def _save(path: Path, length: int, seed: int) -> None:
    """Write as a trainer does; only a write may fail, not the close."""
    data = noise(length, seed)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for at in range(0, length, MIB):
            assert os.write(fd, data[at : at + MIB]) == MIB
    finally:
        os.close(fd)


def _generations(directory: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(os.getxattr(directory, "user.retainz.generations"))
    return rows


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_unmounts_cleanly(fresh: Live, number: signal.Signals) -> None:
    fresh.mount()
    (fresh.path / "file").write_bytes(noise(3 * MIB))
    fresh.signal(number)
    assert mounts.find_mount(str(fresh.path)) is None
    assert fsck.check(str(fresh.image)).findings == []
    fresh.mount()
    assert (fresh.path / "file").read_bytes() == noise(3 * MIB)


def test_unmounting_a_busy_mount_names_who_uses_it(fresh: Live) -> None:
    fresh.mount()
    (fresh.path / "file").write_bytes(b"content")
    with _sleeper(fresh.path / "file") as process:
        with pytest.raises(MountBusy) as caught:
            fresh.umount()
        assert f"pid {process.pid}" in str(caught.value)
        assert str(fresh.path / "file") in str(caught.value)
        fresh.check()
        assert (fresh.path / "file").read_bytes() == b"content"
        process.kill()
    fresh.umount()


def test_an_interrupted_busy_mount_stays(fresh: Live) -> None:
    fresh.mount()
    (fresh.path / "file").write_bytes(b"content")
    with _sleeper(fresh.path / "file") as process:
        os.kill(fresh.pid, signal.SIGINT)
        _wait_for(fresh, "busy")
        fresh.check()
        process.kill()
    fresh.umount()


def test_a_terminated_busy_mount_ends_all_the_same(fresh: Live) -> None:
    """A machine that goes down does not wait for a program that holds a file open."""
    fresh.mount()
    with (fresh.path / "file").open("wb", buffering=0) as file:
        file.write(noise(MIB))
        daemon = os.pidfd_open(fresh.pid)
        os.kill(fresh.pid, signal.SIGTERM)
        _wait_for(fresh, "detached")
        assert mounts.find_mount(str(fresh.path)) is None
        file.write(noise(MIB, seed=2))  # still served
        file.close()
        unmounting.wait(daemon, PATIENCE_S)
        os.close(daemon)
    assert fsck.check(str(fresh.image)).findings == []
    fresh.mount()
    assert (fresh.path / "file").read_bytes() == noise(MIB) + noise(MIB, seed=2)


class _sleeper:  # noqa: N801
    """A process that holds a file open."""

    def __init__(self, path: Path) -> None:
        code = "import sys; f = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> subprocess.Popen[str]:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "open\n"
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)


def _wait_for(live: Live, text: str) -> None:
    """Return when the daemon's log has the text; reading it to the end ends the wait too."""
    follow = subprocess.Popen(
        ["tail", "-n", "+1", "-F", str(live.log)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert follow.stdout is not None
        assert any(text in line for line in follow.stdout)
    finally:
        follow.kill()
        follow.communicate()


BROKEN_HANDLER = """
from retainzfs import fs
async def readlink(self, ino, ctx):
    raise KeyError("a mistake in a handler")
fs.Filesystem.readlink = readlink
"""


def test_a_mistake_stops_the_mount_for_good(fresh: Live) -> None:
    """The daemon ends, the mount stays dead: nobody must write to the directory below."""
    fresh.expected = ["stopped by a mistake", "Traceback"]
    fresh.mount(patch=BROKEN_HANDLER)
    (fresh.path / "link").symlink_to("target")
    with (fresh.path / "synced").open("wb") as file:
        file.write(b"content")
        file.flush()
        os.fsync(file.fileno())
    daemon = os.pidfd_open(fresh.pid)
    with pytest.raises(ConnectionAbortedError):
        os.readlink(fresh.path / "link")
    unmounting.wait(daemon, PATIENCE_S)
    os.close(daemon)
    with pytest.raises(OSError, match="not connected") as caught:
        (fresh.path / "new").write_bytes(b"lost?")
    assert caught.value.errno == errno.ENOTCONN
    assert fresh.log.read_text().count("KeyError: 'a mistake in a handler'") == 1
    fresh.umount()
    assert os.listdir(fresh.path) == [], "something was written below the mount"
    fresh.mount()
    assert (fresh.path / "synced").read_bytes() == b"content"
    assert os.readlink(fresh.path / "link") == "target"


BROKEN_COMMITTER = """
from retainzfs.committer import Committer
async def commit(self, *arguments, **more):
    raise AssertionError("a mistake in the background")
Committer._commit = commit
"""


def test_a_mistake_in_the_background_stops_the_mount_too(fresh: Live) -> None:
    fresh.expected = ["stopped by a mistake", "Traceback"]
    fresh.mount(patch=BROKEN_COMMITTER)
    daemon = os.pidfd_open(fresh.pid)
    with pytest.raises(OSError, match=r"not connected|connection abort"):
        _write_and_sync(fresh.path / "file")
    unmounting.wait(daemon, PATIENCE_S)
    os.close(daemon)
    with pytest.raises(OSError, match="not connected"):
        (fresh.path / "new").touch()
    assert "a mistake in the background" in fresh.log.read_text()


def _write_and_sync(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.write(fd, b"content")
        os.fsync(fd)
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


FAILING_DEVICE = """
import os
from retainzfs.device.emulated import EmulatedDevice
from retainzfs.errors import DeviceError
real = EmulatedDevice.flush
async def flush(self):
    if os.path.exists(self.name + ".fail"):
        raise DeviceError(self.name, "flush", "the disk is gone")
    await real(self)
EmulatedDevice.flush = flush
"""


def test_a_failed_device_refuses_writes_and_serves_reads(fresh: Live) -> None:
    fresh.expected = ["the disk is gone"]
    fresh.mount(patch=FAILING_DEVICE)
    (fresh.path / "old").write_bytes(noise(MIB))
    with (fresh.path / "old").open("rb") as file:
        os.fsync(file.fileno())
    Path(f"{fresh.image}.fail").touch()
    with (fresh.path / "new").open("wb", buffering=0) as file:
        file.write(b"content")
        with pytest.raises(OSError, match="Input/output error"):
            os.fsync(file.fileno())
        with pytest.raises(OSError, match="Read-only"):
            file.write(b"more")
    fresh.check()
    with pytest.raises(OSError, match="Read-only"):
        (fresh.path / "new2").touch()
    assert (fresh.path / "old").read_bytes() == noise(MIB)
    with pytest.raises(MountError, match="could not write any more"):
        fresh.umount()
    assert mounts.find_mount(str(fresh.path)) is None
    Path(f"{fresh.image}.fail").unlink()
    fresh.mount()
    assert (fresh.path / "old").read_bytes() == noise(MIB)


def test_a_killed_writer_completes_nothing(live: Live) -> None:
    """Its file is closed by the kernel, at whatever length; what the format is does not show."""
    run = live.path / "killed"
    run.mkdir()
    os.setxattr(run, "user.retainz.keep_last", b"2")
    (run / "step-1.msgpack").write_bytes(noise(MIB))
    code = (
        "import os, signal, sys; f = open(sys.argv[1], 'wb', buffering=0);"
        "f.write(os.urandom(1 << 20)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(run / "step-2.msgpack")], check=False)
    assert ended.returncode == -signal.SIGKILL
    rows = json.loads(os.getxattr(run, "user.retainz.generations"))
    assert [row["state"] for row in rows] == ["complete", "incomplete"]
    assert "killed" in rows[1]["reason"]
