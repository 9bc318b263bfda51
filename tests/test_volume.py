"""The volume on an in-memory device: what it stores comes back, also after a power cut."""

from __future__ import annotations

import random

import pytest

from retainzfs.device.faults import PowerCut
from retainzfs.volume import ROOT, Volume
from tests.helpers import content, formatted, mounted, options, small_device
from tests.quiescence import check_quiescent
from tests.witness import WatchedDevice, WatchedVolume, Witness
from tests.workload import Actor

pytestmark = pytest.mark.volume


async def work(volume: Volume, rng: random.Random, steps: int) -> None:
    made = await volume.make(ROOT, b"work-%d" % rng.randrange(1 << 60), 0o040755, 0, 0)
    actor = Actor(volume, made.ino, rng)
    await actor.prepare()
    for _ in range(steps):
        await actor.step()


@pytest.mark.parametrize("seed", range(8))
async def test_random_operations_survive_remounts(seed: int) -> None:
    rng = random.Random(seed)
    device = await formatted(small_device(zones=64))
    device.witness = Witness(device)
    for _ in range(4):
        async with WatchedVolume.mounted(device, options()) as volume:
            await device.witness.verify(volume, device.operations)
            await work(volume, rng, 40)
            await check_quiescent(volume)
    async with mounted(device) as volume:
        await device.witness.verify(volume, device.operations)


@pytest.mark.parametrize("seed", range(12))
async def test_one_power_cut_after_another(seed: int) -> None:
    """What the first recovery gave up must not come back in the second."""
    rng = random.Random(3000 + seed)
    device: WatchedDevice = await formatted(small_device(zones=64))
    for _ in range(8):
        async with Volume.mounted(device, options()) as found:
            device.witness = witness = await Witness.of(device, found)
        device.cut_at = device.operations + rng.randrange(12, 120)
        try:
            async with WatchedVolume.mounted(device, options()) as volume:
                await work(volume, rng, 60)
        except BaseExceptionGroup as group:
            if group.split(PowerCut)[1] is not None:
                raise
        at = device.operations
        device = device.after_cut(rng)
        await device.start()
        async with Volume.mounted(device, options()) as volume:
            await witness.verify(volume, at)
            kept = {(r.zone, r.start) for z in volume.namespace.runs.values() for r in z.values()}
            held = {(e.run.zone, e.run.start) for i in volume.namespace.inodes.values()
                    for e in i.extents if e.run.zone >= 0}  # fmt: skip
            assert held <= kept, "collection does not know of all bytes"
            await check_quiescent(volume)


@pytest.mark.parametrize("seed", range(4))
async def test_a_renamed_file_has_its_bytes_after_a_cut(seed: int) -> None:
    """The way editors save: write beside, rename over, no fsync. The old or the new, whole."""
    rng = random.Random(seed)
    cuts = 0
    while cuts < 10:
        device = await formatted(small_device(zones=64))
        device.cut_at = device.operations + rng.randrange(4, 60)
        try:
            async with Volume.mounted(device, options()) as volume:
                await rewrite_by_rename(volume)
        except BaseExceptionGroup as group:
            if group.split(PowerCut)[1] is not None:
                raise
            cuts += 1
        survivor = device.after_cut(rng)
        await survivor.start()
        async with mounted(survivor) as volume:
            if b"config" in dict(volume.entries(ROOT)):
                found = await content(volume, volume.lookup(ROOT, b"config").ino)
                assert found in {bytes([n]) * 9000 for n in range(40)}, "neither old nor new"


async def rewrite_by_rename(volume: Volume) -> None:
    for number in range(40):
        ino = (await volume.make(ROOT, b"config.new", 0o100644, 0, 0)).ino
        volume.open(ino)
        await volume.write(ino, 0, bytes([number]) * 9000)
        await volume.flush(ino)
        volume.close(ino)
        await volume.rename(ROOT, b"config.new", ROOT, b"config")
        if number % 3 == 0:
            await volume.committer.commit()


async def test_a_hard_link_outlives_its_first_directory() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        first = await volume.make(ROOT, b"d", 0o040755, 0, 0)
        file = await volume.make(first.ino, b"f", 0o100644, 0, 0)
        await volume.write(file.ino, 0, b"y" * 5000)
        await volume.link(file.ino, ROOT, b"g")
        await volume.unlink(first.ino, b"f")
        await volume.rmdir(ROOT, b"d")
    async with mounted(device) as volume:
        assert await content(volume, volume.lookup(ROOT, b"g").ino) == b"y" * 5000
