"""From the journal to a volume in memory: replay, check, rebuild the zone table.

Damage of one file never refuses the mount: an extent that points above a zone's write pointer makes
reads of its bytes fail with EIO. Damage of the log's durable part does.
"""

from __future__ import annotations

import gc
import logging
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from retainzfs import consistency, errors, journal, layout
from retainzfs.device import Condition, Device, ZoneReport
from retainzfs.layout import BLOCK, BatchKind
from retainzfs.namespace import ROOT, Inode, Namespace
from retainzfs.retention import Retention
from retainzfs.trouble import STATES
from retainzfs.zone import Kind
from retainzfs.zones import ZoneTable

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Recovered:
    journal: journal.Journal
    namespace: Namespace
    clock_s: float
    clean: bool
    rolled_back: int  # bytes of the log's torn tail
    fallback: str  # what is damaged in newer snapshots than the one that was read, else empty
    orphans: list[int]  # inodes whose last name was removed while they were open


async def format_volume(device: Device, uuid: bytes, now_ns: int) -> None:
    """Write an empty volume: a root directory, in a first snapshot.

    Raises BadGeometry when the device has too few zones.
    """
    geometry = device.geometry
    reserved = journal.metadata_zones(geometry.zone_count)
    superblock = layout.Superblock(
        uuid, geometry.zone_size, geometry.zone_capacity, geometry.zone_count, reserved, 0, 1, 0
    )
    for zone in device.report(range(reserved)):
        if zone.condition in journal.STUCK:
            what = zone.condition.name.lower().replace("_", "-")
            raise errors.BadGeometry(
                device.name,
                f"zone {zone.index} is {what}, and the first {reserved} zones are needed for"
                " metadata; use another device",
            )
    await device.settle()
    keep = (Condition.EMPTY, *journal.STUCK)
    used = [zone.index for zone in device.report() if zone.condition not in keep]
    if used:
        await device.reset(used)
    root = layout.InodeRecord(
        ROOT, stat.S_IFDIR | 0o755, 0, 0, 2, 0, now_ns, now_ns, now_ns, 0, ROOT
    )
    first = journal.Journal(device, superblock)
    first.snapshot_position = 1
    payload = layout.encode_all([root, layout.CountersRecord(ROOT + 1, 1, 1)])
    for kind, body in (
        (BatchKind.SNAPSHOT_BEGIN, b""),
        (BatchKind.SNAPSHOT, payload),
        (BatchKind.SNAPSHOT_END, b""),
        (BatchKind.CLEAN, b""),
    ):
        await first.append(kind, body, 0.0)
    await first.flush()


async def recover(device: Device) -> Recovered:
    """Replay the newest whole snapshot and its log. Raises ForeignTarget, NewerFormat, Damaged."""
    recovered = await load(device)
    for problem in consistency.check(recovered.namespace):
        raise errors.Damaged(device.name, problem)
    return recovered


@contextmanager
def _no_garbage() -> Iterator[None]:
    """What a replay makes stays; to look for garbage in it as it grows takes a quarter of the time
    of a large one."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


async def load(device: Device) -> Recovered:
    """Do what `recover` does for a namespace that may contradict itself."""
    replay, chain, end = await journal.scan(device)
    namespace = Namespace(device.name)
    with _no_garbage():
        namespace.lenient = True
        _replay(namespace, replay.snapshot, device.name)
        fuzzy = [b for b in replay.log if b.header.sequence <= replay.fuzzy_until]
        _replay(namespace, fuzzy, device.name)
        namespace.lenient = False
        _replay(namespace, replay.log[len(fuzzy) :], device.name)
    namespace.trim()
    namespace.name_all()
    log_journal = journal.Journal(device, replay.superblock)
    log_journal.resume(replay, chain, end)
    orphans = [i.ino for i in namespace.inodes.values() if i.nlink == 0]
    return Recovered(
        log_journal,
        namespace,
        replay.clock_s,
        replay.clean,
        replay.rolled_back,
        "; ".join(map(str, replay.gaps)),
        orphans,
    )


def _replay(namespace: Namespace, batches: list[journal.Batch], name: str) -> None:
    for sequence, record in journal.records(batches, name):
        try:
            namespace.apply(record)
        except ValueError as error:
            raise errors.Damaged(name, f"batch {sequence}: {error}") from error


def rebuild_table(device: Device, namespace: Namespace, retention: Retention) -> ZoneTable:
    """Build the zone table from the device's report and the extents; both must agree.

    A pointer below an extent is damage of that file. What the device wrote and no extent holds is
    dead.
    """
    geometry = device.geometry
    reserved = journal.metadata_zones(geometry.zone_count)
    table = ZoneTable(
        geometry.zone_capacity,
        geometry.zone_count,
        geometry.max_active,
        geometry.max_open,
        range(reserved),
    )
    _mark_lost(device, namespace)
    live = _live(namespace)
    for report in device.report(range(reserved, geometry.zone_count)):
        zone = table[report.index]
        shares = live.get(report.index, {})
        if report.condition is Condition.EMPTY and not shares:
            zone.epoch = namespace.zone_epochs.get(report.index, 0)
            continue
        kinds = Counter[Kind]()
        for (generation, fallback), nbytes in shares.items():
            kinds[_kind(retention, generation, fallback)] += nbytes
        kind = kinds.most_common(1)[0][0] if kinds else Kind.UNHINTED
        table.restore(zone, kind, namespace.zone_epochs.get(report.index, 0))
        table.observe(zone, STATES[report.condition], min(report.write_pointer, report.capacity))
        for (generation, _), nbytes in shares.items():
            table.add_live(zone, generation, nbytes)
    return table


def _kind(retention: Retention, generation: int, inode: Inode) -> Kind:
    return retention.hint_of(generation).kind if generation else retention.kind_of(inode)


def _live(namespace: Namespace) -> dict[int, dict[tuple[int, Inode], int]]:
    """Return zone → {(generation, an inode of it) → live bytes}."""
    live: dict[int, dict[tuple[int, Inode], int]] = {}
    sample: dict[int, Inode] = {}
    for inode in namespace.inodes.values():
        for extent in inode.extents:
            if extent.run.failed:
                continue
            key = inode if not inode.generation else sample.setdefault(inode.generation, inode)
            shares = live.setdefault(extent.run.zone, {})
            share = (inode.generation, key)
            shares[share] = shares.get(share, 0) + extent.blocks * BLOCK
    return live


def _mark_lost(device: Device, namespace: Namespace) -> None:
    """Mark the runs that a zone does not hold, or not for them alone: reads of them fail."""
    reports = device.report()
    data = range(journal.metadata_zones(len(reports)), len(reports))
    for index, runs in namespace.runs.items():
        epoch = namespace.zone_epochs.get(index, 0)
        limit = written(reports[index]) if index in data else 0
        at = 0
        for run in sorted(runs.values(), key=lambda run: run.start):
            end = run.start + run.blocks
            if run.epoch == epoch and at <= run.start and end * BLOCK <= limit and run.single:
                at = end
                continue
            run.failed = True
            log.error(
                "%s: zone %d does not hold bytes that the journal knows; reads fail",
                ", ".join(map(namespace.path, run.owners)),
                index,
            )


def written(report: ZoneReport) -> int:
    """Return the bytes of a zone that may have been written."""
    whole = (Condition.FULL, Condition.READ_ONLY, Condition.OFFLINE)
    return report.capacity if report.condition in whole else report.write_pointer
