"""Policy `plan`, the default: the least zone-time for a whole generation, told exactly.

A zone is occupied until its last byte dies, so what a decision costs is known: bytes that die at D
cost C max(0, D - R) in a zone whose last byte dies at R, and C (D - t) in a fresh one. What it does
to later saves is the value of the tails that it leaves:

    V(u, R) = 0.95 min(u (R - t), max over the streams with t < a <= R of
                                  u l - C max(0, a + l - R))

with u bytes of tail, and of a stream its next save a and that one's lifetime l: a tail is worth
what it saves the stream that can use it best, and never more than it costs while it waits.

A plan fills some partial zones to the end, then whole fresh zones, and puts the remainder into one
more of either. All such plans are priced, cost less the value of all tails afterwards, and the
cheapest is taken. With `ahead` a beam of plans is followed through that many predicted saves.

Source: docs/design/placement.md, which has the reasons and the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Final, NamedTuple

from retainzfs.placement import Arrival, Plan, Policy, Request, Step, View, fill, finite

TAIL_WORTH: Final = 0.95  # flat from 0.90 to 1.00; above 1 tails are hoarded
FILLED_MOST: Final = 3  # partial zones filled to the end by one plan
MANY: Final = 8  # partial zones, from which on two have to do
BEAM: Final = 8  # plans that are followed through the predicted saves


class Tail(NamedTuple):
    """A partial zone, and what its tail is worth to later saves."""

    zone: int
    size: int  # bytes
    retire: float
    value: float  # byte-time


class Option(NamedTuple):
    """One way to place a generation: `filled` to the end, `fresh` whole zones, and the rest to
    `last`, or to one more fresh zone if that is None."""

    price: float
    filled: tuple[Tail, ...]
    fresh: int
    rest: int  # bytes
    last: Tail | None
    finished: Tail | None

    @property
    def opened(self) -> int:
        """Fresh zones that it takes."""
        return self.fresh + (self.rest > 0 and self.last is None)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A plan that is followed: the option it began with, what it cost, and what it has left."""

    first: Option
    cost: float
    tails: tuple[Tail, ...]
    price: float


