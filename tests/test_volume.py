"""The volume on an in-memory device: what it stores comes back, also after a power cut."""

from __future__ import annotations

import random

import pytest

from retainzfs.volume import ROOT, Volume
from tests import model as m
from tests.helpers import (
    CrashingDevice,
    PowerCut,
    check_quiescent,
    content,
    formatted,
    mounted,
    options,
    small_device,
    tree,
)

pytestmark = pytest.mark.volume


async def check_tree(volume: Volume, files: dict[bytes, bytearray]) -> None:
    found = {p.lstrip(b"/"): d for p, d in (await tree(volume)).items() if d is not None}
    assert sorted(found) == sorted(files), "the names differ"
    for path, data in files.items():
        assert found[path] == bytes(data), f"{path!r} differs"


@pytest.mark.parametrize("seed", range(8))
async def test_random_operations_survive_remounts(seed: int) -> None:
    rng = random.Random(seed)
    device = await formatted(small_device(zones=64))
    model = m.Model()
    async with mounted(device) as volume:
        await m.prepare(volume)
    for _ in range(4):
        async with mounted(device) as volume:
            await check_tree(volume, model.files)
            for _ in range(60):
                await m.step(volume, model, rng)
            await check_tree(volume, model.files)
            await check_quiescent(volume)
    async with mounted(device) as volume:
        await check_tree(volume, model.files)


async def run_until_cut(device: CrashingDevice, model: m.Model, seed: int, steps: int) -> bool:
    """Return whether the power was cut before the steps were done."""
    rng = random.Random(seed)
    try:
        async with Volume.mounted(device, options()) as volume:
            await m.prepare(volume)
            for _ in range(steps):
                await m.step(volume, model, rng)
    except BaseExceptionGroup as group:
        if group.split(PowerCut)[1] is not None:
            raise
        return True
    return False


@pytest.mark.parametrize("seed", range(40))
async def test_power_cut_keeps_what_was_acknowledged(seed: int) -> None:
    rng = random.Random(1000 + seed)
    whole = CrashingDevice(small_device(zones=64).geometry)
    await formatted(whole)
    assert not await run_until_cut(whole, m.Model(), seed, 40)
    for _ in range(6):
        device = CrashingDevice(whole.geometry)
        await formatted(device)
        device.cut_at = rng.randrange(device.operations + 1, whole.operations)
        model = m.Model()
        assert await run_until_cut(device, model, seed, 40), "the cut came too late"
        survivor = device.after_cut(rng)
        await survivor.start()
        async with mounted(survivor) as volume:
            for path, data in model.durable.items():
                ino = volume.lookup(*await m.split(volume, path)).ino
                assert await content(volume, ino) == data, f"{path!r} lost bytes"
            await tree(volume)  # everything that is there reads without an error
            ino = (await volume.make(ROOT, b"after", 0o100644, 0, 0)).ino
            await volume.write(ino, 0, b"x" * 100_000)
            await volume.fsync(ino)
            await check_quiescent(volume)
        async with mounted(survivor) as volume:
            assert await content(volume, volume.lookup(ROOT, b"after").ino) == b"x" * 100_000


@pytest.mark.parametrize("seed", range(4))
async def test_a_renamed_file_has_its_bytes_after_a_cut(seed: int) -> None:
    """The way editors save: write beside, rename over, no fsync. The old or the new, whole."""
    rng = random.Random(seed)
    cuts = 0
    while cuts < 10:
        device = CrashingDevice(small_device(zones=64).geometry)
        await formatted(device)
        start = device.operations
        device.cut_at = start + rng.randrange(4, 60)
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


@pytest.mark.parametrize("seed", range(12))
async def test_one_power_cut_after_another(seed: int) -> None:
    """What the first recovery gave up must not come back in the second."""
    rng = random.Random(3000 + seed)
    device = CrashingDevice(small_device(zones=64).geometry)
    await formatted(device)
    files: dict[bytes, bytes] = {}
    for _ in range(8):
        model = m.Model({p: bytearray(d) for p, d in files.items()}, dict(files))
        device.cut_at = device.operations + rng.randrange(12, 120)
        try:
            async with Volume.mounted(device, options()) as volume:
                if not volume.entries(ROOT):
                    await m.prepare(volume)
                    await volume.committer.commit()
                for _ in range(60):
                    await m.step(volume, model, rng)
        except BaseExceptionGroup as group:
            if group.split(PowerCut)[1] is not None:
                raise
        device = device.after_cut(rng)
        await device.start()
        async with mounted(device) as volume:
            found = await tree(volume)
            for path, data in model.durable.items():
                assert found[b"/" + path] == data, f"{path!r} lost bytes"
            files = {p.lstrip(b"/"): d for p, d in found.items() if d is not None}
            kept = {(r.zone, r.start) for z in volume.namespace.runs.values() for r in z.values()}
            held = {(e.run.zone, e.run.start) for i in volume.namespace.inodes.values()
                    for e in i.extents if e.run.zone >= 0}  # fmt: skip
            assert held <= kept, "collection does not know of all bytes"
            await check_quiescent(volume)
