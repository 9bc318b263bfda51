#!/usr/bin/env python3
"""Shows what large devices cost the filesystem: time, memory, bytes of its journal.

Two devices with 14 active zones: 904 zones of 1077 MiB, as drives with 2 TB of addresses have them,
and 155,000 zones of 96 MiB, 15 TB. Nearly all zones are filled with files that stay, of a GiB or a
zone; in the others training jobs save for a month, the newest of which they keep. The jobs' bytes
are all written, through a whole volume, to a device that keeps how to make them. What fills the
zones is put there without being written: each zone holds the same bytes, and the log names their
runs as if they had been. An hour of the month lasts a minute; of all that is measured only the
commits of a file that is open for seconds would see a difference.

The volume is mounted empty, filled, after the month, and after the power was cut in a save. All
sizes of files are compared then, every byte of what the jobs keep, and every byte of a few others.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import trio
from bench_zoned import table
from capacity_run import GIB, STRIDE, Difference, Saver, Source
from capacity_shards import Shard

from retainzfs import journal, layout
from retainzfs.bench.targets import memory
from retainzfs.device import BLOCK, Geometry
from retainzfs.device.pattern import Pattern, PatternDevice
from retainzfs.journal import Journal, aligned, metadata_zones
from retainzfs.layout import INLINE_SUMS_MAX, RUN_BLOCKS_MAX, BatchKind
from retainzfs.lifetimes.units import format_size
from retainzfs.volume import ROOT, Volume
from retainzfs.zones import EMERGENCY_ZONES
from tests.helpers import DIRECTORY, FILE, UUID, until_power_cut
from tests.simulation import deterministic, options

MIB = 1 << 20
ACTIVE = 14
HOUR_S = 60.0  # simulated
KEEP = (2, 3, 5, 7)  # saves that the jobs keep, one job each
SHARDS = 4  # files of a save
SAVE_SHARE = 20  # a save takes this part of the time until the next one
ARCHIVE = ROOT + 1  # inode of the directory of what stays
SAMPLE = 8  # files in it that are read
RECORDS = 512  # of a batch of the archive's snapshot


class Shape(NamedTuple):
    """A device, and what its jobs save. Sizes in bytes."""

    zone_size: int
    capacity: int
    zones: int
    save: int
    every_h: float

    def shrunk(self, n: int) -> Shape:
        """A device with an nth of the zones, each an nth as large, for a try."""
        sizes = (self.zone_size // n, self.capacity // n, max(64, self.zones // n), self.save // n)
        return Shape(*sizes, self.every_h)


SHAPES = {
    "2TB": Shape(2048 * MIB, 1077 * MIB, 904, 512 * MIB, 24),
    "15TB": Shape(96 * MIB, 96 * MIB, 155_000, 128 * MIB, 6),
}


@dataclass
class Mounting:
    """What one mount took. Memory is the process's, bytes."""

    seconds: float = 0.0
    unmount_s: float = 0.0
    before: int = 0
    after: int = 0
    peak: int = 0


@dataclass
class Result:
    """One device. Sizes in bytes; times in seconds where not named otherwise."""

    device: str
    zones: int
    capacity: int
    days: float
    every_h: float
    files: int = 0
    runs: int = 0
    saves: int = 0
    logical: int = 0
    host: int = 0
    journal: int = 0
    snapshots: int = 0
    copied: int = 0
    compacted: int = 0
    resets: int = 0
    plans: int = 0
    decision_ms: float = 0.0
    month_s: float = 0.0
    month_peak: int = 0
    status_ms: float = 0.0
    mounts: dict[str, Mounting] = field(default_factory=dict)
    lost: int = 0
    verified: int = 0
    write_amplification: float = 0.0

    @property
    def per_zone(self) -> float:
        """Bytes of memory that a mount needs for a zone."""
        empty = self.mounts["empty"]
        return (empty.after - empty.before) / self.zones

    @property
    def per_run(self) -> float:
        """Bytes of memory that a mount needs for a run, the zones' share apart."""
        filled = self.mounts["filled"]
        return (filled.after - filled.before - self.per_zone * self.zones) / self.runs


