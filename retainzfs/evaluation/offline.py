"""Placement with the whole future known: what it costs, and good plans for short instances.

An instance is some generations from a cold start, every one of which dies when its hint says;
anchors have zones apart, and nothing is copied. A placement says which bytes of which generation
went to which zone, in the order of writing. What it costs is its zone-time: a zone is occupied from
its first write until its last byte dies. Zone-time less the time of the bytes themselves is the
overhead; here it is given in zone-epochs a save.

Sizes are in bytes, times in epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from retainzfs.evaluation.simulator import Simulator
from retainzfs.evaluation.workload import Delete, Save, Workload
from retainzfs.placement import PLENTY, Arrival, Policy
from retainzfs.placement.admission import Fixed
from retainzfs.placement.plan import NONE, Market, Offers, Option, Tail
from retainzfs.zone import Zone


class Generation(NamedTuple):
    time: float  # of the save
    retire: float
    size: int  # bytes
    stream: int = 0


class Piece(NamedTuple):
    """Bytes of a generation in a zone; a number names one use of a zone, until its reset."""

    generation: int
    zone: int
    size: int


Placement = Sequence[Piece]


@dataclass(frozen=True)
class Instance:
    """`generations` in the order in which they are saved."""

    capacity: int  # bytes of a zone
    zones: int  # that may be occupied at once
    active: int  # zones that may be written and not full at once
    generations: tuple[Generation, ...]

    @property
    def live_time(self) -> float:
        """Zone-epochs of the bytes themselves, which no placement changes."""
        byte_time = sum(g.size * (g.retire - g.time) for g in self.generations)
        return byte_time / self.capacity

    def overhead(self, zone_time: float) -> float:
        """Zone-epochs a save, of a zone-time."""
        return (zone_time - self.live_time) / max(1, len(self.generations))


def alone(workload: Workload) -> Workload:
    """The finite saves of a workload, from a cold start until the last of them is dead."""
    finite = (e for e in workload.events if isinstance(e, Save) and math.isfinite(e.hint))
    saves = [save._replace(generation=number) for number, save in enumerate(finite)]
    deletes: list[Save | Delete] = [Delete(save.hint, save.generation) for save in saves]
    events = sorted([*saves, *deletes], key=lambda e: (e.time, isinstance(e, Delete), e.generation))
    end = max((event.time for event in events), default=0.0)
    return replace(workload, events=tuple(events), anchors=(), end=end, warm_up=0.0)


def instance(workload: Workload) -> Instance:
    """The instance that a workload made by `alone` is; one zone is held back, as in a replay."""
    saves = [event for event in workload.events if isinstance(event, Save)]
    generations = tuple(Generation(s.time, s.hint, s.size, s.stream) for s in saves)
    return Instance(workload.capacity, workload.zones - 1, workload.active, generations)


# What a placement costs


def zone_time(case: Instance, placement: Placement) -> float:
    """Zone-epochs that a placement occupies. ValueError if it cannot be carried out.

    Deliberately apart from the zone table and the policies: it judges them.
    """
    _check_sizes(case, placement)
    last_write = {piece.zone: number for number, piece in enumerate(placement)}
    used: dict[int, int] = {}
    spans: dict[int, tuple[float, float]] = {}
    active: set[int] = set()
    now = 0.0
    for number, piece in enumerate(placement):
        made = case.generations[piece.generation]
        if made.time < now:
            raise ValueError(f"generation {piece.generation} is written after a later one")
        now = made.time
        start, end = spans.get(piece.zone, (now, now))
        if end < now:
            raise ValueError(f"zone {piece.zone} was dead by {end}, and is written at {now}")
        spans[piece.zone] = (start, max(end, made.retire))
        used[piece.zone] = used.get(piece.zone, 0) + piece.size
        if used[piece.zone] > case.capacity:
            raise ValueError(f"zone {piece.zone} holds {used[piece.zone]} bytes, too many")
        active.add(piece.zone)
        if len(active) > case.active:
            raise ValueError(f"{len(active)} zones are active at {now}")
        if used[piece.zone] == case.capacity or last_write[piece.zone] == number:
            active.remove(piece.zone)  # full, or finished
        # What dies now is deleted after the save, so it still counts.
        occupied = sum(end >= now for _, end in spans.values())
        if occupied > case.zones:
            raise ValueError(f"{occupied} zones are occupied at {now}")
    return sum(end - start for start, end in spans.values())


def _check_sizes(case: Instance, placement: Placement) -> None:
    placed = [0] * len(case.generations)
    for piece in placement:
        if piece.size <= 0:
            raise ValueError(f"a piece of generation {piece.generation} has {piece.size} bytes")
        placed[piece.generation] += piece.size
    for number, generation in enumerate(case.generations):
        if placed[number] != generation.size:
            raise ValueError(f"{placed[number]} bytes of generation {number} are placed")


class Recorder(Simulator):
    """A replay that keeps what it wrote where.

    The policy is told when the streams end, or its last tails would wait for what never comes.
    """

    def __init__(self, workload: Workload, policy: Policy) -> None:
        super().__init__(workload, policy, Fixed())
        self.placement: list[Piece] = []
        self._uses: dict[int, int] = {}  # zone -> its use, unlike every other zone's
        self._count = 0
        self._last = max((e.time for e in workload.events if isinstance(e, Save)), default=0.0)

    def _arrivals(self) -> list[Arrival]:
        return [
            arrival._replace(
                every=arrival.every if arrival.time + arrival.every <= self._last else 0.0
            )
            for arrival in super()._arrivals()
            if arrival.time <= self._last
        ]

    def _put(self, zone: Zone, generation: int, nbytes: int) -> None:
        if zone.tail == zone.capacity:
            self._uses[zone.index] = self._count
            self._count += 1
        super()._put(zone, generation, nbytes)
        self.placement.append(Piece(generation, self._uses[zone.index], nbytes))


def played(workload: Workload, policy: Policy) -> list[Piece]:
    """What a policy makes of a workload, as it comes. It must not copy."""
    recorder = Recorder(workload, policy)
    recorder.run()
    return recorder.placement


# Search: the plans of policy `plan`, followed through the true future


class Path(NamedTuple):
    """A way to place the saves so far: what it cost in byte-time, the tails that it leaves, and
    what the last save wrote after the path before it."""

    cost: float
    tails: list[Tail]
    pieces: Sequence[Piece] = ()
    before: Path | None = None


def search(case: Instance, width: int) -> list[Piece]:
    """The best placement among those that a beam of `width` paths meets. Raises ValueError if it
    needs more zones than there are."""
    beam = [Path(0.0, [])]
    for number, generation in enumerate(case.generations):
        market = Market(case.capacity, generation.time, _coming(case, number))
        found = []
        for long in beam:
            path = long._replace(tails=market.alive(long.tails))
            slots = case.active - len(path.tails)
            offers = Offers(market, path.tails, generation.retire, slots, PLENTY)
            for option in offers.least(generation.size):
                after = _follow(case, path, option, number, market)
                found.append((after.cost - sum(tail.value for tail in after.tails), after))
        found.sort(key=lambda scored: scored[0])
        beam = list(_unlike((path for _, path in found), width))
    best = min(beam, key=lambda path: path.cost)
    placement = _written(best)
    zone_time(case, placement)
    return placement


def _coming(case: Instance, number: int) -> list[Arrival]:
    """The next save of every stream after this one."""
    found: dict[int, Arrival] = {}
    for coming in case.generations[number + 1 :]:
        lifetime = coming.retire - coming.time
        found.setdefault(coming.stream, Arrival(coming.time, lifetime, coming.size, 0.0))
    return list(found.values())


def _follow(case: Instance, path: Path, option: Option, number: int, market: Market) -> Path:
    """`number` names the zone that the option leaves partly full."""
    retire = case.generations[number].retire
    pieces = [Piece(number, path.tails[i].zone, path.tails[i].size) for i in option.filled]
    touched = list(option.filled)
    tails = market.left(option, path.tails, retire, number)
    opened = option.fresh
    # Names of zones that are full at once are like no save's.
    count = len(case.generations)
    pieces += [Piece(number, (i + 1) * count + number, case.capacity) for i in range(option.fresh)]
    if option.last != NONE:
        last = path.tails[option.last]
        touched.append(option.last)
        pieces.append(Piece(number, last.zone, option.rest))
    elif option.rest:
        opened += 1
        pieces.append(Piece(number, number, option.rest))
    cost = path.cost + opened * case.capacity * (retire - market.now)
    cost += sum(case.capacity * max(0.0, retire - path.tails[i].retire) for i in touched)
    # What frees slots comes first, what takes one for long comes last.
    pieces.sort(key=lambda piece: piece.zone == number)
    return Path(cost, tails, pieces, path)


def _unlike(paths: Iterable[Path], width: int) -> Iterator[Path]:
    """The first paths that differ in cost or in the tails that they leave."""
    seen: set[tuple[float, tuple[tuple[int, float], ...]]] = set()
    for path in paths:
        key = path.cost, tuple(sorted((tail.size, tail.retire) for tail in path.tails))
        if key not in seen:
            seen.add(key)
            yield path
        if len(seen) == width:
            return


def _written(path: Path | None) -> list[Piece]:
    found: list[Piece] = []
    while path is not None:
        found = [*path.pieces, *found]
        path = path.before
    return found
