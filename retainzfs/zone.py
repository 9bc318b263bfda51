"""One zone: what it holds, how full it is, whose bytes live in it.

Only the table of zones changes one (`zones`, which has the invariants).
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from retainzfs.layout import BLOCK, stored

GAIN_LEAST: Final = 4 * BLOCK  # copying a zone for less would run in circles over trailers


class Kind(enum.IntEnum):
    """What a zone holds. One kind a zone; only `adopt` changes it."""

    METADATA = 0
    FINITE = 1
    ANCHOR = 2
    UNHINTED = 3
    CACHE = 4
    SCRATCH = 5
    OUTPUT = 6
    COLLECTION = 7


class State(enum.IntEnum):
    """Zone state, numbered as the zone conditions of NVMe ZNS (OPEN covers both kinds of open)."""

    EMPTY = 0x1
    OPEN = 0x2
    CLOSED = 0x4
    READ_ONLY = 0xD
    FULL = 0xE
    OFFLINE = 0xF


ACTIVE: Final = frozenset({State.OPEN, State.CLOSED})
LOST: Final = frozenset({State.READ_ONLY, State.OFFLINE})


class Totals(NamedTuple):
    """Bytes of all data zones; the fields sum to the capacity."""

    free: int = 0  # empty zones, the emergency zone included
    tail: int = 0  # active zones, above what is written and promised
    live: int = 0
    dead: int = 0  # written and nobody's, not yet reset
    pending: int = 0  # promised and not yet anybody's
    stranded: int = 0  # above the write pointer of zones that take no more bytes
    lost: int = 0  # READ_ONLY and OFFLINE zones, above what lives in them


@dataclass(frozen=True, slots=True)
class ZoneSummary:
    """What placement knows of one partial zone. Bytes, and times in the caller's unit."""

    index: int
    tail: int  # u: bytes that can still be promised
    written: int  # w: bytes written or promised, capacity - tail
    retire_max: float  # R: latest retirement of its live bytes
    retire_min: float  # m: earliest retirement of its live bytes
    tag: int = 0  # what the policy noted when the zone was opened; lost with the mount


@dataclass(slots=True, eq=False)
class Zone:
    """One zone. Read freely; only ZoneTable changes it."""

    index: int
    capacity: int
    write_pointer: int = 0  # bytes written on the device
    reserved: int = 0  # bytes promised to queued appends above the write pointer
    kind: Kind = Kind.UNHINTED  # means nothing while EMPTY
    state: State = State.EMPTY
    sealed: bool = False  # takes no more promises: to be finished or reset
    epoch: int = 0  # how often it was reset; extents carry it
    live: dict[int, int] = field(default_factory=dict)  # generation id -> live bytes
    live_bytes: int = 0
    pins: int = 0  # readers inside
    freed_at: int = 0  # journal sequence of the last record that freed bytes here
    last_used: int = 0  # the table's use counter at the last promise or write
    tag: int = 0  # the placement policy's

    @property
    def tail(self) -> int:
        """Bytes that can still be promised."""
        if self.sealed or self.state not in ACTIVE:
            return 0
        return self.capacity - self.write_pointer - self.reserved

    @property
    def active(self) -> bool:
        return self.state in ACTIVE

    @property
    def idle(self) -> bool:
        """Holds nothing that lives and nothing that is promised."""
        return not self.live_bytes and not self.reserved

    @property
    def partial(self) -> bool:
        """Takes more bytes. Not once its last byte died: a reset gains more than filling it."""
        return self.tail > 0 and not self.idle

    @property
    def dead(self) -> bool:
        """Nothing but a reset is left to do with it (which may have to wait, see `resettable`)."""
        used = self.write_pointer > 0 or self.state is State.FULL
        return used and self.idle and self.state not in LOST

    @property
    def gain(self) -> int:
        """Bytes won by moving what lives here elsewhere, trailers included."""
        return self.capacity - self.tail - stored(self.live_bytes)

    def totals(self) -> Totals:
        """Where this zone's capacity is counted."""
        if self.state is State.EMPTY:
            return Totals(free=self.capacity)
        live = self.live_bytes
        if self.state in LOST:
            return Totals(live=live, lost=self.capacity - live)
        used = self.write_pointer + self.reserved
        dead = max(0, self.write_pointer - live)
        tail = self.tail
        return Totals(0, tail, live, dead, used - live - dead, self.capacity - used - tail)

    def check(self) -> None:
        """Invariants 1 and 2."""
        used = self.write_pointer + self.reserved
        assert min(self.write_pointer, self.reserved, self.live_bytes) >= 0, f"negative: {self}"
        assert used <= self.capacity, f"zone {self.index}: {used} bytes used, over its capacity"
        if self.state not in ACTIVE:
            assert not self.reserved, f"zone {self.index}: promises in a {self.state.name} zone"
        if self.state is State.EMPTY:
            assert not used, f"zone {self.index}: EMPTY with {used} bytes used"
        if self.state not in LOST:
            assert self.live_bytes <= used, f"zone {self.index}: more live bytes than used ones"


def summary(
    zone: Zone, retire_of: Callable[[int], float], now: float, unit: float = 1.0
) -> ZoneSummary:
    """The zone as placement sees it at `now`, one pass over its generations.

    `retire_of` maps a generation id to its retirement (inf for an anchor). What is retired but not
    deleted yet, and what is promised but not yet anybody's, counts as retiring one `unit` from now.
    """
    soon = now + unit
    times = [max(retire_of(gid), soon) for gid in zone.live] or [soon]
    tail = zone.tail
    return ZoneSummary(zone.index, tail, zone.capacity - tail, max(times), min(times), zone.tag)
