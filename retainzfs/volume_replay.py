"""Replays a workload through a whole volume: its placement, journal and collection, real bytes.

One directory a stream, with keep_last and cadence; each generation is a directory of shards, as
many at once as ranks would write, completed by a marker. Only the time is not real: the volume's
clock stands still but between two events, one epoch of the workload at a time, so nothing waits.
Anchors come first. In the end everything that is kept is read back.

The figures are those of the simulator. Two are worth a word: trailers, which hold the checksums of
longer runs, count as invalid; and `p99_ms` is the real time of saves, from the first file made
until the generation is durable.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from retainzfs import mkfs
from retainzfs.device.pattern import Pattern
from retainzfs.errors import NoSpace, RetainzError
from retainzfs.evaluation.measures import EXACT, Meter, Result
from retainzfs.evaluation.workload import Delete, Save, Workload
from retainzfs.layout import BLOCK
from retainzfs.lifetimes.attributes import CADENCES_MAX
from retainzfs.replay_target import Part, prepared
from retainzfs.volume import ROOT, Options, Volume

EPOCH_S: Final = 64.0  # of the volume's clock; a power of two adds no rounding to the times
FILE, DIRECTORY = 0o100644, 0o040755
PIECE: Final = 1 << 20  # the kernel's longest write
BLOCKS_MOST: Final = 1 << 24  # of a file; the blocks of the next one follow behind
MARKER: Final = b".metadata"  # completes a generation
MARKER_TEXT: Final = b"complete"


@dataclass
class EpochClock:
    """Time in the workload's epochs; it passes only when told."""

    epoch: float = 0.0

    def monotonic_s(self) -> float:
        return self.epoch * EPOCH_S

    def wall_ns(self) -> int:
        return 10**18 + int(self.monotonic_s() * 1e9)

    def keeping(self, options: Options) -> Options:
        """Options with the time of this clock."""
        return replace(options, wall_ns=self.wall_ns, monotonic_s=self.monotonic_s)


@dataclass
class Replayed:
    """What a replay through a volume gave. `verified`: bytes that were kept to the end, and read
    back as they were written."""

    result: Result
    verified: int = 0


