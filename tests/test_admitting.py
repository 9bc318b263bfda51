"""A generation is planned before its first byte, and the emergency zone is lent against deletions
that will replace it."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from retainzfs import placement
from retainzfs.errors import NoSpace
from retainzfs.layout import BLOCK
from retainzfs.planning import CLAIM_IDLE_S
from retainzfs.volume import ROOT, Volume
from retainzfs.zone import Kind
from tests.helpers import (
    DIRECTORY,
    Clock,
    content,
    formatted,
    mounted,
    noise,
    options,
    put,
    small_device,
    until_power_cut,
    zones_of,
)
from tests.quiescence import check_quiescent

pytestmark = pytest.mark.volume

CADENCE_S = 60
ZONE = 1 << 20
ZONEFUL = ZONE - 8 * BLOCK  # leaves a few blocks that are worth nothing
KEPT = 2


class Job:
    """Saves a file in a directory for each step, and deletes what is beyond the newest two."""

    def __init__(self, volume: Volume, clock: Clock, top: int, name: bytes = b"run") -> None:
        self.volume = volume
        self.clock = clock
        self.top = top
        self.name = name
        self.kept: dict[int, int] = {}  # number → inode of the file
        self.number = 0

    @classmethod
    async def begin(cls, volume: Volume, clock: Clock, name: bytes = b"run") -> Job:
        top = (await volume.make(ROOT, name, DIRECTORY, 0, 0)).ino
        await volume.setxattr(top, b"user.retainz.keep_last", b"%d" % KEPT)
        await volume.setxattr(top, b"user.retainz.cadence", b"%d" % CADENCE_S)
        return cls(volume, clock, top, name)

    async def save(self, size: int = ZONEFUL) -> None:
        self.clock.time_s += CADENCE_S
        self.number += 1
        here = (await self.volume.make(self.top, b"step-%d" % self.number, DIRECTORY, 0, 0)).ino
        data = noise(size, self.number)
        self.kept[self.number] = await put(self.volume, here, b"__0_0.distcp", data)
        await put(self.volume, here, b".metadata", b"whole")
        await self.volume.syncfs()

    async def rotate(self) -> None:
        for number in sorted(self.kept)[:-KEPT]:
            del self.kept[number]
            here = self.volume.lookup(self.top, b"step-%d" % number).ino
            for name, _ in list(self.volume.entries(here)):
                await self.volume.unlink(here, name)
            await self.volume.rmdir(self.top, b"step-%d" % number)
        await self.volume.syncfs()
        await trio.testing.wait_all_tasks_blocked()  # for the resets

    async def check(self) -> None:
        for number, ino in self.kept.items():
            size = self.volume.inode(ino).size
            assert await content(self.volume, ino) == noise(size, number)


async def fill_with_anchors(volume: Volume) -> None:
    """Leave no empty zone but the emergency zone."""
    kept = (await volume.make(ROOT, b"kept", DIRECTORY, 0, 0)).ino
    await volume.setxattr(kept, b"user.retainz.anchor", b"1")
    await volume.setxattr(kept, b"user.retainz.cadence", b"86400")
    number = 0
    while volume.table.empty_available:
        number += 1
        await put(volume, kept, b"step-%d.pt" % number, noise(ZONEFUL))
        await volume.syncfs()


def empty(volume: Volume) -> int:
    return volume.table.empty


async def crowded(volume: Volume, clock: Clock) -> Job:
    """A job that deletes in time, on a volume where its next save finds no zone."""
    job = await Job.begin(volume, clock)
    for _ in range(4):
        await job.save()
        await job.rotate()
    await fill_with_anchors(volume)
    return job


@pytest.mark.parametrize("name", placement.policies())
async def test_every_policy_can_be_chosen_and_keeps_what_is_saved(name: str) -> None:
    clock = Clock()
    device = await formatted(small_device(zones=24))
    async with mounted(device, options(clock, policy=name)) as volume:
        job = await Job.begin(volume, clock)
        for number in range(12):
            await job.save(size=100_000 + 40_000 * (number % 3))
            await job.rotate()
        await job.check()
        assert volume.statistics()["policy"] == name
        await check_quiescent(volume)


@pytest.mark.parametrize(("name", "shared"), [("plan", False), ("zenfs", True)])
async def test_anchors_share_zones_only_where_the_policy_says_so(name: str, shared: bool) -> None:
    clock = Clock()
    device = await formatted(small_device(max_active=6))
    async with mounted(device, options(clock, policy=name)) as volume:
        kept = (await volume.make(ROOT, b"kept", DIRECTORY, 0, 0)).ino
        await volume.setxattr(kept, b"user.retainz.anchor", b"1")
        ino = await put(volume, kept, b"step-1.pt", noise(50_000))
        await volume.syncfs()
        job = await Job.begin(volume, clock)
        await job.save(size=50_000)
        assert (zones_of(volume, ino) == zones_of(volume, job.kept[1])) is shared


async def test_another_plan_leaves_alone_what_a_generation_has_claimed() -> None:
    clock = Clock()
    device = await formatted(small_device(zones=24, zone_size=ZONE))
    async with mounted(device, options(clock)) as volume:
        job = await Job.begin(volume, clock)
        await volume.setxattr(job.top, b"user.retainz.size", b"%d" % (3 * ZONEFUL))
        here = (await volume.make(job.top, b"step-1", DIRECTORY, 0, 0)).ino
        free = volume.table.empty_available
        ino = (await volume.make(here, b"__0_0.distcp", 0o100644, 0, 0)).ino
        await volume.write(ino, 0, noise(50_000))
        other = volume.lanes.lane(10**6)
        assert volume.lanes.view(Kind.FINITE).empties == free
        assert volume.lanes.view(Kind.FINITE, other).empties == free - 3
        clock.time_s += CLAIM_IDLE_S + 1
        assert volume.lanes.view(Kind.FINITE, other).empties == free
        await volume.write(ino, 50_000, noise(50_000))
        assert volume.lanes.view(Kind.FINITE, other).empties < free
        await volume.fsync(ino)


@pytest.mark.power_cuts(12)
async def test_a_save_borrows_the_emergency_zone_when_what_it_deletes_replaces_it() -> None:
    clock = Clock()
    device = await formatted(small_device(zones=16, zone_size=ZONE))
    async with mounted(device, options(clock)) as volume:
        job = await crowded(volume, clock)
        for count in range(1, 5):
            await job.save()
            assert volume.statistics()["borrows"] == count
            assert empty(volume) == 0, "the emergency zone is in use"
            await job.rotate()
            assert empty(volume) == 1
            assert not volume.table.borrowed, "the next save may borrow again"
        await job.check()
        assert volume.reclaim.collections == 0
        await check_quiescent(volume)


async def test_nothing_is_lent_to_a_job_that_deletes_late() -> None:
    clock = Clock()
    device = await formatted(small_device(zones=16, zone_size=ZONE))
    async with mounted(device, options(clock)) as volume:
        job = await Job.begin(volume, clock)
        for _ in range(3):
            await job.save()
        clock.time_s += 0.7 * CADENCE_S
        await job.rotate()
        await fill_with_anchors(volume)
        with pytest.raises(NoSpace):
            await job.save()
        assert volume.statistics()["borrows"] == 0
        assert empty(volume) == 1


async def test_a_file_that_is_open_lends_nothing() -> None:
    clock = Clock()
    device = await formatted(small_device(zones=16, zone_size=ZONE))
    async with mounted(device, options(clock)) as volume:
        job = await crowded(volume, clock)
        oldest = min(job.kept.values())
        volume.open(oldest)
        with pytest.raises(NoSpace):
            await job.save()
        assert volume.statistics()["borrows"] == 0
        volume.close(oldest)


async def test_a_crash_before_the_deletion_leaves_a_volume_that_works() -> None:
    clock = Clock()
    device = await formatted(small_device(zones=16, zone_size=ZONE))
    with until_power_cut():
        async with Volume.mounted(device, options(clock)) as volume:
            job = await crowded(volume, clock)
            await job.save()
            assert volume.statistics()["borrows"] == 1
            kept = dict(job.kept)
            device.cut_at = device.operations
            await job.rotate()
    survivor = device.after_cut(random.Random(1))
    await survivor.start()
    async with mounted(survivor, options(clock)) as volume:
        assert empty(volume) == 0
        job.volume, job.kept = volume, kept
        await job.check()
        with pytest.raises(NoSpace):
            await put(volume, ROOT, b"more", noise(ZONEFUL))
        await volume.unlink(ROOT, b"more")
        await job.rotate()
        assert empty(volume) == 1
        await job.save()
        assert volume.table.borrowed, "the job has deleted in time so far"
        await job.rotate()
        await job.check()
