"""A full device: what still works, what `df` promises, and that every byte comes back."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from retainzfs import fsck
from retainzfs.device import Geometry
from retainzfs.device.memory import MemoryDevice
from retainzfs.errors import NoSpace
from retainzfs.journal import METADATA_ZONES_MIN
from retainzfs.layout import BLOCK, stored
from retainzfs.planning import usable
from retainzfs.volume import ROOT, Volume
from retainzfs.zone import GAIN_LEAST, Kind
from tests.helpers import (
    DIRECTORY,
    FILE,
    content,
    formatted,
    mounted,
    options,
    put,
    small_device,
    until_power_cut,
    zones_of,
)
from tests.witness import WatchedDevice

pytestmark = pytest.mark.volume

ZONE = 256 << 10
PATIENCE_S = 30.0  # for what takes a second on an idle machine
PIECE = 1 << 16
TURNS = 2  # that other tasks have while the device works
POLICIES = [
    (b"keep_last", b"2"),
    (b"anchor", b"1"),
    (b"class", b"cache"),
    (b"class", b"scratch"),
    (b"class", b"output"),
]
# What a zone that is not worth a copy has beside live bytes: less than the gain that is asked for,
# and the trailers that a copy would have.
WASTE = GAIN_LEAST + 2 * BLOCK


@dataclass(frozen=True)
class Shape:
    zones: int
    active: int
    capacity: int

    @property
    def data_zones(self) -> int:
        return self.zones - METADATA_ZONES_MIN

    @property
    def room(self) -> int:
        """Bytes that one file can have on an empty device: all zones but the emergency zone, and
        what `usable` says of each."""
        return (self.data_zones - 1) * usable(self.capacity) * BLOCK

    async def device(self) -> WatchedDevice:
        max_open = 4 if self.active == 6 else 8
        geometry = Geometry(ZONE, self.capacity, self.zones, max_open, self.active)
        return await formatted(WatchedDevice(geometry, delay=lambda: TURNS))


SHAPES = st.builds(
    Shape,
    zones=st.sampled_from([16, 19, 24, 32]),
    active=st.sampled_from([6, 8, 14]),
    capacity=st.sampled_from([ZONE, ZONE * 15 // 16]),
)
MIXES = st.sampled_from(
    [(1, 4, 1, 1, 0.4), (6, 1, 1, 1, 0.4), (1, 1, 6, 1, 0.3), (1, 1, 1, 0, 0.8), (2, 2, 2, 2, 0.2)]
)
SEEDS = st.integers(0, 2**32)
PROPERTY = settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a seed does not shrink
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)


class Writer:
    """Random saves, overwrites and deletions, beside a model of what must be there."""

    def __init__(self, volume: Volume, directories: list[int], seed: int, prefix: bytes) -> None:
        self.volume = volume
        self.directories = directories
        self.rng = random.Random(seed)
        self.prefix = prefix
        self.files: dict[tuple[int, bytes], bytearray] = {}
        self.made = 0
        self.refused = 0

    async def work(self, operations: int, weights: Sequence[float]) -> None:
        names = ["small", "stream", "overwrite", "link", "delete"]
        for _ in range(operations):
            (name,) = self.rng.choices(names, weights)
            try:
                await getattr(self, name)()
            except NoSpace:
                self.refused += 1

    async def write(self, key: tuple[int, bytes], at: int, length: int) -> None:
        new = self.rng.randbytes(length)
        await self.volume.write(self.volume.lookup(*key).ino, at, new)
        data = self.files[key]
        data += bytes(max(0, at - len(data)))
        data[at : at + length] = new

    async def create(self) -> tuple[int, bytes]:
        self.made += 1
        form = self.rng.choice([b"step-%d.pt", b"%d", b"model-%d.bin"])
        key = self.rng.choice(self.directories), form % self.made + self.prefix
        await self.volume.make(*key, FILE, 0, 0)
        self.files[key] = bytearray()
        return key

    @asynccontextmanager
    async def opened(self, key: tuple[int, bytes]) -> AsyncIterator[None]:
        ino = self.volume.lookup(*key).ino
        self.volume.open(ino)
        try:
            yield
        finally:
            await self.volume.flush(ino)
            self.volume.close(ino)

    async def small(self) -> None:
        key = await self.create()
        async with self.opened(key):
            await self.write(key, 0, self.rng.choice([10, 200, 300, 4096, 5000]))

    async def stream(self) -> None:
        key = await self.create()
        piece = self.rng.choice([5000, 50_000, 1 << 17, 1 << 18])
        async with self.opened(key):
            for _ in range(self.rng.randrange(1, 20)):
                await self.write(key, len(self.files[key]), piece)

    async def overwrite(self) -> None:
        keys = [key for key, data in self.files.items() if data]
        if not keys:
            return
        key = self.rng.choice(keys)
        async with self.opened(key):
            for _ in range(self.rng.randrange(1, 30)):
                size = len(self.files[key])
                at = self.rng.randrange(size)
                await self.write(key, at, min(self.rng.choice([10, 4096, 20_000]), size - at))

    async def link(self) -> None:
        if not self.files:
            return
        key = self.rng.choice(list(self.files))
        self.made += 1
        other = self.rng.choice(self.directories), b"link-%d" % self.made + self.prefix
        await self.volume.link(self.volume.lookup(*key).ino, *other)
        self.files[other] = self.files[key]

    async def delete(self) -> None:
        if self.files:
            await self.remove(self.rng.choice(list(self.files)))

    async def remove(self, key: tuple[int, bytes]) -> None:
        await self.volume.unlink(*key)
        del self.files[key]

    async def delete_all(self) -> None:
        keys = list(self.files)
        self.rng.shuffle(keys)
        for key in keys:
            await self.remove(key)
            if self.rng.random() < 0.1:
                await self.volume.syncfs()

    async def check(self, volume: Volume) -> None:
        for key, data in self.files.items():
            assert await content(volume, volume.lookup(*key).ino) == data, f"{key} differs"


async def directories(volume: Volume, rng: random.Random) -> list[int]:
    """Make directories of some classes, and one of none."""
    made = [ROOT]
    for i, (name, value) in enumerate(rng.sample(POLICIES, rng.randrange(1, 5))):
        ino = (await volume.make(ROOT, b"class-%d" % i, DIRECTORY, 0, 0)).ino
        await volume.setxattr(ino, b"user.retainz." + name, value)
        made.append(ino)
    return made


async def fill(volume: Volume, ino: int, piece: int = PIECE) -> int:
    """Append to a file until a write of `piece` bytes is refused; return how many were taken."""
    at = volume.inode(ino).size
    try:
        while True:
            await volume.write(ino, at, bytes([at // piece % 251]) * piece)
            at += piece
    except NoSpace:
        return at


async def fill_to_the_last_block(volume: Volume) -> int:
    ino = (await volume.make(ROOT, b"filler", FILE, 0, 0)).ino
    await fill(volume, ino)
    await fill(volume, ino, BLOCK)
    return ino


async def check_nothing_is_lost(volume: Volume) -> None:
    assert volume.stream.write_errors == 0
    assert volume.lanes.emergencies == 0, "a write that was admitted found no place"
    assert all(inode.error is None for inode in volume.namespace.inodes.values())
    assert volume.table.empty or volume.table.borrowed, "the emergency zone was not lent"


async def check_clean(device: MemoryDevice) -> None:
    report = await fsck.examine(device, scrub=True)
    assert not report.findings


async def check_everything_comes_back(volume: Volume, shape: Shape) -> None:
    """All files are deleted; every zone is empty, and one file can have what is promised."""
    await volume.syncfs()
    await volume.reclaim.reset_dead()
    assert volume.table.empty == shape.data_zones
    promised = volume.statfs().available * BLOCK
    assert promised > 0.98 * shape.room - 16 * BLOCK
    ino = (await volume.make(ROOT, b"big", FILE, 0, 0)).ino
    taken = await fill(volume, ino)
    assert taken >= promised - PIECE
    await volume.fsync(ino)
    await volume.unlink(ROOT, b"big")


async def check_full(volume: Volume, shape: Shape) -> None:
    """What is left at ENOSPC: the emergency zone, what no copy would gain, less than a write."""
    statfs = volume.statfs()
    free = statfs.free * BLOCK - shape.capacity
    # The zone that copies go to is not collected itself while it takes more.
    copies = shape.capacity if volume.table.active(Kind.COLLECTION) else 0
    most = shape.data_zones * WASTE + copies + 2 * stored(3 * BLOCK)
    assert free <= most, f"{free} bytes are left, {most} at most could not be used"
    assert statfs.available * BLOCK <= stored(3 * BLOCK)


async def check_what_needs_no_room(volume: Volume, ino: int) -> None:
    """Everything but more bytes still works; the file is `filler`."""
    directory = (await volume.make(ROOT, b"still", DIRECTORY, 0, 0)).ino
    await volume.setxattr(directory, b"user.retainz.keep_last", b"3")
    await volume.setattr(ino, mode=0o600)
    await volume.fsync(ino)
    await volume.rename(ROOT, b"filler", directory, b"renamed")
    size = volume.inode(ino).size
    await volume.setattr(ino, size=size // 2)
    await volume.syncfs()
    assert volume.inode(ino).size == size // 2
    await volume.unlink(directory, b"renamed")
    await volume.rmdir(ROOT, b"still")


@PROPERTY
@given(shape=SHAPES, mix=MIXES, seed=SEEDS)
def test_a_full_device_keeps_its_word_and_gives_everything_back(
    shape: Shape, mix: tuple[float, ...], seed: int
) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        device = await shape.device()
        with trio.fail_after(PATIENCE_S):
            async with mounted(device) as volume:
                writer = Writer(volume, await directories(volume, rng), seed, b"")
                await writer.work(300, mix)
                note(f"refused {writer.refused}, {volume.table.totals}")
                ino = await fill_to_the_last_block(volume)
                await check_full(volume, shape)
                await check_what_needs_no_room(volume, ino)
                await writer.check(volume)
                await check_nothing_is_lost(volume)
                await fill_to_the_last_block(volume)
            await check_clean(device)
            async with mounted(device) as volume:
                await writer.check(volume)
                writer.volume = volume
                await writer.delete_all()
                await volume.unlink(ROOT, b"filler")
                await check_everything_comes_back(volume, shape)
                await check_nothing_is_lost(volume)
            await check_clean(device)

    trio.run(run)


@PROPERTY
@given(shape=SHAPES, mixes=st.lists(MIXES, min_size=4, max_size=4), seed=SEEDS)
def test_writers_at_one_time_are_refused_or_served(
    shape: Shape, mixes: list[tuple[float, ...]], seed: int
) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        device = await shape.device()
        with trio.fail_after(PATIENCE_S):
            async with mounted(device) as volume:
                made = await directories(volume, rng)
                writers = [Writer(volume, made, seed + i, b"-%d" % i) for i in range(4)]
                async with trio.open_nursery() as nursery:
                    for writer, mix in zip(writers, mixes, strict=True):
                        nursery.start_soon(writer.work, 80, mix)
                await volume.syncfs()
                for writer in writers:
                    await writer.check(volume)
                await check_nothing_is_lost(volume)
                await fill_to_the_last_block(volume)
                await check_full(volume, shape)
                async with trio.open_nursery() as nursery:
                    for writer in writers:
                        nursery.start_soon(writer.delete_all)
                await volume.unlink(ROOT, b"filler")
                await check_everything_comes_back(volume, shape)
                await check_nothing_is_lost(volume)
            await check_clean(device)

    trio.run(run)


@pytest.mark.parametrize(("share", "every"), [(0.75, 7), (0.8, 7), (0.8, 200)])
@pytest.mark.parametrize("active", [6, 14])
async def test_a_map_that_is_rewritten_at_random_meets_no_enospc(
    active: int, share: float, every: int
) -> None:
    """Up to the bound: what lives is below all zones but one, less what a copy would not gain."""
    shape = Shape(19, active, ZONE)
    rng = random.Random(active)
    device = await shape.device()
    size = int(share * shape.data_zones) * ZONE
    assert size < (shape.data_zones - 1) * (ZONE - WASTE) - stored(PIECE)
    with trio.fail_after(PATIENCE_S):
        async with mounted(device) as volume:
            data = bytearray(rng.randbytes(size))
            ino = await put(volume, ROOT, b"map", bytes(data))
            for i in range(500):
                at = rng.randrange(size // BLOCK - 4) * BLOCK
                new = rng.randbytes(rng.choice([BLOCK, 4 * BLOCK]))
                data[at : at + len(new)] = new
                await volume.write(ino, at, new)
                if i % every == 0:
                    await volume.fsync(ino)
            assert volume.reclaim.collections > 20, "there was nothing to collect"
            assert await content(volume, ino) == data
            await check_nothing_is_lost(volume)


@pytest.mark.parametrize("active", [6, 8, 14])
async def test_tails_that_others_left_open_hold_a_save_of_another_kind(active: int) -> None:
    """Every active slot is held by a zone with a tail; all of it is room for whoever comes."""
    shape = Shape(24, active, ZONE)
    device = await shape.device()
    with trio.fail_after(PATIENCE_S):
        # Policy `plan` would mingle them, so that few slots are taken.
        async with mounted(device, policy="retainz") as volume:
            for i in range(12):  # streams that retire too far apart to share a zone
                run = (await volume.make(ROOT, b"run-%d" % i, DIRECTORY, 0, 0)).ino
                await volume.setxattr(run, b"user.retainz.keep_last", b"1")
                await volume.setxattr(run, b"user.retainz.cadence", b"%d" % 10**i)
                await put(volume, run, b"step-1.pt", b"x" * 50_000)
            partial = sum(zone.partial for zone in volume.table.zones)
            assert partial == volume.table.limits.total, "the slots were not used up"
            other = (await volume.make(ROOT, b"other", DIRECTORY, 0, 0)).ino
            await volume.setxattr(other, b"user.retainz.class", b"output")
            ino = (await volume.make(other, b"f", FILE, 0, 0)).ino
            taken = await fill(volume, ino)
            await volume.fsync(ino)
            await fill_to_the_last_block(volume)
            await check_full(volume, shape)
            assert taken > shape.room - 12 * stored(50_000) - shape.data_zones * WASTE - PIECE
            await check_nothing_is_lost(volume)


@pytest.mark.parametrize(
    ("keep", "size", "shards"),
    [(1, 1_000_000, 1), (1, 2_000_000, 4), (2, 700_000, 1), (3, 300_000, 3), (8, 100_000, 1)],
)
@pytest.mark.parametrize("active", [6, 14])
async def test_retention_needs_room_for_one_generation_more_than_it_keeps(
    active: int, keep: int, size: int, shards: int
) -> None:
    """The smallest device for it never refuses a save, and the rest of it is in use."""
    need = (keep + 1) * shards * stored(size // shards)
    zone = ZONE - WASTE
    shape = Shape(max(16, METADATA_ZONES_MIN + 1 - -need // zone), active, ZONE)
    device = await shape.device()
    with trio.fail_after(PATIENCE_S):
        async with mounted(device) as volume:
            run = (await volume.make(ROOT, b"run", DIRECTORY, 0, 0)).ino
            await volume.setxattr(run, b"user.retainz.keep_last", b"%d" % keep)
            await volume.setxattr(run, b"user.retainz.reap", b"1")
            await put(volume, ROOT, b"ballast", bytes((shape.data_zones - 1) * zone - need))
            for number in range(1, 54):
                step = (await volume.make(run, b"step-%d" % number, DIRECTORY, 0, 0)).ino
                for shard in range(shards):
                    data = bytes([number]) * (size // shards)
                    await put(volume, step, b"shard-%d" % shard, data, piece=1 << 17)
                await volume.setxattr(step, b"user.retainz.commit", b"1")
            await trio.testing.wait_all_tasks_blocked()
            assert [name for name, _ in volume.entries(run)] == [
                b"step-%d" % number for number in range(54 - keep, 54)
            ]
            await check_nothing_is_lost(volume)


@pytest.mark.parametrize("size", [PIECE, 4 * BLOCK, 3 * BLOCK])
async def test_what_is_promised_can_be_written_as_many_files(size: int) -> None:
    shape = Shape(19, 8, ZONE)
    device = await shape.device()
    with trio.fail_after(PATIENCE_S):
        async with mounted(device) as volume:
            before = volume.statfs()
            count = min(before.available * BLOCK // size, before.files_free)
            assert count * size > shape.room // 2
            kept = {}
            for i in range(count):
                kept[await put(volume, ROOT, b"%d" % i, b"%05d" % i * (size // 5))] = i
            await volume.syncfs()
            for ino, i in kept.items():
                assert await content(volume, ino) == b"%05d" % i * (size // 5)
            await check_nothing_is_lost(volume)


async def test_damage_in_one_zone_does_not_keep_others_from_being_collected() -> None:
    device = await formatted(small_device(zones=16))
    with trio.fail_after(PATIENCE_S):
        async with mounted(device) as volume:
            kept = await put(volume, ROOT, b"bad", b"b" * BLOCK)
            for i in range(60):
                await put(volume, ROOT, b"drop-%d" % i, b"x" * 30_000)
                await put(volume, ROOT, b"keep-%d" % i, b"k" * 5_000)
                await volume.syncfs()
            (zone,) = zones_of(volume, kept)
            device.damage(zone, 0)
            for i in range(60):
                await volume.unlink(ROOT, b"drop-%d" % i)
            ino = (await volume.make(ROOT, b"big", FILE, 0, 0)).ino
            assert await fill(volume, ino) > 7 * ZONE
            assert volume.reclaim.collections > 3


async def test_copies_leave_the_tail_of_an_adopted_zone_to_writers() -> None:
    device = await formatted(small_device(zones=32))
    with trio.fail_after(PATIENCE_S):
        async with mounted(device) as volume:
            for i in range(24):
                for name, size in ((b"keep", 20_000), (b"first", 100_000), (b"second", 50_000)):
                    await put(volume, ROOT, name + b"-%d" % i, b"x" * size)
                await volume.syncfs()
            for i in range(24):
                await volume.unlink(ROOT, b"first-%d" % i)
            await volume.collect()
            tails = {z.index: z.tail for z in volume.table.partial(Kind.UNHINTED)}
            assert tails, "collection left no zone to writers"
            for i in range(24):
                await volume.unlink(ROOT, b"second-%d" % i)
            copied = volume.copier.copied
            await volume.collect()
            assert volume.copier.copied > copied
            for index, tail in tails.items():
                zone = volume.table[index]
                assert zone.tail in (tail, 0, zone.capacity), "it was filled, not just collected"


# Metadata


async def fill_names(volume: Volume, length: int) -> list[bytes]:
    """Create empty files until that is refused."""
    names: list[bytes] = []
    try:
        while True:
            name = b"%06d" % len(names) + b"n" * length
            await volume.make(ROOT, name, FILE, 0, 0)
            names.append(name)
    except NoSpace:
        return names


async def fill_links(volume: Volume, length: int) -> list[bytes]:
    ino = (await volume.make(ROOT, b"file", FILE, 0, 0)).ino
    names = [b"file"]
    try:
        while True:
            name = b"%06d" % len(names) + b"n" * length
            await volume.link(ino, ROOT, name)
            names.append(name)
    except NoSpace:
        return names


async def fill_inline(volume: Volume, length: int) -> list[bytes]:
    names: list[bytes] = []
    try:
        while True:
            ino = (await volume.make(ROOT, b"%06d" % len(names), FILE, 0, 0)).ino
            names.append(b"%06d" % len(names))
            await volume.write(ino, 0, bytes(length))
    except NoSpace:
        return names


async def fill_attributes(volume: Volume, length: int) -> list[bytes]:
    names: list[bytes] = []
    try:
        while True:
            ino = (await volume.make(ROOT, b"%06d" % len(names), FILE, 0, 0)).ino
            names.append(b"%06d" % len(names))
            await volume.setxattr(ino, b"user.a", bytes(length * 50))
    except NoSpace:
        return names


async def fill_extents(volume: Volume, length: int) -> list[bytes]:
    """One file in single blocks; deleting it alone gives everything back."""
    ino = await put(volume, ROOT, b"map", bytes(4_000_000))
    rng = random.Random(length)
    try:
        while True:
            await volume.write(ino, rng.randrange(970) * BLOCK, b"x" * BLOCK)
            if rng.random() < 0.05:
                await volume.fsync(ino)
            await volume.setxattr(ino, b"user.a%d" % rng.randrange(1500), b"a" * length)
    except NoSpace:
        return [b"map"]


FILLERS = [fill_names, fill_links, fill_inline, fill_attributes, fill_extents]


@pytest.mark.parametrize("filler", FILLERS)
async def test_full_metadata_zones_take_deletions_and_go_on(
    filler: Callable[[Volume, int], Awaitable[list[bytes]]],
) -> None:
    device = await formatted(WatchedDevice(small_device(zones=40).geometry, delay=lambda: TURNS))
    with trio.fail_after(PATIENCE_S):
        async with mounted(device) as volume:
            names = await filler(volume, 200)
            assert volume.statfs().files_free == 0
            for i in range(1500):  # more log than the metadata zones hold
                ino = volume.lookup(ROOT, names[i % len(names)]).ino
                await volume.setattr(ino, mode=0o600 + i % 64)
                if i % 3 == 0:
                    await volume.fsync(ino)
            await volume.rename(ROOT, names[0], ROOT, b"r")
            names[0] = b"r"
            await volume.setxattr(ROOT, b"user.retainz.cadence", b"2s")
            await volume.syncfs()
        await check_clean(device)
        async with mounted(device) as volume:
            assert sorted(name for name, _ in volume.entries(ROOT)) == sorted(names)
            random.Random(1).shuffle(names)
            for name in names:
                await volume.unlink(ROOT, name)
            again = await filler(volume, 200)
            assert len(again) >= 0.9 * len(names)
            for name in again:
                await volume.unlink(ROOT, name)
                await volume.syncfs()
        await check_clean(device)


async def test_as_many_files_can_be_made_as_are_promised() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        with trio.fail_after(PATIENCE_S):
            while promised := volume.statfs().files_free // 2:
                before = len(volume.entries(ROOT))
                for i in range(promised):
                    await put(volume, ROOT, b"checkpoint-%d" % (before + i), b"x" * 5000)


@pytest.mark.parametrize("seed", range(8))
async def test_full_metadata_zones_survive_a_power_cut(seed: int) -> None:
    rng = random.Random(seed)
    device = await formatted(small_device(zones=16))
    names: list[bytes] = []
    with trio.fail_after(PATIENCE_S), until_power_cut():
        async with Volume.mounted(device, options()) as volume:
            names = await fill_names(volume, 100)
            await volume.syncfs()
            device.cut_at = device.operations + rng.randrange(150)
            while True:
                ino = volume.lookup(ROOT, rng.choice(names)).ino
                await volume.setattr(ino, mode=0o600 + rng.randrange(64))
                await volume.fsync(ino)
    survivor = device.after_cut(rng)
    await survivor.start()
    with trio.fail_after(PATIENCE_S):
        async with mounted(survivor) as volume:
            assert [name for name, _ in volume.entries(ROOT)] == names
            for name in names:
                await volume.unlink(ROOT, name)
            assert len(await fill_names(volume, 100)) >= 0.9 * len(names)
