"""What there is to plan with: room, views of it for a policy, and what other plans have claimed.

A lane is a flow of bytes with one retirement: a generation, or a kind of data that has none. Its
plan comes from the placement policy and is a soft claim: other plans leave that room alone, but
what was accepted goes there all the same when it has no other place. A claim lapses when its
generation is complete, when the next one of its stream begins, or when its lane has been idle for a
while.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import trio

from retainzfs import placement
from retainzfs.layout import BLOCK, INLINE_SUMS_MAX, stored
from retainzfs.zone import Kind
from retainzfs.zones import ZoneTable

if TYPE_CHECKING:
    from retainzfs.namespace import Run
    from retainzfs.stream import OpenRun

P = TypeVar("P")

DATA_KINDS = tuple(k for k in Kind if k not in (Kind.METADATA, Kind.COLLECTION))
HINTED = frozenset({Kind.FINITE, Kind.ANCHOR})  # kinds that the policy places
IN_FLIGHT = 2  # appends of a lane: while one is written the next waits in the device's queue
CLAIM_IDLE_S = 10.0  # without a write, after which others may plan with what a lane has claimed


class Hint(NamedTuple):
    """What retention knows about a lane's bytes."""

    kind: Kind
    retire_s: float  # epoch; inf for an anchor
    size: int  # bytes expected of the whole generation, 0 when unknown
    files: int = 0  # that the generation before had


class Foresight(Protocol):
    """What retention knows of all generations; times in seconds on the mount's timeline."""

    def hint_of(self, generation: int) -> Hint: ...

    def retire_of(self, generation: int) -> float: ...

    def arrivals(self) -> list[placement.Arrival]: ...

    def milestones(self) -> bool: ...

    def unit_s(self) -> float: ...

    def same_stream(self, one: int, other: int) -> bool: ...


class Lane:
    """`key` is a generation (> 0) or a kind of data without one (-kind)."""

    __slots__ = (
        "allowance", "begun_s", "closed", "copies", "epoch", "key", "kind", "left", "open",
        "placed", "planned", "queue", "redo", "reserve", "retire_s", "room", "steps", "taken",
        "used_s", "working", "zone",
    )  # fmt: skip

    def __init__(self, key: int, kind: Kind, *, copies: bool = False) -> None:
        self.key = key
        self.kind = kind  # of the data; the hint of a generation overrides it
        self.copies = copies  # collection's
        self.reserve = copies  # whether it may take the emergency zone
        self.open: OpenRun | None = None  # shared by the lane's small files
        self.queue: deque[OpenRun] = deque()
        self.redo: deque[tuple[OpenRun, Run]] = deque()  # runs whose append failed
        self.room = trio.Semaphore(IN_FLIGHT)  # appends submitted and not ended
        self.working = False
        self.zone: int | None = None  # the zone being filled
        self.epoch = 0  # of that zone; after a reset it may be anybody's
        self.steps: deque[placement.Step] = deque()
        self.left = 0  # bytes of the step that is being carried out
        self.placed = 0  # bytes of the lane that have a zone
        self.taken = 0  # bytes that programs wrote to it
        self.allowance = 0  # bytes that they may write before room is looked for again
        self.planned = False  # whether there was a place for all of these
        self.begun_s = -math.inf  # when it was planned first
        self.used_s = -math.inf  # when it last planned or placed anything
        self.retire_s = math.inf  # of its bytes, when they were planned
        self.closed = False  # its generation is complete


def fit(tail_blocks: int, want: int) -> int:
    """Return how many of `want` data blocks fit, with the trailer block that longer runs have."""
    if want + (want > INLINE_SUMS_MAX) <= tail_blocks:
        return want
    return (
        tail_blocks - 1 if tail_blocks - 1 > INLINE_SUMS_MAX else min(tail_blocks, INLINE_SUMS_MAX)
    )


