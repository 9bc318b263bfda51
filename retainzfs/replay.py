"""Reading the metadata zones back: which batches are there, which are missing, where to begin.

A batch is known to have been durable when an intact batch behind it, or the superblock of the next
zone, says so. Such a batch that is broken leaves a gap. What stood in it tells the next intact
batch, which names the newest LOG batch before it: a gap with a LOG batch is damage of the log, any
other costs only the snapshot that it lies in, and an older one takes its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from retainzfs import errors, layout
from retainzfs.device import Condition, Device
from retainzfs.layout import BLOCK, BatchHeader, BatchKind, Superblock

METADATA_ZONES_MIN = 4  # two for the newest snapshot and its log, two for the one being written
METADATA_SHARE = 100  # one zone in so many holds metadata
OF_SNAPSHOT = (
    BatchKind.SNAPSHOT_BEGIN,
    BatchKind.SNAPSHOT,
    BatchKind.SNAPSHOT_LOG,
    BatchKind.SNAPSHOT_END,
)
LOGS = (BatchKind.LOG, BatchKind.SNAPSHOT_LOG)
READ_CHUNK = 1 << 20  # bytes read at a time while replaying
UNBOUNDED = 1 << 64  # behind every sequence


def metadata_zones(zone_count: int) -> int:
    return max(METADATA_ZONES_MIN, zone_count // METADATA_SHARE)


@dataclass(slots=True)
class Batch:
    header: BatchHeader
    payload: bytes
    end: int = 0  # byte of the zone behind it


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches [first, end) were durable and cannot be read."""

    first: int
    end: int
    zone: int
    byte: int  # of the zone, where the first of them began
    log: bool  # whether one of them may be a LOG batch

    def __str__(self) -> str:
        return (
            f"metadata zone {self.zone}, byte {self.byte}: batch {self.first} is broken,"
            " was durable"
        )


@dataclass(slots=True)
class Replay:
    """What a scan of the metadata zones found."""

    superblock: Superblock
    snapshot: list[Batch] = field(default_factory=list)
    log: list[Batch] = field(default_factory=list)
    gaps: list[Gap] = field(
        default_factory=list
    )  # without a LOG batch, behind the snapshot's begin
    fuzzy_until: int = 0  # log batches up to this sequence may be older than the snapshot's state
    snapshot_position: int = 0  # chain position where that snapshot begins
    sequence: int = 0  # of the newest batch
    needed: int = 0  # of the newest batch without which something would be missing
    log_sequence: int = 0  # of the newest LOG batch
    epoch: int = 0  # mounts of the volume before this one
    clean: bool = False
    rolled_back: int = 0  # bytes of a torn tail that were discarded
    given_up: list[int] = field(default_factory=list)  # zones at the chain's end, newest first
    clock_s: float = 0.0


@dataclass(slots=True)
class ZoneLog:
    """What one zone of the chain holds."""

    position: int
    first_sequence: int
    batches: list[Batch]
    gaps: list[Gap]
    lost: int  # bytes of a torn tail

    @property
    def end(self) -> int:
        return self.batches[-1].end if self.batches else BLOCK


async def read_superblocks(device: Device) -> dict[int, Superblock]:
    """Return zone → superblock for every zone that begins with a complete one."""
    found: dict[int, Superblock] = {}
    for zone in device.report(range(metadata_zones(device.geometry.zone_count))):
        if zone.write_pointer < BLOCK and zone.condition is not Condition.FULL:
            continue
        if zone.condition is Condition.OFFLINE:
            continue
        block = await _Window(device, zone.index, BLOCK).read(0, BLOCK)
        superblock = Superblock.decode(bytes(block), device.name)
        if superblock is not None:
            found[zone.index] = superblock
    return found


async def scan(device: Device) -> tuple[Replay, dict[int, int], int]:
    """Read the metadata zones. Returns the replay, the chain (position → zone) and where the
    newest zone goes on, bytes.

    Raises ForeignTarget when there is no superblock, Damaged where log batches that were once
    durable are missing or broken, or no whole snapshot is left. A torn tail is no damage: replay
    ends there, and a later mount goes on in a fresh zone whose superblock states the sequence that
    follows.
    """
    superblocks = await read_superblocks(device)
    if not superblocks:
        await _check_remains(device)
        raise errors.ForeignTarget(device.name, "no superblock in its metadata zones")
    newest = max(superblocks.values(), key=lambda s: s.position)
    _check_geometry(device, newest)
    chain = {s.position: z for z, s in superblocks.items() if s.uuid == newest.uuid}
    _check_head(device, chain[newest.position])
    replay = Replay(newest)
    zones: list[ZoneLog] = []
    behind: Superblock | None = None
    for position in range(newest.position, 0, -1):
        if position not in chain:
            break
        first = superblocks[chain[position]]
        zones.insert(0, await _read_zone(device, chain[position], first, behind))
        behind = first
        if position <= newest.snapshot_position and _select(device.name, replay, zones):
            break
    if not replay.snapshot_position and not _select(device.name, replay, zones):
        why = [str(gap) for zone in zones for gap in zone.gaps][:1]
        why += [f"zone {zone} is offline" for zone in _offline(device)]
        what = "; ".join(["no complete snapshot in its metadata zones", *why])
        raise errors.Damaged(device.name, what)
    replay.sequence = max(replay.sequence, newest.first_sequence - 1)
    replay.log_sequence = max(replay.log_sequence, newest.log_before)
    replay.rolled_back = zones[-1].lost
    await _check_headless(device, set(superblocks), replay)
    last = zones[-1].batches[-1].header.kind if zones[-1].batches else None
    replay.clean = last is BatchKind.CLEAN and not replay.rolled_back and not replay.gaps
    if not replay.clean:
        _give_up(device, replay, chain, zones)
    newest_zone = device.report_zone(chain[zones[-1].position])
    full = newest_zone.condition is Condition.FULL  # it was finished, and the next one not begun
    return replay, chain, newest_zone.capacity if full else zones[-1].end


