#!/usr/bin/env python3
"""What allocation costs a commit, with cached summaries of zones and without, and what metadata
there is.

    scripts/evaluate_allocation.py [--zones N ...] [--policy NAME ...] [--seed N]

Without the cache the summaries of the partial zones come from a scan of everything that was ever
recorded: every extent written, copied and freed, every zone opened, finished and reset. Both ways
must place every byte alike. Times are processor time of this process.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import trio

from retainzfs import mkfs, placement
from retainzfs.cli.output import print_table
from retainzfs.evaluation.simulator import Simulator
from retainzfs.evaluation.workload import PAPER, Save, Workload
from retainzfs.placement import Step, View, admission
from retainzfs.replay_target import prepared
from retainzfs.volume import Options, Volume
from retainzfs.volume_replay import Driver, EpochClock
from retainzfs.zone import Kind, Zone, ZoneSummary
from retainzfs.zones import COLLECTION_ACTIVE, JOURNAL_ACTIVE, ZoneTable

LOAD = 0.70  # the paper's
ZONES = (58, 580, 5800)
POLICIES = ("retainz", "plan")


@dataclass
class Cost:
    """Milliseconds a commit: `deciding` includes the summaries, `keeping` is the table's upkeep."""

    deciding: float
    keeping: float
    steps: list[list[Step]]

    @property
    def whole(self) -> float:
        return self.deciding + self.keeping


class Cached(Simulator):
    """As a mount: the table of zones knows what lives in each."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.steps: list[list[Step]] = []
        self.keeping_ns = 0
        self.resident = True  # the anchors of the beginning: not what is measured

    def _save(self, save: Save) -> bool:
        self.resident = False
        self.steps.append([])
        return super()._save(save)

    def _carry_out(self, steps: deque[Step], kind: Kind, generation: int, size: int) -> int:
        begun, step = time.thread_time_ns(), steps[0]
        written = super()._carry_out(steps, kind, generation, size)
        if not self.resident:
            self.keeping_ns += time.thread_time_ns() - begun
            self.steps[-1].append(step)
        return written

    def _delete(self, generation: int) -> None:
        begun = time.thread_time_ns()
        super()._delete(generation)
        self.keeping_ns += time.thread_time_ns() - begun


class History(ZoneTable):
    """A table that writes down what happens to its zones, in order."""

    def __init__(self, capacity: int, count: int, max_active: int, max_open: int) -> None:
        super().__init__(capacity, count, max_active, max_open)
        self.records: list[tuple[str, int, int, int]] = []

    def acquire(self, kind: Kind) -> Zone | None:
        zone = super().acquire(kind)
        if zone is not None:
            self.records.append(("kind", zone.index, zone.kind, 0))
        return zone

    def adopt(self, zone: Zone, kind: Kind) -> None:
        super().adopt(zone, kind)
        self.records.append(("kind", zone.index, zone.kind, 0))

    def add_live(self, zone: Zone, gid: int, nbytes: int) -> None:
        super().add_live(zone, gid, nbytes)
        self.records.append(("write", zone.index, gid, nbytes))

    def drop_live(self, zone: Zone, gid: int, nbytes: int, at: int) -> None:
        super().drop_live(zone, gid, nbytes, at)
        self.records.append(("free", zone.index, gid, nbytes))

    def finish(self, zone: Zone) -> None:
        super().finish(zone)
        self.records.append(("finish", zone.index, 0, 0))

    def reset(self, zone: Zone) -> None:
        super().reset(zone)
        self.records.append(("reset", zone.index, 0, 0))

    def note(self, zone: Zone, tag: int) -> None:
        self.records.append(("tag", zone.index, tag, 0))


class Scanned(Cached):
    """Without a cache: a scan of the history for every plan."""

    def __init__(self, workload: Workload, *arguments: Any, **more: Any) -> None:
        super().__init__(workload, *arguments, **more)
        table = self.table
        ledger = table.data_active_limit + JOURNAL_ACTIVE + COLLECTION_ACTIVE
        self.table = self.history = History(table.capacity, len(table.zones), ledger, 0)

    def _fresh(self, kind: Kind, tag: int) -> Zone:
        zone = super()._fresh(kind, tag)
        self.history.note(zone, tag)
        return zone

    def _view(self, kind: Kind) -> View:
        begun = time.thread_time_ns()
        view = super()._view(kind)
        if self.resident:
            return view
        scanning = time.thread_time_ns()
        zones = scan(self.history.records, kind, self)
        scanned = time.thread_time_ns()
        assert zones == list(view.zones), "the history says other than the table"
        # What the other way takes, and the comparison, is no part of this one.
        self._deciding_ns -= scanning - begun + time.thread_time_ns() - scanned
        return replace(view, zones=zones)


def scan(
    records: Sequence[tuple[str, int, int, int]], kind: Kind, replay: Simulator
) -> list[ZoneSummary]:
    """The summaries of the partial zones of a kind, from the history alone."""
    live: dict[int, dict[int, int]] = {}
    written: dict[int, int] = {}
    kinds: dict[int, int] = {}
    tags: dict[int, int] = {}
    finished: set[int] = set()
    for what, zone, value, nbytes in records:
        if what == "write":
            inside = live.setdefault(zone, {})
            inside[value] = inside.get(value, 0) + nbytes
            written[zone] = written.get(zone, 0) + nbytes
        elif what == "free":
            live[zone][value] -= nbytes
            if not live[zone][value]:
                del live[zone][value]
        elif what == "kind":
            kinds[zone] = value
        elif what == "tag":
            tags[zone] = value
        elif what == "finish":
            finished.add(zone)
        else:
            for known in (live, written, kinds, tags):
                known.pop(zone, None)
            finished.discard(zone)
    soon = replay.now + 1.0
    summaries = []
    for zone in sorted(written):
        tail = replay.capacity - written[zone]
        if kinds[zone] != kind or zone in finished or not tail or not live[zone]:
            continue
        times = [max(replay.retire_of(generation), soon) for generation in live[zone]]
        tag = tags.get(zone, 0)
        summaries.append(ZoneSummary(zone, tail, written[zone], max(times), min(times), tag))
    return summaries


def cost(policy: str, zones: int, seed: int, way: type[Cached]) -> Cost:
    """Replay one input under the policy's own admission rule."""
    rule = admission.rule(admission.usual("", policy))
    workload = replace(PAPER, zones=zones).make(seed, LOAD)
    replay = way(workload, placement.policy(policy), rule)
    result = replay.run()
    assert result.saves_done == result.saves, "out of space"
    keeping = replay.keeping_ns / 1e6 / result.saves_done
    return Cost(result.decision_us / 1e3, keeping, replay.steps)


