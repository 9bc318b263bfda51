"""Policy `isolate`: a generation shares no zone with another one.

Source: the paper's ablation (section IV), "isolating every generation".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from retainzfs.placement import Draft, Plan, Policy, Request, View, fill


@dataclass(frozen=True)
class Isolate(Policy):
    name: str = "isolate"

    def plan(self, request: Request, view: View) -> Plan:
        if math.isinf(request.retire):
            return fill(request, view)
        draft = Draft(request, view)
        while draft.left and draft.empties > 0:
            draft.open(draft.loser())
        return draft.plan()


POLICIES: Final[dict[str, Callable[..., Policy]]] = {"isolate": Isolate}
