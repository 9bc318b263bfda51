"""Whether a generation may be placed as things are: before copying, and when copying gains no more.

One empty zone is held back for collection. The rules differ in when it may be lent:

    fixed     never
    common    at once, if what finds no place in compatible tails fits into it
    priced    at once, if the deletions that this very save triggers are known to empty a zone

`priced` asks the policy's prices besides: fresh zones that are missing may be replaced by tails as
long as that costs little; then copying comes first.

Pure: the caller copies, and asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from retainzfs.errors import UsageError
from retainzfs.placement import PLENTY, Plan, Policy, Request, Step, View

PATIENCE: Final = 8.0  # E, by which doing without a missing fresh zone may hold up its bytes' room


class Room(NamedTuple):
    """What is held back. `reserve`: zones that could be lent; `repaid`: whether the deletions that
    this very save triggers are known to empty a zone."""

    reserve: int = 1
    repaid: bool = False


class Rule(Protocol):
    """Returns a plan that may be carried out, or None. It borrows if it takes more fresh zones
    than `view.empties`."""

    def first(self, policy: Policy, request: Request, view: View, room: Room) -> Plan | None: ...

    def last(self, policy: Policy, request: Request, view: View, room: Room) -> Plan | None: ...


def fresh(plan: Plan) -> int:
    """Fresh zones that a plan takes."""
    return sum(step.zone is None for step in plan.steps)


def anywhere(size: int, rooms: Iterable[tuple[int | None, int]]) -> Plan | None:
    """The last resort: these rooms (zone or None for a fresh one, bytes) in their order, whatever
    lives beside it. It costs copies later. None if they do not hold so many bytes."""
    steps = []
    for zone, room in rooms:
        if size:
            steps.append(Step(zone, min(size, room)))
            size -= steps[-1].nbytes
    return None if size else Plan(steps, 0)


def _placed(plan: Plan) -> Plan | None:
    return None if plan.unplaced else plan


class Fixed:
    def first(self, policy: Policy, request: Request, view: View, room: Room) -> Plan | None:
        return _placed(policy.plan(request, view))

    def last(self, policy: Policy, request: Request, view: View, room: Room) -> Plan | None:
        return None


def _filling(policy: Policy, request: Request, view: View, room: Room) -> Plan | None:
    """Any tails will do, and the reserve is lent to what fits into it."""
    view = replace(view, scarce=True)
    plan = policy.plan(request, view)
    if not plan.unplaced:
        return plan
    if not room.reserve or plan.unplaced > view.capacity:
        return None
    return _placed(policy.plan(request, replace(view, empties=view.empties + 1)))


class Common:
    def first(self, policy: Policy, request: Request, view: View, room: Room) -> Plan | None:
        return _placed(policy.plan(request, view)) or _filling(policy, request, view, room)

    def last(self, policy: Policy, request: Request, view: View, room: Room) -> Plan | None:
        return None


class Priced:
    def first(self, policy: Policy, request: Request, view: View, room: Room) -> Plan | None:
        if room.repaid and room.reserve:
            view = replace(view, empties=view.empties + 1)
        wish = policy.plan(request, replace(view, empties=PLENTY))
        missing = fresh(wish) - view.empties
        if missing <= 0:
            return _placed(wish)
        plan = policy.plan(request, view)
        displaced = min(missing * view.capacity, request.size)
        dear = plan.price - wish.price > PATIENCE * view.unit * displaced
        return None if plan.unplaced or dear else plan

    def last(self, policy: Policy, request: Request, view: View, room: Room) -> Plan | None:
        # Without it, and with no tails, what is deleted here and there could never be collected.
        return _filling(policy, request, view, room if room.repaid else Room(0))


RULES: Final[dict[str, Callable[[], Rule]]] = {"fixed": Fixed, "common": Common, "priced": Priced}
PRICING: Final = frozenset({"plan", "plan-ahead"})  # policies that come with it


def usual(name: str, policy: str) -> str:
    """The rule of that name; "" is the usual one of a policy."""
    return name or ("priced" if policy in PRICING else "fixed")


def rule(name: str) -> Rule:
    """Raises UsageError for an unknown name."""
    made = RULES.get(name)
    if made is None:
        raise UsageError(f"no admission rule {name!r}; known: {', '.join(RULES)}")
    return made()
