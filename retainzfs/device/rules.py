"""The zone state machine, pure: what the commands do to conditions and write pointers.

Invariants
- open <= max_open and active <= max_active after every command.
- A command that breaks a rule raises ZoneRuleError and changes nothing.
- The write pointer moves when an append has ended, never before, and not when it failed.

Source: NVMe ZNS Command Set Specification 1.1, section 2.1.1 (states, resources, transitions).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from retainzfs._zio import aligned
from retainzfs.device.protocol import (
    ACTIVE,
    BLOCK,
    HEADER,
    OPEN,
    TRAILER_BLOCKS,
    Condition,
    Geometry,
    Sums,
    ZoneReport,
)
from retainzfs.errors import RetainzError, ZoneRuleError

WRITABLE = ACTIVE | {Condition.EMPTY}


@dataclass(slots=True)
class ZoneState:
    """What a device remembers of a zone over a power cycle. Pointer in bytes."""

    condition: Condition = Condition.EMPTY
    pointer: int = 0
    resets: int = 0


class Pending:
    """An append that was admitted and has not ended."""

    __slots__ = ("length", "lost")

    def __init__(self, length: int) -> None:
        self.length = length
        self.lost = False  # one before it in the zone failed, so its place is gone


class ZoneRules:
    """Zone states under the rules. `changed` collects the zones whose state differs since it was
    last emptied by its reader."""

    def __init__(
        self, name: str, geometry: Geometry, states: Sequence[ZoneState] | None = None
    ) -> None:
        self.name = name
        self.geometry = geometry
        self.states = list(states or (ZoneState() for _ in range(geometry.zone_count)))
        self.changed: set[int] = set()
        self._pending: dict[int, list[Pending]] = {}  # zone -> appends that run, in order
        self._commanded: set[int] = set()  # zones in which a command runs
        self._implicit: dict[int, None] = {}  # implicitly open zones, in the order of their opening
        self._explicit: set[int] = set()
        self._closed: set[int] = set()
        for zone, state in enumerate(self.states):
            if state.condition in ACTIVE:
                self._set(zone, Condition.CLOSED if state.pointer else Condition.EMPTY)
        # A crash between the writes of two state pages brings back zones that were active before
        # beside those that are now. Without the surplus ones there could be no more appends at all.
        for zone in sorted(self._closed)[geometry.max_active or len(self._closed) :]:
            self._set(zone, Condition.FULL)

    @property
    def open(self) -> int:
        return len(self._implicit) + len(self._explicit)

    @property
    def active(self) -> int:
        return self.open + len(self._closed)

    def report(self, zones: range | None = None) -> list[ZoneReport]:
        zones = range(len(self.states)) if zones is None else zones
        return [self.report_zone(zone) for zone in zones]

    def report_zone(self, zone: int) -> ZoneReport:
        state = self.states[zone]
        pointer = self._reported_pointer(state)
        return ZoneReport(zone, state.condition, pointer, self.geometry.zone_capacity)

    def power_cycle(self) -> None:
        """Open zones become closed, those without data empty."""
        for zone in (*self._implicit, *self._explicit, *self._closed):
            self._set(zone, Condition.CLOSED if self.states[zone].pointer else Condition.EMPTY)

    def set_condition(self, zone: int, condition: Condition) -> None:
        """What only a failing device does: READ_ONLY or OFFLINE."""
        self._set(zone, condition)

    def adopt(self, zone: int, condition: Condition, pointer: int) -> None:
        """Take over what a device tells of a zone, unless something runs in it."""
        if zone in self._pending or zone in self._commanded:
            return
        if self.states[zone].condition != condition:
            self._set(zone, condition)
        self.states[zone].pointer = pointer

    # An append is two steps, because its I/O lies between them.

    def begin_append(self, zone: int, offset: int, length: int) -> Pending:
        """Admit `length` bytes at `offset`, behind the appends that run; the zone is opened."""
        state = self._state(zone)
        running = self._pending.get(zone, [])
        pointer = state.pointer + sum(pending.length for pending in running)
        if state.condition not in WRITABLE:
            raise self._error(zone, f"append to a zone that is {label(state.condition)}")
        self._refuse_commanded(zone, "append")
        if any(pending.lost for pending in running):
            raise self._error(zone, "append behind one that failed")
        if length <= 0 or length % BLOCK:
            raise self._error(zone, f"append of {length} bytes, not whole blocks")
        if offset != pointer:
            raise self._error(zone, f"append at byte {offset}, but the write pointer is {pointer}")
        if offset + length > self.geometry.zone_capacity:
            raise self._error(
                zone,
                f"append of {length} bytes at {offset} passes the capacity"
                f" of {self.geometry.zone_capacity}",
            )
        if state.condition not in OPEN:
            self._acquire(zone)
            self._set(zone, Condition.IMPLICIT_OPEN)
        pending = Pending(length)
        self._pending.setdefault(zone, []).append(pending)
        return pending

    def end_append(self, zone: int) -> None:
        """The oldest append that runs has its bytes on the device: move the pointer."""
        state = self.states[zone]
        state.pointer += self._ended(zone).length
        self.changed.add(zone)
        assert state.pointer <= self.geometry.zone_capacity, f"zone {zone} is beyond its capacity"
        if state.pointer == self.geometry.zone_capacity and state.condition in ACTIVE:
            self._set(zone, Condition.FULL)

    def fail_append(self, zone: int) -> None:
        """The oldest append that runs did not get there: the pointer stays, and the appends
        behind it are lost with it."""
        self._ended(zone)
        for pending in self._pending.get(zone, []):
            pending.lost = True

    def _ended(self, zone: int) -> Pending:
        running = self._pending[zone]
        ended = running.pop(0)
        if not running:
            del self._pending[zone]
        return ended

    def check_read(self, zone: int, offset: int, length: int) -> None:
        state = self._state(zone)
        if state.condition == Condition.OFFLINE:
            raise self._error(zone, "read from a zone that is offline")
        if length <= 0 or length % BLOCK or offset < 0 or offset % BLOCK:
            raise self._error(zone, f"read of {length} bytes at {offset}, not whole blocks")
        limit = self._reported_pointer(state)
        if offset + length > limit:
            raise self._error(
                zone, f"read of {length} bytes at {offset} passes the write pointer {limit}"
            )

    # The other commands: a check, and what the zone is then. Where the device takes its time for a
    # command it is `running` between the two.

    def check_reset(self, zones: Iterable[int]) -> list[int]:
        """Returns those of the zones that a reset changes."""
        zones = list(dict.fromkeys(zones))
        for zone in zones:
            condition = self._state(zone).condition
            if condition in (Condition.READ_ONLY, Condition.OFFLINE, Condition.NOT_WP):
                raise self._error(zone, f"reset of a zone that is {label(condition)}")
            self._refuse_running(zone, "reset")
        return [zone for zone in zones if self.states[zone].condition != Condition.EMPTY]

    def reset(self, zones: Iterable[int]) -> list[int]:
        """Make the zones empty; returns those that were not."""
        held = self.check_reset(zones)
        for zone in held:
            self._set(zone, Condition.EMPTY)
            self.states[zone].pointer = 0
            self.states[zone].resets += 1
        return held

    def check_finish(self, zone: int) -> bool:
        """Returns whether a finish changes the zone."""
        condition = self._state(zone).condition
        if condition not in WRITABLE | {Condition.FULL}:
            raise self._error(zone, f"finish of a zone that is {label(condition)}")
        self._refuse_running(zone, "finish")
        return condition != Condition.FULL

    def finish(self, zone: int) -> None:
        """Make the zone full; an empty one needs no free resource (its need is momentary)."""
        if self.check_finish(zone):
            self._set(zone, Condition.FULL)

    def open_zone(self, zone: int) -> None:
        condition = self._state(zone).condition
        if condition not in WRITABLE:
            raise self._error(zone, f"open of a zone that is {label(condition)}")
        self._refuse_running(zone, "open")
        self._acquire(zone)
        self._set(zone, Condition.EXPLICIT_OPEN)

    def check_close(self, zone: int) -> None:
        condition = self._state(zone).condition
        if condition not in ACTIVE:
            raise self._error(zone, f"close of a zone that is {label(condition)}")
        self._refuse_running(zone, "close")

    def close_zone(self, zone: int) -> None:
        self.check_close(zone)
        # Without data too: a zone of ZBC would be empty then, one of ZNS is not.
        self._set(zone, Condition.CLOSED)

    @contextmanager
    def running(self, *zones: int) -> Iterator[None]:
        """A command runs in the zones: no append and no other command is admitted meanwhile."""
        self._commanded.update(zones)
        try:
            yield
        finally:
            self._commanded.difference_update(zones)

    def _acquire(self, zone: int) -> None:
        """Have the resources to open `zone`, closing another one if that is the only way."""
        condition = self.states[zone].condition
        if condition in OPEN:
            return
        max_open, max_active = self.geometry.max_open, self.geometry.max_active
        if max_active and condition == Condition.EMPTY and self.active >= max_active:
            raise self._error(zone, f"too many active zones, the limit is {max_active}")
        if max_open and self.open >= max_open:
            if not self._implicit:
                raise self._error(
                    zone, f"too many zones are open explicitly, the limit is {max_open}"
                )
            self._set(next(iter(self._implicit)), Condition.CLOSED)

    def _set(self, zone: int, condition: Condition) -> None:
        state = self.states[zone]
        if state.condition != condition:
            self.changed.add(zone)
        self._implicit.pop(zone, None)
        self._explicit.discard(zone)
        self._closed.discard(zone)
        state.condition = condition
        if condition == Condition.IMPLICIT_OPEN:
            self._implicit[zone] = None
        elif condition == Condition.EXPLICIT_OPEN:
            self._explicit.add(zone)
        elif condition == Condition.CLOSED:
            self._closed.add(zone)

    def _state(self, zone: int) -> ZoneState:
        if not 0 <= zone < len(self.states):
            raise self._error(zone, f"no such zone; there are {len(self.states)}")
        return self.states[zone]

    def _reported_pointer(self, state: ZoneState) -> int:
        full = state.condition == Condition.FULL
        return self.geometry.zone_capacity if full else state.pointer

    def _refuse_running(self, zone: int, command: str) -> None:
        if zone in self._pending:
            raise self._error(zone, f"{command} while an append runs")
        self._refuse_commanded(zone, command)

    def _refuse_commanded(self, zone: int, command: str) -> None:
        if zone in self._commanded:
            raise self._error(zone, f"{command} while a command runs")

    def _error(self, zone: int, text: str) -> ZoneRuleError:
        return ZoneRuleError(self.name, zone, text)


def label(condition: Condition) -> str:
    return condition.name.lower().replace("_", " ")


def check_append(name: str, zone: int, data: memoryview, header: bytes) -> int:
    """Bytes that an append with these arguments takes; ZoneRuleError for arguments no device
    could use. Alignment in memory is checked everywhere, not only where O_DIRECT needs it."""
    length = data.nbytes
    head = len(header)
    if not aligned(data):
        raise ZoneRuleError(name, zone, "append from memory that is not aligned to 4096")
    if head not in (0, HEADER):
        raise ZoneRuleError(name, zone, f"append with a header of {head} bytes, not {HEADER}")
    if head and length > TRAILER_BLOCKS * BLOCK:
        raise ZoneRuleError(
            name, zone, f"append of {length} bytes; a trailer covers {TRAILER_BLOCKS} blocks"
        )
    return length + (BLOCK if head else 0)


async def refused(error: RetainzError) -> Sums:
    """The value of an append that was not admitted: its caller learns why by awaiting it."""
    raise error


def first_bad_block(found: bytes, expected: bytes) -> int:
    """Index of the first block whose checksum (4 bytes each) differs, or -1."""
    if len(found) != len(expected):
        raise ValueError(f"{len(expected)} bytes of checksums for {len(found) // 4} blocks")
    if found == expected:
        return -1
    return next(i for i in range(0, len(found), 4) if found[i : i + 4] != expected[i : i + 4]) // 4