def forget_peak() -> None:
    """Let VmHWM begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def runs_of(capacity: int) -> list[tuple[int, int]]:
    """Return (first block, data blocks) of the runs that fill a zone."""
    blocks, step = capacity // BLOCK, RUN_BLOCKS_MAX + 1
    return [(at, min(step, blocks - at) - 1) for at in range(0, blocks - INLINE_SUMS_MAX - 1, step)]


class Month(Source):
    """One device from its first byte to the last comparison."""

    def __init__(self, name: str, shape: Shape, args: argparse.Namespace) -> None:
        super().__init__(Pattern(args.seed))
        self._key = shape.capacity // BLOCK  # the keys below are the archive's
        self.args = args
        self.shape = shape
        every_h = args.every or shape.every_h
        self.device = PatternDevice(
            Geometry(shape.zone_size, shape.capacity, shape.zones, args.open, ACTIVE), self.pattern
        )
        self.result = Result(name, shape.zones, shape.capacity, args.days, every_h)
        cadence_s = every_h * HOUR_S
        shards = tuple(Shard(f"shard{i}.pt", shape.save // SHARDS) for i in range(SHARDS))
        self.jobs = [
            Saver(
                f"job{i}", keep, 0, STRIDE, cadence_s, shape.save, cadence_s / SAVE_SHARE,
                shards=shards,
            )
            for i, keep in enumerate(KEEP)
        ]  # fmt: skip
        kept = sum(job.keep * job.padded for job in self.jobs)
        room = math.ceil(kept / args.load / shape.capacity) + EMERGENCY_ZONES
        self.archive = range(metadata_zones(shape.zones), shape.zones - room)
        self.zones_a_file = max(1, GIB // args.shrink // shape.capacity)
        self.runs: list[tuple[int, int, bytes]] = []  # of a zone: first and data blocks, checksums
        self.sizes: dict[int, int] = {}  # inode in the archive → its bytes

    async def run(self) -> Result:
        device, result = self.device, self.result
        await device.start()
        await Volume.format(device, uuid=UUID, now_ns=1)
        async with self._mounted("empty"):
            pass
        await self._fill()
        async with self._mounted("filled"):
            await self._begin()
            started = time.process_time()
            forget_peak()
            await self._work()
            result.month_s = time.process_time() - started
            result.month_peak = memory("self", "VmHWM")
            self._account(self.jobs[0].volume)
        with until_power_cut():
            async with self._mounted("after the month"):
                await self._verify(self.jobs[0].volume)
                device.cut_at = device.statistics()["appended_bytes"] + self.shape.save // 2
                await self.jobs[0].save(self.jobs[0].kept[-1] + STRIDE, self)
        result.lost = device.power_cycle()
        await device.start()
        async with self._mounted("after a power cut") as volume:
            for job in self.jobs:
                await job.go_on(volume)
            await self._verify(volume)
        return result

    @asynccontextmanager
    async def _mounted(self, name: str) -> AsyncIterator[Volume]:
        """Mount for the jobs, and take what it costs."""
        for job in self.jobs:
            vars(job).pop("volume", None)  # it takes memory
        gc.collect()
        forget_peak()
        took = self.result.mounts[name] = Mounting(before=memory("self"))
        started = time.process_time()
        async with Volume.mounted(self.device, options()) as volume:
            took.seconds = time.process_time() - started
            took.after, took.peak = memory("self"), memory("self", "VmHWM")
            for job in self.jobs:
                job.volume = volume
            yield volume
            started = time.process_time()
        took.unmount_s = time.process_time() - started

    # The archive

    async def _fill(self) -> None:
        """Fill the zones, and put a snapshot that says with what at the end of the log."""
        zone = self.archive[0]
        for start, length in runs_of(self.shape.capacity):
            header = layout.TRAILER_HEADER.pack(layout.TRAILER_MAGIC, length, ARCHIVE, 0, UUID[:8])
            data = aligned(bytes(self.pattern.make(start, length)))
            sums = await self.device.append(zone, start * BLOCK, data, header)
            self.runs.append((start, length, sums.trailer.to_bytes(4, "little")))
        await self.device.finish(zone)
        self.device.repeat(zone, self.archive[1:])
        replay, chain, end = await journal.scan(self.device)
        log = Journal(self.device, replay.superblock)
        log.resume(replay, chain, end)
        await log.append(BatchKind.SNAPSHOT_BEGIN, b"", 0.0, self.shape.capacity)
        records = self._records()
        while batch := list(islice(records, RECORDS)):
            await log.append(BatchKind.SNAPSHOT, layout.encode_all(batch), 0.0)
        await log.append(BatchKind.SNAPSHOT_END, b"", 0.0)
        await log.append(BatchKind.CLEAN, b"", 0.0)
        await log.flush()

    def _records(self) -> Iterator[layout.Record]:
        starts = range(0, len(self.archive), self.zones_a_file)
        yield layout.CountersRecord(ARCHIVE + 1 + len(starts), 1, 1)
        yield inode_record(ROOT, DIRECTORY, 3, ROOT)
        yield layout.LinkRecord(ROOT, b"archive", ARCHIVE)
        yield inode_record(ARCHIVE, DIRECTORY, 2, ROOT)
        for ino, start in enumerate(starts, ARCHIVE + 1):
            zones = self.archive[start : start + self.zones_a_file]
            blocks = sum(length for _, length, _ in self.runs)
            self.sizes[ino] = len(zones) * blocks * BLOCK
            yield layout.LinkRecord(ARCHIVE, b"file%d.bin" % ino, ino)
            yield inode_record(ino, FILE, 1, ARCHIVE)
            yield layout.SizeRecord(ino, self.sizes[ino])
            at = 0
            for zone in zones:
                for first, length, sums in self.runs:
                    yield layout.MapRecord(ino, at, length, 0, zone, 0, first, length, sums)
                    at += length
        self.result.files = len(starts)
        self.result.runs = len(self.archive) * len(self.runs)

    # The month

    async def _begin(self) -> None:
        for job in self.jobs:
            job.top = await job.directory(job.name, ROOT)
            await job.volume.setxattr(job.top, b"user.retainz.keep_last", b"%d" % job.keep)

    async def _work(self) -> None:
        async with trio.open_nursery() as nursery:
            for index, job in enumerate(self.jobs):
                nursery.start_soon(self._saves, job, job.cadence_s * index / len(self.jobs))

    async def _saves(self, job: Saver, offset_s: float) -> None:
        next_s = trio.current_time() + offset_s
        for number in range(1, round(self.args.days * 24 / self.result.every_h) + 1):
            await trio.sleep_until(next_s)
            await job.save(number * STRIDE, self)
            self.result.saves += 1
            next_s += job.cadence_s

    def _account(self, volume: Volume) -> None:
        result = self.result
        started = time.process_time()
        told = volume.statistics()
        result.status_ms = (time.process_time() - started) * 1000
        result.logical, result.host = told["logical_bytes"], told["host_bytes"]
        result.journal, result.snapshots = told["journal_bytes"], volume.committer.snapshots
        result.copied, result.compacted = told["copied_bytes"], told["compacted_bytes"]
        result.resets = told["zones"]["reset_total"]
        result.plans, result.decision_ms = told["plans"], told["decision_us"] / 1000
        result.write_amplification = told["write_amplification"]

    # The end

    async def _verify(self, volume: Volume) -> None:
        """Raises Difference."""
        inodes = dict(volume.entries(ARCHIVE)).values()
        if {ino: volume.inode(ino).size for ino in inodes} != self.sizes:
            raise Difference("the archive has other files, or sizes")
        self.result.verified += await self.verify(volume, self.jobs, quiet=True)
        for ino in random.Random(self.args.seed).choices(sorted(self.sizes), k=SAMPLE):
            await self._compare_archived(volume, ino)
            self.result.verified += self.sizes[ino]

    async def _compare_archived(self, volume: Volume, ino: int) -> None:
        at = 0
        while at < self.sizes[ino]:
            for first, length, _ in self.runs:
                piece = await volume.read(ino, at, length * BLOCK)
                if self.pattern.equal(piece, first) != length:
                    raise Difference(f"{volume.path(ino)}: the bytes from {at} on differ")
                at += length * BLOCK


def inode_record(ino: int, mode: int, nlink: int, parent: int) -> layout.InodeRecord:
    return layout.InodeRecord(ino, mode, 0, 0, nlink, 0, 1, 1, 1, 0, parent)


def report(results: list[Result]) -> str:
    """Return the figures, a device a column."""
    rows: list[list[str]] = []

    def row(what: str, tell: Callable[[Result], str]) -> None:
        rows.append([what, *map(tell, results)])

    row("zones", lambda r: f"{r.zones:,} of {r.capacity // MIB} MiB")
    row("files that stay, their runs", lambda r: f"{r.files:,}, {r.runs:,}")
    row("saves in the month", lambda r: f"{r.saves}, {r.logical / GIB:.1f} GiB")
    for name in results[0].mounts:
        row(f"mount {name}", lambda r, name=name: f"{r.mounts[name].seconds:.2f} s")  # type: ignore[misc]
    row("unmount after the month", lambda r: f"{r.mounts['filled'].unmount_s:.2f} s")
    row("memory, mounted empty", lambda r: format_size(r.mounts["empty"].after))
    row("for each zone", lambda r: f"{r.per_zone:.0f} B")
    row("memory, mounted filled", lambda r: format_size(r.mounts["filled"].after))
    row("for each run", lambda r: f"{r.per_run:.0f} B")
    row("peak of that mount", lambda r: format_size(r.mounts["filled"].peak))
    row("peak in the month", lambda r: format_size(r.month_peak))
    row("to plan a generation", lambda r: f"{r.decision_ms:.3f} ms, {r.plans} plans")
    row("to tell the status", lambda r: f"{r.status_ms:.1f} ms")
    row("CPU for the month", lambda r: f"{r.month_s:.0f} s")
    row("journal, per byte written", lambda r: f"{r.journal / r.logical:.6f}")
    row("snapshots", lambda r: f"{r.snapshots}")
    row("resets", lambda r: f"{r.resets}")
    row("write amplification", lambda r: f"{r.write_amplification:.4f}")
    row("copied for room", lambda r: f"{r.copied / GIB:.2f} GiB")
    row("copied in idle time", lambda r: f"{r.compacted / GIB:.2f} GiB")
    row("lost in the power cut", lambda r: f"{r.lost / MIB:.0f} MiB, none of it acknowledged")
    row("read back", lambda r: f"{r.verified / GIB:.1f} GiB")
    return table(["", *(r.device for r in results)], rows)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", action="append", choices=SHAPES, help="default: all")
    add("--days", type=float, default=30.0, help="default 30")
    add("--every", type=float, metavar="HOURS", help="between saves; default: see the table")
    add("--load", type=float, default=0.84, help="of the jobs' zones, default 0.84")
    add("--open", type=int, default=8, choices=range(8, ACTIVE + 1), help="zones; default 8")
    add("--seed", type=int, default=1)
    add("--shrink", type=int, default=1, metavar="N", help="a Nth of the zones and of their size")
    add("--json", metavar="FILE", help="write the figures there, too")
    return parser.parse_args(arguments)


def measured(name: str, args: argparse.Namespace) -> Result:
    """Run one device. All figures but those of time and memory follow from the arguments.

    Raises Difference.
    """
    month = Month(name, SHAPES[name].shrunk(args.shrink), args)
    try:
        return deterministic(args.seed, month.run)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    results = []
    for name in args.device or SHAPES:
        # A process of its own: memory is what this device takes.
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            try:
                results.append(pool.submit(measured, name, args).result())
            except Difference as error:
                print(f"scripts/scale: {name}: {error}", file=sys.stderr)
                return 1
    print(report(results))
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
