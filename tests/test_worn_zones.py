"""Zones that a device gives up: read-only ones are read and drained, offline ones are missed."""

from __future__ import annotations

import errno

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from retainzfs import fsck, journal, layout
from retainzfs.device import Condition
from retainzfs.device.faults import FaultDevice
from retainzfs.errors import Damaged, DeviceError, FSError, NoSpace
from retainzfs.layout import BLOCK, BatchKind
from retainzfs.volume import ROOT, Volume
from retainzfs.zone import Kind, State
from tests.helpers import (
    content,
    formatted,
    mounted,
    noise,
    put,
    slow,
    small_device,
    synced,
    zones_of,
)

pytestmark = [pytest.mark.volume, pytest.mark.power_cuts(3)]

ZONE = 256 << 10
NEVER = 10.0  # seconds; what takes longer hangs


# Read-only zones


async def spread(volume: Volume, count: int = 6) -> dict[int, bytes]:
    files = {}
    for number in range(count):
        data = noise(100_000, number)
        files[await synced(volume, b"f%d" % number, data)] = data
    return files


async def test_a_zone_that_turns_read_only_is_read_and_drained_at_once() -> None:
    device = await formatted(slow(4))
    async with mounted(device) as volume:
        files = await spread(volume, 2)
        zone = next(z.index for z in volume.table.active(Kind.UNHINTED))
        inside = [ino for ino in files if zone in zones_of(volume, ino)]
        device.turn(zone, Condition.READ_ONLY)
        for ino, data in files.items():
            assert await content(volume, ino) == data
        await synced(volume, b"g", b"g" * 50_000)  # this is how it is noticed
        await wait_all_tasks_blocked()
        assert volume.table[zone].state is State.READ_ONLY
        assert volume.table[zone].live_bytes == 0
        assert inside
        for ino, data in files.items():
            assert zone not in zones_of(volume, ino)
            assert await content(volume, ino) == data
        assert volume.copier.copied > 0
    for ino in files:
        async with mounted(device) as volume:
            assert await content(volume, ino) == files[ino]


@pytest.mark.parametrize("how", ["mount", "gc"])
async def test_read_only_zones_are_drained_by_a_mount_and_by_gc(how: str) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        files = await spread(volume)
        zones = {zone for ino in files for zone in zones_of(volume, ino)}
        for zone in zones:
            device.turn(zone, Condition.READ_ONLY)
        if how == "gc":
            await volume.collect()
            assert not volume.table.stuck()
    async with mounted(device) as volume:
        await wait_all_tasks_blocked()
        assert not volume.table.stuck()
        assert volume.statistics()["zones"]["read_only"] == len(zones)
        for ino, data in files.items():
            assert await content(volume, ino) == data
            assert not zones_of(volume, ino) & zones
        assert sum(volume.table.totals) == 44 * ZONE


@pytest.mark.parametrize("turns", [0, 1, 5, 25])
async def test_an_unmount_does_not_wait_for_a_drain(turns: int) -> None:
    device = await formatted(slow(6))
    async with mounted(device) as volume:
        files = await spread(volume)
        zones = {zone for ino in files for zone in zones_of(volume, ino)}
    for zone in zones:
        device.turn(zone, Condition.READ_ONLY)
    with trio.fail_after(NEVER):
        async with mounted(device):
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
        async with mounted(device) as volume:
            for ino, data in files.items():
                assert await content(volume, ino) == data


async def test_draining_takes_no_room_that_writers_need_and_goes_on_when_there_is_some() -> None:
    device = await formatted(small_device(zones=24))
    async with mounted(device) as volume:
        files = await spread(volume, 20)
        while True:
            try:
                await synced(volume, b"fill%d" % len(files), b"x" * 200_000)
            except NoSpace:
                break
            files[volume.lookup(ROOT, b"fill%d" % len(files)).ino] = b"x" * 200_000
        first = volume.lookup(ROOT, b"fill20").ino
        zone = next(iter(zones_of(volume, min(files))))
        device.turn(zone, Condition.READ_ONLY)
        with trio.fail_after(NEVER):
            await volume.collect()
        assert volume.table[zone].live_bytes, "there was no room to spare"
        assert volume.table.empty > 0, "draining took the emergency zone"
        for ino in [ino for ino in files if ino >= first]:
            await volume.unlink(ROOT, volume.inode(ino).name)
            del files[ino]
        await volume.syncfs()
        with trio.fail_after(NEVER):
            while volume.table[zone].live_bytes:
                await wait_all_tasks_blocked()
                await volume.syncfs()
        for ino, data in files.items():
            assert await content(volume, ino) == data


async def test_damaged_bytes_stay_in_a_read_only_zone_and_are_not_tried_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        files = await spread(volume, 4)
        ino, other, *_ = files
        (zone,) = zones_of(volume, ino)
        device.damage(zone, volume.inode(ino).extents[0].run.start * BLOCK + 5)
        device.turn(zone, Condition.READ_ONLY)
        volume.trouble.look_at_all()
        for number in range(3):
            await wait_all_tasks_blocked()
            await synced(volume, b"more%d" % number, b"m" * 5000)
        assert caplog.text.count("cannot be read: checksum mismatch") == 1
        assert zones_of(volume, ino) == {zone}
        with pytest.raises(FSError, match="checksum"):
            await content(volume, ino)
        for ino in (other, *_):
            assert await content(volume, ino) == files[ino]


# Offline zones


