#!/usr/bin/env python3
"""How well retirements are foretold with attributes and without, framework by framework.

Four jobs of one framework save at once, each in a directory of its own: K is 2, 4, 5 and 7, every
job has its cadence and a quarter of the sizes from 0.74 to 2.27 zones. In the end what they keep,
and one save being written, is 0.8 of the device. Intervals between saves vary by 15 %, each job
pauses once for five cadences, and in the middle all stop, the volume is unmounted and mounted
again. Time is simulated, the volume is a whole one over a device in memory. The same saves are
replayed with three kinds of knowledge:

    declared    keep_last, cadence and, with milestones, keep_every on each job's directory
    attributes  keep_last
    none        nothing: names, markers, and what the streams' history teaches
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

import trio
from bench_retention_frameworks import ATTRIBUTES, FRAMEWORKS, Job, enter
from bench_zoned import spread, table

from retainzfs.device import Geometry
from retainzfs.device.memory import MemoryDevice
from retainzfs.journal import metadata_zones
from retainzfs.volume import Volume
from retainzfs.zones import EMERGENCY_ZONES
from tests.simulation import deterministic, options

MIB = 1 << 20
ZONE = 3 * MIB // 2  # so that the smallest generation is one that is worth a prediction
ACTIVE, OPEN = 9, 8  # 6 active zones for data
LOAD = 0.8
SIZES = (0.74, 2.27)  # zones
SIZE_JITTER = 0.02
CADENCES_S = (60, 80, 100, 120)
CADENCE_JITTER = 0.15
SAVE_SHARE = 0.08  # of a cadence, that a save takes
PAUSE = 5  # cadences
NEAR = 1.0  # saves
LEARNED = 2  # deletions of a stream from which on it can have learned something
SAMPLE_S = 5.0
POLL = 8  # saves between two looks at what was deleted; a stream remembers more than these
OFF_S = 3600.0  # between the two mounts
SAVES_LEAST = 60  # of a run, for every job to delete some
HISTORY = b"user.retainz.history"


@dataclass
class Result:
    """One run. Shares are of generations that were deleted, nan where there was none. `early` are
    those that were born before their job's second deletion, `paused` others whose job paused while
    they lived: what can be learned does not help them. The plain names are of all others."""

    framework: str
    knows: str
    seed: int
    saves: int
    deleted: int
    early: int
    hinted_early: float
    near_early: float
    paused: int
    near_paused: float
    hinted: float
    near: float
    milestones: (
        float  # share of the milestones, after the first two of a job, that began as anchors
    )
    load: float  # live bytes at the peak, of the space for data
    overhead_zones: float
    write_amplification: float
    copied_bytes: int
    resets: int


class Run:
    """Some hundred saves of one framework, with one kind of knowledge."""

    def __init__(self, framework: str, knows: str, seed: int, saves: int) -> None:
        self.name, self.knows, self.seed = framework, knows, seed
        self.framework = FRAMEWORKS[framework]
        self.chance = random.Random(seed)
        self.jobs = self._jobs()
        self.duration_s = saves / sum(1 / job.cadence_s for job in self.jobs)
        self.history: dict[tuple[str, int], dict[str, Any]] = {}  # (job, number) → what is told
        self.overheads: list[float] = []  # zones, at regular times of the mount
        self.load = 0.0
        self.logical = self.host = self.copied = self.resets = 0
        self.anchored: list[bool] = []  # of milestones: whether they began as anchors

    def _jobs(self) -> list[Job]:
        order = [self.chance.sample(range(4), 4) for _ in range(3)]
        step = (SIZES[1] - SIZES[0]) / 4
        jobs = []
        for index, (kept, cadence, quarter) in enumerate(zip(*order, strict=True)):
            zones = SIZES[0] + step * (quarter + self.chance.random())
            every = self.framework.milestones[index] if self.framework.milestones else 0
            seconds = CADENCES_S[cadence]
            jobs.append(
                Job(
                    f"job{index}",
                    self.framework.keeps[kept],
                    every,
                    self.framework.stride,
                    seconds,
                    int(zones * ZONE),
                    SAVE_SHARE * seconds,
                )
            )
        return jobs

    def geometry(self) -> Geometry:
        """Return a device of which what is kept in the end, and one save more, is the load."""
        peak = max(job.size for job in self.jobs)
        for job in self.jobs:
            generations = job.keep + self.framework.lag + self.framework.extra
            if job.every:
                generations += int((self.duration_s / job.cadence_s - PAUSE) / job.every)
            peak += generations * job.size
        data = math.ceil(peak / LOAD / ZONE) + EMERGENCY_ZONES
        return Geometry(ZONE, ZONE, data + metadata_zones(data), OPEN, ACTIVE)

    async def run(self) -> Result:
        device = MemoryDevice(self.geometry())
        await device.start()
        await Volume.format(device, uuid=bytes(16), now_ns=1)
        for half in range(2):
            async with Volume.mounted(device, options()) as volume:
                ends_s = trio.current_time() + self.duration_s / 2
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._sample, volume, ends_s)
                    for job in self.jobs:
                        await enter(job, volume, self.knows)
                        pauses = (self.jobs.index(job) + half) % 2 == 0
                        chance = random.Random(f"{self.seed} {job.name} {half}")
                        nursery.start_soon(self._work, job, chance, ends_s, pauses)
                self._mounted_no_longer(volume)
            await trio.sleep(OFF_S)
        return self._result()

    async def _work(self, job: Job, chance: random.Random, ends_s: float, pauses: bool) -> None:
        """Save until the mount ends; in its middle the job may pause."""
        mean = job.size
        halfway_s = (trio.current_time() + ends_s) / 2
        next_s = trio.current_time() + chance.uniform(0, job.cadence_s)
        while next_s < ends_s:
            await trio.sleep_until(next_s)
            job.count += 1
            number = job.count * job.stride
            job.born[number] = job.volume.now_s()
            job.size = int(mean * chance.uniform(1 - SIZE_JITTER, 1 + SIZE_JITTER))
            await self.framework.save(job, number)
            if job.count % POLL == 0:
                self._look(job)
            next_s += job.cadence_s * chance.uniform(1 - CADENCE_JITTER, 1 + CADENCE_JITTER)
            if pauses and next_s > halfway_s:
                pauses = False
                next_s += PAUSE * job.cadence_s
                job.paused = job.volume.now_s()
        job.size = mean

    def _look(self, job: Job) -> None:
        """Take over what the volume tells of the job's deleted generations."""
        for told in json.loads(job.volume.getxattr(job.top, HISTORY)):
            self.history.setdefault((job.name, told["number"]), told)

    async def _sample(self, volume: Volume, ends_s: float) -> None:
        self.overheads.clear()  # of the first mount
        while trio.current_time() < ends_s:
            totals = volume.table.totals
            self.load = max(self.load, totals.live / sum(totals))
            self.overheads.append((totals.dead + totals.tail + totals.stranded) / ZONE)
            await trio.sleep(SAMPLE_S)

    def _mounted_no_longer(self, volume: Volume) -> None:
        """The mount is about to end: take its figures over."""
        for job in self.jobs:
            self._look(job)
        told = volume.statistics()
        self.logical += told["logical_bytes"]
        self.host += told["host_bytes"]
        self.copied += told["copied_bytes"]
        self.resets += told["zones"]["reset_total"]
        self.anchored = []
        for job in self.jobs:
            kept = [number for number in job.kept if job.milestone(number)][LEARNED:]
            began = _first_hints(volume, job)
            self.anchored += [math.isinf(began.get(number, math.nan)) for number in kept]

    def _result(self) -> Result:
        early: list[dict[str, Any]] = []
        paused: list[dict[str, Any]] = []
        later: list[dict[str, Any]] = []
        for job in self.jobs:
            known_s = sorted(job.deleted.values())[:LEARNED][-1]
            for number in job.deleted:
                told = self.history.get((job.name, number), {})
                if job.born[number] < known_s:
                    early.append(told)
                elif job.born[number] < job.paused < job.deleted[number]:
                    paused.append(told)
                else:
                    later.append(told)
        return Result(
            self.name,
            self.knows,
            self.seed,
            saves=sum(job.count for job in self.jobs),
            deleted=len(early) + len(paused) + len(later),
            early=len(early),
            hinted_early=_share(map(_hinted, early)),
            near_early=_share(map(_near, early)),
            paused=len(paused),
            near_paused=_share(map(_near, paused)),
            hinted=_share(map(_hinted, later)),
            near=_share(map(_near, later)),
            milestones=_share(self.anchored),
            load=self.load,
            overhead_zones=statistics.mean(self.overheads),
            write_amplification=self.host / self.logical,
            copied_bytes=self.copied,
            resets=self.resets,
        )


