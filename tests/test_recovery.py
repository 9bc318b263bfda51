"""Damaged images: a clear error, an EIO, or the right bytes; nothing else."""

from __future__ import annotations

import copy
import random

import pytest
import trio

from retainzfs.device import Condition
from retainzfs.device.memory import MemoryDevice
from retainzfs.device.protocol import ACTIVE
from retainzfs.errors import Damaged, ForeignTarget, NewerFormat
from retainzfs.journal import METADATA_ZONES_MIN, read_superblocks
from retainzfs.layout import BLOCK
from retainzfs.volume import ROOT, FSError, Volume
from tests.helpers import (
    FILE,
    content,
    formatted,
    mounted,
    options,
    put,
    small_device,
    tree,
    until_power_cut,
    zones_of,
)

pytestmark = pytest.mark.volume


async def used(*, clean: bool) -> tuple[MemoryDevice, dict[bytes, bytes]]:
    """Return a device with some files, and what they hold; unclean as after a power cut."""
    device = await formatted(small_device(zones=24))
    rng = random.Random(9)
    files = {b"/f%d" % i: rng.randbytes(rng.choice((100, 5000, 60_000))) for i in range(12)}
    async with mounted(device) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"2")
        for path, data in files.items():
            await put(volume, ROOT, path[1:], data)
        await volume.link(volume.lookup(ROOT, b"f0").ino, ROOT, b"linked")
        files[b"/linked"] = files[b"/f0"]
        await volume.syncfs()
        cut = copy.deepcopy(device)
    device = device if clean else cut
    await device.start()
    return device, files


async def examine(device: MemoryDevice, files: dict[bytes, bytes]) -> str:
    """Mount and read everything; return what came of it."""
    outcome = "right"
    try:
        with trio.fail_after(10):
            async with mounted(device) as volume:
                for path, data in files.items():
                    try:
                        found = await content(volume, volume.lookup(ROOT, path[1:]).ino)
                    except FSError as error:
                        if error.errno != 5:
                            raise
                        outcome = "EIO"
                        continue
                    assert found == data, f"{path!r} reads wrong bytes"
    except (Damaged, ForeignTarget, NewerFormat):
        return "refused"
    except BaseExceptionGroup as group:
        rest = group.split((Damaged, ForeignTarget, NewerFormat))[1]
        if rest is not None:
            raise
        return "refused"
    return outcome


@pytest.mark.parametrize("clean", [True, False])
async def test_a_sound_image_is_right(clean: bool) -> None:
    device, files = await used(clean=clean)
    assert await examine(device, files) == "right"


@pytest.mark.parametrize("seed", range(60))
async def test_flipped_bits_of_file_data_give_no_wrong_bytes(seed: int) -> None:
    device, files = await used(clean=True)
    rng = random.Random(seed)
    zones = [z for z, d in device._zones.items() if z >= METADATA_ZONES_MIN and d]
    for _ in range(rng.choice((1, 3, 20))):
        data = device._zones[rng.choice(zones)]
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    assert await examine(device, files) in ("right", "EIO")


@pytest.mark.parametrize("seed", range(60))
async def test_flipped_bits_of_a_clean_log_are_refused_or_harmless(seed: int) -> None:
    device, files = await used(clean=True)
    rng = random.Random(seed)
    zones = [z for z, d in device._zones.items() if z < METADATA_ZONES_MIN and d]
    for _ in range(rng.choice((1, 3, 20))):
        data = device._zones[rng.choice(zones)]
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    assert await examine(device, files) in ("right", "refused")


async def test_zeroed_metadata_is_refused() -> None:
    device, files = await used(clean=True)
    for zone in range(METADATA_ZONES_MIN):
        data = device._zones.get(zone)
        if data:
            data[:] = bytes(len(data))
    assert await examine(device, files) == "refused"


async def test_an_empty_device_is_foreign() -> None:
    device = small_device()
    await device.start()
    with pytest.raises(ForeignTarget, match="retainzfs mkfs"):
        async with mounted(device):
            pass


async def test_another_geometry_is_refused() -> None:
    device, _ = await used(clean=True)
    other = small_device(zones=25)
    other._zones = device._zones
    for zone, state in enumerate(device.rules.states):
        other.rules.states[zone] = state
    with pytest.raises(Damaged, match="written for zones"):
        async with mounted(other):
            pass


