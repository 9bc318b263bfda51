"""Checking a target that is not mounted: does the journal agree with itself and with the zones?

Nothing is written. Damage is what costs bytes or names, or would after one more; a note is what a
mount deals with by itself, such as the unfinished end of the log after a crash. Each finding says
how `repair` puts it right, if it can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import trio

from retainzfs import consistency, errors, journal, recovery
from retainzfs.device import Condition, Device, ZoneReport, open_target
from retainzfs.device.heads import head_faults
from retainzfs.extents import StoredRuns
from retainzfs.layout import BLOCK
from retainzfs.lifetimes import format_size
from retainzfs.mending import Mender
from retainzfs.namespace import Inode, Namespace, Run
from retainzfs.scrub import Pace, stored_bytes, verify

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class Finding(NamedTuple):
    text: str
    damage: bool = True
    repair: str = ""  # what a repair does about it; empty: nothing

    def __str__(self) -> str:
        how = f"; --repair would {self.repair}" if self.repair else ""
        left = "; --repair leaves it alone" if self.damage and not self.repair else ""
        return f"{'damage' if self.damage else 'note'}: {self.text}{how}{left}"


@dataclass
class Report:
    """What a check found. `live` maps zones to the bytes in them that files hold."""

    target: str
    files: int = 0
    directories: int = 0
    live: dict[int, int] = field(default_factory=dict)
    scrubbed: int | None = None  # bytes whose checksums were verified; None: not asked for
    findings: list[Finding] = field(default_factory=list)

    @property
    def damaged(self) -> bool:
        return any(finding.damage for finding in self.findings)

    @property
    def repairable(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.repair]

    def as_dict(self) -> dict[str, Any]:
        findings = [finding._asdict() for finding in self.findings]
        return {**asdict(self), "findings": findings, "damaged": self.damaged}

    def summary(self) -> str:
        count = sum(finding.damage for finding in self.findings)
        parts = [
            f"{self.files} files and {self.directories} directories",
            f"{format_size(sum(self.live.values()))} in {len(self.live)} zones",
        ]
        if self.scrubbed is not None:
            parts.append(f"{format_size(self.scrubbed)} read and verified")
        parts.append(f"{count} damages found" if count else "no damage")
        return ", ".join(parts)


def check(
    target: str,
    *,
    scrub: bool = False,
    rate: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check a target; with `scrub` read every byte that files hold and verify its checksum, `rate`
    bytes a second at most.

    Raises TargetMissing, TargetBusy, ForeignTarget, NewerFormat: then there is nothing to check.
    """
    report = Report(target)
    try:
        device = open_target(target, readonly=True)
    except errors.Damaged as damage:
        report.findings.append(Finding(str(damage.args[1])))
        return report
    for fault in head_faults(device):
        how = "write the good copy over it"
        report.findings.append(Finding(fault.text, not fault.torn, how))
    trio.run(_check, device, report, scrub, Pace(rate), progress or _silent)
    return report


def _silent(done: int, total: int) -> None:
    pass


async def _check(
    device: Device, report: Report, scrub: bool, pace: Pace, progress: Progress
) -> None:
    try:
        await device.start()
        await examine(device, report, scrub=scrub, pace=pace, progress=progress)
    finally:
        await device.aclose()


async def examine(
    device: Device,
    report: Report | None = None,
    *,
    scrub: bool = False,
    pace: Pace | None = None,
    progress: Progress = _silent,
) -> Report:
    """Check a device that is started and not mounted; add what is found to a report."""
    report = report or Report(device.name)
    try:
        recovered = await recovery.load(device)
    except errors.Damaged as damage:
        report.findings.append(Finding(str(damage.args[1])))
        return report
    namespace = recovered.namespace
    mender = Mender(namespace, 0)
    mended = (Finding(p.text, repair=p.repair) for p in mender.problems)
    found = [*_log(recovered), *mended]
    if rest := list(consistency.check(namespace)):
        # Of a namespace that still contradicts itself nothing more can be asked, or mended.
        report.findings += [finding._replace(repair="") for finding in found]
        report.findings += map(Finding, rest)
        return report
    report.findings += found
    report.findings += [Finding(text, damage=False) for text in _worn(device)]
    report.findings += map(Finding, structure(device, namespace))
    report.directories = sum(inode.is_dir for inode in namespace.inodes.values())
    report.files = len(namespace.inodes) - report.directories
    live: Counter[int] = Counter()
    for inode in namespace.inodes.values():
        for extent in inode.extents:
            live[extent.run.zone] += extent.blocks * BLOCK
    report.live = dict(sorted(live.items()))
    if scrub:
        await _scrub(device, namespace, report, pace or Pace(None), progress)
    return report


