"""The log: chains of zones, torn tails, and damage of what was durable."""

from __future__ import annotations

import copy
import random
from contextlib import suppress

import pytest

from retainzfs import journal, layout
from retainzfs.device.faults import FaultDevice, PowerCut
from retainzfs.errors import Damaged, DeviceError, NoSpace, RetainzError
from retainzfs.journal import Journal
from retainzfs.layout import BLOCK, BatchKind
from retainzfs.volume import ROOT, Volume
from tests.helpers import (
    FILE,
    formatted,
    mounted,
    options,
    small_device,
    until_power_cut,
)

pytestmark = pytest.mark.volume

RECORD = layout.encode(layout.ZoneRecord(9, 1))


async def opened(device: FaultDevice) -> Journal:
    """Return the journal of a formatted device, ready to append."""
    replay, chain, end = await journal.scan(device)
    log = Journal(device, replay.superblock)
    log.resume(replay, chain, end)
    return log


async def logged(device: FaultDevice, batches: int) -> Journal:
    """Append batches, each flushed."""
    log = await opened(device)
    for _ in range(batches):
        await log.append(BatchKind.LOG, RECORD, 1.0)
        await log.flush()
    return log


def faulty() -> FaultDevice:
    return small_device()


async def test_batches_come_back_in_order() -> None:
    device = await formatted(faulty())
    log = await logged(device, 5)
    replay, _, end = await journal.scan(device)
    assert [b.payload for b in replay.log] == [RECORD] * 5
    assert replay.sequence == log.sequence
    assert end == log.write_pointer
    assert not replay.clean
    assert replay.rolled_back == 0


@pytest.mark.parametrize("back", [1, 2])
async def test_a_torn_tail_rolls_back_and_nothing_follows_it(back: int) -> None:
    """`back`: how many of the last, unflushed batches are broken and behind the break."""
    device = await formatted(faulty())
    log = await logged(device, 3)
    zone = log.chain[log.position]
    for _ in range(2):
        await log.append(BatchKind.LOG, RECORD, 1.0)
    device.damage(zone, log.write_pointer - back * BLOCK + 10)
    replay, _, _ = await journal.scan(device)
    assert len(replay.log) == 3 + 2 - back
    assert replay.rolled_back == back * BLOCK
    resumed = await opened(device)
    await resumed.append(BatchKind.LOG, RECORD, 2.0)
    assert resumed.chain[resumed.position] != zone, "something was appended behind a torn batch"
    await resumed.flush()
    replay, _, _ = await journal.scan(device)
    assert len(replay.log) == 3 + 2 - back + 1


async def test_a_broken_batch_that_was_durable_is_damage() -> None:
    device = await formatted(faulty())
    log = await logged(device, 4)
    zone = log.chain[log.position]
    device.damage(zone, log.write_pointer - 3 * BLOCK + 10)
    with pytest.raises(Damaged, match=f"zone {zone}, byte .*was durable") as caught:
        await journal.scan(device)
    assert caught.value.exit_code == 3


async def test_a_missing_zone_of_the_chain_is_damage() -> None:
    device = await formatted(faulty())
    log = await opened(device)
    while log.position < 3:
        await log.append(BatchKind.LOG, RECORD * 1000, 1.0)
    await log.flush()
    device.damage(log.chain[2], 10)
    with pytest.raises(Damaged, match="no complete snapshot"):
        await journal.scan(device)


@pytest.mark.parametrize("operation", ["append", "flush"])
async def test_a_failure_is_final(operation: str) -> None:
    device = await formatted(faulty())
    log = await logged(device, 1)
    fault = device.fail(
        operation, zones=None if operation == "flush" else {log.chain[log.position]}
    )
    with pytest.raises(DeviceError):
        await (log.append(BatchKind.LOG, RECORD, 1.0) if operation == "append" else log.flush())
    device.faults.remove(fault)
    appended = log.appended
    with pytest.raises(DeviceError):
        await log.append(BatchKind.LOG, RECORD, 1.0)
    with pytest.raises(DeviceError):
        await log.flush()
    assert log.appended == appended


