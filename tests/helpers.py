"""What volume tests share: a volume on an in-memory device, and crashes of that device."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from operator import add
from typing import Any, TypeVar

import trio
import trio.testing

from retainzfs.device import Geometry, Sums
from retainzfs.device.memory import MemoryDevice
from retainzfs.device.rules import ZoneRules, ZoneState
from retainzfs.errors import DeviceError
from retainzfs.journal import METADATA_ZONES_MIN
from retainzfs.lanes import IN_FLIGHT
from retainzfs.layout import BLOCK
from retainzfs.namespace import Run
from retainzfs.volume import ROOT, Options, Volume
from retainzfs.zones import Kind, Totals

FILE = 0o100644
DIRECTORY = 0o040755
UUID = bytes(range(16))
D = TypeVar("D", bound=MemoryDevice)


class Clock:
    """Time that moves only when told, a little with every look."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self.time_s = start_s

    def monotonic_s(self) -> float:
        self.time_s += 1e-6
        return self.time_s

    def wall_ns(self) -> int:
        return int(self.monotonic_s() * 1e9)


def options(clock: Clock | None = None, **changes: Any) -> Options:
    clock = clock or Clock()
    return Options(wall_ns=clock.wall_ns, monotonic_s=clock.monotonic_s, **changes)


def small_device(
    zones: int = 48, zone_size: int = 256 << 10, max_active: int = 14, max_open: int = 8
) -> MemoryDevice:
    return MemoryDevice(Geometry(zone_size, zone_size, zones, max_open, max_active))


async def formatted(device: D) -> D:
    await device.start()
    await Volume.format(device, uuid=UUID, now_ns=1)
    return device


@asynccontextmanager
async def mounted(device: MemoryDevice, **changes: Any) -> AsyncIterator[Volume]:
    async with Volume.mounted(device, options(**changes)) as volume:
        yield volume


async def put(volume: Volume, parent: int, name: bytes, data: bytes, piece: int = 1 << 20) -> int:
    """Create a file and write it; return its inode number."""
    inode = await volume.make(parent, name, FILE, 0, 0)
    volume.open(inode.ino)
    for at in range(0, len(data), piece):
        await volume.write(inode.ino, at, data[at : at + piece])
    await volume.flush(inode.ino)
    volume.close(inode.ino)
    return inode.ino


async def content(volume: Volume, ino: int) -> bytes:
    return bytes(await volume.read(ino, 0, volume.inode(ino).size + 1))


async def tree(volume: Volume, ino: int = ROOT, base: bytes = b"") -> dict[bytes, bytes | None]:
    """Return path → content, None for a directory."""
    out: dict[bytes, bytes | None] = {}
    for name, child in volume.entries(ino):
        path = base + b"/" + name
        if volume.inode(child).is_dir:
            out[path] = None
            out.update(await tree(volume, child, path))
        else:
            out[path] = await content(volume, child)
    return out


async def check_quiescent(volume: Volume) -> None:
    """Commit everything; then nobody waits, nothing is promised, and all accounts add up."""
    for _ in range(3):  # a commit frees zones, and to reset them is one more record
        await volume.syncfs()
        await trio.testing.wait_all_tasks_blocked()
    _check_nobody_waits(volume)
    _check_zones(volume)
    _check_runs(volume)
    for inode in volume.namespace.inodes.values():
        assert inode.nlink or inode.handles, f"inode {inode.ino} has neither name nor handle"
    for generation, members in volume.retention.members.items():
        gone = members - volume.namespace.inodes.keys()
        assert not gone, f"generation {generation} counts files that are gone: {gone}"


def _check_nobody_waits(volume: Volume) -> None:
    stream, lanes, committer = volume.stream, volume.lanes, volume.committer
    assert not committer.dirty, f"inodes stay dirty after a commit: {sorted(committer.dirty)}"
    assert not committer._waiting, "a commit is being waited for"
    assert not committer._queue, "records are queued after a commit"
    assert not stream._sealed, "sealed runs have not reached the device"
    assert not stream._events, "events of runs are left behind"
    slots = len(stream._free) + len(stream._open) + stream.slots_left
    assert slots == stream.slots, f"{slots} staging slots are left of {stream.slots}"
    assert not any(lanes.admitted.values()), f"admitted bytes are left: {lanes.admitted}"
    for lane in lanes.lanes.values():
        work = [*lane.queue, *lane.redo]
        assert not work, f"lane {lane.key} has runs to write"
        assert not lane.working, f"lane {lane.key} works on nothing"
        assert lane.room.value == IN_FLIGHT, f"lane {lane.key} counts an append in flight"
        known = lane.key <= 0 or lane.key in volume.namespace.generations
        assert known or lane.open, f"lane {lane.key} outlived its generation"
    stages = (stream.stage(inode) for inode in volume.namespace.inodes.values())
    locks = [stage.lock for stage in stages] + [*lanes._turns.values(), lanes._lock]
    locks += [volume.reclaim._collecting, volume.reclaim._resetting]
    assert not any(lock.locked() for lock in locks), "a lock is held"


def _check_zones(volume: Volume) -> None:
    live = Counter[tuple[int, int]]()  # (zone, generation) → bytes
    for inode in volume.namespace.inodes.values():
        assert not inode.shadow, f"inode {inode.ino} holds overwritten blocks after a commit"
        for extent in inode.extents:
            if not extent.run.failed:
                live[extent.run.zone, inode.generation] += extent.blocks * BLOCK
    totals = Totals()
    for zone in volume.table.zones:
        if zone.kind is Kind.METADATA:
            continue
        assert not zone.pins, f"zone {zone.index} is pinned and nobody reads"
        assert not zone.reserved, f"zone {zone.index} has promises and nothing is staged"
        for generation in {g for z, g in live if z == zone.index} | zone.live.keys():
            told, held = zone.live.get(generation, 0), live[zone.index, generation]
            assert told == held, (
                f"zone {zone.index} counts {told} live bytes of generation {generation}, "
                f"extents hold {held}"
            )
        assert zone.live_bytes == sum(zone.live.values()), f"zone {zone.index}: its shares differ"
        totals = Totals(*map(add, totals, zone.totals()))
    assert volume.table.totals == totals, "the totals are not the sum of the zones"


