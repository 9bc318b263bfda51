"""The table of zones: how full each is, whose bytes live in it, and who may open another.

Pure bookkeeping in bytes; the caller issues the device commands and then tells the table. Code
between two awaits of the caller is atomic, so nothing here locks.

Life of a promise (reserve -> acquire -> release):

- `acquire` gives a kind a fresh zone, the lowest empty one, when the ledger of active zones allows.
- `reserve` promises bytes of a zone's tail exactly; `written` turns a promise into device bytes and
  `cancel` takes it back. A promise never fails later for want of space.
- `add_live` says whose bytes they are. It comes with the promise, at the latest with `written`:
  bytes that are written and nobody's are dead, and a zone of dead bytes may be reset.
- `seal` ends the promises of a zone that is about to be finished or reset.
- `release` returns an acquired zone that was never written; `reset` returns a dead one.

Invariants; `Zone.check` asserts the first two after every change:

1. live_bytes <= write_pointer + reserved <= capacity, none negative; the first not of lost zones.
2. EMPTY zones hold nothing; FULL, READ_ONLY and OFFLINE zones promise nothing.
3. Every byte of every data zone is counted once: free, tail, live, dead, pending, stranded or lost.
4. One empty zone, the emergency zone, is for collection; a save may borrow it (`borrowed`), until
   the next reset or until that is recalled, and bytes that were accepted take it as the very last.
5. A zone has one kind from acquire to reset, but for what `adopt` hands over: what copies have
   begun, and the anchors' zone, for finite data to follow them where a policy says so.
6. What the table knows beside the zones (totals, indexes) follows from the zones.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import add, sub
from typing import Final

from retainzfs.errors import NoSpace
from retainzfs.zone import GAIN_LEAST, LOST, Kind, State, Totals, Zone

JOURNAL_ACTIVE: Final = 2  # the log and the snapshot that will replace it
JOURNAL_OPEN: Final = 1  # one of them is written at a time
COLLECTION_ACTIVE: Final = 1
COLLECTION_OPEN: Final = 1
UNLIMITED: Final = 32  # a device without a limit: more zones in flight only scatter bytes
EMERGENCY_ZONES: Final = 1  # collection must always have somewhere to copy to
DATA_ACTIVE_LEAST: Final = 3  # finite, anchor, and one for everything else
SPLIT_PAIRS: Final = 4  # from here on cache/scratch and output/unhinted have a zone each
SPLIT_ALL: Final = 10  # from here on no kinds share


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """How the active zones for data are divided; see `slot_limits`."""

    total: int
    groups: dict[Kind, Kind]  # kind -> the kind in whose zone its bytes go

    def share(self, group: Kind) -> int:
        """Zones that a group can always have. Only finite may take more, while others are idle."""
        others = set(self.groups.values()) - {Kind.FINITE}
        return self.total - len(others) if group is Kind.FINITE else 1


def slot_limits(data_active: int) -> SlotLimits:
    """Division of `data_active` active zones among the kinds of data.

    Finite data takes what the others leave, at least 3 of 6; every other kind has at most one,
    opened on demand. With few zones the kinds without a retirement share theirs; finite and anchor
    data have zones of their own.
    """
    assert data_active >= DATA_ACTIVE_LEAST, f"{data_active} active zones for data are too few"
    groups = {kind: kind for kind in Kind if Kind.METADATA < kind < Kind.COLLECTION}
    if data_active < SPLIT_ALL:
        groups[Kind.SCRATCH] = Kind.CACHE
        groups[Kind.OUTPUT] = Kind.UNHINTED
    if data_active < SPLIT_PAIRS:
        groups[Kind.SCRATCH] = groups[Kind.CACHE] = Kind.UNHINTED
    return SlotLimits(data_active, groups)


class ZoneTable:
    """All zones of a device, and indexes over them that make every question O(active zones).

    `max_active` and `max_open` are the device's limits, 0 for none. `metadata` zones are marked and
    otherwise left alone: the journal owns them, and they are in no total.
    """

    def __init__(
        self,
        capacity: int,
        count: int,
        max_active: int,
        max_open: int,
        metadata: Iterable[int] = (),
    ) -> None:
        self.capacity = capacity
        self.zones = [Zone(index, capacity) for index in range(count)]
        self.data_active_limit = (max_active or UNLIMITED) - JOURNAL_ACTIVE - COLLECTION_ACTIVE
        self.data_open_limit = (max_open or UNLIMITED) - JOURNAL_OPEN - COLLECTION_OPEN
        assert self.data_open_limit >= 1, f"{max_open} open zones leave none for data"
        self.limits = slot_limits(self.data_active_limit)
        for index in metadata:
            self.zones[index].kind = Kind.METADATA
        self._empty = {zone.index for zone in self.zones if zone.kind is not Kind.METADATA}
        self.count = len(self._empty)  # zones for data
        self._heap = sorted(self._empty)  # every member of _empty, and stale indexes
        self._active: dict[Kind, set[int]] = {kind: set() for kind in Kind}
        self._dead: set[int] = set()
        self._lost: set[int] = set()  # READ_ONLY and OFFLINE
        self._loose: set[int] = set()  # FULL, and something is gained by moving what lives there
        self.totals = Totals(free=len(self._empty) * capacity)
        self.lent = False  # the emergency zone is in use; what is being collected will replace it
        self.borrowed = False  # data may have it; what a save deletes when it is done will
        self._uses = 0

    def __getitem__(self, index: int) -> Zone:
        return self.zones[index]

    # Changes are leave, change, enter (invariant 6)

    @contextmanager
    def _changing(self, zone: Zone) -> Iterator[Zone]:
        assert zone.kind is not Kind.METADATA, f"zone {zone.index} belongs to the journal"
        self._leave(zone)
        yield zone
        zone.check()
        self._enter(zone)

    def _leave(self, zone: Zone) -> None:
        self.totals = Totals(*map(sub, self.totals, zone.totals()))
        self._empty.discard(zone.index)
        self._active[zone.kind].discard(zone.index)
        self._dead.discard(zone.index)
        self._lost.discard(zone.index)
        self._loose.discard(zone.index)

    def _enter(self, zone: Zone) -> None:
        self.totals = Totals(*map(add, self.totals, zone.totals()))
        if zone.state is State.EMPTY:
            self._empty.add(zone.index)
            heapq.heappush(self._heap, zone.index)
        elif zone.active:
            self._active[zone.kind].add(zone.index)
        elif zone.state in LOST:
            self._lost.add(zone.index)
        elif zone.live_bytes and zone.gain >= GAIN_LEAST:
            self._loose.add(zone.index)
        if zone.dead:
            self._dead.add(zone.index)

    # Questions

    @property
    def empty(self) -> int:
        """Empty zones, the emergency zone included."""
        return len(self._empty)

    @property
    def empty_available(self) -> int:
        """Empty zones that data may take: all but the emergency zone, if collection has not that
        one already, and all while it is lent to a save."""
        return max(0, len(self._empty) - (0 if self.lent or self.borrowed else EMERGENCY_ZONES))

    @property
    def held_back(self) -> int:
        """Emergency zones that are there and kept for collection."""
        return len(self._empty) - self.empty_available if not self.borrowed else 0

    def group(self, kind: Kind) -> Kind:
        """The kind whose zones `kind` uses under this device's limits."""
        return self.limits.groups.get(kind, kind)

    def active(self, kind: Kind) -> list[Zone]:
        """Active zones of the kind's group, by index."""
        return [self.zones[index] for index in sorted(self._active[self.group(kind)])]

    def active_data(self) -> int:
        """Active zones in the data part of the ledger (all but the journal's and collection's)."""
        return len(self._data())

    def open_data(self) -> int:
        """Open zones in the data part of the ledger."""
        return sum(zone.state is State.OPEN for zone in self._data())

    def partial(self, kind: Kind) -> list[Zone]:
        """Zones of the kind's group that can take more bytes, by index."""
        return [zone for zone in self.active(kind) if zone.partial]

    def slots(self, kind: Kind) -> int:
        """Fresh zones that `kind` may open without finishing one of its own.

        Zones that are filled up by promises, sealed or dead count as gone: their slot comes back
        by itself (`acquire` waits for that), or for nothing (`spare`).
        """
        group = self.group(kind)
        if group is not Kind.FINITE:
            return max(0, 1 - len(self.partial(group)))
        return max(0, self.limits.total - self._partial_data())

    def has_slot(self, kind: Kind) -> bool:
        """Whether `kind` may have one more active zone at once, without waiting for a slot."""
        return self.active_data() < self.limits.total and self.slots(kind) > 0

    def crowded_by(self, kind: Kind) -> Kind | None:
        """The group that has to finish a zone before `kind` may open one; None if nobody has to."""
        group = self.group(kind)
        mine = len(self.partial(group))
        if group is Kind.COLLECTION:
            return group if mine >= COLLECTION_ACTIVE else None
        if group is not Kind.FINITE and mine >= 1:
            return group
        if self._partial_data() < self.limits.total:
            return None
        if mine >= self.limits.share(group):
            return group
        for other in sorted(set(self.limits.groups.values())):
            if len(self.partial(other)) > self.limits.share(other):
                return other
        raise AssertionError("all shares are kept and yet the active zones are used up")

    def spare(self, kind: Kind) -> Zone | None:
        """An active zone in the kind's part of the ledger that can be finished for nothing."""
        zones = self.active(kind) if kind is Kind.COLLECTION else self._data()
        return next((zone for zone in zones if zone.dead and not zone.sealed), None)

    def coldest_open(self) -> Zone | None:
        """The open data zone to close first: nothing queued, longest unused."""
        idle = [z for z in self._data() if z.state is State.OPEN and not (z.reserved or z.sealed)]
        return min(idle, key=lambda zone: zone.last_used, default=None)

    def may_reset(self, zone: Zone, durable: int) -> bool:
        """Whether a reset loses nothing: nothing lives, is promised or is being read, and every
        record that freed bytes is durable (journal sequence <= `durable`). `seal` the zone before
        the reset is issued, so that nobody is offered it meanwhile."""
        return zone.dead and not (zone.pins or zone.sealed) and zone.freed_at <= durable

    def resettable(self, durable: int) -> list[Zone]:
        """Zones that may be reset, by index."""
        dead = (self.zones[index] for index in sorted(self._dead))
        return [zone for zone in dead if self.may_reset(zone, durable)]

    def resetting(self) -> bool:
        """Whether a zone is dead and being reset."""
        return any(self.zones[index].sealed for index in self._dead)

    def awaited(self) -> bool:
        """Whether a zone is dead and being read."""
        return any(self.zones[index].pins for index in self._dead)

    def loose(self) -> list[Zone]:
        """Zones for data that may be worth emptying, by index: active ones, and full ones from
        which something is gained."""
        active = {zone.index for zone in self._data()}
        return [self.zones[index] for index in sorted(self._loose | active)]

    def states(self) -> Counter[State]:
        """How many zones for data are in each state."""
        few = chain(self._lost, *self._active.values())
        states = Counter(self.zones[index].state for index in few)
        states[State.EMPTY] = len(self._empty)
        states[State.FULL] = self.count - states.total()
        return states

    @property
    def worn(self) -> bool:
        """Whether zones have become READ_ONLY or OFFLINE."""
        return bool(self._lost)

    def stuck(self) -> list[Zone]:
        """READ_ONLY zones in which something lives, by index."""
        lost = (self.zones[index] for index in sorted(self._lost))
        return [z for z in lost if z.state is State.READ_ONLY and z.live_bytes]

    def _data(self) -> list[Zone]:
        groups = sorted(set(self.limits.groups.values()))
        return [zone for group in groups for zone in self.active(group)]

    def _partial_data(self) -> int:
        return sum(zone.partial for zone in self._data())

    # Allocation

    def acquire(self, kind: Kind) -> Zone | None:
        """A fresh zone for `kind`: the lowest empty one, active and closed from now on.

        None when the ledger of active zones is used up: finish a zone (`crowded_by`, `spare`) or
        wait for one to fill up. NoSpace when no empty zone is left for this kind.
        """
        group = self.group(kind)
        if group is Kind.COLLECTION:
            empties, allowed = self.empty, len(self._active[group]) < COLLECTION_ACTIVE
        else:
            empties = self.empty_available
            allowed = self.has_slot(group)
        if not empties:
            raise NoSpace("every zone is in use or kept for collection")
        if not allowed:
            return None
        while self._heap[0] not in self._empty:
            heapq.heappop(self._heap)
        zone = self.zones[heapq.heappop(self._heap)]
        with self._changing(zone):
            zone.kind, zone.state = group, State.CLOSED
        return zone

    def release(self, zone: Zone) -> None:
        """Gives back an acquired zone to which nothing was written."""
        assert zone.active, f"zone {zone.index}: released while {zone.state.name}"
        assert not zone.write_pointer, f"zone {zone.index}: released after a write"
        assert zone.idle, f"zone {zone.index}: released with live or promised bytes"
        with self._changing(zone):
            zone.state, zone.sealed = State.EMPTY, False

    def adopt(self, zone: Zone, kind: Kind) -> None:
        """A partial zone goes on as one of another kind: what collection filled in part as one of
        its bytes' kind, the anchors' as one for finite data."""
        assert zone.active, f"zone {zone.index}: adopted while {zone.state.name}"
        assert zone.kind is not Kind.COLLECTION or self.has_slot(kind), (
            f"zone {zone.index}: adopted beyond the limit of active zones"
        )
        with self._changing(zone):
            zone.kind = self.group(kind)

    def reserve(self, zone: Zone, nbytes: int) -> None:
        """Promises `nbytes` of the zone's tail to appends that will follow."""
        assert 0 < nbytes <= zone.tail, f"zone {zone.index}: {nbytes} of {zone.tail} promised"
        with self._changing(zone):
            zone.reserved += nbytes
            zone.last_used = self._uses = self._uses + 1

    def cancel(self, zone: Zone, nbytes: int) -> None:
        """Takes back a promise that will not be used, after `drop_live` of what was in it."""
        with self._changing(zone):
            zone.reserved -= nbytes

    def written(self, zone: Zone, nbytes: int) -> None:
        """`nbytes` of the promises are on the device now; at capacity the zone is FULL."""
        assert zone.active, f"zone {zone.index}: written while {zone.state.name}"
        with self._changing(zone):
            zone.reserved -= nbytes
            zone.write_pointer += nbytes
            zone.last_used = self._uses = self._uses + 1
            if zone.write_pointer == zone.capacity:
                zone.state, zone.sealed = State.FULL, False

    def open(self, zone: Zone) -> bool:
        """Counts the zone as open, to append to it; False when the ledger of open zones is used
        up: close one (`coldest_open`) or wait."""
        assert zone.active, f"zone {zone.index}: opened while {zone.state.name}"
        if zone.state is State.CLOSED:
            if zone.kind is not Kind.COLLECTION and self.open_data() >= self.data_open_limit:
                return False
            zone.state = State.OPEN
        return True

    def close(self, zone: Zone) -> None:
        """The zone gives its open slot back and stays active."""
        if zone.state is State.OPEN:
            zone.state = State.CLOSED

    def seal(self, zone: Zone) -> None:
        """No more promises: what is queued will be written, then the zone is finished or reset."""
        assert zone.state is not State.EMPTY, f"zone {zone.index}: sealed while EMPTY"
        with self._changing(zone):
            zone.sealed = True

    def finish(self, zone: Zone) -> None:
        """The zone is FULL on the device; its tail is stranded until the reset."""
        assert zone.active, f"zone {zone.index}: finished while {zone.state.name}"
        with self._changing(zone):
            zone.state, zone.sealed = State.FULL, False

    def reset(self, zone: Zone) -> None:
        """The zone is EMPTY on the device, and its reset count is one higher."""
        assert zone.dead, f"zone {zone.index}: reset with live or promised bytes"
        assert not zone.pins, f"zone {zone.index}: reset while it is being read"
        with self._changing(zone):
            zone.state, zone.sealed, zone.kind = State.EMPTY, False, Kind.UNHINTED
            zone.write_pointer = zone.freed_at = zone.tag = 0
            zone.epoch += 1
        self.lent = self.borrowed = False  # the emergency zone is the first to be replaced

    # Live bytes

    def add_live(self, zone: Zone, gid: int, nbytes: int) -> None:
        """`nbytes` of what the zone has promised or written belong to generation `gid`."""
        assert nbytes > 0, f"zone {zone.index}: {nbytes} live bytes added"
        with self._changing(zone):
            zone.live[gid] = zone.live.get(gid, 0) + nbytes
            zone.live_bytes += nbytes

    def drop_live(self, zone: Zone, gid: int, nbytes: int, at: int) -> None:
        """`nbytes` of generation `gid` died by the journal record with sequence `at`."""
        with self._changing(zone):
            self._take(zone, gid, nbytes)
            zone.live_bytes -= nbytes
            zone.freed_at = max(zone.freed_at, at)

    def move_live(self, zone: Zone, old: int, new: int, nbytes: int) -> None:
        """`nbytes` change hands from generation `old` to `new`, in place."""
        self._take(zone, old, nbytes)
        zone.live[new] = zone.live.get(new, 0) + nbytes

    @staticmethod
    def _take(zone: Zone, gid: int, nbytes: int) -> None:
        left = zone.live.get(gid, 0) - nbytes
        assert nbytes > 0, f"zone {zone.index}: {nbytes} live bytes taken"
        assert left >= 0, f"zone {zone.index}: generation {gid} has too few live bytes"
        if left:
            zone.live[gid] = left
        else:
            del zone.live[gid]

    def pin(self, zone: Zone) -> None:
        """A reader is inside: no reset."""
        zone.pins += 1

    def unpin(self, zone: Zone) -> None:
        zone.pins -= 1
        assert zone.pins >= 0, f"zone {zone.index}: unpinned more often than pinned"

    # What the device says

    def observe(self, zone: Zone, state: State, write_pointer: int) -> None:
        """Takes over the device's word on a zone, at mount or after a failed write. Promises that
        the new state cannot keep must have been cancelled."""
        with self._changing(zone):
            zone.state, zone.write_pointer = state, write_pointer
            zone.sealed = zone.sealed and zone.active

    def restore(self, zone: Zone, kind: Kind, epoch: int) -> None:
        """What the journal knows of a zone at mount; `observe` and `add_live` tell the rest."""
        with self._changing(zone):
            zone.kind, zone.epoch = self.group(kind), epoch
