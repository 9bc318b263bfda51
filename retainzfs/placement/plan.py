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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from itertools import chain, combinations
from typing import Final, NamedTuple

from retainzfs.placement import PLENTY, Arrival, Plan, Policy, Request, Step, View, fill, finite

TAIL_WORTH: Final = 0.95  # flat from 0.90 to 1.00; above 1 tails are hoarded
FILLED_MOST: Final = 3  # partial zones filled to the end by one plan
MANY: Final = 8  # partial zones, from which on two have to do
BEAM: Final = 8  # plans that are followed through the predicted saves
NONE: Final = -1


class Tail(NamedTuple):
    """A partial zone, and what its tail is worth to later saves."""

    zone: int
    size: int  # bytes
    retire: float
    value: float  # byte-time


class Option(NamedTuple):
    """One way to place a generation. Tails are named by their places in the list given:
    `filled` ones to the end, `fresh` whole zones, and the rest to the tail `last`, or to one more
    fresh zone if that is NONE. `finished` makes way for a fresh zone."""

    price: float  # byte-time
    filled: tuple[int, ...]
    last: int
    fresh: int
    rest: int  # bytes
    finished: int


@dataclass(frozen=True, slots=True)
class Followed:
    """A plan some saves later: the option it began with, what it has cost so far, what that comes
    to with the tails it has left, and these."""

    first: Option
    price: float
    cost: float
    tails: list[Tail]


