"""Zones for lanes: exact promises, one kind a zone, and no order of bytes lost."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from retainzfs.layout import BLOCK, INLINE_SUMS_MAX, RUN_BLOCKS_MAX, stored
from retainzfs.placement import Step
from retainzfs.planning import fit
from retainzfs.volume import ROOT
from retainzfs.zone import Kind, Zone
from tests.helpers import DIRECTORY, formatted, mounted, put, small_device, zones_of


@pytest.mark.pure
@given(st.integers(1, 2000), st.integers(1, RUN_BLOCKS_MAX))
def test_what_fits_is_the_most_that_fits(tail: int, want: int) -> None:
    blocks = fit(tail, want)
    assert 1 <= blocks <= want
    assert blocks + (blocks > INLINE_SUMS_MAX) <= tail
    more = blocks + 1
    assert blocks == want or more + (more > INLINE_SUMS_MAX) > tail


@pytest.mark.pure
@given(st.integers(0, 10**9))
def test_stored_bytes_hold_the_trailers_of_full_runs(nbytes: int) -> None:
    blocks = -(-nbytes // BLOCK)
    full, rest = divmod(blocks, RUN_BLOCKS_MAX)
    needed = full * (RUN_BLOCKS_MAX + 1) + rest + (rest > INLINE_SUMS_MAX)
    assert needed * BLOCK <= stored(nbytes)


@pytest.mark.volume
async def test_kinds_of_data_share_no_zone() -> None:
    device = await formatted(small_device())
    classes = {b"cache": Kind.CACHE, b"scratch": Kind.SCRATCH, b"output": Kind.OUTPUT}
    async with mounted(device) as volume:
        found: dict[Kind, int] = {}
        for name, kind in classes.items():
            directory = await volume.make(ROOT, name, DIRECTORY, 0, 0)
            await volume.setxattr(directory.ino, b"user.retainz.class", name)
            found[kind] = await put(volume, directory.ino, b"f", b"x" * 10_000)
        found[Kind.UNHINTED] = await put(volume, ROOT, b"plain", b"x" * 10_000)
        kept = await volume.make(ROOT, b"kept", DIRECTORY, 0, 0)
        await volume.setxattr(kept.ino, b"user.retainz.anchor", b"1")
        found[Kind.ANCHOR] = await put(volume, kept.ino, b"step-1.pt", b"x" * 10_000)
        run = await volume.make(ROOT, b"run", DIRECTORY, 0, 0)
        await volume.setxattr(run.ino, b"user.retainz.keep_last", b"1")
        found[Kind.FINITE] = await put(volume, run.ino, b"step-1.pt", b"x" * 10_000)
        await volume.syncfs()
        for kind, ino in found.items():
            assert {volume.table[z].kind for z in zones_of(volume, ino)} == {kind}


@pytest.mark.volume
async def test_finishing_waits_for_what_was_promised() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        ino = await put(volume, ROOT, b"f", b"x" * 10_000)
        await volume.fsync(ino)
        (index,) = zones_of(volume, ino)
        zone = volume.table[index]
        with trio.fail_after(5):
            await volume.lanes.finish(zone)
        assert zone.tail == 0
        other = await put(volume, ROOT, b"g", b"y" * 10_000)
        await volume.fsync(other)
        assert zones_of(volume, other).isdisjoint({index})
        assert volume.stream.write_errors == 0


@pytest.mark.volume
async def test_tails_are_filled_without_copies_when_no_zone_is_empty_and_no_slot_free() -> None:
    device = await formatted(small_device(zones=24, max_active=8))
    # Under policy `plan` a copy may come first, where tails would hold dead bytes up for long.
    async with mounted(device, policy="retainz") as volume:
        for number in range(64):
            # Lifetimes so far apart that each wants a zone of its own.
            name = b"run%d" % number
            directory = (await volume.make(ROOT, name, DIRECTORY, 0, 0)).ino
            await volume.setxattr(directory, b"user.retainz.cadence", b"60")
            await volume.setxattr(directory, b"user.retainz.keep_last", b"%d" % (10 * 2**number))
            await put(volume, directory, b"step-1.pt", b"x" * (100 << 10))
            if not volume.table.empty_available:
                break
        assert volume.table.active_data() == volume.table.limits.total
        tails = sum(zone.tail for zone in volume.table.partial(Kind.FINITE))
        assert tails > 200 << 10
        await put(volume, directory, b"step-2.pt", b"y" * (tails - (64 << 10)))
        assert (volume.reclaim.collections, volume.lanes.emergencies) == (0, 0)


@pytest.mark.volume
async def test_a_lane_that_is_planned_anew_leaves_no_zone_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A zone that was opened for the old plan would keep its slot, and nobody would write to it."""
    device = await formatted(small_device())
    async with mounted(device) as volume:
        run = await volume.make(ROOT, b"run", DIRECTORY, 0, 0)
        await volume.setxattr(run.ino, b"user.retainz.keep_last", b"1")
        ino = await put(volume, run.ino, b"step-1.pt", b"x" * 300_000)
        await volume.fsync(ino)
        lanes, lane = volume.lanes, volume.lane(volume.inode(ino))
        fresh = lanes._fresh

        async def late(kind: Kind, finish: int | None = None) -> Zone:
            monkeypatch.undo()
            await trio.lowlevel.checkpoint()
            size = 3 * volume.table.capacity
            request = lanes.request(lane, lanes.hint(lane), size)
            lanes.carry_out(lane, request, lanes.policy.plan(request, lanes.view(kind)))
            return await fresh(kind, finish)

        monkeypatch.setattr(lanes, "_fresh", late)
        lane.steps.clear()
        lane.steps.append(Step(None, volume.table.capacity))
        lane.zone, lane.left = None, 0
        place = await lanes.claim(lane, 8)
        active = [zone for zone in volume.table.zones if zone.active]
        assert [zone for zone in active if not (zone.write_pointer or zone.reserved)] == []
        volume.table.cancel(place.zone, place.zone.reserved)
