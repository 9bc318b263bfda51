#!/usr/bin/env python3
"""Replay a workload of `retainzfs.evaluation` through a whole volume, in simulated time.

The device is in memory and has the workload's zones beside those of the metadata; an epoch is a
minute. A generation is a directory with a file for each shard; it is written, synced, and then the
one that it retires is deleted. Each figure stands beside the simulator's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import trio

from retainzfs.device import Geometry
from retainzfs.device.memory import MemoryDevice
from retainzfs.errors import NoSpace
from retainzfs.evaluation import experiment
from retainzfs.evaluation.workload import FAMILIES, Delete, Save, Workload
from retainzfs.journal import METADATA_ZONES_MIN
from retainzfs.volume import ROOT, Volume
from retainzfs.zones import COLLECTION_ACTIVE, JOURNAL_ACTIVE
from tests.simulation import deterministic, options

EPOCH_S = 60.0
SAMPLES = 8  # of the overhead, in an epoch
FILE, DIRECTORY = 0o100644, 0o040755
PIECE = 1 << 20  # the kernel's longest write
_NOISE = memoryview(os.urandom(PIECE))


class Figures(NamedTuple):
    """`overhead`: zones, on average."""

    saves: int
    overhead: float
    write_amplification: float
    copied: int
    borrows: int
    told: dict[str, Any]


class Replay:
    def __init__(self, workload: Workload, policy: str, admission: str) -> None:
        self.workload = workload
        self.policy, self.admission = policy, admission
        self.volume: Volume
        self.begun_s = 0.0
        self.directories: dict[int, int] = {}  # stream → inode
        self.where: dict[int, tuple[int, bytes]] = {}  # generation → directory and name
        self.samples: list[float] = []

    async def run(self) -> Figures:
        work = self.workload
        zones = work.zones + METADATA_ZONES_MIN
        active = work.active + JOURNAL_ACTIVE + COLLECTION_ACTIVE
        device = MemoryDevice(Geometry(work.capacity, work.capacity, zones, active, active))
        await device.start()
        await Volume.format(device, uuid=bytes(16), now_ns=1)
        chosen = replace(options(), policy=self.policy, admission=self.admission)
        async with Volume.mounted(device, chosen) as self.volume:
            await self._prepare()
            before = self.volume.statistics()
            self.begun_s = trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sample)
                saves = await self._replay()
                nursery.cancel_scope.cancel()
            told = self.volume.statistics()
        written = {key: told[key] - before[key] for key in ("host_bytes", "logical_bytes")}
        return Figures(
            saves,
            sum(self.samples) / max(1, len(self.samples)),
            written["host_bytes"] / max(1, written["logical_bytes"]),
            told["copied_bytes"] - before["copied_bytes"],
            told.get("borrows", 0),
            told,
        )

    async def _prepare(self) -> None:
        kept = await self._directory(ROOT, b"kept", anchor=1)
        for number, size in enumerate(self.workload.anchors):
            await self._tell(kept, size=size)
            await self._write(kept, b"step-%d.pt" % number, size)
        for number, stream in enumerate(self.workload.streams):
            self.directories[number] = await self._directory(
                ROOT,
                b"run%d" % number,
                keep_last=stream.keep,
                cadence=int(stream.cadence * EPOCH_S),
            )
        await self.volume.syncfs()

    async def _directory(self, parent: int, name: bytes, **attributes: int) -> int:
        ino = (await self.volume.make(parent, name, DIRECTORY, 0, 0)).ino
        await self._tell(ino, **attributes)
        return ino

    async def _tell(self, ino: int, **attributes: int) -> None:
        for key, value in attributes.items():
            await self.volume.setxattr(ino, b"user.retainz." + key.encode(), b"%d" % value)

    async def _write(self, parent: int, name: bytes, size: int) -> None:
        ino = (await self.volume.make(parent, name, FILE, 0, 0)).ino
        self.volume.open(ino)
        try:
            for at in range(0, size, PIECE):
                await self.volume.write(ino, at, _NOISE[: min(PIECE, size - at)])
            await self.volume.flush(ino)
        finally:
            self.volume.close(ino)

    async def _replay(self) -> int:
        """Return the saves that were done, up to the first without room."""
        done = 0
        for event in self.workload.events:
            await trio.sleep_until(self.begun_s + event.time * EPOCH_S)
            if isinstance(event, Delete):
                await self._delete(*self.where.pop(event.generation))
                continue
            try:
                await self._save(event)
            except NoSpace:
                return done
            done += 1
        await trio.sleep_until(self.begun_s + self.workload.end * EPOCH_S)
        return done

    async def _save(self, save: Save) -> None:
        top, name = self.directories[save.stream], b"step-%d" % (save.generation + 1)
        await self._tell(top, size=sum(save.shards))
        here = await self._directory(top, name)
        for rank, size in enumerate(save.shards):
            await self._write(here, b"__%d_0.distcp" % rank, size)
        await self._write(here, b".metadata", 100)
        await self.volume.syncfs()
        self.where[save.generation] = top, name

    async def _delete(self, top: int, name: bytes) -> None:
        here = self.volume.lookup(top, name).ino
        for below, _ in list(self.volume.entries(here)):
            await self.volume.unlink(here, below)
        await self.volume.rmdir(top, name)
        await self.volume.syncfs()

    async def _sample(self) -> None:
        await trio.sleep(self.workload.warm_up * EPOCH_S + EPOCH_S / SAMPLES / 2)
        while True:
            totals = self.volume.table.totals
            used = totals.dead + totals.tail + totals.stranded
            self.samples.append(used / self.workload.capacity)
            await trio.sleep(EPOCH_S / SAMPLES)


def replayed(policy: str, load: float, seed: int, saves: int, admission: str = "") -> Figures:
    """Replay the `paper` family through a volume. The figures follow from the arguments."""
    workload = replace(FAMILIES["paper"], saves=saves).make(seed, load)
    return deterministic(seed, Replay(workload, policy, admission).run)


def rows(args: argparse.Namespace) -> Iterator[str]:
    for load in args.load:
        for policy in args.policy:
            for seed in range(args.seeds):
                simulated = experiment.replay(experiment.Setting(policy, load=load), seed)
                found = replayed(policy, load, seed, args.saves)
                yield (
                    f"{load} {policy:12} seed {seed}: saves {found.saves}/{simulated.saves_done}"
                    f"  overhead {found.overhead:.2f}/{simulated.overhead_zones:.2f}"
                    f"  written {found.write_amplification:.4f}"
                    f"/{simulated.write_amplification:.4f}"
                    f"  copied {found.copied >> 20}/{simulated.copied_bytes >> 20} MiB"
                    f"  borrows {found.borrows}/{simulated.borrowed}"
                    f"  decision {found.told['decision_us']:.0f}/{simulated.decision_us:.0f} us"
                )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--load", action="append", type=float)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=250)
    args = parser.parse_args(arguments)
    args.policy = args.policy or ["plan", "retainz", "zenfs"]
    args.load = args.load or [0.84, 0.9]
    print("volume/simulator")
    for row in rows(args):
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
