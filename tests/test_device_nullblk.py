"""The kernel's zones as no NVMe drive of QEMU has them: some that turn read-only or offline,
queues without a scheduler, a drive that vanishes. On devices of the null_blk driver."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from retainzfs.device import BLOCK, Condition, create_target, open_target
from retainzfs.device.kernel import KernelDevice
from retainzfs.device.sysfs import PLUGGED, BlockDevice
from retainzfs.errors import DeviceError, ForeignTarget, WriteOrder, ZoneRuleError
from retainzfs.recovery import recover
from tests import zonereport
from tests.device_backends import MIB, random_blocks
from tests.nullblk import SECTOR, TURNS, NullBlk, null_blk

pytestmark = [pytest.mark.zoned, pytest.mark.volume]

ZONES = 24
LIMIT = 12  # of open and of active zones
KEEPS_ORDER = tuple(map(int, os.uname().release.split(".")[:2])) >= PLUGGED


@pytest.fixture
def disk() -> Iterator[NullBlk]:
    with null_blk(
        zones=ZONES, zone_size=2 * MIB, zone_capacity=MIB, max_open=LIMIT, max_active=LIMIT
    ) as device:
        yield device


@asynccontextmanager
async def started(disk: NullBlk) -> AsyncIterator[KernelDevice]:
    """What the device says is what other programs say of it, at the end too."""
    device = open_target(disk.target)
    assert isinstance(device, KernelDevice)
    await device.start()
    await device.settle()
    try:
        yield device
        if disk.sysfs.exists():
            zonereport.check_report(device)
    finally:
        await device.aclose()


COMMANDS: dict[str, Callable[[KernelDevice], Awaitable[Any]]] = {
    "append": lambda device: device.append(0, 3 * BLOCK, random_blocks(1)),
    "reset": lambda device: device.reset([0]),
    "finish": lambda device: device.finish(0),
    "open": lambda device: device.open_zone(0),
    "close": lambda device: device.close_zone(0),
}


@pytest.mark.parametrize("turned", TURNS, ids=lambda turned: turned.name.lower())
@pytest.mark.parametrize("first", COMMANDS)
async def test_a_zone_that_turns_refuses_commands(
    disk: NullBlk, first: str, turned: Condition
) -> None:
    data = random_blocks(3)
    async with started(disk) as device:
        await device.append(0, 0, data)
        await device.append(1, 0, data)
        disk.turn(0, turned)
        with pytest.raises(DeviceError, match=r"zone.* Input/output error") as caught:
            await COMMANDS[first](device)
        assert caught.value.errno == errno.EIO
        for command in COMMANDS.values():
            with pytest.raises(ZoneRuleError, match=f"that is {turned.name.lower()}|read only"):
                await command(device)
        assert device.statistics()["active"] == 1
        if turned is Condition.READ_ONLY:
            assert bytes(await device.read(0, 0, 3 * BLOCK)) == bytes(data)
        else:
            with pytest.raises(ZoneRuleError, match="offline"):
                await device.read(0, 0, BLOCK)
        assert bytes(await device.read(1, 0, 3 * BLOCK)) == bytes(data)
        assert device.report_zone(0).condition is turned


async def test_a_report_tells_of_turned_zones_and_frees_their_slots(disk: NullBlk) -> None:
    async with started(disk) as device:
        for zone in range(LIMIT):
            await device.append(zone, 0, random_blocks(1))
        with pytest.raises(ZoneRuleError, match="too many active zones"):
            await device.append(12, 0, random_blocks(1))
        disk.turn(0, Condition.READ_ONLY)
        disk.turn(1, Condition.OFFLINE)
        assert [zone.condition for zone in device.report()[:2]] == list(TURNS)
        assert device.statistics()["active"] == 10
        await device.append(12, 0, random_blocks(1))
        await device.append(13, 0, random_blocks(1))


async def test_reads_of_a_zone_that_went_offline_unseen_fail(disk: NullBlk) -> None:
    async with started(disk) as device:
        await device.append(0, 0, random_blocks(1))
        disk.turn(0, Condition.OFFLINE)
        with pytest.raises(DeviceError, match="read from zone 0: Input/output error"):
            await device.read(0, 0, BLOCK)


async def test_a_reset_of_many_zones_of_which_one_turned(disk: NullBlk) -> None:
    async with started(disk) as device:
        for zone in range(4):
            await device.append(zone, 0, random_blocks(1))
        disk.turn(2, Condition.READ_ONLY)
        with pytest.raises(DeviceError, match="reset of 4 zones"):
            await device.reset(range(4))
        assert device.report_zone(2).condition is Condition.READ_ONLY
        zonereport.check_report(device)
        for zone in (0, 1, 3):
            assert device.report_zone(zone).condition is Condition.EMPTY
            await device.append(zone, 0, random_blocks(1))


async def test_an_offline_first_zone_keeps_nobody_from_the_others(disk: NullBlk) -> None:
    disk.turn(0, Condition.OFFLINE)
    create_target(disk.target, force=True).close()
    async with started(disk) as device:
        await device.append(1, 0, random_blocks(1))
    open_target(disk.target, readonly=True).close()


@pytest.mark.parametrize("sectors", [3, 8, 8 * 5 + 1])
async def test_no_append_goes_on_in_the_middle_of_a_block(sectors: int) -> None:
    with null_blk(zones=ZONES, zone_size=MIB, max_open=6, max_active=6, block_size=SECTOR) as disk:
        disk.write(3, random.Random(sectors).randbytes(sectors * SECTOR))
        device = open_target(disk.target, readonly=True)
        assert device.report_zone(3).write_pointer == sectors // 8 * BLOCK
        device.close()
        async with started(disk) as device:
            zone = device.report_zone(3)
            if sectors % 8:
                assert zone.condition is Condition.FULL
                assert device.statistics()["active"] == 0
            else:
                await device.append(3, zone.write_pointer, random_blocks(1))


async def test_the_zones_of_others_are_left_as_they_are() -> None:
    with null_blk(zones=ZONES, zone_size=MIB, max_open=6, max_active=6, block_size=SECTOR) as disk:
        disk.write(3, bytes(3 * SECTOR))
        disk.open(2)
        before = zonereport.blkzone(disk.target)
        device = open_target(disk.target)
        await device.start()
        with pytest.raises(ForeignTarget):
            await recover(device)
        await device.aclose()
        assert zonereport.blkzone(disk.target) == before


async def test_a_drive_that_vanishes(disk: NullBlk, caplog: pytest.LogCaptureFixture) -> None:
    async with started(disk) as device:
        await device.append(0, 0, random_blocks(3))
        disk.vanish()
        for name, command in COMMANDS.items():
            with pytest.raises(DeviceError, match=os.strerror(errno.ENODEV)) as caught:
                await command(device)
            assert caught.value.errno == errno.ENODEV, name
        with pytest.raises(DeviceError, match=os.strerror(errno.ENODEV)):
            await device.read(0, 0, BLOCK)
        with pytest.raises(DeviceError, match=os.strerror(errno.ENODEV)):
            device.report_zone(0)
        assert device.known(0).write_pointer == 3 * BLOCK
        assert len(device.report()) == ZONES
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("max_open", "text"),
    [(6, "as many open zones as it allows"), (LIMIT, "as many active zones as it allows")],
)
async def test_slots_that_another_program_has_taken(max_open: int, text: str) -> None:
    with null_blk(zones=ZONES, zone_size=MIB, max_open=max_open, max_active=LIMIT) as disk:
        async with started(disk) as device:
            disk.open(max_open)
            with pytest.raises(DeviceError, match=f"{text}; does another program write to it?"):
                await device.append(LIMIT, 0, random_blocks(1))
            await device.append(0, 0, random_blocks(1))
            for zone in device.report()[:max_open]:
                assert zone.condition is Condition.EXPLICIT_OPEN
                await device.close_zone(zone.index)
            await device.reset(range(max_open))
            await device.append(LIMIT, 0, random_blocks(1))


# --- the order of writes -------------------------------------------------------------------------


async def check_order(disk: NullBlk) -> None:
    """Zones get what was appended to them at once, in pieces that the kernel splits."""
    data = [random_blocks(MIB // 4 // BLOCK) for _ in range(4)]
    async with started(disk) as device:
        appends = [
            device.append(zone, i * MIB // 4, data[i]) for zone in range(3) for i in range(4)
        ]
        for append in appends:
            await append
        for zone in range(3):
            assert bytes(await device.read(zone, 0, MIB)) == b"".join(data)


async def test_the_scheduler_is_set_where_the_kernel_needs_it(
    disk: NullBlk, caplog: pytest.LogCaptureFixture
) -> None:
    (disk.sysfs / "queue/scheduler").write_text("none")
    open_target(disk.target, readonly=True).close()
    assert "[none]" in disk.scheduler
    with caplog.at_level(logging.INFO):
        await check_order(disk)
    assert ("[none]" if KEEPS_ORDER else "[mq-deadline]") in disk.scheduler
    assert (f"set the scheduler of {disk.sysfs.name}" in caplog.text) is not KEEPS_ORDER


async def test_queues_whose_scheduler_cannot_be_set() -> None:
    with null_blk(zones=ZONES, zone_size=MIB, no_sched=True) as disk:
        assert BlockDevice(disk.sysfs).queued
        if KEEPS_ORDER:
            await check_order(disk)
            return
        device = open_target(disk.target)
        await device.start()
        with pytest.raises(WriteOrder) as caught:
            await device.settle()
        await device.aclose()
        assert str(caught.value).startswith(
            f"{disk.target}: the scheduler none may mix up the writes to a zone, and setting"
            " another one failed (the kernel did not take it). Do as root: echo mq-deadline >"
        )
        open_target(disk.target, readonly=True).close()


async def test_a_driver_without_queues_keeps_the_order() -> None:
    with null_blk(zones=ZONES, zone_size=MIB, queue_mode=0) as disk:
        assert BlockDevice(disk.sysfs).queued is KEEPS_ORDER  # newer null_blk always has queues
        await check_order(disk)
