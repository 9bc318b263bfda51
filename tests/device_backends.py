"""The device backends that every test of the protocol runs over, and what the tests share."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from typing import Protocol

from retainzfs._zio import Slot
from retainzfs.device import BLOCK, Device, Geometry, create_target, open_target
from retainzfs.device.emulated import EmulatedDevice
from retainzfs.device.memory import MemoryDevice
from retainzfs.device.pattern import Pattern, PatternDevice

KIB = 1 << 10
MIB = 1 << 20
HEADER = bytes(range(32))

# Small enough to fill, with all that can be told apart: capacity below size, open below active.
GEOMETRY = Geometry(
    zone_size=256 * KIB, zone_capacity=256 * KIB, zone_count=16, max_open=4, max_active=6
)
IMAGE_SIZE = 5 * MIB  # what GEOMETRY takes as an image


CAPACITY_BELOW_SIZE = replace(GEOMETRY, zone_size=512 * KIB)
NO_LIMITS = replace(GEOMETRY, max_open=0, max_active=0)


class Backend(Protocol):
    """How the tests get at one kind of device."""

    name: str

    async def create(self, directory: Path, geometry: Geometry = GEOMETRY) -> Device:
        """An empty device, started."""

    async def reopen(self, device: Device) -> Device:
        """Power cycle, without a flush: the same target, started."""


class Memory:
    name = "memory"

    async def create(self, directory: Path, geometry: Geometry = GEOMETRY) -> Device:
        device = MemoryDevice(geometry, str(directory / "device"))
        await device.start()
        return device

    async def reopen(self, device: Device) -> Device:
        await device.aclose()
        await device.start()
        return device


class Emulated:
    name = "emulated"

    async def create(self, directory: Path, geometry: Geometry = GEOMETRY) -> Device:
        device = create_target(
            str(directory / "device"),
            size=MIB + geometry.zone_count * geometry.zone_size,
            zone_size=geometry.zone_size,
            zone_capacity=geometry.zone_capacity,
            max_open=geometry.max_open,
            max_active=geometry.max_active,
        )
        await device.start()
        return device

    async def reopen(self, device: Device) -> Device:
        return await reopened(device)


class Patterned:
    """Of the bytes that these tests write none follows its pattern; those of
    tests/test_device_pattern.py do."""

    name = "pattern"

    async def create(self, directory: Path, geometry: Geometry = GEOMETRY) -> Device:
        device = PatternDevice(geometry, Pattern(1), str(directory / "device"))
        await device.start()
        return device

    async def reopen(self, device: Device) -> Device:
        await device.aclose()
        await device.start()
        return device


class Kernel:
    """A zoned block device of the machine that has these zones: what it holds is lost."""

    name = "kernel"

    async def create(self, directory: Path, geometry: Geometry = GEOMETRY) -> Device:
        device = create_target(zoned_target(geometry), force=True)
        await device.start()
        await device.reset(range(geometry.zone_count))
        return await self.reopen(device)

    async def reopen(self, device: Device) -> Device:
        return await reopened(device)


async def reopened(device: Device) -> Device:
    await device.aclose()
    again = open_target(device.name)
    await again.start()
    await again.settle()
    return again


def zoned_target(geometry: Geometry | None = None) -> str:
    """The zoned block device with this geometry; without one the first, which is for volumes."""
    targets = os.environ["ZNS_VM_ZONED"].split()
    if geometry is None:
        return targets[0]
    for target in targets:
        device = open_target(target, readonly=True)
        device.close()
        if device.geometry == geometry:
            return target
    raise AssertionError(f"none of {' '.join(targets)} has {geometry}")


EMULATIONS: list[Backend] = [Memory(), Emulated(), Patterned()]


def random_blocks(count: int) -> memoryview:
    """`count` aligned blocks, no two alike."""
    view = memoryview(Slot(count * BLOCK))
    view[:] = os.urandom(count * BLOCK)
    return view


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Writes beyond `limit` bytes fail with EFBIG, after what fits was written (setrlimit(2))."""
    before = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        setrlimit(RLIMIT_FSIZE, before)


# --- images --------------------------------------------------------------------------------------


def formatted(path: Path, *, preallocate: bool = False) -> EmulatedDevice:
    device = create_target(
        str(path),
        size=IMAGE_SIZE,
        zone_size=GEOMETRY.zone_size,
        max_open=GEOMETRY.max_open,
        max_active=GEOMETRY.max_active,
        preallocate=preallocate,
    )
    assert isinstance(device, EmulatedDevice)
    return device


@asynccontextmanager
async def started(path: Path, *, readonly: bool = False) -> AsyncIterator[EmulatedDevice]:
    """The image opened, started, and closed again without a flush."""
    device = open_target(str(path), readonly=readonly)
    assert isinstance(device, EmulatedDevice)
    await device.start()
    try:
        yield device
    finally:
        await device.aclose()


def pointers(path: Path) -> list[int]:
    device = open_target(str(path), readonly=True)
    device.close()
    return [zone.write_pointer for zone in device.report()]


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def bytes_of(path: Path) -> bytes:
    return path.read_bytes()


def used(path: Path) -> int:
    """Bytes allocated by the host."""
    return path.stat().st_blocks * 512


def flip(path: Path, offset: int, bit: int = 0) -> None:
    value = path.read_bytes()[offset]
    patch(path, offset, bytes([value ^ 1 << bit]))