async def test_a_refused_mount_changes_nothing() -> None:
    device, files = await used(clean=False)
    (newest, _), *_ = sorted(
        (await read_superblocks(device)).items(), key=lambda item: -item[1].position
    )
    device._zones[newest][BLOCK + 20] ^= 1
    before = copy.deepcopy((device._zones, device.rules.states))
    assert await examine(device, files) == "refused"
    assert (device._zones, device.rules.states) == before


async def test_bytes_above_a_write_pointer_are_an_error_of_their_file() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        first = await put(volume, ROOT, b"first", b"1" * 50_000)
        await volume.fsync(first)
        second = await put(volume, ROOT, b"second", b"2" * 50_000)
        await volume.fsync(second)
        (zone,) = zones_of(volume, second)
        pointer = volume.inode(second).extents[0].run.start * BLOCK
        assert zones_of(volume, first) == {zone}
    device.roll_back(zone, pointer)
    async with mounted(device) as volume:
        assert await content(volume, first) == b"1" * 50_000
        with pytest.raises(FSError) as caught:
            await volume.read(second, 0, 10)
        assert caught.value.errno == 5
        await put(volume, ROOT, b"third", b"3" * 50_000)
        await volume.syncfs()
        await volume.unlink(ROOT, b"second")
    async with mounted(device) as volume:
        assert sorted(await tree(volume)) == [b"/first", b"/third"]
        assert await content(volume, volume.lookup(ROOT, b"third").ino) == b"3" * 50_000


@pytest.mark.parametrize("condition", [Condition.READ_ONLY, Condition.FULL])
async def test_a_zone_that_takes_no_more_keeps_its_bytes(condition: Condition) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        ino = await put(volume, ROOT, b"f", b"1" * 50_000)
        await volume.fsync(ino)
        (zone,) = zones_of(volume, ino)
    device.rules.set_condition(zone, condition)
    async with mounted(device) as volume:
        assert await content(volume, ino) == b"1" * 50_000
        other = await put(volume, ROOT, b"g", b"2" * 50_000)
        await volume.fsync(other)
        assert zone not in zones_of(volume, other)
        await volume.unlink(ROOT, b"f")
        await volume.syncfs()
        assert volume.failed is None


@pytest.mark.parametrize("clean", [True, False])
async def test_the_log_goes_on_beside_a_zone_that_takes_no_more(clean: bool) -> None:
    device, files = await used(clean=clean)
    (newest, _), *_ = sorted(
        (await read_superblocks(device)).items(), key=lambda item: -item[1].position
    )
    device.rules.set_condition(newest, Condition.READ_ONLY)
    for i in range(3):
        async with mounted(device) as volume:
            await put(volume, ROOT, b"new%d" % i, b"n" * 50_000)
            await volume.syncfs()
        files[b"/new%d" % i] = b"n" * 50_000
    assert await examine(device, files) == "right"


async def test_orphans_are_gone_after_a_crash() -> None:
    device = small_device()
    await formatted(device)
    with until_power_cut():
        async with Volume.mounted(device, options()) as volume:
            ino = (await volume.make(ROOT, b"f", FILE, 0, 0)).ino
            volume.open(ino)
            await volume.write(ino, 0, b"x" * 50_000)
            await volume.fsync(ino)
            await volume.unlink(ROOT, b"f")
            await volume.fsync(ROOT)
            assert await content(volume, ino) == b"x" * 50_000, "an open file keeps its bytes"
            device.cut_at = device.operations + 1
            await volume.make(ROOT, b"g", FILE, 0, 0)
            await volume.syncfs()
    survivor = device.after_cut(random.Random(1))
    await survivor.start()
    async with mounted(survivor) as volume:
        assert ino not in volume.namespace.inodes
        await volume.syncfs()
        assert volume.statistics()["used"] == 0


@pytest.mark.parametrize("clean", [True, False])
async def test_the_log_goes_on_when_the_device_has_ended_its_zone(clean: bool) -> None:
    """A zone that was cut in the middle of a block is finished when the device settles."""
    device, files = await used(clean=clean)
    head = max(device.report(), key=lambda zone: zone.condition in ACTIVE and zone.index < 4)

    async def settle() -> None:
        await device.finish(head.index)

    device.settle = settle  # type: ignore[method-assign]
    async with mounted(device) as volume:
        files[b"/after"] = b"the zone"
        await volume.fsync(await put(volume, ROOT, b"after", files[b"/after"]))
        assert volume.failed is None
    del device.settle
    await device.start()
    assert await examine(device, files) == "right"
