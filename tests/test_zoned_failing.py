"""Volumes on what an NVMe drive of QEMU cannot show: conventional zones, zones that turn read-only
or offline, a drive that vanishes. On devices of the null_blk driver."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retainzfs import fsck, mkfs, mounts
from retainzfs.device import BLOCK, Condition, Wanted, open_target
from retainzfs.device.sysfs import PLUGGED
from retainzfs.errors import (
    BadGeometry,
    MountError,
    RetainzError,
    TargetBusy,
    TargetHoldsData,
)
from tests import zonereport
from tests.conftest import PATIENCE_S, looked_after, retainzfs
from tests.device_backends import MIB
from tests.nullblk import NullBlk, null_blk
from tests.test_fuse_trouble import save, zones_of
from tests.test_zoned_volume import Zoned, wait_until

pytestmark = [pytest.mark.zoned, pytest.mark.fuse]

ZONES = 48  # four of them for metadata
CONVENTIONAL = 5
KEEPS_ORDER = tuple(map(int, os.uname().release.split(".")[:2])) >= PLUGGED
STUCK = "zone {} is read-only; a mount drains it"
F2FS_MAGIC = (0xF2F52010).to_bytes(4, "little")
TURNED = (Condition.READ_ONLY, Condition.OFFLINE)


@pytest.fixture
def disk() -> Iterator[NullBlk]:
    """The zones of a small ZNS drive: a capacity below the size, and limits."""
    with null_blk(
        zones=ZONES, zone_size=2 * MIB, zone_capacity=MIB, max_open=12, max_active=12
    ) as device:
        yield device


@pytest.fixture
def smr() -> Iterator[NullBlk]:
    """As SMR disks are: conventional zones first, a limit of open zones only."""
    with null_blk(zones=ZONES, zone_size=MIB, conventional=CONVENTIONAL, max_open=8) as device:
        yield device


# --- mkfs, and who else uses the device ----------------------------------------------------------


def test_mkfs_refuses_what_it_cannot_do_and_changes_nothing(disk: NullBlk) -> None:
    mkfs.make(disk.target)
    disk.write(20, bytes(8192))
    before = zonereport.blkzone(disk.target)
    with pytest.raises(TargetHoldsData, match=r"already holds .*--force"):
        mkfs.make(disk.target)
    refused: list[tuple[Wanted, str]] = [  # whatever the device holds
        ({"zone_size": 4 * MIB}, "zone size of 4194304 wanted, but this zoned device has 2097152"),
        ({"zone_capacity": 2 * MIB}, "this zoned device has 1048576"),
        ({"max_open": 6}, "max open of 6 wanted, but this zoned device has 12"),
        ({"max_active": 14}, "this zoned device has 12"),
        ({"size": 64 * MIB}, "takes no --size; leave it out"),
    ]
    for wanted, text in refused:
        with pytest.raises(BadGeometry, match=text):
            mkfs.make(disk.target, **wanted)
    assert zonereport.blkzone(disk.target) == before
    assert fsck.check(disk.target).findings == []


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"zones": 8, "zone_size": MIB}, "8 zones; the least is 16"),
        ({"max_active": 4, "max_open": 4}, "4 active zones at most; the least is 6"),
        ({"max_open": 3}, "3 open zones at most; the least is 4"),
    ],
)
def test_zones_for_no_volume(shape: Any, text: str) -> None:
    with null_blk(**shape) as disk:
        for call in (mkfs.make, open_target):
            with pytest.raises(BadGeometry, match=f"{disk.target}: {text}"):
                call(disk.target)


def test_mkfs_leaves_no_trace_of_another_filesystem_in_conventional_zones(smr: NullBlk) -> None:
    """Whoever believes it would mount or mend that one, over our zones."""
    superblock = bytearray(8192)
    superblock[1024:1028] = F2FS_MAGIC
    smr.write(-CONVENTIONAL, bytes(superblock))
    with pytest.raises(TargetHoldsData, match="already holds an f2fs filesystem"):
        mkfs.make(smr.target)
    mkfs.make(smr.target, force=True)
    with open(smr.target, "rb") as device:
        assert device.read(len(superblock)) == bytes(len(superblock))
    with pytest.raises(TargetHoldsData, match=f"already holds data in 1 of {ZONES} zones"):
        mkfs.make(smr.target)


@pytest.mark.parametrize("turned", TURNED, ids=lambda turned: turned.name.lower())
@pytest.mark.parametrize("zone", [0, 3])
def test_mkfs_needs_the_metadata_zones(disk: NullBlk, zone: int, turned: Condition) -> None:
    disk.turn(zone, turned)
    before = zonereport.blkzone(disk.target)
    word = turned.name.lower().replace("_", "-")
    with pytest.raises(BadGeometry, match=f"zone {zone} is {word}, .* needed for metadata"):
        mkfs.make(disk.target, force=True)
    assert zonereport.blkzone(disk.target) == before


def test_one_program_at_a_time_has_the_device(disk: NullBlk) -> None:
    mkfs.make(disk.target)
    device = open_target(disk.target)
    for readonly in (False, True):
        with pytest.raises(TargetBusy, match="opened exclusively by another program"):
            open_target(disk.target, readonly=readonly)
    device.close()
    fsck.check(disk.target)


# --- volumes -------------------------------------------------------------------------------------


@pytest.fixture
def volume(disk: NullBlk) -> Iterator[OnNullBlk]:
    with looked_after(lambda base: OnNullBlk(base, disk)) as live:
        yield live


class OnNullBlk(Zoned):
    def __init__(self, base: Path, disk: NullBlk) -> None:
        self.disk = disk
        super().__init__(base)

    def format(self, *_: object) -> None:
        self.image = Path(self.disk.target)
        mkfs.make(str(self.image))

    def check(self) -> None:
        """Without looking at the zones: a mount may be draining some."""
        super(Zoned, self).check()

    def zones(self) -> Any:
        return json.loads((self.path / ".retainz/zones.json").read_bytes())

    def counted(self, condition: str) -> int:
        return int(self.status()["zones"][condition])

    def written_zone(self, but: list[int]) -> int:
        """A zone of data that is being written now; looked for while saves go on, since a full one
        may not have been followed by another yet."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for zone in self.zones():
                if zone["condition"] == "open" and zone["index"] > 3 and zone["index"] not in but:
                    return int(zone["index"])
        raise AssertionError(f"no zone was written within {PATIENCE_S:g} s")

    def save(self, name: str, seed: int, length: int = 300_000) -> bytes:
        data = random.Random(seed).randbytes(length)
        save(self.path / name, data)
        return data

    def check_files(self, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            assert (self.path / name).read_bytes() == data, name

    def zones_of(self, name: str) -> list[int]:
        return zones_of(self.path / name)


def test_conventional_zones_are_left_alone(smr: NullBlk) -> None:
    ours = random.Random(1).randbytes(CONVENTIONAL * MIB)
    fd = os.open(smr.target, os.O_WRONLY)
    os.write(fd, ours)
    os.fsync(fd)
    os.close(fd)
    with looked_after(lambda base: OnNullBlk(base, smr)) as volume:
        volume.mount()
        files = {f"f{n}": volume.save(f"f{n}", n, MIB) for n in range(10)}
        shown = retainzfs("zones", volume.path).stdout
        assert sum(map(int, re.findall(r"(\d+) zones", shown))) == ZONES
        assert [zone["index"] for zone in volume.zones()] == list(range(ZONES))
        raw = Path(smr.target).read_bytes()
        (first, *_) = volume.zones_of("f0")
        at = (CONVENTIONAL + first) * MIB
        assert files["f0"][:BLOCK] in raw[at : at + MIB]
        volume.umount()
        volume.mount()
        volume.check_files(files)
        smr.turn(first, Condition.READ_ONLY)
        volume.expected = [f"zone {first}: the device says that it is read-only"]
        volume.settle()
        volume.check_files(files)
        assert f"{smr.target}: zone {first}: " in volume.log.read_text()
        volume.umount()
        report = fsck.check(smr.target, scrub=True)
        assert [f.text for f in report.findings] == [
            f"zone {first} is read-only; a mount drains it"
        ]
    assert Path(smr.target).read_bytes()[: len(ours)] == ours


def test_zones_that_turn_read_only_in_the_middle_of_saves(volume: OnNullBlk) -> None:
    volume.expected = ["append to", "the device says that it is read-only"]
    volume.mount()
    files: dict[str, bytes] = {}
    saved = threading.Semaphore(0)
    enough = threading.Event()

    def work(writer: int) -> None:
        for number in range(30):
            if enough.is_set():
                return
            name = f"{writer}.{number}"
            files[name] = volume.save(name, 100 * writer + number)
            saved.release()

    threads = [threading.Thread(target=work, args=[writer]) for writer in range(2)]
    for thread in threads:
        thread.start()
    turned: list[int] = []
    for _ in range(3):
        for _ in range(6):
            assert saved.acquire(timeout=PATIENCE_S)
        turned.append(volume.written_zone(turned))
        volume.disk.turn(turned[-1], Condition.READ_ONLY)
    for _ in range(4):
        assert saved.acquire(timeout=PATIENCE_S)
    enough.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    volume.check_files(files)
    assert len(files) >= 22
    volume.settle()
    wait_until(
        lambda: not any(volume.zones()[zone]["live"] for zone in turned), "the zones are drained"
    )
    assert volume.counted("read_only") == 3
    assert volume.status()["failed"] is None
    volume.check_files(files)
    assert not any(set(turned) & set(volume.zones_of(name)) for name in files)
    zonereport.check_mount(volume.path)
    volume.umount()
    report = fsck.check(volume.disk.target, scrub=True)
    assert not report.damaged
    assert len([f for f in report.findings if "is read-only" in f.text]) == 3
    volume.mount()
    volume.check_files(files)


@pytest.mark.parametrize("when", ["mounted", "before"])
def test_an_offline_zone_costs_its_own_files_only(volume: OnNullBlk, when: str) -> None:
    volume.expected = ["the device says that it is", "bytes .* cannot be read"]
    volume.mount()
    files = {f"f{n}": volume.save(f"f{n}", n, 700_000) for n in range(6)}
    [gone] = volume.zones_of("f0")[:1]
    [stuck] = [z for z in volume.zones_of("f5") if z != gone][:1]
    lost = {name for name in files if gone in volume.zones_of(name)}
    rest = {name: data for name, data in files.items() if name not in lost}
    assert rest
    if when == "before":
        volume.umount()
    volume.disk.turn(gone, Condition.OFFLINE)
    volume.disk.turn(stuck, Condition.READ_ONLY)
    if when == "before":
        report = fsck.check(volume.disk.target)
        told = [f.text for f in report.findings]
        assert report.damaged
        assert [text for text in told if f"are lost: zone {gone} is offline" in text], told
        assert STUCK.format(stuck) in told
        volume.mount()
    for name in lost:
        with pytest.raises(OSError, match="Input/output error"):
            (volume.path / name).read_bytes()
        assert f"/{name}" in volume.log.read_text()
    assert f"zone {gone}" in volume.log.read_text()
    volume.check_files(rest)
    volume.settle()
    wait_until(lambda: not volume.zones()[stuck]["live"], "the read-only zone is drained")
    assert (volume.counted("read_only"), volume.counted("offline")) == (1, 1)
    assert "1 zones read-only, 1 zones offline" in retainzfs("status", volume.path).stdout
    rest["new"] = volume.save("new", 99, 2 * MIB)
    volume.check_files(rest)
    volume.umount()
    damaged = fsck.check(volume.disk.target, scrub=True)
    assert {f.text.split(":")[0] for f in damaged.findings if f.damage} == {
        f"/{name}" for name in lost
    }


@pytest.mark.parametrize("turned", TURNED, ids=lambda turned: turned.name.lower())
def test_a_metadata_zone_that_turns_ends_writing(volume: OnNullBlk, turned: Condition) -> None:
    """What stands behind acknowledged metadata cannot go elsewhere; a mount reads it, if it can."""
    volume.expected = ["append to", "/more: its last changes are lost"]
    volume.mount()
    files = {f"f{n}": volume.save(f"f{n}", n) for n in range(3)}
    [zone] = [z["index"] for z in volume.zones()[:4] if z["condition"] in ("open", "closed")]
    volume.disk.turn(zone, turned)
    with pytest.raises(OSError, match=r"Input/output error|Read-only") as caught:
        volume.save("more", 9)
    assert caught.value.errno in (errno.EIO, errno.EROFS)
    assert f"zone {zone}" in str(volume.status()["failed"])
    volume.check_files(files)
    with pytest.raises(MountError):
        volume.umount()
    assert mounts.find_mount(str(volume.path)) is None
    if turned is Condition.OFFLINE:
        with pytest.raises(RetainzError, match=f"damaged: metadata zone {zone} is offline"):
            volume.mount()
        return
    volume.mount()
    volume.check_files(files)
    files["more"] = volume.save("more", 9)
    assert volume.zones()[zone]["condition"] == "read_only"
    volume.umount()
    assert not fsck.check(volume.disk.target, scrub=True).damaged
    volume.mount()
    volume.check_files(files)


@pytest.mark.parametrize("turned", TURNED, ids=lambda turned: turned.name.lower())
def test_a_metadata_zone_that_nothing_needs_may_turn(volume: OnNullBlk, turned: Condition) -> None:
    volume.mount()
    files = {f"f{n}": volume.save(f"f{n}", n) for n in range(3)}
    [unused, *_] = [z["index"] for z in volume.zones()[:4] if z["condition"] == "empty"]
    volume.disk.turn(unused, turned)
    files["more"] = volume.save("more", 9)
    volume.umount()
    volume.mount()
    volume.check_files(files)
    files["again"] = volume.save("again", 10)
    assert volume.zones()[unused]["condition"] == turned.name.lower()
    volume.umount()
    assert not fsck.check(volume.disk.target, scrub=True).damaged


def test_who_uses_a_mounted_device(volume: OnNullBlk) -> None:
    volume.mount()
    for call in (open_target, mkfs.make, fsck.check):
        with pytest.raises(TargetBusy, match=f"mounted on {volume.path}"):
            call(volume.disk.target)


def test_a_drive_that_vanishes_ends_the_mount(volume: OnNullBlk) -> None:
    volume.expected = ["the device is gone"]
    volume.mount()
    volume.save("old", 1)
    volume.disk.vanish()
    with pytest.raises(OSError, match=r"Input/output error|Read-only"):
        volume.save("new", 2)
    with pytest.raises(OSError, match="Read-only"):
        (volume.path / "more").touch()
    told = [line for line in volume.log.read_text().splitlines() if " ERROR " in line]
    assert len(told) == 1, told
    with pytest.raises(MountError, match="the device is gone"):
        super(Zoned, volume).umount()
    assert mounts.find_mount(str(volume.path)) is None
