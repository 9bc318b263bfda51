"""Rounds: who shares a flush, what goes out in which order, and what a failure leaves."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from retainzfs.device.memory import MemoryDevice
from retainzfs.errors import ReadOnly, RetainzError
from retainzfs.layout import SizeRecord
from retainzfs.volume import ROOT, Volume
from tests.helpers import (
    DIRECTORY,
    FILE,
    Clock,
    content,
    formatted,
    mounted,
    put,
    small_device,
    until_power_cut,
)

pytestmark = [pytest.mark.volume, pytest.mark.power_cuts(5)]


async def test_fsyncs_at_one_time_share_their_flushes() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        files = [(await volume.make(ROOT, b"f%d" % i, FILE, 0, 0)).ino for i in range(20)]
        await volume.syncfs()
        for ino in files:
            await volume.write(ino, 0, b"x" * 5000)
        before = device.statistics()["flushes"]
        async with trio.open_nursery() as nursery:
            for ino in files:
                nursery.start_soon(volume.fsync, ino)
        # One of the data and one of the log a round; a round may be under way when they come.
        assert device.statistics()["flushes"] - before <= 4
        before = device.statistics()["flushes"]
        for ino in files:
            await volume.fsync(ino)
        assert device.statistics()["flushes"] == before, "a clean inode costs a flush"


async def test_bytes_of_a_renamed_file_go_out_before_its_name() -> None:
    """The usual way to replace a file, without any fsync: a crash shows the old or the new."""
    for cut in range(1, 12):
        device = small_device()
        await formatted(device)
        with until_power_cut():
            async with mounted(device) as volume:
                old = await put(volume, ROOT, b"name", b"old" * 3000)
                await volume.fsync(old)
                await put(volume, ROOT, b"temp", b"new" * 3000)
                device.cut_at = device.operations + cut
                await volume.rename(ROOT, b"temp", ROOT, b"name")
                while True:
                    await volume.syncfs()
                    await put(volume, ROOT, b"more-%d" % device.operations, b"x" * 5000)
        survivor = device.after_cut(random.Random(cut))
        await survivor.start()
        async with mounted(survivor) as volume:
            found = await content(volume, volume.lookup(ROOT, b"name").ino)
            assert found in (b"old" * 3000, b"new" * 3000)


async def test_a_generation_is_not_durably_complete_before_its_bytes() -> None:
    """A round is under way when its file is closed, and takes along what was queued meanwhile."""
    device = await formatted(small_device())
    data = b"whole" * 3000
    async with mounted(device) as volume:
        other = await volume.make(ROOT, b"other", FILE, 0, 0)
        save = await volume.make(ROOT, b"step-1.bin", FILE, 0, 0)
        volume.open(save.ino)
        await volume.write(other.ino, 0, b"x" * 5000)
        await volume.write(save.ino, 0, data)
        held = device.hold("append")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(volume.fsync, other.ino)
            await held.reached.wait()
            nursery.start_soon(volume.flush, save.ino)
            await trio.testing.wait_all_tasks_blocked()
            assert volume.generations(ROOT)[0]["state"] == "complete"
            after = volume.committer.durable_round + 1
            held.go.set()
            while volume.committer.durable_round < after:
                await trio.lowlevel.checkpoint()
            survivor = device.after_cut(random.Random(1))
    await survivor.start()
    async with mounted(survivor) as volume:
        if volume.generations(ROOT)[0]["state"] == "complete":
            assert await content(volume, save.ino) == data


async def test_a_marker_waits_for_the_bytes_of_its_generation() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        save = await volume.make(ROOT, b"step-1", DIRECTORY, 0, 0)
        shard = await volume.make(save.ino, b"__0_0.distcp", FILE, 0, 0)
        await volume.write(shard.ino, 0, b"shard" * 3000)
        await put(volume, save.ino, b".metadata", b"marker" * 100)
        survivor = device.after_cut(random.Random(1))
    await survivor.start()
    async with mounted(survivor) as volume:
        assert volume.generations(ROOT)[0]["state"] == "complete"
        assert await content(volume, shard.ino) == b"shard" * 3000


async def test_what_nobody_syncs_is_durable_after_a_while(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Synchronous(Clock):
        def monotonic_s(self) -> float:
            return trio.current_time()

    device = small_device()
    await formatted(device)
    with until_power_cut():
        async with mounted(device, clock=Synchronous()) as volume:
            await put(volume, ROOT, b"f", b"x" * 10_000)
            await trio.sleep(1.5)
            assert volume.committer.dirty, "data wait longer than names"
            await trio.sleep(6)
            assert not volume.committer.dirty
            device.cut_at = device.operations + 1
            await volume.make(ROOT, b"g", FILE, 0, 0)
            await volume.syncfs()
    survivor = device.after_cut(random.Random(0))
    await survivor.start()
    async with mounted(survivor) as volume:
        assert await content(volume, volume.lookup(ROOT, b"f").ino) == b"x" * 10_000


async def test_a_failed_flush_is_final() -> None:
    device = await formatted(small_device())
    with trio.fail_after(10):
        async with mounted(device) as volume:
            ino = await put(volume, ROOT, b"f", b"x" * 50_000)
            device.fail("flush")
            with pytest.raises(RetainzError):
                await volume.fsync(ino)
            device.faults.clear()
            with pytest.raises(ReadOnly):
                await volume.fsync(ino)
            with pytest.raises(ReadOnly):
                await volume.write(ino, 0, b"x")
            with pytest.raises(ReadOnly):
                await volume.unlink(ROOT, b"f")
            await volume.failure_event.wait()
            assert await content(volume, ino) == b"x" * 50_000
            assert volume.statistics()["failed"] is not None


async def test_an_unexpected_exception_acknowledges_nothing() -> None:
    device = await formatted(small_device())
    acknowledged = False

    async def fail() -> None:
        raise ZeroDivisionError

    async def sync() -> None:
        nonlocal acknowledged
        async with mounted(device) as volume:
            ino = await put(volume, ROOT, b"f", b"x" * 50_000)
            device.flush = fail  # type: ignore[method-assign]
            await volume.fsync(ino)
            acknowledged = True

    with pytest.raises(BaseExceptionGroup) as caught:
        await sync()
    assert caught.value.split(ZeroDivisionError)[1] is None
    assert not acknowledged


async def test_a_record_of_an_unknown_inode_is_refused() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        with pytest.raises(ValueError, match="does not exist"):
            volume.committer.log(SizeRecord(999, 1))


async def test_who_commits_while_the_log_ends_is_told(nursery: trio.Nursery) -> None:
    """Neither hangs nor takes an answer for durable that is none."""
    outcomes: list[str] = []
    device = await formatted(small_device())

    async def late(volume: Volume) -> None:
        try:
            await volume.committer.commit()
            outcomes.append("durable")
        except ReadOnly:
            outcomes.append("refused")

    class Ending(MemoryDevice):
        """Somebody commits at each flush, the very last one included."""

        volume: Volume | None = None

        async def flush(self) -> None:
            if self.volume is not None:
                nursery.start_soon(late, self.volume)
                await trio.testing.wait_all_tasks_blocked()
            await super().flush()

    ending = Ending(device.geometry)
    ending.rules, ending._zones = device.rules, device._zones
    with trio.fail_after(10):
        async with mounted(ending) as volume:
            await put(volume, ROOT, b"f", b"x" * 10_000)
            ending.volume = volume
        await trio.testing.wait_all_tasks_blocked()
    assert outcomes[-1] == "refused"
    assert set(outcomes) <= {"durable", "refused"}
