"""Reading: from memory what is staged, from the device the rest, checked against its checksums."""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable

from retainzfs import errors, layout
from retainzfs._zio import crc32c
from retainzfs.device import Device
from retainzfs.errors import FSError
from retainzfs.layout import BLOCK, INLINE_SUMS_MAX
from retainzfs.namespace import Extent, Inode, Namespace, Run
from retainzfs.zones import Zone, ZoneTable

SUMS_CACHED = 1024  # trailers kept, 4 KiB each


class Reader:
    """Readers take no lock: what a run's bytes are never changes once they are on the device, and
    the zone is pinned while it is being read."""

    def __init__(self, device: Device, table: ZoneTable, namespace: Namespace) -> None:
        self.device = device
        self.table = table
        self.namespace = namespace
        self.checksum_errors = 0
        self.left: Callable[[], None] = lambda: None  # called when a dead zone is read no more
        self._sums: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()

    async def read(self, inode: Inode, offset: int, size: int) -> memoryview:
        """Return up to `size` bytes; fewer at the end of the file. Raises FSError(EIO)."""
        size = min(size, inode.size - offset)
        if size <= 0:
            return memoryview(b"")
        first, last = offset // BLOCK, -(-(offset + size) // BLOCK)
        skip = offset - first * BLOCK
        extents = list(inode.spans(first, last))
        if any(e.run.failed for e in extents):
            what = "its bytes could not be written, or are lost"
            raise FSError(errno.EIO, self.namespace.path(inode.ino), what)
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
        run = extent.run
        try:
            sums = await self._checksums(run)
            wanted = sums[extent.first * 4 : (extent.first + extent.blocks) * 4]
            at = (run.start + extent.first) * BLOCK
            return await self.device.read(run.zone, at, extent.blocks * BLOCK, wanted)
        except errors.RetainzError as error:
            self.checksum_errors += isinstance(error, errors.ChecksumError)
            raise FSError(
                errno.EIO,
                self.namespace.path(inode.ino),
                f"cannot read bytes {extent.block * BLOCK} to {extent.end * BLOCK}: {error}",
            ) from error

    async def _checksums(self, run: Run) -> bytes:
        """Return the run's checksums, 4 bytes a block."""
        if run.length <= INLINE_SUMS_MAX:
            return run.sums
        key = (run.zone, run.epoch, run.start)
        sums = self._sums.get(key)
        if sums is None:
            at = (run.start + run.length) * BLOCK
            trailer = await self.device.read(run.zone, at, BLOCK)
            if crc32c(trailer) != int.from_bytes(run.sums, "little"):
                raise errors.ChecksumError(self.device.name, run.zone, at)
            head = layout.TRAILER_HEADER.size
            sums = bytes(trailer[head : head + run.length * 4])
            self.remember(key, sums)
        else:
            self._sums.move_to_end(key)
        return sums

    def remember(self, key: tuple[int, int, int], sums: bytes) -> None:
        self._sums[key] = sums
        if len(self._sums) > SUMS_CACHED:
            self._sums.popitem(last=False)

    async def block(self, inode: Inode, block: int) -> bytearray:
        """Return one block as the file has it, zeros behind its end."""
        out = bytearray(BLOCK)
        data = await self.read(inode, block * BLOCK, BLOCK)
        out[: len(data)] = data
        return out
