"""Space: what a full device still does, and what copying keeps."""

from __future__ import annotations

import random

import pytest
import trio

from retainzfs.errors import NoSpace
from retainzfs.layout import BLOCK
from retainzfs.volume import ROOT, Volume
from tests.helpers import FILE, content, formatted, mounted, put, small_device, zones_of

pytestmark = pytest.mark.volume

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
        kept: dict[int, bytes] = {}
        for i in range(20):
            data = rng.randbytes(30_000)
            kept[await put(volume, ROOT, b"keep-%d" % i, data)] = data
            await put(volume, ROOT, b"drop-%d" % i, rng.randbytes(120_000))
            await volume.syncfs()
        for i in range(20):
            await volume.unlink(ROOT, b"drop-%d" % i)
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
        assert volume.reclaim.copied > 0


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
