"""Bytes through the staging memory to the device and back."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from retainzfs.errors import RetainzError
from retainzfs.layout import BLOCK, INLINE_DATA_MAX
from retainzfs.stream import SHARED_MAX, SLOT
from retainzfs.volume import ROOT, FSError, Volume
from tests.helpers import (
    FILE,
    content,
    formatted,
    mounted,
    put,
    small_device,
    zones_of,
)

pytestmark = [pytest.mark.volume, pytest.mark.power_cuts(5)]

EDGES = sorted(
    {
        max(0, bound + near)
        for bound in (0, INLINE_DATA_MAX, BLOCK, 2 * BLOCK, 17 * BLOCK, SHARED_MAX)
        for near in (-1, 0, 1)
    }
)
OPERATION = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(EDGES), st.sampled_from(EDGES[1:])),
    st.tuples(st.just("write"), st.integers(0, 3 * BLOCK), st.integers(1, 3 * BLOCK)),
    st.tuples(st.just("size"), st.sampled_from(EDGES), st.just(0)),
    st.tuples(st.just("fsync"), st.just(0), st.just(0)),
)


async def new(volume: Volume, name: bytes) -> int:
    ino = (await volume.make(ROOT, name, FILE, 0, 0)).ino
    volume.open(ino)
    return ino


def apply(model: bytearray, offset: int, data: bytes) -> None:
    if data:
        model += bytes(max(0, offset - len(model)))
        model[offset : offset + len(data)] = data


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATION, min_size=1, max_size=8), st.integers(0, 2**32))
def test_writes_anywhere_read_back(operations: list[tuple[str, int, int]], seed: int) -> None:
    rng = random.Random(seed)

    async def check() -> None:
        device = await formatted(small_device())
        model = bytearray()
        async with mounted(device) as volume:
            ino = await new(volume, b"f")
            for name, at, length in operations:
                if name == "write":
                    data = rng.randbytes(length)
                    await volume.write(ino, at, data)
                    apply(model, at, data)
                elif name == "size":
                    await volume.setattr(ino, size=at)
                    model[at:] = bytes(max(0, at - len(model)))
                else:
                    await volume.fsync(ino)
                assert await content(volume, ino) == model
                low = rng.randrange(len(model) + 1)
                assert bytes(await volume.read(ino, low, 5000)) == model[low : low + 5000]
            volume.close(ino)
        async with mounted(device) as volume:
            assert await content(volume, volume.lookup(ROOT, b"f").ino) == model

    trio.run(check)


async def test_more_writers_than_staging_memory() -> None:
    device = await formatted(small_device(zones=96, zone_size=1 << 20))
    piece = SHARED_MAX // 2 + 1
    async with mounted(device, pool=4 * SLOT) as volume:
        files = [await new(volume, b"f%d" % i) for i in range(12)]

        async def write(ino: int) -> None:
            for i in range(12):
                await volume.write(ino, i * piece, bytes([ino]) * piece)

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for ino in files:
                    nursery.start_soon(write, ino)
            await volume.syncfs()
        for ino in files:
            assert await content(volume, ino) == bytes([ino]) * (12 * piece)


async def test_generations_written_at_once_keep_the_device_limits() -> None:
    device = await formatted(small_device(zones=64, max_active=6, max_open=4))
    async with mounted(device) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"3")
        names = [b"step-%d.pt" % i for i in range(8)] + [b"log", b"other"]
        files = [await new(volume, name) for name in names]

        async def write(ino: int) -> None:
            for i in range(10):
                await volume.write(ino, i * 40_000, bytes([ino, i]) * 20_000)
                await volume.fsync(ino)

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for ino in files:
                    nursery.start_soon(write, ino)
        assert volume.stream.write_errors == 0, "the device refused a write"
        for ino in files:
            expected = b"".join(bytes([ino, i]) * 20_000 for i in range(10))
            assert await content(volume, ino) == expected


async def test_a_failed_write_goes_elsewhere() -> None:
    device = await formatted(small_device())
    data = random.Random(1).randbytes(300_000)
    async with mounted(device) as volume:
        device.fail("append", zones={4})
        ino = await put(volume, ROOT, b"f", data)
        await volume.fsync(ino)
        assert volume.stream.write_errors > 0
        assert 4 not in zones_of(volume, ino)
        assert await content(volume, ino) == data
    async with mounted(device) as volume:
        assert await content(volume, volume.lookup(ROOT, b"f").ino) == data


async def test_a_write_that_fails_everywhere_is_reported_until_truncated() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        good = await put(volume, ROOT, b"good", b"g" * 20_000)
        await volume.fsync(good)
        device.fail("append", zones=range(4, 48))
        bad = await new(volume, b"bad")
        await volume.write(bad, 0, b"b" * 20_000)
        for _ in range(2):
            with pytest.raises(RetainzError):
                await volume.fsync(bad)
            with pytest.raises(RetainzError):
                await volume.flush(bad)
        with pytest.raises(FSError, match="could not be written"):
            await volume.read(bad, 0, 10)
        assert await content(volume, good) == b"g" * 20_000
        device.faults.clear()
        await volume.setattr(bad, size=0)
        await volume.write(bad, 0, b"again" * 1000)
        await volume.fsync(bad)
        volume.close(bad)
    async with mounted(device) as volume:
        assert await content(volume, volume.lookup(ROOT, b"bad").ino) == b"again" * 1000


@pytest.mark.parametrize("blocks", [10, 50])
async def test_damage_is_an_error_of_its_range_only(blocks: int) -> None:
    device = await formatted(small_device())
    data = random.Random(2).randbytes(blocks * BLOCK)
    async with mounted(device) as volume:
        ino = await put(volume, ROOT, b"f", data)
        await volume.fsync(ino)
        extent = volume.inode(ino).extents[0]
        device.damage(extent.run.zone, (extent.run.start + 7) * BLOCK + 5)
        with pytest.raises(FSError) as caught:
            await volume.read(ino, 7 * BLOCK, 10)
        assert caught.value.errno == 5
        assert volume.statistics()["checksum_errors"] == 1
        before = bytes(await volume.read(ino, 0, 7 * BLOCK))
        after = bytes(await volume.read(ino, 8 * BLOCK, len(data)))
        assert (before, after) == (data[: 7 * BLOCK], data[8 * BLOCK :])
        # An overwrite of the whole block needs none of the damaged bytes.
        await volume.write(ino, 7 * BLOCK, b"n" * BLOCK)
        await volume.fsync(ino)
        assert bytes(await volume.read(ino, 7 * BLOCK, BLOCK)) == b"n" * BLOCK


async def test_staged_bytes_are_read_while_they_are_written() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        ino = await new(volume, b"f")
        await volume.write(ino, 0, b"a" * 50_000)
        held = device.hold("append")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(volume.fsync, ino)
            await held.reached.wait()
            assert await content(volume, ino) == b"a" * 50_000
            held.go.set()
        assert await content(volume, ino) == b"a" * 50_000


async def test_sequential_writes_become_long_extents() -> None:
    device = await formatted(small_device(zone_size=1 << 20))
    async with mounted(device) as volume:
        ino = await put(volume, ROOT, b"f", b"x" * (8 << 20), piece=100_001)
        await volume.fsync(ino)
        extents = volume.inode(ino).extents
        assert len(extents) <= 8 + 4, "about one a zone"
        assert all(a.end == b.block for a, b in pairwise(extents))


async def test_a_run_that_lost_all_its_blocks_is_not_written_to_again() -> None:
    """Truncated to nothing, pushed out for its memory, then written again."""
    device = await formatted(small_device(zones=128))
    async with mounted(device, pool=4 * 1016 * 4096) as volume:
        first = (await volume.make(ROOT, b"first", FILE, 0, 0)).ino
        await volume.write(first, 0, b"a" * 400_000)
        await volume.setattr(first, size=0)
        for number in range(6):
            other = (await volume.make(ROOT, b"other%d" % number, FILE, 0, 0)).ino
            await volume.write(other, 0, b"b" * 400_000)
        await volume.write(first, 0, b"c" * 400_000)
        assert await content(volume, first) == b"c" * 400_000
