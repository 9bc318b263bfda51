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

from retainzfs import placement
from retainzfs.device import Geometry
from retainzfs.device.memory import MemoryDevice
from retainzfs.evaluation.simulator import Simulator
from retainzfs.evaluation.workload import PAPER, Save, Workload
from retainzfs.journal import METADATA_ZONES_MIN
from retainzfs.placement import Step, View
from retainzfs.placement.admission import RULES
from retainzfs.volume import ROOT, Options, Volume
from retainzfs.zones import EMERGENCY_ZONES, Kind, Zone, ZoneSummary, ZoneTable

LOAD = 0.70  # the paper's
ZONES = (58, 580, 5800)
POLICIES = ("retainz", "plan")
FILE, DIRECTORY = 0o100644, 0o040755
PIECE = 1 << 20  # bytes of a write
OPEN, ACTIVE = 8, 9  # of the volume's device; 6 active zones remain for data


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
        ledger = table.data_active_limit + 3
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
    rule = RULES["priced" if policy.startswith("plan") else "fixed"]()
    workload = replace(PAPER, zones=zones).make(seed, LOAD)
    replay = way(workload, placement.policy(policy), rule)
    result = replay.run()
    assert result.saves_done == result.saves, "out of space"
    keeping = replay.keeping_ns / 1e6 / result.saves_done
    return Cost(result.decision_us / 1e3, keeping, replay.steps)


def costs(
    policies: Sequence[str], zones: Sequence[int], seed: int
) -> dict[tuple[str, int], tuple[Cost, Cost]]:
    """By policy and zones of the device: cached, scanned."""
    found = {}
    for policy in policies:
        for count in zones:
            cached, scanned = (cost(policy, count, seed, way) for way in (Cached, Scanned))
            assert cached.steps == scanned.steps, "placements differ"
            found[policy, count] = (cached, scanned)
    return found


# Metadata


@dataclass
class Metadata:
    """Of a whole volume after the workload. Bytes."""

    snapshot: int  # all metadata, as the journal writes them
    files: int
    zones: int


async def _metadata(seed: int) -> Metadata:
    workload = PAPER.make(seed, LOAD)
    count = workload.zones + EMERGENCY_ZONES + METADATA_ZONES_MIN
    device = MemoryDevice(Geometry(workload.capacity, workload.capacity, count, OPEN, ACTIVE))
    await device.start()
    await Volume.format(device, uuid=bytes(16), now_ns=1)
    options = Options(wall_ns=lambda: int(trio.current_time() * 1e9))
    async with Volume.mounted(device, options) as volume:
        tops = [await _directory(volume, f"run{i}", ROOT) for i in range(len(workload.streams))]
        for top, stream in zip(tops, workload.streams, strict=True):
            await volume.setxattr(top, b"user.retainz.keep_last", b"%d" % stream.keep)
        kept = await _directory(volume, "kept", ROOT)
        await volume.setxattr(kept, b"user.retainz.anchor", b"1")
        for number, size in enumerate(workload.anchors):
            await _file(volume, kept, f"model-{number}.pt", size)
        made: dict[int, tuple[int, bytes]] = {}
        for event in workload.events:
            if isinstance(event, Save):
                name = f"step-{event.generation}"
                inside = await _directory(volume, name, tops[event.stream])
                for number, size in enumerate(event.shards):
                    await _file(volume, inside, f"shard-{number}.pt", size)
                await volume.setxattr(inside, b"user.retainz.commit", b"1")
                made[event.generation] = (tops[event.stream], name.encode())
            else:
                await _remove(volume, *made.pop(event.generation))
        await volume.committer.snapshot()
        inodes = list(volume.namespace.inodes.values())
        return Metadata(
            volume.journal.snapshot_size,
            sum(not inode.is_dir for inode in inodes),
            count,
        )


async def _directory(volume: Volume, name: str, parent: int) -> int:
    return (await volume.make(parent, name.encode(), DIRECTORY, 0, 0)).ino


async def _file(volume: Volume, parent: int, name: str, size: int) -> None:
    ino = (await volume.make(parent, name.encode(), FILE, 0, 0)).ino
    volume.open(ino)
    for at in range(0, size, PIECE):
        await volume.write(ino, at, bytes(min(PIECE, size - at)))
    await volume.flush(ino)
    volume.close(ino)


async def _remove(volume: Volume, parent: int, name: bytes) -> None:
    ino = dict(volume.entries(parent))[name]
    for entry in list(dict(volume.entries(ino))):
        await volume.unlink(ino, entry)
    await volume.rmdir(parent, name)


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
    print(f"{'policy':<10}{'zones':>7}{'cached ms':>11}{'of it upkeep':>14}{'scanned ms':>12}")
    for (policy, zones), (cached, scanned) in costs(given.policy, given.zones, given.seed).items():
        line = f"{cached.whole:>11.3f}{cached.keeping:>14.3f}{scanned.deciding:>12.3f}"
        print(f"{policy:<10}{zones:>7}{line}")
    print("both ways placed every byte alike")
    found = metadata(given.seed)
    print(f"metadata of a volume: {found}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
