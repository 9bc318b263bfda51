"""Where the next bytes of a lane go: plans become promises, byte-exact and one at a time.

A promise in the zone table is made only when a run is about to be appended. Plans are followed and
zones are changed under one lock, so two lanes never count on the same tail.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import trio

from retainzfs import errors, failpoints, placement
from retainzfs.device import Device
from retainzfs.layout import BLOCK, INLINE_SUMS_MAX, stored
from retainzfs.planning import (
    DATA_KINDS,
    HINTED,
    Foresight,
    Hint,
    Lane,
    Planning,
    fit,
    of_files,
    usable,
)
from retainzfs.trouble import Trouble
from retainzfs.zone import Kind, Zone
from retainzfs.zones import ZoneTable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Place(NamedTuple):
    """A promise: `blocks` data blocks at block `start` of the zone."""

    zone: Zone
    start: int
    blocks: int


class Lanes(Planning):
    """Gives lanes their zones."""

    def __init__(
        self,
        device: Device,
        table: ZoneTable,
        trouble: Trouble,
        policy: placement.Policy,
        foresight: Foresight,
        now_s: Callable[[], float],
    ) -> None:
        super().__init__(table, policy, foresight, now_s)
        self.device = device
        self.trouble = trouble
        trouble.finish = self.finish
        self.emergencies = 0  # writes that found no other zone than the emergency zone
        self._lock = trio.Lock()
        self._turns: dict[int, trio.Lock] = {}
        self._changed = trio.Event()

    def changed(self) -> None:
        """Zones filled, were finished, reset or read to the end: who waits for one looks again."""
        self._changed.set()
        self._changed = trio.Event()

    async def change(self) -> None:
        """Return when zones have changed."""
        await self._changed.wait()

    async def claim(self, lane: Lane, want: int) -> Place:
        """Promise the lane room for up to `want` data blocks. Raises NoSpace."""
        async with self._lock:
            while True:
                zone = self._current(lane, want)
                if zone is not None:
                    break
                await self._advance(lane, want * BLOCK)
            # What a plan has next is next when its step is carried out, not when the zone is full.
            tail = min(zone.tail, lane.left) if lane.steps else zone.tail
            blocks = fit(tail // BLOCK, want)
            start = (zone.write_pointer + zone.reserved) // BLOCK
            nbytes = (blocks + (blocks > INLINE_SUMS_MAX)) * BLOCK
            self.table.reserve(zone, nbytes)
            lane.placed += nbytes
            lane.left = max(0, lane.left - nbytes)
            lane.used_s = self.now_s()
            if zone.kind is Kind.COLLECTION and not lane.copies:
                lane.zone = None  # a last resort, each time anew
            return Place(zone, start, blocks)

    def _current(self, lane: Lane, want: int) -> Zone | None:
        if lane.zone is None:
            return None
        zone = self.table[lane.zone]
        reset = zone.epoch != lane.epoch
        done = lane.steps and lane.left < BLOCK
        if zone.tail < BLOCK or reset or done or (lane.copies and not self._lets_in(zone, want)):
            lane.zone = None
            return None
        return zone

    def _lets_in(self, zone: Zone, want: int) -> bool:
        """Whether copies of `want` blocks may go to a zone: nothing that is staged counts on it."""
        return zone.kind is Kind.COLLECTION or self.spare() > stored(want * BLOCK) // BLOCK

    @staticmethod
    def _take(lane: Lane, zone: Zone) -> None:
        """The lane goes on in this zone."""
        lane.zone, lane.epoch = zone.index, zone.epoch

    async def _advance(self, lane: Lane, need: int) -> None:
        """Give the lane its next zone, or none if it was planned anew while one was waited for."""
        hint = self.hint(lane)
        # Copies go where collection has planned them, or to a zone of their own.
        if not lane.steps and not lane.copies:
            self._plan(lane, hint, need)
        plan = lane.steps
        zone = await self._next(lane, hint, need)
        if lane.steps is plan and zone is not None:
            self._take(lane, zone)
        elif zone is not None and zone.active and zone.idle and not zone.write_pointer:
            self.table.release(zone)  # nobody else would ever write or finish it

    async def _next(self, lane: Lane, hint: Hint, need: int) -> Zone | None:
        """Take the next steps of the lane's plan until one has a zone; None: plan anew."""
        plan = lane.steps
        while plan:
            step = plan.popleft()
            lane.left = step.nbytes
            if step.zone is None:
                break
            zone = self.table[step.zone]
            mine = zone.kind is self.table.group(hint.kind)
            if zone.tail >= BLOCK and (mine if not lane.copies else zone.partial):
                if not lane.copies or self._lets_in(zone, need // BLOCK):
                    return zone
            elif not lane.copies:
                plan.clear()
                return None
        else:
            lane.left = 0
            return await self._last_resort(lane, hint)
        try:
            fresh = await self._fresh(hint.kind, step.finish)
        except errors.NoSpace:
            if lane.steps is not plan:
                return None
            plan.clear()
            lane.left = 0
            return await self._last_resort(lane, hint)
        fresh.tag = step.tag
        return fresh

    def _plan(self, lane: Lane, hint: Hint, need: int) -> None:
        """Plan what nobody has admitted, or what is more than was admitted."""
        size = max(stored(need), of_files(hint.size, hint.files) - lane.placed)
        if hint.kind not in HINTED:
            size = stored(need)
        request, view = self.request(lane, hint, size), self.view(hint.kind, lane)
        tries = [view, replace(view, scarce=True), self.view(hint.kind)]
        for seen in tries:
            plan = self.decide(partial(self._planned, request, seen, hint.kind))
            if plan.steps:
                break
        self.carry_out(lane, request, plan)

    def _planned(
        self, request: placement.Request, view: placement.View, kind: Kind
    ) -> placement.Plan:
        if kind in HINTED:
            return self.policy.plan(request, view)
        return placement.fill(request, view)

    async def _fresh(self, kind: Kind, finish: int | None = None) -> Zone:
        """Open an empty zone; at the limit of active zones, finish one for it. Raises NoSpace,
        also when the tail of that one is needed for what is staged."""
        while True:
            zone = self.table.acquire(kind)
            if zone is not None:
                return zone
            loser = self.table[finish] if finish is not None else None
            finish = None
            if loser is None or not loser.active or loser.sealed:
                loser = placement.to_finish(
                    self.table,
                    kind,
                    self.retire_of,
                    self.now_s(),
                    unit=self.unit_s(),
                    milestones=self.foresight.milestones() or not self.policy.apart,
                )
            if loser is None:
                await self._changed.wait()
            elif self.spare() < (usable(loser.tail) if loser.partial else 0):
                raise errors.NoSpace("what is staged needs the tails of the active zones")
            else:
                await self.finish(loser)

    async def finish_small(self) -> None:
        """Finish the zones that have less room left than the policy wants, if nothing needs it."""
        least = self.policy.finish_below * self.table.capacity
        if least:
            for zone in self.table.partial(Kind.FINITE):
                if zone.tail < least and self.spare() >= usable(zone.tail):
                    await self.finish(zone)

    async def finish(self, zone: Zone) -> None:
        """Finish the zone once what is queued for it is written, or has failed."""
        self.table.seal(zone)
        async with self.turn(zone):
            while zone.reserved:
                await self._changed.wait()
            if zone.active:
                failpoints.reach("finish-before")
                await self.trouble.conclude(zone)
                failpoints.reach("finish-after")
            self.trouble.suspect.discard(zone.index)
        self.changed()

    async def _last_resort(self, lane: Lane, hint: Hint) -> Zone:
        """No plan: any tail, even of a dead zone, then the emergency zone. Bytes that were accepted
        are not dropped for the sake of order. Raises NoSpace."""
        apart = {Kind.FINITE: Kind.ANCHOR, Kind.ANCHOR: Kind.FINITE}.get(hint.kind)
        kinds: list[Kind] = [Kind.COLLECTION]
        if not lane.copies:
            kinds = sorted(DATA_KINDS, key=lambda k: (k is not hint.kind, k is apart, k)) + kinds
        while True:
            for kind in kinds:
                for zone in self.table.active(kind):
                    if zone.tail >= BLOCK:
                        return zone
            if lane.copies or not self.table.resetting():
                break
            await self._changed.wait()
        if lane.copies and not (lane.reserve and not self.table.borrowed):
            raise errors.NoSpace("the tails that copies may take are used up")
        while True:
            zone_or_none = self.table.acquire(Kind.COLLECTION)
            if zone_or_none is not None:
                self.table.lent |= lane.copies
                self.emergencies += not lane.copies
                return zone_or_none
            full = [zone for zone in self.table.active(Kind.COLLECTION) if not zone.sealed]
            if full:
                await self.finish(full[0])
            else:
                await self._changed.wait()  # for its reset

    @asynccontextmanager
    async def turn(self, zone: Zone) -> AsyncIterator[None]:
        """Appends are submitted in the order of the promises, and no other command meets them.

        The lock is first come, first served, and nothing is awaited between promise and turn.
        """
        lock = self._turns.get(zone.index)
        if lock is None:
            lock = self._turns[zone.index] = trio.Lock()
        async with lock:
            yield

    async def opened(self, zone: Zone) -> None:
        """Count the zone as open, closing the longest unused one at the limit."""
        while not self.table.open(zone):
            idle = self.table.coldest_open()
            if idle is None:
                await self._changed.wait()
                continue
            self.table.close(idle)
            async with self.turn(idle):
                try:
                    await self.device.close_zone(idle.index)
                except errors.RetainzError as error:
                    self.trouble.distrust(idle, error)  # its trouble, not that of the one to open
