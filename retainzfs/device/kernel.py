"""The zones of a host-managed zoned block device, ZNS or SMR, through the kernel.

Invariants
- The rules are our view of the zones. A command that takes a slot is in the view before it runs,
  one that frees a slot when it has ended: the device never has fewer slots free than the view.
- After a command failed the zones that it met are reported again, and the report is taken over.
- One write is in flight in a zone, at its write pointer; the kernel keeps the parts in order into
  which it splits it (`sysfs.BlockDevice.keep_order`).

Zones are numbered from the first one that is written in order. Conventional zones, which some SMR
disks have at their ends, are not used.

Sources: linux/blkzoned.h; NVMe ZNS Command Set Specification 1.1; the kernel's errors are those of
block/blk-zoned.c and drivers/nvme/host/core.c.
"""

import errno
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

from retainzfs._zio import CLOSE_ZONE, FINISH_ZONE, OPEN_ZONE, RESET_ZONE, report_zones
from retainzfs.device.aio import AsyncEngine
from retainzfs.device.disk import DiskDevice, set_direct
from retainzfs.device.protocol import BLOCK, OPEN, Condition, Geometry, ZoneReport
from retainzfs.device.rules import Pending, ZoneRules
from retainzfs.device.sysfs import BlockDevice, directory
from retainzfs.errors import BadGeometry, DeviceError, RetainzError

log = logging.getLogger(__name__)

CONVENTIONAL = 1  # BLK_ZONE_TYPE_CONVENTIONAL
ALL_ZONES = 1 << 30
BARE = (Condition.FULL, Condition.READ_ONLY, Condition.OFFLINE)  # their pointer means nothing
WORDS = {  # where the words of errno(3) would mislead
    errno.EOVERFLOW: "the device has as many active zones as it allows; does another program"
    " write to it?",
    errno.ETOOMANYREFS: "the device has as many open zones as it allows; does another program"
    " write to it?",
}


class Found(NamedTuple):
    """A zone as the kernel reports it; in bytes, the pointer from the start of the device."""

    start: int
    length: int
    capacity: int
    pointer: int
    type: int
    condition: int


class KernelDevice(DiskDevice):
    """Built by `retainzfs.device.open_target` and `create_target`; owns the descriptor `fd`.

    Raises BadGeometry for zones on which no volume can live; `settle` raises WriteOrder where the
    kernel would mix up the writes to a zone.
    """

    def __init__(self, name: str, fd: int, *, readonly: bool = False) -> None:
        self._sysfs = BlockDevice(directory(fd))
        zones = usable([Found(*zone) for zone in report_zones(fd, 0, ALL_ZONES)])
        super().__init__(name, fd, zones[0].start if zones else 0, readonly=readonly)
        self.geometry = geometry_of(name, zones, self._sysfs)
        set_direct(fd)
        self._volatile = self._sysfs.volatile_cache
        self._settled = False
        self.rules = ZoneRules(name, self.geometry)
        self._adopt(zone_reports(0, zones))

    async def settle(self) -> None:
        for disk in self._sysfs.keep_order(self.name, os.uname().release):
            log.info("%s: set the scheduler of %s, which keeps writes in order", self.name, disk)
        await self._let_go()
        self._settled = True

    async def aclose(self) -> None:
        if self._settled and self._io is not None and self._flush_error is None:
            await self._let_go()
        await super().aclose()

    async def _let_go(self) -> None:
        """Close what is open, as a power cycle does, and empty what holds no data: both would keep
        a slot for nothing, before the first append of a volume and behind the last. So would a zone
        that is written up to the middle of a block: no append can go on there."""
        try:
            found = self._found(range(self.geometry.zone_count))
        except OSError as error:
            log.warning("%s; its zones keep their slots", self._error("report of zones", error))
            return
        self._adopt(zone_reports(0, found))
        for index, zone in enumerate(found):
            try:
                if zone.condition in OPEN:
                    await self.close_zone(index)
                if self.rules.states[index].condition != Condition.CLOSED:
                    continue
                if zone.pointer % BLOCK:
                    await self.finish(index)
                elif zone.pointer == zone.start:
                    await self.reset([index])
            except RetainzError as error:
                log.warning("%s; the zone keeps a slot", error)

    # --- zones ----------------------------------------------------------------------------------

    def report(self, zones: range | None = None) -> list[ZoneReport]:
        zones = range(self.geometry.zone_count) if zones is None else zones
        try:
            return self._asked(zones)
        except OSError as error:
            if not self._gone():  # whoever used it then hears that from its own command
                log.error("%s: no report of its zones: %s", self.name, error.strerror)
            return self.rules.report(zones)

    def report_zone(self, zone: int) -> ZoneReport:
        try:
            return self._asked(range(zone, zone + 1))[0]
        except OSError as error:
            raise self._error(f"report of zone {zone}", error) from error

    async def ready(self, zone: int) -> None:
        """A reset has ended when `reset` has."""

    async def reset(self, zones: Sequence[int]) -> None:
        io = self._writing("reset")
        held = self.rules.check_reset(zones)
        try:
            with self.rules.running(*held):
                for first, count in ranges(held):
                    await self._do(io, RESET_ZONE, first, count)
        except OSError as error:
            if len(held) > 1:
                await self._reset_each(io, held)
            self.report(range(min(held), max(held) + 1))
            raise self._error(f"reset of {len(held)} zones", error) from error
        self.rules.reset(held)
        self._statistics["resets"] += len(held)

    async def _reset_each(self, io: AsyncEngine, zones: Sequence[int]) -> None:
        """Reset those that can be reset. Where one failed among several, the kernel (6.12) believes
        of others that they were not reset either, and refuses writes to them."""
        with self.rules.running(*zones):
            for zone in zones:
                with suppress(OSError):
                    await self._do(io, RESET_ZONE, zone)

    async def finish(self, zone: int) -> None:
        io = self._writing("finish")
        if self.rules.check_finish(zone):
            await self._command(io, FINISH_ZONE, zone, "finish")
            self.rules.finish(zone)
        self._statistics["finishes"] += 1

    async def open_zone(self, zone: int) -> None:
        io = self._writing("open")
        self.rules.open_zone(zone)
        await self._command(io, OPEN_ZONE, zone, "open")

    async def close_zone(self, zone: int) -> None:
        io = self._writing("close")
        self.rules.check_close(zone)
        await self._command(io, CLOSE_ZONE, zone, "close")
        self.rules.close_zone(zone)
        if not self.rules.states[zone].pointer:
            # ZNS leaves such a zone closed, ZBC makes it empty.
            self.report(range(zone, zone + 1))

    async def _command(self, io: AsyncEngine, request: int, zone: int, what: str) -> None:
        try:
            with self.rules.running(zone):
                await self._do(io, request, zone)
        except OSError as error:
            self.report(range(zone, zone + 1))
            raise self._error(f"{what} of zone {zone}", error) from error

    async def _do(self, io: AsyncEngine, request: int, first: int, count: int = 1) -> None:
        length = count * self.geometry.zone_size
        await io.command(self._fd, request, self.address(first), length)

    async def _flush_round(self, io: AsyncEngine) -> None:
        if not self.rules.changed:
            return
        self.rules.changed.clear()
        if self._volatile:
            await io.flush(self._fd)
        self._statistics["flushes"] += 1

    # --- shared ---------------------------------------------------------------------------------

    def _ended(self, zone: int, pending: Pending, error: int) -> None:
        super()._ended(zone, pending, error)
        if error or pending.lost:
            self.report(range(zone, zone + 1))

    def _asked(self, zones: range) -> list[ZoneReport]:
        """The device's report of adjacent zones, which the view follows. Raises OSError."""
        reports = zone_reports(zones.start, self._found(zones))
        self._adopt(reports)
        return reports

    def _adopt(self, reports: Sequence[ZoneReport]) -> None:
        """Let the view follow where nothing runs."""
        for zone in reports:
            self.rules.adopt(*zone[:3])

    def _found(self, zones: range) -> list[Found]:
        found = [Found(*z) for z in report_zones(self._fd, self.address(zones.start), len(zones))]
        if len(found) < len(zones):  # a device that was removed has no zones, and no error
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        for index, zone in zip(zones, found, strict=True):
            assert zone.start == self.address(index), f"zone {index} has moved"
        return found

    def _gone(self) -> bool:
        return not self._sysfs.path.exists()

    def _error(self, what: str, error: OSError) -> DeviceError:
        words = WORDS.get(error.errno or 0)
        return super()._error(what, OSError(error.errno, words) if words else error)


