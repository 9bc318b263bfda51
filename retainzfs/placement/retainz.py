"""Policy `retainz`: the allocator of the paper (sections II-B and II-C), as reconstructed.

A finite generation goes chunk by chunk to whatever costs least per byte placed, in byte-time:

    R'      = max(R, d)
    DBT(z)  = m (R' - d) + w (R' - R)              dead bytes waiting for the zone's last byte
    TAIL(z) = (u - m) (R' - t) - u (R - t)         change of unused-tail time
    cost(z) = (DBT + lambda TAIL) / m

with t now, d the retirement of the bytes, m = min(u, bytes left), and of the zone: R its latest
retirement, w its bytes written, u its tail. A fresh zone costs lambda (C - m) (d - t) / m, plus the
cheapest finish when no active slot is free.

A zone is admissible while its retirements, d included, spread over at most W k epochs. k, from 1 to
8, is how many generations of this size a zone holds: small generations have to share more freely.
Only when no zone is admissible and no empty one is left does the spread not matter.

Anchors have zones of their own and are packed by best fit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from retainzfs.placement import (
    Draft,
    Plan,
    Policy,
    Request,
    View,
    ZoneSummary,
    fill,
    finish_cost,
    finite,
)

SIZE_ADAPTATION_MOST: Final = 8  # generations; a wider spread keeps dead bytes for too long


@dataclass(frozen=True)
class Retainz(Policy):
    """The parameters are the paper's ablations; times in E (`View.unit`)."""

    name: str = "retainz"
    tail_weight: float = 0.5  # lambda
    dead_weight: float = 1.0  # 0 leaves dead-byte time out
    span: float = 2.0  # W, half the streams' cadence; inf for no constraint
    size_adaptation: bool = True

    def plan(self, request: Request, view: View) -> Plan:
        if math.isinf(request.retire):
            return fill(request, view)
        draft = Draft(request, view)
        retire = max(request.retire, view.now + view.unit)
        span = self.span_of(request, view)
        while draft.left:
            zones = [zone for zone in draft.zones.values() if finite(zone)]
            near = [zone for zone in zones if spread(zone, retire) <= span]
            best, cost = self.cheapest(near, draft.left, retire, view.now)
            if draft.empties > 0:
                nbytes = min(view.capacity, draft.left)
                if self.fresh_cost(nbytes, retire, view, draft.loser()) < cost:
                    draft.open(draft.loser())
                    continue
            if best is None:
                best, _ = self.cheapest(zones, draft.left, retire, view.now)
            if best is None:
                break
            draft.put(best)
        return draft.plan()

    def span_of(self, request: Request, view: View) -> float:
        """Widest admissible spread of retirements in a zone, in the unit of `View.now`."""
        generations = 1
        if self.size_adaptation:
            size = max(request.size, request.generation)
            generations = min(math.ceil(view.capacity / size), SIZE_ADAPTATION_MOST)
        return self.span * generations * view.unit

    def cheapest(
        self, zones: list[ZoneSummary], left: int, retire: float, now: float
    ) -> tuple[ZoneSummary | None, float]:
        """The zone with the least cost, and that cost; ties to the lowest index."""
        best, least = None, math.inf
        for zone in zones:
            cost = self.cost(zone, min(zone.tail, left), retire, now)
            if cost < least:
                best, least = zone, cost
        return best, least

    def cost(self, zone: ZoneSummary, nbytes: int, retire: float, now: float) -> float:
        """Byte-time per byte, for `nbytes` in the tail of `zone`."""
        latest = max(zone.retire_max, retire)
        dead = nbytes * (latest - retire) + zone.written * (latest - zone.retire_max)
        tail = (zone.tail - nbytes) * (latest - now) - zone.tail * (zone.retire_max - now)
        return (self.dead_weight * dead + self.tail_weight * tail) / nbytes

    def fresh_cost(
        self, nbytes: int, retire: float, view: View, loser: ZoneSummary | None
    ) -> float:
        """Byte-time per byte, for `nbytes` in a fresh zone for which `loser` has to be finished."""
        tail = (view.capacity - nbytes) * (retire - view.now)
        if loser is not None:
            tail += finish_cost(loser, view.now, view.unit)
        return self.tail_weight * tail / nbytes


def spread(zone: ZoneSummary, retire: float) -> float:
    """How far apart the retirements in the zone would be with `retire` among them."""
    return max(zone.retire_max, retire) - min(zone.retire_min, retire)


POLICIES: Final[dict[str, Callable[..., Policy]]] = {
    "retainz": Retainz,
    "no-tail": partial(Retainz, "no-tail", tail_weight=0.0),
    "no-dbt": partial(Retainz, "no-dbt", dead_weight=0.0),
    "no-span": partial(Retainz, "no-span", span=math.inf),
    "no-size-adaptation": partial(Retainz, "no-size-adaptation", size_adaptation=False),
}
