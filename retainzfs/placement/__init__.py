"""Which zones for these bytes: pure functions from summaries of a few zones to a plan.

A policy sees only the partial zones of one kind, so the cost of a decision does not grow with the
device. It answers with a plan for a whole generation, in the order in which to write it: full tails
first, which frees active slots, then fresh zones. A plan is a soft claim: tails are reserved
byte-exact when bytes are appended, and whoever finds a step gone, or has bytes left over, asks for
a new plan for the rest.

Sizes are in bytes and contain padding and trailers, which only the caller knows. Times are in
seconds on a mount and in epochs in a replay; `unit` is one E in them (a quarter of the cadence).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from retainzfs.errors import UsageError
from retainzfs.zone import Kind, Zone, ZoneSummary, summary
from retainzfs.zones import ZoneTable

__all__ = [
    "PLENTY",
    "Arrival",
    "Draft",
    "Plan",
    "Policy",
    "Request",
    "Step",
    "View",
    "ZoneSummary",
    "fill",
    "finish_cost",
    "finite",
    "policies",
    "policy",
    "survey",
    "to_finish",
    "victim",
]

PLENTY: Final = 1 << 30  # zones; as many as anybody wants
FINISH_HORIZON: Final = 64.0  # E; a tail is worth nothing beyond, whoever lives beside it


class Arrival(NamedTuple):
    """The next save of a stream, as foretold from its past ones."""

    time: float
    lifetime: float  # until it retires
    size: int  # bytes
    every: float  # cadence


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may know. `zones`: the partial zones of the request's kind, by index."""

    capacity: int  # bytes of a fresh zone
    now: float
    zones: Sequence[ZoneSummary]
    empties: int  # fresh zones that may be taken
    slots: int  # active slots free for this kind
    unit: float = 1.0  # one E, in the unit of `now`
    granularity: int = 4096  # bytes; divides every tail and every step
    arrivals: Sequence[Arrival] = ()  # of the streams that are alive, at most one each
    scarce: bool = False  # fresh zones do not suffice: fill compatible tails before them


@dataclass(frozen=True, slots=True)
class Request:
    """Bytes to place. `generation`: bytes of the whole generation, if more than these."""

    size: int
    retire: float  # time of retirement; inf for an anchor
    generation: int = 0
    lifetime: float = 0.0  # from birth to retirement; 0: from now


class Step(NamedTuple):
    """Write `nbytes` to `zone`, or to a fresh zone if None, after finishing `finish`; `tag` is what
    the policy wants to be told of that zone (`ZoneSummary.tag`)."""

    zone: int | None
    nbytes: int
    finish: int | None = None
    tag: int = 0


class Plan(NamedTuple):
    steps: list[Step]
    unplaced: int  # bytes for which no space was found
    price: float = 0.0  # byte-time, to compare plans of one policy for one request


class Policy:
    """Pure and deterministic: the same request and view give the same plan."""

    name: str
    apart: ClassVar[bool] = True  # anchors have zones of their own, which it then never sees
    mingles: bool = False  # but without milestones to come, finite data may follow them
    compacts: bool = False  # zones that are mostly dead may be moved together in idle time
    learns: bool = False  # replays correct its hints as retention does on a mount, for all policies

    @property
    def finish_below(self) -> float:
        """Share of a zone's capacity; partial zones with less tail are finished at once."""
        return 0.0

    def plan(self, request: Request, view: View) -> Plan:
        raise NotImplementedError