async def churn(volume: Volume, rounds: int) -> int:
    """Write much more log than the metadata zones hold; return the last acknowledged value."""
    ino = volume.namespace.directory(ROOT).get(b"f")
    if ino is None:
        ino = (await volume.make(ROOT, b"f", FILE, 0, 0)).ino
        for i in range(100):
            await volume.make(ROOT, b"other-%d" % i, FILE, 0, 0)
    for i in range(rounds):
        await volume.setxattr(ino, b"user.value", b"%d" % i + bytes(10_000))
        await volume.fsync(ino)
        volume.journal.acknowledged = i  # type: ignore[attr-defined]
    return ino


async def test_the_log_goes_round_for_ever() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        ino = await churn(volume, 400)
        assert volume.journal.position > 3 * volume.journal.zones, "every zone was used again"
        assert len(set(volume.journal.chain.values())) <= volume.journal.zones
    async with mounted(device) as volume:
        assert volume.getxattr(ino, b"user.value").rstrip(b"\0") == b"399"
        assert len(volume.entries(ROOT)) == 101


async def test_a_power_cut_at_any_operation_of_the_log() -> None:
    """The workload switches zones and takes snapshots; see that every cut keeps what was synced."""
    whole = small_device(zones=12)
    await formatted(whole)
    start = whole.operations
    async with Volume.mounted(whole, options()) as volume:
        await churn(volume, 60)
        assert volume.journal.snapshot_position > 1
    rng = random.Random(7)
    for cut in range(start + 1, whole.operations + 1):
        device = small_device(zones=12)
        await formatted(device)
        device.cut_at = cut
        with until_power_cut():
            async with Volume.mounted(device, options()) as volume:
                await churn(volume, 60)
        acknowledged = getattr(volume.journal, "acknowledged", -1)
        survivor = device.after_cut(rng)
        await survivor.start()
        async with mounted(survivor) as volume:
            if acknowledged >= 0:
                ino = volume.lookup(ROOT, b"f").ino
                value = int(volume.getxattr(ino, b"user.value").rstrip(b"\0"))
                assert value in (acknowledged, acknowledged + 1)


@pytest.mark.parametrize("after", range(1, 12))
async def test_mounts_that_die_one_after_the_other_use_up_no_zones(after: int) -> None:
    """Each dies so many operations after it began, most of them before it serves anybody."""
    rng = random.Random(after)
    device = small_device(zones=12)
    await formatted(device)
    device.cut_at = device.operations + 150
    with until_power_cut():
        async with Volume.mounted(device, options()) as volume:
            await churn(volume, 10_000)
    acknowledged: int = getattr(volume.journal, "acknowledged")  # noqa: B009
    for _ in range(4 * journal.METADATA_ZONES_MIN):
        device = device.after_cut(rng)
        await device.start()
        device.cut_at = device.operations + after
        with until_power_cut():
            async with Volume.mounted(device, options()) as volume:
                while True:
                    await volume.setxattr(ROOT, b"user.other", b"x")
                    await volume.fsync(ROOT)
    device = device.after_cut(rng)
    await device.start()
    async with mounted(device) as volume:
        ino = volume.lookup(ROOT, b"f").ino
        value = int(volume.getxattr(ino, b"user.value").rstrip(b"\0"))
        assert value in (acknowledged, acknowledged + 1)


async def test_a_snapshot_without_its_end_does_not_count() -> None:
    device = await formatted(faulty())
    log = await logged(device, 2)
    await log.append(BatchKind.SNAPSHOT_BEGIN, b"", 1.0)
    await log.append(BatchKind.SNAPSHOT, RECORD, 1.0)
    await log.flush()
    replay, _, _ = await journal.scan(device)
    assert len(replay.log) == 2
    assert all(b.payload != RECORD for b in replay.snapshot)


