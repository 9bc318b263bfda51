"""A device that fails: bytes go elsewhere, zones are given up, a mount stops in order."""

from __future__ import annotations

import errno
import random
from contextlib import suppress

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from retainzfs import trouble
from retainzfs.device import Condition
from retainzfs.errors import (
    DeviceError,
    DeviceFails,
    DeviceGone,
    FSError,
    RetainzError,
)
from retainzfs.layout import BLOCK
from retainzfs.volume import ROOT, Volume
from retainzfs.zone import State
from tests.helpers import (
    FILE,
    Clock,
    check_after_remount,
    content,
    formatted,
    mounted,
    noise,
    options,
    put,
    slow,
    small_device,
    synced,
    zones_of,
)
from tests.simulation import deterministic

pytestmark = [pytest.mark.volume, pytest.mark.power_cuts(3)]

ZONE = 256 << 10
NEVER = 10.0  # seconds; what takes longer hangs


# Writes


@pytest.mark.parametrize("landed", [0, BLOCK, 20 * BLOCK, 21 * BLOCK])
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_failed_append_moves_on_and_leaves_what_was_there(landed: int, seed: int) -> None:
    """20 blocks and a trailer, which get there to some extent."""
    device = await formatted(slow(seed))
    files = {b"before": noise(60_000), b"f": noise(20 * BLOCK, 2)}
    async with mounted(device) as volume:
        before = await synced(volume, b"before", files[b"before"])
        (zone,) = zones_of(volume, before)
        pointer = volume.table[zone].write_pointer
        device.fail("append", zones={zone}, times=1, landed=landed)
        ino = await synced(volume, b"f", files[b"f"])
        assert zones_of(volume, before) == {zone}
        assert zone not in zones_of(volume, ino)
        assert volume.statistics()["write_errors"] == 1
        await wait_all_tasks_blocked()
        assert volume.table[zone].state is State.FULL
        assert volume.table[zone].write_pointer == pointer + landed
        for name, data in files.items():
            assert await content(volume, volume.lookup(ROOT, name).ino) == data
    await check_after_remount(device, files)


@pytest.mark.parametrize("seed", range(8))
def test_errors_here_and_there_lose_nothing(seed: int) -> None:
    deterministic(seed, errors_here_and_there, seed)


async def errors_here_and_there(seed: int) -> None:
    """Several writers at once, appends queued behind others, every kind of error, collection."""
    rng = random.Random(seed)
    device = await formatted(slow(seed))
    clock = Clock()
    files: dict[bytes, bytes] = {}

    def disturb() -> None:
        """Let one operation fail, long after the one before."""
        clock.time_s += trouble.WINDOW_S
        kind = rng.choice(("append", "append", "append", "finish", "reset", "close"))
        landed = rng.randrange(1 << 17) if kind == "append" else rng.randrange(2)
        device.faults.clear()
        zones = range(4, 48)  # not the journal's
        if rng.random() < 0.2:
            device.turn(rng.choice(zones), Condition.READ_ONLY)
        device.fail(kind, zones=zones, times=1, landed=landed).after = rng.randrange(2)

    async def write(volume: Volume, number: int) -> None:
        for step in range(12):
            name = b"step-%d.pt" % (number * 4 + rng.randrange(4))
            if rng.random() < 0.5:
                disturb()
            if name in files:
                await volume.unlink(ROOT, name)
            files[name] = data = rng.randbytes(rng.choice((5000, 30_000, 100_000, 400_000)))
            await synced(volume, name, data)
            if step % 6 == 5:
                await volume.collect()

    with trio.fail_after(2 * NEVER):
        async with mounted(device, options(clock)) as volume:
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(write, volume, number)
            assert volume.failed is None
            device.faults.clear()
            for name, data in files.items():
                assert await content(volume, volume.lookup(ROOT, name).ino) == data
    await check_after_remount(device, files)


