#!/usr/bin/env python3
"""Fills a large namespace with saves of Pythia-1B's shard lengths, and reads every byte back.

Each 64 GiB of the namespace serve four training jobs: two of them keep node 0 of their job here
(3.3 GiB a save: weights and its ranks' optimizer states), two another node (1.4 GiB). They keep
their newest 2, 4, 5 and 7 saves. Anchors, as large, fill what is missing until what is kept is the
load: the share of the zones for data. Files hold a pattern of which each block says whose it is,
and the device keeps how to make the pattern, not its bytes; the volume above is a whole one, its
time is simulated.

In the middle of a save, after half of them, the power is cut: what was not flushed is lost, the
volume recovers, and the jobs go on from what they had. All that is retained is compared, byte by
byte, behind the recovery, behind every M saves, and in the end after another mount.
"""

from __future__ import annotations

import argparse
import errno
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import trio
from bench_retention_frameworks import Job
from bench_zoned import table
from capacity_shards import Shard, node

from retainzfs import errors, placement
from retainzfs.cli.output import size_argument
from retainzfs.device import BLOCK, Geometry
from retainzfs.device.faults import PowerCut
from retainzfs.device.pattern import Pattern, PatternDevice
from retainzfs.journal import metadata_zones
from retainzfs.layout import stored
from retainzfs.lifetimes.units import format_size
from retainzfs.volume import ROOT, FSError, Options, Volume
from retainzfs.zones import EMERGENCY_ZONES
from tests.helpers import FILE, UUID, until_power_cut
from tests.simulation import deterministic, options

GIB = 1 << 30
PIECE = 1 << 20  # the kernel's longest write
SHARE = 64 * GIB  # of the namespace, that serves one set of jobs
JOBS = ((2, 0), (5, 1), (4, 0), (7, 1))
"""Saves that a job keeps, and the node of it that is here."""
ACTIVE, OPEN = 14, 8  # as common NVMe ZNS drives
CADENCE_S = 240.0
SAVE_S = 12.0
STRIDE = 1000  # training steps between two saves
SAMPLE_S = 10.0
OFF_S = 3600.0  # that the power was off
STORED_SHARE = 900  # a file takes less than a 900th more on the device, in trailers


class Difference(Exception):
    """A file is not what was written to it."""


@dataclass
class Result:
    """One run. Sizes in bytes; all but `appended` is counted from the first save on."""

    policy: str
    namespace: int
    zone_size: int
    load: float
    seed: int
    saves: int = 0
    appended: int = 0
    logical: int = 0
    host: int = 0
    copied: int = 0
    resets: int = 0
    write_amplification: float = 0.0
    overhead_zones: float | None = None
    """Zones' worth of dead bytes and of unused room, once every job has all that it keeps; None if
    that was not before the last save."""
    retained: int = 0
    verified: int = 0
    lost: int = 0
    """Appended, not flushed, and gone when the power was back."""
    exhausted: str = ""
    """Why a save found no space, if one did; nothing is saved behind it."""
    pieces: int = 0
    """That the device kept in the end for all that was on it."""
    seconds: float = 0.0
    verify_seconds: float = 0.0
    memory: int = 0
    """Of the process, at its peak."""


