"""Reading: from memory what is staged, from the device the rest, checked against its checksums."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

from retainzfs import errors
from retainzfs.device import Device
from retainzfs.errors import Unreadable
from retainzfs.extents import BadBlocks, Damage, StoredRuns, damages, missing, reason
from retainzfs.layout import BLOCK
from retainzfs.namespace import Extent, Inode, Namespace
from retainzfs.trouble import Trouble
from retainzfs.zone import Zone
from retainzfs.zones import ZoneTable

log = logging.getLogger(__name__)

TOLD_MAX = 1 << 16  # damaged blocks that are remembered as told, 100 bytes each; then they repeat


class Reader:
    """Readers take no lock: what a run's bytes are never changes once they are on the device, and
    the zone is pinned while it is being read."""

    def __init__(
        self, device: Device, table: ZoneTable, namespace: Namespace, trouble: Trouble
    ) -> None:
        self.table = table
        self.namespace = namespace
        self.trouble = trouble
        self.stored = StoredRuns(device)
        self.checksum_errors = 0
        self.read_errors = 0
        self._told: set[tuple[str, int, int]] = set()  # path, zone, block
        self.left: Callable[[], None] = lambda: None  # called when a dead zone is read no more

    async def read(self, inode: Inode, offset: int, size: int) -> memoryview:
        """Return up to `size` bytes; fewer at the end of the file. Raises Unreadable."""
        size = min(size, inode.size - offset)
        if size <= 0:
            return memoryview(b"")
        first, last = offset // BLOCK, -(-(offset + size) // BLOCK)
        skip = offset - first * BLOCK
        extents = list(inode.spans(first, last))
        for extent in extents:
            if extent.run.failed:
                raise self._unreadable(inode, extent, [missing(extent.run)])
        if (
            len(extents) == 1
            and extents[0].blocks == last - first
            and extents[0].run.buffer is None
        ):
            zone = self.table[extents[0].run.zone]
            self.table.pin(zone)
            try:
                return (await self.fetch(inode, extents[0]))[skip : skip + size]
            finally:
                self._unpin(zone)
        out = bytearray((last - first) * BLOCK)
        if first == 0 and inode.content and not (extents and extents[0].block == 0):
            out[: len(inode.content)] = inode.content
        await self._gather(inode, extents, first, out)
        return memoryview(out)[skip : skip + size]

    async def _gather(
        self, inode: Inode, extents: list[Extent], first: int, out: bytearray
    ) -> None:
        """Copy what is staged at once, then fetch the rest while its zones are pinned."""
        stored: list[Extent] = []
        for extent in extents:
            at = (extent.block - first) * BLOCK
            buffer = extent.run.buffer
            if buffer is not None:
                length = extent.blocks * BLOCK
                out[at : at + length] = buffer[extent.first * BLOCK :][:length]
            else:
                stored.append(extent)
                self.table.pin(self.table[extent.run.zone])
        try:
            for extent in stored:
                at = (extent.block - first) * BLOCK
                out[at : at + extent.blocks * BLOCK] = await self.fetch(inode, extent)
        finally:
            for extent in stored:
                self._unpin(self.table[extent.run.zone])

    def _unpin(self, zone: Zone) -> None:
        self.table.unpin(zone)
        if zone.dead and not zone.pins:
            self.left()

    async def fetch(self, inode: Inode, extent: Extent) -> memoryview:
        """Return an extent's bytes from the device. Raises Unreadable."""
        run = extent.run
        try:
            return await self.stored.read(run, extent.first, extent.blocks)
        except errors.RetainzError as error:
            if isinstance(error, errors.ChecksumError):
                self.checksum_errors += 1
            else:
                self.read_errors += 1
                self.trouble.unreadable(self.table[run.zone], error)
            if isinstance(self.trouble.stopped, errors.DeviceGone):
                raise self.trouble.stopped.with_traceback(None) from None
            bad = await self.stored.bad_blocks(run, extent.first, extent.blocks)
            # A device may fail once and then read; the caller has its error all the same.
            bad = bad or [BadBlocks(extent.first, extent.blocks, reason(error))]
            raise self._unreadable(inode, extent, bad) from error

    def _unreadable(self, inode: Inode, extent: Extent, bad: list[BadBlocks]) -> Unreadable:
        path = self.namespace.path(inode.ino)
        found = list(damages(path, [extent], bad))
        for damage in found:
            self.tell(damage)
        start, end = found[0].start, found[-1].end
        return Unreadable(errno.EIO, path, f"bytes {start} to {end}: {found[0].reason}")

    def tell(self, damage: Damage) -> None:
        """Log damage, once: the kernel asks for the pages of a failed read again one by one."""
        first = damage.block
        blocks = range(first, first + (damage.end - damage.start) // BLOCK)
        places = {(damage.path, damage.zone, block) for block in blocks}
        if places <= self._told:
            return
        if len(self._told) > TOLD_MAX:
            self._told.clear()
        self._told |= places
        log.error("%s", damage)

    async def block(self, inode: Inode, block: int) -> bytearray:
        """Return one block as the file has it, zeros behind its end."""
        out = bytearray(BLOCK)
        data = await self.read(inode, block * BLOCK, BLOCK)
        out[: len(data)] = data
        return out