def _give_up(device: Device, replay: Replay, chain: dict[int, int], zones: list[ZoneLog]) -> None:
    """Drop zones at the end of the chain that hold nothing but the beginnings of snapshots.

    Each mount that a power cut ends early leaves one; kept, they would fill the metadata zones.
    """
    while not any(batch.header.sequence <= replay.needed for batch in zones[-1].batches):
        if device.report_zone(chain[zones[-1].position]).condition is Condition.READ_ONLY:
            return  # it cannot be reset
        dropped = zones.pop()
        replay.given_up.append(chain.pop(dropped.position))
        replay.sequence = dropped.first_sequence - 1


def _offline(device: Device) -> list[int]:
    """Return the metadata zones that are offline."""
    zones = device.report(range(metadata_zones(device.geometry.zone_count)))
    return [zone.index for zone in zones if zone.condition is Condition.OFFLINE]


def _check_head(device: Device, head: int) -> None:
    """The log goes on behind a zone that takes no more: where, if one of the others is offline?"""
    offline = _offline(device)
    if offline and device.report_zone(head).condition in (Condition.FULL, Condition.READ_ONLY):
        zones = " and ".join(map(str, offline))
        raise errors.Damaged(
            device.name,
            f"metadata zone {zones} is offline, and the end of the log may have been in it",
        )


async def _check_headless(device: Device, known: set[int], replay: Replay) -> None:
    """A metadata zone whose superblock is broken must not hold log that was once durable."""
    for report in device.report(range(metadata_zones(device.geometry.zone_count))):
        limit = report.capacity if report.condition is Condition.FULL else report.write_pointer
        if report.index in known or limit < BLOCK or report.condition is Condition.OFFLINE:
            continue
        pieces = await _pieces(device, report.index, replay.superblock.uuid)
        headers = [batch.header for batch, _ in pieces if batch is not None]
        headers = [header for header in headers if header.sequence > replay.sequence]
        for header in headers:
            if header.kind in LOGS or header.log_before > replay.log_sequence:
                raise errors.Damaged(
                    device.name,
                    f"metadata zone {report.index} holds batch {header.sequence} and has lost its"
                    " superblock",
                )
        if headers:
            first, end = headers[0].sequence, headers[-1].sequence + 1
            replay.gaps.append(Gap(first, end, report.index, 0, log=False))


async def _check_remains(device: Device) -> None:
    """Batches without any superblock are a volume all the same, and not to be formatted. So may be
    what an offline zone held."""
    for report in device.report(range(metadata_zones(device.geometry.zone_count))):
        if report.condition is Condition.OFFLINE:
            raise errors.Damaged(
                device.name,
                f"metadata zone {report.index} is offline, and the others have no superblock",
            )
        if report.write_pointer < 2 * BLOCK:
            continue
        window = _Window(device, report.index, report.write_pointer)
        size = layout.batch_blocks(await window.read(BLOCK, BLOCK)) * BLOCK
        if size and BLOCK + size <= window.limit and await window.batch(BLOCK, size) is not None:
            raise errors.Damaged(
                device.name, f"metadata zone {report.index} has lost its superblock"
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
    device: Device, zone: int, own: Superblock, behind: Superblock | None
) -> ZoneLog:
    """Return a zone's batches up to the first one of the zone behind it.

    What follows was given up by a mount. In the newest zone, whose end nobody states, batches that
    no other one knows to be durable count as long as none before them is missing.
    """
    until = behind.first_sequence if behind else UNBOUNDED
    pieces = await _pieces(device, zone, own.uuid, until)
    known = (batch.header.durable for batch, _ in pieces if batch)
    durable = until - 1 if behind else max(known, default=0)
    log = ZoneLog(own.position, own.first_sequence, [], [], 0)
    expected = own.first_sequence
    for batch, size in pieces:
        log.lost += size
        if batch is None or not expected <= batch.header.sequence < until:
            continue
        missing = min(batch.header.sequence, durable + 1)
        if expected < missing:
            holds_log = batch.header.log_before >= expected
            log.gaps.append(Gap(expected, missing, zone, log.end, holds_log))
            expected = missing
        if batch.header.sequence == expected:
            log.batches.append(batch)
            log.lost = 0
            expected += 1
    if behind and expected < until:
        log.gaps.append(Gap(expected, until, zone, log.end, behind.log_before >= expected))
    return log


