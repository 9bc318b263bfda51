"""Random saves, failures, roll-backs and remounts, against a model of what must be there."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import trio.testing

from retainzfs.volume import ROOT, Options, Volume
from tests.helpers import Clock, formatted, mounted, noise, options, put, small_device
from tests.test_retention import directory
from tests.witness import WatchedDevice

pytestmark = [pytest.mark.volume, pytest.mark.power_cuts(3)]

NUMBERS = (8, 9, 10, 99, 100, 9900, 10000)
STEPS = 60


@dataclass
class Model:
    """What a stream with keep_last and reap holds."""

    keep: int
    complete: list[int] = field(default_factory=list)  # numbers, in the order of completion
    other: set[int] = field(default_factory=set)  # begun, and not complete
    anchors: set[int] = field(default_factory=set)

    @property
    def numbers(self) -> set[int]:
        return {*self.complete, *self.other}

    def completes(self, number: int) -> None:
        self.forget(number)
        self.complete.append(number)
        for old in [n for n in self.complete[: -self.keep] if n not in self.anchors]:
            self.complete.remove(old)

    def fails(self, number: int) -> None:
        self.forget(number)
        self.other.add(number)

    def forget(self, number: int) -> None:
        self.other.discard(number)
        if number in self.complete:
            self.complete.remove(number)


class Run:
    """The same done to a volume."""

    def __init__(self, device: WatchedDevice, mount: Options, rng: random.Random) -> None:
        self.device = device
        self.mount = mount
        self.rng = rng
        self.model = Model(rng.randint(1, 3))
        self.volume: Volume
        self.run = 0

    async def settle(self) -> None:
        """Return when what is due is reaped."""
        for _ in range(3):
            await self.volume.syncfs()
            await trio.testing.wait_all_tasks_blocked()

    async def check(self) -> None:
        await self.settle()
        rows = {row["number"]: row["state"] for row in self.volume.generations(self.run)}
        whole = {number for number, state in rows.items() if state in ("complete", "retired")}
        assert whole == set(self.model.complete)
        assert rows.keys() == self.model.numbers
        names = {name for name, _ in self.volume.entries(self.run)}
        assert names == {b"step-%d" % number for number in self.model.numbers}

    async def save(self) -> None:
        """Save a number, perhaps again, perhaps in what a failed save left."""
        number = self.rng.choice(NUMBERS)
        step = await self._shard(number)
        if any(name == b".metadata" for name, _ in self.volume.entries(step)):
            await self.volume.unlink(step, b".metadata")
        await put(self.volume, step, b".metadata", b"m" * 300)
        self.model.completes(number)

    async def tear(self) -> None:
        """Come no further than the shard, perhaps one that was whole."""
        number = self.rng.choice(NUMBERS)
        await self._shard(number)
        self.model.fails(number)

    async def _shard(self, number: int) -> int:
        name = b"step-%d" % number
        if number not in self.model.numbers:
            step = await directory(self.volume, name, self.run)
            await put(self.volume, step, b"shard", noise(9000, number))
            return step
        step = self.volume.lookup(self.run, name).ino
        shard = self.volume.lookup(step, b"shard").ino
        self.volume.open(shard)
        await self.volume.setattr(shard, size=0)
        await self.volume.write(shard, 0, noise(9000, number))
        await self.volume.flush(shard)
        self.volume.close(shard)
        return step

    async def delete(self) -> None:
        if self.model.numbers:
            number = self.rng.choice(sorted(self.model.numbers))
            name = b"step-%d" % number
            step = self.volume.lookup(self.run, name).ino
            for inside, _ in self.volume.entries(step):
                await self.volume.unlink(step, inside)
            await self.volume.rmdir(self.run, name)
            self.model.forget(number)
            self.model.anchors.discard(number)

    async def anchor(self) -> None:
        if self.model.numbers:
            number = self.rng.choice(sorted(self.model.numbers))
            step = self.volume.lookup(self.run, b"step-%d" % number).ino
            await self.volume.setxattr(step, b"user.retainz.anchor", b"1")
            self.model.anchors.add(number)

    async def go(self, steps: int) -> None:
        """Do random things until a remount."""
        async with mounted(self.device, self.mount) as self.volume:
            if not self.run:
                keep = b"%d" % self.model.keep
                self.run = await directory(self.volume, b"run", keep_last=keep, reap=b"1")
                await self.save()
            self.run = self.volume.lookup(ROOT, b"run").ino
            await self.check()
            for _ in range(steps):
                acts = (self.save, self.save, self.save, self.tear, self.delete, self.anchor)
                await self.rng.choice(acts)()
                await self.check()


@pytest.mark.parametrize("seed", range(12))
async def test_what_is_kept_is_what_policy_says(seed: int) -> None:
    rng = random.Random(seed)
    run = Run(await formatted(small_device()), options(Clock()), rng)
    for _ in range(3):
        await run.go(STEPS // 3)