def pieces(pattern: Pattern, file: int, length: int) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset, bytes) of a file, which has a number of its own."""
    for at in range(0, length, PIECE):
        nbytes = min(PIECE, length - at)
        made = pattern.make(file * BLOCKS_MOST + at // BLOCK, -(-nbytes // BLOCK))
        yield at, memoryview(made)[:nbytes]


@dataclass(frozen=True)
class Place:
    """A generation in the volume. `files`: number for the pattern, name and length of each."""

    top: int
    name: bytes
    directory: int
    files: tuple[tuple[int, bytes, int], ...]


def replay(
    target: str,
    workload: Workload,
    options: Options,
    *,
    force: bool = False,
) -> Replayed:
    """Format a target and replay a workload on it; the clocks of `options` are replaced.

    Without `force` a target that holds something is refused. Raises UsageError for zones that do
    not suit, what `replay_target.prepared` raises, NoSpace when the anchors do not fit, and
    RetainzError when something reads back other than it was written.
    """
    part = prepared(target, workload, force=force)
    return trio.run(_replay, part, workload, options, EpochClock())


async def _replay(
    part: Part,
    workload: Workload,
    options: Options,
    clock: EpochClock,
) -> Replayed:
    mount = clock.keeping(options)
    try:
        await part.device.start()
        await mkfs.format_started(part.device)
        wrong: RetainzError | None = None
        async with Volume.mounted(part.device, mount) as volume:
            driver = Driver(volume, part, workload, clock, time.perf_counter)
            try:  # what is raised inside would not end the volume cleanly
                replayed = await driver.run()
            except RetainzError as error:
                wrong = error
        if wrong is not None:
            raise wrong
        return replayed
    finally:
        await part.device.aclose()


@dataclass
class Driver:
    """One replay in a mounted volume."""

    volume: Volume
    part: Part
    workload: Workload
    clock: EpochClock
    perf_s: Callable[[], float]
    result: Result = field(default_factory=Result)
    pattern: Pattern = field(default_factory=lambda: Pattern(seed=1))
    kept: dict[int, Place] = field(default_factory=dict)  # generation → where it is
    tops: list[int] = field(default_factory=list)  # directory of each stream
    counts: list[int] = field(default_factory=list)  # saves of each stream
    files: int = 0

    def __post_init__(self) -> None:
        self.meter = Meter(self.workload)

    async def run(self) -> Replayed:
        self.result.saves = self.workload.saves
        await self._streams()
        await self._anchors()
        begin = self._counts()
        for event in self.workload.events:
            self._pass(event.time)
            if isinstance(event, Delete):
                await self._delete(event.generation)
            elif not await self._save(event):
                break
        else:
            self._pass(self.workload.end)
        self._finished(begin)
        return Replayed(self.result, await self._verified())

    # Preparations

    async def _streams(self) -> None:
        for index, stream in enumerate(self.workload.streams):
            top = (await self.volume.make(ROOT, b"run%d" % index, DIRECTORY, 0, 0)).ino
            await self._set(top, "keep_last", f"{stream.keep}")
            await self._set(top, "cadence", f"{stream.cadence * EPOCH_S:f}")
            self.tops.append(top)
            self.counts.append(0)

    async def _set(self, ino: int, name: str, value: str) -> None:
        await self.volume.setxattr(ino, f"user.retainz.{name}".encode(), value.encode())

    async def _anchors(self) -> None:
        top = (await self.volume.make(ROOT, b"anchors", DIRECTORY, 0, 0)).ino
        await self._set(top, "anchor", "1")
        for number, size in enumerate(self.workload.anchors, start=1):
            directory = (await self.volume.make(top, b"step-%d" % number, DIRECTORY, 0, 0)).ino
            if not await self._write(-number, top, b"step-%d" % number, directory, (size,)):
                raise NoSpace("the anchors do not fit; give a smaller --load")

    # Events

    def _pass(self, until: float) -> None:
        """Time goes on, and the zones stay as they are meanwhile."""
        self.meter.passes(self.clock.epoch, until, self.volume.table.totals)
        self.clock.epoch = max(self.clock.epoch, until)

    async def _save(self, save: Save) -> bool:
        """Return False when there was no room for it."""
        written, began_s = self.volume.stream.written, self.perf_s()
        self.counts[save.stream] += 1
        top, name = self.tops[save.stream], b"step-%d" % self.counts[save.stream]
        directory = (await self.volume.make(top, name, DIRECTORY, 0, 0)).ino
        await self._state(save, directory)
        if not await self._write(save.generation, top, name, directory, save.shards):
            return False
        took_ms = (self.perf_s() - began_s) * 1000
        self.meter.saved(self.volume.stream.written - written, took_ms)
        return True

    async def _state(self, save: Save, directory: int) -> None:
        """Say what keep_last and cadence do not: the hints of a workload may be others."""
        stream = self.workload.streams[save.stream]
        life = save.hint - save.time
        if math.isinf(save.hint):
            await self._set(directory, "anchor", "1")
        elif abs(life - stream.keep * stream.cadence) > EXACT:
            life = min(life, CADENCES_MAX * stream.cadence)
            await self._set(directory, "retire", f"{self.volume.now_s() + life * EPOCH_S:f}")

    async def _write(
        self, generation: int, top: int, name: bytes, directory: int, lengths: tuple[int, ...]
    ) -> bool:
        """Write a generation's files and complete it; False when there was no room."""
        numbers = range(self.files, self.files + len(lengths))
        self.files += len(lengths)
        files = [(n, b"__%d_0.distcp" % r, lengths[r]) for r, n in enumerate(numbers)]
        full = []

        async def rank(number: int, name: bytes, length: int) -> None:
            try:
                await self._write_file(directory, name, pieces(self.pattern, number, length))
            except NoSpace as error:
                full.append(error)

        async with trio.open_nursery() as nursery:
            for file in files:
                nursery.start_soon(rank, *file)
        try:
            if not full:
                whole = memoryview(MARKER_TEXT)
                await self._write_file(directory, MARKER, iter([(0, whole)]))
        except NoSpace as error:
            full.append(error)
        if not full:
            self.kept[generation] = Place(top, name, directory, tuple(files))
        return not full

    async def _write_file(
        self, directory: int, name: bytes, pieces: Iterator[tuple[int, memoryview]]
    ) -> None:
        inode = await self.volume.make(directory, name, FILE, 0, 0)
        with self.volume.kept(inode):
            for at, piece in pieces:
                await self.volume.write(inode.ino, at, piece)
            await self.volume.flush(inode.ino)
            await self.volume.fsync(inode.ino)

    async def _delete(self, generation: int) -> None:
        """Remove a generation as a program does; a mount logs that, and resets what it can, within
        a second, in which no time passes here."""
        place = self.kept.pop(generation)
        for name, _ in self.volume.entries(place.directory):
            await self.volume.unlink(place.directory, name)
        await self.volume.rmdir(place.top, place.name)
        await self.volume.syncfs()
        await self.volume.reclaim.reset_dead()

    # Figures

    def _counts(self) -> dict[str, float]:
        """What is counted from the mount on."""
        told = self.volume.statistics()
        return {
            "host": told["host_bytes"],
            "logical": told["logical_bytes"],
            "copied": told["copied_bytes"] + told["compacted_bytes"],
            "resets": told["zones"]["reset_total"],
            "deciding_us": (told["decision_us"] or 0.0) * told["plans"],
            "borrowed": told["borrows"],
            "finishes": self.part.finishes,
            "stranded": self.part.stranded,
        }

    def _finished(self, begin: dict[str, float]) -> None:
        counted = {name: value - begin[name] for name, value in self._counts().items()}
        result = self.result
        self.meter.finish(result, self.clock.epoch)
        logical = counted["logical"]
        result.write_amplification = counted["host"] / logical if logical else math.nan
        result.copied_bytes = int(counted["copied"])
        result.resets = int(counted["resets"])
        result.finishes = int(counted["finishes"])
        result.borrowed = int(counted["borrowed"])
        result.stranded_bytes = int(counted["stranded"])
        result.decision_us = counted["deciding_us"] / max(1, result.saves_done)

    async def _verified(self) -> int:
        """Read everything that is kept; return how many bytes that were."""
        verified = 0
        for place in self.kept.values():
            for number, name, length in place.files:
                inode = self.volume.lookup(place.directory, name)
                same = inode.size == length
                for at, piece in pieces(self.pattern, number, length):
                    same = same and await self.volume.read(inode.ino, at, len(piece)) == piece
                    verified += len(piece)
                if not same:
                    path = self.volume.path(inode.ino)
                    what = "does not hold what was written; 'retainzfs fsck --scrub' tells more"
                    raise RetainzError(f"{self.part.device.name}: {path} {what}")
        return verified
