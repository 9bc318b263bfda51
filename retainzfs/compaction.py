"""Moving zones that are mostly dead together while nobody writes.

Nobody needs the room yet; it pays all the same where a zone would otherwise stay occupied for long
for a few bytes (`collection.gain`). One zone is moved at a time, and a write that comes is let in
at once: what was moved by then stays moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import trio

from retainzfs import errors
from retainzfs.lanes import Lanes
from retainzfs.placement import collection
from retainzfs.placement.plan import Market
from retainzfs.reclaim import Reclaim
from retainzfs.zone import Kind, Zone, ZoneSummary, summary

IDLE = 0.25  # E without a write or a sync: a save that has paused for less goes on
LOOK_S = 1.0  # between two looks at the clock, at least


class Compaction:
    """`logical`: bytes that programs wrote. `compacts`: whether the policy asks for it at all."""

    def __init__(
        self,
        lanes: Lanes,
        reclaim: Reclaim,
        now_s: Callable[[], float],
        logical: Callable[[], int],
        *,
        compacts: bool,
    ) -> None:
        self.lanes = lanes
        self.table = lanes.table
        self.reclaim = reclaim
        self.now_s = now_s
        self.logical = logical
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
        None if no move pays, or more would be copied than hints that prove wrong may cost."""
        table, unit = self.table, self.lanes.unit_s()
        fresh = [None] if table.held_back and not table.active(Kind.COLLECTION) else []
        choices = (
            (self.reclaim.victim(zone), [*self._tails(zone), *fresh])
            for zone in self.reclaim.candidates()
            if zone.kind is Kind.FINITE
        )
        market = Market(table.capacity, self.now_s(), self.lanes.foresight.arrivals())
        move = collection.idle_move(choices, market, unit)
        if move is None:
            return None
        victim, into = move
        if self.reclaim.compacted + victim.live > collection.IDLE_SHARE * self.logical():
            return None
        return table[victim.zone], None if into is None else table[into]

    def _tails(self, victim: Zone) -> Iterator[ZoneSummary]:
        now, unit = self.now_s(), self.lanes.unit_s()
        for zone in self.reclaim.copier.tails(victim):
            yield summary(zone, self.lanes.retire_of, now, unit)
