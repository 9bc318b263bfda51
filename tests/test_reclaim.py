"""Space: what a full device still does, and what copying keeps."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence

import pytest
import trio

from retainzfs import reclaim
from retainzfs.errors import FSError, NoSpace
from retainzfs.layout import BLOCK
from retainzfs.volume import ROOT, Volume
from retainzfs.zone import Zone
from tests.helpers import (
    FILE,
    content,
    formatted,
    half_dead,
    mounted,
    put,
    small_device,
    zones_of,
)
from tests.quiescence import check_quiescent

pytestmark = [pytest.mark.volume, pytest.mark.power_cuts(5)]

PIECE = 50_000


async def fill(volume: Volume, prefix: bytes = b"fill") -> dict[int, int]:
    """Write files until nothing more fits; return inode → bytes that were accepted."""
    accepted: dict[int, int] = {}
    while True:
        ino = (await volume.make(ROOT, prefix + b"-%d" % len(accepted), FILE, 0, 0)).ino
        accepted[ino] = 0
        for at in range(0, 4 * PIECE, PIECE):
            try:
                await volume.write(ino, at, bytes([ino % 251]) * PIECE)
            except NoSpace:
                return accepted
            accepted[ino] += PIECE


async def test_a_refused_write_stages_nothing() -> None:
    device = await formatted(small_device(zones=16))
    async with mounted(device) as volume:
        accepted = await fill(volume)
        last = [*accepted][-1]
        before = volume.inode(last).size
        with trio.fail_after(10), pytest.raises(NoSpace, match="delete files"):
            await volume.write(last, before, b"x" * (1 << 20))
        assert volume.inode(last).size == before
        await volume.fsync(last)


async def test_collection_moves_what_lives_and_changes_no_file() -> None:
    device = await formatted(small_device(zones=32))
    rng = random.Random(5)
    async with mounted(device) as volume:
        kept = await half_dead(volume, rng, 20)
        live = sum(-(-len(d) // BLOCK) * BLOCK for d in kept.values())
        times = {ino: (volume.inode(ino).mtime_ns, volume.inode(ino).ctime_ns) for ino in kept}
        empty = volume.table.empty
        with trio.fail_after(10):
            done = await volume.collect()
        assert done["zones_reset"] > 0
        assert 0 < done["copied_bytes"] <= live, "only what lives is copied"
        assert volume.table.empty > empty
        for ino, data in kept.items():
            assert await content(volume, ino) == data
            assert (volume.inode(ino).mtime_ns, volume.inode(ino).ctime_ns) == times[ino]
        assert await volume.collect() == {"zones_reset": 0, "copied_bytes": 0}
    async with mounted(device) as volume:
        for ino, data in kept.items():
            assert await content(volume, ino) == data


async def test_copies_of_large_files_share_a_trailer() -> None:
    """With one for each file, collection would not gain what it was started for, and never end."""
    device = await formatted(small_device(zones=16, zone_size=4 << 20))
    async with mounted(device) as volume:
        kept = []
        for number in range(12):
            ino = await put(volume, ROOT, b"f%d" % number, bytes([number]) * (320 << 10))
            await volume.fsync(ino)  # each has a run of its own
            kept.append(ino)
        for number in range(8):
            await volume.unlink(ROOT, b"f%d" % number)
        assert (await volume.reclaim.collect())["copied_bytes"] == 4 * (320 << 10)
        (index,) = set().union(*(zones_of(volume, ino) for ino in kept[8:]))
        assert volume.table[index].totals().dead == BLOCK
        for number in range(8, 12):
            assert await content(volume, kept[number]) == bytes([number]) * (320 << 10)


async def test_readers_meet_right_bytes_during_collection() -> None:
    device = await formatted(small_device(zones=32))
    async with mounted(device) as volume:
        kept = {}
        for i in range(12):
            kept[await put(volume, ROOT, b"keep-%d" % i, b"%02d" % i * 20_000)] = i
            await put(volume, ROOT, b"drop-%d" % i, b"x" * 120_000)
            await volume.syncfs()
        for i in range(12):
            await volume.unlink(ROOT, b"drop-%d" % i)
        reads = 0

        async def read() -> None:
            nonlocal reads
            while True:
                for ino, i in kept.items():
                    assert await content(volume, ino) == b"%02d" % i * 20_000
                    reads += 1
                await trio.lowlevel.checkpoint()

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await volume.collect()
                nursery.cancel_scope.cancel()
        assert reads > len(kept)
        assert volume.copier.copied > 0
        await check_quiescent(volume)


async def test_overwriting_for_ever_needs_no_more_space() -> None:
    device = await formatted(small_device(zones=16))
    rng = random.Random(6)
    with trio.fail_after(20):
        async with mounted(device) as volume:
            ino = (await volume.make(ROOT, b"f", FILE, 0, 0)).ino
            data = bytearray(1 << 20)
            await volume.write(ino, 0, data)
            for i in range(300):
                at = rng.randrange(len(data) - 20_000)
                data[at : at + 20_000] = bytes([i % 256]) * 20_000
                await volume.write(ino, at, data[at : at + 20_000])
                if i % 10 == 0:
                    await volume.fsync(ino)
            assert await content(volume, ino) == data
            assert volume.reclaim.resets > 0
            await check_quiescent(volume)


async def test_many_dead_zones_are_reset_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "BATCH", 4)
    device = await formatted(small_device(zones=160))
    async with mounted(device) as volume:
        await volume.fsync(await put(volume, ROOT, b"large", bytes(100 * (256 << 10))))
        resets: list[int] = []
        real = device.reset

        async def reset(zones: Sequence[int]) -> None:
            resets.append(len(zones))
            await real(zones)

        looked: list[Zone] = []
        may_reset = volume.table.may_reset

        def look(zone: Zone, durable: int) -> bool:
            looked.append(zone)
            return may_reset(zone, durable)

        monkeypatch.setattr(device, "reset", reset)
        monkeypatch.setattr(volume.table, "may_reset", look)
        await volume.unlink(ROOT, b"large")
        await volume.reclaim.collect()
        assert max(resets) == 4
        assert sum(resets) >= 100
        assert len(looked) < 4 * sum(resets), "not all that is dead for each batch"


async def test_a_zone_is_not_reset_before_the_delete_is_durable() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        ino = await put(volume, ROOT, b"f", b"x" * 700_000)
        await volume.fsync(ino)
        zones = zones_of(volume, ino)
        await volume.unlink(ROOT, b"f")
        assert await volume.reclaim.reset_dead() == 0
        await volume.syncfs()
        await volume.reclaim.reset_dead()
        assert all(volume.table[z].write_pointer == 0 for z in zones)


@pytest.mark.parametrize("used", [0, 100_000, 1_000_000])
async def test_what_is_promised_as_available_can_be_written(used: int) -> None:
    device = await formatted(small_device(zones=24))
    async with mounted(device) as volume:
        await put(volume, ROOT, b"used", b"u" * used)
        promised = volume.statfs().available * BLOCK
        assert promised < volume.statfs().free * BLOCK <= volume.statfs().blocks * BLOCK
        ino = (await volume.make(ROOT, b"f", FILE, 0, 0)).ino
        with trio.fail_after(10):
            for at in range(0, promised, 1 << 17):
                await volume.write(ino, at, b"x" * min(1 << 17, promised - at))
            await volume.fsync(ino)
        assert await content(volume, ino) == b"x" * promised


async def check(volume: Volume, accepted: dict[int, int]) -> None:
    for ino, length in accepted.items():
        assert await content(volume, ino) == bytes([ino % 251]) * length


async def test_a_full_device_keeps_its_bytes_and_takes_deletes() -> None:
    device = await formatted(small_device(zones=24))
    with trio.fail_after(20):
        async with mounted(device) as volume:
            accepted = await fill(volume)
            assert sum(accepted.values()) > 15 * 256 * 1024, "most of the device can be used"
            await volume.syncfs()
            await check(volume, accepted)
            first, second, third, *_ = accepted
            await volume.rename(ROOT, b"fill-2", ROOT, b"renamed")
            await volume.setattr(third, size=100)
            accepted[third] = 100
            for name, ino in ((b"fill-0", first), (b"fill-1", second)):
                await volume.unlink(ROOT, name)
                del accepted[ino]
            retried = await put(volume, ROOT, b"retry", b"r" * PIECE)
            await volume.fsync(retried)
            assert await content(volume, retried) == b"r" * PIECE
            await check(volume, accepted)
            assert volume.stream.write_errors == 0
            await check_quiescent(volume)
        async with mounted(device) as volume:
            await check(volume, accepted)


@pytest.mark.parametrize("seed", range(6))
async def test_many_kinds_on_few_active_zones_neither_hang_nor_lose(seed: int) -> None:
    """Six writers of five kinds, three data slots, collection in between."""
    device = await formatted(small_device(zones=24, max_active=6, max_open=4))
    kinds = {
        b"ck": (b"keep_last", b"2"),
        b"an": (b"anchor", b"1"),
        b"ca": (b"class", b"cache"),
        b"sc": (b"class", b"scratch"),
        b"ou": (b"class", b"output"),
    }
    async with mounted(device) as volume:
        directories = []
        for name, (attribute, value) in kinds.items():
            made = await volume.make(ROOT, name, 0o040755, 0, 0)
            await volume.setxattr(made.ino, b"user.retainz." + attribute, value)
            directories.append(made.ino)

        async def writer(number: int) -> None:
            rng = random.Random(seed * 100 + number)
            for _ in range(25):
                directory = rng.choice(directories)
                name = b"step-%d.pt" % rng.randrange(12)
                choice = rng.random()
                try:
                    if choice < 0.65:
                        await save(volume, directory, name, rng)
                    elif choice < 0.9:
                        await volume.unlink(directory, name)
                    else:
                        await volume.collect()
                except NoSpace:
                    continue
                except FSError as error:
                    if error.errno != errno.ENOENT:
                        raise

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(writer, number)
        assert volume.stream.write_errors == 0
        await check_quiescent(volume)


async def save(volume: Volume, directory: int, name: bytes, rng: random.Random) -> None:
    try:
        ino = volume.lookup(directory, name).ino
    except FSError:
        ino = (await volume.make(directory, name, FILE, 0, 0)).ino
    volume.open(ino)
    try:
        for _ in range(rng.randrange(1, 8)):
            data = b"x" * rng.choice([10, 5000, 70_000, 200_000])
            await volume.write(ino, rng.randrange(300_000), data)
        await volume.flush(ino)
    finally:
        volume.close(ino)


async def test_overwriting_in_place_goes_on_for_ever() -> None:
    """Copies of copies: zones that collection filled are collected like all others."""
    rng = random.Random(5)
    device = await formatted(small_device(zones=24))
    async with mounted(device) as volume:
        data = bytearray(rng.randbytes(2_600_000))  # half of the device
        ino = await put(volume, ROOT, b"map", bytes(data))
        for round_ in range(1500):
            at = rng.randrange(len(data) - 20_000)
            new = rng.randbytes(rng.choice([100, 4096, 20_000]))
            data[at : at + len(new)] = new
            await volume.write(ino, at, new)
            if round_ % 5 == 0:
                await volume.fsync(ino)
        assert volume.reclaim.collections > 20, "there was nothing to collect"
        assert await content(volume, ino) == bytes(data)
        await check_quiescent(volume)
