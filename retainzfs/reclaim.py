"""Getting zones back: reset what is dead, copy only when nothing else gives space.

A zone is reset when nothing in it lives, nothing is promised or being read, and every record that
freed its bytes is durable. Collection moves the live bytes of the best victim with the writer's own
machinery (stage, append, commit), so it needs no crash rules of its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack

import trio

from retainzfs import errors, failpoints, layout
from retainzfs.committer import Committer
from retainzfs.device import Condition, Device
from retainzfs.lanes import Lane, Lanes, stored, usable
from retainzfs.layout import BLOCK, INLINE_SUMS_MAX, RUN_BLOCKS_MAX
from retainzfs.namespace import Extent, Inode, Namespace
from retainzfs.placement import FINISH_HORIZON
from retainzfs.stream import Stream
from retainzfs.zones import Kind, State, Zone

log = logging.getLogger(__name__)

SMALL = 8 * BLOCK  # keeps the score of a nearly dead zone finite
GAIN_LEAST = 4 * BLOCK  # copying a zone for less would run in circles over trailers
SETTLE = 3  # commits before one gives up, since others go on writing meanwhile
BATCH = 64  # zones that are reset at once: whoever waits for room shall not wait for thousands
COPIES = -1000  # lane keys of collection, below those of the kinds


class Reclaim:
    def __init__(
        self,
        device: Device,
        lanes: Lanes,
        stream: Stream,
        namespace: Namespace,
        committer: Committer,
        now_s: Callable[[], float],
        kept: Callable[[Inode], AbstractContextManager[None]],
    ) -> None:
        self.device = device
        self.lanes = lanes
        self.table = lanes.table
        self.trouble = lanes.trouble
        self.stream = stream
        self.namespace = namespace
        self.committer = committer
        self.now_s = now_s
        self.kept = kept  # keeps an inode from being freed
        self.resets = 0
        self.collections = 0
        self.copied = 0  # bytes
        # Zone → its resets and live bytes when it could not be emptied: damaged bytes.
        self._stubborn: dict[int, tuple[int, int]] = {}
        self._resetting = trio.Lock()
        self._collecting = trio.Lock()
        self._draining = False
        self._left: dict[int, int] = {}  # zone → live bytes that draining could not move

    async def reset_dead(self) -> int:
        """Reset every zone that may be; return how many."""
        async with self._resetting:
            done = 0
            while zones := self.table.resettable(self.committer.durable_round)[:BATCH]:
                for zone in zones:
                    self.table.seal(zone)  # nobody is offered its tail while it is being reset
                reset = await self._reset(zones)
                done += reset
                if reset < len(zones):
                    break  # the device has trouble: the rest can wait for the next round
            return done

    async def _reset(self, zones: list[Zone]) -> int:
        """Reset dead zones and return how many it became; the others are read-only then."""
        async with AsyncExitStack() as turns:
            for zone in zones:
                await turns.enter_async_context(self.lanes.turn(zone))
            failpoints.reach("reset-before")
            try:
                await self.device.reset([zone.index for zone in zones])
                done = zones
            except errors.RetainzError as error:
                done = await self._reset_singly(zones, error)
            failpoints.reach("reset-after")
        for zone in done:
            self.table.reset(zone)
            self.namespace.runs.pop(zone.index, None)
            self.committer.log(layout.ZoneRecord(zone.index, zone.epoch))
        self.resets += len(done)
        self.lanes.changed()
        return len(done)

    async def _reset_singly(self, zones: list[Zone], error: errors.RetainzError) -> list[Zone]:
        """A reset of zones failed: do what is left of it one by one, and return those that were
        reset. Which they are tells the zone report, not the error."""
        self.trouble.met(error)
        done = []
        for zone in zones:
            if self.trouble.stopped is not None:
                break
            if not self._is_reset(zone):
                try:
                    await self.device.reset([zone.index])
                except errors.RetainzError as again:
                    self.trouble.met(again)
            if self._is_reset(zone):
                done.append(zone)
            else:
                self.trouble.retire(zone)
        return done

    def _is_reset(self, zone: Zone) -> bool:
        try:
            return self.device.report_zone(zone.index).condition is Condition.EMPTY
        except errors.RetainzError as error:
            self.trouble.met(error)
            return False

    async def make_room(self, kind: Kind, nbytes: int) -> None:
        """Return when `nbytes` may be staged for a kind of zone. Raises NoSpace.

        First what is dead already, then copying; each step gains something or rules a zone out, so
        this ends. When nothing more is to be gained the tails of other kinds have to do.
        """
        async with self._collecting:
            commits = 0
            while not self.lanes.fits(kind, nbytes):
                if self.table.resettable(self.committer.round):
                    await self.committer.commit()
                    if await self.reset_dead():
                        continue
                if not self._hopeless(nbytes) and await self._collect_one():
                    continue
                if self.lanes.holds(nbytes):
                    return
                if commits == SETTLE:
                    if any(zone.dead and zone.pins for zone in self.table.zones):
                        await self.lanes.change()  # who reads there will soon be done
                        continue
                    raise errors.NoSpace(
                        f"{nbytes} bytes wanted; delete files, or wait for generations to retire"
                    )
                # What is overwritten keeps its old bytes until its commit, and a zone that is
                # being written cannot be collected.
                commits += 1
                await self.committer.commit(list(self.committer.dirty.values()))
                await self.reset_dead()

    def _hopeless(self, nbytes: int) -> bool:
        """Whether copying everything that can be copied would still not make room."""
        gains = sum(max(0, self._gain(zone)) for zone in self._candidates())
        waiting = sum(self.stream.staged().values())
        return self._usable() + gains < waiting + nbytes + self.table.capacity

    def drainable(self) -> bool:
        """Whether `drain` has something to do and nobody does it."""
        return not self._draining and self._to_drain() is not None

    async def drain(self) -> None:
        """Move what lives in read-only zones elsewhere, while there is room that nobody needs."""
        self._draining = True
        try:
            while self._to_drain() is not None:
                async with self._collecting:  # writers that wait for room have it between two zones
                    await self._drain_one()
        finally:
            self._draining = False

    def _to_drain(self) -> Zone | None:
        if self.committer.failed is not None:
            return None
        stuck = [z for z in self.table.stuck() if self._left.get(z.index) != z.live_bytes]
        if not stuck:
            return None
        # Copies take fresh zones. One more than they need stays, beside the emergency zone.
        room = self.lanes.room(Kind.COLLECTION) * BLOCK - self.table.capacity
        return next((z for z in stuck if stored(z.live_bytes) <= room), None)

    async def _drain_one(self) -> bool:
        zone = self._to_drain()
        if zone is None:
            return False
        lane = self.lanes.lane(COPIES - zone.kind, zone.kind, copies=True)
        self.lanes.copying = True
        try:
            moved, _ = await self._move_all(zone, lane)
            await self.committer.commit(moved)
        finally:
            self.lanes.copying = self.table.lent = False
        self._adopt(zone.kind)
        self._left[zone.index] = zone.live_bytes
        return True

    async def collect(self) -> dict[str, int]:
        """Reclaim now: reset what is dead, drain read-only zones, then copy while that frees
        whole zones."""
        before = (self.resets, self.copied)
        self.trouble.look_at_all()
        self._left.clear()
        async with self._collecting:
            await self.committer.commit()
            await self.reset_dead()
            while await self._drain_one():
                pass
            for _ in range(len(self.table.zones)):
                victim = self._victim()
                if victim is None or victim.live_bytes > victim.capacity // 2:
                    break
                if not await self._collect_one():
                    break
        return {"zones_reset": self.resets - before[0], "copied_bytes": self.copied - before[1]}

    def _victim(self) -> Zone | None:
        """The zone with the most dead space for the longest time per byte to copy."""
        now, horizon = self.now_s(), FINISH_HORIZON * self.lanes.unit_s()

        def score(zone: Zone) -> float:
            retire = max((self.lanes.retire_of(g) for g in zone.live), default=math.inf)
            span = max(min(retire - now, horizon), self.lanes.unit_s())
            return (zone.capacity - zone.live_bytes) * span / (zone.live_bytes + SMALL)

        zones = [zone for zone in self._candidates() if self._gain(zone) >= GAIN_LEAST]
        zones.sort(key=lambda zone: (-score(zone), zone.index))
        return next((zone for zone in zones if self._has_destination(zone)), None)

    def _candidates(self) -> list[Zone]:
        spare = self.lanes.spare()
        return [
            zone
            for zone in self.table.zones
            if zone.kind is not Kind.METADATA
            # The zone that copies go to; once it is full it is one like any other.
            and not (zone.kind is Kind.COLLECTION and zone.active)
            and zone.state in (State.FULL, State.CLOSED, State.OPEN)
            and not zone.reserved
            and zone.live_bytes
            and self._stubborn.get(zone.index) != (zone.epoch, zone.live_bytes)
            # To finish it strands its tail, which what is staged may count on.
            and (not zone.active or spare >= usable(zone.tail))
        ]

    async def _collect_one(self) -> bool:
        """Try to empty the best victim; False when there is none that gains space.

        A zone that cannot be emptied is tried again only when something in it has changed.
        """
        self.lanes.copying = True
        try:
            if self.lanes.spare() < 0:
                # Some of what is staged counts on the tail that the copies are about to take.
                await self.committer.commit(list(self.committer.dirty.values()))
            victim = self._victim()
            if victim is None:
                return False
            await self._empty(victim)
        finally:
            self.lanes.copying = self.table.lent = False
        return True

    async def _empty(self, victim: Zone) -> None:
        epoch = victim.epoch
        if victim.active:
            # Its own tail is no destination, and the copies may need its slot.
            await self.lanes.finish(victim)
            if victim.epoch != epoch:
                return  # its last bytes died meanwhile
        kind = victim.kind
        lane = self.lanes.lane(COPIES - victim.kind, victim.kind, copies=True)
        moved, stuck = await self._move_all(victim, lane)
        failpoints.reach("relocate-staged")
        self.collections += 1
        if stuck:
            log.warning(
                "zone %d cannot be emptied: bytes in it cannot be read; delete their files",
                victim.index,
            )
        await self.committer.commit(moved)
        failpoints.reach("relocate-committed")
        for _ in range(SETTLE):
            await self.reset_dead()
            if victim.epoch != epoch or not victim.dead:
                break
            await self.committer.commit()  # the last of it was freed meanwhile, or is being read
        self._adopt(kind)
        if victim.epoch == epoch and victim.live_bytes:
            self._stubborn[victim.index] = (epoch, victim.live_bytes)

    @staticmethod
    def _gain(zone: Zone) -> int:
        """Bytes won by moving the zone's live bytes elsewhere, trailers included."""
        return zone.capacity - zone.tail - stored(zone.live_bytes)

    def _usable(self) -> int:
        """Bytes that writers or the next collection can use as they are."""
        totals = self.table.totals
        return totals.free + totals.tail

    def _adopt(self, kind: Kind) -> None:
        """Let data fill what collection left of its zone, if the ledger has a slot for it."""
        if kind is Kind.COLLECTION:
            return
        for zone in self.table.active(Kind.COLLECTION):
            if zone.tail and not zone.reserved and self.table.has_slot(kind):
                self.table.adopt(zone, kind)

    def _has_destination(self, victim: Zone) -> bool:
        """Whether all copies have a place; else the emergency zone would be lost to some of them.

        Every file may get a run of its own, with a trailer.
        """
        runs = self.namespace.runs.get(victim.index, {}).values()
        files = len({ino for run in runs for ino in run.owners})
        blocks = victim.live_bytes // BLOCK
        trailers = min(files, blocks // INLINE_SUMS_MAX) + blocks // RUN_BLOCKS_MAX + 1
        room = sum(usable(zone.tail) for zone in self.table.active(Kind.COLLECTION))
        if self.table.empty:
            room += self.table.capacity // BLOCK
        return blocks + trailers <= room

    async def _move_all(self, victim: Zone, lane: Lane) -> tuple[list[Inode], bool]:
        """Return the inodes whose bytes were moved, and whether some bytes had to stay."""
        moved: dict[int, Inode] = {}
        stuck = False
        for run in list(self.namespace.runs.get(victim.index, {}).values()):
            for ino in list(run.owners):
                inode = self.namespace.inodes.get(ino)
                if inode is None or run.failed:
                    continue
                if inode.error is not None:
                    stuck = True
                    continue
                with self.kept(inode):
                    async with self.stream.stage(inode).lock:
                        for extent in [e for e in inode.extents if e.run is run]:
                            stuck |= not await self._move(inode, extent, lane)
                moved[ino] = inode
        return list(moved.values()), stuck

    async def _move(self, inode: Inode, extent: Extent, lane: Lane) -> bool:
        """Return False for bytes that cannot be read: they stay, and their file answers EIO."""
        try:
            if await self.stream.rewrite(inode, extent, lane):
                self.copied += extent.blocks * BLOCK
                self.committer.touch(inode)
        except errors.Unreadable:
            return False
        return True
