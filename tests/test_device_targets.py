"""Opening and formatting targets: sizes, what is refused, what is left alone, who uses them."""

import errno
import os
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retainzfs.device import BLOCK, Condition, Device, Geometry, create_target, open_target, targets
from retainzfs.device.contents import MAGICS, Magic
from retainzfs.device.memory import MemoryDevice
from retainzfs.device.targets import plan_geometry
from retainzfs.errors import (
    BadGeometry,
    Damaged,
    DeviceError,
    ForeignTarget,
    TargetBusy,
    TargetHoldsData,
    TargetMissing,
    TargetTooSmall,
    UsageError,
)
from tests.device_backends import (
    KIB,
    MIB,
    bytes_of,
    file_size_limit,
    formatted,
    random_blocks,
    started,
    used,
)

pytestmark = pytest.mark.volume

GIB = 1 << 30


def create(path: Path, **options: Any) -> Device:
    """Formatted and let go again."""
    device = create_target(str(path), **options)
    device.close()
    return device


# --- geometry -----------------------------------------------------------------------------------


@pytest.mark.pure
class TestGeometry:
    @pytest.mark.parametrize(
        ("size", "zone_size", "count"),
        [
            (5 * MIB, 256 * KIB, 16),
            (16 * MIB, 256 * KIB, 60),
            (17 * MIB, 256 * KIB, 64),
            (33 * MIB, 512 * KIB, 64),
            (GIB, 8 * MIB, 127),
            (4 * GIB - 1, 32 * MIB, 127),
            (4 * GIB, 64 * MIB, 63),
            (8 * GIB, 64 * MIB, 127),
            (2048 * GIB, 64 * MIB, 32767),
        ],
    )
    def test_defaults(self, size: int, zone_size: int, count: int) -> None:
        assert plan_geometry("t", size, {}) == Geometry(zone_size, zone_size, count, 8, 14)

    def test_without_a_head(self) -> None:
        assert plan_geometry("t", 16 * MIB, {}, headless=True).zone_count == 64

    @pytest.mark.parametrize(
        ("options", "limits"),
        [
            ({}, (8, 14)),
            ({"max_active": 6}, (6, 6)),
            ({"max_active": 0}, (8, 0)),
            ({"max_open": 0}, (0, 14)),
            ({"max_open": 20}, (20, 20)),
            ({"max_open": 4, "max_active": 6}, (4, 6)),
            ({"max_open": 0, "max_active": 0}, (0, 0)),
        ],
    )
    def test_limits(self, options: Any, limits: tuple[int, int]) -> None:
        geometry = plan_geometry("t", GIB, options)
        assert (geometry.max_open, geometry.max_active) == limits

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"zone_size": MIB + 1}, "zone size of 1048577 bytes is not a multiple of 4096"),
            ({"zone_size": 128 * KIB}, "zone size of 131072 bytes; the least is 262144"),
            ({"zone_size": 0}, "the least is"),
            ({"zone_size": -MIB}, "the least is"),
            ({"zone_capacity": 300_000}, "zone capacity of 300000 bytes is not a multiple"),
            ({"zone_capacity": BLOCK}, "zone capacity of 4096 bytes; the least is"),
            ({"zone_size": MIB, "zone_capacity": 2 * MIB}, "above the zone size of 1048576"),
            ({"max_open": 3}, "3 open zones at most; the least is 4"),
            ({"max_active": 5}, "5 active zones at most; the least is 6"),
            ({"max_open": -1}, "-1 open zones"),
            ({"max_open": 9, "max_active": 8}, "9 open zones, but only 8 active ones"),
        ],
    )
    def test_bad(self, options: Any, text: str) -> None:
        with pytest.raises(BadGeometry, match=text):
            plan_geometry("t", GIB, options)

    @pytest.mark.parametrize(
        ("size", "options", "headless", "minimum"),
        [
            (5 * MIB - 1, {}, False, 5 * MIB),
            (0, {}, False, 5 * MIB),
            (GIB, {"zone_size": 64 * MIB}, False, GIB + MIB),
            (15 * MIB, {"zone_size": MIB}, True, 16 * MIB),
        ],
    )
    def test_too_small(self, size: int, options: Any, headless: bool, minimum: int) -> None:
        with pytest.raises(TargetTooSmall, match=f"the minimum with these zones is {minimum} "):
            plan_geometry("t", size, options, headless=headless)
        assert plan_geometry("t", minimum, options, headless=headless).zone_count == 16