def _first_hints(volume: Volume, job: Job) -> dict[int, float]:
    """Return the retirement with which each generation that a job still has was placed."""
    return {
        number: stream.predicted.get(generation, (math.nan,))[0]
        for stream in volume.retention.all_streams()
        if volume.namespace.below(volume.inode(stream.ino), job.top)
        for number, generation in stream.numbers.items()
    }


def _hinted(told: dict[str, Any]) -> bool:
    return bool(told) and (told["anchor"] or told["predicted_epoch"] is not None)


def _near(told: dict[str, Any]) -> bool:
    if not told or told["saves"] is None or told["saves_predicted"] is None:
        return False
    return bool(abs(told["saves"] - told["saves_predicted"]) <= NEAR)


def _share(values: Iterable[bool]) -> float:
    counted = list(values)
    return sum(counted) / len(counted) if counted else math.nan


def replayed(framework: str, knows: str, seed: int, saves: int) -> Result:
    """Replay one run. The figures follow from the arguments."""
    return deterministic(seed, Run(framework, knows, seed, saves).run)


def results(args: argparse.Namespace) -> Iterator[Result]:
    """Yield the runs as they are done."""
    with ProcessPoolExecutor(args.jobs) as pool:
        running: list[Future[Result]] = [
            pool.submit(replayed, framework, knows, seed, args.saves)
            for framework in args.framework
            for knows in ATTRIBUTES
            for seed in range(1, args.seeds + 1)
        ]
        for done in as_completed(running):
            yield done.result()


