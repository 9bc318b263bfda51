"""What an operation may find changed when it has awaited, one case at a time.

Most tests hold the lock of an inode, let an operation run into it, and change the world meanwhile.
"""

from __future__ import annotations

import errno
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from retainzfs.device import Sums
from retainzfs.device.memory import MemoryDevice
from retainzfs.errors import DeviceError, FSError
from retainzfs.layout import BLOCK
from retainzfs.volume import ROOT, Volume
from retainzfs.zone import Kind
from tests.helpers import (
    DIRECTORY,
    FILE,
    content,
    formatted,
    mounted,
    put,
    small_device,
    tree,
    until_power_cut,
    zones_of,
)
from tests.quiescence import check_quiescent

pytestmark = pytest.mark.volume


@asynccontextmanager
async def held(volume: Volume, ino: int) -> AsyncIterator[None]:
    async with volume.stream.stage(volume.inode(ino)).lock:
        yield


@pytest.mark.parametrize("operation", ["write", "grow", "shrink"])
async def test_the_last_name_goes_while_a_file_is_being_changed(operation: str) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        ino = await put(volume, ROOT, b"f", b"x" * 50_001)
        await volume.fsync(ino)

        async def change() -> None:
            if operation == "write":
                await volume.write(ino, 20_000, b"y" * 100_000)
                return
            with pytest.raises(FSError, match=f"inode {ino}") as caught:
                await volume.setattr(ino, size=70_000 if operation == "grow" else 100)
            assert caught.value.errno == errno.ENOENT

        async with trio.open_nursery() as nursery, held(volume, ino):
            nursery.start_soon(change)
            await trio.testing.wait_all_tasks_blocked()
            await volume.unlink(ROOT, b"f")
        assert ino not in volume.namespace.inodes, "the file came back, or was never freed"
        await check_quiescent(volume)
    async with mounted(device) as volume:
        assert await tree(volume) == {}


async def test_a_rename_that_meets_its_own_file_removes_no_name() -> None:
    """The target became a hard link of the source while the source was drained."""
    async with mounted(await formatted(small_device())) as volume:
        await volume.setxattr(ROOT, b"user.retainz.class", b"output")
        ino = (await volume.make(ROOT, b"a", FILE, 0, 0)).ino
        await volume.write(ino, 0, b"x" * 10_000)
        async with trio.open_nursery() as nursery, held(volume, ino):
            nursery.start_soon(volume.rename, ROOT, b"a", ROOT, b"b")
            await trio.testing.wait_all_tasks_blocked()
            await volume.link(ino, ROOT, b"b")
        assert dict(volume.entries(ROOT)) == {b"a": ino, b"b": ino}
        assert volume.inode(ino).nlink == 2


async def test_nothing_moves_into_a_directory_that_was_removed() -> None:
    async with mounted(await formatted(small_device())) as volume:
        directory = (await volume.make(ROOT, b"d", DIRECTORY, 0, 0)).ino
        ino = await put(volume, ROOT, b"f", b"x" * 5000)
        volume.open(directory)
        await volume.rmdir(ROOT, b"d")
        with pytest.raises(FSError, match="was removed") as caught:
            await volume.rename(ROOT, b"f", directory, b"f")
        assert caught.value.errno == errno.ENOENT
        assert dict(volume.entries(ROOT)) == {b"f": ino}
        volume.close(directory)
        await check_quiescent(volume)


async def test_reaping_spares_what_took_a_name_meanwhile() -> None:
    """While the kernel is told of one deleted generation, a program makes the next one anew."""
    async with mounted(await formatted(small_device())) as volume:
        run = (await volume.make(ROOT, b"run", DIRECTORY, 0, 0)).ino
        await volume.setxattr(run, b"user.retainz.keep_last", b"1")
        for name in (b"step-1.bin", b"step-2.bin"):
            await put(volume, run, name, b"old" * 3000)
        await volume.setxattr(run, b"user.retainz.reap", b"1")
        reaped = 0

        async def told() -> None:
            nonlocal reaped
            reaped += 1
            if reaped == 1:
                left = {name for name, _ in volume.entries(run)}
                (other,) = {b"step-1.bin", b"step-2.bin"} & left
                await volume.unlink(run, other)
                made = await volume.make(run, other, FILE, 0, 0)
                await volume.write(made.ino, 0, b"new" * 3000)

        volume.reaped = told  # type: ignore[method-assign]
        await put(volume, run, b"step-3.bin", b"three" * 3000)
        with trio.fail_after(5):
            while not reaped:
                await volume.syncfs()
        await trio.testing.wait_all_tasks_blocked()
        assert reaped == 1
        assert b"new" * 3000 in (await tree(volume, run)).values(), "a new file was reaped"


