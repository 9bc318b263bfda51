"""Repair of an unmounted target: only what loses no acknowledged byte, behind a copy of what was.

What is wrong is found by `fsck`; here it is put right. Names and counts are mended by records in
the log, like any other change, and a new snapshot ends the log cleanly. After a power cut a second
repair goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import trio

from retainzfs import backup, consistency, errors, journal, layout, recovery
from retainzfs.committer import state
from retainzfs.device import Device, is_memory, open_target
from retainzfs.device.heads import head_faults, mend_head
from retainzfs.fsck import Report
from retainzfs.journal import Journal
from retainzfs.layout import BatchKind
from retainzfs.mending import Mender
from retainzfs.namespace import Namespace


def repair(target: str, report: Report, archive: str | None = None) -> str:
    """Put right what a report says can be; return the name of the archive with what was there.

    Raises TargetBusy, OSError when the archive cannot be made, NoSpace when there is no room for it
    or, which only costs the attempt, in the metadata zones.
    """
    if is_memory(target):
        raise errors.UsageError(f"{target}: memory needs no repair")
    device = open_target(target)
    return trio.run(_repair, device, report, archive)


async def _repair(device: Device, report: Report, archive: str | None) -> str:
    try:
        await device.start()
        try:
            recovered = await recovery.load(device)
        except errors.Damaged:
            recovered = None  # of the log nothing can be put right, of the head perhaps
        superblocks = await journal.read_superblocks(device)
        newest = max(superblocks.values(), key=lambda s: s.position)
        name = archive or backup.default_name(newest.uuid)
        zones = device.report(range(newest.metadata_zones))
        written = [(zone.index, zone.write_pointer) for zone in zones if zone.write_pointer]
        backup.save(device, written, report.as_dict(), name)
        mend_head(device.name, head_faults(device))
        if recovered is not None:
            await device.settle()
            recovered.journal.settled()
            mender = Mender(recovered.namespace, time.time_ns())
            if not any(consistency.check(recovered.namespace)):
                log = recovered.journal
                await _log(log, mender.records, recovered.clock_s)
                await _end(log, recovered.namespace, recovered.clock_s)
    finally:
        await device.aclose()
    return name


async def _log(log: Journal, records: list[layout.Record], clock_s: float) -> None:
    """Append all records as one operation if they fit into a batch, else in order."""
    for payload in _payloads(iter(records), log.batch_max):
        await log.append(BatchKind.LOG, payload, clock_s)
    await log.flush()


async def _end(log: Journal, namespace: Namespace, clock_s: float) -> None:
    """Write a snapshot and end the log cleanly."""
    await log.append(BatchKind.SNAPSHOT_BEGIN, b"", clock_s)
    size = 0
    for payload in _payloads(state(namespace), log.slice_max):
        await log.append(BatchKind.SNAPSHOT, payload, clock_s)
        size += len(payload)
    await log.append(BatchKind.SNAPSHOT_END, b"", clock_s)
    await log.flush()
    log.snapshot_complete(size)
    await log.append(BatchKind.CLEAN, b"", clock_s)
    await log.flush()


def _payloads(records: Iterator[layout.Record], limit: int) -> Iterator[bytes]:
    pieces: list[bytes] = []
    size = 0
    for record in records:
        piece = layout.encode(record)
        if pieces and size + len(piece) > limit:
            yield b"".join(pieces)
            pieces, size = [], 0
        pieces.append(piece)
        size += len(piece)
    if pieces:
        yield b"".join(pieces)