async def _pieces(
    device: Device, zone: int, uuid: bytes, until: int = UNBOUNDED
) -> list[tuple[Batch | None, int]]:
    """Return the zone's intact batches of this volume, None for each block that is none, and the
    bytes that each takes; up to the one before `until`.

    Behind a broken batch the blocks are searched on. Zeros in a finished zone were never written.
    """
    report = device.report_zone(zone)
    full = report.condition is Condition.FULL
    limit = report.capacity if full else report.write_pointer
    window = _Window(device, zone, limit)
    pieces: list[tuple[Batch | None, int]] = []
    at = BLOCK
    while at < limit:
        block = await window.read(at, BLOCK)
        size = layout.batch_blocks(block) * BLOCK
        batch = await window.batch(at, size) if size and at + size <= limit else None
        if batch is not None and batch.header.uuid == uuid:
            pieces.append((batch, size))
            at = batch.end
            if batch.header.sequence + 1 == until:
                break
            continue
        if not full or not block or any(block):
            pieces.append((None, BLOCK))
        at += BLOCK
    return pieces


class _Window:
    """Reads a zone forward in large pieces, hands it out in small ones."""

    def __init__(self, device: Device, zone: int, limit: int) -> None:
        self.device = device
        self.zone = zone
        self.limit = limit
        self.chunk = READ_CHUNK
        self.base = 0
        self.data = memoryview(b"")

    async def read(self, at: int, length: int) -> memoryview:
        """Return the bytes, nothing where the device has lost some of them."""
        if at < self.base or at + length > self.base + len(self.data):
            want = min(max(length, self.chunk), self.limit - at)
            try:
                self.data = memoryview(await self.device.read(self.zone, at, want))
            except errors.DeviceError:
                if want == length:
                    return memoryview(b"")
                self.chunk = BLOCK  # in this zone nothing more is read that was not asked for
                return await self.read(at, length)
            self.base = at
        return self.data[at - self.base : at - self.base + length]

    async def batch(self, at: int, size: int) -> Batch | None:
        """Return the batch that begins here, None when there is none. Raises Damaged."""
        try:
            decoded = layout.decode_batch(await self.read(at, size))
        except ValueError as error:
            where = f"metadata zone {self.zone}, byte {at}"
            raise errors.Damaged(self.device.name, f"{where}: {error}") from error
        return decoded and Batch(decoded[0], bytes(decoded[1]), at + size)


def _select(name: str, replay: Replay, zones: list[ZoneLog]) -> bool:
    """Pick the newest whole snapshot and the log behind its beginning; False if there is none.

    Raises Damaged when the log behind every snapshot that could be picked has lost a batch.
    """
    gaps = [gap for zone in zones for gap in zone.gaps]
    batches = [batch for zone in zones for batch in zone.batches]
    begins = {
        batch.header.sequence: zone.position
        for zone in zones
        for batch in zone.batches
        if batch.header.kind is BatchKind.SNAPSHOT_BEGIN
    }
    headers = [batch.header for batch in batches]
    for end in reversed(headers):
        if end.kind is not BatchKind.SNAPSHOT_END or end.snapshot not in begins:
            continue
        replay.gaps = [gap for gap in gaps if gap.end > end.snapshot]
        for gap in replay.gaps:
            if gap.log:
                raise errors.Damaged(name, str(gap))
        if any(gap.first < end.sequence for gap in replay.gaps):
            continue
        replay.fuzzy_until = end.sequence
        replay.snapshot_position = begins[end.snapshot]
        replay.sequence = headers[-1].sequence
        last = headers[-1]
        replay.log_sequence = last.sequence if last.kind in LOGS else last.log_before
        replay.epoch = max(h.epoch for h in headers)
        replay.clock_s = max(h.clock_s for h in headers)
        replay.needed = end.sequence
        ended = {h.snapshot: h.sequence for h in headers if h.kind is BatchKind.SNAPSHOT_END}
        for batch in batches:
            header = batch.header
            if header.kind is BatchKind.SNAPSHOT and header.snapshot == end.snapshot:
                replay.snapshot.append(batch)
            elif header.sequence > end.snapshot and header.kind in LOGS:
                # The log of a snapshot's last round counts with the end of that.
                until = header.sequence
                if header.kind is BatchKind.SNAPSHOT_LOG:
                    until = ended.get(header.snapshot, 0)
                if until:
                    replay.log.append(batch)
                    replay.needed = max(replay.needed, until)
        return True
    return False


def records(batches: list[Batch], name: str) -> Iterator[tuple[int, layout.Record]]:
    """Yield (sequence, record). Raises Damaged for sound bytes that are no record."""
    for batch in batches:
        try:
            for record in layout.decode(batch.payload):
                yield batch.header.sequence, record
        except ValueError as error:
            raise errors.Damaged(name, f"batch {batch.header.sequence}: {error}") from error
