"""A device in memory that fails the way devices fail: by a plan, or by chance from a seed.

It records every operation that changes the medium, and can at any moment say how the medium might
come back if the power went now. What comes back:

- Everything that had ended before a flush began that has ended.
- Of the rest each zone keeps its first few operations, in their order, the last append perhaps in
  part. Of the blocks that were kept so, any may be torn: zeros, noise, or what stood there before.
- Above a write pointer there may be bytes that nobody was told of.
"""

from __future__ import annotations

import copy
import errno
import math
import random
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import trio

from retainzfs.device.memory import MemoryDevice
from retainzfs.device.protocol import BLOCK, Condition, Geometry, Sums, device_error
from retainzfs.device.rules import Pending, ZoneRules, ZoneState, check_append, refused
from retainzfs.errors import DeviceError, RetainzError, ZoneRuleError

KEEP_ALL = 0.5  # chances of a zone after a power cut: all that was not flushed is there
KEEP_NONE = 0.2  # or nothing of it
GHOSTS = 0.5  # chance that appends which were not kept left their bytes above the pointer
TEARING = (0.0, 0.0, 0.3, 1.0)  # shares of the unflushed blocks that are torn, equally likely


class PowerCut(BaseException):
    """The device stopped answering."""


class Operation(NamedTuple):
    """One change of the medium. `number` counts from 1; offset and data are an append's."""

    number: int
    kind: str  # append, flush, reset, finish
    zones: tuple[int, ...] = ()
    offset: int = 0
    data: bytes = b""
    running: frozenset[int] = frozenset()  # appends that a flush does not cover


@dataclass(slots=True)
class _Zone:
    """A zone as it is on the medium for certain, and what may have happened since."""

    state: ZoneState = field(default_factory=ZoneState)
    data: bytearray = field(default_factory=bytearray)
    before: bytearray = field(
        default_factory=bytearray
    )  # what it held before its last reset: a lost block may show it
    pending: list[Operation] = field(default_factory=list)