async def test_a_file_that_changes_while_it_is_judged_is_not_complete() -> None:
    async with mounted(await formatted(small_device())) as volume:
        run = (await volume.make(ROOT, b"run", DIRECTORY, 0, 0)).ino
        await volume.setxattr(run, b"user.retainz.keep_last", b"1")
        ino = (await volume.make(run, b"step-1.bin", FILE, 0, 0)).ino
        volume.open(ino)
        await volume.write(ino, 0, b"x" * 9000)
        read, reads = volume.reader.read, 0

        async def slow(*arguments: object) -> memoryview:
            nonlocal reads
            reads += 1
            if reads == 1:
                await volume.write(ino, 9000, b"more")
            return await read(*arguments)  # type: ignore[arg-type]

        volume.reader.read = slow  # type: ignore[assignment]
        await volume.flush(ino)
        assert reads, "the file was not judged"
        assert volume.getxattr(ino, b"user.retainz.state") == b"writing"
        await volume.flush(ino)
        assert volume.getxattr(ino, b"user.retainz.state") == b"complete"


async def test_a_file_is_judged_by_the_name_that_it_has_in_the_end() -> None:
    async with mounted(await formatted(small_device())) as volume:
        run = (await volume.make(ROOT, b"run", DIRECTORY, 0, 0)).ino
        await volume.setxattr(run, b"user.retainz.keep_last", b"1")
        ino = (await volume.make(run, b"step-1.bin", FILE, 0, 0)).ino
        await volume.write(ino, 0, b"x" * 9000)
        read, reads = volume.reader.read, 0

        async def slow(*arguments: object) -> memoryview:
            nonlocal reads
            reads += 1
            if reads == 1:
                await volume.rename(run, b"step-1.bin", run, b"step-2.bin")
            return await read(*arguments)  # type: ignore[arg-type]

        volume.reader.read = slow  # type: ignore[assignment]
        await volume.flush(ino)
        assert {row["number"]: row["state"] for row in volume.generations(run)} == {2: "complete"}


async def test_pages_that_are_read_during_a_write_count_as_stale() -> None:
    """A reader that opens in the middle of a write must not keep what it caches then."""
    async with mounted(await formatted(small_device())) as volume:
        ino = await put(volume, ROOT, b"f", b"x" * 9000)
        stage, during = volume.stream.write, -1

        async def slow(*arguments: object) -> None:
            nonlocal during
            during = volume.inode(ino).writes
            await stage(*arguments)  # type: ignore[arg-type]

        volume.stream.write = slow  # type: ignore[assignment]
        await volume.write(ino, 0, b"y" * 9000)
        assert volume.inode(ino).writes != during


class NoCopies(MemoryDevice):
    """Refuses every append to a zone of collection."""

    volume: Volume | None = None

    def append(
        self, zone: int, offset: int, data: memoryview, header: bytes = b""
    ) -> Awaitable[Sums]:
        if self.volume is not None and self.volume.table[zone].kind is Kind.COLLECTION:
            raise DeviceError(self.name, f"write to zone {zone}", "Input/output error")
        return super().append(zone, offset, data, header)


async def test_a_write_survives_the_copy_that_it_landed_on() -> None:
    """Collection's copy of a block is given up; what was written to it since is not."""
    device = await formatted(NoCopies(small_device().geometry))
    async with mounted(device) as volume:
        expected = bytearray(b"x" * 100_000)
        ino = await put(volume, ROOT, b"f", bytes(expected))
        await volume.fsync(ino)
        device.volume = volume
        (index,) = zones_of(volume, ino)
        await volume.copier.move(volume.table[index], volume.copier.apart())
        expected[5000:5100] = b"y" * 100
        await volume.write(ino, 5000, bytes(expected[5000:5100]))
        assert await content(volume, ino) == expected
        await volume.fsync(ino)
        assert volume.stream.write_errors, "no copy failed"
        assert await content(volume, ino) == expected
        device.volume = None


