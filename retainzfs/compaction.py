"""Moving zones that are mostly dead together while nobody writes.

Nobody needs the room yet; it pays all the same where a zone would otherwise stay occupied for long
for a few bytes (`collection.gain`). One zone is moved at a time, and a write that comes is let in
at once: what was moved by then stays moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import trio

from retainzfs import errors
from retainzfs.lanes import Lanes
from retainzfs.placement import collection
from retainzfs.placement.plan import TAIL_WORTH, Market
from retainzfs.reclaim import Reclaim
from retainzfs.zones import Kind, Zone, summary

IDLE = 0.25  # E without a write or a sync: a save that has paused for less goes on
LOOK_S = 1.0  # between two looks at the clock, at least


class Compaction:
    """`compacts`: whether the policy asks for it at all."""

    def __init__(
        self, lanes: Lanes, reclaim: Reclaim, now_s: Callable[[], float], *, compacts: bool
    ) -> None:
        self.lanes = lanes
        self.table = lanes.table
        self.reclaim = reclaim
        self.now_s = now_s
        self.compacts = compacts
        self._working = 0  # writes and syncs that are under way
        self._worked_s = now_s()  # when the last one ended
        self._ended = trio.Event()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Somebody writes or syncs."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            self._worked_s = self.now_s()

    async def run(self) -> None:
        """Look now and then whether there is something to do, until `end`."""
        while self.compacts and not self._ended.is_set():
            with trio.move_on_after(max(LOOK_S, IDLE * self.lanes.unit_s())):
                await self._ended.wait()
            with suppress(errors.RetainzError):  # the volume has stopped, and has told why
                await self.compact()

    async def end(self) -> None:
        """Return when nothing is being moved any more."""
        self._ended.set()
        async with self.reclaim.turn:
            pass

    def _disturbed(self) -> bool:
        return self._working > 0 or self._ended.is_set()

    def _idle(self) -> bool:
        if self._disturbed() or self.now_s() - self._worked_s < IDLE * self.lanes.unit_s():
            return False
        # A device with zones that failed shall wear no faster.
        worn = self.table.worn or bool(self.lanes.trouble.suspect)
        return not worn and not self.table.borrowed and self.lanes.trouble.stopped is None

    async def compact(self) -> None:
        """Move zones while it pays and nobody writes."""
        while self._idle():
            async with self.reclaim.turn:
                best = self._best() if self._idle() else None
                if best is None or not await self.reclaim.move(*best, self._disturbed):
                    return

    def _best(self) -> tuple[Zone, Zone | None] | None:
        """The move that gains most, (victim, destination); None as a destination is a fresh zone.
        Ties go to the lowest zones."""
        least = collection.IDLE_GAIN * self.lanes.unit_s()
        best, most = None, -math.inf
        for found, victim, into in self._moves():
            if found >= least and found > most:
                best, most = (victim, into), found
        return best

    def _moves(self) -> Iterator[tuple[float, Zone, Zone | None]]:
        now, unit, retire_of = self.now_s(), self.lanes.unit_s(), self.lanes.retire_of
        arrivals = self.lanes.foresight.arrivals()
        market = Market(self.table.capacity, now, arrivals, TAIL_WORTH)
        copies = self.table.active(Kind.COLLECTION)
        for zone in self.reclaim.candidates():
            if zone.live_bytes > zone.capacity // 2 or zone.kind is not Kind.FINITE:
                continue
            last = self.reclaim.latest(zone)
            victim = collection.Victim(
                zone.index, zone.capacity, zone.live_bytes, max(last, now + unit)
            )
            for other in self.reclaim.copier.tails(zone):
                into = summary(other, retire_of, now, unit)
                yield collection.gain(victim, zone.tail, last, into, market), zone, other
            if self.table.held_back and not copies:
                yield collection.gain(victim, zone.tail, last, None, market), zone, None