@dataclass(frozen=True)
class PlanAll(Policy):
    """`ahead`: predicted saves that a beam of plans is followed through."""

    name: str = "plan"
    worth: float = TAIL_WORTH
    ahead: int = 0
    mingles: bool = True
    compacts: bool = True
    learns: bool = True

    def plan(self, request: Request, view: View) -> Plan:
        if math.isinf(request.retire):
            return fill(request, view)
        market = Market(view.capacity, view.now, view.arrivals, self.worth)
        retire = max(request.retire, view.now + view.unit)
        left = -(-request.size // view.granularity) * view.granularity
        tails = [
            market.tail(zone.index, zone.tail, zone.retire_max)
            for zone in view.zones
            if zone.tail and (self.mingles or finite(zone))
        ]
        # What became an anchor's takes nothing more, and gives its slot for nothing.
        known = {tail.zone for tail in tails}
        spare = [z.index for z in view.zones if z.tail and z.index not in known]
        steps, price = list[Step](), 0.0
        free = view.slots + len(spare)
        while left:
            option = self._choose(market, tails, left, retire, free, view.empties)
            if option is not None:
                finished = tails[option.finished].zone if option.finished != NONE else None
                steps += _steps(option, tails, market.capacity)
                price += option.price
                left = 0
            elif tails:
                # Not enough fresh zones for any plan: the cheapest tail, then again.
                zone = min(tails, key=lambda z: (max(0.0, retire - z.retire) / z.size, z.zone))
                nbytes = min(zone.size, left)
                steps.append(Step(zone.zone, nbytes))
                price += view.capacity * max(0.0, retire - zone.retire) + zone.value
                tails.remove(zone)
                free += nbytes == zone.size
                left -= nbytes
                continue
            else:
                finished, whole = None, min(left, view.empties * view.capacity)
                steps += [Step(None, nbytes) for nbytes in _pieces(whole, view.capacity)]
                left -= whole
            return Plan(_making_way(steps, view, spare, finished), left, price)
        return Plan(steps, 0, price)

    def _choose(
        self,
        market: Market,
        tails: list[Tail],
        size: int,
        retire: float,
        slots: int,
        empties: int,
    ) -> Option | None:
        """The cheapest; ties to the first, which takes the fewest and the lowest zones."""
        if not self.ahead or not market.arrivals:
            return Offers(market, tails, retire, slots, empties).best(size)
        active = slots + len(tails)
        options = Offers(market, tails, retire, slots, empties).least(size)
        beam = [market.follow(option, option, 0.0, tails, retire) for option in options]
        for save in market.coming(self.ahead):
            market = market.after(save)
            dies = save.time + save.lifetime
            found = []
            for plan in beam:
                alive = market.alive(plan.tails)
                offers = Offers(market, alive, dies, active - len(alive), PLENTY)
                found += [
                    market.follow(plan.first, option, plan.cost, alive, dies)
                    for option in offers.least(save.size)
                ]
            beam = nsmallest(BEAM, found, key=lambda plan: plan.price)
        return beam[0].first if beam else None


class Market:
    """What tails are worth at one moment, and what plans cost by that."""

    def __init__(
        self, capacity: int, now: float, arrivals: Sequence[Arrival], worth: float = TAIL_WORTH
    ) -> None:
        self.capacity, self.now, self.worth = capacity, now, worth
        self.arrivals = arrivals
        self._uses: dict[float, list[tuple[float, float]]] = {}

    def uses(self, retire: float) -> list[tuple[float, float]]:
        """(lifetime, byte-time lost) of the streams that could use a tail which dies then."""
        known = self._uses.get(retire)
        if known is None:
            found = sorted(
                (self.capacity * max(0.0, a.time + a.lifetime - retire), -a.lifetime)
                for a in self.arrivals
                if self.now < a.time <= retire
            )
            known, longest = [], 0.0
            for lost, lifetime in found:
                if -lifetime > longest:  # else another one lives longer and loses less
                    longest = -lifetime
                    known.append((longest, lost))
            self._uses[retire] = known
        return known

    def value(self, size: int, retire: float) -> float:
        """V: byte-time that a tail will save."""
        best = 0.0
        for lifetime, lost in self._uses.get(retire) or self.uses(retire):
            gain = size * lifetime - lost
            if gain > best:  # noqa: PLR1730  a call costs more than the rest, and planning is this
                best = gain
        idle = size * (retire - self.now)
        return self.worth * (best if best < idle else idle)

    def tail(self, zone: int, size: int, retire: float) -> Tail:
        return Tail(zone, size, retire, self.value(size, retire))

    # Looking ahead

    def coming(self, count: int) -> list[Arrival]:
        """The next saves of all streams, in their order."""
        saves = [
            arrival._replace(time=arrival.time + arrival.every * number)
            for arrival in self.arrivals
            for number in range(count if arrival.every > 0 else 1)
        ]
        return nsmallest(count, saves)

    def after(self, save: Arrival) -> Market:
        """The moment of a predicted save."""
        arrivals = [
            a._replace(time=a.time + a.every) if a.time <= save.time else a for a in self.arrivals
        ]
        return Market(self.capacity, save.time, arrivals, self.worth)

    def alive(self, tails: Iterable[Tail]) -> list[Tail]:
        """Those that are left by now, with what they are worth now."""
        return [self.tail(t.zone, t.size, t.retire) for t in tails if t.retire > self.now]

    def left(
        self, option: Option, tails: Sequence[Tail], retire: float, fresh: int = NONE
    ) -> list[Tail]:
        """The tails that an option leaves; `fresh` names the zone that it opens for its rest."""
        gone = {*option.filled, option.last, option.finished}
        left = [tail for place, tail in enumerate(tails) if place not in gone]
        if option.last != NONE:
            last = tails[option.last]
            left.append(self.tail(last.zone, last.size - option.rest, max(last.retire, retire)))
        elif option.rest:
            left.append(self.tail(fresh, self.capacity - option.rest, retire))
        return left

    def follow(
        self, first: Option, option: Option, cost: float, tails: Sequence[Tail], retire: float
    ) -> Followed:
        """A plan with one more save placed. `Option.price` has the tails left in it already."""
        left = self.left(option, tails, retire)
        worth = sum(tail.value for tail in left)
        return Followed(first, cost + option.price, cost + option.price + worth, left)


class Offers:
    """All plans for a generation that retires at `retire`, with at most `empties` fresh zones."""

    def __init__(
        self, market: Market, tails: Sequence[Tail], retire: float, slots: int, empties: int
    ) -> None:
        self.market, self.tails, self.retire = market, tails, retire
        self.slots, self.empties = slots, empties
        self.sizes = [tail.size for tail in tails]
        self.dies = [max(tail.retire, retire) for tail in tails]
        # What it costs to take a tail: its zone may stay longer, and nobody else gets it.
        capacity = market.capacity
        self.taken = [capacity * max(0.0, retire - tail.retire) + tail.value for tail in tails]
        # It is no less than this, whatever is left of the tail and worth something.
        self.net = [
            taken - market.value(tail.size, dies)
            for taken, tail, dies in zip(self.taken, tails, self.dies, strict=True)
        ]
        self.by_net = sorted(range(len(tails)), key=self.net.__getitem__)
        self.cheapest = sorted(range(len(tails)), key=lambda i: tails[i].value)
        self.fresh_cost = capacity * (retire - market.now)

    def best(self, size: int) -> Option | None:
        """The cheapest plan for so many bytes, None if there is none."""
        improving = self._options(size, every=False)
        return improving[-1] if improving else None

    def least(self, size: int) -> list[Option]:
        """The cheapest plans, as many as a beam follows."""
        return nsmallest(BEAM, self._options(size, every=True))

    def _options(self, size: int, *, every: bool) -> list[Option]:
        """All plans, or those that are cheaper than all before; the fewest tails come first.

        This is where planning spends its time: plain loops, and no plan is made that is too dear.
        """
        capacity, value, sizes = self.market.capacity, self.market.value, self.sizes
        least = math.inf
        nothing = -sum(tail.value for tail in self.tails)
        most = FILLED_MOST if len(sizes) < MANY else FILLED_MOST - 1
        found: list[Option] = []
        for filled in chain.from_iterable(
            combinations(range(len(sizes)), count) for count in range(most + 1)
        ):
            left, price = size, nothing
            for i in filled:
                left -= sizes[i]
                price += self.taken[i]
            fresh, rest = divmod(left, capacity)
            if not 0 <= fresh <= self.empties:
                continue
            price += fresh * self.fresh_cost
            crowded = self.slots + len(filled) <= 0
            if fresh + (rest > 0) <= self.empties:
                loser, whole = NONE, price
                if crowded and (fresh or rest):
                    loser = self._loser(filled, NONE)
                    whole += self._lost(loser)
                if rest:
                    whole += self.fresh_cost - value(capacity - rest, self.retire)
                if whole < least or every:
                    least = whole
                    found.append(Option(whole, filled, NONE, fresh, rest, loser))
            if not rest:
                continue
            for i in self.by_net:
                if price + self.net[i] >= least and not every:
                    break
                tail = sizes[i]
                if tail <= rest or i in filled:
                    continue
                loser, shared = NONE, price + self.taken[i] - value(tail - rest, self.dies[i])
                if crowded and fresh:
                    loser = self._loser(filled, i)
                    shared += self._lost(loser)
                if shared < least or every:
                    least = shared
                    found.append(Option(shared, filled, i, fresh, rest, loser))
        return found

    def _lost(self, loser: int) -> float:
        return self.tails[loser].value if loser != NONE else 0.0

    def _loser(self, filled: tuple[int, ...], last: int) -> int:
        """The tail that is given up for a fresh zone."""
        return next((i for i in self.cheapest if i != last and i not in filled), NONE)


def _pieces(nbytes: int, capacity: int) -> list[int]:
    whole, rest = divmod(nbytes, capacity)
    return [capacity] * whole + [rest] * (rest > 0)


def _steps(option: Option, tails: Sequence[Tail], capacity: int) -> list[Step]:
    """What frees active slots first, what needs them last."""
    steps = [Step(tails[i].zone, tails[i].size) for i in option.filled]
    rest = option.rest
    if option.last != NONE:
        steps.append(Step(tails[option.last].zone, rest))
        rest = 0
    return steps + [
        Step(None, nbytes) for nbytes in _pieces(option.fresh * capacity + rest, capacity)
    ]


def _making_way(
    steps: list[Step], view: View, spare: list[int], finished: int | None
) -> list[Step]:
    """Name the zone that is finished for the first fresh one, if that needs a slot."""
    tails = {zone.index: zone.tail for zone in view.zones}
    slots = view.slots
    for place, step in enumerate(steps):
        if step.zone is None:
            if slots <= 0:
                loser = spare[0] if spare else finished
                steps[place] = step._replace(finish=loser)
            break
        slots += step.nbytes == tails[step.zone]
    return steps


POLICIES: Final[dict[str, Callable[..., Policy]]] = {
    "plan": PlanAll,
    "plan-ahead": partial(PlanAll, "plan-ahead", ahead=3),
    "plan-bare": partial(PlanAll, "plan-bare", mingles=False, compacts=False, learns=False),
}