async def test_appends_behind_a_failed_one_all_go_elsewhere() -> None:
    device = await formatted(small_device())
    data = noise(300_000)
    async with mounted(device) as volume:
        volume.device.delay = lambda: 3  # type: ignore[attr-defined]
        await synced(volume, b"before", b"b" * 20_000)
        device.fail("append", zones={4}, times=1)
        names = [b"f%d" % number for number in range(5)]
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(synced, volume, name, data)
        for name in names:
            ino = volume.lookup(ROOT, name).ino
            assert await content(volume, ino) == data
            assert 4 not in zones_of(volume, ino)
        assert device.statistics()["finishes"] > 0


async def test_a_zone_that_goes_on_failing_is_retired_until_the_next_mount() -> None:
    device = await formatted(small_device())
    data = noise(100_000)
    async with mounted(device) as volume:
        fault = device.fail("append", zones={4})
        for number in range(6):
            await synced(volume, b"f%d" % number, data)
            await volume.syncfs()
        assert volume.table[4].state is State.READ_ONLY
        assert volume.statistics()["zones"]["read_only"] == 1
        assert volume.zone_map()[4]["condition"] == "read_only"
        assert volume.table.totals.lost == ZONE
        assert volume.stream.write_errors == 2, "it costs no more"
        assert volume.failed is None
    device.faults.remove(fault)
    async with mounted(device) as volume:
        await volume.reclaim.reset_dead()
        assert volume.table.totals.lost == 0


async def test_a_zone_that_cannot_be_closed_is_not_blamed_on_another() -> None:
    device = await formatted(small_device(max_open=4))  # two for data
    async with mounted(device) as volume:
        device.fail("close", times=1)
        for number, name in enumerate((b"cache", b"scratch", b"output", b"checkpoint")):
            made = await volume.make(ROOT, name, 0o040755, 0, 0)
            await volume.setxattr(made.ino, b"user.retainz.class", name)
            data = noise(20_000, number)
            ino = await put(volume, made.ino, b"f", data)
            await volume.fsync(ino)
            assert await content(volume, ino) == data
        assert volume.stream.write_errors == 0
        assert not device.faults[0].times, "there was nothing to close"


async def test_an_append_that_cannot_begin_goes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    device = await formatted(small_device())
    refusals = iter([DeviceError("mem", "zone 4", "not ready")])

    async def ready(zone: int) -> None:
        for refusal in refusals:
            raise refusal

    async with mounted(device) as volume:
        monkeypatch.setattr(device, "ready", ready)
        async with trio.open_nursery() as nursery:  # two lanes, one zone
            for name in (b"step-1.pt", b"step-2.pt"):
                nursery.start_soon(synced, volume, name, noise(20_000))
        assert volume.stream.write_errors >= 1
        for name in (b"step-1.pt", b"step-2.pt"):
            assert await content(volume, volume.lookup(ROOT, name).ino) == noise(20_000)


async def test_collection_survives_a_failed_copy() -> None:
    device = await formatted(slow(3, zones=32))
    files: dict[bytes, bytes] = {}
    async with mounted(device) as volume:
        for number in range(12):
            files[b"keep-%d" % number] = noise(30_000, number)
            await put(volume, ROOT, b"keep-%d" % number, files[b"keep-%d" % number])
            await put(volume, ROOT, b"drop-%d" % number, noise(120_000))
            await volume.syncfs()
        for number in range(12):
            await volume.unlink(ROOT, b"drop-%d" % number)
        await volume.syncfs()
        device.fail("append", zones=range(4, 32), times=2, landed=2 * BLOCK)
        with trio.fail_after(NEVER):
            await volume.collect()
        assert volume.stream.write_errors > 0
        assert volume.copier.copied > 0
        for name, data in files.items():
            assert await content(volume, volume.lookup(ROOT, name).ino) == data
    await check_after_remount(device, files)


