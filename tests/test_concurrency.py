"""Many tasks on one small volume at once, in an order that the seed decides.

Every device operation yields a random number of times, trio's scheduler draws from the same seed,
and a collector keeps moving zones that are being read and written. Tasks know what they may see.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pytest
import trio
import trio.testing

from retainzfs import fsck, zones
from retainzfs.device import Geometry
from retainzfs.device.memory import MemoryDevice
from retainzfs.errors import FSError, NoSpace
from retainzfs.layout import BLOCK
from retainzfs.volume import RENAME_EXCHANGE, ROOT, Volume
from retainzfs.zone import Zone
from tests.helpers import (
    DIRECTORY,
    FILE,
    content,
    formatted,
    mounted,
    put,
    tree,
    until_power_cut,
)
from tests.quiescence import check_quiescent
from tests.witness import WatchedDevice

pytestmark = pytest.mark.volume

POOL_LEAST = 1  # bytes; the stream then has its least number of staging slots
# A few find what is usual; many, after a change to what is tested here, find the rest.
SEEDS = int(os.environ.get("RETAINZFS_SEEDS", "12"))
STEPS = 12  # operations of a task
PAUSES_MAX = 6  # turns of other tasks during a device operation


def slow_device(geometry: Geometry, rng: random.Random) -> WatchedDevice:
    return WatchedDevice(geometry, delay=lambda: rng.randrange(PAUSES_MAX))


@pytest.fixture
def rng(seed: int, monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """The seed's numbers; trio's order of tasks follows them too."""
    monkeypatch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    trio._core._run._r.seed(seed)
    return random.Random(seed)


@pytest.fixture(autouse=True)
def all_zones_are_loose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector moves zones about whether that gains or not."""
    monkeypatch.setattr(zones, "GAIN_LEAST", 0)


class Load:
    """Tasks on one volume, each with numbers of its own. `refused` counts full devices."""

    def __init__(self, volume: Volume, rng: random.Random) -> None:
        self.volume = volume
        self.rng = rng
        self.refused = 0
        self.ended = False

    async def run(self, *tasks: Callable[[random.Random], Awaitable[None]]) -> None:
        """Run every task to its end, collection beside them for as long."""
        async with trio.open_nursery() as background:
            background.start_soon(self.collector, random.Random(self.rng.random()))
            async with trio.open_nursery() as nursery:
                for task in tasks:
                    nursery.start_soon(task, random.Random(self.rng.random()))
            self.ended = True

    async def collector(self, rng: random.Random) -> None:
        """Move zones about whether that gains or not, those in use first of all."""
        reclaim = self.volume.reclaim

        def victim() -> Zone | None:
            zones = [zone for zone in reclaim.candidates() if zone.gain >= 0]
            return rng.choice(zones) if zones else None

        best = reclaim._victim
        while not self.ended:
            for _ in range(rng.randrange(20)):
                await trio.lowlevel.checkpoint()
            if rng.random() < 0.3:
                await self.volume.collect()
                continue
            async with reclaim.turn:
                reclaim._victim = victim  # type: ignore[method-assign]
                await reclaim._collect_one()
                reclaim._victim = best  # type: ignore[method-assign]

    async def write(self, ino: int, offset: int, data: bytes) -> bool:
        """False on a full device; then nothing of it was written."""
        try:
            assert await self.volume.write(ino, offset, data) == len(data)
        except NoSpace:
            self.refused += 1
            return False
        return True

    async def sync(self, ino: int, rng: random.Random) -> None:
        if rng.random() < 0.3:
            await (self.volume.fsync(ino) if rng.random() < 0.8 else self.volume.syncfs())


