"""What must be true of a volume that nobody uses at the moment."""

from __future__ import annotations

from collections import Counter
from operator import add

import trio.testing

from retainzfs.layout import BLOCK
from retainzfs.namespace import Run
from retainzfs.planning import IN_FLIGHT
from retainzfs.volume import Volume
from retainzfs.zone import Kind, Totals


async def check_quiescent(volume: Volume) -> None:
    """Commit everything; then nobody waits, nothing is promised, and all accounts add up."""
    for _ in range(3):  # a commit frees zones, and to reset them is one more record
        await volume.syncfs()
        await trio.testing.wait_all_tasks_blocked()
    _check_nobody_waits(volume)
    _check_zones(volume)
    _check_runs(volume)
    for inode in volume.namespace.inodes.values():
        assert inode.nlink or inode.handles, f"inode {inode.ino} has neither name nor handle"
    for generation, members in volume.retention.members.items():
        gone = members - volume.namespace.inodes.keys()
        assert not gone, f"generation {generation} counts files that are gone: {gone}"


def _check_nobody_waits(volume: Volume) -> None:
    stream, lanes, committer = volume.stream, volume.lanes, volume.committer
    assert not committer.dirty, f"inodes stay dirty after a commit: {sorted(committer.dirty)}"
    assert not committer._waiting, "a commit is being waited for"
    assert not committer._queue, "records are queued after a commit"
    assert not stream._sealed, "sealed runs have not reached the device"
    assert not stream._events, "events of runs are left behind"
    slots = len(stream._free) + len(stream._open) + stream.slots_left
    assert slots == stream.slots, f"{slots} staging slots are left of {stream.slots}"
    assert not any(lanes.admitted.values()), f"admitted bytes are left: {lanes.admitted}"
    for lane in lanes.lanes.values():
        work = [*lane.queue, *lane.redo]
        assert not work, f"lane {lane.key} has runs to write"
        assert not lane.working, f"lane {lane.key} works on nothing"
        assert lane.room.value == IN_FLIGHT, f"lane {lane.key} counts an append in flight"
        known = lane.key <= 0 or lane.key in volume.namespace.generations
        assert known or lane.open, f"lane {lane.key} outlived its generation"
    stages = (stream.stage(inode) for inode in volume.namespace.inodes.values())
    locks = [stage.lock for stage in stages] + [*lanes._turns.values(), lanes._lock]
    locks += [volume.reclaim.turn, volume.reclaim._resetting]
    assert not any(lock.locked() for lock in locks), "a lock is held"


def _check_zones(volume: Volume) -> None:
    live = Counter[tuple[int, int]]()  # (zone, generation) → bytes
    for inode in volume.namespace.inodes.values():
        assert not inode.shadow, f"inode {inode.ino} holds overwritten blocks after a commit"
        for extent in inode.extents:
            if not extent.run.failed:
                live[extent.run.zone, inode.generation] += extent.blocks * BLOCK
    totals = Totals()
    for zone in volume.table.zones:
        if zone.kind is Kind.METADATA:
            continue
        assert not zone.pins, f"zone {zone.index} is pinned and nobody reads"
        assert not zone.reserved, f"zone {zone.index} has promises and nothing is staged"
        used = zone.write_pointer or not zone.active
        assert used, f"zone {zone.index} takes a slot, and nothing was ever written to it"
        for generation in {g for z, g in live if z == zone.index} | zone.live.keys():
            told, held = zone.live.get(generation, 0), live[zone.index, generation]
            assert told == held, (
                f"zone {zone.index} counts {told} live bytes of generation {generation}, "
                f"extents hold {held}"
            )
        assert zone.live_bytes == sum(zone.live.values()), f"zone {zone.index}: its shares differ"
        totals = Totals(*map(add, totals, zone.totals()))
    assert volume.table.totals == totals, "the totals are not the sum of the zones"


def _check_runs(volume: Volume) -> None:
    held: dict[Run, Counter[int]] = {}
    for inode in volume.namespace.inodes.values():
        end = 0
        for extent in inode.extents:
            assert extent.blocks > 0, f"inode {inode.ino} has an empty extent"
            assert extent.block >= end, f"inode {inode.ino} has extents that overlap"
            end = extent.end
            held.setdefault(extent.run, Counter())[inode.ino] += extent.blocks
        assert inode.blocks == sum(e.blocks for e in inode.extents), f"inode {inode.ino}: blocks"
    for run, owners in held.items():
        assert run.owners == owners, f"{run} counts {run.owners}, extents say {dict(owners)}"
        assert run.held == owners.total(), f"{run} counts {run.held} blocks held"
    known = {run for runs in volume.namespace.runs.values() for run in runs.values()}
    assert known == {run for run in held if not run.failed}, "the index of runs is not what is held"