@dataclass
class Saver(Job):
    """A job that saves its node's files. `files` has those of each save: name, size, first key."""

    shards: tuple[Shard, ...] = ()
    files: dict[int, list[tuple[bytes, int, int]]] = field(default_factory=dict)

    @property
    def padded(self) -> int:
        """Bytes of a save on the device."""
        return sum(stored(shard.size) for shard in self.shards)

    async def save(self, number: int, run: Source) -> None:
        """Save, and delete what is kept no longer."""
        step = await self.directory(f"global_step{number}")
        files = []
        for name, size in self.shards:
            key = run.next_key(size)
            await self.put(step, name, size, key, run.pattern)
            files.append((name.encode(), size, key))
            await trio.sleep(self.save_s * size / self.size)
        await self.write("latest", 0, text=b"global_step%d" % number)
        self.files[number] = files
        self.kept.append(number)
        await self.rotate("global_step{}")

    async def put(self, parent: int, name: str, size: int, key: int, pattern: Pattern) -> None:
        """Write a file of the pattern."""
        volume = self.volume
        ino = (await volume.make(parent, name.encode(), FILE, 0, 0)).ino
        volume.open(ino)
        try:
            for at in range(0, size, PIECE):
                data = pattern.make(key + at // BLOCK, PIECE // BLOCK)
                await volume.write(ino, at, memoryview(data)[: size - at])
            await volume.flush(ino)
        finally:
            volume.close(ino)

    async def go_on(self, volume: Volume) -> None:
        """After a crash: what was being saved or deleted then goes."""
        self.volume = volume
        for name in self.names() - self.own():
            await self.remove(name.decode())

    def names(self) -> set[bytes]:
        return {name for name, _ in self.volume.entries(self.top)}

    def own(self) -> set[bytes]:
        """Return the names that have to be there when nothing is being saved."""
        return {b"latest"} | {b"global_step%d" % number for number in self.kept}


class Source:
    """Gives files their bytes, and compares them with what a volume has."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self._key = 0

    def next_key(self, size: int) -> int:
        """Return where the pattern of a new file of so many bytes begins."""
        key = self._key
        self._key += -(-size // BLOCK)
        return key

    async def compare(self, volume: Volume, ino: int, size: int, key: int) -> None:
        """Raises Difference."""
        if volume.inode(ino).size != size:
            path = volume.path(ino)
            raise Difference(f"{path}: {volume.inode(ino).size} bytes, and not {size}")
        for at in range(0, size, PIECE):
            piece = await volume.read(ino, at, PIECE)
            whole = len(piece) // BLOCK
            same = self.pattern.equal(piece[: whole * BLOCK], key + at // BLOCK) == whole
            rest = piece[whole * BLOCK :]
            end = self.pattern.make(key + at // BLOCK + whole, 1)[: len(rest)]
            if not same or end != rest or len(piece) != min(PIECE, size - at):
                raise Difference(f"{volume.path(ino)}: the bytes from {at} on differ")

    async def verify(self, volume: Volume, jobs: Iterable[Saver], *, quiet: bool = False) -> int:
        """Compare every file that is retained with what was written to it; return their bytes.
        When it is `quiet` there must be nothing else. Raises Difference."""
        verified = 0
        for job in jobs:
            there = job.names()
            if job.kept and (job.own() - there or (quiet and there != job.own())):
                raise Difference(f"{job.name}: {sorted(there)}, and not {sorted(job.own())}")
            for number in job.kept:
                step = volume.lookup(job.top, b"global_step%d" % number).ino
                inodes = dict(volume.entries(step))
                if inodes.keys() != {name for name, _, _ in job.files[number]}:
                    raise Difference(f"{volume.path(step)}: {sorted(inodes)}")
                for name, size, key in job.files[number]:
                    await self.compare(volume, inodes[name], size, key)
                    verified += size
        return verified


class Run(Source):
    """One namespace from its first byte to the last comparison."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(Pattern(args.seed))
        self.args = args
        self.begun = 0  # saves
        self.zone = args.zone_size // args.shrink
        zones = args.namespace // args.zone_size
        self.room = (zones - metadata_zones(zones) - EMERGENCY_ZONES) * self.zone
        self.device = PatternDevice(
            Geometry(self.zone, self.zone, zones, OPEN, ACTIVE), self.pattern
        )
        self.jobs = [self._job(index) for index in range(len(JOBS) * (args.namespace // SHARE))]
        self.anchors = self._job(0)
        self.anchors.name, self.anchors.save_s = "anchors", 0.0
        kept = sum(job.keep * job.padded for job in self.jobs)
        self.anchored = int(args.load * self.room) - kept
        if self.anchored < 0:
            raise errors.UsageError(
                f"a load of {args.load} is below the {kept / self.room:.2f} that the jobs keep"
            )
        self.overheads: list[float] = []
        self.result = Result(args.policy, args.namespace, args.zone_size, args.load, args.seed)

    def _job(self, index: int) -> Saver:
        keep, number = JOBS[index % len(JOBS)]
        shards = tuple(s._replace(size=s.size // self.args.shrink) for s in node(number))
        size = sum(shard.size for shard in shards)
        return Saver(f"job{index}", keep, 0, STRIDE, CADENCE_S, size, SAVE_S, shards=shards)

    def options(self) -> Options:
        return replace(options(), policy=self.args.policy)

    async def run(self) -> Result:
        started = time.monotonic()
        await self.device.start()
        await Volume.format(self.device, uuid=UUID, now_ns=1)
        with until_power_cut():
            async with Volume.mounted(self.device, self.options()) as volume:
                await self._prefill(volume)
                before = volume.statistics()
                await self._work(volume, cut_in=self.args.saves // 2)
                raise PowerCut  # there was no space before it was time
        self._account(volume.statistics(), before)
        self.result.lost = self.device.power_cycle()
        await trio.sleep(OFF_S)
        await self.device.start()
        async with Volume.mounted(self.device, self.options()) as volume:
            for job in (*self.jobs, self.anchors):
                await job.go_on(volume)
            await self._verify(volume, quiet=True)
            await self._work(volume)
        self._account(volume.statistics())
        async with Volume.mounted(self.device, self.options()) as volume:
            for job in (*self.jobs, self.anchors):
                job.volume = volume
            self.result.retained = await self._verify(volume, quiet=True)
        return self._finished(time.monotonic() - started)

    async def _prefill(self, volume: Volume) -> None:
        for job in (*self.jobs, self.anchors):
            job.volume = volume
            job.top = await job.directory(job.name, ROOT)
        for job in self.jobs:
            await volume.setxattr(job.top, b"user.retainz.keep_last", b"%d" % job.keep)
            await volume.setxattr(job.top, b"user.retainz.cadence", b"%g" % job.cadence_s)
        anchors, left, whole = self.anchors, self.anchored, self.anchors.shards
        await volume.setxattr(anchors.top, b"user.retainz.anchor", b"1")
        number = 0
        while left > BLOCK:
            shards = []
            for shard in whole:
                size = min(shard.size, left - left // STORED_SHARE)
                if size > 0:
                    shards.append(shard._replace(size=size))
                    left -= stored(size)
            anchors.shards = tuple(shards)
            anchors.keep += 1
            number += STRIDE
            await anchors.save(number, self)

    async def _work(self, volume: Volume, cut_in: int = 0) -> None:
        """Let the jobs save until all saves are done; in save number `cut_in` the power is cut."""
        self.begun = self.result.saves
        async with trio.open_nursery() as outer:
            outer.start_soon(self._sample, volume)
            async with trio.open_nursery() as nursery:
                for index, job in enumerate(self.jobs):
                    start_s = trio.current_time() + CADENCE_S * index / len(self.jobs)
                    nursery.start_soon(self._saves, job, start_s, cut_in)
            outer.cancel_scope.cancel()

    async def _saves(self, job: Saver, next_s: float, cut_in: int) -> None:
        await trio.sleep_until(next_s)
        while self.begun < self.args.saves and not self.result.exhausted:
            self.begun += 1
            if self.begun == cut_in:
                self.device.cut_at = self.device.statistics()["appended_bytes"] + job.size // 2
            number = max(job.kept, default=0) + STRIDE
            try:
                await job.save(number, self)
            except (errors.NoSpace, FSError) as error:
                if error.errno != errno.ENOSPC:
                    raise
                self.result.exhausted = f"{job.name}, save {number}: {error}"
                await job.remove(f"global_step{number}")
                return
            self.result.saves += 1
            every = self.args.verify_every
            if every and self.result.saves % every == 0:
                await self._verify(job.volume)
            next_s += CADENCE_S
            await trio.sleep_until(next_s)

    async def _sample(self, volume: Volume) -> None:
        while True:
            await trio.sleep(SAMPLE_S)
            if all(len(job.kept) >= job.keep for job in self.jobs):
                totals = volume.table.totals
                self.overheads.append((totals.dead + totals.tail + totals.stranded) / self.zone)

    async def _verify(self, volume: Volume, *, quiet: bool = False) -> int:
        started = time.monotonic()
        verified = await self.verify(volume, (*self.jobs, self.anchors), quiet=quiet)
        self.result.verified += verified
        self.result.verify_seconds += time.monotonic() - started
        return verified

    def _account(self, told: dict[str, Any], before: dict[str, Any] | None = None) -> None:
        """Take over what a mount has counted."""
        result = self.result
        for sign, counted in ((1, told), (-1, before)):
            if counted is not None:
                result.logical += sign * counted["logical_bytes"]
                result.host += sign * counted["host_bytes"]
                result.copied += sign * counted["copied_bytes"]
                result.resets += sign * counted["zones"]["reset_total"]

    def _finished(self, seconds: float) -> Result:
        result = self.result
        result.write_amplification = result.host / result.logical
        result.overhead_zones = statistics.mean(self.overheads) if self.overheads else None
        result.appended = self.device.statistics()["appended_bytes"]
        result.pieces = self.device.pieces
        result.seconds = seconds
        result.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return result


def replayed(args: argparse.Namespace) -> Result:
    """Do one run. All figures but those of time and memory follow from the arguments."""
    return deterministic(args.seed, Run(args).run)


def report(result: Result) -> str:
    """Return the figures, one a line."""
    gib = {
        "written to the device, anchors included": result.appended,
        "written by the jobs": result.logical,
        "copied": result.copied,
        "not flushed, and lost in the power cut": result.lost,
        "retained in the end": result.retained,
        "verified, all readings together": result.verified,
    }
    overhead = "not seen" if result.overhead_zones is None else f"{result.overhead_zones:.2f} zones"
    rows = [
        ["saves", f"{result.saves}{', then no space' if result.exhausted else ''}"],
        *([what, f"{size / GIB:.2f} GiB"] for what, size in gib.items()),
        ["write amplification", f"{result.write_amplification:.4f}"],
        ["overhead", overhead],
        ["resets", f"{result.resets}"],
        ["pieces kept by the device", f"{result.pieces}"],
        ["memory of the process", format_size(result.memory)],
        ["seconds", f"{result.seconds:.0f}, {result.verify_seconds:.0f} of them verifying"],
    ]
    head = [
        f"{format_size(result.namespace)}, zones of {format_size(result.zone_size)}",
        f"{result.policy}, load {result.load}",
    ]
    return table(head, rows)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/capacity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--namespace", type=size_argument, default=SHARE, metavar="SIZE", help="default 64G")
    add("--zone-size", type=size_argument, default=GIB, metavar="SIZE", help="default 1G")
    add("--policy", choices=placement.policies(), default=Options().policy)
    add("--load", type=float, default=0.84, help="default 0.84")
    add("--saves", type=int, default=60, metavar="N", help="default 60")
    add("--verify-every", type=int, default=0, metavar="M", help="saves; default: see above")
    add("--seed", type=int, default=1)
    add("--shrink", type=int, default=1, metavar="N", help="divide every size by N, for a try")
    add("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(arguments)
    if args.namespace % SHARE or args.namespace < SHARE:
        parser.error(f"--namespace is a multiple of {format_size(SHARE)}")
    if min(args.saves - 1, args.shrink, args.zone_size) < 1 or not 0 < args.load <= 1:
        parser.error("--saves is at least 2, --shrink at least 1, --load above 0 and at most 1")
    flaw = Geometry(
        args.zone_size // args.shrink,
        args.zone_size // args.shrink,
        args.namespace // args.zone_size,
        OPEN,
        ACTIVE,
    ).flaw()
    if flaw:
        parser.error(flaw)
    return args


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    try:
        result = replayed(args)
    except errors.UsageError as error:
        print(f"scripts/capacity: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(result), indent=1) if args.json else report(result))
    if result.exhausted:
        print(f"no space: {result.exhausted}", file=sys.stderr)
    return 1 if result.exhausted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
