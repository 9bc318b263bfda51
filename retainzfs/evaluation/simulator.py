"""Replays a workload on a table of zones, in simulated time: no device, no bytes.

Policies, rules and ranks are those of a mount (retainzfs.placement); what a mount does with bytes,
this does with numbers. What is learned of hints is not: see `trust`.

Overhead is what the paper reports: the time average, in zones, of dead bytes that were not reset
yet (invalid) and of room in zones that are in use (tail).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from retainzfs.errors import UsageError
from retainzfs.evaluation.knowledge import PUNCTUAL, Knowledge
from retainzfs.evaluation.measures import DRIVE, Meter, Result
from retainzfs.evaluation.workload import BLOCK, Delete, Save, Workload
from retainzfs.placement import (
    Arrival,
    Plan,
    Policy,
    Request,
    Step,
    View,
    ZoneSummary,
    collection,
    survey,
    to_finish,
)
from retainzfs.placement.admission import Room, Rule, anywhere, fresh
from retainzfs.placement.plan import Market
from retainzfs.zone import Kind, Zone, summary
from retainzfs.zones import COLLECTION_ACTIVE, JOURNAL_ACTIVE, ZoneTable

GAIN_LEAST: Final = 4 * BLOCK  # copying a zone for less would run in circles
UNKNOWN: Final = -1  # generation of no stream


# Told before time passes: who is at what, and until when nothing will change.
Observer = Callable[["Simulator", float], None]


class Move(NamedTuple):
    generation: int
    into: int | None  # zone; None: a fresh one
    nbytes: int


class Simulator:
    """One replay of a workload. Copies go to tails of their kind first, or, without `to_tails`, to
    the zone that is held back for them only."""

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        rule: Rule,
        *,
        rank: collection.Rank = collection.by_dead_time,
        to_tails: bool = True,
        observer: Observer | None = None,
    ) -> None:
        self.workload, self.policy, self.rule = workload, policy, rule
        self.rank, self.costs = rank, DRIVE
        self.to_tails, self.observer = to_tails, observer
        ledger = workload.active + JOURNAL_ACTIVE + COLLECTION_ACTIVE
        self.table = ZoneTable(workload.capacity, workload.zones, ledger, 0)
        self.capacity = workload.capacity
        self.now = 0.0
        self.hints: dict[int, float] = {}
        self.streams: dict[int, int] = {}  # generation -> stream
        self.births: dict[int, float] = {}
        self.sizes: dict[int, tuple[int, int]] = {}  # generation -> bytes told, and expected
        self.where: dict[int, dict[int, int]] = defaultdict(dict)  # generation -> zone -> bytes
        self.plans: dict[int, deque[Step]] = defaultdict(deque)  # generation -> what is left of it
        self.known = [Knowledge(s.keep, s.cadence) for s in workload.streams]
        self.milestones = False
        self.result = Result(saves=workload.saves)
        self.meter = Meter(workload)
        self._host = self._logical = 0
        self._moved = 0  # bytes written and copied for the save that is under way
        self._ms = 0.0
        self._company: set[int] = set()  # generations that were not under way alone
        self._idle = 0  # bytes copied in idle time
        self._loan: int | None = None  # the generation that may take the zone that is held back
        self._parts: dict[int, tuple[int, float]] = {}  # generation -> the two above, so far
        self._deciding_ns = 0

    # The run

    def run(self) -> Result:
        for number, size in enumerate(self.workload.anchors):
            generation = UNKNOWN - 1 - number
            if not self._place(generation, UNKNOWN, size, math.inf):
                raise UsageError(
                    f"{self.workload.name}: the load is too high; its anchors do not fit"
                )
        self._host = self._logical = 0
        self.result.finishes = self.result.resets = self.result.copied_bytes = 0
        self._deciding_ns = 0
        corrections = deque(self.workload.corrections)
        for event in self.workload.events:
            self._pass(event.time)
            while corrections and corrections[0].time <= self.now:
                _, generation, hint = corrections.popleft()
                self.hints[generation] = hint
            if isinstance(event, Delete):
                self._delete(event.generation)
            elif not self._save(event):
                break
        else:
            self._pass(self.workload.end)
        return self._finished()

    def _pass(self, until: float) -> None:
        """Time goes on, and nothing happens meanwhile but what idle time is used for."""
        if until <= self.now:
            return
        if self.policy.compacts:
            self._compact()
        self.meter.passes(self.now, until, self.table.totals)
        if self.observer is not None:
            self.observer(self, until)
        self.now = until

    def _save(self, save: Save) -> bool:
        before = self._host
        self._moved, self._ms = self._parts.pop(save.generation, (0, self.costs.commit))
        if not self._place(save.generation, save.stream, save.size, save.hint, save.expected):
            return False
        self._logical += sum(save.shards)
        self._host += 0 if save.more else BLOCK  # the commit's journal block
        self._ms += (self._host - before) * self.costs.write
        if self._parts:
            self._company |= {save.generation, *self._parts}
        if save.more:
            self._parts[save.generation] = self._moved, self._ms
            return True
        del self.plans[save.generation]
        self.known[save.stream].company.append(save.generation in self._company)
        size = sum(self.where[save.generation].values())
        self.known[save.stream].saved(self.now, *self.sizes.pop(save.generation), size)
        self.meter.saved(self._moved, self._ms)
        return True

    def _finished(self) -> Result:
        result = self.result
        self.meter.finish(result, self.now)
        result.write_amplification = self._host / self._logical if self._logical else math.nan
        result.decision_us = self._deciding_ns / 1000 / max(1, result.saves_done)
        return result

    # Placement

    def retire_of(self, generation: int) -> float:
        """When a generation dies, as far as is known."""
        hint = self.hints[generation]
        stream = self.streams[generation]
        if self.policy.learns and stream != UNKNOWN:
            believed = self.known[stream].witness
            return believed.retirement(hint, self.births[generation], self.now)
        return hint

    def _place(
        self, generation: int, stream: int, size: int, hint: float, expected: int = 0
    ) -> bool:
        """Write so many bytes of a generation, of which so many are expected to come in all."""
        self.hints[generation], self.streams[generation] = hint, stream
        self.births.setdefault(generation, self.now)
        if stream != UNKNOWN:
            expected = self._expected(generation, max(size, expected))
            self.milestones |= math.isinf(hint)
        anchor = math.isinf(hint) and self.policy.apart
        kind = Kind.ANCHOR if anchor else Kind.FINITE
        steps = self.plans[generation]
        left = size
        while left:
            if not self._usable(steps, kind, generation):
                ahead = max(left, expected - size + left)
                plan = self._plan(kind, generation, left, ahead)
                if plan is None:
                    return False
                steps.clear()
                steps.extend(plan.steps)
                self._loan = generation if fresh(plan) > self.table.empty_available else None
            left -= self._carry_out(steps, kind, generation, left)
        self._host += size
        self._moved += size
        return True

    def _plan(self, kind: Kind, generation: int, size: int, ahead: int) -> Plan | None:
        """A plan for what is expected, or at least for what is there."""
        retire, stream = self.retire_of(generation), self.streams[generation]
        whole, part = (Request(n, retire, ahead, retire - self.now) for n in (ahead, size))
        self._finish_small()  # once: what collection then leaves would be finished without end
        # A loan that was not repaid comes first: without an empty zone only tails can take copies.
        while self.table.lent and not self.table.empty and self._collect():
            pass
        while True:
            self._adopt()
            started = time.thread_time_ns()
            view, room = self._view(kind), self._room(stream)
            # A loan is repaid by this very save: if it ends as it is told, and before another.
            lendable = room if self._certain(generation) else Room(0)
            plan = self.rule.first(self.policy, whole, view, lendable)
            if plan is None and ahead > size:
                plan = self.rule.first(self.policy, part, view, Room(0))  # no loan for a part
            self._deciding_ns += time.thread_time_ns() - started
            if plan is not None:
                return plan
            if self._collect():
                continue
            view = self._view(kind)
            plans = (self.rule.last(self.policy, request, view, room) for request in (whole, part))
            return next((plan for plan in plans if plan is not None), self._last_resort(size))

    def _certain(self, generation: int) -> bool:
        """Whether this save will end as it is told, and before another one begins."""
        stream = self.streams[generation]
        return stream == UNKNOWN or (self.known[stream].reliable and not self._parts)

    def _last_resort(self, size: int) -> Plan | None:
        kinds = Kind.FINITE, Kind.ANCHOR, Kind.COLLECTION
        tails = [(zone.index, zone.tail) for kind in kinds for zone in self.table.partial(kind)]
        return anywhere(size, [*tails, *[(None, self.capacity)] * self.table.empty_available])

    def _expected(self, generation: int, told: int) -> int:
        """Bytes that are to come of a generation, when so many are told."""
        expected = self.known[self.streams[generation]].expects(told)
        self.sizes.setdefault(generation, (told, expected))
        return told if expected == told else expected - sum(self.where[generation].values())

    def _usable(self, steps: deque[Step], kind: Kind, generation: int) -> bool:
        """Whether a plan can go on: others may have taken what it counted on."""
        if not steps:
            return False
        if steps[0].zone is None:
            borrows = self._loan == generation and self._certain(generation) and self.table.empty
            return bool(self.table.empty_available or borrows)
        zone = self.table[steps[0].zone]
        return zone.partial and zone.kind is self.table.group(kind)

    def _view(self, kind: Kind) -> View:
        if kind is Kind.FINITE and self.policy.mingles and not self.milestones:
            for zone in self.table.partial(Kind.ANCHOR):
                self.table.adopt(zone, Kind.FINITE)
        return survey(
            self.table,
            kind,
            self.retire_of,
            self.now,
            arrivals=self._arrivals(),
            milestones=self.milestones or not self.policy.apart,
        )

    def _arrivals(self) -> list[Arrival]:
        return [coming for known in self.known if (coming := known.next(self.now)) is not None]

    def _room(self, stream: int) -> Room:
        reserve = int(self.table.empty > self.table.empty_available)
        if stream == UNKNOWN:
            return Room(0)
        if not self.known[stream].deletes_in_time:
            return Room(reserve)
        # Its generations that are due: those that the save will retire.
        due = {
            generation
            for generation in self.where
            if self.streams[generation] == stream
            and self.retire_of(generation) <= self.now + PUNCTUAL
        }
        zones = {zone for generation in due for zone in self.where[generation]}
        return Room(reserve, any(self.table[z].live.keys() <= due for z in zones))

    def _carry_out(self, steps: deque[Step], kind: Kind, generation: int, size: int) -> int:
        """As much of these bytes as the first step takes; what it has left is for the next."""
        step = steps.popleft()
        if step.zone is None:
            loser = None if step.finish is None else self.table[step.finish]
            if loser is not None and loser.partial and not self.table.has_slot(kind):
                self._finish(loser)
            if not self.table.empty_available:
                self.table.lent = True
                self.result.borrowed += 1
            zone = self._fresh(kind, step.tag)
        else:
            zone = self.table[step.zone]
        nbytes = min(step.nbytes, zone.tail, size)
        self._put(zone, generation, nbytes)
        if nbytes < step.nbytes and zone.tail:
            steps.appendleft(Step(zone.index, step.nbytes - nbytes))
        return nbytes

    def _put(self, zone: Zone, generation: int, nbytes: int) -> None:
        self.table.reserve(zone, nbytes)
        self.table.add_live(zone, generation, nbytes)
        self.table.written(zone, nbytes)
        inside = self.where[generation]
        inside[zone.index] = inside.get(zone.index, 0) + nbytes

    def _fresh(self, kind: Kind, tag: int) -> Zone:
        zone = self.table.acquire(kind)
        while zone is None:
            milestones = self.milestones or not self.policy.apart
            loser = to_finish(self.table, kind, self.retire_of, self.now, milestones=milestones)
            assert loser is not None, "nothing is being written, so there is a zone to finish"
            self._finish(loser)
            zone = self.table.acquire(kind)
        zone.tag = tag
        return zone

    def _finish(self, zone: Zone) -> None:
        self.result.stranded_bytes += zone.tail
        self.table.finish(zone)
        self.result.finishes += 1
        self._ms += self.costs.finish

    def _finish_small(self) -> None:
        """What some policies do before they look for a zone."""
        least = self.policy.finish_below * self.capacity
        if least:
            for zone in self.table.active(Kind.FINITE):
                if 0 < zone.tail < least:
                    self._finish(zone)

    # Reclaim

    def _delete(self, generation: int) -> None:
        for index, nbytes in self.where.pop(generation, {}).items():
            self.table.drop_live(self.table[index], generation, nbytes, 0)
        stream = self.streams[generation]
        late, life = self.now - self.hints[generation], self.now - self.births[generation]
        self.known[stream].deleted(late, life)
        self._reset()

    def _reset(self) -> None:
        for zone in self.table.resettable(0):
            self.table.reset(zone)
            self.result.resets += 1
            self._ms += self.costs.reset

    def _collect(self) -> bool:
        """Empty the best victim; False when there is none that gains room."""
        victims = [
            self._victim(z)
            for z in self.table.zones
            if z.live_bytes
            and not (z.kind is Kind.COLLECTION and z.active)
            and z.capacity - z.live_bytes - z.tail >= GAIN_LEAST
        ]
        order = collection.ranked(victims, self.now, 1.0, self.rank)
        for zone in [self.table[victim.zone] for victim in order]:
            moves = self._moves(zone, self._tails(zone))
            if moves is None and self._in_the_way(zone):
                moves = self._moves(zone, self._tails(zone))
            if moves is not None:
                self._empty(zone, moves)
                return True
        return False

    def _in_the_way(self, victim: Zone) -> bool:
        """Whether only what copies have begun for another kind kept the victim from being emptied;
        it is finished then. That strands its tail, so the victim has to gain more."""
        begun = next(iter(self.table.partial(Kind.COLLECTION)), None)
        if begun is None or not self.table.empty or self._kind(begun) is self._kind(victim):
            return False
        gains = self.capacity - victim.live_bytes - victim.tail >= begun.tail + GAIN_LEAST
        if gains:
            self._finish(begun)
        return gains

    def _latest(self, zone: Zone) -> float:
        return max(self.retire_of(generation) for generation in zone.live)

    def _tails(self, victim: Zone) -> list[Zone]:
        """Where the pieces of a victim may go: zones of its kind, and what copies have begun."""
        kind = self._kind(victim)
        own = self.table.partial(kind) if self.to_tails else []
        zones = [*own, *self.table.partial(Kind.COLLECTION)]
        return [z for z in zones if z is not victim and self._kind(z) is kind]

    def _kind(self, zone: Zone) -> Kind:
        if not self.policy.apart:
            return Kind.FINITE
        if zone.kind is not Kind.COLLECTION:
            return zone.kind
        if self.policy.mingles and not self.milestones:
            return Kind.FINITE
        return Kind.ANCHOR if math.isinf(self._latest(zone)) else Kind.FINITE

    def _pieces(self, zone: Zone) -> list[collection.Piece]:
        pieces = (collection.Piece(g, n, self.retire_of(g)) for g, n in zone.live.items())
        return sorted(pieces, key=lambda piece: (-piece.size, piece.generation))

    def _moves(self, victim: Zone, tails: list[Zone]) -> list[Move] | None:
        """How to empty a zone into these tails, and what they do not hold into a fresh one (None
        as its index). None if that is not possible."""
        seen = {zone.index: self._seen(zone) for zone in tails}
        begun = self.table.partial(Kind.COLLECTION)
        fresh = self.capacity if self.table.empty and all(z.index in seen for z in begun) else 0
        moves: list[Move] = []
        for piece in self._pieces(victim):
            left = piece.size
            for index, nbytes in collection.into_tails(
                piece, seen, self.capacity, 1.0, apart=self.policy.apart
            ):
                moves.append(Move(piece.generation, index, nbytes))
                left -= nbytes
            # What copies have begun is filled before they take a fresh zone.
            if left > fresh or (left and any(seen[zone.index].tail for zone in begun)):
                return None
            if left:
                moves.append(Move(piece.generation, None, left))
                fresh -= left
        return moves

    def _empty(self, victim: Zone, moves: list[Move]) -> None:
        copies = None
        for generation, index, nbytes in moves:
            if index is None and copies is None:
                copies = self.table.acquire(Kind.COLLECTION)
                assert copies is not None, "what copies have begun is among the tails"
                self.table.lent = True
            into = copies if index is None else self.table[index]
            assert into is not None, "a zone was opened"
            self._copy(generation, victim, into, nbytes)
        self._reset()
        self._adopt()

    def _adopt(self) -> None:
        """What copies have left of their zone is for data of that kind."""
        for zone in self.table.active(Kind.COLLECTION):
            if zone.partial and self.table.has_slot(kind := self._kind(zone)):
                self.table.adopt(zone, kind)

    def _copy(self, generation: int, source: Zone, into: Zone, nbytes: int) -> None:
        self._put(into, generation, nbytes)
        self.table.drop_live(source, generation, nbytes, 0)
        inside = self.where[generation]
        inside[source.index] -= nbytes
        if not inside[source.index]:
            del inside[source.index]
        self._host += nbytes
        self._moved += nbytes
        self._ms += nbytes * self.costs.read
        self.result.copied_bytes += nbytes

    def _compact(self) -> None:
        """Move zones that are mostly dead whole into other tails, where that pays by itself."""
        while (move := self._idle_move()) is not None:
            victim, into = move
            if self._idle + victim.live > collection.IDLE_SHARE * self._logical:
                break
            self._idle += victim.live
            moves = self._moves(self.table[victim.zone], [] if into is None else [self.table[into]])
            assert moves is not None, "it fits, or an empty zone is there"
            self._empty(self.table[victim.zone], moves)

    def _idle_move(self) -> tuple[collection.Victim, int | None] | None:
        fresh = [None] if self.table.empty and not self.table.active(Kind.COLLECTION) else []
        choices = (
            (self._victim(zone), [*(self._seen(tail) for tail in self._tails(zone)), *fresh])
            for zone in self.table.zones
            if zone.live_bytes and zone.kind is Kind.FINITE
        )
        market = Market(self.capacity, self.now, self._arrivals())
        return collection.idle_move(choices, market, 1.0)

    def _victim(self, zone: Zone) -> collection.Victim:
        retire = max(self._latest(zone), self.now + 1.0)
        return collection.Victim(zone.index, self.capacity, zone.live_bytes, retire, zone.tail)

    def _seen(self, zone: Zone) -> ZoneSummary:
        return summary(zone, self.retire_of, self.now)
