"""Targets of a replay: a device with as many zones, and as few active ones, as the workload says.

Memory and images get exactly these zones. A zoned block device has its own: their capacity is the
unit of the workload's sizes, and of its zones only the first ones are used.
"""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from typing import Any, cast

from retainzfs.device import Device, Geometry, create_target, is_memory, open_target
from retainzfs.device.head import base_of
from retainzfs.device.memory import MemoryDevice
from retainzfs.device.protocol import MIN_OPEN
from retainzfs.device.sysfs import BlockDevice, directory
from retainzfs.errors import UsageError
from retainzfs.evaluation.workload import Workload
from retainzfs.journal import metadata_zones
from retainzfs.zones import COLLECTION_ACTIVE, JOURNAL_ACTIVE


def geometry_for(zone_size: int, data_zones: int, active: int) -> Geometry:
    """The zones for a workload: those of the journal are beside its data zones, and so are the
    active zones of journal and collection. As few as a volume can do with are open."""
    count = data_zones + metadata_zones(data_zones)
    while count - metadata_zones(count) < data_zones:
        count += 1
    return Geometry(
        zone_size, zone_size, count, MIN_OPEN, active + JOURNAL_ACTIVE + COLLECTION_ACTIVE
    )


def data_zones(geometry: Geometry) -> int:
    """Zones that hold data, collection's reserve included."""
    return geometry.zone_count - metadata_zones(geometry.zone_count)


def own_zones(target: str) -> Geometry | None:
    """The zones of a zoned block device; None for a target that takes any. Nothing is changed."""
    try:
        mode = os.stat(target).st_mode
    except OSError:
        return None  # opening it says what is wrong, unless it is memory or to be made
    if not stat.S_ISBLK(mode):
        return None
    fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        zoned = BlockDevice(directory(fd)).zoned
    finally:
        os.close(fd)
    if not zoned:
        return None
    device = open_target(target, readonly=True)
    device.close()
    return device.geometry


class Part:
    """The first zones of a device, with its own limits of active zones; counts what is finished.

    All that is not said here goes to the device as it is.
    """

    def __init__(self, device: Device, geometry: Geometry) -> None:
        self._device = device
        self.geometry = geometry
        self.finishes = 0  # of zones for data
        self.stranded = 0  # bytes of their capacity that were not written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def report(self, zones: range | None = None) -> list[Any]:
        return self._device.report(range(self.geometry.zone_count) if zones is None else zones)

    async def finish(self, zone: int) -> None:
        known = self._device.known(zone)
        await self._device.finish(zone)
        if zone >= metadata_zones(self.geometry.zone_count):
            self.finishes += 1
            self.stranded += known.capacity - known.write_pointer

    @property
    def device(self) -> Device:
        """This, as what it stands in for."""
        return cast("Device", self)


def prepared(target: str, workload: Workload, *, force: bool = False) -> Part:
    """Open a target with the zones of a workload, all empty; it still has to be started and
    formatted.

    Without `force` a target that holds something is refused. Raises UsageError for a zoned device
    with fewer or other zones than the workload has, and what `create_target` raises.
    """
    wanted = geometry_for(workload.capacity, workload.zones, workload.active)
    if (flaw := wanted.flaw()) is not None:
        raise UsageError(f"{workload.name}: {flaw}; other zones or another load make others")
    if is_memory(target):  # a size behind it is not looked at
        return Part(MemoryDevice(wanted, target), wanted)
    own = own_zones(target)
    if own is not None:
        part = _first_zones(target, own, wanted)
        return Part(create_target(target, force=force), part)
    block = os.path.exists(target) and stat.S_ISBLK(os.stat(target).st_mode)
    size = None if block else base_of(wanted.zone_count) + wanted.zone_count * wanted.zone_size
    device = create_target(
        target,
        size=size,
        zone_size=wanted.zone_size,
        max_open=wanted.max_open,
        max_active=wanted.max_active,
        force=force,
    )
    if device.geometry.zone_count < wanted.zone_count:
        device.close()
        raise UsageError(
            f"{target}: {device.geometry.zone_count} zones of {wanted.zone_size} bytes fit, the"
            f" workload wants {wanted.zone_count}; give a larger device or a smaller zone size"
        )
    return Part(device, wanted)


def _first_zones(target: str, own: Geometry, wanted: Geometry) -> Geometry:
    if own.zone_capacity != wanted.zone_capacity or own.zone_count < wanted.zone_count:
        raise UsageError(
            f"{target}: {own.zone_count} zones of {own.zone_capacity} bytes, the workload is for"
            f" {wanted.zone_count} of {wanted.zone_capacity} bytes"
        )
    if own.max_active and own.max_active < wanted.max_active:
        raise UsageError(
            f"{target}: {own.max_active} active zones at most, the workload takes"
            f" {wanted.max_active}; give a smaller --active"
        )
    limit = min(own.max_open or wanted.max_open, wanted.max_open)
    return replace(own, zone_count=wanted.zone_count, max_open=limit, max_active=wanted.max_active)


def suited(target: str, zones: int, active: int, zone_size: int) -> tuple[int, int, int] | None:
    """What a workload for a zoned block device has: bytes of a zone, and at most so many data
    zones, active ones among them. None for a target that takes any zones.

    `zone_size`: bytes that were asked for, 0 for those of the device. Raises UsageError for others.
    """
    own = own_zones(target)
    if own is None:
        return None
    if zone_size not in (0, own.zone_capacity):
        size = own.zone_capacity
        raise UsageError(f"{target}: its zones hold {size} bytes; leave out --zone-size")
    beside = JOURNAL_ACTIVE + COLLECTION_ACTIVE
    most = own.max_active - beside if own.max_active else active
    return own.zone_capacity, min(zones, data_zones(own)), min(active, most)