class Draft:
    """A plan in the making, and what is left of the view once its steps are carried out.

    Only the last step of a plan can leave a tail. So zones are whole, as in the view, or gone, and
    a fresh zone, filled up, gives back the slot that it took.
    """

    def __init__(self, request: Request, view: View) -> None:
        self.view = view
        self.left = -(-request.size // view.granularity) * view.granularity
        self.zones = {zone.index: zone for zone in view.zones if zone.tail}
        self.empties = view.empties
        self.slots = view.slots
        self.steps: list[Step] = []

    def put(self, zone: ZoneSummary) -> None:
        """As much as fits goes to the tail of `zone`."""
        nbytes = min(zone.tail, self.left)
        self.steps.append(Step(zone.index, nbytes))
        self.left -= nbytes
        if nbytes == zone.tail:
            del self.zones[zone.index]
            self.slots += 1

    def open(self, loser: ZoneSummary | None, tag: int = 0) -> None:
        """As much as fits goes to a fresh zone, for which `loser` is finished. With nothing to
        finish the caller makes room (`to_finish`)."""
        nbytes = min(self.view.capacity, self.left)
        if loser is not None:
            del self.zones[loser.index]
            self.slots += 1
        self.steps.append(Step(None, nbytes, loser.index if loser else None, tag))
        self.left -= nbytes
        self.empties -= 1

    def loser(self) -> ZoneSummary | None:
        """The zone to finish before a fresh one can be opened, if that is necessary."""
        if self.slots > 0:
            return None
        return victim(self.zones.values(), self.view.now, self.view.unit)

    def plan(self) -> Plan:
        return Plan(self.steps, self.left)


def finite(zone: ZoneSummary) -> bool:
    """Whether no anchor is in the zone: a generation may become one after it was placed."""
    return not math.isinf(zone.retire_max)


def finish_cost(zone: ZoneSummary, now: float, unit: float) -> float:
    """Byte-time of tail that finishing the zone throws away."""
    return zone.tail * (min(zone.retire_max, now + FINISH_HORIZON * unit) - now)


def victim(zones: Iterable[ZoneSummary], now: float, unit: float) -> ZoneSummary | None:
    """The zone whose finish costs least; ties to the lowest index."""
    return min(zones, key=lambda zone: (finish_cost(zone, now, unit), zone.index), default=None)


def fill(request: Request, view: View) -> Plan:
    """Fills the partial zones of the kind, then fresh ones: for anchors and for data without a
    retirement, where all that can be lost is tails.

    The zone with the least unused capacity after the write comes first (paper, section II-C).
    """
    draft = Draft(request, view)
    while draft.left:
        zones = draft.zones.values()
        best = min(zones, key=lambda z: (max(0, z.tail - draft.left), z.index), default=None)
        if best is not None:
            draft.put(best)
        elif draft.empties > 0:
            draft.open(draft.loser())
        else:
            break
    return draft.plan()


# Between the zone table and a policy


def survey(
    table: ZoneTable,
    kind: Kind,
    retire_of: Callable[[int], float],
    now: float,
    *,
    unit: float = 1.0,
    empties: int | None = None,
    arrivals: Sequence[Arrival] = (),
    milestones: bool = True,
) -> View:
    """What a policy may know for a request of this kind. `empties` defaults to all but the
    emergency zone; admission may offer fewer. Without `milestones` to come finite data may have
    the slot of the anchors' zone."""
    zones = [summary(zone, retire_of, now, unit) for zone in table.partial(kind)]
    fresh = table.empty_available if empties is None else max(0, empties)
    slots = table.slots(kind)
    if kind is Kind.FINITE and not milestones:
        slots += len(table.partial(Kind.ANCHOR))
    return View(table.capacity, now, zones, fresh, slots, unit, arrivals=arrivals)


def to_finish(
    table: ZoneTable,
    kind: Kind,
    retire_of: Callable[[int], float],
    now: float,
    *,
    unit: float = 1.0,
    milestones: bool = True,
) -> Zone | None:
    """The zone to finish so that `kind` can open another, when `acquire` gave none. Without
    `milestones` to come the anchors' zone goes first.

    None: a zone is just being written full, finished or reset; wait for that.
    """
    spare = table.spare(kind)
    if spare is not None:
        return spare
    anchors = table.partial(Kind.ANCHOR)
    if kind is Kind.FINITE and anchors and not milestones:
        return anchors[0]
    crowd = table.crowded_by(kind)
    if crowd is None:
        return None
    zones = [summary(zone, retire_of, now, unit) for zone in table.partial(crowd)]
    loser = victim(zones, now, unit)
    return None if loser is None else table[loser.index]


# Registry


def _registry() -> dict[str, Callable[..., Policy]]:
    from retainzfs.placement import (  # noqa: PLC0415  policies import this module
        equal_epoch,
        isolate,
        plan,
        retainz,
        zenfs,
    )

    modules = (plan, retainz, zenfs, equal_epoch, isolate)
    return {name: made for module in modules for name, made in module.POLICIES.items()}


def policies() -> list[str]:
    """Names that `policy` knows."""
    return sorted(_registry())


def policy(name: str, **parameters: float | bool) -> Policy:
    """The policy of that name, with its parameters changed as given; UsageError if there is no
    such policy or parameter."""
    factory = _registry().get(name)
    if factory is None:
        raise UsageError(f"no placement policy {name!r}; known: {', '.join(policies())}")
    try:
        return factory(**parameters)
    except TypeError as error:
        raise UsageError(f"placement policy {name!r}: {error}") from error