class Medium:
    """What is stored for certain, and what is not yet."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.zones = [_Zone() for _ in range(geometry.zone_count)]

    def take(self, operation: Operation) -> None:
        """Follow the device by one operation."""
        if operation.kind != "flush":
            for zone in operation.zones:
                self.zones[zone].pending.append(operation)
            return
        for stored in self.zones:
            covered = 0
            for pending in stored.pending:
                if pending.number in operation.running:
                    break
                covered += 1
            for pending in stored.pending[:covered]:
                self._settle(stored, pending, len(pending.data))
            del stored.pending[:covered]

    def _settle(self, zone: _Zone, operation: Operation, length: int) -> None:
        """Let the first `length` bytes of an append, or all of anything else, have happened."""
        if operation.kind == "append":
            if not length:
                return
            assert operation.offset == len(zone.data), "appends of a zone happen in their order"
            zone.data += operation.data[:length]
            condition = Condition.CLOSED
            if len(zone.data) == self.geometry.zone_capacity:
                condition = Condition.FULL
            zone.state = ZoneState(condition, len(zone.data), zone.state.resets)
        elif operation.kind == "finish":
            zone.state = ZoneState(Condition.FULL, zone.state.pointer, zone.state.resets)
        else:
            # An empty zone has nothing to reset, and does not count it.
            if zone.state.condition != Condition.EMPTY:
                zone.state = ZoneState(resets=zone.state.resets + 1)
            zone.before, zone.data = zone.data, bytearray()

    def after_cut(self, rng: random.Random) -> tuple[list[ZoneState], dict[int, bytearray]]:
        """Return states and contents as they might be when the power comes back."""
        states: list[ZoneState] = []
        contents: dict[int, bytearray] = {}
        for index, zone in enumerate(self.zones):
            state, data = (
                self._lucky(rng, zone) if zone.pending else (zone.state, bytearray(zone.data))
            )
            if rng.random() < GHOSTS:  # what a reset has not cleared yet
                data += zone.before[len(data) :]
            states.append(copy.copy(state))
            if data:
                contents[index] = data
        return states, contents

    def _lucky(self, rng: random.Random, zone: _Zone) -> tuple[ZoneState, bytearray]:
        kept = self._kept(rng, len(zone.pending))
        now = copy.copy(zone)
        now.data = bytearray(zone.data)
        stable = len(zone.data)
        for i, operation in enumerate(zone.pending[:kept]):
            length = len(operation.data)
            if length and i == kept - 1 and rng.random() < 0.2:  # only appends have data
                length = rng.randrange(0, length, BLOCK)
            self._settle(now, operation, length)
            stable = min(stable, len(now.data)) if operation.kind == "reset" else stable
        data = now.data
        share = rng.choice(TEARING)
        for at in range(stable, len(data), BLOCK):
            if rng.random() < share:
                data[at : at + BLOCK] = self._torn(rng, now, at)
        ghosts = zone.pending[kept:] if rng.random() < GHOSTS else []
        for operation in ghosts:
            if operation.kind != "append" or operation.offset != len(data):
                break
            data += operation.data
        return now.state, data

    @staticmethod
    def _kept(rng: random.Random, count: int) -> int:
        chance = rng.random()
        if chance < KEEP_ALL:
            return count
        return 0 if chance < KEEP_ALL + KEEP_NONE else rng.randint(0, count)

    @staticmethod
    def _torn(rng: random.Random, zone: _Zone, at: int) -> bytes:
        kind = rng.randrange(3)
        if kind == 0:
            return bytes(BLOCK)
        if kind == 1:
            return rng.randbytes(BLOCK)
        return bytes(zone.before[at : at + BLOCK]).ljust(BLOCK, b"\0")


@dataclass
class Fault:
    """Operations of these kinds on these zones fail with an errno, so many times.

    Kinds: append, flush, reset, finish, close, read. `landed`: bytes of a failing append that get
    there, zones of a failing reset that are reset.
    """

    kinds: frozenset[str]
    zones: frozenset[int] | None = None  # None: any
    error: int = errno.EIO
    times: float = math.inf
    landed: int = 0
    after: int = 0  # how many get through before

    def strikes(self, kind: str, zones: Iterable[int]) -> bool:
        """Whether the operation fails; one of the times is used up then."""
        if kind not in self.kinds or self.times <= 0:
            return False
        if self.zones is not None and self.zones.isdisjoint(zones):
            return False
        if self.after:
            self.after -= 1
            return False
        self.times -= 1
        return True


class Hold:
    """Stops the next operation of a kind until told to go on."""

    def __init__(self) -> None:
        self.reached = trio.Event()
        self.go = trio.Event()


class FaultDevice(MemoryDevice):
    """`delay` returns how many turns other tasks get before an operation ends; None: it ends at
    once. Cuts the power instead of operation number `cut_at`."""

    def __init__(
        self,
        geometry: Geometry,
        name: str = "mem",
        *,
        delay: Callable[[], int] | None = None,
        cut_at: int | None = None,
    ) -> None:
        super().__init__(geometry, name)
        self.delay = delay
        self.cut_at = cut_at
        self.faults: list[Fault] = []
        self.lost: set[tuple[int, int]] = set()  # zone, block
        self.history: list[Operation] = []
        self.medium = Medium(geometry)
        self.origin: tuple[list[ZoneState], dict[int, bytearray]] | None = None
        self._holds: dict[str, Hold] = {}
        self._running: dict[int, int] = {}  # append → its zone, in the order of their calls
        self._ended: dict[int, trio.Event] = {}  # zone → when its newest append has ended
        self._doomed: set[int] = set()  # zones where an append on its way will fail

    # Planning

    def fail(
        self,
        *kinds: str,
        zones: Iterable[int] | None = None,
        error: int = errno.EIO,
        times: float = math.inf,
        landed: int = 0,
    ) -> Fault:
        """Let operations fail from now on; `faults.clear()` ends that."""
        where = None if zones is None else frozenset(zones)
        fault = Fault(frozenset(kinds), where, error, times, landed)
        self.faults.append(fault)
        return fault

    def vanish(self) -> None:
        """The device is gone."""
        self.fail("append", "flush", "reset", "finish", "close", "read", error=errno.ENODEV)

    def turn(self, zone: int, condition: Condition) -> None:
        """Make a zone READ_ONLY or OFFLINE, as a worn device does."""
        self.rules.set_condition(zone, condition)

    def hold(self, kind: str) -> Hold:
        """Stop the next operation of a kind before it ends."""
        held = self._holds[kind] = Hold()
        return held

    def damage(self, zone: int, byte: int, bit: int = 0) -> None:
        """Flip one bit of what is stored."""
        self._zones[zone][byte] ^= 1 << bit

    def lose(self, zone: int, block: int) -> None:
        """Let every read of one block fail."""
        self.lost.add((zone, block))

    def roll_back(self, zone: int, pointer: int) -> None:
        """Lose what is stored from a byte on, as a device does that lies about its flushes."""
        stored = self.medium.zones[zone]
        assert not stored.pending, "only what was flushed is there to be lost"
        self.rules.states[zone].pointer = pointer
        del self._zones[zone][pointer:]
        stored.data, stored.state.pointer = stored.data[:pointer], pointer

    # After a power cut

    @property
    def operations(self) -> int:
        """How many operations there were."""
        return len(self.history)

    def after_cut(self, rng: random.Random) -> Self:
        """Return the device as it might come back if the power went now."""
        return self.revived(self.medium, rng)

    def revived(self, medium: Medium, rng: random.Random) -> Self:
        """Return this device as it might come back with what a medium holds."""
        states, contents = medium.after_cut(rng)
        device = type(self)(self.geometry, self.name)
        device.origin = states, {zone: bytearray(data) for zone, data in contents.items()}
        device.rules = ZoneRules(self.name, self.geometry, [copy.copy(s) for s in states])
        device._zones = contents
        device.medium = device.fresh_medium()
        return device

    def fresh_medium(self) -> Medium:
        """Return the medium as it was before the first operation."""
        medium = Medium(self.geometry)
        if self.origin is not None:
            for index, state in enumerate(self.origin[0]):
                stored = medium.zones[index]
                stored.state = copy.copy(state)
                stored.data = self.origin[1].get(index, bytearray())[: state.pointer]
        return medium

    # Operations

    def _strike(self, kind: str, zones: Sequence[int]) -> Fault | None:
        if self.cut_at is not None and kind != "read" and self.operations >= self.cut_at - 1:
            raise PowerCut
        return next((f for f in self.faults if f.strikes(kind, zones)), None)

    def _check(self, kind: str, zones: Sequence[int] = ()) -> None:
        fault = self._strike(kind, zones)
        if fault is not None:
            raise self._error(kind, zones, fault.error)

    def _error(self, kind: str, zones: Sequence[int], number: int) -> DeviceError:
        where = f" of zone {', '.join(map(str, zones))}" if zones else ""
        return device_error(self.name, kind + where, OSError(number, ""))

    def _record(self, kind: str, zones: Sequence[int] = (), **details: Any) -> Operation:
        operation = Operation(self.operations + 1, kind, tuple(zones), **details)
        self.history.append(operation)
        self.medium.take(operation)
        return operation

    async def _linger(self, kind: str) -> None:
        held = self._holds.pop(kind, None)
        if held is not None:
            held.reached.set()
            await held.go.wait()
        for _ in range(self.delay() if self.delay is not None else 0):
            await trio.lowlevel.checkpoint()

    def append(
        self, zone: int, offset: int, data: memoryview, header: bytes = b""
    ) -> Awaitable[Sums]:
        fault = self._strike("append", (zone,))
        try:
            length = check_append(self.name, zone, data, header)
            pending = self.rules.begin_append(zone, offset, length)
        except RetainzError as error:
            return refused(error)
        sums = self._store(zone, offset, data, header)
        stored = bytes(self._zones[zone][offset : offset + length])
        landed = length if fault is None else min(fault.landed, length) // BLOCK * BLOCK
        landed = 0 if zone in self._doomed else landed
        if fault is not None:
            self._doomed.add(zone)
        operation = self._record("append", (zone,), offset=offset, data=stored[:landed])
        landing = _Landing(self, zone, pending, operation, sums, fault, data)
        if self.delay is None and "append" not in self._holds and not self._ended:
            landing.end()
        else:
            landing.wait_for(self._ended.get(zone))
            self._ended[zone] = landing.ended
            self._running[operation.number] = zone
        return landing

    def _landed(self, landing: _Landing) -> None:
        """The append has ended, well or badly."""
        zone = landing.zone
        self._running.pop(landing.operation.number, None)
        if self._ended.get(zone) is landing.ended:
            del self._ended[zone]
        if zone not in self._ended:
            self._doomed.discard(zone)
        if landing.pending.lost:
            self.rules.fail_append(zone)
            landing.error = ZoneRuleError(self.name, zone, "append behind one that failed")
        elif landing.fault is not None:
            self.rules.fail_append(zone)
            state = self.rules.states[zone]
            state.pointer += len(landing.operation.data)
            landing.error = self._error("append", (zone,), landing.fault.error)
        else:
            self.rules.end_append(zone)
            self._statistics["appended_bytes"] += landing.pending.length

    async def read(self, zone: int, offset: int, length: int, sums: bytes = b"") -> memoryview:
        self._check("read", (zone,))
        blocks = range(offset // BLOCK, (offset + length) // BLOCK)
        if any((zone, block) in self.lost for block in blocks):
            raise self._error("read", (zone,), errno.EIO)
        resets = self.rules.states[zone].resets
        await self._linger("read")
        data = await super().read(zone, offset, length, sums)
        await self._linger("read")
        assert self.rules.states[zone].resets == resets, f"zone {zone} was reset while it was read"
        return data

    async def flush(self) -> None:
        running = frozenset(self._running)
        await self._linger("flush")
        self._check("flush")
        await super().flush()
        self._record("flush", running=running)
        await self._linger("flush")

    async def reset(self, zones: Sequence[int]) -> None:
        fault = self._strike("reset", zones)
        done = zones if fault is None else zones[: fault.landed]
        await self._linger("reset")
        if done:
            await super().reset(done)
            self._record("reset", done)
        await self._linger("reset")
        if fault is not None:
            raise self._error("reset", zones, fault.error)

    async def finish(self, zone: int) -> None:
        self._check("finish", (zone,))
        await self._linger("finish")
        await super().finish(zone)
        self._record("finish", (zone,))
        await self._linger("finish")

    async def close_zone(self, zone: int) -> None:
        self._check("close", (zone,))
        await self._linger("close")
        await super().close_zone(zone)


class _Landing:
    """An append on its way; those of a zone end in their order."""

    def __init__(
        self,
        device: FaultDevice,
        zone: int,
        pending: Pending,
        operation: Operation,
        sums: Sums,
        fault: Fault | None,
        data: memoryview,
    ) -> None:
        self.device = device
        self.zone = zone
        self.pending = pending
        self.operation = operation
        self.sums = sums
        self.fault = fault
        self.data = data
        self.error: RetainzError | None = None
        self.ended = trio.Event()
        self._before: trio.Event | None = None

    def wait_for(self, before: trio.Event | None) -> None:
        self._before = before

    def end(self) -> None:
        self.device._landed(self)
        self.ended.set()

    def __await__(self) -> Generator[Any, Any, Sums]:
        if not self.ended.is_set():
            yield from self._way().__await__()
        if self.error is not None:
            raise self.error
        return self.sums

    async def _way(self) -> None:
        await self.device._linger("append")
        if self._before is not None:
            await self._before.wait()
        length = len(self.operation.data)
        same = self.data[:length] == self.operation.data[: len(self.data)]
        assert same, "staged bytes changed while they were being written"
        self.end()
