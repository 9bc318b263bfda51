"""What volume tests share: a volume on a device in memory that can fail."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from retainzfs import fsck
from retainzfs.device import Geometry
from retainzfs.device.faults import FaultDevice, PowerCut
from retainzfs.device.memory import MemoryDevice
from retainzfs.volume import ROOT, Options, Volume
from tests.witness import WatchedDevice, WatchedVolume, Witness

FILE = 0o100644
DIRECTORY = 0o040755
UUID = bytes(range(16))
D = TypeVar("D", bound=MemoryDevice)


class Clock:
    """Time that moves only when told, a little with every look."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self.time_s = start_s

    def monotonic_s(self) -> float:
        self.time_s += 1e-6
        return self.time_s

    def wall_ns(self) -> int:
        return int(self.monotonic_s() * 1e9)


def options(clock: Clock | None = None, **changes: Any) -> Options:
    clock = clock or Clock()
    return Options(wall_ns=clock.wall_ns, monotonic_s=clock.monotonic_s, **changes)


def small_device(
    zones: int = 48, zone_size: int = 256 << 10, max_active: int = 14, max_open: int = 8
) -> WatchedDevice:
    device = WatchedDevice(Geometry(zone_size, zone_size, zones, max_open, max_active))
    if watching is not None:
        watching.append(device)
        device.witness = Witness(device)
    return device


# Where the devices of a test with the marker `power_cuts` go; None: nobody watches.
watching: list[WatchedDevice] | None = None


def slow(seed: int, zones: int = 48) -> WatchedDevice:
    """Return a device whose operations end late, in an order drawn from the seed."""
    rng = random.Random(seed)
    device = small_device(zones)
    device.delay = lambda: rng.choice((0, 0, 1, 3, 7))
    return device


def noise(length: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length)


async def formatted(device: D) -> D:
    await device.start()
    await Volume.format(device, uuid=UUID, now_ns=1)
    if isinstance(device, WatchedDevice):
        device.formatted = device.operations
    return device


@asynccontextmanager
async def mounted(
    device: MemoryDevice, given: Options | None = None, **changes: Any
) -> AsyncIterator[Volume]:
    watched = isinstance(device, WatchedDevice) and device.witness is not None
    kind = WatchedVolume if watched else Volume
    async with kind.mounted(device, given or options(**changes)) as volume:
        yield volume


async def put(volume: Volume, parent: int, name: bytes, data: bytes, piece: int = 1 << 20) -> int:
    """Create a file and write it; return its inode number."""
    inode = await volume.make(parent, name, FILE, 0, 0)
    volume.open(inode.ino)
    for at in range(0, len(data), piece):
        await volume.write(inode.ino, at, data[at : at + piece])
    await volume.flush(inode.ino)
    volume.close(inode.ino)
    return inode.ino


async def synced(volume: Volume, name: bytes, data: bytes) -> int:
    ino = await put(volume, ROOT, name, data)
    await volume.fsync(ino)
    return ino


async def half_dead(volume: Volume, rng: random.Random, count: int) -> dict[int, bytes]:
    """Leave so many small files, inode → content, where larger ones between them were deleted."""
    kept: dict[int, bytes] = {}
    for i in range(count):
        data = rng.randbytes(30_000)
        kept[await put(volume, ROOT, b"keep-%d" % i, data)] = data
        await put(volume, ROOT, b"drop-%d" % i, rng.randbytes(120_000))
        await volume.syncfs()
    for i in range(count):
        await volume.unlink(ROOT, b"drop-%d" % i)
    return kept


async def content(volume: Volume, ino: int) -> bytes:
    return bytes(await volume.read(ino, 0, volume.inode(ino).size + 1))


async def tree(volume: Volume, ino: int = ROOT, base: bytes = b"") -> dict[bytes, bytes | None]:
    """Return path → content, None for a directory."""
    out: dict[bytes, bytes | None] = {}
    for name, child in volume.entries(ino):
        path = base + b"/" + name
        if volume.inode(child).is_dir:
            out[path] = None
            out.update(await tree(volume, child, path))
        else:
            out[path] = await content(volume, child)
    return out


def zones_of(volume: Volume, ino: int) -> set[int]:
    return {e.run.zone for e in volume.inode(ino).extents}


@contextmanager
def until_power_cut() -> Iterator[None]:
    """Run a mount that a power cut ends."""
    try:
        yield
    except BaseExceptionGroup as group:
        if group.split(PowerCut)[1] is not None:
            raise
        return
    raise AssertionError("the power was not cut")


async def check_after_remount(device: FaultDevice, files: dict[bytes, bytes]) -> None:
    report = await fsck.examine(device, scrub=True)
    assert not report.damaged, report.findings
    async with mounted(device) as volume:
        for name, data in files.items():
            assert await content(volume, volume.lookup(ROOT, name).ino) == data