async def test_a_generation_counts_as_complete_only_behind_its_bytes() -> None:
    device = small_device()
    await formatted(device)
    with until_power_cut():
        async with mounted(device, commit=3600.0) as volume:
            run = (await volume.make(ROOT, b"run", DIRECTORY, 0, 0)).ino
            await volume.setxattr(run, b"user.retainz.keep_last", b"1")
            ino = await put(volume, run, b"step-1.bin", b"x" * 50_000)
            assert volume.getxattr(ino, b"user.retainz.state") == b"complete"
            await volume.committer.commit()
            device.cut_at = 0
            await volume.syncfs()
    survivor = device.after_cut(random.Random(1))
    await survivor.start()
    async with mounted(survivor) as volume:
        assert volume.getxattr(ino, b"user.retainz.state") == b"complete"
        assert await content(volume, ino) == b"x" * 50_000


async def test_a_lane_does_not_follow_its_zone_to_another_kind() -> None:
    """Its zone died, was reset, and is filled by another class of data now."""
    async with mounted(await formatted(small_device())) as volume:
        cache = (await volume.make(ROOT, b"cache", DIRECTORY, 0, 0)).ino
        await volume.setxattr(cache, b"user.retainz.class", b"cache")
        first = await put(volume, ROOT, b"first", b"x" * 10_000)
        await volume.fsync(first)
        zones = zones_of(volume, first)
        await volume.unlink(ROOT, b"first")
        await volume.syncfs()
        await volume.reclaim.reset_dead()
        other = await put(volume, cache, b"other", b"x" * 10_000)
        await volume.fsync(other)
        assert zones_of(volume, other) == zones, "the zone was not used again"
        second = await put(volume, ROOT, b"second", b"x" * 10_000)
        await volume.fsync(second)
        assert zones_of(volume, second).isdisjoint(zones)


async def test_a_file_that_lost_bytes_does_not_grow() -> None:
    device = await formatted(NoCopies(small_device().geometry))
    async with mounted(device) as volume:
        ino = await put(volume, ROOT, b"f", b"x" * 5000)
        await volume.fsync(ino)
        volume.inode(ino).error = DeviceError("mem", "write", "Input/output error")
        with pytest.raises(DeviceError):
            await volume.setattr(ino, size=BLOCK * 10)
        await volume.setattr(ino, size=0)
        await volume.setattr(ino, size=BLOCK * 10)


class SlowToRead(MemoryDevice):
    """`read` waits for the gate."""

    gate: trio.Event | None = None

    async def read(self, zone: int, offset: int, length: int, sums: bytes = b"") -> memoryview:
        if self.gate is not None:
            await self.gate.wait()
        return await super().read(zone, offset, length, sums)


async def test_a_full_device_waits_for_who_reads_what_was_deleted() -> None:
    device = await formatted(SlowToRead(small_device(zones=16).geometry))
    async with mounted(device) as volume:
        ino = await put(volume, ROOT, b"old", b"x" * 800_000)
        await volume.fsync(ino)
        free = volume.statfs().available * BLOCK
        await put(volume, ROOT, b"fill", b"f" * (free - 100_000))
        await volume.syncfs()
        new = (await volume.make(ROOT, b"new", FILE, 0, 0)).ino
        device.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(volume.read, ino, 0, 800_000)
            await trio.testing.wait_all_tasks_blocked()
            await volume.unlink(ROOT, b"old")
            nursery.start_soon(volume.write, new, 0, b"y" * 600_000)
            await trio.testing.wait_all_tasks_blocked()
            assert volume.inode(new).size == 0, "there was room after all"
            device.gate.set()
        assert await content(volume, new) == b"y" * 600_000
        await check_quiescent(volume)


class SlowToClose(MemoryDevice):
    """`close_zone` waits for the gate."""

    gate: trio.Event | None = None

    async def close_zone(self, zone: int) -> None:
        if self.gate is not None:
            await self.gate.wait()
        await super().close_zone(zone)


async def test_a_zone_is_not_finished_while_it_is_being_closed() -> None:
    device = await formatted(SlowToClose(small_device(max_open=3).geometry))
    async with mounted(device) as volume:
        cache = (await volume.make(ROOT, b"cache", DIRECTORY, 0, 0)).ino
        await volume.setxattr(cache, b"user.retainz.class", b"cache")
        first = await put(volume, ROOT, b"first", b"x" * 10_000)
        await volume.fsync(first)
        (index,) = zones_of(volume, first)
        other = await put(volume, cache, b"other", b"x" * 10_000)
        device.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(volume.fsync, other)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(volume.lanes.finish, volume.table[index])
            await trio.testing.wait_all_tasks_blocked()
            device.gate.set()
        assert volume.stream.write_errors == 0
        assert volume.table[index].tail == 0