class Regions:
    """A file in which each task owns a region, and fills it with one value after another."""

    SIZE = 23_000  # not whole blocks: neighbours share one

    def __init__(self, load: Load, ino: int, count: int) -> None:
        self.load = load
        self.ino = ino
        self.values = [[0] for _ in range(count)]  # begun writes of each region
        self.ended = [0] * count  # how many of them at least are done

    def owner(self, number: int) -> Callable[[random.Random], Awaitable[None]]:
        async def write(rng: random.Random) -> None:
            values = self.values[number]
            for step in range(STEPS):
                value = (number * STEPS + step) % 255 + 1
                values.append(value)
                data = bytes([value]) * self.SIZE
                while not await self.load.write(self.ino, number * self.SIZE, data):
                    await self.load.volume.syncfs()
                self.ended[number] = len(values) - 1
                assert await self._read(number * self.SIZE, self.SIZE) == data, "an update is lost"
                await self.load.sync(self.ino, rng)

        return write

    async def _read(self, offset: int, size: int) -> bytes:
        return bytes(await self.load.volume.read(self.ino, offset, size))

    async def reader(self, rng: random.Random) -> None:
        """In each block of each region stands what was the content at some time of the read."""
        for _ in range(3 * STEPS):
            size = rng.choice((1, BLOCK, 3 * self.SIZE))
            offset = rng.randrange(len(self.values) * self.SIZE - size + 1)
            first = self.ended.copy()
            data = await self._read(offset, size)
            at = offset
            while at < offset + len(data):
                number = at // self.SIZE
                end = min((at // BLOCK + 1) * BLOCK, (number + 1) * self.SIZE, offset + len(data))
                piece = data[at - offset : end - offset]
                allowed = self.values[number][first[number] :]
                assert set(piece) <= set(allowed), f"byte {at} was never {set(piece)}"
                assert len(set(piece)) == 1, f"the block at byte {at} is torn"
                at = end

    async def check(self) -> None:
        for number, values in enumerate(self.values):
            data = await self._read(number * self.SIZE, self.SIZE)
            assert data == bytes([values[-1]]) * self.SIZE, f"region {number} is not as written"


class Appends:
    """A file to which several tasks append, each record where the last one ended."""

    def __init__(self, load: Load, ino: int) -> None:
        self.load = load
        self.ino = ino
        self.expected = bytearray()

    async def __call__(self, rng: random.Random) -> None:
        for _ in range(STEPS):
            record = bytes([rng.randrange(1, 256)]) * rng.choice((37, 300, 5000, 40_000))
            at = len(self.expected)
            self.expected += record
            while not await self.load.write(self.ino, at, record):
                await self.load.volume.syncfs()
            await self.load.sync(self.ino, rng)

    async def check(self) -> None:
        assert await content(self.load.volume, self.ino) == self.expected, "appends tear or vanish"


class Private:
    """A task with a file of its own: written, truncated, linked, moved and removed while open."""

    def __init__(self, load: Load, directories: Sequence[int], number: int) -> None:
        self.load = load
        self.directories = directories
        self.names = [b"private-%d" % number, b"linked-%d" % number, b"model-%d.bin" % number]

    async def __call__(self, rng: random.Random) -> None:
        volume = self.load.volume
        for _ in range(3):
            at = (rng.choice(self.directories), rng.choice(self.names))
            there = volume.namespace.directory(at[0]).get(at[1])
            ino = there or (await volume.make(*at, FILE, 0, 0)).ino
            volume.open(ino)
            await volume.setattr(ino, size=0)
            await self._use(ino, rng)
            await volume.flush(ino)
            volume.close(ino)

    async def _use(self, ino: int, rng: random.Random) -> None:
        volume = self.load.volume
        expected = bytearray()
        for _ in range(STEPS):
            choice = rng.random()
            if choice < 0.45:
                at = rng.randrange(len(expected) + 9000)
                data = bytes([rng.randrange(1, 256)]) * rng.choice((1, 200, 4096, 9000, 60_000))
                if await self.load.write(ino, at, data):
                    expected += bytes(max(0, at - len(expected)))
                    expected[at : at + len(data)] = data
            elif choice < 0.6:
                size = rng.randrange(len(expected) + 9000)
                with suppress(NoSpace):
                    await volume.setattr(ino, size=size)
                    del expected[size:]
                    expected += bytes(size - len(expected))
            else:
                await self._names(ino, rng)
            await self.load.sync(ino, rng)
            assert await content(volume, ino) == expected, "a file's content changed by itself"

    async def _names(self, ino: int, rng: random.Random) -> None:
        volume = self.load.volume
        at = [(d, n) for d in self.directories for n in self.names]
        mine = [x for x in at if volume.namespace.directory(x[0]).get(x[1]) == ino]
        target = rng.choice(at)
        with suppress(FSError):  # a name is taken, or gone, because another moved its directory
            if not mine or rng.random() < 0.3:
                await volume.link(ino, *target)
            elif rng.random() < 0.4:
                await volume.unlink(*rng.choice(mine))
            else:
                await volume.rename(*rng.choice(mine), *target)


class Storm:
    """One name that many rename over; who opens it finds one whole version."""

    def __init__(self, load: Load, directory: int) -> None:
        self.load = load
        self.directory = directory

    @staticmethod
    def version(value: int) -> bytes:
        return bytes([value]) * (value * 300)

    async def writer(self, rng: random.Random) -> None:
        volume, number = self.load.volume, rng.randrange(1 << 30)
        for step in range(STEPS):
            name = b"new-%d-%d" % (number, step)
            try:
                await put(volume, self.directory, name, self.version(rng.randrange(1, 256)), 7000)
            except NoSpace:
                await volume.unlink(self.directory, name)
                continue
            await volume.rename(self.directory, name, self.directory, b"latest")

    async def reader(self, rng: random.Random) -> None:
        volume = self.load.volume
        for _ in range(3 * STEPS):
            await trio.lowlevel.checkpoint()
            try:
                ino = volume.lookup(self.directory, b"latest").ino
            except FSError:
                continue
            volume.open(ino)
            data = await content(volume, ino)
            volume.close(ino)
            assert data == self.version(data[0]), "a version is not whole"


def exchanger(load: Load, one: bytes, other: bytes) -> Callable[[random.Random], Awaitable[None]]:
    """Two directories change places, again and again."""

    async def exchange(rng: random.Random) -> None:
        for _ in range(STEPS):
            await load.volume.rename(ROOT, one, ROOT, other, RENAME_EXCHANGE)
            await trio.lowlevel.checkpoint()

    return exchange


def saver(load: Load, stream: int, first: int) -> Callable[[random.Random], Awaitable[None]]:
    """Saves of a stream whose old generations the filesystem deletes."""

    async def save(rng: random.Random) -> None:
        for number in range(first, first + STEPS):
            name = b"step-%d" % number
            made = await load.volume.make(stream, name + b".tmp", DIRECTORY, 0, 0)
            with suppress(NoSpace):
                await put(load.volume, made.ino, b"shard", b"%d" % number * 9000)
            await load.volume.rename(stream, name + b".tmp", stream, name)

    return save


def toucher(load: Load, directories: Sequence[int]) -> Callable[[random.Random], Awaitable[None]]:
    """Attributes and lengths by name alone, of files that may go at any time."""

    async def touch(rng: random.Random) -> None:
        volume = load.volume
        for _ in range(2 * STEPS):
            entries = volume.entries(rng.choice(directories))
            if not entries:
                await trio.lowlevel.checkpoint()
                continue
            name, ino = rng.choice(entries)
            if not volume.inode(ino).is_file:
                continue
            try:
                if name.startswith(b"shared"):
                    size = rng.randrange(200_000)
                    await volume.setattr(ino, size=size)
                    await volume.write(ino, rng.randrange(200_000), b"s" * 10_000)
                    found = set(await content(volume, ino))
                    assert found <= {0, ord("s")}, f"bytes of nobody: {found}"
                else:
                    await volume.setattr(ino, mode=0o600, mtime_ns=rng.randrange(1 << 40))
                await volume.fsync(ino)
            except NoSpace:
                load.refused += 1
            except FSError as error:
                if error.errno != errno.ENOENT:  # it is gone
                    raise

    return touch


async def check_after(volume: Volume) -> None:
    assert volume.stream.write_errors == volume.reader.checksum_errors == 0
    await check_quiescent(volume)


async def scrub(device: MemoryDevice) -> None:
    report = await fsck.examine(device, scrub=True)
    assert not report.findings, [str(finding) for finding in report.findings]


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_everything_at_once(
    seed: int, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    geometry = Geometry(256 << 10, 256 << 10, 40, 4, 6)
    device = await formatted(slow_device(geometry, rng))
    with trio.fail_after(600):  # of the clock that jumps: nobody waits for what never comes
        async with mounted(device, pool=POOL_LEAST) as volume:
            made = [(await volume.make(ROOT, n, DIRECTORY, 0, 0)).ino for n in (b"a", b"b", b"run")]
            *directories, stream = made
            await volume.setxattr(stream, b"user.retainz.keep_last", b"2")
            await volume.setxattr(stream, b"user.retainz.reap", b"1")
            load = Load(volume, rng)
            regions = Regions(load, await put(volume, ROOT, b"regions", b""), 6)
            await volume.setattr(regions.ino, size=6 * Regions.SIZE)
            appends = Appends(load, await put(volume, ROOT, b"appends", b""))
            storm = Storm(load, directories[0])
            for i in range(3):
                await put(volume, directories[1], b"shared-%d" % i, b"s" * 50_000)
            await load.run(
                *(regions.owner(i) for i in range(6)),
                *(regions.reader for _ in range(4)),
                *(appends for _ in range(4)),
                *(Private(load, directories, i) for i in range(6)),
                *(storm.writer for _ in range(3)),
                *(storm.reader for _ in range(3)),
                *(exchanger(load, b"a", b"b") for _ in range(2)),
                saver(load, stream, 1),
                saver(load, stream, 100),
                *(toucher(load, directories) for _ in range(3)),
            )
            await regions.check()
            await appends.check()
            await check_after(volume)
            before = await tree(volume)
        await scrub(device)
        async with mounted(device) as volume:
            assert await tree(volume) == before
            await check_after(volume)


class Durable:
    """A task that saves its file the usual ways, and knows what a power cut must leave."""

    def __init__(self, volume: Volume, number: int) -> None:
        self.volume = volume
        self.name = b"file-%d" % number
        self.synced = 0  # version that was acknowledged as durable
        self.begun = 0

    @staticmethod
    def version(number: int) -> bytes:
        return b"%9d" % number * (500 * (number % 7 + 1))

    async def __call__(self, rng: random.Random) -> None:
        volume = self.volume
        while True:
            self.begun += 1
            with suppress(NoSpace):
                ino = await put(volume, ROOT, self.name + b".new", self.version(self.begun), 7000)
                if rng.random() < 0.5:
                    await volume.fsync(ino)
                await volume.rename(ROOT, self.name + b".new", ROOT, self.name)
                if rng.random() < 0.5:
                    await volume.syncfs()
                    self.synced = self.begun
                continue
            await volume.unlink(ROOT, self.name + b".new")

    async def check(self, volume: Volume) -> None:
        names = dict(volume.entries(ROOT))
        if self.name not in names:
            assert not self.synced, f"{self.name!r} is gone"
            return
        found = await content(volume, names[self.name])
        whole = [n for n in range(self.synced, self.begun + 1) if found == self.version(n)]
        assert whole, f"{self.name!r} is none of the versions {self.synced} to {self.begun}"


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_a_power_cut_among_many_leaves_whole_versions(
    seed: int, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    geometry = Geometry(256 << 10, 256 << 10, 24, 4, 6)
    device = await formatted(slow_device(geometry, rng))
    device.cut_at = device.operations + rng.randrange(20, 400)
    tasks: list[Durable] = []
    with trio.fail_after(600), until_power_cut():
        async with mounted(device, pool=POOL_LEAST) as volume:
            tasks += [Durable(volume, number) for number in range(5)]
            await Load(volume, rng).run(*tasks)
    survivor = device.after_cut(rng)
    await survivor.start()
    async with mounted(survivor) as volume:
        for task in tasks:
            await task.check(volume)
        await check_quiescent(volume)
    await scrub(survivor)