async def test_an_offline_zone_costs_its_own_files_only() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        files = await spread(volume)
        gone, *rest = files
        (zone,) = zones_of(volume, gone)
        rest = [ino for ino in rest if zone not in zones_of(volume, ino)]
        device.turn(zone, Condition.OFFLINE)
        with pytest.raises(FSError, match=r"/f0: bytes 0 to .* offline") as caught:
            await volume.read(gone, 0, 10)
        assert caught.value.errno == errno.EIO
        assert volume.statistics()["zones"]["offline"] == 1
        await synced(volume, b"new", b"n" * 100_000)
        assert rest
        for ino in rest:
            assert await content(volume, ino) == files[ino]
        await volume.collect()
    report = await fsck.examine(device)
    lost = [f.text for f in report.findings if f.damage]
    assert f"/f0: bytes 0 to 100000 are lost: zone {zone} is offline" in lost
    async with mounted(device) as volume:
        for ino in rest:
            assert await content(volume, ino) == files[ino]
        with pytest.raises(FSError, match="is offline"):
            await volume.read(gone, 0, 10)
        await volume.unlink(ROOT, b"f0")
        await volume.syncfs()
        assert volume.table[zone].state is State.OFFLINE


async def test_bytes_that_went_offline_unsynced_fail_the_sync() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        ino = await put(volume, ROOT, b"f", b"x" * 50_000)
        volume.stream.seal_of(volume.inode(ino))
        await volume.stream.drain(volume.inode(ino))
        (zone,) = zones_of(volume, ino)
        device.turn(zone, Condition.OFFLINE)
        await synced(volume, b"g", b"g" * 50_000)
        await wait_all_tasks_blocked()
        with pytest.raises(FSError, match=f"zone {zone} has lost bytes"):
            await volume.fsync(ino)


# Metadata zones


async def written(device: FaultDevice, name: bytes = b"f") -> None:
    async with mounted(device) as volume:
        await synced(volume, name, b"x" * 50_000)


def head(device: FaultDevice) -> int:
    """Return the metadata zone that was written last."""
    appends = [o for o in device.history if o.kind == "append" and o.zones[0] < 4]
    return appends[-1].zones[0]


async def test_a_read_only_metadata_zone_is_read_and_not_written() -> None:
    device = await formatted(small_device())
    await written(device)
    zone = head(device)
    device.turn(zone, Condition.READ_ONLY)
    operations = device.operations
    for name in (b"g", b"h"):
        await written(device, name)
        async with mounted(device) as volume:
            await volume.committer.snapshot()
            assert volume.zone_map()[zone]["condition"] == "read_only"
            assert await content(volume, volume.lookup(ROOT, b"f").ino) == b"x" * 50_000
    assert all(zone not in o.zones for o in device.history[operations:])


async def test_an_offline_metadata_zone_matters_only_if_the_log_needs_it() -> None:
    device = await formatted(small_device())
    await written(device)
    unused = next(z for z in range(4) if z != head(device))
    device.turn(unused, Condition.OFFLINE)
    await written(device, b"g")
    async with mounted(device) as volume:
        assert volume.statistics()["zones"]["offline"] == 1
        assert {name for name, _ in volume.entries(ROOT)} == {b"f", b"g"}


async def test_a_volume_whose_only_metadata_zone_is_offline_is_not_to_be_formatted() -> None:
    device = await formatted(small_device())
    device.turn(head(device), Condition.OFFLINE)
    with pytest.raises(Damaged, match="zone 0 is offline, and the others have no superblock"):
        await journal.scan(device)


async def fill_log(log: journal.Journal, position: int) -> None:
    record = layout.encode(layout.ZoneRecord(9, 1))
    while log.position < position:
        await log.append(BatchKind.LOG, record * 1000, 1.0)
    await log.flush()


@pytest.mark.parametrize("position", [2, 3])
async def test_a_log_with_an_offline_zone_in_it_is_refused(position: int) -> None:
    """Its head included: where the log ended is not known then."""
    device = await formatted(small_device())
    log = await opened(device)
    await fill_log(log, 3)
    device.turn(log.chain[position], Condition.OFFLINE)
    with pytest.raises(Damaged, match=f"zone {log.chain[position]} is offline"):
        await journal.scan(device)


async def opened(device: FaultDevice) -> journal.Journal:
    replay, chain, end = await journal.scan(device)
    log = journal.Journal(device, replay.superblock)
    log.resume(replay, chain, end)
    return log


@pytest.mark.parametrize("what", ["reset", "superblock", "batch"])
@pytest.mark.parametrize("landed", [0, BLOCK])
async def test_a_metadata_zone_that_fails_at_its_beginning_is_left_for_another(
    what: str, landed: int
) -> None:
    device = await formatted(small_device())
    log = await opened(device)
    (bad, *_) = sorted(set(range(4)) - set(log.chain.values()))
    kind = "reset" if what == "reset" else "append"
    fault = device.fail(kind, zones={bad}, landed=0 if kind == "reset" else landed)
    if what == "batch":
        fault.after = 1
    await fill_log(log, 3 if what == "batch" else 2)
    device.faults.clear()
    assert log.chain[log.position] != bad
    replay, chain, _ = await journal.scan(device)
    assert chain == log.chain
    assert replay.sequence == log.sequence
    await written(device)


async def test_an_append_behind_acknowledged_batches_is_final() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        await synced(volume, b"f", b"x" * 50_000)
        device.fail("append", zones=range(4), times=1)
        with pytest.raises(DeviceError):
            await synced(volume, b"g", b"x" * 50_000)
        assert volume.failed is not None