# --- memory targets -----------------------------------------------------------------------------


@pytest.mark.pure
@pytest.mark.parametrize(
    ("target", "size"),
    [("mem:64M", 64 * MIB), ("mem:64MiB", 64 * MIB), ("mem:16777216", 16 * MIB), ("mem:1G", GIB)],
)
def test_memory_targets(target: str, size: int) -> None:
    device = open_target(target)
    assert isinstance(device, MemoryDevice)
    assert device.name == target
    assert device.geometry == plan_geometry(target, size, {}, headless=True)
    assert device is not open_target(target)


@pytest.mark.pure
@pytest.mark.parametrize("target", ["mem:", "mem:x", "mem:64X", "mem:-1", "mem:1.5G", "mem:64m"])
def test_memory_targets_of_no_size(target: str) -> None:
    with pytest.raises(UsageError, match="write it as mem:256M"):
        open_target(target)


@pytest.mark.pure
def test_memory_target_with_a_geometry() -> None:
    device = create_target("mem:64M", zone_size=MIB, zone_capacity=512 * KIB, max_open=4)
    assert device.geometry == Geometry(MIB, 512 * KIB, 64, 4, 14)


# --- images -------------------------------------------------------------------------------------


def test_a_new_image_is_sparse_and_has_its_size(tmp_path: Path) -> None:
    path = tmp_path / "image"
    create(path, size=64 * MIB + 12345)
    assert path.stat().st_size == 64 * MIB + 12345
    assert used(path) <= 2 * MIB


def test_a_preallocated_image(tmp_path: Path) -> None:
    path = tmp_path / "image"
    create(path, size=16 * MIB, preallocate=True)
    assert path.stat().st_size == 16 * MIB
    assert used(path) >= 16 * MIB


def test_a_created_device_is_the_opened_one(tmp_path: Path) -> None:
    path = tmp_path / "image"
    geometry = Geometry(512 * KIB, 256 * KIB, 30, 5, 7)
    created = create(
        path, size=16 * MIB, zone_size=512 * KIB, zone_capacity=256 * KIB, max_open=5, max_active=7
    )
    opened = open_target(str(path))
    opened.close()
    assert created.geometry == opened.geometry == geometry
    assert created.report() == opened.report()
    assert created.name == opened.name == str(path)


def test_an_existing_blank_image_keeps_its_size(tmp_path: Path) -> None:
    path = tmp_path / "image"
    with path.open("wb") as file:
        file.truncate(8 * MIB)
    assert create(path).geometry.zone_count == 28
    assert path.stat().st_size == 8 * MIB


@pytest.mark.parametrize("size", [6 * MIB, 12 * MIB])
def test_an_existing_blank_image_takes_the_size_given(tmp_path: Path, size: int) -> None:
    path = tmp_path / "image"
    path.write_bytes(bytes(8 * MIB))
    create(path, size=size)
    assert path.stat().st_size == size


async def test_formatting_again_empties(tmp_path: Path) -> None:
    path = tmp_path / "image"
    formatted(path).close()
    async with started(path) as device:
        for zone in range(16):
            await device.append(zone, 0, random_blocks(64))
        await device.flush()
    assert used(path) >= 5 * MIB
    with pytest.raises(TargetHoldsData, match="a retainzfs filesystem"):
        create(path)
    create(path, force=True)
    assert used(path) <= 2 * MIB
    async with started(path) as device:
        assert {zone.condition for zone in device.report()} == {Condition.EMPTY}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"size": MIB}, TargetTooSmall),
        ({"size": 8 * MIB, "max_open": 1}, BadGeometry),
        ({}, TargetMissing),
    ],
)
def test_a_refusal_creates_nothing(
    tmp_path: Path, options: dict[str, int], error: type[Exception]
) -> None:
    with pytest.raises(error):
        create(tmp_path / "image", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_host_error_creates_nothing(tmp_path: Path) -> None:
    with (
        file_size_limit(6 * MIB),
        pytest.raises(DeviceError, match="format: File too large") as caught,
    ):
        create(tmp_path / "image", size=8 * MIB)
    assert caught.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["posix_fallocate", "fdatasync"])
def test_a_host_error_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "image"
    path.write_bytes(os.urandom(6 * MIB))
    before = bytes_of(path)
    real = getattr(os, failing)
    calls = []

    def fail_once(*arguments: int) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "")
        real(*arguments)

    monkeypatch.setattr(os, failing, fail_once)
    with pytest.raises(DeviceError, match="format: No space left on device"):
        create(path, size=12 * MIB, force=True, preallocate=True)
    assert bytes_of(path) == before


