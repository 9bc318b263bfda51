"""Policy `equal-epoch`: only what retires at the same time shares a zone, the fullest one first.

Source: the paper's baseline "equal-epoch best-fit" (section III): the same hints as `retainz`,
without a price. Like that one, it takes any tail when nothing else is left.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from retainzfs.placement import Draft, Plan, Policy, Request, View, fill, finite


@dataclass(frozen=True)
class EqualEpoch(Policy):
    name: str = "equal-epoch"

    def plan(self, request: Request, view: View) -> Plan:
        if math.isinf(request.retire):
            return fill(request, view)
        draft = Draft(request, view)
        retire = max(request.retire, view.now + view.unit)
        while draft.left:
            zones = [zone for zone in draft.zones.values() if finite(zone)]
            same = [zone for zone in zones if zone.retire_min == retire == zone.retire_max]
            if not same and draft.empties > 0:
                draft.open(draft.loser())
                continue
            left = draft.left
            rest = min(same or zones, key=lambda z: (max(0, z.tail - left), z.index), default=None)
            if rest is None:
                break
            draft.put(rest)
        return draft.plan()


POLICIES: Final[dict[str, Callable[..., Policy]]] = {"equal-epoch": EqualEpoch}