def of_files(nbytes: int, files: int) -> int:
    """Return the bytes that so many data bytes take about that come in so many files: each ends in
    a block that is half full, and has a run of its own."""
    return stored(nbytes) + (files + files // 2) * BLOCK


def usable(tail: int) -> int:
    """Return the blocks that runs can fill in a tail of so many bytes: one that is cut at the end
    has a trailer more."""
    return max(0, tail // BLOCK - 1)


class Planning:
    """Room and claims of all lanes. Nothing here waits."""

    def __init__(
        self,
        table: ZoneTable,
        policy: placement.Policy,
        foresight: Foresight,
        now_s: Callable[[], float],
    ) -> None:
        self.table = table
        self.policy = policy
        self.foresight = foresight
        self.retire_of = foresight.retire_of
        self.unit_s = foresight.unit_s
        self.now_s = now_s
        self.lanes: dict[int, Lane] = {}
        self.staged: Callable[[], dict[Kind, int]] = dict  # bytes without a promise, by kind
        self.admitted = dict.fromkeys(Kind, 0)  # bytes of writes that are about to be staged
        self.copying = False  # collection is at work, and the tail of its zone is its own
        self.plans = 0
        self.borrows = 0  # times that the emergency zone was lent to a save
        self._groups = sorted({table.group(kind) for kind in DATA_KINDS})
        self._whole = usable(table.capacity)
        self._planning_ns = 0

    def lane(self, key: int, kind: Kind = Kind.UNHINTED, *, copies: bool = False) -> Lane:
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(key, kind, copies=copies)
        return lane

    def close(self, key: int) -> None:
        """The generation is complete: its claims lapse, what it still stages goes on."""
        lane = self.lanes.get(key)
        if lane is not None:
            lane.closed = True
            self.lapse(lane)
            self.drop_idle(lane)

    def drop_idle(self, lane: Lane) -> None:
        """Forget a closed lane that has nothing more to write."""
        idle = lane.open is None and not (lane.queue or lane.redo or lane.working)
        if lane.closed and idle and self.lanes.get(lane.key) is lane:
            del self.lanes[lane.key]

    def hint(self, lane: Lane) -> Hint:
        if lane.key <= 0:
            return Hint(lane.kind, math.inf, 0)
        hint = self.foresight.hint_of(lane.key)
        if hint.kind is Kind.ANCHOR and not self.policy.apart:
            return hint._replace(kind=Kind.FINITE)
        return hint

    def kind_of(self, generation: int) -> Kind:
        """The kind of zone that a generation's bytes go to."""
        kind = self.foresight.hint_of(generation).kind
        if kind is not Kind.ANCHOR:
            return kind
        mingled = self.policy.mingles and not self.foresight.milestones()
        return Kind.FINITE if mingled or not self.policy.apart else kind

    # Room

    def fits(self, kind: Kind, nbytes: int) -> bool:
        """Whether bytes may be staged and go where they belong, all that is staged included."""
        waiting = self._waiting()
        fresh = self.table.empty_available
        if fresh > len(DATA_KINDS) + 2 * (sum(waiting.values()) + nbytes) // self.table.capacity:
            return True
        return stored(nbytes) <= self.room(kind) * BLOCK

    def holds(self, nbytes: int) -> bool:
        """Whether bytes may be staged: all that is staged has a place somewhere, without a wait."""
        return stored(nbytes) <= self.spare() * BLOCK

    def _waiting(self) -> dict[Kind, int]:
        waiting = dict(self.staged())
        for kind, nbytes in self.admitted.items():
            if nbytes:
                waiting[kind] = waiting.get(kind, 0) + nbytes
        return waiting

    def spare(self) -> int:
        """Return how many blocks, trailers included, the tails and the empty zones have beyond
        what is staged, whatever the kind."""
        groups = list(self._groups)
        if self.table.empty and not (self.copying or self.table.borrowed):
            groups.append(Kind.COLLECTION)  # the next copies have the emergency zone
        tails = (zone for group in groups for zone in self.table.partial(group))
        room = sum(usable(zone.tail) for zone in tails) + self.table.empty_available * self._whole
        return room - sum(self._waiting().values()) // BLOCK

    def room(self, kind: Kind) -> int:
        """Return how many blocks a kind has in its own tails and in empty zones, beyond what is
        staged of all kinds."""
        table = self.table
        waiting = self._waiting()
        mine = table.group(kind)
        fresh = table.empty_available
        if fresh and table.active_data() >= table.limits.total:
            fresh -= 1  # opening a zone finishes another, and strands its tail
        left = 0
        for group in self._groups:
            staged = sum(n for k, n in waiting.items() if table.group(k) is group) // BLOCK
            over = staged - sum(usable(zone.tail) for zone in table.partial(group))
            if over > 0:
                fresh -= -(-over // self._whole)
                left = -over % self._whole if group is mine else left
            elif group is mine:
                left = -over
        return left + fresh * self._whole if fresh >= 0 else 0

    # Plans

    def decide(self, decision: Callable[[], P]) -> P:
        """Return what a decision of the policy comes to, and take its time."""
        started = time.perf_counter_ns()
        made = decision()
        self._planning_ns += time.perf_counter_ns() - started
        self.plans += 1
        return made

    def request(self, lane: Lane, hint: Hint, size: int) -> placement.Request:
        begun = lane.begun_s if math.isfinite(lane.begun_s) else self.now_s()
        whole = max(of_files(hint.size, hint.files), size)
        return placement.Request(size, hint.retire_s, whole, hint.retire_s - begun)

    def carry_out(self, lane: Lane, request: placement.Request, plan: placement.Plan) -> None:
        """Let the lane follow a plan from its next run on."""
        lane.used_s = self.now_s()
        if math.isinf(lane.begun_s):
            lane.begun_s = lane.used_s
            self._supersede(lane)
        lane.steps, lane.left, lane.zone = deque(plan.steps), 0, None
        lane.retire_s = request.retire

    # Claims

    def view(self, kind: Kind, lane: Lane | None = None) -> placement.View:
        """Return what a policy may know; for a lane without what the others have claimed."""
        milestones = self.foresight.milestones() or not self.policy.apart
        if self.policy.mingles and not milestones and kind is Kind.FINITE:
            for zone in self.table.partial(Kind.ANCHOR):
                self.table.adopt(zone, Kind.FINITE)
        view = placement.survey(
            self.table,
            kind,
            self.retire_of,
            self.now_s(),
            unit=self.unit_s(),
            arrivals=self.foresight.arrivals(),
            milestones=milestones,
        )
        return view if lane is None else self._unclaimed(view, lane)

    def _unclaimed(self, view: placement.View, lane: Lane) -> placement.View:
        zones = {zone.index: zone for zone in view.zones}
        empties, slots = view.empties, view.slots
        for other in list(self.lanes.values()):
            if other is lane or other.copies or self._idle(other):
                continue
            steps = list(other.steps)
            if other.zone is not None and other.left:
                steps.append(placement.Step(other.zone, other.left))
            for step in steps:
                if step.zone is None:
                    empties -= 1
                    slots -= step.nbytes < usable(self.table.capacity) * BLOCK
                    slots += step.finish is not None and zones.pop(step.finish, None) is not None
                elif (zone := zones.pop(step.zone, None)) is not None:
                    tail = zone.tail - step.nbytes
                    slots += tail < BLOCK
                    if tail >= BLOCK:
                        latest = max(zone.retire_max, other.retire_s)
                        earliest = min(zone.retire_min, other.retire_s)
                        zones[zone.index] = replace(
                            zone,
                            tail=tail,
                            written=view.capacity - tail,
                            retire_max=latest,
                            retire_min=earliest,
                        )
        ordered = [zones[index] for index in sorted(zones)]
        return replace(view, zones=ordered, empties=max(0, empties), slots=max(0, slots))

    def _idle(self, lane: Lane) -> bool:
        """Whether a lane has no claims, after those that are too old have lapsed."""
        if self.now_s() - lane.used_s > CLAIM_IDLE_S and (lane.steps or lane.left):
            self.lapse(lane)
        return not (lane.steps or lane.left)

    def lapse(self, lane: Lane) -> None:
        """The lane claims nothing any more; what it writes yet is planned anew."""
        lane.steps.clear()
        lane.left = lane.allowance = 0
        self.recall()

    def _supersede(self, lane: Lane) -> None:
        """A generation begins: whatever became of those before it in its stream, they are over."""
        for other in list(self.lanes.values()):
            if other is not lane and self.foresight.same_stream(lane.key, other.key):
                self.lapse(other)

    def recall(self) -> None:
        """A zone that was lent and not taken is the emergency zone again, if nothing needs it."""
        claimed = sum(step.zone is None for lane in self.lanes.values() for step in lane.steps)
        if self.table.borrowed and self.table.empty > claimed:
            self.table.borrowed = False
            self.table.borrowed = self.spare() < 0

    def lend(self) -> None:
        """The emergency zone is for data until the next reset."""
        self.table.borrowed = True
        self.borrows += 1

    def decision_us(self) -> float | None:
        """Mean time to plan a generation, microseconds."""
        return self._planning_ns / self.plans / 1000 if self.plans else None