def test_an_unwritable_directory(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="open: No such file or directory"):
        create(tmp_path / "missing" / "image", size=8 * MIB)


# --- missing, foreign, busy ---------------------------------------------------------------------


def test_missing(tmp_path: Path) -> None:
    path = tmp_path / "image"
    with pytest.raises(TargetMissing, match="no such target"):
        open_target(str(path))
    path.symlink_to("nowhere")
    with pytest.raises(TargetMissing):
        open_target(str(path))
    with pytest.raises(TargetMissing):
        create(path, size=8 * MIB)
    assert not path.exists()


@pytest.mark.parametrize("target", ["/", "/dev/null"])
def test_neither_file_nor_block_device(target: str) -> None:
    with pytest.raises(ForeignTarget, match="neither a regular file nor a block device"):
        open_target(target)
    with pytest.raises(ForeignTarget):
        create_target(target, size=8 * MIB, force=True)


def test_busy(tmp_path: Path) -> None:
    path = tmp_path / "image"
    device = formatted(path)
    for readonly in (False, True):
        with pytest.raises(TargetBusy, match="locked by another retainzfs"):
            open_target(str(path), readonly=readonly)
    with pytest.raises(TargetBusy, match="locked by another retainzfs"):
        create(path, force=True)
    device.close()
    readers = [open_target(str(path), readonly=True) for _ in range(2)]
    with pytest.raises(TargetBusy):
        open_target(str(path))
    for reader in readers:
        reader.close()
    open_target(str(path)).close()


