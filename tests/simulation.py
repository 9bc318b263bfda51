"""Crash simulation: run a workload once, then cut the power behind every operation of its device.

    simulate(seed)        one workload on one device, deterministic
    Sweep(...).run()      every moment of it: does the device that comes back keep every promise?

A moment is a number of device operations. What comes back then is drawn from a seed, mounted,
checked (`fsck`, the witness), written to, unmounted, mounted again; now and then the power fails
again while that goes on. docs/design/crashes.md says what is promised.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import trio
from trio.testing import MockClock

from retainzfs import errors, fsck
from retainzfs.device import Geometry
from retainzfs.device.faults import Medium
from retainzfs.journal import metadata_zones
from retainzfs.volume import ROOT, Options, Volume
from tests.helpers import DIRECTORY, FILE, UUID, content
from tests.witness import Violation, WatchedDevice, WatchedVolume, Witness
from tests.workload import Actor

T = TypeVar("T")
GEOMETRY = Geometry(256 << 10, 224 << 10, 40, 8, 12)
GEOMETRIES = (GEOMETRY, Geometry(256 << 10, 256 << 10, 32, 4, 6))
STEPS = 80
FAILING = 0.25  # share of the workloads whose device fails now and then
# Share of the moments after which all is mounted once more, and the power fails again meanwhile.
WATCHED = 0.05
AGAIN_CUTS = 2
PATIENCE_S = 600.0  # simulated: a check that takes longer hangs


def deterministic(seed: int, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Run trio so that only the seed decides whose turn it is; time passes when all wait."""
    trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    trio._core._run._r.seed(seed)
    return trio.run(function, *arguments, clock=MockClock(autojump_threshold=0))


def options() -> Options:
    start_ns = 10**18

    def wall_ns() -> int:
        return start_ns + int(trio.current_time() * 1e9)

    return Options(wall_ns=wall_ns, monotonic_s=trio.current_time)


@dataclass
class Simulated:
    """A workload that was run. `formatted` is the moment from which on there is a volume."""

    seed: int
    device: WatchedDevice
    witness: Witness
    formatted: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    facts: dict[str, int] = field(default_factory=dict)


def simulate(seed: int, steps: int = STEPS) -> Simulated:
    """Format, mount, run up to three actors at once, unmount, mount, a little more, unmount."""
    return deterministic(seed, _simulate, seed, steps)


