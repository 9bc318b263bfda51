"""Stored bytes: read from where the runs are, checked, and their damage told block by block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from retainzfs import errors, layout
from retainzfs._zio import crc32c
from retainzfs.device import Device
from retainzfs.inodes import Extent, Run
from retainzfs.layout import BLOCK, INLINE_SUMS_MAX

SUMS_CACHED = 1024  # trailers kept, 4 KiB each


class BadBlocks(NamedTuple):
    """Blocks [first, first + blocks) of a run that cannot be read."""

    first: int
    blocks: int
    reason: str


class Damage(NamedTuple):
    """Bytes [start, end) of a file that cannot be read, and where they should be."""

    path: str
    start: int
    end: int
    zone: int
    block: int  # of the zone
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.path}: bytes {self.start} to {self.end} cannot be read: {self.reason};"
            f" extent: file block {self.start // BLOCK}, zone {self.zone}, zone block {self.block}"
        )


class StoredRuns:
    """Reads runs from a device. A trailer is read once and kept for the next time."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._sums: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()

    async def read(self, run: Run, first: int, blocks: int) -> memoryview:
        """Return blocks of a run. Raises ChecksumError, DeviceError, ZoneRuleError."""
        sums = await self._checksums(run)
        wanted = sums[first * 4 : (first + blocks) * 4]
        at = (run.start + first) * BLOCK
        return await self.device.read(run.zone, at, blocks * BLOCK, wanted)

    async def bad_blocks(self, run: Run, first: int, blocks: int) -> list[BadBlocks]:
        """Return which of the blocks cannot be read, neighbours together; none if all can."""
        try:
            await self._checksums(run)
        except errors.RetainzError as error:
            return [BadBlocks(first, blocks, f"its checksums are lost, {reason(error)}")]
        try:
            await self.read(run, first, blocks)
        except errors.RetainzError as error:
            if blocks == 1:
                return [BadBlocks(first, 1, reason(error))]
        else:
            return []
        bad: list[BadBlocks] = []
        for block in range(first, first + blocks):
            for one in await self.bad_blocks(run, block, 1):
                last = bad[-1] if bad else None
                if last and last.first + last.blocks == block and last.reason == one.reason:
                    bad[-1] = last._replace(blocks=last.blocks + 1)
                else:
                    bad.append(one)
        return bad

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


def missing(run: Run) -> BadBlocks:
    """All of a run that `failed`."""
    return BadBlocks(
        0, run.length, "not on the device" if run.zone >= 0 else "could not be written"
    )


def reason(error: errors.RetainzError) -> str:
    """Return what is wrong, without the place that a message of damage gives anyway."""
    if isinstance(error, errors.ChecksumError):
        return "checksum mismatch"
    return str(error.args[-1])


def damages(path: str, extents: Iterable[Extent], bad: Iterable[BadBlocks]) -> Iterator[Damage]:
    """Yield what damaged blocks of a run mean for a file, by its extents in that run."""
    spans = list(bad)
    for extent in extents:
        for first, blocks, why in spans:
            low = max(first, extent.first)
            high = min(first + blocks, extent.first + extent.blocks)
            if low < high:
                start = extent.block + low - extent.first
                yield Damage(
                    path,
                    start * BLOCK,
                    (start + high - low) * BLOCK,
                    extent.run.zone,
                    extent.run.start + low,
                    why,
                )
