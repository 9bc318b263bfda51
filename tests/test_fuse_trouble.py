"""A failing device behind a real mount: what programs, commands and the log say."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from retainzfs import mkfs, mounts
from retainzfs.errors import MountError
from tests.conftest import PATIENCE_S, Live, retainzfs

pytestmark = pytest.mark.fuse

MIB = 1 << 20

# The emulated device of the daemon fails as the files beside the image say.
FAILING = """
import errno, os
from retainzfs.device import Condition
from retainzfs.device.aio import AsyncEngine
from retainzfs.device.emulated import EmulatedDevice
real = AsyncEngine.append
def append(self, fd, offset, data, header=b"", zone=0, ended=None):
    name = os.readlink(f"/proc/self/fd/{fd}")
    if ended is not None and zone >= 4 and os.path.exists(name + ".fail"):
        if os.path.getsize(name + ".fail"):
            os.truncate(name + ".fail", os.path.getsize(name + ".fail") - 1)
        else:
            os.unlink(name + ".fail")
        fd = -1
    return real(self, fd, offset, data, header, zone, ended)
AsyncEngine.append = append
report = EmulatedDevice.report
def turned(self, zones=None):
    if os.path.exists(self.name + ".turn"):
        with open(self.name + ".turn") as file:
            zone, condition = file.read().split()
        self.rules.set_condition(int(zone), Condition[condition])
        os.unlink(self.name + ".turn")
    return report(self, zones)