async def test_bytes_that_pass_their_checksum_and_are_no_record_are_damage() -> None:
    device = await formatted(faulty())
    log = await opened(device)
    await log.append(BatchKind.LOG, b"\xff" * 10, 1.0)
    await log.flush()
    with pytest.raises(Damaged, match="unknown record type 255"):
        async with mounted(device):
            pass


async def test_full_metadata_zones_refuse_growth_and_admit_deletes() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        made = 0

        async def grow() -> None:
            nonlocal made
            while made < 100_000:
                await volume.make(ROOT, b"a-quite-long-name-of-a-file-%d" % made, FILE, 0, 0)
                made += 1
                if made % 50 == 0:
                    await volume.syncfs()

        with pytest.raises(RetainzError, match="metadata zones"):
            await grow()
        assert volume.failed is None
        for i in range(made):
            await volume.unlink(ROOT, b"a-quite-long-name-of-a-file-%d" % i)
            if i % 50 == 0:
                await volume.syncfs()
        await volume.syncfs()
        assert volume.failed is None
    untouched = copy.deepcopy(device)
    async with mounted(untouched) as volume:
        assert volume.entries(ROOT) == []
        await volume.make(ROOT, b"again", FILE, 0, 0)


@pytest.mark.parametrize(
    ("zones", "zone_size", "burst"),
    [(24, 256 << 10, 1), (24, 256 << 10, 20), (24, 256 << 10, 200), (24, 1 << 20, 200),
     (620, 256 << 10, 20)],
)  # fmt: skip
async def test_full_metadata_zones_survive_any_crash(
    zones: int, zone_size: int, burst: int
) -> None:
    """A mount after a crash needs room for a snapshot, and so does the mount after that one."""
    rng = random.Random(burst)
    device = await formatted(small_device(zones=zones, zone_size=zone_size))
    async with mounted(device) as volume:
        made: list[int] = []
        with pytest.raises(NoSpace, match="metadata"):  # noqa: PT012
            while len(made) < 100_000:
                made.append((await volume.make(ROOT, b"%060d" % len(made), FILE, 0, 0)).ino)
                if len(made) % burst == 0:
                    await volume.committer.commit()
        full = device.operations
        for number in range(3 * len(made) // 2):
            await volume.setattr(rng.choice(made), mode=rng.randrange(0o777))
            if number % burst == 0:
                await volume.committer.commit()
    medium = device.fresh_medium()
    moments = {full + rng.randrange(device.operations - full) for _ in range(6)}
    for operation in device.history:
        medium.take(operation)
        if operation.number in moments:
            survivor = device.revived(medium, rng)
            for after in (3, 9, 40):  # the recovery is cut too
                await survivor.start()
                survivor.cut_at = survivor.operations + after
                with suppress(BaseExceptionGroup, PowerCut):
                    async with mounted(survivor) as volume:
                        pass
                survivor = survivor.after_cut(rng)
            await survivor.start()
            async with mounted(survivor) as volume:
                assert len(volume.entries(ROOT)) >= len(made) - 2 * burst
                await volume.unlink(ROOT, volume.entries(ROOT)[0][0])
                await volume.syncfs()


async def test_a_damaged_superblock_of_the_newest_zone_is_damage() -> None:
    """The log since the zone switch was durable and is not forgotten silently."""
    device = await formatted(small_device(zones=24))
    async with mounted(device) as volume:
        log = volume.journal
        made = 0
        while log.position < 2 or log.snapshot_position == log.position or log.snapshot_begun:
            for _ in range(40):
                made += 1
                await volume.make(ROOT, b"f%d" % made, FILE, 0, 0)
            await volume.syncfs()
        for number in range(10):
            await volume.make(ROOT, b"later%d" % number, FILE, 0, 0)
            await volume.syncfs()
        zone = log.chain[log.position]
        cut = copy.deepcopy(device)
    await cut.start()
    cut.damage(zone, 10)
    with pytest.raises(Damaged, match="superblock"):
        await journal.scan(cut)