Costs = dict[tuple[str, int], tuple[Cost, Cost]]
"""By policy and zones of the device: cached, scanned."""


def costs(policies: Sequence[str], zones: Sequence[int], seed: int) -> Costs:
    found: Costs = {}
    for policy in policies:
        for count in zones:
            cached, scanned = (cost(policy, count, seed, way) for way in (Cached, Scanned))
            assert cached.steps == scanned.steps, "placements differ"
            found[policy, count] = (cached, scanned)
    return found


def rows(found: Costs) -> list[list[str]]:
    """Policy, zones; cached, of it upkeep of the table; scanned."""
    return [
        [policy, f"{zones}", *(f"{ms:.3f}" for ms in (one.whole, one.keeping, other.deciding))]
        for (policy, zones), (one, other) in found.items()
    ]


# Metadata


@dataclass
class Metadata:
    """Of a whole volume after the workload. Bytes."""

    snapshot: int  # all metadata, as the journal writes them
    files: int
    zones: int


async def _metadata(seed: int) -> Metadata:
    """Replay the input through a whole volume, and take the size of a snapshot of its journal."""
    workload = PAPER.make(seed, LOAD)
    part, clock = prepared("mem:", workload), EpochClock()
    await part.device.start()
    await mkfs.format_started(part.device)
    async with Volume.mounted(part.device, clock.keeping(Options())) as volume:
        await Driver(volume, part, workload, clock, time.perf_counter).run()
        await volume.committer.snapshot()
        inodes = volume.namespace.inodes.values()
        files = sum(not inode.is_dir for inode in inodes)
        return Metadata(volume.journal.snapshot_size, files, part.geometry.zone_count)


def metadata(seed: int) -> Metadata:
    return trio.run(_metadata, seed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--zones", type=int, nargs="+", default=ZONES)
    parser.add_argument("--policy", nargs="+", default=POLICIES)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    heads = ("POLICY", "ZONES", "CACHED-MS", "UPKEEP-MS", "SCANNED-MS")
    print_table(heads, rows(costs(given.policy, given.zones, given.seed)), " ".join(heads[1:]))
    print("both ways placed every byte alike")
    found = metadata(given.seed)
    print(f"metadata of a volume: {found}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