async def test_bytes_that_the_device_takes_back_are_reported() -> None:
    """A failed append, and the pointer then stands before bytes that had been written."""
    device = await formatted(small_device())
    async with mounted(device) as volume:
        kept = await synced(volume, b"kept", b"k" * 20_000)
        lost = await put(volume, ROOT, b"lost", b"l" * 20_000)
        (zone,) = zones_of(volume, kept)
        volume.stream.seal_of(volume.inode(lost))
        await volume.stream.drain(volume.inode(lost))
        device.fail("append", zones={zone}, times=1)
        device.rules.states[zone].pointer -= 5 * BLOCK
        other = await synced(volume, b"other", b"o" * 20_000)
        await wait_all_tasks_blocked()
        with pytest.raises(FSError, match=f"zone {zone} has lost bytes .* not yet synced"):
            await volume.fsync(lost)
        with pytest.raises(FSError, match="lost"):
            await volume.read(lost, 0, 10)
        assert await content(volume, kept) == b"k" * 20_000
        assert await content(volume, other) == b"o" * 20_000


# Resets and finishes


@pytest.mark.parametrize("landed", [0, 1, 2])
async def test_one_zone_that_cannot_be_reset_is_retired_and_the_others_are_reset(
    landed: int,
) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        ino = await put(volume, ROOT, b"f", noise(900_000))
        await volume.fsync(ino)
        bad, *others = sorted(zones_of(volume, ino), reverse=True)
        epochs = {zone: volume.table[zone].epoch for zone in others}
        device.turn(bad, Condition.READ_ONLY)
        device.fail("reset", times=1, landed=landed)
        await volume.unlink(ROOT, b"f")
        await volume.syncfs()
        await volume.reclaim.reset_dead()
        assert volume.table[bad].state is State.READ_ONLY
        assert volume.failed is None
        for zone in others:
            assert volume.table[zone].state is State.EMPTY
            assert volume.table[zone].epoch == epochs[zone] + 1
        assert sum(volume.table.totals) == 44 * ZONE
        again = await synced(volume, b"again", noise(900_000, 2))
        assert set(others) <= zones_of(volume, again)
    await check_after_remount(device, {b"again": noise(900_000, 2)})


async def test_a_zone_that_can_be_neither_finished_nor_reset_is_retired() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        ino = await synced(volume, b"f", noise(50_000))
        (zone,) = zones_of(volume, ino)
        device.fail("append", "finish", "reset", zones={zone})
        other = await synced(volume, b"g", noise(50_000, 2))
        await wait_all_tasks_blocked()
        assert volume.table[zone].state is State.READ_ONLY
        assert await content(volume, ino) == noise(50_000)
        assert await content(volume, other) == noise(50_000, 2)
        assert zones_of(volume, ino) != {zone}, "it is drained"
    device.faults.clear()
    await check_after_remount(device, {b"f": noise(50_000), b"g": noise(50_000, 2)})


# Giving up


