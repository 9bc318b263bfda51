"""Before the first byte of a generation: a plan for all of it, or what has to be done for one.

The rule (retainzfs.placement.admission) says whether the generation may be placed as things are. If
not, room is gained step by step, and the rule is asked again: what is dead is reset, then one zone
is emptied. When nothing more is gained the rule has its last word. What it refuses even then may
still be written, to whatever tails there are, and is then refused write by write.

A generation whose size is not known is admitted a zone at a time; one that becomes larger than
expected is asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from retainzfs.lanes import Lanes
from retainzfs.layout import stored
from retainzfs.namespace import Namespace
from retainzfs.placement import Plan, Policy, Request, View
from retainzfs.placement.admission import Room, Rule, fresh
from retainzfs.planning import HINTED, Hint, Lane, of_files
from retainzfs.reclaim import Reclaim
from retainzfs.zone import LOST, Zone

OVERRUN = 16  # a generation that is larger than expected is taken to be so by this part, at least

Ask = Callable[[Policy, Request, View, Room], Plan | None]


class Admission:
    def __init__(
        self,
        lanes: Lanes,
        reclaim: Reclaim,
        namespace: Namespace,
        rule: Rule,
        due: Callable[[int], set[int]],
        members: Mapping[int, set[int]],
    ) -> None:
        self.lanes = lanes
        self.table = lanes.table
        self.reclaim = reclaim
        self.namespace = namespace
        self.rule = rule
        self.due = due
        self.members = members  # generation → inodes

    async def admit(self, lane: Lane, nbytes: int) -> None:
        """So many bytes are about to be written: return when their generation has a plan, or none
        can be made. Raises what a commit raises."""
        if lane.allowance < nbytes:
            hint = self.lanes.hint(lane)
            if hint.kind not in HINTED:
                return
            if not self._planned(lane, hint, nbytes, self.rule.first):
                async with self.reclaim.turn:
                    await self._make_room(lane, nbytes)
        lane.allowance -= nbytes
        lane.taken += nbytes

    async def _make_room(self, lane: Lane, nbytes: int) -> None:
        """Gain room until the rule agrees, or there is none to be gained."""
        hint = self.lanes.hint(lane)
        for _ in self.table.zones:
            if lane.allowance >= nbytes:
                return  # another writer of the generation was as quick
            await self.lanes.finish_small()
            if self._planned(lane, hint, nbytes, self.rule.first):
                return
            if not await self.reclaim.gain(self._rest(lane, hint, nbytes)):
                break
        if not self._planned(lane, hint, nbytes, self.rule.last):
            lane.allowance = self._rest(lane, hint, nbytes)
            lane.planned = False

    def _planned(self, lane: Lane, hint: Hint, nbytes: int, ask: Ask) -> bool:
        """Let the lane follow the plan that the rule agrees to; False if there is none."""
        rest = self._rest(lane, hint, nbytes)
        size = max(stored(nbytes), of_files(lane.taken + rest, hint.files) - lane.placed)
        if not hint.size:
            size = min(size, self.table.capacity)
        request = self.lanes.request(lane, hint, size)
        view = self.lanes.view(hint.kind, lane)
        scarce = self.table.held_back and view.empties <= size // self.table.capacity + 1
        due = self.due(lane.key) if scarce else set()
        room = self._room(due)
        plan = self.lanes.decide(partial(ask, self.lanes.policy, request, view, room))
        if plan is None:
            return False
        if fresh(plan) > view.empties:
            self.lanes.lend()
        self.lanes.carry_out(lane, request, plan)
        lane.allowance = rest
        lane.planned = True
        return True

    def _rest(self, lane: Lane, hint: Hint, nbytes: int) -> int:
        """Bytes that are expected of the generation yet; of one that nobody knows, a zone's."""
        if not hint.size:
            capacity = self.table.capacity
            return max(nbytes, 2 * capacity - stored(capacity))
        rest = hint.size - lane.taken
        return rest if rest >= nbytes else max(nbytes, hint.size // OVERRUN)

    def _room(self, due: set[int]) -> Room:
        """What is held back, and whether a zone is emptied when these generations are gone."""
        reserve = self.table.held_back
        members = (ino for g in due for ino in self.members.get(g, ()))
        extents = (e for ino in members for e in self.namespace.inodes[ino].extents)
        zones = {e.run.zone for e in extents if e.run.zone >= 0}
        return Room(reserve, any(self._emptied(self.table[zone], due) for zone in zones))

    @staticmethod
    def _emptied(zone: Zone, due: set[int]) -> bool:
        """Whether nothing lives in a zone when these generations are gone, so that it is reset."""
        return not zone.reserved and zone.state not in LOST and zone.live.keys() <= due