async def _simulate(seed: int, steps: int) -> Simulated:
    rng = random.Random(seed)
    delays = random.Random(seed + 1)
    geometry = GEOMETRIES[seed % len(GEOMETRIES)]
    device = WatchedDevice(geometry, delay=lambda: delays.choice((0, 0, 0, 1, 3)))
    device.witness = witness = Witness(device)
    out = Simulated(seed, device, witness)
    await device.start()
    await Volume.format(device, uuid=UUID, now_ns=1)
    out.formatted = device.operations
    if rng.random() < FAILING:
        _wear(device, rng)
    for part, count in (("first", steps), ("second", steps // 4)):
        async with WatchedVolume.mounted(device, options()) as volume:
            assert isinstance(volume, WatchedVolume), "its calls are watched"
            async with trio.open_nursery() as nursery:
                for number in range(rng.choice((1, 1, 2, 3))):
                    name = f"{part}{number}".encode()
                    nursery.start_soon(_act, volume, name, count, rng.randrange(1 << 30), out)
            out.facts = _facts(volume, out.facts)
    return out


def _wear(device: WatchedDevice, rng: random.Random) -> None:
    """Let some commands fail once, and a zone for good: nobody who saves may notice.

    A run that fails in three zones is given up, so there are no more.
    """
    zones = range(metadata_zones(device.geometry.zone_count), device.geometry.zone_count)
    for kind in ("append", "finish", "reset"):
        device.fail(kind, zones=rng.sample(zones, 8), times=1, landed=rng.choice((0, 4096, 8192)))
    device.fail("append", "reset", zones={rng.choice(zones)})


async def _act(volume: WatchedVolume, name: bytes, steps: int, seed: int, out: Simulated) -> None:
    top = await volume.make(ROOT, name, DIRECTORY, 0, 0)
    actor = Actor(volume, top.ino, random.Random(seed))
    await actor.prepare()
    for _ in range(steps):
        await actor.step()
    out.kinds.update(actor.kinds)


def _facts(volume: Volume, before: dict[str, int]) -> dict[str, int]:
    now = {
        "relocations": volume.reclaim.collections,
        "reset zones": volume.reclaim.resets,
        "journal switches": volume.journal.position,
        "commit rounds": volume.committer.rounds,
    }
    return {name: number + before.get(name, 0) for name, number in now.items()}


def cut(device: WatchedDevice, seed: int, moments: int) -> list[str]:
    """Cut the power at random moments of what a test did; return the violations."""
    if device.witness is None or not device.operations:
        return []
    drawn = random.Random(seed).choices(range(device.operations + 1), k=moments)
    return Sweep(Simulated(seed, device, device.witness, device.formatted), drawn).run().violations


@dataclass
class Sweep:
    """Looks at moments of a simulated workload; `moments` None is every one."""

    simulated: Simulated
    moments: Iterable[int] | None = None
    points: int = 0
    acknowledged: int = 0  # acknowledged operations that were checked, summed over the points
    violations: list[str] = field(default_factory=list)

    def run(self) -> Sweep:
        return deterministic(self.simulated.seed, self._run)

    async def _run(self) -> Sweep:
        device, witness = self.simulated.device, self.simulated.witness
        medium = Medium(device.geometry)
        wanted = None if self.moments is None else set(self.moments)
        for at in range(device.operations + 1):
            if at:
                medium.take(device.history[at - 1])
            if wanted is None or at in wanted:
                rng = random.Random(f"{self.simulated.seed} {at}")
                where = f"seed {self.simulated.seed}, cut behind operation {at}"
                whole = at >= self.simulated.formatted
                await self._look(device, witness, medium, at, rng, where, formatted=whole)
        return self

    async def _look(
        self,
        device: WatchedDevice,
        witness: Witness,
        medium: Medium,
        at: int,
        rng: random.Random,
        where: str,
        *,
        formatted: bool = True,
        again: bool = True,
    ) -> None:
        self.points += 1
        self.acknowledged += sum(floor[0] <= at for floor in witness.floors)
        survivor = device.revived(medium, rng)
        assert isinstance(survivor, WatchedDevice), "it is watched too"
        try:
            with trio.fail_after(PATIENCE_S):
                await survivor.start()
                if not formatted and await _unformatted(survivor):
                    return
                watched = await check(survivor, witness, at, rng)
        except Exception as error:  # whatever it is, it is told with its seed
            self.violations.append(f"{where}: {_told(error)}")
            return
        if again and watched:
            await self._again(survivor, rng, where)

    async def _again(self, device: WatchedDevice, rng: random.Random, where: str) -> None:
        """Cut the power during what came after the first cut."""
        witness = device.witness
        assert witness is not None, "the check told the witness what it found"
        witness.rewind()
        moments = sorted(
            rng.sample(range(device.operations + 1), min(AGAIN_CUTS, device.operations))
        )
        medium = device.fresh_medium()
        done = 0
        for at in moments:
            for operation in device.history[done:at]:
                medium.take(operation)
            done = at
            once_more = f"{where}, again behind operation {at} of the recovery"
            await self._look(device, witness, medium, at, rng, once_more, again=False)


async def _unformatted(device: WatchedDevice) -> bool:
    """Whether a cut during mkfs left no volume; then mkfs must work again."""
    with suppress(errors.RetainzError):
        async with Volume.mounted(device, options()) as volume:
            assert not volume.entries(ROOT), "a new volume is empty"
            return False
    await Volume.format(device, uuid=UUID, now_ns=1)
    async with Volume.mounted(device, options()) as volume:
        assert not volume.entries(ROOT), "a new volume is empty"
    return True


async def check(device: WatchedDevice, witness: Witness, at: int, rng: random.Random) -> bool:
    """Hold what came back to what was promised; then use it.

    Returns whether the device has a witness of its own now, for whom all that was found was there
    for good.
    """
    watched = rng.random() < WATCHED
    if watched:  # a mount finds the same; fsck does it by itself
        report = await fsck.examine(device, scrub=True)
        if report.damaged:
            raise Violation("; ".join(str(f) for f in report.findings if f.damage))
    kind = WatchedVolume if watched else Volume
    async with kind.mounted(device, options()) as volume:
        problems = list(fsck.structure(device, volume.namespace))
        if problems:
            raise Violation("; ".join(problems))
        await witness.verify(volume, at)
        if watched:
            device.witness = await Witness.of(device, volume)
        await use(volume, rng)
    if watched:
        assert device.witness is not None, "it was just called"
        async with Volume.mounted(device, options()) as volume:
            await device.witness.verify(volume, device.operations)
    return watched


async def use(volume: Volume, rng: random.Random) -> None:
    """The volume takes a new save."""
    data = rng.randbytes(90_000)
    name = b"after-%d" % rng.randrange(1 << 60)
    ino = (await volume.make(ROOT, name, FILE, 0, 0)).ino
    while True:
        try:
            await volume.write(ino, 0, data)
            break
        except errors.NoSpace:
            await _delete_largest(volume)
    await volume.fsync(ino)
    if await content(volume, ino) != data:
        raise Violation("a new file does not hold what was written to it")


async def _delete_largest(volume: Volume) -> None:
    places = []
    for inode in [i for i in volume.namespace.inodes.values() if i.is_dir]:
        for name, ino in volume.entries(inode.ino):
            if volume.inode(ino).is_file:
                places.append((volume.inode(ino).size, inode.ino, name))
    size, parent, name = max(places)
    if not size:
        raise Violation("there is no space, and no file that could be deleted for it")
    await volume.unlink(parent, name)


def _told(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