def _log(recovered: recovery.Recovered) -> Iterator[Finding]:
    """What a mount finds in the log, and deals with by itself."""
    if recovered.fallback:
        text = f"the newest snapshot is broken, the one before it was read: {recovered.fallback}"
        yield Finding(text, repair="write a new one")
    elif not recovered.clean:
        text = f"not unmounted cleanly; {recovered.rolled_back} bytes of log will be rolled back"
        yield Finding(text, damage=False, repair="do so, as a mount does")
    if recovered.orphans:
        text = f"{len(recovered.orphans)} files were deleted while open; a mount frees them"
        yield Finding(text, damage=False)
    limbo = recovered.namespace.limbo
    if limbo is not None:
        count = len(limbo.entries or ())
        text = f"{count} files or trees were reaped and are not yet freed; a mount frees them"
        yield Finding(text, damage=False)


def structure(device: Device, namespace: Namespace) -> Iterator[str]:
    """Yield where a volume contradicts itself or the zones."""
    zones = device.report()
    first_data = journal.metadata_zones(len(zones))
    offline = {zone.index for zone in zones if zone.condition is Condition.OFFLINE}
    for inode in namespace.inodes.values():
        yield from _file(namespace, inode)
        yield from _lost(namespace, inode, offline)
    for index, runs in sorted(namespace.runs.items()):
        if not runs:
            continue
        if not first_data <= index < len(zones):
            yield f"zone {index} holds data and is none of the data zones"
            continue
        yield from _zone(namespace, zones[index], list(runs.values()))


def _file(namespace: Namespace, inode: Inode) -> Iterator[str]:
    path = namespace.path(inode.ino)
    if inode.is_dir and inode.nlink and inode.parent not in namespace.inodes:
        yield f"{path}: its parent directory, inode {inode.parent}, does not exist"
    if inode.nlink and inode.generation and inode.generation not in namespace.generations:
        yield f"{path}: belongs to generation {inode.generation}, which does not exist"
    end = -(-inode.size // BLOCK)
    if inode.extents and inode.extents[-1].end > end:
        yield f"{path}: holds blocks behind its end of {inode.size} bytes"
    for one, other in pairwise(inode.extents):
        if one.end > other.block:
            yield f"{path}: two extents hold block {other.block}"


def _lost(namespace: Namespace, inode: Inode, offline: set[int]) -> Iterator[str]:
    for extent in inode.extents if offline else ():
        if extent.run.zone in offline:
            end = min(extent.end * BLOCK, inode.size)
            span = f"bytes {extent.block * BLOCK} to {end} are lost"
            yield f"{namespace.path(inode.ino)}: {span}: zone {extent.run.zone} is offline"


def _worn(device: Device) -> Iterator[str]:
    zones = device.report()
    first_data = journal.metadata_zones(len(zones))
    for zone in zones:
        what = "metadata zone" if zone.index < first_data else "zone"
        if zone.condition is Condition.READ_ONLY:
            then = "it is not written" if zone.index < first_data else "a mount drains it"
            yield f"{what} {zone.index} is read-only; {then}"
        elif zone.condition is Condition.OFFLINE:
            yield f"{what} {zone.index} is offline and cannot be read"


def _zone(namespace: Namespace, zone: ZoneReport, runs: list[Run]) -> Iterator[str]:
    epoch = namespace.zone_epochs.get(zone.index, 0)
    end = recovery.written(zone)
    runs.sort(key=lambda run: run.start)
    for run in runs:
        where = f"zone {zone.index}, blocks {run.start} to {run.start + run.blocks}"
        paths = ", ".join(namespace.path(ino) for ino in run.owners) or "nobody"
        if run.epoch != epoch:
            yield f"{where}: written before reset {run.epoch} of {epoch}; belongs to {paths}"
        if (run.start + run.blocks) * BLOCK > end:
            yield f"{where}: beyond the write pointer {end // BLOCK}; belongs to {paths}"
        if not run.single:
            yield f"{where}: held more than once; belongs to {paths}"
    for one, other in pairwise(runs):
        if one.start + one.blocks > other.start:
            yield f"zone {zone.index}: the runs at blocks {one.start} and {other.start} overlap"


async def _scrub(
    device: Device, namespace: Namespace, report: Report, pace: Pace, progress: Progress
) -> None:
    """Read in the order of the device."""
    stored = StoredRuns(device)
    runs = [run for there in namespace.runs.values() for run in there.values()]
    runs.sort(key=lambda run: (run.zone, run.start))
    total = stored_bytes(namespace)
    report.scrubbed = done = 0
    for run in runs:
        found = await verify(stored, namespace, run)
        report.findings += (Finding(str(damage)) for damage in found)
        nbytes = run.length * BLOCK
        report.scrubbed += 0 if found else nbytes
        done += nbytes
        progress(done, total)
        await pace.spent(nbytes)