def test_a_partition_of_a_zoned_disk(
    loop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a tree like that of sysfs: kernels make no such partition since they know such disks."""
    for name, value in (("sdz/queue/zoned", "host-managed"), ("sdz/sdz1/partition", "1")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(value)
    monkeypatch.setattr(targets, "directory", lambda _: tmp_path / "sdz/sdz1")
    for call in (open_target, create_target):
        with pytest.raises(UsageError, match="partition of a zoned disk; give the disk, /dev/sdz"):
            call(str(loop))


# --- what a target holds ------------------------------------------------------------------------


def refused(path: Path, what: str) -> None:
    """Formatting is refused, says what is there, and leaves it."""
    before = bytes_of(path)
    with pytest.raises(TargetHoldsData, match=what):
        create(path)
    assert bytes_of(path) == before


@pytest.mark.parametrize("magic", MAGICS, ids=lambda magic: f"{magic.what}@{magic.offset}")
def test_magics(tmp_path: Path, magic: Magic) -> None:
    path = tmp_path / "image"
    content = bytearray(8 * MIB)
    content[magic.offset : magic.offset + len(magic.value)] = magic.value
    path.write_bytes(content)
    refused(path, f"already holds {magic.what}".replace("(", r"\(").replace(")", r"\)"))


@pytest.mark.parametrize(
    ("compatible", "incompatible", "what"),
    [(0, 2, "an ext2"), (4, 2, "an ext3"), (4, 0x2C2, "an ext4")],
)
def test_ext(tmp_path: Path, compatible: int, incompatible: int, what: str) -> None:
    path = tmp_path / "image"
    content = bytearray(8 * MIB)
    content[1024 + 56 : 1024 + 58] = b"\x53\xef"
    content[1024 + 92 : 1024 + 100] = struct.pack("<II", compatible, incompatible)
    path.write_bytes(content)
    refused(path, what)


@pytest.mark.parametrize(
    ("tool", "what"),
    [
        (["mkfs.ext2", "-q"], "an ext2 filesystem"),
        (["mkfs.ext3", "-q"], "an ext3 filesystem"),
        (["mkfs.ext4", "-q"], "an ext4 filesystem"),
        (["mkswap"], "swap space"),
    ],
    ids=lambda tool: tool[0] if isinstance(tool, list) else "",
)
def test_real_filesystems(tmp_path: Path, tool: list[str], what: str) -> None:
    program = shutil.which(tool[0], path="/usr/sbin:/sbin:/usr/bin")
    if program is None:
        pytest.skip(f"{tool[0]} is not installed")
    path = tmp_path / "image"
    with path.open("wb") as file:
        file.truncate(32 * MIB)
    subprocess.run([program, *tool[1:], path], check=True, capture_output=True)
    with pytest.raises(TargetHoldsData, match=what):
        create(path)
    with pytest.raises(ForeignTarget):
        open_target(str(path))
    create(path, force=True)
    open_target(str(path)).close()


def test_a_zip(tmp_path: Path) -> None:
    path = tmp_path / "image"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.bin", bytes(6 * MIB))
    refused(path, "a zip archive")


@pytest.mark.parametrize("at", [0, 100_000, 3 * MIB + 1, 8 * MIB - 1])
@pytest.mark.parametrize("sparse", [True, False])
def test_plain_data(tmp_path: Path, at: int, sparse: bool) -> None:
    path = tmp_path / "image"
    with path.open("wb") as file:
        if sparse:
            file.truncate(8 * MIB)
        else:
            file.write(bytes(8 * MIB))
        file.seek(at)
        file.write(b"\x01")
    refused(path, rf"already holds data \(from byte {at} on\)")
    create(path, force=True)


# --- block devices ------------------------------------------------------------------------------


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Path]:
    """A loop device of 32 MiB: a conventional block device."""
    backing = tmp_path / "backing"
    with backing.open("wb") as file:
        file.truncate(32 * MIB)
    tool = shutil.which("losetup", path="/usr/sbin:/sbin:/usr/bin")
    if tool is None or os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("no loop devices for us here")
    found = subprocess.run(
        [tool, "--find", "--show", backing], check=False, capture_output=True, text=True
    )
    if found.returncode:
        pytest.skip(f"losetup: {found.stderr.strip()}")
    device = Path(found.stdout.strip())
    yield device
    subprocess.run([tool, "--detach", device], check=True)


async def test_a_block_device(loop: Path, tmp_path: Path) -> None:
    device = create(loop, zone_size=MIB, max_open=4, max_active=6)
    assert device.geometry == Geometry(MIB, MIB, 31, 4, 6)
    data = random_blocks(256)
    async with started(loop) as device:
        for zone in range(6):
            await device.append(zone, 0, data)
        await device.flush()
        filled = used(tmp_path / "backing")
        assert filled >= 6 * MIB
        await device.reset(range(5))
        await device.flush()
    async with started(loop) as device:
        assert [zone.write_pointer for zone in device.report()[:7]] == [0, 0, 0, 0, 0, MIB, 0]
        assert bytes(await device.read(5, 0, MIB)) == bytes(data)
    assert used(tmp_path / "backing") <= filled - 5 * MIB


def test_a_block_device_is_opened_exclusively(loop: Path) -> None:
    create(loop)
    device = open_target(str(loop))
    with pytest.raises(TargetBusy, match="opened exclusively by another program"):
        open_target(str(loop))
    device.close()
    open_target(str(loop)).close()


def test_a_block_device_that_holds_data(loop: Path) -> None:
    with loop.open("r+b") as file:
        file.seek(20 * MIB)
        file.write(b"x" * MIB)
    with pytest.raises(TargetHoldsData, match="already holds data"):
        create(loop)
    with pytest.raises(ForeignTarget):
        open_target(str(loop))


@pytest.mark.parametrize("size", [33 * MIB, 1 << 40])
def test_a_block_device_is_as_large_as_it_is(loop: Path, size: int) -> None:
    with pytest.raises(BadGeometry, match=f"size of {size} bytes, but the device has {32 * MIB}"):
        create(loop, size=size)
    create(loop, size=16 * MIB)


def test_a_block_device_that_shrank(loop: Path, tmp_path: Path) -> None:
    create(loop)
    image = tmp_path / "copy"
    image.write_bytes(bytes_of(loop)[: 16 * MIB])
    with pytest.raises(Damaged, match=f"it has {16 * MIB} bytes"):
        open_target(str(image))


def test_a_file_behind_a_loop_device(loop: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetBusy, match=f"attached to {loop}"):
        create(tmp_path / "backing", force=True)


def test_a_mounted_block_device(loop: Path, tmp_path: Path) -> None:
    tool = shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:/usr/bin")
    if tool is None:
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run([tool, "-q", loop], check=True)
    where = tmp_path / "a directory"
    where.mkdir()
    mounted = subprocess.run(["mount", loop, where], check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mount: {mounted.stderr.strip()}")
    try:
        with pytest.raises(TargetBusy, match=f"mounted on {where}"):
            create(loop, force=True)
    finally:
        subprocess.run(["umount", where], check=True)