async def test_too_many_errors_within_a_window_stop_the_mount() -> None:
    device = await formatted(small_device())
    clock = Clock()
    async with mounted(device, options(clock)) as volume:
        old = await synced(volume, b"old", b"o" * 50_000)
        for number in range(3 * trouble.ERRORS_MAX):  # rare ones are borne
            clock.time_s += trouble.WINDOW_S / trouble.ERRORS_MAX
            volume.trouble.met(DeviceError("mem", "append", str(number)))
        assert volume.failed is None
        clock.time_s += trouble.WINDOW_S
        device.fail("append", zones=range(4, 48))
        with trio.fail_after(NEVER):
            for number in range(trouble.ERRORS_MAX):
                with pytest.raises(RetainzError):
                    await synced(volume, b"f%d" % number, b"x" * 50_000)
        assert isinstance(volume.failed, DeviceFails)
        assert "unmount, and replace" in volume.statistics()["failed"]
        device.faults.clear()
        with pytest.raises(RetainzError) as caught:
            await volume.make(ROOT, b"new", FILE, 0, 0)
        assert caught.value.errno == errno.EROFS
        assert await content(volume, old) == b"o" * 50_000
    await check_after_remount(device, {b"old": b"o" * 50_000})


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENXIO])
async def test_a_device_that_vanishes_stops_everybody_at_once(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    device = await formatted(slow(5))
    numbers: list[int] = []

    async def write(volume: Volume, name: bytes) -> None:
        ino = (await volume.make(ROOT, name, FILE, 0, 0)).ino
        volume.open(ino)
        try:
            for at in range(0, 1 << 30, 50_000):
                await volume.write(ino, at, b"w" * 50_000)
                if at % 400_000 == 0:
                    await volume.fsync(ino)
                if at == 400_000:
                    started.set()
        except RetainzError as error:
            numbers.append(error.errno)
        volume.close(ino)

    started = trio.Event()
    with trio.fail_after(NEVER):
        async with mounted(device) as volume:
            old = await synced(volume, b"old", b"o" * 50_000)
            async with trio.open_nursery() as nursery:
                for name in (b"a", b"b", b"c"):
                    nursery.start_soon(write, volume, name)
                await started.wait()
                device.fail("append", "flush", "reset", "finish", "close", "read", error=number)
            assert isinstance(volume.failed, DeviceGone)
            await volume.failure_event.wait()
            assert set(numbers) <= {errno.EROFS, errno.EIO}
            assert len(numbers) == 3
            with pytest.raises(RetainzError) as caught:
                await volume.read(old, 0, 10)
            assert caught.value.errno == errno.EIO
            with pytest.raises(RetainzError) as caught:
                await volume.unlink(ROOT, b"old")
            assert caught.value.errno == errno.EROFS
    assert [r.getMessage() for r in caplog.records if "gone" in r.getMessage()] == [
        f"the filesystem stops: {volume.failed}"
    ]
    assert len(caplog.records) == 1
    device.faults.clear()
    device.witness = None  # it cannot know what a mount that did not end cleanly has given up
    await check_after_remount(device, {b"old": b"o" * 50_000})


@pytest.mark.parametrize("error", [errno.ENODEV, errno.EIO])
def test_a_device_may_fail_for_good_at_any_moment(error: int) -> None:
    for moment in range(0, 150, 7):
        try:
            deterministic(moment, everything_fails, moment, error)
        except BaseException as failure:
            failure.add_note(f"from operation {moment} on")
            raise


async def everything_fails(moment: int, error: int) -> None:
    """From an operation on nothing works; nobody hangs, and what was synced is there afterwards."""
    device = await formatted(slow(moment, zones=24))
    device.witness = None  # see above
    acknowledged: dict[bytes, bytes] = {}

    async def write(volume: Volume, number: int) -> None:
        for step in range(8):
            name, data = b"%d-%d.pt" % (number, step), noise(150_000, step)
            await synced(volume, name, data)
            acknowledged[name] = data
            if step % 2:
                del acknowledged[name]
                await volume.unlink(ROOT, name)
                await volume.syncfs()

    async def bear(volume: Volume, number: int) -> None:
        try:
            await write(volume, number)
        except RetainzError as failure:
            assert failure.errno != errno.ENOSPC  # noqa: PT017

    kinds = ("append", "flush", "reset", "finish", "close", "read")
    with trio.fail_after(NEVER):
        try:
            async with mounted(device) as volume:
                device.fail(*kinds, error=error).after = moment
                async with trio.open_nursery() as nursery:
                    for number in range(3):
                        nursery.start_soon(bear, volume, number)
                for name in acknowledged:
                    with suppress(RetainzError):
                        await content(volume, volume.lookup(ROOT, name).ino)
        except* RetainzError:  # the last commit
            pass
    back = device.after_cut(random.Random(moment))
    await back.start()
    await check_after_remount(back, acknowledged)