def zone_reports(first: int, found: Sequence[Found]) -> list[ZoneReport]:
    """Our reports of adjacent zones of the kernel's, of which the first one is our zone `first`."""
    reports = []
    for index, zone in enumerate(found, first):
        condition = condition_of(zone)
        written = zone.pointer - zone.start
        # An append that failed may have ended between two blocks; no byte of that one counts.
        pointer = zone.capacity if condition in BARE else written - written % BLOCK
        reports.append(ZoneReport(index, condition, pointer, zone.capacity))
    return reports


def condition_of(zone: Found) -> Condition:
    """One that a newer kernel knows and we do not is a reason not to write there."""
    known = zone.condition in Condition.__members__.values()
    return Condition(zone.condition) if known else Condition.READ_ONLY


def written_at_start(fd: int) -> int:
    """Bytes at the start of the device that may hold something, and can be read."""
    [first] = map(Found._make, report_zones(fd, 0, 1))
    if condition_of(first) is Condition.OFFLINE:
        return 0
    bare = first.type == CONVENTIONAL or condition_of(first) in BARE
    return first.capacity if bare else first.pointer - first.start


def usable(zones: Sequence[Found]) -> Sequence[Found]:
    """The longest row of equal zones that are written in order."""
    rows = [
        list(row)
        for (kind, *_), row in groupby(zones, key=lambda z: (z.type, z.length, z.capacity))
        if kind != CONVENTIONAL
    ]
    return max(rows, key=len, default=[])


def geometry_of(name: str, zones: Sequence[Found], device: BlockDevice) -> Geometry:
    if not zones:
        raise BadGeometry(name, "it has no zones that are written in order")
    if BLOCK % device.write_granularity:
        what = f"its zones are written {device.write_granularity} bytes at a time"
        raise BadGeometry(name, f"{what}; at most {BLOCK} are supported")
    first = zones[0]
    geometry = Geometry(
        first.length, first.capacity, len(zones), device.max_open, device.max_active
    )
    if (flaw := geometry.flaw()) is not None:
        raise BadGeometry(name, flaw)
    return geometry


def ranges(zones: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of the adjacent zones among them: one command resets many."""
    first = count = 0
    for zone in sorted(zones):
        if count and zone == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = zone, 1
    if count:
        yield first, count
