"""Damage of metadata: an older snapshot takes the place of a damaged one, a damaged log refuses."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from retainzfs import layout, recovery
from retainzfs.device import Condition
from retainzfs.errors import Damaged, NoSpace, ReadOnly
from retainzfs.journal import METADATA_ZONES_MIN, metadata_zones
from retainzfs.layout import BLOCK, BatchHeader, BatchKind
from retainzfs.namespace import Namespace
from retainzfs.volume import ROOT, Volume
from tests.helpers import (
    FILE,
    formatted,
    mounted,
    options,
    small_device,
    until_power_cut,
)
from tests.witness import WatchedDevice

pytestmark = pytest.mark.volume

SNAPSHOT = (BatchKind.SNAPSHOT_BEGIN, BatchKind.SNAPSHOT, BatchKind.SNAPSHOT_END)


class Place(NamedTuple):
    """One block of a batch in the metadata zones."""

    header: BatchHeader
    zone: int
    byte: int


def places(device: WatchedDevice) -> Iterator[Place]:
    for zone in range(metadata_zones(device.geometry.zone_count)):
        data = memoryview(bytes(device._zones.get(zone, b"")))
        at = BLOCK
        while at < len(data):
            decoded = layout.decode_batch(data[at:])
            if decoded is None:
                at += BLOCK
                continue
            for _ in range(layout.batch_blocks(data[at:])):
                yield Place(decoded[0], zone, at)
                at += BLOCK


def state(namespace: Namespace) -> list[layout.Record]:
    records: list[layout.Record] = []
    for ino in sorted(namespace.inodes):
        records += namespace.known(namespace.inodes[ino])
    return records


async def grow(volume: Volume, name: bytes, count: int, each: int = 10) -> None:
    """Make files, and commit them in groups."""
    for i in range(count):
        await volume.make(ROOT, name + b"-%d-" % i + bytes([65]) * 200, FILE, 0, 0)
        if i % each == 0:
            await volume.syncfs()
    await volume.syncfs()


async def aged(*, clean: bool) -> WatchedDevice:
    """Return a device with two snapshots, and log before, between and behind them."""
    device = await formatted(small_device(zones=16))
    async with mounted(device) as volume:
        await grow(volume, b"first", 150)
        await volume.committer.snapshot()
        await grow(volume, b"second", 150)
        await volume.unlink(ROOT, volume.entries(ROOT)[0][0])
        await volume.committer.snapshot()
        await grow(volume, b"third", 60, each=2)
        cut = copy.deepcopy(device)
    device = device if clean else cut
    await device.start()
    return device


def broken(device: WatchedDevice, place: Place, *, flip: bool) -> WatchedDevice:
    hurt = copy.deepcopy(device)
    if flip:
        hurt.damage(place.zone, place.byte)
    else:
        hurt.lose(place.zone, place.byte // BLOCK)
    return hurt


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("clean", [True, False])
async def test_every_block_of_the_metadata(clean: bool, flip: bool) -> None:
    """All that was acknowledged comes back, or the mount says what is lost."""
    device = await aged(clean=clean)
    sound = await recovery.recover(device)
    assert not sound.fallback
    wanted = state(sound.namespace)
    found = list(places(device))
    newest = max(p.header.snapshot for p in found)
    last = max(p.header.sequence for p in found)
    refusals, fallbacks = 0, 0
    for place in found:
        header = place.header
        needed = header.kind is BatchKind.LOG and header.sequence > newest
        try:
            recovered = await recovery.recover(broken(device, place, flip=flip))
        except Damaged as refused:
            said = str(refused)
        else:
            said = ""
        if said:
            assert needed, f"{header} was not needed: {said}"
            assert f"metadata zone {place.zone}, byte " in said
            assert f"batch {header.sequence} is broken" in said
            refusals += 1
            continue
        if header.sequence == last:
            continue  # nothing behind it says that it was durable
        assert not needed, f"{header} is lost and nobody is told"
        assert state(recovered.namespace) == wanted, f"{header}"
        assert bool(recovered.fallback) == (header.snapshot == newest), f"{header}"
        fallbacks += bool(recovered.fallback)
    assert fallbacks > 20, "the newest snapshot has several batches"
    assert (refusals > 20) == (not clean), "behind a clean unmount there is no log"


@pytest.mark.parametrize("seed", range(40))
async def test_damage_in_several_places(seed: int) -> None:
    device = await aged(clean=seed % 2 == 0)
    wanted = state((await recovery.recover(device)).namespace)
    rng = random.Random(seed)
    found = list(places(device))
    last = max(p.header.sequence for p in found)
    for place in rng.sample([p for p in found if p.header.sequence < last], rng.randint(2, 6)):
        device = broken(device, place, flip=rng.random() < 0.5)
    try:
        recovered = await recovery.recover(device)
    except Damaged:
        return
    assert state(recovered.namespace) == wanted


async def test_a_mount_on_an_older_snapshot_writes_a_new_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = await aged(clean=True)
    found = list(places(device))
    newest = max(p.header.snapshot for p in found)
    victim = next(p for p in found if p.header.sequence == newest + 1)
    device.damage(victim.zone, victim.byte + 100)
    names = {b"first", b"second", b"third"}
    async with mounted(device) as volume:
        assert {name.split(b"-")[0] for name, _ in volume.entries(ROOT)} == names
        assert volume.journal.snapshot_begun == 0
        assert volume.journal.snapshot_position == volume.journal.position
        (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert f"metadata zone {victim.zone}, byte {victim.byte}" in line
        await grow(volume, b"fourth", 5)
        cut = copy.deepcopy(device)
    await cut.start()
    for one in (device, cut):
        recovered = await recovery.recover(one)
        assert not recovered.fallback
        entries = recovered.namespace.directory(ROOT)
        assert {name.split(b"-")[0] for name in entries} == {*names, b"fourth"}


async def test_a_zone_of_snapshot_without_its_superblock_is_not_needed() -> None:
    device = await aged(clean=False)
    sound = await recovery.recover(device)
    log = sound.journal
    log.torn = True
    await log.append(BatchKind.SNAPSHOT_BEGIN, b"", 1.0)
    await log.flush()
    device.damage(log.chain[log.position], 10)
    recovered = await recovery.recover(device)
    assert state(recovered.namespace) == state(sound.namespace)
    assert recovered.fallback
    await log.append(BatchKind.LOG, layout.encode(layout.ZoneRecord(9, 1)), 1.0)
    await log.flush()
    with pytest.raises(Damaged, match="lost its superblock"):
        await recovery.recover(device)


async def crowded() -> WatchedDevice:
    """Return an unclean device whose newest snapshot is broken, and whose zones are all needed."""
    device = await formatted(small_device(zones=16))
    made = 0
    async with mounted(device) as volume:
        with contextlib.suppress(NoSpace):
            while True:
                await grow(volume, b"f%d" % made, 20)
                made += 20
        files = [ino for _, ino in volume.entries(ROOT)]
        for mode in range(4000):
            await volume.setattr(files[mode % made], mode=mode % 0o777)
            if mode % 20:
                continue
            await volume.syncfs()
            if len(volume.journal.chain) < METADATA_ZONES_MIN or volume.journal.snapshot_begun:
                continue
            cut = copy.deepcopy(device)
            await cut.start()
            newest = max(p.header.snapshot for p in places(cut))
            victim = next(p for p in places(cut) if p.header.snapshot == newest)
            cut.damage(victim.zone, victim.byte)
            with contextlib.suppress(Damaged):
                log = (await recovery.recover(cut)).journal
                all_used = len(log.chain) == METADATA_ZONES_MIN
                if all_used and min(log.chain) == log.snapshot_position:
                    return cut
    raise AssertionError("the zones were never all needed")


async def test_without_room_for_a_new_snapshot_the_mount_is_read_only() -> None:
    device = await crowded()
    wanted = state((await recovery.recover(device)).namespace)
    for _ in range(2):
        async with mounted(device) as volume:
            assert state(volume.namespace) == wanted
            with pytest.raises(ReadOnly, match="no room for a new snapshot"):
                await volume.make(ROOT, b"new", FILE, 0, 0)
            assert "no room for a new snapshot" in volume.statistics()["failed"]


async def test_a_zone_that_cannot_be_reset_is_not_given_up() -> None:
    device = await aged(clean=False)
    log = (await recovery.recover(device)).journal
    log.torn = True
    await log.append(BatchKind.SNAPSHOT_BEGIN, b"", 1.0)
    await log.flush()
    device.turn(log.chain[log.position], Condition.READ_ONLY)
    recovered = (await recovery.recover(device)).journal
    assert recovered.given_up == []
    assert recovered.chain == log.chain


async def test_without_another_snapshot_the_mount_is_refused() -> None:
    device = await aged(clean=True)
    for place in list(places(device)):
        if place.header.kind is BatchKind.SNAPSHOT_END:
            device.damage(place.zone, place.byte)
    with pytest.raises(Damaged, match=r"no complete snapshot .*; metadata zone \d, byte \d+"):
        await recovery.recover(device)


@pytest.mark.parametrize("survived", range(1, 13))
async def test_power_cuts_in_one_mount_after_another(survived: int) -> None:
    """Each mount gets as far as `survived` operations into its first snapshot."""
    device = small_device(zones=16)
    await formatted(device)
    rng = random.Random(survived)
    wanted = 0
    for attempt in range(12):
        device.cut_at = device.operations + (80 if attempt == 0 else survived)
        with until_power_cut():
            async with Volume.mounted(device, options()) as volume:
                assert not attempt, "the power was cut too late"
                while True:
                    await grow(volume, b"f%d" % wanted, 50)
                    wanted += 50
        device = device.after_cut(rng)
        await device.start()
    async with mounted(device) as volume:
        assert wanted <= len(volume.entries(ROOT)) <= wanted + 50
        assert wanted >= 200, "the snapshot takes several operations"
        await grow(volume, b"again", 5)


async def test_a_cut_between_two_metadata_zones_after_a_clean_end() -> None:
    """The old zone is finished, the new one has no superblock yet."""
    device = await aged(clean=True)
    log = (await recovery.recover(device)).journal
    await device.finish(log.chain[log.position])
    async with mounted(device) as volume:
        await grow(volume, b"more", 3)
    assert not (await recovery.recover(device)).fallback
