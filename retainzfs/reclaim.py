"""Getting zones back: reset what is dead, copy only when nothing else gives space.

A zone is reset when nothing in it lives, nothing is promised or being read, and every record that
freed its bytes is durable. Collection empties the zone that is ranked first (copying.py moves its
bytes) and resets it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

import trio

from retainzfs import errors, failpoints, layout
from retainzfs.committer import Committer
from retainzfs.copying import Copier, Routes
from retainzfs.device import Condition, Device
from retainzfs.lanes import Lanes
from retainzfs.layout import BLOCK, stored
from retainzfs.namespace import Namespace
from retainzfs.placement import collection
from retainzfs.planning import usable
from retainzfs.stream import Stream
from retainzfs.zone import GAIN_LEAST, Kind, Zone, summary

log = logging.getLogger(__name__)

SETTLE = 3  # commits before one gives up, since others go on writing meanwhile
BATCH = 64  # zones that are reset at once: whoever waits for room shall not wait for thousands


class Reclaim:
    def __init__(
        self,
        device: Device,
        lanes: Lanes,
        stream: Stream,
        namespace: Namespace,
        committer: Committer,
        copier: Copier,
        now_s: Callable[[], float],
        rank: collection.Rank,
    ) -> None:
        self.device = device
        self.lanes = lanes
        self.table = lanes.table
        self.trouble = lanes.trouble
        self.stream = stream
        self.namespace = namespace
        self.committer = committer
        self.copier = copier
        self.now_s = now_s
        self.rank = rank
        self.reaping: Callable[[], bool] = lambda: False  # retired generations are being deleted
        self.resets = 0
        self.collections = 0
        self.compactions = 0  # zones moved in idle time
        self.compacted = 0  # bytes of these
        # Zone → its resets and live bytes when it could not be emptied: damaged bytes.
        self._stubborn: dict[int, tuple[int, int]] = {}
        self._resetting = trio.Lock()
        self.turn = trio.Lock()  # of whoever gains room
        self._draining = False
        self._left: dict[int, int] = {}  # zone → live bytes that draining could not move

    async def reset_dead(self) -> int:
        """Reset every zone that may be; return how many."""
        async with self._resetting:
            done = 0
            while dead := self.table.resettable(self.committer.durable_round):
                # Thousands may be dead: they are not all looked at for each batch.
                for start in range(0, len(dead), BATCH):
                    durable = self.committer.durable_round
                    batch = dead[start : start + BATCH]
                    zones = [zone for zone in batch if self.table.may_reset(zone, durable)]
                    for zone in zones:
                        self.table.seal(zone)  # nobody is offered its tail while it is being reset
                    reset = await self._reset(zones) if zones else 0
                    done += reset
                    if reset < len(zones):
                        return done  # the device has trouble: the rest can wait for the next round
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
        async with self.turn:
            commits = 0
            while not self.lanes.fits(kind, nbytes):
                if await self.gain(nbytes):
                    continue
                if self.lanes.holds(nbytes):
                    return
                if commits == SETTLE:
                    if self.table.awaited():
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

    async def gain(self, nbytes: int = 0) -> bool:
        """Gain some room: from what is dead, from what is about to be, or by emptying one zone.
        False when there is nothing to gain, or too little for so many bytes. The caller holds the
        turn."""
        if self.table.resettable(self.committer.round):
            await self.committer.commit()
            if await self.reset_dead():
                return True
        if self.reaping():
            await self.lanes.change()
            return True
        return not self._hopeless(nbytes) and await self._collect_one()

    def _hopeless(self, nbytes: int) -> bool:
        """Whether copying everything that can be copied would still not make room."""
        gains = sum(max(0, zone.gain) for zone in self.candidates())
        waiting = sum(self.stream.staged().values())
        kept = 0 if self.table.borrowed else self.table.capacity
        return self._usable() + gains < waiting + nbytes + kept

    def drainable(self) -> bool:
        """Whether `drain` has something to do and nobody does it."""
        return not self._draining and self._to_drain() is not None

    async def drain(self) -> None:
        """Move what lives in read-only zones elsewhere, while there is room that nobody needs."""
        self._draining = True
        try:
            while self._to_drain() is not None:
                async with self.turn:  # writers that wait for room have it between two zones
                    await self._drain_one()
        finally:
            self._draining = False

    def _to_drain(self) -> Zone | None:
        if self.committer.failed is not None or self.table.borrowed:
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
        self.lanes.copying = True
        try:
            moved, _ = await self.copier.move(zone, self.copier.apart())
            await self.committer.commit(moved)
        finally:
            self.lanes.copying = self.table.lent = False
        self.copier.adopt(zone.kind)
        self._left[zone.index] = zone.live_bytes
        return True

    async def collect(self) -> dict[str, int]:
        """Reclaim now: reset what is dead, drain read-only zones, then copy while that frees
        whole zones."""
        resets, copied = self.resets, self.copier.copied
        self.trouble.look_at_all()
        self._left.clear()
        async with self.turn:
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
        return {
            "zones_reset": self.resets - resets,
            "copied_bytes": self.copier.copied - copied,
        }

    def _victim(self) -> Zone | None:
        """The best zone to empty that can be emptied."""
        victims = [self.victim(zone) for zone in self.candidates() if zone.gain >= GAIN_LEAST]
        unit = self.lanes.unit_s()
        for victim in collection.ranked(victims, self.now_s(), unit, self.rank):
            zone = self.table[victim.zone]
            if self.copier.routes(zone) is not None:
                return zone
        return None

    def victim(self, zone: Zone) -> collection.Victim:
        """What is known of a zone that could be emptied."""
        seen = summary(zone, self.lanes.retire_of, self.now_s(), self.lanes.unit_s())
        return collection.Victim(
            zone.index, zone.capacity, zone.live_bytes, seen.retire_max, zone.tail
        )

    def candidates(self) -> list[Zone]:
        """Zones that could be emptied, active ones whether that gains something or not."""
        spare = self.lanes.spare()
        return [
            zone
            for zone in self.table.loose()
            if not zone.reserved
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
            routes = None if victim is None else self.copier.routes(victim)
            if victim is None or routes is None:
                return False
            self.collections += 1
            await self._empty(victim, routes)
        finally:
            self.lanes.copying = self.table.lent = False
        return True

    async def move(self, victim: Zone, into: Zone | None, stop: Callable[[], bool]) -> bool:
        """Move a zone whole into the tail of another, or to a fresh zone, though nobody needs the
        room. False when it could not be done, or `stop` ended it. The caller holds the turn."""
        self.lanes.copying = True
        copied = self.copier.copied
        try:
            tails = [] if into is None else [into]
            routes = self.copier.routes(victim, tails, fresh=into is None)
            if routes is None:
                return False
            epoch = victim.epoch
            await self._empty(victim, routes, stop)
        finally:
            self.lanes.copying = self.table.lent = False
            self.compacted += self.copier.copied - copied
        self.compactions += victim.epoch != epoch
        return victim.epoch != epoch

    async def _empty(
        self, victim: Zone, routes: Routes, stop: Callable[[], bool] = lambda: False
    ) -> None:
        epoch = victim.epoch
        if victim.active:
            # Its own tail is no destination, and the copies may need its slot.
            await self.lanes.finish(victim)
            if victim.epoch != epoch:
                return  # its last bytes died meanwhile
        kind = victim.kind
        moved, stuck = await self.copier.move(victim, routes, stop)
        failpoints.reach("relocate-staged")
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
        self.copier.adopt(kind)
        if victim.epoch == epoch and victim.live_bytes and not stop():
            self._stubborn[victim.index] = (epoch, victim.live_bytes)

    def _usable(self) -> int:
        """Bytes that writers or the next collection can use as they are."""
        totals = self.table.totals
        return totals.free + totals.tail
