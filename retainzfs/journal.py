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
- A failed append or flush is final: the journal refuses everything from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from retainzfs import errors, failpoints, layout
from retainzfs._zio import Slot
from retainzfs.device import Condition, Device
from retainzfs.layout import BLOCK, BatchHeader, BatchKind, Superblock

METADATA_ZONES_MIN = 4  # two for the newest snapshot and its log, two for the one being written
METADATA_SHARE = 100  # one zone in so many holds metadata
STUCK = (Condition.READ_ONLY, Condition.OFFLINE)  # a zone that is never written again
OF_SNAPSHOT = (BatchKind.SNAPSHOT_BEGIN, BatchKind.SNAPSHOT, BatchKind.SNAPSHOT_END)
UNFINISHED = (BatchKind.SNAPSHOT_BEGIN, BatchKind.SNAPSHOT)  # nothing, without what comes behind
READ_CHUNK = 1 << 20  # bytes read at a time while replaying


def metadata_zones(zone_count: int) -> int:
    return max(METADATA_ZONES_MIN, zone_count // METADATA_SHARE)


@dataclass(slots=True)
class Batch:
    header: BatchHeader
    payload: bytes


@dataclass(slots=True)
class Replay:
    """What a scan of the metadata zones found."""

    superblock: Superblock
    snapshot: list[Batch] = field(default_factory=list)
    log: list[Batch] = field(default_factory=list)
    fuzzy_until: int = 0  # log batches up to this sequence may be older than the snapshot's state
    snapshot_position: int = 0  # chain position where that snapshot begins
    sequence: int = 0  # of the newest batch
    epoch: int = 0  # mounts of the volume before this one
    clean: bool = False
    rolled_back: int = 0  # bytes of a torn tail that were discarded
    given_up: list[int] = field(default_factory=list)  # zones behind the chain, to be reset first
    clock_s: float = 0.0


class Journal:
    """Appends batches; see `scan` for reading them back."""

    def __init__(self, device: Device, superblock: Superblock) -> None:
        self.device = device
        self.superblock = superblock
        self.zones = superblock.metadata_zones
        self.capacity = superblock.zone_capacity
        self.batch_max = min(layout.BATCH_MAX, self.capacity // 4)
        self.epoch = 1
        self.sequence = 0  # of the newest batch
        self.durable = 0
        self.position = 0  # of the zone being written, in the chain
        self.chain: dict[int, int] = {}  # position → zone
        self.given_up: list[int] = []  # zones to be reset, the last one first
        self.write_pointer = 0
        self.torn = True  # nothing may follow what the current zone holds
        self.snapshot_position = 0
        self.snapshot_begun = 0  # sequence of the SNAPSHOT_BEGIN without its end, else 0
        self.snapshot_begun_position = 0
        self.since_snapshot = 0  # bytes of log since the newest snapshot began
        self.snapshot_size = 0  # bytes of the newest complete snapshot
        self.appended = 0  # bytes, padding and superblocks included
        self.failed: errors.RetainzError | None = None

    @property
    def due(self) -> bool:
        """Whether a snapshot should begin: the log would soon not fit beside two snapshots."""
        if self.snapshot_begun:
            return False
        room = self.zones * self.capacity // 4
        return self.since_snapshot > min(room, max(4 * self.batch_max, 2 * self.snapshot_size))

    @property
    def crowded(self) -> bool:
        """Whether metadata may grow no more: two snapshots and one log must fit."""
        budget = self.zones * self.capacity // 4
        return self.snapshot_size + min(self.since_snapshot, self.snapshot_size) > budget

    async def append(self, kind: BatchKind, payload: bytes, clock_s: float) -> int:
        """Write one batch and return its sequence; it is durable after the next `flush`."""
        if self.failed is not None:
            raise self.failed
        sequence = self.sequence + 1
        if kind is BatchKind.SNAPSHOT_BEGIN:
            self.snapshot_begun = sequence
        header = BatchHeader(
            kind, len(payload), self.superblock.uuid, self.epoch, sequence, self.durable,
            self.snapshot_begun if kind in OF_SNAPSHOT else 0,
            clock_s,
        )  # fmt: skip
        data = layout.encode_batch(header, payload)
        assert len(data) <= self.capacity - BLOCK, "a batch fits into a metadata zone"
        try:
            if self.write_pointer + len(data) > self.capacity or self.torn:
                await self._next_zone(sequence)
            await self._write(data)
        except errors.RetainzError as error:
            self.failed = error
            raise
        self.sequence = sequence
        if kind is BatchKind.SNAPSHOT_BEGIN:
            self.snapshot_begun_position = self.position
            self.since_snapshot = 0
        elif kind is BatchKind.LOG:
            self.since_snapshot += len(data)
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
            current = self.chain[self.position]
            if self.write_pointer < self.capacity and current not in self._stuck():
                await self.device.finish(current)
            failpoints.reach("switch-finished")
        while self.given_up:
            # One after the other: a scan finds the newest zone and goes back without gaps.
            await self.device.reset([self.given_up.pop()])
            await self.device.flush()
        zone = self._free_zone()
        await self.device.reset([zone])
        failpoints.reach("switch-reset")
        self.chain = {p: z for p, z in self.chain.items() if z != zone}
        self.position += 1
        self.chain[self.position] = zone
        self.write_pointer = 0
        self.torn = False
        self.superblock = self.superblock._replace(
            position=self.position,
            first_sequence=first_sequence,
            snapshot_position=self.snapshot_position,
        )
        await self._write(self.superblock.encode())
        failpoints.reach("switch-written")
        # So that batches without a superblock before them can only be damage.
        await self.device.flush()

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

    def _stuck(self) -> set[int]:
        return {z.index for z in self.device.report()[: self.zones] if z.condition in STUCK}

    async def _write(self, data: bytes) -> None:
        zone = self.chain[self.position]
        await self.device.ready(zone)
        await self.device.append(zone, self.write_pointer, aligned(data))
        self.write_pointer += len(data)
        self.appended += len(data)

    def resume(self, replay: Replay, chain: dict[int, int], write_pointer: int) -> None:
        """Go on where a scan ended: behind the last batch, or in a fresh zone if that was torn."""
        self.sequence = self.durable = replay.sequence
        self.epoch = replay.epoch + 1
        self.chain = chain
        self.given_up = list(replay.given_up)
        self.position = max(chain)
        self.snapshot_position = replay.snapshot_position
        self.write_pointer = write_pointer
        self.torn = not replay.clean or chain[self.position] in self._stuck()
        self.snapshot_size = sum(len(b.payload) for b in replay.snapshot)
        self.since_snapshot = sum(len(b.payload) + BLOCK for b in replay.log)


def aligned(data: bytes) -> memoryview:
    """Return the bytes in memory that direct I/O accepts."""
    slot = memoryview(Slot(len(data)))
    slot[:] = data
    return slot


async def read_superblocks(device: Device) -> dict[int, Superblock]:
    """Return zone → superblock for every zone that begins with a complete one."""
    found: dict[int, Superblock] = {}
    report = device.report()
    limit = metadata_zones(len(report))
    for zone in report[:limit]:
        if zone.write_pointer < BLOCK and zone.condition is not Condition.FULL:
            continue
        if zone.condition is Condition.OFFLINE:
            continue
        block = bytes(await device.read(zone.index, 0, BLOCK))
        superblock = Superblock.decode(block, device.name)
        if superblock is not None:
            found[zone.index] = superblock
    return found


async def scan(device: Device) -> tuple[Replay, dict[int, int], int]:
    """Read the metadata zones. Returns the replay, the chain (position → zone) and where the
    newest zone's batches end, bytes.

    Raises ForeignTarget when there is no superblock, Damaged where batches that were once durable
    are missing or broken. A torn tail is no damage: replay ends there, and a later mount goes on
    in a fresh zone whose superblock states the sequence that follows.
    """
    superblocks = await read_superblocks(device)
    if not superblocks:
        raise errors.ForeignTarget(device.name, "no superblock in its metadata zones")
    newest = max(superblocks.values(), key=lambda s: s.position)
    _check_geometry(device, newest)
    chain = {s.position: z for z, s in superblocks.items() if s.uuid == newest.uuid}
    first = newest.position
    while first - 1 in chain and first > newest.snapshot_position:
        first -= 1
    replay = Replay(newest)
    batches: list[Batch] = []
    begins: dict[int, int] = {}  # sequence of a SNAPSHOT_BEGIN → chain position
    needed = first  # position of the newest zone that must not be given up
    end, count = BLOCK, 0  # where its batches end, and the number of batches up to there
    for position in range(first, newest.position + 1):
        zone = chain[position]
        expected = superblocks[zone].first_sequence
        if batches and batches[-1].header.sequence + 1 != expected:
            raise errors.Damaged(
                device.name,
                f"metadata zone {zone} begins with batch {expected}, but the zone before it ends "
                f"with {batches[-1].header.sequence}",
            )
        # What lies behind the sequence with which the next zone begins was given up by a mount.
        until = superblocks[chain[position + 1]].first_sequence if position < newest.position else 0
        found, found_end, lost = await _read_zone(device, zone, newest.uuid, expected, until)
        batches += found
        for batch in found:
            if batch.header.kind is BatchKind.SNAPSHOT_BEGIN:
                begins[batch.header.sequence] = position
        if position == first or any(b.header.kind not in UNFINISHED for b in found):
            needed, end, count = position, found_end, len(batches)
            replay.rolled_back = lost
    # Mounts that die before their first snapshot is complete must not use up the zones.
    replay.given_up = [chain.pop(p) for p in range(needed + 1, newest.position + 1)]
    _select(device.name, replay, batches[:count], begins)
    await _check_headless(device, set(superblocks), newest.uuid, replay.sequence)
    ended = batches[count - 1].header.kind is BatchKind.CLEAN
    replay.clean = ended and not replay.rolled_back and not replay.given_up
    return replay, chain, end


async def _check_headless(device: Device, known: set[int], uuid: bytes, sequence: int) -> None:
    """A metadata zone whose superblock is broken must not hold what was once durable."""
    for report in device.report()[: metadata_zones(device.geometry.zone_count)]:
        limit = report.capacity if report.condition is Condition.FULL else report.write_pointer
        if report.index in known or limit < BLOCK or report.condition is Condition.OFFLINE:
            continue
        window = _Window(device, report.index, limit)
        for at in range(BLOCK, limit, BLOCK):
            size = layout.batch_blocks(await window.read(at, BLOCK)) * BLOCK
            if not size or at + size > limit:
                continue
            decoded = await window.batch(at, size)
            if decoded is not None and decoded[0].uuid == uuid and decoded[0].sequence > sequence:
                raise errors.Damaged(
                    device.name,
                    f"metadata zone {report.index} holds batch {decoded[0].sequence} and has lost "
                    "its superblock",
                )


def _check_geometry(device: Device, superblock: Superblock) -> None:
    geometry = device.geometry
    ours = (superblock.zone_size, superblock.zone_capacity, superblock.zone_count)
    if superblock.metadata_zones != metadata_zones(superblock.zone_count):
        raise errors.Damaged(device.name, "its superblock counts other metadata zones")
    theirs = (geometry.zone_size, geometry.zone_capacity, geometry.zone_count)
    if ours != theirs:
        raise errors.Damaged(
            device.name,
            f"its superblock was written for zones of {ours[0]} bytes, {ours[1]} usable, {ours[2]}"
            f" of them; the device has {theirs[0]}, {theirs[1]}, {theirs[2]}",
        )


async def _read_zone(
    device: Device, zone: int, uuid: bytes, expected: int, until: int
) -> tuple[list[Batch], int, int]:
    """Return the zone's batches from sequence `expected` up to before `until` (0: all), where they
    end, and how many bytes lie broken behind.

    Behind a broken batch the blocks are searched on: a later batch shows whether it was durable.
    """
    report = device.report()[zone]
    limit = report.capacity if report.condition is Condition.FULL else report.write_pointer
    window = _Window(device, zone, limit)
    batches: list[Batch] = []
    at, end, lost = BLOCK, BLOCK, 0
    while at < limit and expected != until:
        blocks = layout.batch_blocks(await window.read(at, BLOCK))
        size = blocks * BLOCK
        batch = None
        if blocks and at + size <= limit:
            decoded = await window.batch(at, size)
            if decoded is not None and decoded[0].uuid == uuid:
                batch = Batch(decoded[0], bytes(decoded[1]))
        if batch is None:
            if report.condition is Condition.FULL and not any(await window.read(at, BLOCK)):
                break  # the zone was finished here
            lost += BLOCK
            at += BLOCK
            continue
        if batch.header.sequence != expected or lost:
            if batch.header.durable >= expected:
                raise errors.Damaged(
                    device.name,
                    f"metadata zone {zone}, byte {end}: batch {expected} is broken, was durable",
                )
            lost += size
        else:
            batches.append(batch)
            expected += 1
            end = at + size
        at += size
    return batches, end, lost


class _Window:
    """Reads a zone forward in large pieces, hands it out in small ones."""

    def __init__(self, device: Device, zone: int, limit: int) -> None:
        self.device = device
        self.zone = zone
        self.limit = limit
        self.base = 0
        self.data = memoryview(b"")

    async def read(self, at: int, length: int) -> memoryview:
        if at < self.base or at + length > self.base + len(self.data):
            want = min(max(length, READ_CHUNK), self.limit - at)
            self.data = memoryview(await self.device.read(self.zone, at, want))
            self.base = at
        return self.data[at - self.base : at - self.base + length]

    async def batch(self, at: int, size: int) -> tuple[BatchHeader, memoryview] | None:
        """Return the batch that begins here, None when there is none. Raises Damaged."""
        try:
            return layout.decode_batch(await self.read(at, size))
        except ValueError as error:
            where = f"metadata zone {self.zone}, byte {at}"
            raise errors.Damaged(self.device.name, f"{where}: {error}") from error


def _select(name: str, replay: Replay, batches: list[Batch], begins: dict[int, int]) -> None:
    """Pick the newest complete snapshot and the log behind its beginning."""
    headers = [b.header for b in batches]
    ends = (h for h in reversed(headers) if h.kind is BatchKind.SNAPSHOT_END)
    end = next((h for h in ends if h.snapshot in begins), None)
    if end is None:
        raise errors.Damaged(name, "no complete snapshot in its metadata zones")
    replay.fuzzy_until = end.sequence
    replay.snapshot_position = begins[end.snapshot]
    replay.sequence = headers[-1].sequence
    replay.epoch = max(h.epoch for h in headers)
    replay.clock_s = max(h.clock_s for h in headers)
    for batch in batches:
        header = batch.header
        if header.kind is BatchKind.SNAPSHOT and header.snapshot == end.snapshot:
            replay.snapshot.append(batch)
        elif header.kind is BatchKind.LOG and header.sequence > end.snapshot:
            replay.log.append(batch)


def records(batches: list[Batch], name: str) -> Iterator[tuple[int, layout.Record]]:
    """Yield (sequence, record). Raises Damaged for sound bytes that are no record."""
    for batch in batches:
        try:
            for record in layout.decode(batch.payload):
                yield batch.header.sequence, record
        except ValueError as error:
            raise errors.Damaged(name, f"batch {batch.header.sequence}: {error}") from error
