"""The journal: one totally ordered log in the metadata zones, with snapshots in the same stream.

Metadata zones form a chain by the position in their superblocks. A snapshot is not a second
stream: its batches stand between those of the log, opened by SNAPSHOT_BEGIN and made valid by
SNAPSHOT_END. It is fuzzy: an inode is written as the journal knows it at that moment, and replaying
the log from SNAPSHOT_BEGIN on top gives the exact state, since every record is an after-image.
docs/design/journal.md argues for this and against the alternatives.

Invariants
- Sequences have no gaps; durability is a prefix of the log.
- A zone is recycled only when it lies before the newest complete snapshot.
- Nothing is appended behind a torn batch: after an unclean end the log goes on in a fresh zone.
- A failed append or flush is final: the journal refuses everything from then on. Only a zone in
  which there is no batch yet may be left for another one; nothing was acknowledged in it.
- Behind every batch of log so many zones are left that a snapshot fits into them: a mount after a
  crash writes one before anything can be reused (`admits`).
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice

from retainzfs import errors, failpoints, layout
from retainzfs._zio import Slot
from retainzfs.device import Condition, Device
from retainzfs.device.protocol import ACTIVE
from retainzfs.layout import BLOCK, BatchHeader, BatchKind, Superblock
from retainzfs.replay import (
    METADATA_ZONES_MIN,
    OF_SNAPSHOT,
    Batch,
    Replay,
    metadata_zones,
    read_superblocks,
    records,
    scan,
)

__all__ = [
    "METADATA_ZONES_MIN",
    "Batch",
    "Journal",
    "Replay",
    "metadata_zones",
    "read_superblocks",
    "records",
    "scan",
]

SLICE = 64 << 10  # bytes of snapshot between two rounds; a few milliseconds
BATCH_MIN = 32 << 10  # bytes; a batch must hold any operation
BATCHES_A_ZONE = 16  # what is left of a zone before the next one is less than a batch

WRITABLE = (Condition.EMPTY, *ACTIVE)
STUCK = (Condition.READ_ONLY, Condition.OFFLINE)  # a zone that is never written again
ATTEMPTS = 3  # zones that are tried as the next one of the chain


PADDING = BLOCK + layout.BATCH_HEADER  # bytes of a batch beside its records, at most


class Journal:
    """Appends batches; see `replay` for reading them back."""

    def __init__(self, device: Device, superblock: Superblock) -> None:
        self.device = device
        self.superblock = superblock
        self.zones = superblock.metadata_zones
        self.capacity = superblock.zone_capacity
        self.batch_max = max(BATCH_MIN, min(layout.BATCH_MAX, self.capacity // BATCHES_A_ZONE))
        self.queue_max = self.batch_max // 2  # bytes of records that may wait for a round
        self.slice_max = min(SLICE, self.batch_max // 2)  # a record may come on top
        # Of a zone, surely: a batch does not cross its end, and is a slice and a record at most.
        self._usable = self.capacity - 2 * BLOCK - self.slice_max - self.batch_max // 2
        # Bytes of records that a snapshot may take: half of the zones, for there are two of them.
        fits = (self.zones // 2 * self._usable - 3 * PADDING) * self.slice_max
        half = fits // (self.slice_max + PADDING)
        self.budget = min(half, self.zones * self.capacity // 4)
        self.epoch = 1
        self.sequence = 0  # of the newest batch
        self.log_sequence = 0  # of the newest LOG batch
        self.durable = 0
        self.position = 0  # of the zone being written, in the chain
        self.chain: dict[int, int] = {}  # position → zone
        self.write_pointer = 0
        self.torn = True  # nothing may follow what the current zone holds
        self.given_up: list[int] = []  # zones to be reset before the next one begins, in order
        self.snapshot_position = 0
        self.snapshot_begun = 0  # sequence of the SNAPSHOT_BEGIN without its end, else 0
        self.snapshot_begun_position = 0
        self.snapshot_closing = False  # it has a SNAPSHOT_LOG
        self.since_snapshot = 0  # bytes of log since the newest snapshot began
        self.snapshot_size = 0  # bytes of the newest complete snapshot
        self.appended = 0  # bytes, padding and superblocks included
        self._refused: set[int] = set()  # zones whose first append, or reset, failed
        self.failed: errors.RetainzError | None = None

    def due(self, size: int) -> bool:
        """Whether a snapshot, of `size` bytes of records, should begin: the log is long, or zones
        are getting scarce."""
        if self.snapshot_begun:
            return False
        room = self.zones * self.capacity // 4
        long = min(room, max(4 * self.batch_max, 2 * self.snapshot_size))
        return self.since_snapshot > long or not self.admits(BLOCK, size)

    def admits(self, nbytes: int, size: int) -> bool:
        """Whether so many bytes of log leave room for the snapshot that follows a crash, of `size`
        bytes of records."""
        here = self.write_pointer + nbytes + BLOCK <= self.capacity and not self.torn
        return self._leaves((0 if here else self._span(nbytes)) + self._span(size))

    def spacious(self, size: int) -> bool:
        """Whether the log may go on between the slices of a snapshot of `size` bytes."""
        span = 0 if self._fits_here(size) else self._span(size)
        return self._leaves(span + 1 + self._span(size + self.batch_max))

    def _leaves(self, count: int) -> bool:
        """Whether so many zones hold nothing that a mount needs. This is asked in every round, so
        no more zones are looked at than that takes."""
        positions = range(self.snapshot_position, self.position + 1)
        needed = {self.chain.get(position) for position in positions}
        left = (z for z in range(self.zones) if z not in needed and not self._is_stuck(z))
        return len(list(islice(left, count))) == count

    def _span(self, nbytes: int) -> int:
        """Return how many zones so many bytes of records take at most, from a fresh one on."""
        batches = nbytes // self.slice_max + 3  # with the begin, the end, and what is logged
        return -(-(nbytes + batches * PADDING) // self._usable)

    def _fits_here(self, size: int) -> bool:
        batches = size // self.slice_max + 3
        return not self.torn and size + batches * PADDING <= self.capacity - self.write_pointer

    async def append(
        self, kind: BatchKind, payload: bytes, clock_s: float, expected: int = 0
    ) -> int:
        """Write one batch and return its sequence; it is durable after the next `flush`.

        A SNAPSHOT_BEGIN goes to a fresh zone unless the snapshot, of `expected` bytes of records,
        fits into this one: at its end it would keep the whole zone from being reused.
        """
        if self.failed is not None:
            raise self.failed
        sequence = self.sequence + 1
        if kind is BatchKind.SNAPSHOT_BEGIN:
            self.snapshot_begun = sequence
        header = BatchHeader(
            kind, len(payload), self.superblock.uuid, self.epoch, sequence, self.durable,
            self.snapshot_begun if kind in OF_SNAPSHOT else 0,
            self.log_sequence, clock_s,
        )  # fmt: skip
        data = layout.encode_batch(header, payload)
        assert len(data) <= self.capacity - BLOCK, "a batch fits into a metadata zone"
        try:
            apart = kind is BatchKind.SNAPSHOT_BEGIN and not self._fits_here(expected)
            if self.write_pointer + len(data) > self.capacity or self.torn or apart:
                await self._next_zone(sequence)
            try:
                await self._write(data)
            except errors.RetainzError:
                if self.write_pointer > BLOCK:
                    raise
                # No batch is in this zone yet: the next superblock says that none is missing.
                self._refused.add(self.chain[self.position])
                await self._next_zone(sequence)
                await self._write(data)
        except errors.RetainzError as error:
            self.failed = error
            raise
        self.sequence = sequence
        if kind is BatchKind.SNAPSHOT_BEGIN:
            self.snapshot_begun_position = self.position
            self.since_snapshot = 0
            self.snapshot_closing = False
        elif kind in (BatchKind.LOG, BatchKind.SNAPSHOT_LOG):
            self.log_sequence = sequence
            self.since_snapshot += len(data)
            self.snapshot_closing = kind is BatchKind.SNAPSHOT_LOG
        elif kind is BatchKind.SNAPSHOT_END and self.snapshot_closing:
            self.log_sequence = sequence  # without it that log does not count
        return sequence

    async def flush(self) -> None:
        """Everything appended before the call is durable after it. A failure is final."""
        if self.failed is not None:
            raise self.failed
        upto = self.sequence
        try:
            await self.device.flush()
        except errors.RetainzError as error:
            self.failed = error
            raise
        self.durable = max(self.durable, upto)

    def snapshot_complete(self, size: int) -> None:
        """The SNAPSHOT_END is durable: what lies before its beginning may be recycled."""
        assert self.durable >= self.sequence, "a snapshot counts only when it is durable"
        self.snapshot_position = self.snapshot_begun_position
        self.snapshot_begun = 0
        self.snapshot_size = size

    async def _next_zone(self, first_sequence: int) -> None:
        if self.chain:
            # The superblock's first sequence promises that every batch before it is there.
            await self.flush()
            await self._finish(self.chain[self.position])
            failpoints.reach("switch-finished")
        while self.given_up:
            # The newest first, one by one, so that a power cut leaves no hole in the chain.
            await self.device.reset([self.given_up[0]])
            del self.given_up[0]
            await self.device.flush()
        self.superblock = self.superblock._replace(
            position=self.position + 1,
            first_sequence=first_sequence,
            snapshot_position=self.snapshot_position,
            log_before=self.log_sequence,
        )
        zone = await self._begin()
        self.chain = {p: z for p, z in self.chain.items() if z != zone}
        self.position += 1
        self.chain[self.position] = zone
        self.write_pointer = BLOCK
        self.torn = False
        failpoints.reach("switch-written")
        # So that batches without a superblock before them can only be damage.
        await self.device.flush()

    async def _finish(self, zone: int) -> None:
        """Give back the zone's active slot."""
        if self.write_pointer < self.capacity:
            try:
                await self.device.finish(zone)
            except errors.RetainzError:
                if self.device.report_zone(zone).condition not in STUCK:
                    raise

    async def _begin(self) -> int:
        """Write the superblock into a free zone, and return which; a few may fail."""
        for attempt in range(1, ATTEMPTS + 1):
            zone = self._free_zone()
            try:
                await self.device.reset([zone])
            except errors.RetainzError as error:
                if attempt == ATTEMPTS or error.errno in errors.GONE:
                    raise
                # What it holds is older than the newest snapshot, and does no harm there.
                self._refused.add(zone)
                continue
            failpoints.reach("switch-reset")
            try:
                await self.device.ready(zone)
                await self.device.append(zone, 0, aligned(self.superblock.encode()))
            except errors.RetainzError as error:
                if attempt == ATTEMPTS or error.errno in errors.GONE or not await self._clear(zone):
                    raise
                self._refused.add(zone)
                continue
            self.appended += BLOCK
            return zone
        raise AssertionError("the last attempt succeeds or raises")

    async def _clear(self, zone: int) -> bool:
        """Whether the zone, where a superblock failed, is sure to hold none."""
        with suppress(errors.RetainzError):
            await self.device.reset([zone])
        with suppress(errors.RetainzError):
            report = self.device.report_zone(zone)
            return report.condition is Condition.OFFLINE or not report.write_pointer
        return False

    def _free_zone(self) -> int:
        stuck = self._stuck()
        used = stuck.union(self.chain.values())
        for zone in range(self.zones):
            if zone not in used:
                return zone
        old = [p for p, z in self.chain.items() if p < self.snapshot_position and z not in stuck]
        if not old:
            raise errors.NoSpace("the metadata zones are full; delete files")
        return self.chain[min(old)]

    def stuck(self) -> dict[int, Condition]:
        """Return the zones that take no writes; one that refused them counts as READ_ONLY."""
        told = {
            zone.index: zone.condition
            for zone in self.device.report(range(self.zones))
            if zone.condition in STUCK
        }
        return dict.fromkeys(self._refused, Condition.READ_ONLY) | told

    def _stuck(self) -> set[int]:
        """Return the same without asking the device."""
        return set(filter(self._is_stuck, range(self.zones)))

    def _is_stuck(self, zone: int) -> bool:
        return zone in self._refused or self.device.known(zone).condition in STUCK

    async def _write(self, data: bytes) -> None:
        zone = self.chain[self.position]
        await self.device.ready(zone)
        await self.device.append(zone, self.write_pointer, aligned(data))
        self.write_pointer += len(data)
        self.appended += len(data)

    def resume(self, replay: Replay, chain: dict[int, int], write_pointer: int) -> None:
        """Go on where a scan ended: behind the last batch, or in a fresh zone if that was torn."""
        self.sequence = self.durable = replay.sequence
        self.log_sequence = replay.log_sequence
        self.epoch = replay.epoch + 1
        self.chain = chain
        self.given_up = list(replay.given_up)
        self.position = max(chain)
        self.snapshot_position = replay.snapshot_position
        self.write_pointer = write_pointer
        self.torn = not replay.clean or chain[self.position] in self._stuck()
        self.snapshot_size = sum(len(b.payload) for b in replay.snapshot)
        self.since_snapshot = sum(len(b.payload) + BLOCK for b in replay.log)

    def settled(self) -> None:
        """The device has settled behind the scan. If that ended the zone of the newest batch, or a
        write was cut there that the report did not show, the log goes on in a fresh one."""
        report = self.device.report_zone(self.chain[self.position])
        if report.condition not in WRITABLE or report.write_pointer != self.write_pointer:
            self.torn = True


def aligned(data: bytes) -> memoryview:
    """Return the bytes in memory that direct I/O accepts."""
    slot = memoryview(Slot(len(data)))
    slot[:] = data
    return slot