def _check_runs(volume: Volume) -> None:
    held: dict[Run, Counter[int]] = {}
    for inode in volume.namespace.inodes.values():
        end = 0
        for extent in inode.extents:
            assert extent.blocks > 0, f"inode {inode.ino} has an empty extent"
            assert extent.block >= end, f"inode {inode.ino} has extents that overlap"
            end = extent.end
            held.setdefault(extent.run, Counter())[inode.ino] += extent.blocks
        assert inode.blocks == sum(e.blocks for e in inode.extents), f"inode {inode.ino}: blocks"
    for run, owners in held.items():
        assert run.owners == owners, f"{run} counts {run.owners}, extents say {dict(owners)}"
        assert run.held == owners.total(), f"{run} counts {run.held} blocks held"
    known = {run for runs in volume.namespace.runs.values() for run in runs.values()}
    assert known == {run for run in held if not run.failed}, "the index of runs is not what is held"


class FaultyDevice(MemoryDevice):
    """Refuses appends to `bad` zones, fails flushes while `broken`; with `gate` set, the next
    append to a data zone waits for it."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.bad: set[int] = set()
        self.broken = False
        self.gate: trio.Event | None = None
        self.waiting = trio.Event()

    async def ready(self, zone: int) -> None:
        if zone >= METADATA_ZONES_MIN and self.gate is not None:
            gate, self.gate = self.gate, None
            self.waiting.set()
            await gate.wait()

    def append(
        self, zone: int, offset: int, data: memoryview, header: bytes = b""
    ) -> Awaitable[Sums]:
        if zone in self.bad:
            raise DeviceError(self.name, f"write to zone {zone}", "Input/output error")
        return super().append(zone, offset, data, header)

    async def flush(self) -> None:
        if self.broken:
            raise DeviceError(self.name, "flush", "Input/output error")
        await super().flush()


def zones_of(volume: Volume, ino: int) -> set[int]:
    return {e.run.zone for e in volume.inode(ino).extents}


def damage(device: MemoryDevice, zone: int, byte: int) -> None:
    """Flip one bit of what the device stored."""
    device._zones[zone][byte] ^= 1


class CrashingDevice(MemoryDevice):
    """Cuts power at one operation and keeps what could come back: of each zone the flushed state,
    or a later one with some of its unflushed blocks torn."""

    def __init__(self, geometry: Geometry, cut_at: int | None = None) -> None:
        super().__init__(geometry)
        self.operations = 0
        self.cut_at = cut_at
        self._flushed: dict[int, tuple[ZoneState, bytes]] = {}
        self._touched: set[int] = set(range(geometry.zone_count))
        self._keep()

    def _keep(self) -> None:
        for zone in self._touched:
            state = copy.copy(self.rules.states[zone])
            self._flushed[zone] = (state, bytes(self._zones.get(zone, b"")))
        self._touched.clear()

    def _step(self, *zones: int) -> None:
        self.operations += 1
        if self.cut_at is not None and self.operations >= self.cut_at:
            raise PowerCut
        self._touched.update(zones)

    def append(
        self, zone: int, offset: int, data: memoryview, header: bytes = b""
    ) -> Awaitable[Sums]:
        self._step(zone)
        return super().append(zone, offset, data, header)

    async def flush(self) -> None:
        self._step()
        await super().flush()
        self._keep()

    async def reset(self, zones: Sequence[int]) -> None:
        self._step(*zones)
        await super().reset(zones)

    async def finish(self, zone: int) -> None:
        self._step(zone)
        await super().finish(zone)

    def after_cut(self, rng: random.Random) -> CrashingDevice:
        """Return the device as it comes back. Above a write pointer there may be bytes that nobody
        was told of."""
        states = []
        contents: dict[int, bytearray] = {}
        for zone in range(self.geometry.zone_count):
            state, data = self._flushed[zone]
            if zone in self._touched and rng.random() < 0.6:
                now = self.rules.states[zone]
                stable = state.pointer if now.resets == state.resets else 0
                state, data = now, self._torn(rng, zone, stable)
            elif zone in self._touched and self.rules.states[zone].resets == state.resets:
                data = bytes(self._zones.get(zone, data))
            states.append(copy.copy(state))
            contents[zone] = bytearray(data)
        device = CrashingDevice(self.geometry)
        device.rules = ZoneRules("mem", self.geometry, states)
        device._zones = contents
        device._touched = set(range(self.geometry.zone_count))
        device._keep()
        return device

    def _torn(self, rng: random.Random, zone: int, stable: int) -> bytes:
        data = bytearray(self._zones.get(zone, b""))
        share = rng.choice((0.0, 0.3, 1.0))
        for block in range(stable, len(data), 4096):
            if rng.random() < share:
                data[block : block + 4096] = bytes(4096)
        return bytes(data)


class PowerCut(BaseException):
    """The device stopped answering."""


@contextmanager
def until_power_cut() -> Iterator[None]:
    """Run a mount that a power cut ends."""
    try:
        yield
    except BaseExceptionGroup as group:
        if group.split(PowerCut)[1] is not None:
            raise
        return
    raise AssertionError("the power was not cut")