@dataclass(frozen=True)
class PlanAll(Policy):
    """`ahead`: predicted saves that a beam of plans is followed through."""

    name: str = "plan"
    worth: float = TAIL_WORTH
    ahead: int = 0
    compacts: bool = True
    learns: bool = True

    def plan(self, request: Request, view: View) -> Plan:
        if math.isinf(request.retire):
            return fill(request, view)
        market = Market(view.capacity, view.now, view.arrivals, self.worth)
        retire = max(request.retire, view.now + view.unit)
        left = -(-request.size // view.granularity) * view.granularity
        tails = [
            Tail(z.index, z.tail, z.retire_max, market.value(z.tail, z.retire_max))
            for z in view.zones
            if z.tail and finite(z)
        ]
        slots, steps, price = view.slots, list[Step](), 0.0
        while left and tails:
            options = list(market.options(tails, left, retire, slots, view.empties))
            if options:
                best = self.best(options, market, tails, retire, slots)
                return Plan([*steps, *written(best, view.capacity)], 0, price + best.price)
            # Not enough fresh zones for any plan: the cheapest tail, then again.
            zone = min(tails, key=lambda z: (max(0.0, retire - z.retire) / z.size, z.zone))
            nbytes = min(zone.size, left)
            price += view.capacity * max(0.0, retire - zone.retire) + zone.value
            steps.append(Step(zone.zone, nbytes))
            tails.remove(zone)
            slots += nbytes == zone.size
            left -= nbytes
        fresh = min(view.empties, -(-left // view.capacity))
        for _ in range(fresh):
            nbytes = min(left, view.capacity)
            steps.append(Step(None, nbytes))
            left -= nbytes
        return Plan(steps, left, price + fresh * view.capacity * (retire - view.now))

    def best(
        self,
        options: Sequence[Option],
        market: Market,
        tails: Sequence[Tail],
        retire: float,
        slots: int,
    ) -> Option:
        """The cheapest; ties to the first, which takes the fewest and the lowest zones."""
        if not self.ahead or not market.arrivals:
            return min(options, key=lambda option: option.price)
        active = slots + len(tails)
        beam = [market.follow(option, option, 0.0, tails, retire) for option in _least(options)]
        for arrival in market.coming(self.ahead):
            market = market.after(arrival)
            found = [
                market.follow(plan.first, option, plan.cost, left, arrival.time + arrival.lifetime)
                for plan in beam
                for left in [market.alive(plan.tails)]
                for option in _least(
                    list(
                        market.options(
                            left,
                            arrival.size,
                            arrival.time + arrival.lifetime,
                            active - len(left),
                            None,
                        )
                    )
                )
            ]
            beam = sorted(found, key=lambda plan: plan.price)[:BEAM]
        return beam[0].first


@dataclass(frozen=True, slots=True)
class Market:
    """What tails are worth at one moment, and what plans then cost."""

    capacity: int
    now: float
    arrivals: Sequence[Arrival]
    worth: float

    def value(self, size: int, retire: float) -> float:
        """V: byte-time that a tail will save."""
        best = 0.0
        for arrival in self.arrivals:
            if self.now < arrival.time <= retire:
                late = max(0.0, arrival.time + arrival.lifetime - retire)
                best = max(best, size * arrival.lifetime - self.capacity * late)
        return self.worth * min(size * (retire - self.now), best)

    def options(
        self, tails: Sequence[Tail], size: int, retire: float, slots: int, empties: int | None
    ) -> Iterator[Option]:
        """Every plan for `size` bytes with at most so many fresh zones; None: with any number."""
        most = FILLED_MOST if len(tails) < MANY else FILLED_MOST - 1
        total = sum(tail.value for tail in tails)
        late = [self.capacity * max(0.0, retire - tail.retire) for tail in tails]
        cost_fresh = self.capacity * (retire - self.now)
        places = range(len(tails))
        cheapest = sorted(places, key=lambda i: (tails[i].value, i))
        whole = {}  # bytes left after the fresh zones -> value of the tail of the last one
        for count in range(min(most, len(tails)) + 1):
            for chosen in combinations(places, count):
                left = size - sum(tails[i].size for i in chosen)
                if left < 0:
                    continue
                fresh, rest = divmod(left, self.capacity)
                cost = sum(late[i] + tails[i].value for i in chosen) - total
                filled = tuple(tails[i] for i in chosen)
                opened = fresh + (rest > 0)
                if empties is None or opened <= empties:
                    finished = None
                    if opened and slots + count <= 0:
                        finished = next((tails[i] for i in cheapest if i not in chosen), None)
                    price = cost + opened * cost_fresh + (finished.value if finished else 0.0)
                    if rest:
                        if rest not in whole:
                            whole[rest] = self.value(self.capacity - rest, retire)
                        price -= whole[rest]
                    yield Option(price, filled, fresh, rest, None, finished)
                if not rest or (empties is not None and fresh > empties):
                    continue
                for i in places:
                    last = tails[i]
                    if last.size <= rest or i in chosen:
                        continue
                    finished = None
                    if fresh and slots + count <= 0:
                        others = (j for j in cheapest if j != i and j not in chosen)
                        finished = next((tails[j] for j in others), None)
                    price = cost + late[i] + last.value + fresh * cost_fresh
                    price -= self.value(last.size - rest, max(last.retire, retire))
                    price += finished.value if finished else 0.0
                    yield Option(price, filled, fresh, rest, last, finished)

    # Looking ahead

    def coming(self, count: int) -> list[Arrival]:
        """The next saves of all streams, in their order."""
        saves = [
            arrival._replace(time=arrival.time + arrival.every * number)
            for arrival in self.arrivals
            for number in range(count if arrival.every > 0 else 1)
        ]
        return sorted(saves)[:count]

    def after(self, save: Arrival) -> Market:
        """The moment of a predicted save."""
        arrivals = [
            a._replace(time=a.time + a.every) if a.time <= save.time else a for a in self.arrivals
        ]
        return Market(self.capacity, save.time, arrivals, self.worth)

    def alive(self, tails: Iterable[Tail]) -> tuple[Tail, ...]:
        """Those that are left by now, with what they are worth now."""
        return tuple(
            tail._replace(value=self.value(tail.size, tail.retire))
            for tail in tails
            if tail.retire > self.now
        )

    def follow(
        self, first: Option, option: Option, spent: float, tails: Sequence[Tail], retire: float
    ) -> Ahead:
        """A plan with one more save placed."""
        gone = {tail.zone for tail in (*option.filled, option.last, option.finished) if tail}
        left = [tail for tail in tails if tail.zone not in gone]
        if option.rest and option.last is None:
            # A name that no zone has; the plan opens no two zones for parts in one save.
            index = min([0, *(tail.zone for tail in tails)]) - 1
            size = self.capacity - option.rest
            left.append(Tail(index, size, retire, self.value(size, retire)))
        elif option.last is not None:
            size, latest = option.last.size - option.rest, max(option.last.retire, retire)
            left.append(Tail(option.last.zone, size, latest, self.value(size, latest)))
        worth = sum(tail.value for tail in left)
        price = spent + option.price
        return Ahead(first, price + worth, tuple(left), price)


def _least(options: Sequence[Option]) -> Sequence[Option]:
    return sorted(options, key=lambda option: option.price)[:BEAM]


def written(option: Option, capacity: int) -> list[Step]:
    """The steps of a plan: what frees active slots first, what needs them last."""
    steps = [Step(tail.zone, tail.size) for tail in option.filled]
    if option.last is not None:
        steps.append(Step(option.last.zone, option.rest))
    sizes = [capacity] * option.fresh
    if option.rest and option.last is None:
        sizes.append(option.rest)
    finish = option.finished.zone if option.finished is not None else None
    for size in sizes:
        steps.append(Step(None, size, finish))
        finish = None
    return steps


POLICIES: Final[dict[str, Callable[..., Policy]]] = {
    "plan": PlanAll,
    "plan-ahead": partial(PlanAll, "plan-ahead", ahead=3),
    "plan-bare": partial(PlanAll, "plan-bare", compacts=False, learns=False),
}