EmulatedDevice.report = turned
"""


def noise(length: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length)


def zones_of(path: Path) -> list[int]:
    zones: list[int] = json.loads(os.getxattr(path, "user.retainz.zones"))
    return zones


def status(live: Live) -> dict[str, object]:
    told: dict[str, object] = json.loads((live.path / ".retainz/stats.json").read_bytes())
    return told


def save(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fail_appends(live: Live, times: int) -> None:
    Path(f"{live.image}.fail").write_bytes(bytes(times - 1))


def test_a_failed_write_is_no_ones_trouble(fresh: Live) -> None:
    fresh.expected = ["append to zone"]
    fresh.mount(patch=FAILING)
    save(fresh.path / "before", noise(MIB))
    fail_appends(fresh, 2)
    save(fresh.path / "save", noise(8 * MIB, 2))
    assert (fresh.path / "save").read_bytes() == noise(8 * MIB, 2)
    assert status(fresh)["write_errors"]
    assert status(fresh)["failed"] is None
    shown = retainzfs("status", fresh.path).stdout
    assert "writes failed and went elsewhere" in shown
    fresh.umount()
    fresh.mount()
    assert (fresh.path / "before").read_bytes() == noise(MIB)
    assert (fresh.path / "save").read_bytes() == noise(8 * MIB, 2)
    assert retainzfs("umount", fresh.path).returncode == 0
    assert retainzfs("fsck", fresh.image, "--scrub").returncode == 0


def test_a_read_only_zone_is_drained_and_an_offline_one_lost(fresh: Live) -> None:
    fresh.expected = ["the device says that it is", "lost: bytes .* cannot be read"]
    fresh.mount(patch=FAILING)
    save(fresh.path / "kept", noise(MIB))
    save(fresh.path / "other", noise(MIB, 2))
    (zone,) = zones_of(fresh.path / "kept")
    Path(f"{fresh.image}.turn").write_text(f"{zone} READ_ONLY")
    assert retainzfs("gc", fresh.path).returncode == 0
    assert zone not in zones_of(fresh.path / "kept")
    assert (fresh.path / "kept").read_bytes() == noise(MIB)
    save(fresh.path / "lost", noise(MIB, 3))
    (gone,) = zones_of(fresh.path / "lost")
    before = {name for name in ("kept", "other") if gone not in zones_of(fresh.path / name)}
    Path(f"{fresh.image}.turn").write_text(f"{gone} OFFLINE")
    assert retainzfs("gc", fresh.path).returncode == 0
    with pytest.raises(OSError, match="Input/output error"):
        (fresh.path / "lost").read_bytes()
    assert f"offline; extent: file block 0, zone {gone}," in fresh.log.read_text()
    assert before
    for name in before:
        assert (fresh.path / name).read_bytes() == noise(MIB, 1 if name == "kept" else 2)
    zones = json.loads(retainzfs("status", fresh.path, "--json").stdout)["zones"]
    assert (zones["read_only"], zones["offline"]) == (1, 1)
    assert "1 zones read-only, 1 zones offline" in retainzfs("status", fresh.path).stdout
    assert "x offline" in retainzfs("zones", fresh.path).stdout
    fresh.umount()
    checked = retainzfs("fsck", fresh.image)
    assert checked.returncode == 3
    assert f"/lost: bytes 0 to {MIB} are lost: zone {gone} is offline" in checked.stdout
    assert f"note: zone {zone} is read-only; a mount drains it" in checked.stdout


def test_too_many_errors_stop_writing_and_say_what_to_do(fresh: Live) -> None:
    fresh.expected = ["append to zone", "more than 16 errors", "refuses commands"]
    fresh.mount(patch=FAILING)
    save(fresh.path / "old", noise(MIB))
    fail_appends(fresh, 1000)
    seen = set()
    for number in range(20):
        try:
            save(fresh.path / f"new{number}", noise(20_000))
        except OSError as error:
            seen.add(error.errno)
    assert seen == {errno.EIO, errno.EROFS}
    assert "replace this one" in str(status(fresh)["failed"])
    assert "FAILED" in retainzfs("status", fresh.path).stdout
    assert (fresh.path / "old").read_bytes() == noise(MIB)
    ended = retainzfs("umount", fresh.path)
    assert ended.returncode == 1
    assert "more than 16 errors" in ended.stderr
    assert mounts.find_mount(str(fresh.path)) is None
    fresh.mount()
    assert (fresh.path / "old").read_bytes() == noise(MIB)


def test_an_unmount_that_cannot_write_everything_says_so(fresh: Live) -> None:
    fresh.expected = ["append to zone", "/unsynced"]
    fresh.mount(patch=FAILING)
    save(fresh.path / "old", noise(MIB))
    (fresh.path / "unsynced").write_bytes(noise(20_000))
    fail_appends(fresh, 5)
    ended = retainzfs("umount", fresh.path)
    assert ended.returncode == 1
    assert "not everything could be written" in ended.stderr
    assert mounts.find_mount(str(fresh.path)) is None
    assert "/unsynced: its last changes are lost" in fresh.log.read_text()


@contextlib.contextmanager
def loop_device(backing: Path) -> Iterator[str]:
    """Yield a block device with the file behind it."""
    made = subprocess.run(
        ["losetup", "--find", "--show", str(backing)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    if os.geteuid() != 0:
        pytest.skip("only root can make a loop device")
    backing = tmp_path / "backing"
    backing.touch()
    os.truncate(backing, 128 * MIB)
    with loop_device(backing) as device:
        mkfs.make(device)
        yield device, backing


def test_a_device_that_vanishes_ends_every_call_and_the_mount(
    fresh: Live, loop: tuple[str, Path]
) -> None:
    device, backing = loop
    fresh.image = Path(device)
    fresh.expected = ["the device is gone"]
    fresh.mount()
    old = fresh.path / "old"
    save(old, noise(4 * MIB))
    fd = os.open(old, os.O_RDONLY)
    ends: list[int | None] = []

    def write(number: int) -> None:
        try:
            with (fresh.path / f"new{number}").open("wb", buffering=0) as file:
                while True:
                    file.write(noise(MIB))
                    os.fsync(file.fileno())
                    writing.set()
        except OSError as error:
            ends.append(error.errno)

    writing = threading.Event()
    threads = [threading.Thread(target=write, args=[n], daemon=True) for n in range(3)]
    for thread in threads:
        thread.start()
    assert writing.wait(PATIENCE_S)
    os.truncate(backing, 0)
    subprocess.run(["losetup", "--set-capacity", device], check=True)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a writer hangs"
    assert len(ends) == 3
    assert set(ends) <= {errno.EIO, errno.EROFS}
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    with pytest.raises(OSError, match="Input/output error"):
        os.pread(fd, 4096, 2 * MIB)
    os.close(fd)
    with pytest.raises(OSError, match="Read-only"):
        (fresh.path / "more").touch()
    told = [line for line in fresh.log.read_text().splitlines() if " ERROR " in line]
    assert len(told) == 1, told
    assert "Traceback" not in fresh.log.read_text()
    with pytest.raises(MountError, match=f"could not write any more: {device}: the device is gone"):
        fresh.umount()
    assert mounts.find_mount(str(fresh.path)) is None