def report(found: list[Result]) -> str:
    """Return the table: mean and, in brackets, least and greatest over the seeds."""
    rows = []
    for framework in dict.fromkeys(result.framework for result in found):
        for knows in ATTRIBUTES:
            own = [r for r in found if (r.framework, r.knows) == (framework, knows)]
            rows.append([framework, knows, *_cells(own)])
    head = ["framework", "told", "deleted", "early: hint", "near", "pause: near", "hint", "near"]
    head += ["milestones", "overhead", "written", "copied MiB", "resets"]
    return table(head, rows)


def _cells(own: list[Result]) -> list[str]:
    def percent(key: str) -> str:
        values = [100 * getattr(r, key) for r in own if not math.isnan(getattr(r, key))]
        return spread(values, 0)

    shares = map(
        percent, ("hinted_early", "near_early", "near_paused", "hinted", "near", "milestones")
    )
    return [
        spread([r.deleted for r in own], 0),
        *shares,
        spread([r.overhead_zones for r in own], 2),
        spread([r.write_amplification for r in own]),
        spread([r.copied_bytes / MIB for r in own], 0),
        spread([r.resets for r in own], 0),
    ]


EXPLANATION = """\
deleted: generations that their jobs deleted. early: those that began before their job's second
deletion, so that nothing could be learned yet; pause: others whose job paused while they lived,
which nobody foresees; the columns that follow are of all the rest.
hint: percent that had a retirement when their first byte was placed; near: percent where it was
within one save of the deletion. milestones: percent of those kept, after a job's second, that began
as anchors. overhead: zones' worth of dead bytes and of room in zones that are in use, mean over
the second mount. written: bytes written to the device for each byte of the jobs."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench retention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--framework", action="append", choices=FRAMEWORKS, help="default: all")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument("--saves", type=int, default=240, metavar="N", help="of a run; default 240")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes")
    parser.add_argument("--json", metavar="FILE", help="also write the runs there")
    args = parser.parse_args(arguments)
    if min(args.seeds, args.saves // SAVES_LEAST, args.jobs) < 1:
        parser.error(f"--seeds and --jobs are at least 1, --saves at least {SAVES_LEAST}")
    args.framework = args.framework or list(FRAMEWORKS)
    return args


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    found = []
    count = len(args.framework) * len(ATTRIBUTES) * args.seeds
    for result in results(args):
        found.append(result)
        if sys.stderr.isatty():
            print(f"\r{len(found)} of {count} runs", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    order = [*FRAMEWORKS, *ATTRIBUTES]
    found.sort(key=lambda r: (order.index(r.framework), order.index(r.knows), r.seed))
    print(f"{args.saves} saves a run, seeds 1 to {args.seeds}\n\n{report(found)}\n\n{EXPLANATION}")
    if args.json:
        with open(args.json, "w") as out:
            json.dump([_plain(result) for result in found], out, indent=1)
            out.write("\n")
    return 0


def _plain(result: Result) -> dict[str, Any]:
    """Return a run for `json`, which has no nan."""
    values = asdict(result).items()
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
