"""What no placement can beat on a short instance, and the best placement that is known for it.

Bytes may be split at will, so all that matters of a zone is its span: from the save that opened it
until the retirement of what dies last in it. Let y be how many zones have each span. Bytes can be
placed if and only if, for every set S of generations, the zones whose span holds at least one of
them have room for all (Hall); and as zones are whole,

    minimise    sum of y * length
    subject to  y(spans that hold a generation of S) >= ceil(bytes of S / capacity)   for every S

is the problem itself, but for its limit of active zones. No zone has a name, so nothing is
symmetric, and the rounding is what makes it tight: with bytes as variables alone the linear
relaxation has no overhead at all. Sets are added as they are violated, the worst one found by a
small integer program. Then spans too dear for anything better than the best placement known are
left out, and the solver branches, for which bytes are variables again: it cuts better so. The limit
of active zones comes last, if what was found breaks it.

The solver is HiGHS. Whatever its time, the bound is valid and the placement feasible; how near they
come to each other may differ between machines. A policy knows less than the solver: of each stream
the next save at most, foretold from its past ones. Zone-times are in zone-epochs, overheads in
zone-epochs a save.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

from retainzfs import placement
from retainzfs.errors import UsageError
from retainzfs.evaluation.experiment import Setting, workers
from retainzfs.evaluation.offline import (
    Instance,
    Piece,
    Placement,
    alone,
    instance,
    played,
    search,
    zone_time,
)
from retainzfs.evaluation.workload import FAMILIES

SAVES: Final = 24  # of an instance; with 40 the bound is not always reached within minutes
TIME_LIMIT_S: Final = 120.0
LOAD: Final = (
    0.95  # of the workload that the saves are taken from; says nothing without its anchors
)
WIDTH: Final = 32  # of the beam whose placement the solver begins with
TOLERANCE: Final = 1e-6  # what the solver's figures may be wrong by
VIOLATED: Final = 1e-3  # zones; less is not worth a row
ADDED: Final = 40  # violated sets that one round adds
CUTTING_SHARE: Final = 0.4  # of the time limit; the rest is for branching
FREE_SHARE: Final = 0.6  # of that, without the limit of active zones; it rarely binds

# Copying is no part of the problem.
POLICIES: Final = (
    Setting("zenfs"),
    Setting("equal-epoch"),
    Setting("retainz"),
    Setting("retainz", parameters=(("span", 4.0),)),
    Setting("plan", parameters=(("compacts", False),)),
    Setting("plan-ahead", parameters=(("compacts", False),)),
)


class Span(NamedTuple):
    """Of a zone: opened by the save at `start`, reset at `end`."""

    start: float
    end: float
    inside: tuple[int, ...]  # generations that such a zone can hold

    @property
    def length(self) -> float:
        return self.end - self.start


# Columns of the solver, by span and generation.
Pieces = dict[tuple[int, int], int]


class Row(NamedTuple):
    """A policy on one instance. `certified` and `best_known` enclose the offline optimum."""

    seed: int
    policy: str
    overhead: float  # zone-epochs a save, as the others
    best_known: float
    certified: float

    @property
    def ratio(self) -> float:
        """To the best placement known."""
        return self.overhead / self.best_known if self.best_known else math.inf


def table(
    seeds: Iterable[int],
    saves: int = SAVES,
    time_limit_s: float = TIME_LIMIT_S,
    *,
    family: str = "paper",
    jobs: int = 1,
) -> list[Row]:
    """Every policy on the first saves of each seed, from a cold start and without anchors.

    `time_limit_s` is for the bound of one instance. Raises UsageError without HiGHS, and for a
    family that does not exist.
    """
    if family not in FAMILIES:
        raise UsageError(f"no family {family!r}; known: {', '.join(FAMILIES)}")
    _solver_module()
    made = partial(rows, saves=saves, time_limit_s=time_limit_s, family=family)
    if jobs == 1:
        return [row for seed in seeds for row in made(seed)]
    with workers(jobs) as pool:
        return [row for found in pool.map(made, seeds) for row in found]


def rows(seed: int, saves: int, time_limit_s: float, family: str) -> list[Row]:
    """The rows of one seed."""
    workload = alone(replace(FAMILIES[family], saves=saves).make(seed, LOAD))
    case = instance(workload)
    online = [
        (each.label, played(workload, placement.policy(each.policy, **dict(each.parameters))))
        for each in POLICIES
    ]
    known = [made for _, made in online]
    with suppress(ValueError):  # it does not heed how many zones there are
        known.append(search(case, WIDTH))
    found = bound(case, min(known, key=partial(zone_time, case)), time_limit_s)
    best, least = case.overhead(found.zone_time), case.overhead(found.least)
    return [
        Row(seed, label, case.overhead(zone_time(case, made)), best, least)
        for label, made in online
    ]


@dataclass(frozen=True)
class Bound:
    """`least` and `zone_time` enclose the optimum."""

    least: float
    zone_time: float
    placement: Placement


def bound(case: Instance, known: Placement, time_limit_s: float = TIME_LIMIT_S) -> Bound:
    """Enclose the optimum. `known` is any placement; the one returned is no worse.

    Raises UsageError without HiGHS, ValueError if `known` cannot be carried out.
    """
    return _Relaxation(case, known, time_limit_s).run()


def spans(case: Instance) -> list[Span]:
    """All spans worth having: from one save to one retirement, never dead in between."""
    found = []
    made = case.generations
    for start in sorted({g.time for g in made}):
        for end in sorted({g.retire for g in made}):
            inside = [k for k, g in enumerate(made) if start <= g.time and g.retire <= end]
            reach = start
            for k in inside:
                if made[k].time > reach:
                    break
                reach = max(reach, made[k].retire)
            if inside and made[inside[0]].time == start and reach == end:
                found.append(Span(start, end, tuple(inside)))
    return found


def _solver_module() -> Any:
    try:
        import highspy  # noqa: PLC0415  an extra
    except ImportError as error:
        raise UsageError(
            f"the offline bound needs HiGHS ({error}): pip install 'retainzfs[evaluation]'"
        ) from error
    return highspy


class _Relaxation:
    def __init__(self, case: Instance, known: Placement, time_limit_s: float) -> None:
        self.highs = _solver_module()
        self.case = case
        self.spans = spans(case)
        self.sets: dict[frozenset[int], None] = {}  # in the order in which they were found
        self.begun, self.limit = time.monotonic(), time_limit_s
        self.best, self.cost = known, zone_time(case, known)
        self.least = case.live_time
        self.unit = math.gcd(case.capacity, *(g.size for g in case.generations))
        self.whole = all(
            float(g.time).is_integer() and float(g.retire).is_integer() for g in case.generations
        )

    def run(self) -> Bound:
        for k in range(len(self.case.generations)):
            self.sets[self._closed([k])] = None
        self._cut()
        for limited in (False, True):
            if self.least < self.cost - TOLERANCE and self.left > 0:
                self._branch(limited)
        return Bound(min(self.least, self.cost), self.cost, self.best)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.limit - (time.monotonic() - self.begun)

    def _raise(self, least: float) -> None:
        """A bound was found for whatever costs less than the best placement."""
        least = min(least, self.cost) - TOLERANCE * max(1.0, self.cost)
        self.least = max(self.least, math.ceil(least) if self.whole else least)

    # Models: a column for every span, a row for every set

    def _solver(self, time_limit_s: float) -> Any:
        """It says nothing, and goes the same way every time."""
        solver = self.highs.Highs()
        solver.silent()
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("time_limit", max(0.1, time_limit_s))
        solver.setOptionValue("mip_rel_gap", 0.0)
        return solver

    def _fill(self, solver: Any) -> None:
        for span in self.spans:
            solver.addCol(span.length, 0.0, self.highs.kHighsInf, 0, [], [])
        for chosen in self.sets:
            self._add(solver, chosen)

    def _add(self, solver: Any, chosen: frozenset[int]) -> None:
        holds = [q for q, span in enumerate(self.spans) if not chosen.isdisjoint(span.inside)]
        self._row(
            solver, float(self._zones(chosen)), self.highs.kHighsInf, dict.fromkeys(holds, 1.0)
        )

    def _row(self, solver: Any, low: float, high: float, row: dict[int, float]) -> None:
        solver.addRow(low, high, len(row), list(row), list(row.values()))

    def _zones(self, chosen: frozenset[int]) -> int:
        """Zones that the bytes of a set need."""
        return -(-sum(self.case.generations[k].size for k in chosen) // self.case.capacity)

    # Cutting

    def _cut(self) -> None:
        """The linear relaxation with violated sets, then without spans that are useless for it."""
        solver = self._solver(self.left)
        self._fill(solver)
        pool = self._quadrants()
        until = self.limit * (1 - CUTTING_SHARE)
        while True:
            solver.run()
            if solver.getModelStatus() != self.highs.HighsModelStatus.kOptimal:
                return  # no time
            linear, solution = solver.getInfo().objective_function_value, solver.getSolution()
            self._raise(linear)
            counts = list(solution.col_value)
            if self.left < until or self.least >= self.cost - TOLERANCE:
                break
            missing = self._missing(pool, counts) or self._violated(counts, self.left - until)
            if not missing:
                break
            for chosen in missing:
                self.sets[chosen] = None
                self._add(solver, chosen)
        gain = self.cost - linear + TOLERANCE
        prices = list(solution.col_dual)
        self.spans = [s for s, price in zip(self.spans, prices, strict=True) if price <= gain]

    def _quadrants(self) -> list[frozenset[int]]:
        """What lives from one time to another: many such sets are violated, and easily found."""
        made = self.case.generations
        times, retires = sorted({g.time for g in made}), sorted({g.retire for g in made})
        sets = (
            frozenset(k for k, g in enumerate(made) if g.time <= start and end <= g.retire)
            for start in times
            for end in retires
        )
        return list(dict.fromkeys(chosen for chosen in sets if chosen))

    def _missing(
        self, pool: Sequence[frozenset[int]], counts: Sequence[float]
    ) -> list[frozenset[int]]:
        """Those of the pool that are violated most."""
        some = [(n, self.spans[q].inside) for q, n in enumerate(counts) if n > TOLERANCE]
        found = []
        for chosen in pool:
            if chosen not in self.sets:
                held = sum(count for count, inside in some if not chosen.isdisjoint(inside))
                found.append((self._zones(chosen) - held, chosen))
        found.sort(key=lambda scored: -scored[0])
        return [chosen for violation, chosen in found[:ADDED] if violation > VIOLATED]

    def _violated(self, counts: Sequence[float], time_limit_s: float) -> list[frozenset[int]]:
        """The set that is violated most, and those that the solver met before it. It chooses
        generations to put in, spans that then count, and the zones that the bytes need."""
        generations = range(len(self.case.generations))
        some = [q for q, count in enumerate(counts) if count > TOLERANCE]
        zones = len(generations) + len(some)
        solver = self._solver(time_limit_s)
        for _ in range(zones):
            solver.addVar(0.0, 1.0)
        solver.addVar(0.0, self.highs.kHighsInf)
        for column in (*generations, zones):
            solver.changeColIntegrality(column, self.highs.HighsVarType.kInteger)
        for column, q in enumerate(some, len(generations)):
            solver.changeColCost(column, counts[q])
            for k in self.spans[q].inside:
                self._row(solver, 0.0, 1.0, {column: 1.0, k: -1.0})
        solver.changeColCost(zones, -1.0)
        capacity = self.case.capacity
        shares = {k: -self.case.generations[k].size / capacity for k in generations}
        infinity = self.highs.kHighsInf
        self._row(solver, -infinity, 1 - self.unit / capacity, {**shares, zones: 1.0})  # rounds up
        found: dict[frozenset[int], None] = {}

        def note(values: Sequence[float], objective: float) -> None:
            if -objective > VIOLATED:
                found[self._closed(k for k in generations if values[k] > 0.5)] = None

        solver.cbMipImprovingSolution += lambda event: note(
            event.data_out.mip_solution, event.data_out.objective_function_value
        )
        solver.run()
        values = solver.getSolution().col_value
        if len(values):
            note(values, solver.getInfo().objective_function_value)
        return [chosen for chosen in found if chosen not in self.sets]

    def _closed(self, chosen: Iterable[int]) -> frozenset[int]:
        """With every generation that lives around one of the set: a span that holds it holds that
        one too, so all that it adds is bytes."""
        made = self.case.generations
        inner = [made[k] for k in chosen]
        return frozenset(
            k
            for k, g in enumerate(made)
            if any(g.time <= other.time and other.retire <= g.retire for other in inner)
        )

    # Branching

    def _branch(self, limited: bool) -> None:
        """Whole zones, and bytes as variables; `limited`: with the limit of active zones."""
        share = 1.0 if limited else FREE_SHARE
        solver = self._solver(self.left * share)
        self._fill(solver)
        for column in range(len(self.spans)):
            solver.changeColIntegrality(column, self.highs.HighsVarType.kInteger)
        begin, pieces = self._carry(solver)
        if limited:
            begin += self._limit(solver, begin, pieces)
        solver.setSolution(len(begin), list(range(len(begin))), begin)
        solver.cbMipImprovingSolution += lambda event: self._settle(
            event.data_out.mip_solution, pieces
        )
        solver.run()
        if solver.getModelStatus() == self.highs.HighsModelStatus.kInfeasible:
            self._raise(self.cost)  # what was left out costs no less
        else:
            self._raise(solver.getInfo().mip_dual_bound)

    def _carry(self, solver: Any) -> tuple[list[float], Pieces]:
        """Add the bytes of each generation in zones of each span. Returns the values that the best
        placement gives to all variables, and which variables are the bytes."""
        sizes, counts = self._known()
        capacity = self.case.capacity
        values = [float(counts[span.start, span.end]) for span in self.spans]
        pieces: Pieces = {}
        shares: list[dict[int, float]] = [{} for _ in self.case.generations]
        for q, span in enumerate(self.spans):
            row = {q: 1.0}
            for k in span.inside:
                column = len(values)
                solver.addVar(0.0, self.case.generations[k].size / capacity)
                values.append(sizes[k, span.start, span.end] / capacity)
                row[column] = -1.0
                shares[k][column] = 1.0
                pieces[q, k] = column
            self._row(solver, 0.0, self.highs.kHighsInf, row)
        for generation, share in zip(self.case.generations, shares, strict=True):
            self._row(solver, generation.size / capacity, generation.size / capacity, share)
        return values, pieces

    def _limit(self, solver: Any, begin: Sequence[float], pieces: Pieces) -> list[float]:
        """Add how many zones of each span are active after each save: what is written later goes to
        these. Returns their values in the best placement."""
        last_write = {piece.zone: piece.generation for piece in self.best}
        spans = self._spans_of_zones()
        values: list[float] = []
        active: list[dict[int, float]] = [{} for _ in self.case.generations]
        for q, span in enumerate(self.spans):
            for place, k in enumerate(span.inside[:-1]):
                until = span.inside[place + 1]
                if self.case.generations[until].time == span.start:
                    continue  # it may be the one that opens the zone
                column = len(begin) + len(values)
                solver.addVar(0.0, float(self.case.active))
                solver.changeColIntegrality(column, self.highs.HighsVarType.kInteger)
                later = {pieces[q, other]: -1.0 for other in span.inside[place + 1 :]}
                self._row(solver, 0.0, self.highs.kHighsInf, {column: 1.0, **later})
                for number in range(k, until):
                    active[number][column] = 1.0
                own = (z for z, ends in spans.items() if ends == (span.start, span.end))
                values.append(float(sum(last_write[zone] > k for zone in own)))
        for row in active:
            self._row(solver, 0.0, float(self.case.active), row)
        return values

    def _spans_of_zones(self) -> dict[int, tuple[float, float]]:
        """Of the best placement."""
        found: dict[int, tuple[float, float]] = {}
        for piece in self.best:
            made = self.case.generations[piece.generation]
            start, end = found.get(piece.zone, (made.time, made.retire))
            found[piece.zone] = start, max(end, made.retire)
        return found

    def _known(self) -> tuple[Counter[tuple[int, float, float]], Counter[tuple[float, float]]]:
        """Of the best placement: bytes of a generation in zones of a span, and those zones."""
        spans = self._spans_of_zones()
        sizes: Counter[tuple[int, float, float]] = Counter()
        for piece in self.best:
            sizes[piece.generation, *spans[piece.zone]] += piece.size
        return sizes, Counter(spans.values())

    def _settle(self, values: Sequence[float], pieces: Pieces) -> None:
        """Remember a solution, if it can be carried out and is the best."""
        units = self.case.capacity // self.unit
        flows: list[dict[int, int]] = [{} for _ in self.spans]
        for (q, k), column in pieces.items():
            size = round(values[column] * units) * self.unit
            if size:
                flows[q][k] = size
        found = in_order(self.case.capacity, flows)
        with suppress(ValueError):  # too many active zones, as a rule
            cost = zone_time(self.case, found)
            if cost < self.cost:
                self.best, self.cost = found, cost


def in_order(capacity: int, flows: Iterable[dict[int, int]]) -> list[Piece]:
    """The order of writing for bytes of each generation in zones of each span. Zones of one span
    are filled one after the other; of a generation's pieces, what finishes a zone comes first."""
    pieces = []
    zone = 0
    for flow in flows:
        room = capacity
        for k in sorted(flow):
            left = flow[k]
            while left:
                if not room:
                    zone, room = zone + 1, capacity
                size = min(left, room)
                pieces.append(Piece(k, zone, size))
                left, room = left - size, room - size
        zone += 1
    last = {piece.zone: piece.generation for piece in pieces}
    first = {piece.zone: piece.generation for piece in reversed(pieces)}

    def order(piece: Piece) -> tuple[int, bool, bool]:
        k = piece.generation
        return k, last[piece.zone] != k, first[piece.zone] == k

    return sorted(pieces, key=order)
